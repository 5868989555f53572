"""The shared experts: one MLP that every token passes, fused from all of them."""

from __future__ import annotations

import torch

from moe_layer.gated_mlp import GatedMLP
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.quant import get_format


class SharedExperts(GatedMLP):
    """``down(act(gate·x, up·x))`` with the routed experts' activation, clamp included.

    It is an MoE of one expert that everybody chooses, so it runs on the same stages and any weight format.

    Args:
        hidden_size, intermediate_size: of the fused MLP.
        activation: the routed experts' own.
        weight_format: registry name of both projections.
        activation_format: ``"bf16"``, or ``"fp32"`` where the layer is fp32. Its rows are not quantized further: they
            travel nowhere, and FP8 or FP4 activations would cost accuracy for nothing.
        backend: runs the stages.
        device: where the weights lie.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        weight_format: str,
        activation_format: str,
        backend: ComputeBackend,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(1, hidden_size, intermediate_size, weight_format, device, backend)
        self.activation = activation
        self.activation_format = activation_format
        self.backend = backend

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` → ``[T, hidden_size]`` fp32."""
        ids = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
        index = self.backend.build_index(ids, 0, 1)
        quantized = get_format(self.activation_format).quantize(x)
        h = self.backend.fc1(quantized, self.gate_up.weights(), index, self.activation, self.activation_format)
        # One expert and one selection a token: rows stand in token order, with nothing to weight or sum.
        return self.backend.fc2(h, self.down.weights(), index).float()
