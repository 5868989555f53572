"""What a report consists of, whatever it is rendered to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_layer.benchmarks.records import Line

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Cells are text; ``**bold**`` and `` `code` `` mean what they mean in Markdown.

    Attributes:
        caption: above it.
        header: column titles.
        rows: as many cells as the header has.
        left: columns that are words, not numbers.
        note: below it.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Series:
    """One line of a plot; ``floor``: dashed, of a measured ceiling."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    floor: bool = False


@dataclass(frozen=True)
class Plot:
    """``kind``: ``"lines"`` (log-log), ``"speedup"`` (x logarithmic) or ``"stack"`` (bars of parts, one for each x)."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: str = "lines"


@dataclass
class Section:
    """A heading with text, tables and plots; ``level`` 1: part of the last section of level 0 before it."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    level: int = 0


def grouped(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    """Lines by ``key``, in order of first appearance."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return found


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits, never fewer than the integer part has; a dash for None."""
    if value is None:
        return MISSING
    size = abs(value)
    decimals = max(0, digits - len(str(int(size)))) if size >= 1 else digits - 1
    return f"{value:.{decimals}f}"


def provenance_text(lines: Sequence[Line]) -> list[str]:
    """When, from which commits and with which versions lines were measured, and what the numbers do not mean."""
    newest = max(lines, key=lambda line: line["date"])
    days = sorted({line["date"][:10] for line in lines})
    commits = sorted({line.get("commit") or "unknown" for line in lines})
    versions, driver = newest.get("versions", {}), newest["machine"].get("driver")
    text = f"{days[0]}{f' to {days[-1]}' if len(days) > 1 else ''}, commit {', '.join(commits)}"
    text += f"; torch {versions['torch']}" if versions.get("torch") else ""
    if versions.get("cuda"):
        text += f", CUDA {versions['cuda']}" + (f", driver {driver}" if driver else "")
    if versions.get("nvidia-cutlass-dsl"):
        text += f", CuTe DSL {versions['nvidia-cutlass-dsl']}"
    notes = list(dict.fromkeys(line["note"] for line in lines if "note" in line))
    return [f"{text}.", *(f"**{note[0].upper()}{note[1:]}.**" for note in notes)]


# ceiling → (words, unit, digits)
CEILINGS = {
    "push_gbps": ("push", "GB/s a GPU and direction", 0),
    "pull_gbps": ("pull", "GB/s", 0),
    "flag_us": ("one-way flag", "µs", 2),
    "launch_us": ("empty kernel", "µs", 2),
    "copy_gbps": ("copy", "GB/s read and written", 0),
    "read_tbps": ("read", "TB/s", 2),
    "bf16_tflops": ("BF16 product", "TFLOP/s", 0),
    "fp8_tflops": ("FP8 product", "TFLOP/s", 0),
}


def ceilings_text(lines: Iterable[Line]) -> list[str]:
    """The measured ceilings of lines, as ranges over their runs."""
    found: dict[str, set[float]] = {}
    for line in lines:
        for name, value in (line.get("ceilings") or {}).items():
            if name in CEILINGS and value:  # a CPU has no launches
                found.setdefault(name, set()).add(round(value, CEILINGS[name][2]))
    parts = []
    for name, (words, unit, digits) in CEILINGS.items():
        if name in found:
            least, most = (f"{edge(found[name]):.{digits}f}" for edge in (min, max))
            parts.append(f"{words} {least if least == most else f'{least}–{most}'} {unit}")
    return [f"Ceilings, measured in the same runs: {', '.join(parts)}."] if parts else []


def failures_text(lines: Sequence[Line], describe_case: Callable[[Line], str]) -> list[str]:
    """Cases that failed, and peers that were not there."""
    texts = [f"{describe_case(line)}: failed: {line['error']}" for line in lines if "error" in line]
    reasons = {line["parameters"]["protocol"]: line["absent"] for line in lines if "absent" in line}
    for line in lines:
        reasons |= line.get("results", {}).get("peers_absent", {})
    absent = [f"Peer {name}: absent: {reason}." for name, reason in reasons.items()]
    return [*texts, *absent]
