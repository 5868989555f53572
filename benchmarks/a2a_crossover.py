"""Up to which T̂ Sentinel is the faster protocol: the measurement behind ``protocol="auto"`` (comm/crossover.json)."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from moe_layer.benchmarks.a2a import Bench, crossover_row_bytes
from moe_layer.benchmarks.a2a_work import Case
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.session import SessionError
from moe_layer.benchmarks.shapes import Shape

FIRST, LAST = 16, 4096  # T̂ of the doubling search
RESOLUTION = 16  # the limit is found to one part in this many, which is about the noise of the two curves


def find_crossover(bench: Bench, shape: Shape, fence: str = "fence") -> Generator[dict[str, Any], None, dict[str, int]]:
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
            pair.append(line["results"]["round_trip_us"])
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
