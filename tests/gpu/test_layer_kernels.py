"""Whole layers on the GPU's kernels, against the fp64 oracle; CUDA graphs of them."""

from __future__ import annotations

import logging

import pytest
import torch
from emulated_ranks import missing_gpu
from layer_oracle import oracle_of, rel_l2
from layers import CONFIGS, config, fill

from moe_layer.layer import MoELayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
NATIVE = ("bf16", "fp8_128x128")
LOW_BIT = ("mxfp4", "int4", "mxfp8", "nvfp4")
BLOCK_FP8 = ("fp8_32x32", "fp8_128x128_ue8m0")  # packed as MXFP8
BACKENDS = (
    dict.fromkeys(NATIVE, "sm90") | dict.fromkeys(LOW_BIT, "sm90-low-bit") | dict.fromkeys(BLOCK_FP8, "sm90-low-bit")
)
LIMITS = {"bf16": 4e-3, "fp8_128x128": 1e-2}  # FP8 tensor cores keep 14 bits of a sum (docs/numerics.md)


@pytest.mark.parametrize("weight_format", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers(name: str, weight_format: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="moe_layer"):
        # FP8 activations are for FP8's own kernels.
        options = {"activation_format": "bf16"} if weight_format in BLOCK_FP8 else {}
        layer = fill(MoELayer(config(name), device="cuda", weight_format=weight_format, **options), 1)
        assert layer.backend.name == BACKENDS[weight_format]
        assert (layer.routed_experts.gate_up.weights().packed is not None) == (weight_format not in NATIVE)
        x = torch.randn(40, layer.cfg.hidden_size, device="cuda").bfloat16()
        got = layer(x)
    # Shared experts have BF16 activations, whatever the routed ones have: FP8 weights are widened for them.
    if not (layer.cfg.n_shared_experts and weight_format in NATIVE):
        assert "widened to BF16" not in caplog.text
    truth = oracle_of(layer)(x.cpu())
    assert rel_l2(got, truth) < LIMITS.get(weight_format, 5.7e-3)
    assert torch.equal(layer(x), got)


@pytest.mark.parametrize("weight_format", ["bf16", "fp8_128x128", "mxfp4"])
def test_graph(weight_format: str) -> None:
    """One CUDA graph of the whole layer, replayed with other tokens, other routing."""
    cfg = config("deepseek_v3", hidden_size=256, moe_intermediate_size=128)
    layer = fill(MoELayer(cfg, device="cuda", weight_format=weight_format), 2)
    x = torch.randn(33, 256, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = layer(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(x))
        assert rel_l2(y, oracle_of(layer)(x.cpu())) < 1e-2


def test_nothing_waits_for_the_device() -> None:
    layer = fill(MoELayer(config("deepseek_v3", hidden_size=256, moe_intermediate_size=128), device="cuda"), 3)
    x = torch.randn(20, 256, device="cuda").bfloat16()
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_sizes(tokens: int) -> None:
    layer = fill(MoELayer(config("deepseek_v4"), device="cuda"), 4)
    x = torch.randn(tokens, layer.cfg.hidden_size, device="cuda").bfloat16()
    got = layer(x)
    assert got.shape == x.shape and got.isfinite().all()
    if tokens:
        assert rel_l2(got, oracle_of(layer)(x.cpu())) < 4e-3
