"""Peers that are late, fail half-way or die: an error within the time limit that names rank, peer, phase and step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_harness import RankPool, Ranks

from moe_layer.comm import ExpertPlacement, create_channel
from moe_layer.errors import CommunicationError, CommunicationTimeoutError

TIMEOUT_S = 1.0
GROUP = (0, 1, 2)
LOST = 1  # rank of GROUP


@pytest.fixture
def pool() -> Any:
    """Processes of the test's own, because it breaks them."""
    with RankPool(4) as pool:
        yield pool


def open_comm(group: Any, timeout_s: float = TIMEOUT_S) -> Any:
    channel = create_channel(group, protocol="collective", max_tokens_per_rank=4, timeout_s=timeout_s)
    return channel.communicator(ExpertPlacement.contiguous(6, channel.ep_size), 5)


def dispatch(comm: Any) -> None:
    # Every token goes to every rank.
    comm.dispatch(torch.randn(3, 5), torch.tensor([[0, 2, 4]] * 3))


def combine(comm: Any) -> None:
    comm.combine(comm.get_combine_input_buffer())


def check_timeout(call: Callable[[], None], comm: Any, expected: str, within_s: float) -> None:
    start = time.monotonic()
    with pytest.raises(CommunicationTimeoutError, match=f"^rank {comm.ep_rank}: {expected}"):
        call()
    assert time.monotonic() - start < within_s
    # What came half-way cannot be repaired: the channel says so from then on, and can be destroyed.
    with pytest.raises(CommunicationError, match=f"on a channel that failed earlier.*{expected}"):
        dispatch(comm)
    comm.destroy()
    comm.destroy()


def test_late_peers(run_ranks: Any) -> None:
    run_ranks(wait_for_late_peers, 4)


def wait_for_late_peers(ranks: Ranks) -> None:
    groups = [ranks.new_group(GROUP) for _ in range(2)]
    if ranks.rank not in GROUP:
        return
    comms = [open_comm(group) for group in groups]
    dispatch(comms[1])
    if ranks.rank == LOST:
        time.sleep(3 * TIMEOUT_S)
        return
    expected = f"dispatch of step 1: no answer from rank {LOST} within 1 s"
    check_timeout(lambda: dispatch(comms[0]), comms[0], expected, 2 * TIMEOUT_S)
    expected = f"combine of step 1: no answer from rank {LOST} within 1 s"
    check_timeout(lambda: combine(comms[1]), comms[1], expected, 2 * TIMEOUT_S)


def test_peer_that_fails_between_header_and_rows(run_ranks: Any) -> None:
    run_ranks(fail_half_way, 4)


def fail_half_way(ranks: Ranks) -> None:
    """Out of memory once the peers count on this rank's rows."""
    group = ranks.new_group(GROUP)
    if ranks.rank not in GROUP:
        return
    comm = open_comm(group)
    dispatch(comm)
    combine(comm)
    if ranks.rank == LOST:

        def take(*args: Any) -> None:
            raise MemoryError("no room for the rows")

        comm.channel.workspace.take = take
        with pytest.raises(MemoryError):
            dispatch(comm)
        with pytest.raises(CommunicationError, match=r"on a channel that failed earlier.*no room for the rows"):
            dispatch(comm)
        time.sleep(3 * TIMEOUT_S)
    else:
        expected = f"dispatch of step 2: no answer from rank {LOST} within 1 s"
        check_timeout(lambda: dispatch(comm), comm, expected, 2 * TIMEOUT_S)


def test_killed_peers(pool: RankPool) -> None:
    """World rank 1 dies in the rows of a dispatch, then world rank 3 in the header of a combine."""
    results = pool.run(die_in_turn, 4, may_die=(1, 3))
    assert results == ["survived", None, "survived", None]


def die_in_turn(ranks: Ranks) -> str:
    first, second = ranks.new_group((0, 1, 2)), ranks.new_group((0, 2, 3))
    if ranks.rank in (0, 1, 2):
        comm = open_comm(first, timeout_s=30)
        dispatch(comm)
        combine(comm)
        if ranks.rank == 1:
            comm.channel.exchange_for("", torch.empty(0)).all_to_all = kill_self
        expected = "dispatch of step 2: lost the connection to rank 1 "
        check_timeout(lambda: dispatch(comm), comm, expected, 10)
    # ranks 0, 2, 3 of the world are 0, 1, 2 of this group
    comm = open_comm(second, timeout_s=30)
    dispatch(comm)
    if ranks.rank == 3:
        time.sleep(0.2)  # the others wait by now
        kill_self()
    expected = "combine of step 1: lost the connection to rank 2 "
    check_timeout(lambda: combine(comm), comm, expected, 10)
    return "survived"


def kill_self(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
