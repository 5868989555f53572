"""Gated activations of the experts (models: SwiGLU with optional clamp; SiTU for Kimi-K3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_layer.errors import ConfigError
from moe_layer.gemm.rowwise import sigmoid, silu


@dataclass(frozen=True)
class Activation:
    """``h = act(gate, up)``, evaluated in fp32.

    Attributes:
        kind: ``"swiglu"``: ``silu(gate)·up``; ``"situ"``: ``β·tanh(gate/β)·sigmoid(gate) · λ·tanh(up/λ)``.
        limit: SwiGLU clamp: ``gate ≤ limit`` and ``|up| ≤ limit`` before the activation (DeepSeek-V4), or None.
        beta, linear_beta: β and λ of SiTU.
    """

    kind: str = "swiglu"
    limit: float | None = None
    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self) -> None:
        if self.kind not in ("swiglu", "situ"):
            raise ConfigError(f"unknown activation {self.kind!r}; known: swiglu, situ")

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """``gate``, ``up`` ``[..., N]`` fp32 (or fp64) → ``[..., N]``, each element by itself to the bit."""
        if self.kind == "situ":
            a = self.beta * torch.tanh(gate / self.beta) * sigmoid(gate)
            return a * (self.linear_beta * torch.tanh(up / self.linear_beta))
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
        return silu(gate) * up
