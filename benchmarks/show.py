"""What every benchmark shows while it runs and at its end: a progress bar, a sentence a case, tables."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_layer.benchmarks.bench import Bench
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, title_of
from moe_layer.benchmarks.report import pieces
from moe_layer.benchmarks.session import SessionError

OK, SOME_FAILED, NOT_STARTED = 0, 1, 2
FILE_WIDTH = 250  # columns where the output is no terminal, so that tables are whole


def run(
    bench: Bench,
    sections: Callable[[Sequence[Line]], list[pieces.Section]],
    *,
    json_file: str | None = None,
    records: Iterable[Line] | None = None,
) -> tuple[int, list[Line]]:
    """Measure all cases and show them.

    Args:
        bench: not started yet; the caller leaves it.
        sections: makes the final tables of the lines.
        json_file: where JSON lines go as they come, behind what the file holds; ``-`` for stdout, which then carries
            nothing else.
        records: what to take instead of the bench's own cases.

    Returns:
        an exit code: 0, 1 if a case failed, 2 if the processes did not start; and the lines.
    """
    main = bench.is_main
    console = Console(stderr=json_file == "-", highlight=False, quiet=not main, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    with ExitStack() as stack:
        stream = None
        if main and json_file is not None:
            stream = sys.stdout if json_file == "-" else stack.enter_context(open_to_append(json_file))
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True), transient=True, disable=not (main and sys.stderr.isatty()),
        )  # fmt: skip
        stack.enter_context(progress)
        task = progress.add_task("starting", total=len(bench.cases) if records is None else None)
        try:
            bench.start()
        except SessionError as error:
            print(f"error: {error}\n{error.details}", file=sys.stderr)
            return NOT_STARTED, []
        console.print(heading(bench), markup=False)
        lines = []
        for line in bench.records() if records is None else records:
            lines.append(line)
            if stream is not None:
                print(json.dumps(line), file=stream, flush=True)
            console.print(sentence(line), markup=False)
            progress.update(task, advance=1, description=title_of(line))
            if "error" in line and main:
                print(line["details"], file=sys.stderr, flush=True)
        console.print()
        print_sections(console, sections(lines))
    return SOME_FAILED if any("error" in line for line in lines) else OK, lines


def open_to_append(path: str) -> Any:
    """The file, in a folder that is made if it is not there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a")


def heading(bench: Bench) -> str:
    """What the run's lines have in common."""
    record = bench.provenance
    texts = [f"{describe(record)}; commit {record['commit']}"]
    texts += pieces.ceilings_text([{"ceilings": bench.ceilings}])
    if bench.ceilings_note:
        texts.append(f"no {'link ' if bench.ceilings else ''}ceilings: {bench.ceilings_note}")
    if "note" in record:
        texts.append(record["note"])
    return "\n".join(texts)


def sentence(line: Line) -> str:
    """A line's result in one line of text."""
    if "error" in line:
        return f"{title_of(line)}: FAILED: {line['error']}"
    if "absent" in line:
        return f"{title_of(line)}: absent: {line['absent']}"
    r = line["results"]
    if "us" not in r:
        return f"{title_of(line)}: " + ", ".join(f"{k} {v}" for k, v in r.items() if isinstance(v, (int, float, str)))
    text = f"{title_of(line)}: {pieces.number(r['us'], 4)} µs"
    if "min_us" in r:
        text += f" (min {pieces.number(r['min_us'], 4)}, max {pieces.number(r['max_us'], 4)})"
    for name in ("phases_us", "stages_us"):
        if r.get(name):
            text += "; " + ", ".join(f"{part} {pieces.number(us)}" for part, us in r[name].items())
    if "floor_us" in r:
        text += f"; floor {pieces.number(r['floor_us'])}, × {r['ratio']:.2f}"
    if "chosen" in r:
        text += f"; took {r['chosen']}"
    notes = [r[name] for name in ("phases_note", "stages_note") if name in r]
    return text + "".join(f" [{note}]" for note in notes)


def print_sections(console: Console, sections: Iterable[pieces.Section]) -> None:
    """Tables of a report on the terminal."""
    for section in sections:
        console.print(plain(section.title), style="bold")
        for table in section.tables:
            console.print(rich_table(table))
            if table.note:
                console.print(plain(table.note), style="dim")
            console.print()


def rich_table(table: pieces.Table) -> Table:
    """A table as rich draws it."""
    out = Table(title=plain(table.caption), title_justify="left", box=None, pad_edge=False)
    for i, title in enumerate(table.header):
        out.add_column(plain(title), justify="left" if i in table.left else "right", no_wrap=True)
    for row in table.rows:
        out.add_row(*(plain(cell) for cell in row))
    return out


def plain(text: str) -> str:
    """Without Markdown's marks, and with rich's brackets escaped."""
    return re.sub(r"\*\*|`", "", text).replace("[", r"\[")
