"""The all-to-all's part of a report (the paper's Tables A.1, A.2, A.5 and A.7)."""

from __future__ import annotations

from collections.abc import Sequence

from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.latency import by_ranks, latency_plot, latency_table, speedup_plot
from moe_layer.benchmarks.report.pieces import (
    Section,
    Table,
    ceilings_text,
    failures_text,
    grouped,
    number,
    provenance_text,
)  # fmt: skip
from moe_layer.benchmarks.shapes import SHAPES

LAUNCHES = {"process": "a process a rank", "single": "one process for all ranks"}
OURS = ("sentinel", "fence", "fence+fp8", "auto", "collective", "loopback")


def column_of(line: Line) -> str:
    """The protocol, and where rows are quantized if the step does."""
    p = line["parameters"]
    quantize = p.get("quantize", "given")
    return str(p["protocol"]) if quantize == "given" else f"{p['protocol']} ({quantize})"


def model_title(line: Line) -> str:
    p = line["parameters"]
    shape = SHAPES.get(p["model"])
    return f"{shape.title if shape else p['model']}, {p['activation_format']}"


def sections(lines: Sequence[Line]) -> list[Section]:
    """A section for each machine, number of ranks, launch, routing and flush, and in it one for each model."""

    def setting(line: Line) -> tuple[str, int, str, str, bool]:
        p = line["parameters"]
        return describe(line), p["ep_size"], p["launch"], p["routing"], p["l2_flush"]

    found = []
    for (machine, ranks, launch, routing, flush), own in sorted(grouped(lines, setting).items()):
        section = Section(
            f"All-to-all: {machine}, {ranks} ranks, {LAUNCHES.get(launch, launch)}, {routing} routing"
            + (", L2 flushed" if flush else "")
        )
        section.text = [
            *provenance_text(own),
            *ceilings_text(own),
            "Round trip in µs, of it (dispatch + combine). The floor is the bytes of the busiest link over the "
            "measured rates, an empty kernel and a flag each way.",
            *failures_text(own, lambda line: f"{model_title(line)}, {column_of(line)}, T = {_tokens(line)}"),
        ]
        found.append(section)
        for title, of_model in grouped(own, model_title).items():
            done = measured(of_model)
            if not done:
                continue
            part = Section(title, level=1)
            peers = [name for name in dict.fromkeys(column_of(line) for line in done) if _protocol(name) not in OURS]
            part.tables.append(_table(of_model, peers))
            part.plots.append(latency_plot(f"{title}: round trip", done, column_of))
            speedup = speedup_plot(f"{title}: speed-up", done, column_of, peers)
            if speedup is not None:
                part.plots.append(speedup)
            found.append(part)
    summary = by_ranks("All-to-all by number of ranks", lines, model_title, OURS)
    return found if summary is None else [*found, summary]


def _tokens(line: Line) -> int:
    tokens: int = line["parameters"]["tokens_per_rank"]
    return tokens


def _protocol(column: str) -> str:
    return column.partition(" (")[0]


def _table(lines: Sequence[Line], peers: Sequence[str]) -> Table:
    p = lines[0]["parameters"]
    payload = sorted({(line["parameters"]["dispatch_bytes"], line["parameters"]["combine_bytes"]) for line in lines})
    sizes = ", ".join(f"{dispatch} / {combine} B" for dispatch, combine in payload)
    caption = f"{sizes} a token and rank, k {p['top_k']}, {p['num_experts']} experts"
    imbalance = sorted({round(line["results"]["load_imbalance"], 2) for line in measured(lines)})
    note = f"Load imbalance {imbalance[0]:.2f}–{imbalance[-1]:.2f}." if imbalance[-1] > 1 else ""

    def phases(line: Line) -> str:
        parts = line["results"].get("phases_us")
        return " ({})".format(" + ".join(number(us) for us in parts.values())) if parts else ""

    return latency_table(caption, lines, column_of, peers, phases, note)
