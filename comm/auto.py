"""Which kernels serve a step: Sentinel up to a crossover in T̂ that was measured, Fence beyond it; and whether dispatch
quantizes, up to a limit of its own.

``crossover.json`` holds one row a measured case; a case in between takes the nearest row. ``fusion.json`` holds one
number. Every rank computes the same answer, since all inputs are the same on every rank. ``MOE_LAYER_SENTINEL_LIMIT``
and ``MOE_LAYER_FUSED_LIMIT`` override them.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def _table() -> list[dict[str, int]]:
    rows: list[dict[str, int]] = json.loads((Path(__file__).parent / "crossover.json").read_text())["rows"]
    return rows


def sentinel_limit(ep_size: int, row_bytes: int, top_k: int) -> int:
    """Largest T̂ for which Sentinel is the faster protocol.

    Args:
        ep_size: ranks.
        row_bytes: bytes of a token's dispatch row plus its combine row.
        top_k: experts a token.
    """
    override = os.environ.get("MOE_LAYER_SENTINEL_LIMIT")
    if override is not None:
        return int(override)

    def distance(row: dict[str, int]) -> tuple[float, float, int]:
        ratio = max(row["row_bytes"], row_bytes) / min(row["row_bytes"], row_bytes)
        return abs(row["ep_size"] - ep_size), ratio, abs(row["top_k"] - top_k)

    return int(min(_table(), key=distance)["sentinel_limit"])


@lru_cache(maxsize=1)
def _fused_limit() -> int:
    limit: int = json.loads((Path(__file__).parent / "fusion.json").read_text())["fused_limit"]
    return limit


def fused_limit() -> int:
    """Largest T̂ for which dispatch quantizes BF16 rows itself, where it can; -1 for none."""
    override = os.environ.get("MOE_LAYER_FUSED_LIMIT")
    return _fused_limit() if override is None else int(override)
