"""What the all-to-all benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import Shape
from moe_layer.comm import ExpertPlacement


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        shape: whose rows travel.
        tokens: T on every rank, and T̂.
        protocol: a key of :mod:`.a2a_work`'s ``ONE_SIDED``, one of its ``PORTABLE`` ones or a peer.
        ep_size: ranks.
        routing: which experts the tokens select.
        seed: of ids and values.
        quantize: one of :mod:`.a2a_work`'s ``QUANTIZE``; all but the first dispatch BF16 values.
    """

    shape: Shape
    tokens: int
    protocol: str
    ep_size: int
    routing: Routing
    seed: int = 0
    quantize: str = "given"

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement.contiguous(self.shape.num_experts, self.ep_size)

    def ids(self, rank: int) -> torch.Tensor:
        """``[T, top_k]`` int32, on the CPU, of source rank ``rank``."""
        return self.routing.ids(self.tokens, self.shape.top_k, self.placement, rank, self.seed)

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of a token to each of its ranks."""
        shape = replace(self.shape, activation_format="bf16") if self.quantize == "target" else self.shape
        return shape.dispatch_bytes

    @property
    def combine_bytes(self) -> int:
        """Bytes of a partial result on the wire."""
        return self.shape.combine_bytes // (2 if self.protocol == "fence+fp8" else 1)

    @property
    def combine_pulls(self) -> bool:
        """Whether combine loads from its peers rather than being stored to."""
        return self.protocol in ("fence", "fence+fp8")
