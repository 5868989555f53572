"""Small random layers for tests, in every shape of the model families."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_layer.config import MoEConfig
from moe_layer.layer import MoELayer

CONFIGS = {
    "deepseek_v2": MoEConfig(
        "deepseek_v2", 96, 72, 16, 4, n_shared_experts=2, n_group=4, topk_group=2, group_score="max",
        norm_topk_prob=False, routed_scaling_factor=4.0,
    ),
    "deepseek_v3": MoEConfig(
        "deepseek_v3", 96, 64, 16, 4, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
        n_group=4, topk_group=2, routed_scaling_factor=2.5,
    ),
    "deepseek_v4": MoEConfig(
        "deepseek_v4", 96, 64, 12, 3, n_shared_experts=1, scoring_func="sqrtsoftplus", use_correction_bias=True,
        routed_scaling_factor=1.5, swiglu_limit=1.0,
    ),
    "kimi_k3": MoEConfig(
        "kimi_k3", 128, 64, 22, 7, n_shared_experts=2, shared_expert_intermediate_size=72, scoring_func="sigmoid",
        use_correction_bias=True, hidden_act="situ", routed_expert_hidden_size=64, latent_moe_use_norm=True,
        rms_norm_eps=1e-5,
    ),
    "mixtral": MoEConfig("mixtral", 64, 80, 8, 2),
    "top_k 10": MoEConfig("qwen3_moe", 64, 64, 27, 10),
}  # fmt: skip


def config(name: str, **changes: Any) -> MoEConfig:
    return dataclasses.replace(CONFIGS[name], **changes)


@torch.no_grad()
def fill(layer: MoELayer, seed: int) -> MoELayer:
    """Random weights that any rank of any group reproduces from ``seed``."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * std

    cfg = layer.cfg
    bias = None if layer.gate.e_score_correction_bias is None else randn(cfg.n_routed_experts, std=0.1)
    table = None
    if layer.gate.tid2eid is not None:
        table = torch.stack(
            [
                torch.randperm(cfg.n_routed_experts, generator=g)[: cfg.num_experts_per_tok]
                for _ in range(cfg.vocab_size)
            ]
        )
    layer.gate.load(randn(cfg.n_routed_experts, cfg.hidden_size, std=0.3), bias, tid2eid=table)
    width, inner = cfg.routed_hidden_size, cfg.moe_intermediate_size
    for expert in range(cfg.n_routed_experts):
        size = 0.5 + expert / cfg.n_routed_experts
        gate, up = (randn(inner, width, std=size * 2 * width**-0.5) for _ in range(2))
        layer.load_expert(expert, gate, up, randn(width, inner, std=size * 2 * inner**-0.5))
    if layer.shared_experts is not None:
        shared, n = layer.shared_experts, cfg.shared_intermediate_size
        for part in range(2):
            shared.gate_up.quantize_expert(0, part, randn(n, cfg.hidden_size, std=2 * cfg.hidden_size**-0.5))
        shared.down.quantize_expert(0, 0, randn(cfg.hidden_size, n, std=2 * n**-0.5))
    if layer.latent is not None:
        dtype = layer.latent.down.dtype
        down = randn(width, cfg.hidden_size, std=cfg.hidden_size**-0.5).to(dtype)
        up = randn(cfg.hidden_size, width, std=width**-0.5).to(dtype)
        norm = None if layer.latent.norm is None else 1 + randn(width, std=0.2)
        layer.latent.load(down, up, norm)
    return layer


def make(
    name: str, ep: Any = None, *, seed: int = 0, changes: dict[str, Any] | None = None, **options: Any
) -> MoELayer:
    """``CONFIGS[name]`` with ``changes``, as a filled layer on the CPU."""
    return fill(MoELayer(config(name, **(changes or {})), ep, device="cpu", **options), seed)
