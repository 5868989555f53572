"""What this machine can run, and why not (``moe-layer doctor``).

Everything is asked, nothing is tried: no kernel is compiled, no group made, no tensor put on a GPU.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

import moe_layer
from moe_layer.backend import architecture, kernel_entries
from moe_layer.benchmarks.shapes import get_shape
from moe_layer.comm.auto import sentinel_limit
from moe_layer.comm.layout import Capacity, WorkspaceLayout, align
from moe_layer.kernel_cache import ARCHITECTURES, dsl_available
from moe_layer.quant import available_formats, get_format

MIB = 1 << 20
ONE_SIDED = ("fence", "sentinel")
PACKAGES = ("torch", "numpy", "safetensors", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "transformers")
DSL = "nvidia-cutlass-dsl"
ONE_SIDED_REGION = "one-sided: Sentinel's slots, control"
INSTALL_DSL = "pip install 'moe-layer[cuda]'"


def diagnose(
    *,
    model: str = "deepseek_v41",
    ep_size: int = 8,
    max_tokens_per_rank: int = 4096,
    activation_format: str | None = None,
) -> dict[str, Any]:
    """Everything that ``moe-layer doctor`` prints, as plain values.

    Args:
        model: a name of :data:`~moe_layer.benchmarks.shapes.SHAPES` or a checkpoint, whose workspaces are sized.
        ep_size, max_tokens_per_rank: of the group to size them for.
        activation_format: of the dispatched rows; None: what the model implies.

    Raises:
        ConfigError: an unknown model, or a config that cannot be read.
    """
    gpus = _gpus()
    return {
        "versions": {"moe-layer": moe_layer.__version__, "python": platform.python_version(), **_versions()},
        "machine": _machine(),
        "gpus": gpus,
        "peer_access": _peer_access(len(gpus)),
        "transports": _transports(gpus),
        "backends": _backends(gpus),
        "workspace": workspace(
            model, ep_size=ep_size, max_tokens_per_rank=max_tokens_per_rank, activation_format=activation_format
        ),
    }


def workspace(
    model: str, *, ep_size: int, max_tokens_per_rank: int, activation_format: str | None = None
) -> dict[str, Any]:
    """Bytes of each communication region of one rank (paper §3.2): ep_size·T̂ slots each, payload rows 16-byte aligned.

    The last region, Sentinel's slots (for steps up to its measured crossover) and the control words, is the one-sided
    transports' alone; the others need the same with any transport.

    Args:
        model: a name of :data:`~moe_layer.benchmarks.shapes.SHAPES` or a checkpoint.
        ep_size: the paper's P.
        max_tokens_per_rank: the paper's largest T̂.
        activation_format: as in :func:`diagnose`.
    """
    shape = get_shape(model)
    if activation_format is not None:
        shape = replace(shape, activation_format=activation_format)
    hidden, top_k, data, scale = shape.hidden_size, shape.top_k, shape.data_bytes, shape.scale_bytes
    partial = hidden * (4 if shape.activation_format == "fp32" else 2)
    rows = {
        "dispatch: hidden states": data,
        "dispatch: scales": scale,
        "dispatch: expert ids": 4 * top_k,
        "dispatch: router weights": 4 * top_k,
        "combine: partial results": partial,
    }
    slots = ep_size * max_tokens_per_rank
    regions = {
        region: slots * (row if region in ("dispatch: expert ids", "dispatch: router weights") else align(row))
        for region, row in rows.items()
    }
    sentinel = min(max_tokens_per_rank, sentinel_limit(ep_size, data + scale + partial, top_k))
    capacity = Capacity(ep_size, max_tokens_per_rank, max(1, sentinel), data, scale, top_k, partial)
    regions[ONE_SIDED_REGION] = WorkspaceLayout(capacity).total_bytes - sum(regions.values())
    return {
        "model": model,
        "ep_size": ep_size,
        "max_tokens_per_rank": max_tokens_per_rank,
        "hidden_size": hidden,
        "top_k": top_k,
        "activation_format": shape.activation_format,
        "row_bytes": rows,
        "region_bytes": regions,
        "total_bytes": sum(regions.values()),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["torch's CUDA"] = torch.version.cuda
    return found


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = architecture(torch.device("cuda", index))
        gpus.append({"index": index, "name": properties.name, "arch": arch, "memory_bytes": properties.total_memory})
    return gpus


def _peer_access(count: int) -> list[list[bool]]:
    """``[i][j]``: GPU i can load from and store to GPU j's memory."""
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    return "PyTorch sees no NVIDIA GPU (none there, or no driver)"


def _verdict(name: str, reason: str | None, instead: str = "") -> dict[str, Any]:
    """One line of a table: available unless there is a reason why not."""
    return {"name": name, "available": reason is None, "reason": reason or "", "instead": instead if reason else ""}


