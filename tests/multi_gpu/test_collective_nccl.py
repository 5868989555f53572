"""The collective transport between GPUs: NCCL alone, NCCL beside gloo, and gloo with CUDA tensors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from all_to_all_check import CASES, MAX_TOKENS, Case, check_steps, for_ranks
from distributed_harness import RankPool, Ranks

from moe_layer.comm import ExpertPlacement, create_channel
from moe_layer.errors import CommunicationError, CommunicationTimeoutError, TensorError, UnsupportedDeviceError

EP_SIZE = min(4, torch.cuda.device_count())
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl", "gloo")

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(scope="module", params=BACKENDS)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(EP_SIZE, request.param) as pool:
        yield pool


def open_channel(ranks: Ranks, timeout_s: float = 30) -> Any:
    torch.cuda.set_device(ranks.rank)
    return create_channel(ranks.group, protocol="collective", max_tokens_per_rank=MAX_TOKENS, timeout_s=timeout_s)


def test_all_cases(pool: RankPool) -> None:
    cases = [for_ranks(case, EP_SIZE) for case in CASES.values()]
    pool.run(run_on_gpu, EP_SIZE, [*cases, *reversed(cases)], secrets.randbits(32))


def test_large_step(pool: RankPool) -> None:
    """Rows of a real model, so that copies, messages and sums take long enough to show a missing wait."""
    case = Case((24, 19, 24, 7)[:EP_SIZE], num_experts=256, top_k=8, row=(7168,), hidden_size=7168)
    pool.run(run_on_gpu, EP_SIZE, [case] * 20, secrets.randbits(32))


def run_on_gpu(ranks: Ranks, cases: list[Case], seed: int) -> None:
    check_steps(open_channel(ranks), cases, seed, f"cuda:{ranks.rank}")


def test_wrong_arguments_on_one_rank(pool: RankPool) -> None:
    pool.run(wrong_on_one_rank, EP_SIZE, secrets.randbits(32))


def wrong_on_one_rank(ranks: Ranks, seed: int) -> None:
    channel = open_channel(ranks)
    device = f"cuda:{ranks.rank}"
    comm = channel.communicator(ExpertPlacement.contiguous(8, ranks.ep_size), 4)
    rows, ids = torch.randn(3, 4, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    if ranks.rank == 1:
        with pytest.raises(TensorError, match="rank 1: topk_ids is on cpu; expected cuda:1, as hidden_states"):
            comm.dispatch(rows, ids.cpu())
    else:
        with pytest.raises(CommunicationError, match="rank 1 failed: rank 1: topk_ids is on cpu"):
            comm.dispatch(rows, ids)
    check_steps_again(channel, ranks, seed)


def check_steps_again(channel: Any, ranks: Ranks, seed: int) -> None:
    case = for_ranks(CASES["ragged"], ranks.ep_size)
    assert channel.step == 0
    check_steps(channel, [case] * 2, seed, f"cuda:{ranks.rank}")


def test_tensors_on_the_cpu(pool: RankPool) -> None:
    """One rank passes CPU tensors: an error where NCCL moves the rows, no matter where gloo does."""
    pool.run(cpu_on_one_rank, EP_SIZE, secrets.randbits(32))


def cpu_on_one_rank(ranks: Ranks, seed: int) -> None:
    channel = open_channel(ranks)
    device = "cpu" if ranks.rank == 1 else f"cuda:{ranks.rank}"
    comm = channel.communicator(ExpertPlacement.contiguous(8, ranks.ep_size), 4)
    rows, ids = torch.randn(3, 4, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    backend = torch.distributed.get_backend_config(ranks.group)
    if backend == "cuda:nccl":
        expected = "rank 1: hidden_states is on cpu; expected a CUDA tensor: the group has NCCL only, no gloo"
    elif "nccl" in backend:
        expected = "disagree about the backend .*: rank 0 has nccl, rank 1 has gloo"
    else:
        comm.dispatch(rows, ids)
        comm.combine(comm.get_combine_input_buffer())
        return
    with pytest.raises((TensorError, CommunicationError), match=expected):
        comm.dispatch(rows, ids)
    check_steps_again(channel, ranks, seed)


def test_graph_capture_is_refused(pool: RankPool) -> None:
    if "nccl" in pool.backend:
        pool.run(capture, EP_SIZE, secrets.randbits(32))


def capture(ranks: Ranks, seed: int) -> None:
    channel = open_channel(ranks)
    device = f"cuda:{ranks.rank}"
    comm = channel.communicator(ExpertPlacement.contiguous(8, ranks.ep_size), 4)
    rows, ids = torch.randn(3, 4, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    with (
        pytest.raises(UnsupportedDeviceError, match="dispatch of step 1 cannot be captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        comm.dispatch(rows, ids)
    check_steps_again(channel, ranks, seed)


def test_expert_load(pool: RankPool) -> None:
    pool.run(count_load, EP_SIZE)


def count_load(ranks: Ranks) -> None:
    comm = open_channel(ranks).communicator(ExpertPlacement.contiguous(5, ranks.ep_size), 4)
    ids = torch.tensor([[0, ranks.rank], [-1, 5]], device=f"cuda:{ranks.rank}")
    expected = [ranks.ep_size + 1] + [int(e < ranks.ep_size) for e in range(1, 5)]
    assert comm.expert_load(ids).tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_absent_peer(backend: str, call: str) -> None:
    with RankPool(2, backend) as pool:
        pool.run(wait_for_absent_peer, 2, call)


def wait_for_absent_peer(ranks: Ranks, call: str) -> None:
    channel = open_channel(ranks, timeout_s=2)
    device = f"cuda:{ranks.rank}"
    comm = channel.communicator(ExpertPlacement.contiguous(8, ranks.ep_size), 4)
    rows, ids = torch.randn(3, 4, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    for _ in range(2):  # NCCL opens its connections in the first step
        comm.dispatch(rows, ids)
        comm.combine(comm.get_combine_input_buffer())
    if call == "combine":
        comm.dispatch(rows, ids)
    if ranks.rank == 1:
        time.sleep(6)
        return
    start = time.monotonic()
    with pytest.raises(CommunicationTimeoutError, match=f"rank 0: {call} of step 3: .* within 2 s"):
        if call == "dispatch":
            comm.dispatch(rows, ids)
        else:
            comm.combine(comm.get_combine_input_buffer())
    assert time.monotonic() - start < 5
    with pytest.raises(CommunicationError, match="on a channel that failed earlier"):
        comm.dispatch(rows, ids)
