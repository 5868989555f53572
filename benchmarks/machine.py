"""Where and from what a result was measured: the part of a JSON line that is the same for all of a run's lines."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import moe_layer

NOT_A_GPU = "measured on a CPU; the numbers mean nothing for GPUs"


def provenance(device_type: str) -> dict[str, Any]:
    """Date, commit, machine and versions, as values that ``json.dumps`` takes."""
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": _machine(device_type),
        "versions": {
            "moe-layer": moe_layer.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvidia-cutlass-dsl": _package("nvidia-cutlass-dsl"),
        },
    }
    if device_type == "cpu":
        record["note"] = NOT_A_GPU
    return record


def commit() -> str | None:
    """The source tree's git commit, with ``+`` where files differ from it; None outside a repository.

    ``MOE_LAYER_COMMIT`` overrides it, for trees that were copied without their repository.
    """
    given = os.environ.get("MOE_LAYER_COMMIT")
    if given:
        return given
    folder = str(Path(moe_layer.__file__).parent)
    found = _output("git", "-C", folder, "rev-parse", "HEAD")
    if found is None:
        return None
    # Scripts and results beside the packages do not change what was measured.
    changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no", "--", ":/*.py")
    return found[:12] + ("+" if changed else "")


def _machine(device_type: str) -> dict[str, Any]:
    if device_type == "cpu":
        return {"device": "cpu", "processor": platform.machine(), "cpus": os.cpu_count()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda",
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "link": link_of(_output("nvidia-smi", "topo", "-m")),
        "driver": (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0]
        or None,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
    }


def link_of(topology: str | None) -> str | None:
    """What connects GPUs 0 and 1 (``NV18``, ``PIX``, …), from the output of ``nvidia-smi topo -m``."""
    if topology is None:
        return None
    lines = [line.split() for line in topology.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), None)
    row = next((words for words in lines if words[:2] == ["GPU0", "X"]), None)
    if header is None or row is None or "GPU1" not in header:
        return None
    return row[1 + header.index("GPU1")]


def describe(record: dict[str, Any]) -> str:
    """A record's machine in a few words, for headings."""
    machine = record["machine"]
    if machine["device"] == "cpu":
        return f"CPU ({machine['cpus']} × {machine['processor']})"
    link = f", {machine['link']}" if machine.get("link") else ""
    return f"{machine['gpus']} × {machine['gpu']}{link}"


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip() or None
