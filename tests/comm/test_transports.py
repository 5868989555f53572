"""Dispatch and combine of the portable transports against the oracle of ``all_to_all_check``."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch
from all_to_all_check import Case, check_step, poison_workspace
from distributed_harness import Ranks

from moe_layer.comm import ExpertPlacement, create_channel
from moe_layer.errors import ConfigError

MAX_TOKENS = 24
# T of rank r is the r-th entry, for as many ranks as a test has; one of four ranks has no token.
RAGGED = (5, 17, 0, 9)
FULL = (MAX_TOKENS,) * 4

CASES = {
    "ragged": Case(RAGGED),
    "no token on the first rank": Case((0, 13, 0, 6)),
    "no token anywhere": Case((0, 0, 0, 0)),
    "one token in all": Case((0, 0, 1, 0), t_hat=1),
    "T = T̂ = the maximum": Case(FULL),
    "T̂ below the maximum": Case(RAGGED, t_hat=17),
    "top_k 1": Case(RAGGED, top_k=1),
    "top_k 10": Case(RAGGED, num_experts=16, top_k=10),
    "top_k 32": Case(RAGGED, num_experts=40, top_k=32),
    "more selections than experts": Case(RAGGED, num_experts=3, top_k=7, ids="duplicates"),
    "experts not divisible": Case(RAGGED, num_experts=7, top_k=3),
    "fewer experts than ranks": Case(RAGGED, num_experts=2, top_k=2),
    "all tokens alike": Case(RAGGED, ids="same"),
    "duplicate ids": Case(RAGGED, top_k=6, ids="duplicates"),
    "ids out of range": Case(RAGGED, top_k=3, ids="invalid"),
    "64-bit ids out of range": Case(RAGGED, top_k=3, ids="invalid", id_dtype="int64"),
    "no destination at all": Case(RAGGED, ids="none"),
    "int64 ids": Case(RAGGED, id_dtype="int64"),
    "no weights": Case(RAGGED, weights=False),
    "fp8 with scales": Case(RAGGED, row=(256,), row_dtype="float8_e4m3fn", scale=(2,)),
    "fp8 with e8m0 scales": Case(RAGGED, row_dtype="float8_e5m2", scale=(3,), scale_dtype="float8_e8m0fnu"),
    "odd row and scale bytes": Case(RAGGED, row=(13,), row_dtype="uint8", scale=(3,), scale_dtype="uint8"),
    "rows of 2, 4 and 8 byte words": Case(RAGGED, row=(3,), row_dtype="float16", scale=(5,), scale_dtype="float32"),
    "rows of one byte": Case(RAGGED, row=(), row_dtype="uint8"),
    "rows of two dimensions": Case(RAGGED, row=(3, 5), row_dtype="int16", scale=(2, 2)),
    "scale rows of no byte": Case(RAGGED, scale=(0,)),
    "long rows": Case(RAGGED, row=(7168,), hidden_size=7168),
    "fp32 rows and partials": Case(RAGGED, row_dtype="float32", top_k=4, partial_dtype="float32"),
    "bf16 to fp32 output": Case(RAGGED, top_k=4, output_dtype="float32"),
    "fp32 to bf16 output": Case(RAGGED, top_k=4, partial_dtype="float32", output_dtype="bfloat16"),
    "fp16 output": Case(RAGGED, top_k=4, output_dtype="float16"),
    "width other than the rows'": Case(RAGGED, row=(32,), hidden_size=7),
}


def for_ranks(case: Case, ep_size: int) -> Case:
    """``case`` with the T of ``ep_size`` ranks."""
    return replace(case, tokens=case.tokens[:ep_size])


def open_comm(channel: Any, case: Case) -> Any:
    """A communicator of ``channel`` for ``case``."""
    ep_size = len(case.tokens)
    if case.rank_of is None:
        placement = ExpertPlacement.contiguous(case.num_experts, ep_size)
    else:
        placement = ExpertPlacement.from_table(case.rank_of, ep_size)
    return channel.communicator(placement, case.hidden_size)


def run_cases(ranks: Ranks, protocol: str, cases: list[Case], seed: int) -> None:
    """The cases, one after the other, as layers that share one channel."""
    group = ranks.group if protocol == "collective" else None
    channel = create_channel(group, protocol=protocol, max_tokens_per_rank=MAX_TOKENS, timeout_s=20)
    comms = [open_comm(channel, case) for case in cases]
    for step, (comm, case) in enumerate(zip(comms, cases)):
        poison_workspace(channel)
        check_step(comm, case, seed + step)
        assert channel.step == step + 1
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
