"""MoELayer against the fp64 oracle: every family, every pair of formats, the inputs that broke others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from layer_oracle import oracle_of, rel_l2
from layers import CONFIGS, config, make

from moe_layer import MoELayer
from moe_layer.quant import available_formats

FP32 = {"dtype": torch.float32}
# DESIGN §6: bf16 ≤ 4e-3, every other format ≤ 5.7e-3
LIMITS = {"fp32": 1e-6, "bf16": 4e-3}


def error_of(got: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Relative L2 error of the best 90 % of tokens, and of all.

    A value within fp32's error of a rounding boundary may fall to its other side, which costs its token up to a step of
    the format; hidden sizes here are too small to average that out.
    """
    per_token = (got.double() - truth).norm(dim=1)
    keep = per_token.argsort()[: -max(1, len(per_token) // 10)]
    return rel_l2(got[keep], truth[keep]), rel_l2(got, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str, dtype: torch.dtype) -> None:
    layer = make(name, seed=1, dtype=dtype)
    x = torch.randn(40, layer.cfg.hidden_size).to(dtype)
    truth = oracle_of(layer)(x)
    got = layer(x)
    assert got.dtype == dtype and got.shape == x.shape
    most, all_ = error_of(got, truth)
    limit = 2e-6 if dtype == torch.float32 else 4e-3
    assert most < limit and all_ < 5 * limit
    batched = layer(x.view(2, 20, -1))
    assert batched.shape == (2, 20, layer.cfg.hidden_size) and torch.equal(batched.view(40, -1), got)


@pytest.mark.parametrize("weight_format", available_formats())
@pytest.mark.parametrize("activation_format", ["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "fp32"])
def test_every_pair_of_formats(weight_format: str, activation_format: str) -> None:
    layer = make(
        "deepseek_v4", seed=2, dtype=torch.float32, weight_format=weight_format, activation_format=activation_format
    )
    assert layer.weight_format == weight_format and layer.activation_format == activation_format
    x = torch.randn(40, 96)
    most, all_ = error_of(layer(x), oracle_of(layer)(x))
    assert most < (2e-6 if activation_format == "fp32" else 5.7e-3)
    assert all_ < 3e-2


@pytest.mark.parametrize("activation_format", ["mxfp8", "nvfp4"])
def test_latent_layer_with_quantized_activations(activation_format: str) -> None:
    layer = make("kimi_k3", seed=3, weight_format="mxfp4", activation_format=activation_format)
    x = torch.randn(40, 128).bfloat16()
    most, all_ = error_of(layer(x), oracle_of(layer)(x))
    assert most < 5.7e-3 and all_ < 3e-2


@pytest.mark.parametrize("weight_format", available_formats())
def test_default_activation_format(weight_format: str) -> None:
    layer = MoELayer(config("mixtral"), weight_format=weight_format, device="cpu")
    expected = {"int4": "bf16", "mxfp4": "mxfp8"}.get(weight_format, weight_format.split("_")[0])
    assert layer.activation_format == expected


@pytest.mark.parametrize("activation_format", ["nvfp4"])
def test_static_scales(activation_format: str) -> None:
    layer = make("deepseek_v3", seed=4, **FP32, weight_format="nvfp4", activation_format=activation_format)
    fc1 = torch.rand(16) * 1e-3 + 2e-4
    layer.set_static_scales(torch.tensor(2e-3), fc1)
    x = torch.randn(40, 96)
    static = {"static_input": 2e-3, "static_fc1": fc1.tolist()}
    truth = oracle_of(layer, **static)(x)
    most, all_ = error_of(layer(x), truth)
    assert most < 5.7e-3 and all_ < 3e-2
    assert rel_l2(oracle_of(layer)(x), truth) > 2e-2, "else this would pass with the scales ignored"


@pytest.mark.parametrize("part", ["routed", "shared"])
def test_the_clamp_reaches_routed_and_shared_experts(part: str) -> None:
    """sglang#23752, transformers#46018 (shared), vllm-ascend#14363 (routed)."""
    layer = make("deepseek_v4", seed=5, **FP32)
    x = torch.randn(30, 96) * 3
    clamped, free = oracle_of(layer), oracle_of(layer, limit=None)
    if part == "routed":
        layer.shared_experts = None
        clamped, free = (dataclasses.replace(o, shared=None) for o in (clamped, free))
        got = layer(x)
    else:
        assert layer.shared_experts is not None
        got = layer.shared_experts(x)
        rows = x.double().numpy()
        clamped, free = ((lambda _, o=o: torch.stack([torch.from_numpy(o.mlp(o.shared, r, "fp32")) for r in rows]))
                         for o in (clamped, free))  # fmt: skip
    assert rel_l2(got, clamped(x)) < 2e-6
    assert rel_l2(free(x), clamped(x)) > 0.05, "else the inputs never reach the limit"


def test_hash_layer() -> None:
    layer = make(
        "deepseek_v4", seed=6, **FP32, changes={"num_hash_layers": 3, "vocab_size": 50}, layer=1
    )  # fmt: skip
    x, tokens = torch.randn(2, 15, 96), torch.randint(0, 50, (2, 15))
    truth = oracle_of(layer)(x.view(30, 96), layer.gate.tid2eid[tokens.flatten()].tolist())
    assert rel_l2(layer(x, input_ids=tokens).view(30, 96), truth) < 2e-6


def test_image_tokens() -> None:
    layer = make("deepseek_v4", seed=7, **FP32)
    layer.gate.load(layer.gate.weight.clone(), torch.zeros(12), torch.randn(12) * 5)
    x, mask = torch.randn(30, 96), torch.arange(30) % 3 == 0
    oracle = oracle_of(layer)
    image = layer.gate.bias_vl.double().numpy()
    truth = torch.stack(
        [torch.from_numpy(oracle.token(r, bias=image if m else None)) for r, m in zip(x.double().numpy(), mask)]
    )
    assert rel_l2(layer(x, image_mask=mask), truth) < 2e-6
    assert rel_l2(layer(x), truth) > 0.1


def test_experts_alone() -> None:
    """A caller's own router: duplicates count each time, ids outside the range add nothing, weights as given."""
    layer = make("deepseek_v3", seed=8, **FP32)
    oracle = oracle_of(layer, shared=None)
    z = torch.randn(25, 96)
    for top_k in (1, 3, 10, 32):
        ids = torch.randint(0, 16, (25, top_k))
        ids[3] = -1
        ids[4, 0], ids[5, 0] = 16, 10_000
        weights = torch.randn(25, top_k)
        truth = torch.zeros(25, 96, dtype=torch.float64)
        for t, row in enumerate(z.double().numpy()):
            truth[t] = torch.from_numpy(oracle.routed(row, ids[t].tolist(), weights[t].tolist()))
        for dtype in (torch.int32, torch.int64):
            got = layer.experts(z, ids.to(dtype), weights)
            assert rel_l2(got, truth) < 2e-6
        assert torch.equal(got[3], torch.zeros(96))


def test_experts_alone_on_a_latent_layer_take_the_latent_width() -> None:
    layer = make("kimi_k3", seed=9, **FP32)
    z, ids, weights = torch.randn(5, 64), torch.randint(0, 22, (5, 3)), torch.rand(5, 3)
    oracle = oracle_of(layer)
    truth = torch.stack(
        [
            torch.from_numpy(oracle.routed(r, i.tolist(), w.tolist()))
            for r, i, w in zip(z.double().numpy(), ids, weights)
        ]
    )
    assert rel_l2(layer.experts(z, ids, weights), truth) < 2e-6


@pytest.mark.parametrize("weight_format", ["fp32", "fp8_128x128", "mxfp4", "nvfp4"])
def test_nan_and_inf_spoil_their_own_token_only(weight_format: str) -> None:
    """One Inf in the input (sglang#31712)."""
    layer = make("deepseek_v3", seed=10, **FP32, weight_format=weight_format)
    x = torch.randn(20, 96)
    clean = layer(x)
    bad = x.clone()
    bad[4, 17], bad[9] = torch.inf, torch.nan
    got = layer(bad)
    good = [i for i in range(20) if i not in (4, 9)]
    assert torch.equal(got[good], clean[good])
    assert got[9].isnan().all() and not got[4].isfinite().all()


def test_zero_tokens_stay_zero() -> None:
    """An all-zero block must not become 0/0 (flashinfer#5031)."""
    for weight_format in available_formats():
        layer = make("mixtral", seed=11, weight_format=weight_format)
        assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 64)), weight_format


def test_an_expert_without_tokens_gets_no_ghost() -> None:
    """TensorRT-LLM#14146: NaN weights of experts that nobody chose must not show."""
    layer = make("mixtral", seed=12, **FP32)
    x = torch.randn(3, 64)  # top-2: at most six of the eight experts
    clean, chosen = layer(x), set(layer.gate(x)[0].flatten().tolist())
    for expert in set(range(8)) - chosen:
        layer.routed_experts.gate_up.data[expert] = torch.nan
        layer.routed_experts.down.data[expert] = torch.nan
    assert len(chosen) < 8
    assert torch.equal(layer(x), clean)


def test_all_tokens_to_one_expert() -> None:
    """DeepEP#427, and one group with a single row (DeepGEMM#178)."""
    layer = make("deepseek_v3", seed=13, **FP32)
    oracle = oracle_of(layer)
    for tokens in (1, 70):
        z = torch.randn(tokens, 96)
        ids, weights = torch.full((tokens, 1), 9), torch.ones(tokens, 1)
        truth = torch.stack([torch.from_numpy(oracle.routed(r, [9], [1.0])) for r in z.double().numpy()])
        assert rel_l2(layer.experts(z, ids, weights), truth) < 2e-6


def test_896_experts() -> None:
    """A fixed maximum of 512 experts broke llama.cpp (#26185)."""
    changes = {"n_routed_experts": 896, "num_experts_per_tok": 16, "moe_intermediate_size": 32}
    layer = make("kimi_k3", seed=14, **FP32, changes=changes)
    x = torch.randn(16, 128)
    most, all_ = error_of(layer(x), oracle_of(layer)(x))
    assert all_ < 5e-6, most
    assert int(layer.gate(x)[0].max()) > 511


@pytest.mark.parametrize("inner", [192, 448, 1407])
def test_intermediate_sizes(inner: int) -> None:
    layer = make("mixtral", seed=15, weight_format="fp8_128x128", changes={"moe_intermediate_size": inner})
    x = torch.randn(24, 64)
    most, all_ = error_of(layer(x), oracle_of(layer)(x))
    assert most < 5.7e-3 and all_ < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_of_the_caller(dtype: torch.dtype) -> None:
    layer = make("deepseek_v3", seed=16)
    x = torch.randn(10, 96).to(dtype)
    got = layer(x)
    assert got.dtype == dtype
    assert rel_l2(got, oracle_of(layer)(x)) < 8e-3


def test_output_is_rounded_once() -> None:
    """Routed and shared experts are added in fp32: BF16 in between would round twice."""
    layer = make("deepseek_v3", seed=17, **FP32)
    x = torch.randn(50, 96).bfloat16()
    assert torch.equal(layer(x), layer(x.float()).bfloat16())


def test_no_autograd() -> None:
    layer = make("deepseek_v3", seed=18, **FP32)
    x = torch.randn(4, 96, requires_grad=True)
    assert not layer(x).requires_grad
    assert not any(p.requires_grad for p in layer.parameters())


def test_autocast_changes_nothing() -> None:
    layer = make("deepseek_v3", seed=19, **FP32)
    x = torch.randn(8, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert torch.equal(got, layer(x))


def test_non_contiguous_tokens() -> None:
    layer = make("deepseek_v3", seed=20, **FP32)
    x = torch.randn(8, 200)[:, 4:100]
    assert torch.equal(layer(x), layer(x.contiguous()))
    y = torch.randn(96, 6).t()
    assert torch.equal(layer(y), layer(y.contiguous()))
