"""The grouped GEMMs' part of a report."""

from __future__ import annotations

from collections.abc import Sequence

from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.pieces import (
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


def sections(lines: Sequence[Line]) -> list[Section]:
    """A section for each machine, and in it one for each model's projection: a plot, a table for each operand type."""

    def projection(line: Line) -> tuple[str, str, int, int, int, int]:
        p = line["parameters"]
        return p["model"], p["stage"], p["experts"], p["parts"], p["n"], p["k"]

    found = []
    for machine, own in grouped(lines, describe).items():
        section = Section(f"Grouped GEMMs: {machine}")
        section.text = [
            *provenance_text(own),
            *ceilings_text(own),
            "Cold weights. FC1 contains the gather of its rows, the activation and requantization. The floor is the "
            "longer of the weights' bytes over the read rate and the operations over the matrix rate.",
            *failures_text(own, lambda line: " ".join(map(str, line["parameters"].values()))),
        ]
        found.append(section)
        for (model, stage, experts, parts, n, k), of_one in grouped(measured(own), projection).items():
            rows = f"{parts} × {n}" if parts > 1 else str(n)
            part = Section(f"{model}, {stage}: K {k}, N {rows}, {experts} experts", level=1)
            solid, floors = [], []
            for operands, lines_ in grouped(of_one, lambda line: line["parameters"]["operands"]).items():
                part.tables.append(_table(f"**{operands}**", lines_))
                plain = [
                    line
                    for line in lines_
                    if line["parameters"]["routing"] == "even" and line["parameters"]["active"] == experts
                ]
                if len(plain) < 2:
                    continue
                plain.sort(key=lambda line: line["parameters"]["tokens"])
                x = [line["parameters"]["tokens"] for line in plain]
                solid.append(Series(operands, x, [line["results"]["us"] for line in plain]))
                floor = [line["results"].get("floor_us") for line in plain]
                if None not in floor:
                    floors.append(Series(f"{operands} floor", x, floor, floor=True))
            if solid:
                part.plots.append(Plot(f"{model}, {stage}", "tokens an expert", "µs", [*solid, *floors]))
            found.append(part)
    return found


def _table(caption: str, lines: Sequence[Line]) -> Table:
    peers = list(dict.fromkeys(name for line in lines for name in line["results"].get("peers_us", {})))
    rows = []
    for line in sorted(lines, key=lambda line: (line["parameters"]["routing"], line["parameters"]["tokens"])):
        p, r = line["parameters"], line["results"]
        rows.append([
            str(p["tokens"]), p["routing"], f"{p['active']} of {p['experts']}", number(r["us"]),
            number(r["weights_tbps"]), number(r["tflops"]), number(r.get("floor_us")), number(r.get("ratio")),
            *(number(r.get("peers_us", {}).get(peer)) for peer in peers), f"{r['error']:.0e}",
        ])  # fmt: skip
    header = ["m", "rows", "experts", "µs", "TB/s", "TFLOP/s", "floor", "ratio", *(f"{p} µs" for p in peers), "error"]
    return Table(caption, header, rows, frozenset({1}))
