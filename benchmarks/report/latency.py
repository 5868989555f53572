"""Tables and plots of time against tokens, for the all-to-all and for layers alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.pieces import MISSING, Plot, Section, Series, Table, grouped, number

Column = Callable[[Line], str]


def tokens_of(line: Line) -> int:
    tokens: int = line["parameters"]["tokens_per_rank"]
    return tokens


def by_column(lines: Sequence[Line], column: Column) -> dict[str, dict[int, Line]]:
    """Measured lines as column → tokens → line."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        if "results" in line:
            found.setdefault(column(line), {})[tokens_of(line)] = line
    return found


def latency_table(
    caption: str, lines: Sequence[Line], column: Column, peers: Sequence[str], parts: Callable[[Line], str], note: str
) -> Table:
    """A row for each T: every column's time, the best of ours in bold, its floor, and their ratio.

    Args:
        lines: of one model, failed ones among them.
        column: names a line's column.
        peers: columns that are not ours.
        parts: what stands in brackets behind a time, or nothing.
        note: below the table.
    """
    cells = by_column(lines, column)
    columns = list(dict.fromkeys(column(line) for line in lines if "absent" not in line))
    failed = {(tokens_of(line), column(line)) for line in lines if "error" in line}
    floors = any("floor_us" in line["results"] for rows in cells.values() for line in rows.values())
    rows = []
    for tokens in sorted({tokens_of(line) for line in lines if "absent" not in line}):
        here = {name: cells[name][tokens] for name in columns if tokens in cells.get(name, {})}
        ours = {name: line["results"] for name, line in here.items() if name not in peers}
        best = min(ours, key=lambda name: ours[name]["us"], default=None)
        row = [str(tokens)]
        for name in columns:
            if name not in here:
                row.append("failed" if (tokens, name) in failed else MISSING)
                continue
            text = number(here[name]["results"]["us"])
            row.append((f"**{text}**" if name == best and len(ours) > 1 else text) + parts(here[name]))
        if floors:
            result = ours[best] if best is not None else {}
            row += [number(result.get("floor_us")), number(result.get("ratio"))]
        rows.append(row)
    spread = max((line["results"]["spread"] for rows_ in cells.values() for line in rows_.values()), default=0.0)
    texts = [f"Largest spread of a figure over its repeats: {100 * spread:.1f} %.", note]
    header = ["T", *columns, *(["floor", "best / floor"] if floors else [])]
    return Table(caption, header, rows, note=" ".join(t for t in texts if t))


def by_ranks(heading: str, lines: Sequence[Line], title: Column, ours: Sequence[str]) -> Section | None:
    """The fastest of ours by tokens and number of ranks (the paper's Tables A.7, A.8); None with one number of ranks.

    Args:
        heading: of the section.
        lines: of any settings; those with perfect routing and no flush count.
        title: names a line's model.
        ours: protocols that are not peers.
    """
    section = Section(heading)
    section.text = ["µs with perfect routing; of several protocols the fastest, † Fence."]
    plain = [
        line
        for line in measured(lines)
        if line["parameters"]["routing"] == "perfect"
        and not line["parameters"]["l2_flush"]
        and line["parameters"]["protocol"] in ours
        and line["parameters"].get("quantize", "given") == "given"
    ]
    for model, own in grouped(plain, title).items():
        sizes = sorted({line["parameters"]["ep_size"] for line in own})
        if len(sizes) < 2:
            continue
        best: dict[tuple[int, int], Line] = {}
        for line in own:
            place = (tokens_of(line), line["parameters"]["ep_size"])
            if place not in best or line["results"]["us"] < best[place]["results"]["us"]:
                best[place] = line
        rows = [
            [str(tokens), *(_marked(best.get((tokens, size))) for size in sizes)]
            for tokens in sorted({tokens for tokens, _ in best})
        ]
        section.tables.append(Table(f"**{model}**", ["T", *(f"{size} ranks" for size in sizes)], rows))
    return section if section.tables else None


def _marked(line: Line | None) -> str:
    if line is None:
        return MISSING
    mark = " †" if line["parameters"]["protocol"].startswith("fence") else ""
    return number(line["results"]["us"]) + mark


def latency_plot(title: str, lines: Sequence[Line], column: Column) -> Plot:
    """Time against tokens, log-log, with the floor of each column dashed; equal floors once."""
    series = []
    floors: dict[tuple[float, ...], tuple[str, list[tuple[int, float]]]] = {}
    for name, rows in by_column(lines, column).items():
        x = sorted(rows)
        series.append(Series(name, x, [rows[t]["results"]["us"] for t in x]))
        floor = [(t, rows[t]["results"]["floor_us"]) for t in x if "floor_us" in rows[t]["results"]]
        if floor:
            floors.setdefault(tuple(round(us, 6) for _, us in floor), (name, floor))
    for name, floor in floors.values():
        label = "floor" if len(floors) == 1 else f"floor of {name}"
        series.append(Series(label, [t for t, _ in floor], [us for _, us in floor], floor=True))
    return Plot(title, "tokens a rank", "µs", series)


def speedup_plot(title: str, lines: Sequence[Line], column: Column, peers: Sequence[str]) -> Plot | None:
    """How many times as fast as the first peer; None without one."""
    cells = by_column(lines, column)
    base = next((name for name in cells if name in peers), None)
    if base is None:
        return None
    series = []
    for name, rows in cells.items():
        x = sorted(set(rows) & set(cells[base]))
        if name != base and x:
            y = [cells[base][t]["results"]["us"] / rows[t]["results"]["us"] for t in x]
            series.append(Series(f"{name} over {base}", x, y))
    return Plot(title, "tokens a rank", "times as fast", series, "speedup") if series else None
