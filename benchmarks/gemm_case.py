"""What the benchmark of grouped GEMMs measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One projection of a rank's experts.

    Attributes:
        model: name of the shape.
        stage: ``"fc1"`` or ``"fc2"``.
        operands: a key of :mod:`.gemm`'s ``FORMATS``.
        experts, n, k: local experts, output features of a part, their length.
        tokens: rows an expert gets in the mean.
        active: experts that get any.
        routing: ``"even"``: all active experts alike; ``"poisson"``: independently random; ``"skew"``: 90 % of the rows
            go to one expert.
    """

    model: str
    stage: str
    operands: str
    experts: int
    n: int
    k: int
    tokens: int
    active: int
    routing: str = "even"

    @property
    def parts(self) -> int:
        return 2 if self.stage == "fc1" else 1

    def counts(self) -> list[int]:
        """Rows of each expert."""
        if self.routing == "skew":
            few = self.experts * self.tokens // 10 // max(self.experts - 1, 1)
            return [self.experts * self.tokens - few * (self.experts - 1)] + [few] * (self.experts - 1)
        counts = [self.tokens] * self.active + [0] * (self.experts - self.active)
        if self.routing == "poisson":
            generator = torch.Generator().manual_seed(self.tokens)
            counts = torch.poisson(torch.tensor(counts, dtype=torch.float32), generator=generator).int().tolist()
        return counts
