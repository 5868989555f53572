"""Which rank holds which expert.

A placement is two tables over global expert ids, so a balanced (EPLB) placement needs no other kernel than the
contiguous default. Replicated experts are served by physical ids: the balancer maps a logical id to one of its
replicas' physical ids before dispatch, and the placement places physical experts, each on exactly one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe_layer.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """Global expert id → (rank, local index).

    Attributes:
        ep_size: ranks of the group (the paper's P).
        rank_of: for each global expert, the rank that holds it, in [0, ep_size).
        local_of: for each global expert, its index among that rank's experts.
    """

    ep_size: int
    rank_of: tuple[int, ...]
    local_of: tuple[int, ...] = field(repr=False)

    @property
    def num_experts(self) -> int:
        return len(self.rank_of)

    @classmethod
    def contiguous(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Blocks of consecutive experts; where ``num_experts`` is not a multiple, the first ranks hold one more.

        Raises:
            ConfigError: ``num_experts`` or ``ep_size`` is less than 1.
        """
        if num_experts < 1 or ep_size < 1:
            raise ConfigError(f"num_experts and ep_size must be at least 1, got {num_experts} and {ep_size}")
        quotient, remainder = divmod(num_experts, ep_size)
        return cls.from_table([r for r in range(ep_size) for _ in range(quotient + (r < remainder))], ep_size)

    @classmethod
    def from_table(cls, rank_of: Sequence[int], ep_size: int) -> ExpertPlacement:
        """A placement from the rank of each expert; local indices follow the order of the global ids on each rank.

        Raises:
            ConfigError: a rank outside [0, ep_size).
        """
        counts = [0] * ep_size
        local_of = []
        for expert, rank in enumerate(rank_of):
            if not 0 <= rank < ep_size:
                raise ConfigError(f"expert {expert} is placed on rank {rank}, but the group has ranks 0…{ep_size - 1}")
            local_of.append(counts[rank])
            counts[rank] += 1
        return cls(ep_size, tuple(rank_of), tuple(local_of))

    def local_experts(self, rank: int) -> list[int]:
        """Global ids of the experts on ``rank``, in local order."""
        return [e for e, r in enumerate(self.rank_of) if r == rank]

    def rank_table(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """``[num_experts]`` int32: the rank of each expert."""
        return torch.tensor(self.rank_of, dtype=torch.int32, device=device)

    def local_table(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """``[num_experts]`` int32: the local index of each expert on ``rank``, −1 for experts held elsewhere."""
        table = [loc if r == rank else -1 for r, loc in zip(self.rank_of, self.local_of)]
        return torch.tensor(table, dtype=torch.int32, device=device)
