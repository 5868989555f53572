"""Where tokens go: from expert ids to destination ranks, in PyTorch and without a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_layer.comm.base import INVALID_EXPERT_ID


@dataclass(frozen=True)
class Copies:
    """The copies of tokens that one rank sends in a step.

    Attributes:
        token_index: ``[sum(counts)]`` int64: the token of each copy, grouped by destination rank in ascending order, in
            token order within a rank.
        counts: for each destination rank, its copies.
    """

    token_index: torch.Tensor
    counts: list[int]


def clean_ids(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``topk_ids`` as int32, with every id outside [0, num_experts) replaced by −1.

    The replacement comes before the narrowing, so that an int64 id ≥ 2³² cannot wrap into the range.
    """
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    return torch.where(valid, topk_ids, INVALID_EXPERT_ID).to(torch.int32)


def copies_to_send(ids: torch.Tensor, rank_table: torch.Tensor, ep_size: int) -> Copies:
    """The copies to send for ``ids``. On a GPU this waits for the stream.

    Args:
        ids: ``[T, top_k]`` int32 from :func:`clean_ids`.
        rank_table: ``[num_experts + 1]`` int64: the rank of each expert, then ``ep_size`` for "no destination".
        ep_size: ranks of the group.
    """
    no_destination = rank_table.shape[0] - 1
    rank_of_id = rank_table[torch.where(ids < 0, no_destination, ids).long()]
    # A token that selects several experts of a rank sets the same element: one copy per rank.
    goes_to = torch.zeros(ids.shape[0], ep_size + 1, dtype=torch.bool, device=ids.device)
    goes_to.scatter_(1, rank_of_id, True)
    goes_to = goes_to[:, :ep_size]
    # nonzero() lists coordinates in row-major order: by rank, then by token.
    token_index = goes_to.t().nonzero()[:, 1].contiguous()
    return Copies(token_index, goes_to.sum(0).tolist())


def count_experts(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[num_experts]`` int32: how often each expert occurs in ``topk_ids``; ids out of range count nowhere."""
    ids = clean_ids(topk_ids, num_experts).long().flatten()
    ids = torch.where(ids < 0, num_experts, ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts[:num_experts]