def _transports(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gloo = None if dist.is_available() and dist.is_gloo_available() else "this PyTorch has no gloo"
    if not (dist.is_available() and dist.is_nccl_available()):
        nccl: str | None = "this PyTorch has no NCCL"
    else:
        nccl = None if gpus else _no_gpu()
    one_sided = _one_sided(gpus)
    return [
        _verdict("loopback (one rank)", None),
        _verdict("collective over gloo (CPU, or GPU through the host)", gloo, "loopback"),
        _verdict("collective over NCCL (GPUs, across hosts)", nccl, "collective over gloo"),
        *(_verdict(f"{name} (one-sided, GPUs of one NVLink domain)", one_sided, "collective") for name in ONE_SIDED),
    ]


def _one_sided(gpus: list[dict[str, Any]]) -> str | None:
    """Why the one-sided protocols do not run between this machine's GPUs, or None if they do."""
    if not gpus:
        return _no_gpu()
    for gpu in gpus:
        if gpu["arch"] not in ARCHITECTURES:
            return f"no kernels for {gpu['name']} ({gpu['arch']}), only for {', '.join(ARCHITECTURES)}"
    if not dsl_available():
        return f"the CuTe DSL is not installed ({INSTALL_DSL})"
    if len(gpus) < 2:
        return "one GPU here, a group needs one a rank"
    apart = [(i, j) for i, row in enumerate(_peer_access(len(gpus))) for j, ok in enumerate(row) if not ok]
    return f"GPU {apart[0][0]} cannot access the memory of GPU {apart[0][1]}" if apart else None


def _backends(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each backend with its formats: the reference, then one per architecture that has kernels."""
    formats = available_formats()
    rows = [name for name in formats if get_format(name).is_activation_format]
    backends = [{**_verdict("reference (PyTorch, any device)", None), "weights": formats, "activations": rows}]
    present = {gpu["arch"] for gpu in gpus}
    for entry in kernel_entries():
        if not dsl_available():
            reason: str | None = f"the CuTe DSL is not installed ({INSTALL_DSL})"
        elif not gpus:
            reason = _no_gpu()
        else:
            reason = None if entry.arch in present else f"needs an {entry.arch} GPU; here: {', '.join(sorted(present))}"
        verdict = _verdict(f"{entry.arch} kernels", reason, "reference")
        backends.append({**verdict, "weights": sorted(entry.weights), "activations": sorted(entry.activations)})
    return backends


def print_report(report: dict[str, Any]) -> None:
    """The report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)

    def table(title: str, *columns: str) -> Table:
        console.print(f"[bold]{title}[/]")
        result = Table(box=None, pad_edge=False, show_header=bool(columns))
        for column in columns:
            result.add_column(column, justify="right" if column in ("MiB", "bytes a row") else "left")
        return result

    machine = report["machine"]
    memory = machine["memory_bytes"] / 2**30
    about = table("This machine")
    about.add_row("machine", f"{machine['system']} {machine['architecture']}, {machine['cpus']} CPUs, {memory:.0f} GiB")
    for name, found in report["versions"].items():
        missing = (
            "none" if name == "torch's CUDA" else f"not installed ({INSTALL_DSL})" if name == DSL else "not installed"
        )
        about.add_row(name, found or missing)
    gpus = report["gpus"]
    for gpu in gpus:
        note = "" if gpu["arch"] in ARCHITECTURES else ": no kernels for it, runs the PyTorch reference"
        about.add_row(
            f"GPU {gpu['index']}", f"{gpu['name']}, {gpu['arch']}, {gpu['memory_bytes'] / 2**30:.0f} GiB{note}"
        )
    if not gpus:
        about.add_row("GPU", f"none: {_no_gpu()}; layers run on the CPU")
    console.print(about, "")

    if len(gpus) > 1:
        peers = table("Peer access (row GPU reads and writes column GPU)", "", *(str(g["index"]) for g in gpus))
        for i, row in enumerate(report["peer_access"]):
            peers.add_row(str(i), *("self" if i == j else "yes" if ok else "no" for j, ok in enumerate(row)))
        console.print(peers, "")

    def state(line: dict[str, Any]) -> str:
        return "yes" if line["available"] else f"no: {line['reason']}; instead: {line['instead']}"

    transports = table("Transports", "transport", "runs here")
    for line in report["transports"]:
        transports.add_row(line["name"], state(line))
    console.print(transports)
    console.print(
        "protocol='auto' takes loopback for one rank; where each rank has a GPU of its own that runs them, sentinel "
        "for small steps and fence for large ones; else collective.",
        "",
    )

    backends = table("Compute", "backend", "weights", "activations", "runs here")
    for line in report["backends"]:
        backends.add_row(line["name"], " ".join(line["weights"]), " ".join(line["activations"]), state(line))
    console.print(backends, "")

    w = report["workspace"]
    sizes = table(
        f"Communication workspace of one rank: {w['model']}, {w['ep_size']} ranks, at most "
        f"{w['max_tokens_per_rank']} tokens a rank, {w['activation_format']} activations",
        "region",
        "bytes a row",
        "MiB",
    )
    for region, size in w["region_bytes"].items():
        sizes.add_row(region, str(w["row_bytes"].get(region, "")), f"{size / MIB:.1f}")
    sizes.add_row("total", "", f"{w['total_bytes'] / MIB:.1f}")
    console.print(sizes)
