"""What a one-sided step passes to its kernels: all of it follows the step, although most is worked out only once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")

from host_only import Call, HostOnlyChannel, note_calls

from moe_layer.comm.onesided import OneSidedComm
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.errors import CapacityError

HIDDEN, SCALE, TOP_K, SMS = 512, 16, 3, 132
# T and T̂, back and forth over the crossover and over the number of multiprocessors.
STEPS = [(0, 8), (8, 8), (5, 2048), (2048, 2048), (1, 1), (8, 8), (700, 2048), (0, 0)]


def make(protocol: str, **options: int) -> tuple[HostOnlyChannel, OneSidedComm]:
    channel = HostOnlyChannel(2, protocol, num_sms=SMS, **options)
    return channel, channel.communicator(ExpertPlacement.contiguous(12, 2), HIDDEN)


def step(comm: OneSidedComm, tokens: int, t_hat: int, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """One step; the addresses of its tensors."""
    rows, scale = torch.zeros(tokens, HIDDEN, dtype=torch.uint8), torch.zeros(tokens, SCALE, dtype=torch.uint8)
    ids, weights = torch.zeros(tokens, TOP_K, dtype=torch.int32), torch.zeros(tokens, TOP_K)
    comm.dispatch(rows, ids, weights, hidden_states_scale=scale, runtime_max_tokens_per_rank=t_hat)
    output = torch.empty(tokens, HIDDEN, dtype=dtype)
    comm.combine(comm.get_combine_input_buffer(), output=output)
    return [tensor.data_ptr() for tensor in (rows, scale, ids, weights, output)]


@pytest.mark.parametrize("protocol", ["fence", "sentinel", "auto"])
def test_arguments_follow_the_step(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = note_calls(monkeypatch)
    channel, comm = make(protocol)
    hashes: dict[tuple[str, int], int] = {}
    for tokens, t_hat in STEPS:
        calls.clear()
        addresses = step(comm, tokens, t_hat)
        assert channel.layout is not None and channel.memory is not None
        layout, base = channel.layout, channel.memory.local.data_ptr()
        (dispatch, spec, given), (combine, combine_spec, back) = calls
        served_by_fence = protocol == "fence" or (protocol == "auto" and t_hat == 2048)
        assert (dispatch, combine) == tuple(
            f"{'fence' if served_by_fence else 'sentinel'}_{way}" for way in ("dispatch", "combine")
        )
        assert given[0] == back[0] == base
        assert list(given[3:9]) == [*addresses[:4], HIDDEN, SCALE]
        assert given[9:12] == layout.dispatch_rows(2 * t_hat, HIDDEN, SCALE)
        after = 12 if served_by_fence else 18
        rank, got_tokens, got_t_hat, own_hash = given[after : after + 4]
        assert (rank, got_tokens, got_t_hat) == (0, tokens, t_hat)
        assert hashes.setdefault((dispatch, t_hat), own_hash) == own_hash
        # Blocks: a token each, or a slot and part each, and no more than fit at once.
        slots, parts = (tokens, 1) if served_by_fence else (t_hat, spec.parts)
        assert given[-1] == parts * max(1, min(slots, SMS * spec.blocks_per_sm // parts))
        if served_by_fence:
            assert given[-2] == min(given[-1], SMS)
        slots, parts = (tokens, 1) if served_by_fence else (t_hat, combine_spec.parts)
        assert (back[3], back[4]) == (addresses[4], 2 * HIDDEN)
        assert back[-5:] == (
            0, tokens, t_hat, (2 << 24) | (2 * HIDDEN),
            parts * max(1, min(slots, SMS * combine_spec.blocks_per_sm // parts)),
        )  # fmt: skip
    assert len(set(hashes.values())) == len(hashes) == len({t_hat for _, t_hat in STEPS})


def test_dtypes_of_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another output dtype is another kernel; FP16 is rounded by torch from FP32."""
    calls = note_calls(monkeypatch)
    _, comm = make("fence")
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
        calls.clear()
        output = step(comm, 4, 8, dtype)[-1]
        _, spec, back = calls[-1]
        assert (spec.element_bytes, spec.output_bytes) == (2, 2 if dtype == torch.bfloat16 else 4)
        assert (back[3] == output) == (dtype != torch.float16)


def test_a_workspace_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was worked out for the old one is used on the new one."""
    calls = note_calls(monkeypatch)
    channel, comm = make("auto")
    step(comm, 4, 8)
    assert channel.memory is not None
    old = channel.memory.local
    channel.reserve(4096, 256, 8, 8192)
    channel.prepare()
    for tokens, t_hat in STEPS:
        calls.clear()
        step(comm, tokens, t_hat)
        fresh = make("auto")[1]
        fresh.channel.memory, fresh.channel.layout = channel.memory, channel.layout
        fresh.channel.capacity = channel.capacity
        expected: list[Call] = list(calls)
        calls.clear()
        step(fresh, tokens, t_hat)
        for (_, _, got), (_, _, wanted) in zip(expected, calls):
            assert got[0] == wanted[0] != old.data_ptr()
            assert got[9:12] == wanted[9:12] and got[-4:] == wanted[-4:]


def test_sentinel_past_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    note_calls(monkeypatch)
    channel, comm = make("sentinel", max_tokens_per_rank=64)
    channel._sentinel_tokens = 16
    step(comm, 4, 16)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)  # so that nothing is told to peers
    with pytest.raises(
        CapacityError, match="runtime_max_tokens_per_rank is 17, but Sentinel's slots were sized for 16"
    ):
        step(comm, 4, 17)
