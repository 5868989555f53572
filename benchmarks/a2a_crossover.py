"""Up to which T̂ Sentinel is the faster protocol: the measurement behind ``protocol="auto"`` (comm/crossover.json)."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from moe_layer.benchmarks import show
from moe_layer.benchmarks.a2a import A2ABench, crossover_row_bytes
from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.report.a2a import sections
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.session import SessionError
from moe_layer.benchmarks.shapes import Shape
from moe_layer.errors import ConfigError

FIRST, LAST = 16, 4096  # T̂ of the doubling search
RESOLUTION = 16  # the limit is found to one part in this many, which is about the noise of the two curves


def find_crossover(
    bench: A2ABench, shape: Shape, fence: str = "fence"
) -> Generator[dict[str, Any], None, dict[str, int]]:
    """Double T̂ until Fence is faster, then halve the interval. Perfect routing, as all crossovers are stated.

    Args:
        fence: which Fence to compare with, a protocol of the benchmark.

    Yields:
        each measurement's line.

    Returns:
        the row for comm/crossover.json; its limit is 0 where Sentinel never wins.

    Raises:
        SessionError: a measurement failed.
    """
    times: dict[int, tuple[float, float]] = {}

    def sentinel_wins(tokens: int) -> Generator[dict[str, Any], None, bool]:
        pair = []
        for protocol in ("sentinel", fence):
            line = bench.record(Case(shape, tokens, protocol, bench.size, Routing(), bench.plan.seed))
            yield line
            if "error" in line:
                raise SessionError(f"{shape.label}, {tokens} tokens, {protocol}: {line['error']}", line["details"])
            pair.append(line["results"]["us"])
        times[tokens] = (pair[0], pair[1])
        return pair[0] <= pair[1]

    low, high = 0, FIRST
    while (yield from sentinel_wins(high)):
        low = high
        if high >= LAST:
            break
        high *= 2
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        if (yield from sentinel_wins(middle)):
            low = middle
        else:
            high = middle
    return {
        "ep_size": bench.size,
        "row_bytes": crossover_row_bytes(shape),
        "top_k": shape.top_k,
        "sentinel_limit": low,
    }


def run(bench: A2ABench, file: Path, *, fence: str = "fence", json_file: str | None = None) -> int:
    """Search the crossover of each of the plan's shapes, show the measurements and write ``file``.

    Returns:
        an exit code: 1 if a search failed; the others' crossovers are written all the same.

    Raises:
        ConfigError: no GPU.
    """
    if bench.device_type == "cpu":
        raise ConfigError("the crossover is between Sentinel and Fence, which run between GPUs; there is none here")
    rows: list[dict[str, int]] = []

    def records() -> Iterator[dict[str, Any]]:
        for shape in bench.plan.shapes:
            search = find_crossover(bench, shape, fence)
            try:
                while True:
                    yield next(search)
            except StopIteration as done:
                rows.append(done.value)
                print(f"crossover of {shape.label}: {done.value}", file=sys.stderr)
            except SessionError as error:
                print(f"no crossover of {shape.label}: {error}", file=sys.stderr)

    code, _ = show.run(bench, sections, json_file=json_file, records=records())
    if rows and bench.is_main:
        write_crossover(file, rows, bench.provenance)
    return code or int(len(rows) < len(bench.plan.shapes))


def write_crossover(path: Path, rows: list[dict[str, int]], provenance: dict[str, Any]) -> None:
    """Put ``rows`` into a file of the format of comm/crossover.json, which keeps its rows of other numbers of ranks."""
    ep_sizes = {row["ep_size"] for row in rows}
    measured = f"{provenance['date'][:10]}, {describe(provenance)}, commit {provenance['commit']}"
    kept, said = [], []
    if path.exists():
        before = json.loads(path.read_text())
        kept = [row for row in before["rows"] if row["ep_size"] not in ep_sizes]
        said = [before["measured"]] if kept else []
    lines = [f"    {json.dumps(row)}" for row in sorted(kept + rows, key=lambda r: (r["ep_size"], r["row_bytes"]))]
    text = "\n".join(
        ["{", f'  "measured": {json.dumps("; ".join([*said, measured]), ensure_ascii=False)},', '  "rows": [']
    )
    path.write_text(text + "\n" + ",\n".join(lines) + "\n  ]\n}\n")
