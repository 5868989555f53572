"""Calls out of order, sizes and options that a channel refuses: for every portable transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_harness import Ranks

from moe_layer.comm import ExpertPlacement, create_channel
from moe_layer.errors import CapacityError, CommunicationError, ConfigError, TensorError


def open_comm(protocol: str, group: Any = None, ep_size: int = 1) -> Any:
    channel = create_channel(group, protocol=protocol, max_tokens_per_rank=4, timeout_s=20)
    return channel.communicator(ExpertPlacement.contiguous(4, ep_size), 3)


def dispatch(comm: Any, tokens: int = 2, **options: Any) -> Any:
    return comm.dispatch(torch.randn(tokens, 3), torch.zeros(tokens, 1, dtype=torch.int32), **options)


@pytest.mark.parametrize("protocol", ["loopback", "collective"])
class TestOrder:
    def test_dispatch_twice(self, protocol: str) -> None:
        comm = open_comm(protocol)
        dispatch(comm)
        other = comm.channel.communicator(comm.placement, 5)
        for again in (comm, other):  # the pair in flight belongs to the channel, not to a layer
            with pytest.raises(CommunicationError, match="rank 0: dispatch while the dispatch of step 1 awaits"):
                dispatch(again)
        with pytest.raises(CommunicationError, match="combine without a dispatch of this communicator in flight"):
            other.combine(torch.zeros(4, 5))
        # The refused calls changed nothing: the pair completes.
        buffer = comm.get_combine_input_buffer(torch.float32)
        buffer.copy_(values := torch.randn(4, 3))
        assert torch.equal(comm.combine(buffer), values[:2])
        dispatch(other)

    def test_without_dispatch(self, protocol: str) -> None:
        comm = open_comm(protocol)
        with pytest.raises(CommunicationError, match="rank 0: combine without a dispatch"):
            comm.combine(torch.zeros(4, 3))
        with pytest.raises(CommunicationError, match="rank 0: get_combine_input_buffer without a dispatch"):
            comm.get_combine_input_buffer()
        dispatch(comm)
        comm.combine(comm.get_combine_input_buffer())
        with pytest.raises(CommunicationError, match="rank 0: combine without a dispatch"):
            comm.combine(torch.zeros(4, 3))

    def test_after_destroy(self, protocol: str) -> None:
        comm = open_comm(protocol)
        dispatch(comm)
        comm.destroy()
        comm.destroy()
        for call in (
            lambda: dispatch(comm),
            lambda: comm.combine(torch.zeros(4, 3)),
            lambda: comm.get_combine_input_buffer(),
            lambda: comm.expert_load(torch.zeros(1, 1, dtype=torch.int32)),
        ):
            with pytest.raises(CommunicationError, match="on a destroyed channel"):
                call()

    def test_after_a_refused_dispatch(self, protocol: str) -> None:
        comm = open_comm(protocol)
        with pytest.raises(CapacityError, match="rank 0: 5 tokens to dispatch, but runtime_max_tokens_per_rank is 4"):
            dispatch(comm, tokens=5)
        with pytest.raises(CapacityError, match=r"max_tokens_per_rank is 5, .* sized for max_tokens_per_rank=4"):
            dispatch(comm, runtime_max_tokens_per_rank=5)
        with pytest.raises(CapacityError, match="rank 0: runtime_max_tokens_per_rank is -1"):
            dispatch(comm, runtime_max_tokens_per_rank=-1)
        assert comm.channel.step == 0
        dispatch(comm)

    def test_a_refused_combine_ends_the_pair(self, protocol: str) -> None:
        comm = open_comm(protocol)
        dispatch(comm)
        with pytest.raises(TensorError, match=r"expert_output has dtype torch\.float16; expected"):
            comm.combine(torch.zeros(4, 3, dtype=torch.float16))
        dispatch(comm)

    def test_combine_buffer_of_an_unknown_dtype(self, protocol: str) -> None:
        comm = open_comm(protocol)
        dispatch(comm)
        with pytest.raises(TensorError, match=r"the combine input buffer has dtype torch\.float16; expected"):
            comm.get_combine_input_buffer(torch.float16)

    def test_layer_that_does_not_fit(self, protocol: str) -> None:
        channel = create_channel(protocol=protocol)
        with pytest.raises(ConfigError, match="spreads experts over 2 ranks, but the group has 1"):
            channel.communicator(ExpertPlacement.contiguous(4, 2), 3)
        with pytest.raises(ConfigError, match="hidden_size must be at least 1, got 0"):
            channel.communicator(ExpertPlacement.contiguous(4, 1), 0)

    def test_options(self, protocol: str) -> None:
        with pytest.raises(ConfigError, match="max_tokens_per_rank must be at least 1, got 0"):
            create_channel(protocol=protocol, max_tokens_per_rank=0)
        with pytest.raises(ConfigError, match="timeout_s must be positive, got 0"):
            create_channel(protocol=protocol, timeout_s=0)


def test_unknown_protocol() -> None:
    with pytest.raises(ConfigError, match="unknown protocol 'fences'; known: auto, loopback, collective"):
        create_channel(protocol="fences")


def test_one_rank_out_of_order(run_ranks: Any) -> None:
    run_ranks(out_of_order, 2)


def out_of_order(ranks: Ranks) -> None:
    """A refused call on one rank sends nothing, so the ranks stay in step."""
    comm = open_comm("collective", ranks.group, ranks.ep_size)
    for step in range(3):
        if ranks.rank == 1:
            with pytest.raises(CommunicationError, match="rank 1: combine without a dispatch"):
                comm.combine(torch.zeros(8, 3))
        dispatch(comm)
        if ranks.rank == 1:
            with pytest.raises(CommunicationError, match=f"rank 1: dispatch while the dispatch of step {step + 1}"):
                dispatch(comm)
        buffer = comm.get_combine_input_buffer(torch.float32).fill_(step + 1.0)
        assert torch.equal(comm.combine(buffer), torch.full((2, 3), step + 1.0))
