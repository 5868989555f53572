"""Which experts a benchmark's tokens select: perfect, uniform and Zipf routing, and how unbalanced they are.

Perfect routing is the same on every source rank: selection j of token i goes to rank (i·k + j) mod P and there to local
expert ((i·k + j) div P) mod E_ℓ. Zipf routing (paper §5.3): each token draws k distinct experts with probability
proportional to i^−α, where i is the expert's position in a random order that all ranks share; α = 0 is uniform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_layer.comm.placement import ExpertPlacement
from moe_layer.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """A kind of routing.

    Attributes:
        alpha: Zipf's exponent; None for perfect routing.
    """

    alpha: float | None = None

    @classmethod
    def parse(cls, text: str) -> Routing:
        """``perfect``, ``uniform`` or ``zipf:ALPHA``.

        Raises:
            ConfigError: anything else.
        """
        if text == "perfect":
            return cls()
        if text == "uniform":
            return cls(0.0)
        kind, _, alpha = text.partition(":")
        try:
            if kind == "zipf" and float(alpha) >= 0:
                return cls(float(alpha))
        except ValueError:
            pass
        raise ConfigError(f"unknown routing {text!r}; known: perfect, uniform, zipf:ALPHA with ALPHA ≥ 0")

    def __str__(self) -> str:
        if self.alpha is None:
            return "perfect"
        return "uniform" if self.alpha == 0 else f"zipf:{self.alpha:g}"

    def ids(self, tokens: int, top_k: int, placement: ExpertPlacement, rank: int, seed: int = 0) -> torch.Tensor:
        """``[tokens, top_k]`` int32 global expert ids, on the CPU, that source rank ``rank`` selects.

        Raises:
            ConfigError: fewer experts than ``top_k``, or with perfect routing a rank without experts.
        """
        if self.alpha is None:
            return perfect_ids(tokens, top_k, placement)
        return zipf_ids(tokens, top_k, placement.num_experts, self.alpha, rank=rank, seed=seed)


def perfect_ids(tokens: int, top_k: int, placement: ExpertPlacement) -> torch.Tensor:
    """``[tokens, top_k]`` int32 global ids of perfect routing, for any placement.

    Raises:
        ConfigError: a rank holds no expert, or too few for a token to select only distinct ones.
    """
    held = [placement.local_experts(rank) for rank in range(placement.ep_size)]
    needed = -(-top_k // placement.ep_size)
    for rank, experts in enumerate(held):
        if len(experts) < needed:
            raise ConfigError(
                f"perfect routing sends up to {needed} selections of a token to rank {rank}, which holds "
                f"{len(experts)} of the {placement.num_experts} experts"
            )
    counts = torch.tensor([len(experts) for experts in held])
    table = torch.zeros(placement.ep_size, int(counts.max()), dtype=torch.int32)
    for rank, experts in enumerate(held):
        table[rank, : len(experts)] = torch.tensor(experts, dtype=torch.int32)
    selection = torch.arange(tokens * top_k).view(tokens, top_k)
    rank_of = selection % placement.ep_size
    local = (selection // placement.ep_size) % counts[rank_of]
    return table[rank_of, local]


def zipf_ids(tokens: int, top_k: int, num_experts: int, alpha: float, *, rank: int, seed: int = 0) -> torch.Tensor:
    """``[tokens, top_k]`` int32 global ids, distinct in a token, in the order drawn.

    Args:
        alpha: 0 for uniform.
        rank: the source rank; ranks draw different tokens but share the order of popularity.
        seed: of the order and of the tokens.

    Raises:
        ConfigError: fewer experts than ``top_k``.
    """
    if top_k > num_experts:
        raise ConfigError(f"a token cannot select top_k={top_k} distinct experts of {num_experts}")
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    probability = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -alpha
    # Any odd multiplier above the number of ranks keeps the streams of (seed, rank) pairs apart.
    draws = torch.Generator().manual_seed(seed * 1_000_003 + 2 * rank + 1)
    # Drawing one by one without replacement equals taking the k first arrivals of independent Poisson processes whose
    # rates are the probabilities.
    arrival = torch.empty(tokens, num_experts, dtype=torch.float64).exponential_(generator=draws) / probability
    return order[arrival.topk(top_k, dim=1, largest=False).indices].to(torch.int32)


def copies(ids: torch.Tensor, placement: ExpertPlacement) -> torch.Tensor:
    """``[tokens, ep_size]`` bool: the ranks that each token is sent to, once each."""
    ranks = placement.rank_table()[ids.long()].long()
    return torch.zeros(ids.shape[0], placement.ep_size, dtype=torch.bool).scatter_(1, ranks, True)


def traffic(ids_of_ranks: Sequence[torch.Tensor], placement: ExpertPlacement) -> torch.Tensor:
    """``[ep_size, ep_size]`` int64: tokens that source rank s sends to rank r, a copy each."""
    return torch.stack([copies(ids, placement).sum(0) for ids in ids_of_ranks])


def busiest_link(matrix: torch.Tensor) -> int:
    """The most copies that leave one rank for others, or reach one rank from others, of a :func:`traffic` matrix."""
    remote = matrix - matrix.diag().diag()
    return int(torch.maximum(remote.sum(0).max(), remote.sum(1).max()))


def load_imbalance(ids_of_ranks: Sequence[torch.Tensor], placement: ExpertPlacement) -> float:
    """Token–expert pairs that the busiest rank computes, relative to an even share (paper, Table 5); 1 is balanced."""
    pairs = torch.zeros(placement.ep_size, dtype=torch.int64)
    for ids in ids_of_ranks:
        pairs += torch.bincount(placement.rank_table()[ids.long()].flatten().long(), minlength=placement.ep_size)
    return float(pairs.max() * placement.ep_size / pairs.sum())
