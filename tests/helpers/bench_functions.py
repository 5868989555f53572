"""Functions that a benchmark session runs in its processes, which import this module by its name."""

from __future__ import annotations

import os
import time
from typing import Any


def who(ranks: Any, word: str) -> tuple[str, int, list[int], list[Any]]:
    """The argument, the group's size, this process's ranks, and what all processes gathered."""
    mine = [rank.rank for rank in ranks.local]
    return word, ranks.size, mine, ranks.gather(mine)


def fail_on(ranks: Any, rank: int) -> None:
    """One rank raises while the others wait for it."""
    if ranks.local[0].rank == rank:
        raise ValueError(f"rank {rank}\nis broken")
    ranks.synchronize()


def die_on(ranks: Any, rank: int) -> None:
    """One rank's process ends while the others wait for it."""
    if ranks.local[0].rank == rank:
        os._exit(3)
    ranks.synchronize()


def sleep(ranks: Any, seconds: float) -> None:
    time.sleep(seconds)
