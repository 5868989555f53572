"""What the layer benchmark measures, and all its inputs, from seeds: any rank can make any other's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import Shape
from moe_layer.comm import ExpertPlacement
from moe_layer.config import MoEConfig

EXPERT_FORMAT = {"fp8": "fp8_128x128"}  # weights whose scales span rows


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        shape: the model; its formats are the layer's.
        tokens: T on every rank, and T̂.
        protocol: one of :mod:`.layer_work`'s ``TRANSPORTS``, or the name of a peer.
        ep_size: ranks.
        routing: which experts the tokens select.
        seed: of ids, values and weights.
        quantize_at: as of :class:`~moe_layer.layer.MoELayer`.
        route: whether the router runs too.
    """

    shape: Shape
    tokens: int
    protocol: str
    ep_size: int
    routing: Routing
    seed: int = 0
    quantize_at: str = "source"
    route: bool = False

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement.contiguous(self.shape.num_experts, self.ep_size)

    @property
    def weight_format(self) -> str:
        return EXPERT_FORMAT.get(self.shape.weight_format, self.shape.weight_format)

    def config(self) -> MoEConfig:
        """The routed experts as a model of their own."""
        shape, act = self.shape, self.shape.activation
        return MoEConfig(
            "benchmark", shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k,
            hidden_act="situ" if act.kind == "situ" else "silu", swiglu_limit=act.limit,
            situ_beta=act.beta, situ_linear_beta=act.linear_beta,
        )  # fmt: skip

    def ids(self, rank: int) -> torch.Tensor:
        """``[T, top_k]`` int32, on the CPU, of source rank ``rank``."""
        return self.routing.ids(self.tokens, self.shape.top_k, self.placement, rank, self.seed)

    def weights(self, rank: int) -> torch.Tensor:
        """``[T, top_k]`` fp32 router weights, on the CPU, that sum to one."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        weights = torch.rand(self.tokens, self.shape.top_k, generator=generator) + 0.1
        return weights / weights.sum(1, keepdim=True)

    def z(self, rank: int, repeat: int, device: torch.device) -> torch.Tensor:
        """``[T, hidden]`` BF16 tokens of N(0, 1); the same values on every device of a kind."""
        generator = torch.Generator(device).manual_seed((self.seed * 1000 + rank) * 1000 + repeat)
        return torch.randn(self.tokens, self.shape.hidden_size, generator=generator, device=device).bfloat16()

    def projections(self, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up ``[inter, hidden]`` and down ``[hidden, inter]`` of a global expert, BF16.

        The same values on every device of a kind; variance one over the row length.
        """
        generator = torch.Generator(device).manual_seed(self.seed * 100_003 + expert)
        hidden, inter = self.shape.hidden_size, self.shape.intermediate_size
        shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
        drawn = [torch.randn(n, k, generator=generator, device=device) * k**-0.5 for n, k in shapes]
        gate, up, down = (w.bfloat16() for w in drawn)
        return gate, up, down

    def bf16_experts(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``[E_ℓ, 2·inter, hidden]`` and ``[E_ℓ, hidden, inter]`` BF16 weights of a rank, for peers."""
        gate_up, down = [], []
        for expert in self.placement.local_experts(rank):
            gate, up, d = self.projections(expert, device)
            gate_up.append(torch.cat([gate, up]))
            down.append(d)
        return torch.stack(gate_up), torch.stack(down)
