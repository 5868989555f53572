"""What ``moe-layer bench a2a`` shows while it runs and at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_layer.benchmarks.a2a import Bench, Plan
from moe_layer.benchmarks.a2a_crossover import find_crossover, write_crossover
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.session import SessionError
from moe_layer.errors import ConfigError

OK, SOME_FAILED, NOT_STARTED = 0, 1, 2


def run(plan: Plan, *, json_file: str | None = None, crossover: str | None = None, fence: str = "fence") -> int:
    """Measure the plan, or its shapes' crossovers, and show it.

    Args:
        plan: what to measure.
        json_file: where JSON lines go as they come; ``-`` for stdout, which then carries nothing else.
        crossover: where the crossovers go, a file of comm/crossover.json's format; None: no crossovers.
        fence: which Fence a crossover is against.

    Returns:
        an exit code: 0, 1 if a case failed, 2 if the processes did not start.
    """
    with Bench(plan) as bench:
        if crossover is not None and bench.device_type == "cpu":
            raise ConfigError("the crossover is between Sentinel and Fence, which run between GPUs; there is none here")
        main = bench.session.is_main
        console = Console(stderr=json_file == "-", highlight=False, quiet=not main, soft_wrap=True)
        stream = _open(json_file) if main else None
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True), transient=True, disable=not (main and sys.stderr.isatty()),
        )  # fmt: skip
        try:
            with progress:
                return _run(bench, console, stream, progress, crossover, fence)
        finally:
            if stream not in (None, sys.stdout):
                assert stream is not None
                stream.close()


def _run(
    bench: Bench, console: Console, stream: TextIO | None, progress: Progress, crossover: str | None, fence: str
) -> int:
    task = progress.add_task("starting", total=len(bench.cases) if crossover is None else None)
    try:
        bench.start()
    except SessionError as error:
        print(f"error: {error}\n{error.details}", file=sys.stderr)
        return NOT_STARTED
    console.print(heading(bench))
    lines: list[dict[str, Any]] = []

    def take(source: Iterable[dict[str, Any]]) -> None:
        for line in source:
            lines.append(line)
            if stream is not None:
                print(json.dumps(line), file=stream, flush=True)
            console.print(sentence(line), markup=False)
            progress.update(task, advance=1, description=_case(line))
            if "error" in line:
                print(line["details"], file=sys.stderr, flush=True)

    if crossover is None:
        take(bench.records())
        console.print()
        for table in tables(lines):
            console.print(table)
        return SOME_FAILED if any("error" in line for line in lines) else OK
    rows = []
    for shape in bench.plan.shapes:
        search = find_crossover(bench, shape, fence)
        try:
            while True:
                take([next(search)])
        except StopIteration as done:
            rows.append(done.value)
            console.print(f"crossover of {shape.label}: {done.value}", markup=False)
        except SessionError as error:
            console.print(f"no crossover of {shape.label}: {error}", markup=False)
    if rows and bench.session.is_main:
        write_crossover(Path(crossover), rows, bench.provenance)
        console.print(f"wrote {crossover}", markup=False)
    return OK if len(rows) == len(bench.plan.shapes) else SOME_FAILED


def _open(json_file: str | None) -> TextIO | None:
    if json_file is None:
        return None
    return sys.stdout if json_file == "-" else open(json_file, "w")


def heading(bench: Bench) -> str:
    """What the run's lines have in common."""
    record = bench.provenance
    way = {"process": "a process a rank", "single": "one process for all ranks", "torchrun": "torchrun"}
    text = f"{describe(record)}; {bench.size} ranks, {way[bench.session.launch]}; commit {record['commit']}\n"
    if bench.ceilings is not None:
        c = bench.ceilings
        text += (
            f"ceilings: push {c.push_gbps:.0f} GB/s, pull {c.pull_gbps:.0f} GB/s a GPU and direction, all at once; "
            f"flag {c.flag_us:.2f} µs; empty kernel {c.launch_us:.2f} µs"
        )
    else:
        text += f"no ceilings: {bench.ceilings_note}"
    return text + (f"\n{record['note']}" if "note" in record else "")


def _case(line: dict[str, Any]) -> str:
    p = line["parameters"]
    routing = "" if p["routing"] == "perfect" else f" {p['routing']}"
    return f"{p['model']}:{p['activation_format']}{routing} T={p['tokens_per_rank']} {_protocol(p)}"


def _protocol(parameters: dict[str, Any]) -> str:
    quantize = parameters["quantize"]
    return (
        parameters["protocol"]
        + {"given": "", "before": ", quantizing before", "fused": ", quantizing", "target": ", quantizing after"}[
            quantize
        ]
    )


def sentence(line: dict[str, Any]) -> str:
    """A line's result in one line of text."""
    if "error" in line:
        return f"{_case(line)}: FAILED: {line['error']}"
    r = line["results"]
    text = f"{_case(line)}: {r['round_trip_us']:.2f} µs (min {r['min_us']:.2f}, max {r['max_us']:.2f}"
    if r["phases_us"]:
        text += "".join(f"; {name} {us:.2f}" for name, us in r["phases_us"].items())
    text += ")"
    if "floor" in r:
        text += f", floor {r['floor']['bytes_us']:.2f} + {r['floor']['latency_us']:.2f}, × {r['ratio']:.2f}"
    if "chosen" in r:
        text += f", took {r['chosen']}"
    return text + (f" [no phases: {r['phases_note']}]" if "phases_note" in r else "")


def tables(lines: list[dict[str, Any]]) -> list[Table]:
    """A table for each model, format and routing."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        p = line["parameters"]
        groups.setdefault((p["model"], p["activation_format"], p["routing"]), []).append(line)
    return [_table(key, group) for key, group in groups.items()]


def _table(key: tuple[str, str, str], lines: list[dict[str, Any]]) -> Table:
    p = lines[0]["parameters"]
    title = f"{key[0]}, {key[1]} ({p['dispatch_bytes']} / {p['combine_bytes']} B, k {p['top_k']}), {key[2]} routing"
    table = Table(title=f"{title}, {p['ep_size']} ranks, µs", title_justify="left", box=None, pad_edge=False)
    for column in ("T", "protocol", "dispatch", "combine", "round trip", "spread", "floor", "ratio"):
        table.add_column(column, justify="left" if column == "protocol" else "right")
    for line in lines:
        p = line["parameters"]
        if "error" in line:
            table.add_row(str(p["tokens_per_rank"]), _protocol(p), "", "", "failed", "", "", "")
            continue
        r = line["results"]
        phases = r["phases_us"] or {}
        floor = r.get("floor")
        table.add_row(
            str(p["tokens_per_rank"]),
            _protocol(p) + (f" ({r['chosen']})" if "chosen" in r else ""),
            *(f"{phases[name]:.2f}" if name in phases else "–" for name in ("dispatch", "combine")),
            f"{r['round_trip_us']:.2f}",
            f"{100 * r['spread']:.1f} %",
            f"{floor['total_us']:.2f}" if floor else "–",
            f"{r['ratio']:.2f}" if floor else "–",
        )
    return table
