"""The layer's part of a report (the paper's Tables 4, 5, A.3, A.4, A.6 and A.8)."""

from __future__ import annotations

from collections.abc import Sequence

from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.latency import by_ranks, latency_plot, latency_table, speedup_plot, tokens_of
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
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.stages import STAGES

OURS = ("auto", "one-sided", "sentinel", "fence", "collective", "loopback", "none")


def protocol_of(line: Line) -> str:
    return str(line["parameters"]["protocol"])


def model_title(line: Line) -> str:
    p = line["parameters"]
    shape = SHAPES.get(p["model"])
    name = shape.title if shape else p["model"]
    at = "" if p["quantize_at"] == "source" else ", quantized at the target"
    return f"{name}, {p['weight_format']} weights, {p['activation_format']} activations{at}"


def sections(lines: Sequence[Line]) -> list[Section]:
    """A section for each machine, number of ranks and kind of measurement."""

    def setting(line: Line) -> tuple[str, int, bool, bool]:
        p = line["parameters"]
        return describe(line), p["ep_size"], p["protocol"] == "none", p["l2_flush"]

    found = []
    for (machine, ranks, alone, flush), own in sorted(grouped(lines, setting).items()):
        what = f"one rank of {ranks}, without the all-to-all" if alone else f"{ranks} ranks"
        section = Section(f"Layer: {machine}, {what}{', L2 flushed' if flush else ''}")
        section.text = [
            *provenance_text(own),
            *ceilings_text(own),
            "Time of a layer in µs. The floor is the longer of the active experts' bytes over the read rate and the "
            "operations over the matrix rate, on the busiest rank, plus an empty kernel for each of the four compute "
            "kernels" + ("." if alone else ", the all-to-all's bytes over the link's rates, and its flags."),
            "A stage lasts from the end of the one before it to the end of its own last kernel, so that stages add up.",
            *failures_text(own, lambda line: f"{model_title(line)}, {protocol_of(line)}, T = {tokens_of(line)}"),
        ]
        found.append(section)
        found += [
            _model(title, of_model) for title, of_model in grouped(own, model_title).items() if measured(of_model)
        ]
    whole = [line for line in lines if protocol_of(line) != "none"]
    summary = by_ranks("Layer by number of ranks", whole, model_title, OURS)
    return found if summary is None else [*found, summary]


def _model(title: str, lines: Sequence[Line]) -> Section:
    section = Section(title, level=1)
    done = measured(lines)
    peers = [name for name in dict.fromkeys(protocol_of(line) for line in done) if name not in OURS]
    for routing, of_routing in grouped(lines, lambda line: line["parameters"]["routing"]).items():
        good = measured(of_routing)
        if not good:
            continue
        heading = f"{title.partition(',')[0]}, {routing} routing"
        errors = max(line["results"].get("error", 0.0) for line in good)
        note = f"Largest relative L2 error against fp64: {errors:.2g}."
        section.tables.append(
            latency_table(f"**{routing} routing**", of_routing, protocol_of, peers, lambda line: "", note)
        )
        section.plots.append(latency_plot(heading, good, protocol_of))
        speedup = speedup_plot(f"{heading}: speed-up", good, protocol_of, peers)
        if speedup is not None:
            section.plots.append(speedup)
        for protocol, own in grouped(good, protocol_of).items():
            _add_stages(section, heading, protocol, own)
    skew = _skew_table(done)
    if skew is not None:
        section.tables.append(skew)
    return section


def _add_stages(section: Section, heading: str, protocol: str, lines: Sequence[Line]) -> None:
    """Shares of the stages, which add up to the layer."""
    timed = sorted((line for line in lines if line["results"].get("stages_us")), key=tokens_of)
    if not timed:
        return
    held = {stage for line in timed for stage in line["results"]["stages_us"]}
    stages = [stage for stage in (*STAGES, "other") if stage in held]
    rows = []
    for line in timed:
        r = line["results"]
        floor = r.get("floor", {})
        rows.append([
            str(tokens_of(line)),
            *(number(r["stages_us"].get(stage)) for stage in stages),
            number(r["us"]),
            f"{r['active_experts']} of {r['local_experts']}",
            str(r["rows"]),
            number(floor.get("compute_us")) + (f" ({floor['bound']})" if floor else ""),
            number(floor.get("all_to_all_us")) if floor.get("all_to_all_us") else MISSING,
        ])  # fmt: skip
    header = ["T", *stages, "layer", "experts active", "rows", "floor: compute", "all-to-all"]
    label = f"{heading}, {protocol}" if protocol != "none" else heading
    section.tables.append(Table(f"Stages in µs: {label}", header, rows))
    x = [tokens_of(line) for line in timed]
    parts = [Series(s, x, [line["results"]["stages_us"].get(s, 0.0) for line in timed]) for s in stages]
    section.plots.append(Plot(f"Stages: {label}", "% of the layer", "tokens a rank", parts, "stack"))


def _skew_table(lines: Sequence[Line]) -> Table | None:
    """Time by routing, the fastest of ours, with the load imbalance; None where there is one routing."""
    routings = list(dict.fromkeys(line["parameters"]["routing"] for line in lines))
    if len(routings) < 2:
        return None
    rows = []
    for tokens in sorted({tokens_of(line) for line in lines}):
        row = [str(tokens)]
        for routing in routings:
            own = [
                line["results"]
                for line in lines
                if tokens_of(line) == tokens
                and line["parameters"]["routing"] == routing
                and protocol_of(line) in OURS
            ]  # fmt: skip
            best = min(own, key=lambda r: r["us"], default=None)
            row.append(MISSING if best is None else f"{number(best['us'])} (× {best['load_imbalance']:.2f})")
        rows.append(row)
    note = "µs with the fastest transport, and the busiest rank's token–expert pairs relative to an even share."
    return Table("**By routing**", ["T", *routings], rows, note=note)
