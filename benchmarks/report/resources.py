"""Memory's and loading's parts of a report."""

from __future__ import annotations

from collections.abc import Sequence

from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.pieces import Section, Table, failures_text, grouped, number, provenance_text

MIB = 1 << 20


def memory_sections(lines: Sequence[Line]) -> list[Section]:
    """One section: bytes of the regions of each model, beside the paper's arithmetic."""
    done = measured(lines)
    if not done:
        return []
    section = Section("Memory: workspaces of one rank", provenance_text(done))
    section.text.append(
        "MiB. Each region has a slot for each token that any rank may send: ranks · T̂ (§3.2); all layers share it. "
        "Beside them the paper's count, without alignment, control words and Sentinel's slots, and what an "
        "expert-major layout needs for the same tokens, a slot for each selection that a rank may receive."
    )
    regions = list(dict.fromkeys(name for line in done for name in line["results"]["region_bytes"]))
    rows = []
    for line in done:
        p, r = line["parameters"], line["results"]
        rows.append([
            f"{p['model']}:{p['activation_format']}", str(p["ep_size"]), str(p["max_tokens_per_rank"]),
            *(number(r["region_bytes"].get(name, 0) / MIB) for name in regions),
            number(r["total_bytes"] / MIB), number(r["paper_bytes"] / MIB),
            number(r["expert_major_bytes"] / MIB),
        ])  # fmt: skip
    header = ["model", "ranks", "T̂", *regions, "together", "§3.2", "expert-major"]
    section.tables.append(Table("", header, rows, frozenset({0})))
    return [section]


def load_sections(lines: Sequence[Line]) -> list[Section]:
    """A section for each machine: time and memory of loading, beside reading the same bytes."""
    found = []
    for machine, own in grouped(lines, describe).items():
        done = measured(own)
        section = Section(f"Loading: {machine}")
        section.text = [
            *provenance_text(own),
            "One rank's share of a layer from a warm page cache, beside copying the same tensors out with `safe_open`; "
            "medians, and the ratio of the fastest runs. Memory is the growth of anonymous pages beyond what is kept.",
            *failures_text(own, lambda line: line["parameters"]["release"]),
        ]
        rows = [
            [
                line["parameters"]["release"], str(r["experts"]), number(r["nbytes"] / MIB),
                number(r["floor_us"] / 1e3), number(r["us"] / 1e3), number(r["ratio"]), number(r["best_ratio"]),
                f"{(r['peak_bytes'] - r['nbytes']) / r['expert_bytes']:+.2f}",
            ]
            for line in done
            for r in (line["results"],)
        ]  # fmt: skip
        header = ["release", "experts", "MiB", "safe_open, ms", "load, ms", "ratio", "of the fastest", "more, experts"]
        section.tables.append(Table("", header, rows, frozenset({0})))
        found.append(section)
    return found
