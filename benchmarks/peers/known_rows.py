"""Inputs of combine whose sums are known, for peers of the all-to-all: each rank sends one row back for all tokens."""

from __future__ import annotations

import torch

from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.ranks import LocalRank
from moe_layer.benchmarks.routing import copies
from moe_layer.errors import CommunicationError
from moe_layer.quant import get_format

TOLERANCE = 2e-2  # of BF16 sums in another order, relative to the largest value


class KnownRows:
    """One rank's tokens and routing, and what combine must give."""

    def __init__(self, rank: LocalRank, case: Case, seed: int = 0) -> None:
        self.case, self.rank, device = case, rank, rank.device
        self.repeat = 0
        generator = torch.Generator().manual_seed(case.seed * 1000 + rank.rank)
        hidden = case.shape.hidden_size
        self.values = torch.randn(case.tokens, hidden, generator=generator).bfloat16().to(device)
        self.weights = torch.rand(case.tokens, case.shape.top_k, generator=generator).to(device)
        self.ids = case.ids(rank.rank).to(device)
        fmt = get_format(case.shape.activation_format)
        self.rows, self.scales = fmt.quantize_to_wire(self.values)

    def row(self, rank: int) -> torch.Tensor:
        """``[hidden]`` BF16 that rank ``rank`` sends back for every token, another in each repeat."""
        generator = torch.Generator().manual_seed((self.case.seed * 1000 + rank) * 1000 + self.repeat)
        return torch.randn(self.case.shape.hidden_size, generator=generator).bfloat16().to(self.rank.device)

    def sum_over_ranks(self) -> torch.Tensor:
        """``[T, hidden]`` fp32: each rank's row once for each token that it got."""
        sent = copies(self.ids.cpu(), self.case.placement).to(self.rank.device)
        rows = torch.stack([self.row(rank) for rank in range(self.case.ep_size)]).float()
        return sent.float() @ rows

    def weighted_sum(self) -> torch.Tensor:
        """``[T, hidden]`` fp32: each selection's rank's row, times its weight."""
        ranks = self.case.placement.rank_table(self.rank.device)[self.ids.long()].long()
        rows = torch.stack([self.row(rank) for rank in range(self.case.ep_size)]).float()
        return (self.weights[..., None] * rows[ranks]).sum(1)

    def compare(self, output: torch.Tensor, expected: torch.Tensor) -> None:
        """Raises CommunicationError unless they agree to :data:`TOLERANCE`."""
        worst = float((output.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not worst <= TOLERANCE:  # NaN too
            raise CommunicationError(f"rank {self.rank.rank}: combined rows are {worst:.1e} of the largest value off")
