"""The weights of a gated MLP, or of many: what routed and shared experts alike consist of."""

from __future__ import annotations

import torch
from torch import nn

from moe_layer.config import MoEConfig
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.packed_weights import make_stack
from moe_layer.weights import ExpertStack


def activation_of(cfg: MoEConfig) -> Activation:
    """What lies between a model's projections."""
    kind = "situ" if cfg.hidden_act == "situ" else "swiglu"
    return Activation(kind, cfg.swiglu_limit, cfg.situ_beta, cfg.situ_linear_beta)


class GatedMLP(nn.Module):
    """Both projection groups of one or more experts, packed where ``backend`` reads them so.

    Attributes:
        gate_up: ``[intermediate, hidden]`` gate and up of each.
        down: ``[hidden, intermediate]`` of each.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        weight_format: str,
        device: torch.device | str | None = None,
        backend: ComputeBackend | None = None,
    ) -> None:
        super().__init__()

        def stack(parts: int, rows: int, columns: int) -> ExpertStack:
            tiles = None if backend is None else backend.weight_layout(weight_format, parts, rows, columns)
            return make_stack(num_experts, parts, rows, columns, weight_format, device, tiles)

        self.gate_up = stack(2, intermediate_size, hidden_size)
        self.down = stack(1, hidden_size, intermediate_size)

    @property
    def is_loaded(self) -> bool:
        """Whether every expert has its weights."""
        return not (self.gate_up.unloaded or self.down.unloaded)
