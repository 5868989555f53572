"""Which tile a grouped GEMM uses: a measured table, by the mean number of rows an expert gets.

Experts with more rows than a tile take several tiles of the same weights, which run side by side, so that the weights
come from memory once all the same: a tile too small costs a little, one too large costs arithmetic on empty rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_layer.gemm.sm90_spec import LOW_BIT_FORMATS, WIDE_TOKENS, token_tiles

TABLE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Tile:
    """A token tile: ``tokens`` rows a block, ``cluster`` blocks that share each weight tile."""

    tokens: int
    cluster: int


@cache
def _table(arch: str, dtype: str) -> tuple[tuple[float, Tile], ...]:
    rows = json.loads(TABLE.read_text())[arch][dtype]
    return tuple(
        (float("inf") if row["up_to"] is None else row["up_to"], Tile(row["tokens"], row["cluster"])) for row in rows
    )


_forced: list[Tile] = []


@contextmanager
def forced_tile(tile: Tile | None) -> Iterator[None]:
    """Inside, every choice is this tile (for measurements); None: the table's."""
    if tile is None:
        yield
        return
    _forced.append(tile)
    try:
        yield
    finally:
        _forced.pop()


def candidates(operands: str) -> list[Tile]:
    """Every tile that a kernel can have: ``"bf16"``, ``"fp8"`` or a format of widened weights."""
    low_bit = operands in LOW_BIT_FORMATS
    tiles = [Tile(tokens, 1) for tokens in token_tiles(operands if low_bit else "")]
    return tiles if low_bit else [*tiles, Tile(WIDE_TOKENS, 2)]


def choose_tile(arch: str, dtype: str, rows: int, experts: int) -> Tile:
    """The tile for ``rows`` rows over ``experts`` experts, as the table for the architecture and operands has it."""
    if _forced:
        return _forced[-1]
    mean = rows / max(experts, 1)
    return next(tile for up_to, tile in _table(arch, dtype) if mean <= up_to)


def all_tiles(arch: str, dtype: str) -> tuple[Tile, ...]:
    """Every tile that :func:`choose_tile` may return."""
    return tuple(dict.fromkeys(tile for _, tile in _table(arch, dtype)))


def telling_rows(arch: str, rows: int, experts: int) -> list[int]:
    """Few numbers of rows that get every tile which 0 … ``rows`` rows over ``experts`` experts get, of any operands.

    They are the last ones of the tables' entries; an architecture without a table has ``rows`` alone.
    """
    entries = [entry for table in json.loads(TABLE.read_text()).get(arch, {}).values() for entry in table]
    limits = {entry["up_to"] for entry in entries} - {None}
    return sorted({min(rows, math.floor(limit * experts)) for limit in limits} | {rows})
