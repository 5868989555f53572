"""Which experts a benchmark's tokens select: perfect, uniform, Zipf and recorded routing, and how unbalanced they are.

Perfect routing is the same on every source rank: selection j of token i goes to rank (i·k + j) mod P and there to local
expert ((i·k + j) div P) mod E_ℓ. Zipf routing (paper §5.3): each token draws k distinct experts with probability
proportional to i^−α, where i is the expert's position in a random order that all ranks share; α = 0 is uniform.
A trace is a safetensors file with ``topk_ids`` ``[tokens, top_k]``, the selections of real tokens: each source rank
takes the next T of them, and after the last comes the first again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_layer.comm.placement import ExpertPlacement
from moe_layer.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """A kind of routing.

    Attributes:
        alpha: Zipf's exponent; None for perfect routing.
        trace: a file of recorded selections instead.
    """

    alpha: float | None = None
    trace: str | None = None

    @classmethod
    def parse(cls, text: str) -> Routing:
        """``perfect``, ``uniform``, ``zipf:ALPHA`` or ``trace:FILE``.

        Raises:
            ConfigError: anything else.
        """
        if text == "perfect":
            return cls()
        if text == "uniform":
            return cls(0.0)
        kind, _, alpha = text.partition(":")
        if kind == "trace" and alpha:
            read_trace(alpha)
            return cls(trace=alpha)
        try:
            if kind == "zipf" and float(alpha) >= 0:
                return cls(float(alpha))
        except ValueError:
            pass
        raise ConfigError(f"unknown routing {text!r}; known: perfect, uniform, zipf:ALPHA with ALPHA ≥ 0, trace:FILE")

    def __str__(self) -> str:
        if self.trace is not None:
            return f"trace:{Path(self.trace).name}"
        if self.alpha is None:
            return "perfect"
        return "uniform" if self.alpha == 0 else f"zipf:{self.alpha:g}"

    def ids(self, tokens: int, top_k: int, placement: ExpertPlacement, rank: int, seed: int = 0) -> torch.Tensor:
        """``[tokens, top_k]`` int32 global expert ids, on the CPU, that source rank ``rank`` selects.

        Raises:
            ConfigError: fewer experts than ``top_k``, with perfect routing a rank without experts, or a trace of
                another model.
        """
        if self.trace is not None:
            return trace_ids(self.trace, tokens, top_k, placement.num_experts, rank=rank)
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


@functools.lru_cache(maxsize=4)
def read_trace(file: str) -> torch.Tensor:
    """``[tokens, top_k]`` int32 ids of a trace.

    Raises:
        ConfigError: no such file, or not a trace.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        ids = load_file(file).get("topk_ids")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"trace {file}: {error}") from None
    if ids is None or ids.dim() != 2 or ids.shape[0] < 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"trace {file}: no topk_ids [tokens, top_k] of int32 or int64 in it")
    return ids.to(torch.int32)


def trace_ids(file: str, tokens: int, top_k: int, num_experts: int, *, rank: int) -> torch.Tensor:
    """``[tokens, top_k]`` int32: rows rank·tokens … of a trace, from the first again after the last.

    Raises:
        ConfigError: no trace, or one of a model with another top_k or more experts.
    """
    ids = read_trace(file)
    if ids.shape[1] != top_k or not bool(((ids >= 0) & (ids < num_experts)).all()):
        raise ConfigError(
            f"trace {file}: {ids.shape[1]} selections a token, ids {int(ids.min())} to {int(ids.max())}, but the model "
            f"selects {top_k} of {num_experts}"
        )
    return ids[(rank * tokens + torch.arange(tokens)) % ids.shape[0]]


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
