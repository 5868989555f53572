"""Dispatch and combine of the portable transports against the oracle of ``all_to_all_check``."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from all_to_all_check import CASES, MAX_TOKENS, Case, check_step, check_steps, for_ranks, open_comm
from distributed_harness import Ranks

from moe_layer.comm import ExpertPlacement, create_channel
from moe_layer.errors import ConfigError


def run_cases(ranks: Ranks, protocol: str, cases: list[Case], seed: int) -> None:
    """The cases, one after the other, as layers that share one channel."""
    group = ranks.group if protocol == "collective" else None
    channel = create_channel(group, protocol=protocol, max_tokens_per_rank=MAX_TOKENS, timeout_s=20)
    check_steps(channel, cases, seed)
    channel.destroy()


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_collective(run_ranks: Any, name: str, ep_size: int) -> None:
    run_ranks(run_cases, ep_size, "collective", [for_ranks(CASES[name], ep_size)], secrets.randbits(32))


@pytest.mark.parametrize("name", CASES)
def test_loopback(name: str) -> None:
    run_cases(Ranks(0, 1, None), "loopback", [for_ranks(CASES[name], 1)], secrets.randbits(32))


@pytest.mark.parametrize(("protocol", "ep_size"), [("loopback", 1), ("collective", 2), ("collective", 4)])
def test_layers_of_all_sizes_share_a_channel(run_ranks: Any, protocol: str, ep_size: int) -> None:
    """Small layers before large ones and after: buffers grow, and what a larger step left behind does not show."""
    cases = [for_ranks(case, ep_size) for case in CASES.values()]
    cases = [*cases, *reversed(cases)]
    if protocol == "loopback":
        run_cases(Ranks(0, 1, None), protocol, cases, secrets.randbits(32))
    else:
        run_ranks(run_cases, ep_size, protocol, cases, secrets.randbits(32))


def test_looped_steps(run_ranks: Any) -> None:
    """Top-2 of 8 experts on three ranks, many times (DeepEP#548)."""
    run_ranks(run_cases, 3, "collective", [Case((7, 1, 12))] * 50, secrets.randbits(32))


@pytest.mark.parametrize(
    "rank_of",
    [
        (2, 0, 1, 0, 2, 2, 1, 0),
        (1, 1, 1, 1, 1, 1, 1, 1),  # ranks 0 and 2 hold no expert
        (2, 2, 2, 2, 0, 0, 0, 0),
    ],
)
def test_experts_placed_by_a_table(run_ranks: Any, rank_of: tuple[int, ...]) -> None:
    case = Case((9, 4, 11), top_k=3, rank_of=rank_of)
    run_ranks(run_cases, 3, "collective", [case, replace(case, ids="invalid")], secrets.randbits(32))


def test_subgroups_of_the_world(run_ranks: Any) -> None:
    """Two groups side by side whose ranks differ from the world's (flashinfer#3418)."""
    run_ranks(run_in_subgroups, 4, secrets.randbits(32))


def run_in_subgroups(ranks: Ranks, seed: int) -> None:
    members = [(0, 2), (1, 3)]
    groups = [ranks.new_group(m) for m in members]
    with pytest.raises(ConfigError, match="not a member of the group"):
        create_channel(groups[1 - ranks.rank % 2], protocol="collective")
    group = groups[ranks.rank % 2]
    channel = create_channel(group, protocol="collective", max_tokens_per_rank=MAX_TOKENS, timeout_s=20)
    assert channel.ep_rank == ranks.rank // 2
    case = Case((11, 3) if ranks.rank % 2 else (0, 6), top_k=3)
    for step in range(5):
        check_step(open_comm(channel, case), case, seed + step)


def test_expert_output_of_the_callers_own(run_ranks: Any) -> None:
    run_ranks(combine_own_tensor, 2, secrets.randbits(32))


def combine_own_tensor(ranks: Ranks, seed: int) -> None:
    """combine takes any tensor of the right shape, not only the channel's buffer."""
    generator = torch.Generator().manual_seed(seed)
    channel = create_channel(ranks.group, protocol="collective", max_tokens_per_rank=4, timeout_s=20)
    comm = channel.communicator(ExpertPlacement.contiguous(2, 2), 5)
    ids = torch.tensor([[0], [1], [-1]], dtype=torch.int32)
    result = comm.dispatch(torch.zeros(3, 1), ids, runtime_max_tokens_per_rank=3)
    own = torch.full((6, 5), torch.nan)
    values = torch.randn(2, 2, 5, generator=generator)  # [source rank, expert's rank, width], the same on both ranks
    for source in range(2):
        slot = int((result.topk_ids[3 * source : 3 * source + 3, 0] >= 0).nonzero()) + 3 * source
        own[slot] = values[source, ranks.rank]
    combined = comm.combine(own)
    assert torch.equal(combined, torch.cat([values[ranks.rank], torch.zeros(1, 5)]))


@pytest.mark.parametrize(("protocol", "ep_size"), [("loopback", 1), ("collective", 3)])
def test_expert_load(run_ranks: Any, protocol: str, ep_size: int) -> None:
    if protocol == "loopback":
        count_load(Ranks(0, 1, None), protocol, secrets.randbits(32))
    else:
        run_ranks(count_load, ep_size, protocol, secrets.randbits(32))


def count_load(ranks: Ranks, protocol: str, seed: int) -> None:
    """Counts over all ranks, before a step and between dispatch and combine; invalid ids count nowhere."""
    channel = create_channel(ranks.group, protocol=protocol, max_tokens_per_rank=32, timeout_s=20)
    comm = channel.communicator(ExpertPlacement.contiguous(6, ranks.ep_size), 4)
    for in_flight in (False, True):
        everyone = []
        for rank in range(ranks.ep_size):
            generator = torch.Generator().manual_seed(seed + 10 * in_flight + rank)
            everyone.append(torch.randint(-2, 9, (7 * rank, 3), generator=generator))
        mine = everyone[ranks.rank]
        if in_flight:
            comm.dispatch(torch.zeros(mine.shape[0], 1), mine)
        load = comm.expert_load(mine)
        expected = [sum(row.count(e) for ids in everyone for row in ids.tolist()) for e in range(6)]
        assert load.dtype == torch.int32
        assert load.tolist() == expected
        if in_flight:
            comm.combine(comm.get_combine_input_buffer())
