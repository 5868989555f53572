"""Fixtures and helper modules that several test folders share."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# pytest's importlib mode puts no test folder on sys.path; helper modules live in one folder of their own.
sys.path.append(str(Path(__file__).parent / "helpers"))

from distributed_harness import RankPool

MAX_RANKS = 4


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Every test draws its own random numbers, the same in any order and on any worker."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``run_ranks(function, ep_size, *args)``: see :mod:`distributed_harness`. Up to four ranks, over gloo."""
    pool: RankPool | None = None

    def run(function: Callable[..., Any], ep_size: int, *args: Any, **options: Any) -> list[Any]:
        nonlocal pool
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = RankPool(MAX_RANKS)
        return pool.run(function, ep_size, *args, **options)

    yield run
    if pool is not None:
        pool.close()
