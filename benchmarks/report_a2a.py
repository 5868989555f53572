"""Markdown tables of all-to-all results, each figure beside its floor.

    python benchmarks/report_a2a.py [RESULTS.json …]                     print the tables
    python benchmarks/report_a2a.py --write docs/performance.md          put them into the page, between its markers
    python benchmarks/report_a2a.py --check docs/performance.md          exit code 1 if the page has others

Results are the JSON lines of ``moe-layer bench a2a --json FILE``; by default every file of benchmarks/results. Of
several lines for one case the latest counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_layer.benchmarks.a2a_work import PEERS, QUANTIZE
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.shapes import SHAPES

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- begin: python benchmarks/report_a2a.py --write -->", "<!-- end -->"
NOTHING = "No results yet: `moe-layer bench a2a --json benchmarks/results/a2a.json` measures them.\n"
ORDER = tuple(
    name if quantize == "given" else f"{name} ({quantize})"
    for name in ("sentinel", "fence", "fence+fp8", "auto", "collective", "loopback", *PEERS)
    for quantize in QUANTIZE
)

Line = dict[str, Any]


def read_lines(files: Iterable[Path]) -> list[Line]:
    """The all-to-all lines of the files, the latest of each case.

    Raises:
        ValueError: a line that is no JSON; names file and line.
    """
    latest: dict[tuple[Any, ...], Line] = {}
    for file in files:
        for number, text in enumerate(file.read_text().splitlines(), 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error
            if line.get("kind") != "a2a":
                continue
            key = (*section_of(line), *group_of(line), line["parameters"]["tokens_per_rank"], protocol_of(line))
            if key not in latest or latest[key]["date"] <= line["date"]:
                latest[key] = line
    return list(latest.values())


def section_of(line: Line) -> tuple[str, int, str, str, bool]:
    """What a section of the report has in common: machine, ranks, launch, routing, L2 flush."""
    p = line["parameters"]
    return describe(line), p["ep_size"], p["launch"], p["routing"], p["l2_flush"]


def group_of(line: Line) -> tuple[str, str]:
    """What a table has in common: model and activation format."""
    return line["parameters"]["model"], line["parameters"]["activation_format"]


def protocol_of(line: Line) -> str:
    """The protocol, and where rows are quantized if the step does."""
    p = line["parameters"]
    protocol: str = p["protocol"]
    quantize = p.get("quantize", "given")
    return protocol if quantize == "given" else f"{protocol} ({quantize})"


def render(lines: Sequence[Line]) -> str:
    """All tables, as Markdown."""
    if not lines:
        return NOTHING
    sections: dict[Any, list[Line]] = {}
    for line in lines:
        sections.setdefault(section_of(line), []).append(line)
    return "\n".join(_section(key, sections[key]) for key in sorted(sections))


def _section(key: tuple[str, int, str, str, bool], lines: list[Line]) -> str:
    machine, ranks, launch, routing, flush = key
    way = {"process": "a process a rank", "single": "one process for all ranks"}.get(launch, launch)
    parts = [f"### {machine}: {ranks} ranks, {way}, {routing} routing{', L2 flushed' if flush else ''}", ""]
    newest = max(lines, key=lambda line: line["date"])
    versions = newest["versions"]
    commits = sorted({line["commit"] or "unknown" for line in lines})
    driver = newest["machine"].get("driver")
    parts.append(
        f"{newest['date'][:10]}, commit {', '.join(commits)}; torch {versions['torch']}"
        + (f", CUDA {versions['cuda']}, driver {driver}" if versions.get("cuda") else "")
        + (f", CuTe DSL {versions['nvidia-cutlass-dsl']}" if versions.get("nvidia-cutlass-dsl") else "")
        + "."
    )
    if "note" in newest:
        parts.append(f"**{newest['note']}**")
    with_ceilings = [line for line in lines if "ceilings" in line]
    if with_ceilings:
        parts.append(f"Ceilings: {_ceilings(with_ceilings)}.")
    parts.append("")
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault(group_of(line), []).append(line)
    parts += [_table(groups[group]) for group in groups]
    return "\n".join(parts)


def _ceilings(lines: list[Line]) -> str:
    """Ranges over the runs that the lines come from."""

    def span(name: str, digits: int) -> str:
        values = sorted({round(line["ceilings"][name], digits) for line in lines})
        texts = [f"{value:.{digits}f}" for value in (values[0], values[-1])]
        return texts[0] if texts[0] == texts[1] else "–".join(texts)

    return (
        f"push {span('push_gbps', 0)} GB/s, pull {span('pull_gbps', 0)} GB/s a GPU and direction, all GPUs both ways "
        f"at once; one-way flag {span('flag_us', 2)} µs; empty kernel {span('launch_us', 2)} µs"
    )


def _table(lines: list[Line]) -> str:
    p = lines[0]["parameters"]
    shape = SHAPES.get(p["model"])
    protocols = sorted({protocol_of(line) for line in lines}, key=ORDER.index)
    cells = {(line["parameters"]["tokens_per_rank"], protocol_of(line)): line for line in lines}
    floors = any("floor" in line.get("results", {}) for line in lines)
    combine = 2 * p["hidden_size"]
    title = (
        f"**{shape.title if shape else p['model']}, {p['activation_format']}** "
        f"({p['dispatch_bytes']} / {combine} B, k {p['top_k']}, {p['num_experts']} experts), round trip µs "
        "(dispatch + combine)"
    )
    header = ["T", *protocols] + (["floor: bytes", "with latency", "best / floor"] if floors else [])
    rows = [header, ["---:"] * len(header)]
    for tokens in sorted({tokens for tokens, _ in cells}):
        of_row = {name: cells[tokens, name] for name in protocols if (tokens, name) in cells}
        done = {name: line for name, line in of_row.items() if "error" not in line}
        ours = [name for name in done if name not in PEERS]
        best = min(ours, key=lambda name: done[name]["results"]["round_trip_us"], default=None)
        row = [str(tokens)] + [_cell(of_row.get(name), name == best and len(ours) > 1) for name in protocols]
        if floors:
            result = done[best]["results"] if best is not None else {}
            floor = result.get("floor")
            row += (
                [f"{floor['bytes_us']:.2f}", f"{floor['total_us']:.2f}", f"{result['ratio']:.2f}"]
                if floor
                else ["–"] * 3
            )
        rows.append(row)
    good = [line["results"] for line in lines if "error" not in line]
    after = []
    if good:
        after.append(f"Largest spread of a figure over its repeats: {100 * max(r['spread'] for r in good):.1f} %.")
        imbalance = sorted({round(r["load_imbalance"], 2) for r in good})
        if imbalance[-1] > 1:
            after.append(f"Load imbalance {imbalance[0]:.2f}–{imbalance[-1]:.2f}.")
    return "\n".join([title, "", *("| " + " | ".join(row) + " |" for row in rows), "", " ".join(after), ""])


def _cell(line: Line | None, best: bool) -> str:
    if line is None:
        return "–"
    if "error" in line:
        return "failed"
    r = line["results"]
    text = f"{r['round_trip_us']:.2f}"
    if best:
        text = f"**{text}**"
    if r["phases_us"]:
        text += " ({} + {})".format(*(f"{us:.2f}" for us in r["phases_us"].values()))
    return text


def replace_between_markers(page: str, tables: str) -> str:
    """``page`` with the tables between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no '{BEGIN}' … '{END}'")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="JSON lines (default: benchmarks/results/*.json)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables of this page")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="fail if this page's tables differ")
    options = parser.parse_args(arguments)
    try:
        tables = render(read_lines(options.results or sorted(RESULTS.glob("*.json"))))
        page = options.write or options.check
        if page is None:
            print(tables)
            return 0
        old = page.read_text()
        new = replace_between_markers(old, tables)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check is not None:
        if new != old:
            print(f"{page} is not what the results say; run report_a2a.py --write {page}", file=sys.stderr)
        return int(new != old)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
