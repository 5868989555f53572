"""Result lines: what every benchmark writes, read back.

A line is a JSON object: ``kind`` (a2a, layer, gemm, quant, memory, load), ``parameters`` (what was measured),
``results`` or ``error`` or ``absent`` (a peer that is not installed), ``ceilings`` of the same run, and ``date``,
``commit``, ``machine``, ``versions``, with a ``note`` where the numbers mean nothing for GPUs. ``results`` of what is
timed has ``us``, with ``min_us`` and ``max_us`` over repeats, and where there is a floor ``floor_us`` and ``ratio``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_layer.benchmarks.machine import describe

Line = dict[str, Any]
KINDS = ("a2a", "layer", "gemm", "quant", "memory", "load")
# How something was measured, not what.
PROCEDURE = ("warmup", "steps", "repeats", "seed")


def read_lines(files: Iterable[Path]) -> list[Line]:
    """All lines of the files, in order.

    Raises:
        ValueError: a line that is no result; names file and line.
        OSError: a file that cannot be read.
    """
    lines = []
    for file in files:
        try:
            texts = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: no text: {error}") from error
        for number, text in enumerate(texts, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
            if not _is_result(line):
                raise ValueError(f"{file}, line {number}: not a result of this library's benchmarks")
            lines.append(line)
    return lines


def _is_result(line: Any) -> bool:
    if not isinstance(line, dict) or line.get("kind") not in KINDS or not isinstance(line.get("date"), str):
        return False
    machine = line.get("machine")
    if not isinstance(line.get("parameters"), dict) or not isinstance(machine, dict):
        return False
    needed = ("cpus", "processor") if machine.get("device") == "cpu" else ("gpus", "gpu")
    return "device" in machine and all(name in machine for name in needed)


def case_of(line: Line) -> str:
    """What was measured and on what kind of machine: equal for lines that can be compared."""
    parameters = {name: value for name, value in line["parameters"].items() if name not in PROCEDURE}
    return json.dumps([line["kind"], describe(line), parameters], sort_keys=True)


def latest(lines: Iterable[Line]) -> list[Line]:
    """Of several lines of one case the latest, in the order of their first appearance."""
    found: dict[str, Line] = {}
    for line in lines:
        key = case_of(line)
        if key not in found or found[key]["date"] <= line["date"]:
            found[key] = line
    return list(found.values())


def measured(lines: Iterable[Line]) -> list[Line]:
    """Those with results."""
    return [line for line in lines if "results" in line]


def title_of(line: Line) -> str:
    """A case in a few words."""
    p = line["parameters"]
    parts = [line["kind"]]
    for name in ("model", "release", "format", "way", "stage", "operands", "weight_format", "activation_format"):
        if p.get(name):
            parts.append(str(p[name]))
    if p.get("routing", "perfect") not in ("perfect", "even"):
        parts.append(p["routing"])
    for name in ("tokens_per_rank", "tokens"):
        if name in p:
            parts.append(f"T={p[name]}")
    if "tile" in p:
        parts.append(f"tile {p['tile']}" + (f", cluster {p['cluster']}" if p["cluster"] > 1 else ""))
    if "protocol" in p:
        parts.append(p["protocol"])
    if p.get("quantize", "given") != "given":
        parts.append(p["quantize"])
    return " ".join(parts)
