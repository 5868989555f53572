"""The quantizers' part of a report."""

from __future__ import annotations

from collections.abc import Sequence

from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.pieces import (
    MISSING,
    Plot,
    Section,
    Series,
    Table,
    ceilings_text,
    failures_text,
    grouped,
    number,
    provenance_text,
)  # fmt: skip


def kernel_of(line: Line) -> str:
    p = line["parameters"]
    scale = {"row": ", a scale a row", "given": ", scale given"}.get(p.get("scale") or "", "")
    return f"BF16 → {p['format']}{scale}" if p["way"] == "quantize" else f"{p['format']} → BF16"


def sections(lines: Sequence[Line]) -> list[Section]:
    """A section for each machine, a table and a plot for each width."""
    found = []
    for machine, own in grouped(lines, describe).items():
        section = Section(f"Quantizers: {machine}")
        section.text = [
            *provenance_text(own),
            *ceilings_text(own),
            "The share is that of the bytes read and written, elements and scales once each.",
            *failures_text(own, lambda line: f"{kernel_of(line)}, T = {line['parameters']['tokens']}"),
        ]
        for columns, of_width in sorted(grouped(measured(own), lambda line: line["parameters"]["columns"]).items()):
            tokens = sorted({line["parameters"]["tokens"] for line in of_width})
            rows, series = [], []
            for kernel, of_kernel in grouped(of_width, kernel_of).items():
                results = {line["parameters"]["tokens"]: line["results"] for line in of_kernel}
                cells = [
                    f"{number(results[t]['us'])} ({results[t]['of_copy']:.0%})" if t in results else MISSING
                    for t in tokens
                ]
                rows.append([kernel, *cells])
                x = sorted(results)
                series.append(Series(kernel, x, [results[t]["us"] for t in x]))
            header = ["", *(f"T = {t}" for t in tokens)]
            section.tables.append(
                Table(f"**K = {columns}**: µs (share of the copy rate)", header, rows, frozenset({0}))
            )
            section.plots.append(Plot(f"K = {columns}", "tokens", "µs", series))
        found.append(section)
    return found
