"""The fastest tile for each mean number of rows (``moe-layer bench gemm --tune FILE``): how gemm/tiles.json is made.

Every case (projection, mean, even or Poisson numbers of rows) is timed with every tile that could be the best one. For
a kind of operands and a mean the tile is taken whose times, relative to the best of each case, have the least mean, so
that neither a model nor a projection outweighs the others. Between two means whose tiles differ the table changes
half-way.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_layer.benchmarks import show
from moe_layer.benchmarks.gemm import GemmBench
from moe_layer.benchmarks.gemm_case import Case
from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, measured
from moe_layer.benchmarks.report.gemm import sections
from moe_layer.errors import ConfigError
from moe_layer.gemm.tile_choice import Tile, candidates

TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 512)
MOST_TILES, LARGE_TILE = 3, 96  # an expert's rows are cut into no more tiles, unless these are large


def worth_trying(tile: Tile, tokens: int) -> bool:
    """Whether a tile could be the best for so many rows an expert: neither mostly empty nor one of many."""
    return tile.tokens <= 2 * tokens + 8 and (tile.tokens >= LARGE_TILE or -(-tokens // tile.tokens) <= MOST_TILES)


def run(bench: GemmBench, file: Path, *, json_file: str | None = None) -> int:
    """Time, show, and write the table.

    Returns:
        an exit code: 1 if a case failed; the others' choices are written all the same.

    Raises:
        ConfigError: no GPU.
    """
    if bench.device_type == "cpu":
        raise ConfigError("tiles are those of GPU kernels, and there is no GPU here")
    code, lines = show.run(bench, sections, json_file=json_file, records=records(bench))
    tables = choose(lines)
    if tables:
        write(file, "sm_90a", tables, bench.provenance)
    return code


def records(bench: GemmBench) -> Iterator[Line]:
    """A line for each case and tile."""
    for case in bench.cases:
        assert isinstance(case, Case)
        for tile in candidates(case.operands):
            if worth_trying(tile, case.tokens):
                bench.tile = tile
                yield bench.record(case)
    bench.tile = None


def choose(lines: Sequence[Line]) -> dict[str, list[dict[str, Any]]]:
    """Operands → entries of the table, from lines of forced tiles."""
    times: dict[tuple[str, int], dict[tuple[Any, ...], dict[Tile, float]]] = {}
    for line in measured(lines):
        p = line["parameters"]
        case = tuple(p[name] for name in ("model", "stage", "experts", "n", "k", "active", "routing"))
        of_case = times.setdefault((p["operands"], p["tokens"]), {}).setdefault(case, {})
        of_case[Tile(p["tile"], p["cluster"])] = line["results"]["us"]
    tables: dict[str, list[dict[str, Any]]] = {}
    for operands in dict.fromkeys(operands for operands, _ in times):
        best = {tokens: fastest(cases) for (name, tokens), cases in sorted(times.items()) if name == operands}
        means = sorted(best)
        entries: list[dict[str, Any]] = []
        for mean, following in zip(means, [*means[1:], None]):
            if following is None or best[following] != best[mean]:
                limit = None if following is None else (mean + following) / 2
                entries.append({"up_to": limit, "tokens": best[mean].tokens, "cluster": best[mean].cluster})
        tables[operands] = entries
    return tables


def fastest(cases: dict[tuple[Any, ...], dict[Tile, float]]) -> Tile:
    """The tile of all cases with the least mean of its times relative to each case's best."""
    everywhere = set.intersection(*(set(times) for times in cases.values()))
    if not everywhere:
        raise ConfigError("no tile was timed for all cases of a number of rows")

    def cost(tile: Tile) -> float:
        return statistics.fmean(times[tile] / min(times.values()) for times in cases.values())

    return min(everywhere, key=lambda tile: (cost(tile), tile.tokens, tile.cluster))


def write(file: Path, arch: str, tables: dict[str, list[dict[str, Any]]], provenance: dict[str, Any]) -> None:
    """Put the tables into a file of the form of gemm/tiles.json, which keeps its other operands and architectures."""
    held: dict[str, Any] = {"note": "Token tile by the mean number of rows of an expert."}
    if file.exists():
        held = json.loads(file.read_text())
    held.setdefault(arch, {}).update(tables)
    by = f"{provenance['date'][:10]}, {describe(provenance)}, commit {provenance['commit']}, bench gemm --tune"
    held.setdefault("measured", {}).update(dict.fromkeys(tables, by))
    parts = []
    for key, value in held.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            rows = []
            for name, entry in value.items():
                line = json.dumps(entry, ensure_ascii=False)
                if isinstance(entry, list):
                    line = "[\n" + ",\n".join(f"      {json.dumps(one)}" for one in entry) + "\n    ]"
                rows.append(f"    {json.dumps(name)}: {line}")
            text = "{\n" + ",\n".join(rows) + "\n  }"
        parts.append(f"  {json.dumps(key)}: {text}")
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")
