"""Wrong arguments on one rank and ranks that disagree: everyone learns who and what, and the next step works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from all_to_all_check import Case, check_step
from distributed_harness import Ranks

from moe_layer.comm import ExpertPlacement, create_channel
from moe_layer.errors import CapacityError, CommunicationError, MoELayerError, RankMismatchError, TensorError

MAX_TOKENS = 8
NUM_EXPERTS = 6
HIDDEN = 4
ODD = 1  # the rank that differs; the others make the usual call

# What the odd rank changes → the disagreement every rank reports (the odd rank is 1, compared with rank 0).
DISAGREEMENTS = {
    "T̂": ({"t_hat": 7}, "runtime_max_tokens_per_rank: rank 0 has 8, rank 1 has 7"),
    "top_k": ({"top_k": 3}, "top_k: rank 0 has 2, rank 1 has 3"),
    "row width": ({"row": 5}, "the bytes of a row of hidden_states: rank 0 has 8, rank 1 has 10"),
    "row dtype": (
        {"dtype": torch.float16},
        "the dtype of hidden_states: rank 0 has torch.bfloat16, rank 1 has torch.float16",
    ),
    "weights": ({"weights": True}, "topk_weights: rank 0 has none, rank 1 has some"),
    "scale": ({"scale": 2}, "the dtype of hidden_states_scale: rank 0 has none, rank 1 has torch.float32"),
    "experts": ({"num_experts": 7}, "the number of experts: rank 0 has 6, rank 1 has 7"),
    "placement": ({"rank_of": (0, 0, 0, 0, 0, 1)}, r"the placement of the experts: rank 0 has table \w{8}, rank 1"),
    "hidden_size": ({"hidden_size": 5}, "hidden_size, the width that combine returns,: rank 0 has 4, rank 1 has 5"),
}


def usual_dispatch(channel: Any, **changes: Any) -> Any:
    """A dispatch of two tokens, with ``changes``; returns the communicator."""
    ep_size = channel.ep_size
    num_experts = changes.get("num_experts", NUM_EXPERTS)
    placement = ExpertPlacement.contiguous(num_experts, ep_size)
    if "rank_of" in changes:
        placement = ExpertPlacement.from_table(changes["rank_of"], ep_size)
    comm = channel.communicator(placement, changes.get("hidden_size", HIDDEN))
    tokens, top_k = changes.get("tokens", 2), changes.get("top_k", 2)
    comm.dispatch(
        torch.randn(tokens, changes.get("row", HIDDEN)).to(changes.get("dtype", torch.bfloat16)),
        changes.get("ids", torch.randint(0, num_experts, (tokens, top_k))),
        torch.randn(tokens, top_k) if changes.get("weights") else None,
        hidden_states_scale=torch.randn(tokens, changes["scale"]) if "scale" in changes else None,
        runtime_max_tokens_per_rank=changes.get("t_hat"),
    )
    return comm


def caught(call: Any, *args: Any, **changes: Any) -> tuple[str, str]:
    """The type and the message of what ``call`` raises."""
    try:
        call(*args, **changes)
    except MoELayerError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def open_channel(ranks: Ranks) -> Any:
    return create_channel(ranks.group, protocol="collective", max_tokens_per_rank=MAX_TOKENS, timeout_s=20)


def check_reusable(channel: Any) -> None:
    """A whole step, compared with the oracle."""
    case = Case((3, 0, 5)[: channel.ep_size], num_experts=7, top_k=3)
    placement = ExpertPlacement.contiguous(7, channel.ep_size)
    seed = torch.randint(2**31, (1,))  # the same on every rank
    dist.broadcast(seed, group=channel.group, group_src=0)
    check_step(channel.communicator(placement, case.hidden_size), case, int(seed))


def disagree_in_dispatch(ranks: Ranks, odd: int, changes: dict[str, Any]) -> tuple[str, str]:
    channel = open_channel(ranks)
    error = caught(usual_dispatch, channel, **(changes if ranks.rank == odd else {}))
    check_reusable(channel)
    return error


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(run_ranks: Any, name: str) -> None:
    changes, expected = DISAGREEMENTS[name]
    errors = run_ranks(disagree_in_dispatch, 3, ODD, changes)
    assert {kind for kind, _ in errors} == {"RankMismatchError"}
    messages = {message for _, message in errors}
    assert len(messages) == 1, "every rank must raise the same message"
    with pytest.raises(RankMismatchError, match="dispatch of step 1: ranks disagree about " + expected):
        raise RankMismatchError(messages.pop())


def test_the_first_rank_is_the_odd_one(run_ranks: Any) -> None:
    errors = run_ranks(disagree_in_dispatch, 3, 0, {"top_k": 5})
    assert (
        errors
        == [("RankMismatchError", "dispatch of step 1: ranks disagree about top_k: rank 0 has 5, rank 1 has 2")] * 3
    )


LOCAL_ERRORS = {
    "T = maximum + 1": ({"tokens": MAX_TOKENS + 1}, CapacityError, "9 tokens to dispatch"),
    "T above T̂": (
        {"tokens": 5, "t_hat": 4},
        CapacityError,
        "5 tokens to dispatch, but .* is 4",
    ),
    "T̂ above the maximum": ({"t_hat": 9}, CapacityError, "sized for max_tokens_per_rank=8"),
    "top_k 33": (
        {"ids": torch.zeros(2, 33, dtype=torch.int32)},
        TensorError,
        "top_k=33; expected 1 to 32",
    ),
    "float ids": ({"ids": torch.zeros(2, 2)}, TensorError, "topk_ids has dtype torch.float32"),
    "ids of more tokens": ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, TensorError, r"topk_ids has shape \[3, 2\]"),
    "no tensor": ({"ids": [[0, 1], [1, 2]]}, TensorError, "topk_ids is a list; expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", LOCAL_ERRORS)
def test_wrong_arguments_on_one_rank(run_ranks: Any, name: str) -> None:
    changes, kind, expected = LOCAL_ERRORS[name]
    errors = run_ranks(disagree_in_dispatch, 3, ODD, changes)
    own_kind, own_message = errors[ODD]
    assert own_kind == kind.__name__
    with pytest.raises(kind, match="^rank 1: .*" + expected):
        raise kind(own_message)
    for rank in (0, 2):
        assert errors[rank] == (
            "CommunicationError",
            f"rank {rank}: dispatch of step 1 was given up because rank 1 failed: {own_message}",
        )


def test_wrong_arguments_on_all_ranks(run_ranks: Any) -> None:
    errors = run_ranks(all_wrong, 2)
    assert [kind for kind, _ in errors] == ["CapacityError"] * 2
    assert [message[:7] for _, message in errors] == ["rank 0:", "rank 1:"]


def all_wrong(ranks: Ranks) -> tuple[str, str]:
    channel = open_channel(ranks)
    error = caught(usual_dispatch, channel, tokens=MAX_TOKENS + 1)
    check_reusable(channel)
    return error


def test_long_messages_are_cut(run_ranks: Any) -> None:
    errors = run_ranks(fail_at_length, 2)
    assert errors[1] == ("ValueError", "é" * 400)
    kind, message = errors[0]
    assert kind == "CommunicationError"
    assert "rank 1 failed: " + "é" * 100 in message and len(message) < 400


def fail_at_length(ranks: Ranks) -> tuple[str, str]:
    """An unexpected exception counts as a failure of the rank too."""
    channel = open_channel(ranks)

    def fail(*args: Any) -> int:
        raise ValueError("é" * 400 + "\nsecond line")

    if ranks.rank == 1:
        channel.tokens_per_rank = fail
    try:
        usual_dispatch(channel)
    except (ValueError, CommunicationError) as error:
        return type(error).__name__, str(error).splitlines()[0]
    raise AssertionError("nothing was raised")


def test_combine_that_ranks_disagree_about(run_ranks: Any) -> None:
    expected = "the dtype of expert_output: rank 0 has torch.bfloat16, rank 1 has torch.float32"
    assert (
        run_ranks(combine_in_two_dtypes, 3)
        == [("RankMismatchError", f"combine of step 1: ranks disagree about {expected}")] * 3
    )


def combine_in_two_dtypes(ranks: Ranks) -> tuple[str, str]:
    channel = open_channel(ranks)
    comm = usual_dispatch(channel)
    dtype = torch.float32 if ranks.rank == ODD else torch.bfloat16
    error = caught(comm.combine, comm.get_combine_input_buffer(dtype))
    check_reusable(channel)
    return error


def test_wrong_combine_on_one_rank(run_ranks: Any) -> None:
    errors = run_ranks(combine_wrong_shape, 3)
    message = "rank 1: expert_output has shape [3, 4]; expected [ep_size*T̂, hidden_size] = [24, 4]"
    assert errors[1] == ("TensorError", message)
    for rank in (0, 2):
        assert errors[rank] == (
            "CommunicationError",
            f"rank {rank}: combine of step 1 was given up because rank 1 failed: {message}",
        )


def combine_wrong_shape(ranks: Ranks) -> tuple[str, str]:
    channel = open_channel(ranks)
    comm = usual_dispatch(channel)
    own = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    error = caught(comm.combine, own if ranks.rank == ODD else comm.get_combine_input_buffer())
    check_reusable(channel)
    return error


def test_different_calls(run_ranks: Any) -> None:
    """One rank asks for the load while the others dispatch."""
    message = "ranks disagree about the call to make: rank 0 has dispatch, rank 1 has expert_load"
    assert run_ranks(call_differently, 3) == [("RankMismatchError", message)] * 3


def call_differently(ranks: Ranks) -> tuple[str, str]:
    channel = open_channel(ranks)
    comm = channel.communicator(ExpertPlacement.contiguous(NUM_EXPERTS, ranks.ep_size), HIDDEN)
    if ranks.rank == ODD:
        error = caught(comm.expert_load, torch.zeros(1, 1, dtype=torch.int64))
    else:
        error = caught(usual_dispatch, channel)
    check_reusable(channel)
    return error


def test_expert_load_of_different_models(run_ranks: Any) -> None:
    message = "expert_load after step 0: ranks disagree about the number of experts: rank 0 has 6, rank 1 has 7"
    assert run_ranks(load_differently, 2) == [("RankMismatchError", message)] * 2


def load_differently(ranks: Ranks) -> tuple[str, str]:
    comm = open_channel(ranks).communicator(ExpertPlacement.contiguous(NUM_EXPERTS + ranks.rank, ranks.ep_size), HIDDEN)
    return caught(comm.expert_load, torch.zeros(1, 1, dtype=torch.int64))


def test_wrong_expert_load_on_one_rank(run_ranks: Any) -> None:
    errors = run_ranks(load_wrong_dtype, 2)
    own = "rank 1: topk_ids has dtype torch.float32; expected torch.int32 or torch.int64"
    peer = f"rank 0: expert_load after step 0 was given up because rank 1 failed: {own}"
    assert errors == [("CommunicationError", peer), ("TensorError", own)]


def load_wrong_dtype(ranks: Ranks) -> tuple[str, str]:
    channel = open_channel(ranks)
    comm = channel.communicator(ExpertPlacement.contiguous(NUM_EXPERTS, ranks.ep_size), HIDDEN)
    error = caught(comm.expert_load, torch.zeros(1, 1, dtype=torch.float32 if ranks.rank == 1 else torch.int64))
    check_reusable(channel)
    return error
