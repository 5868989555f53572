"""Results beside earlier ones (``moe-layer bench --compare OLD.json``): ratios, and which cases are slower.

Without newer results every case of the old file is measured again, with the old line's own procedure. A case counts as
slower if every one of its repeats is slower than every old one, and its median by more than a threshold: what the
noise of both runs explains is not reported. Cases measured on another kind of machine are left out, and said to be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_layer.benchmarks.again import MAKERS, procedure_of
from moe_layer.benchmarks.bench import Bench
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, case_of, latest, measured, read_lines, title_of
from moe_layer.benchmarks.report.pieces import Section, Table, number
from moe_layer.benchmarks.show import FILE_WIDTH, print_sections
from moe_layer.benchmarks.show import run as show_run

OK, SLOWER, USER_ERROR = 0, 1, 2


@dataclass(frozen=True)
class Comparison:
    """One case: the old and the new line, new over old time, and whether both runs' noise leaves that in doubt."""

    old: Line
    new: Line
    threshold: float

    @property
    def ratio(self) -> float:
        ratio: float = self.new["results"]["us"] / self.old["results"]["us"]
        return ratio

    @property
    def verdict(self) -> str:
        """``"slower"``, ``"faster"``, or nothing where the runs overlap or differ by less than the threshold."""
        old, new = self.old["results"], self.new["results"]
        if new["min_us"] > old["max_us"] and self.ratio > 1 + self.threshold:
            return "slower"
        if new["max_us"] < old["min_us"] and self.ratio < 1 / (1 + self.threshold):
            return "faster"
        return ""


def compare(old: Iterable[Line], new: Iterable[Line], threshold: float) -> list[Comparison]:
    """The cases that both have, timed ones only, in the old order."""
    found = {case_of(line): line for line in measured(latest(new)) if is_timed(line)}
    return [
        Comparison(line, found[case_of(line)], threshold)
        for line in measured(latest(old))
        if case_of(line) in found and is_timed(line)
    ]


def is_timed(line: Line) -> bool:
    """Whether a line's results are a time, with its noise."""
    results = line["results"]
    return "min_us" in results and results["us"] > 0


def table(comparisons: Sequence[Comparison]) -> Section:
    """The comparison as a section of a report."""
    rows = [
        [
            title_of(c.old), f"{number(c.old['results']['us'], 4)} ± {c.old['results']['spread'] / 2:.1%}",
            f"{number(c.new['results']['us'], 4)} ± {c.new['results']['spread'] / 2:.1%}", f"{c.ratio:.3f}", c.verdict,
        ]
        for c in comparisons
    ]  # fmt: skip
    old = sorted({str(c.old.get("commit")) for c in comparisons})
    new = sorted({str(c.new.get("commit")) for c in comparisons})
    caption = f"old: {', '.join(old)}; new: {', '.join(new)}"
    note = "µs ± half the spread over repeats. Slower: every repeat is, and the median by more than the threshold."
    header = ["case", "old", "new", "new / old", ""]
    return Section("Comparison", tables=[Table(caption, header, rows, frozenset({0, 4}), note)])


def run(old_file: str, new_file: str | None = None, *, threshold: float = 0.03) -> int:
    """Compare and print.

    Returns:
        an exit code: 1 if a case is slower or failed, 2 if there is nothing to compare.
    """
    try:
        old = measured(latest(read_lines([Path(old_file)])))
        new = read_lines([Path(new_file)]) if new_file is not None else None
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    failed = False
    if new is None:
        new = []
        for again, sections in benches(old):
            with again as bench:
                code, lines = show_run(bench, sections)
            failed |= code != 0
            new += lines
    try:
        comparisons = compare(old, new, threshold)
    except (KeyError, TypeError) as error:
        print(f"error: a result lacks something, or holds another type: {error!r}", file=sys.stderr)
        return USER_ERROR
    for line in old:
        if is_timed(line) and not any(c.old is line for c in comparisons):
            print(
                f"not compared: {title_of(line)} on {describe(line)}: no such case in the new results", file=sys.stderr
            )
    if not comparisons:
        print("error: the two have no timed case in common", file=sys.stderr)
        return USER_ERROR
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    print_sections(console, [table(comparisons)])
    slower = [c for c in comparisons if c.verdict == "slower"]
    console.print(f"{len(comparisons)} cases compared, {len(slower)} slower")
    return SLOWER if slower or failed else OK


def benches(lines: Sequence[Line]) -> Iterator[tuple[Bench, Callable[[Sequence[Line]], list[Section]]]]:
    """Benches that measure the cases of ``lines`` again, each with what shows it.

    Cases that share a procedure (ranks, launch, steps) share a bench.
    """
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        if line["kind"] in MAKERS:
            groups.setdefault((line["kind"], procedure_of(line)), []).append(line)
    for (kind, _), own in groups.items():
        yield MAKERS[kind](own)
