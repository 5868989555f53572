"""Placement tables against their definition, and tables that no group could serve."""

from __future__ import annotations

import random

import pytest

from moe_layer.comm import ExpertPlacement
from moe_layer.errors import ConfigError


@pytest.mark.parametrize(("num_experts", "ep_size"), [(8, 1), (8, 4), (7, 3), (384, 7), (2, 4), (1, 1)])
def test_contiguous(num_experts: int, ep_size: int) -> None:
    """Blocks in ascending order whose sizes differ by one at most, the longer ones first."""
    placement = ExpertPlacement.contiguous(num_experts, ep_size)
    blocks = [placement.local_experts(r) for r in range(ep_size)]
    assert [e for block in blocks for e in block] == list(range(num_experts))
    sizes = [len(block) for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_tables_agree() -> None:
    ep_size, num_experts = 5, 40
    rank_of = random.choices(range(ep_size), k=num_experts)
    placement = ExpertPlacement.from_table(rank_of, ep_size)
    assert placement.rank_table().tolist() == rank_of
    for rank in range(ep_size):
        table = placement.local_table(rank).tolist()
        mine = [e for e in range(num_experts) if rank_of[e] == rank]
        assert [table[e] for e in mine] == list(range(len(mine)))
        assert all(table[e] == -1 for e in range(num_experts) if rank_of[e] != rank)
        assert placement.local_experts(rank) == mine
        assert [placement.local_of[e] for e in mine] == list(range(len(mine)))


def test_impossible_tables() -> None:
    with pytest.raises(ConfigError, match=r"expert 1 is placed on rank 2, but the group has ranks 0…1"):
        ExpertPlacement.from_table([0, 2], 2)
    with pytest.raises(ConfigError, match="expert 0 is placed on rank -1"):
        ExpertPlacement.from_table([-1], 2)
    with pytest.raises(ConfigError, match="must be at least 1, got 0 and 2"):
        ExpertPlacement.contiguous(0, 2)
    with pytest.raises(ConfigError, match="must be at least 1, got 8 and 0"):
        ExpertPlacement.contiguous(8, 0)
