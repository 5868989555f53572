"""Bringing weights into a layer: state_dict round trips, stacked and single experts, static scales; every refusal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from layers import CONFIGS, config, fill, make
from safetensors.torch import load_file, save_file

from moe_layer import CheckpointError, ConfigError, ExpertParallel, FormatError, MoELayer
from moe_layer.quant import QuantizedTensor, available_formats, get_format
from moe_layer.weights import ExpertStack

FP32 = {"dtype": torch.float32}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dict_round_trip(name: str) -> None:
    layer = make(name, seed=1)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    fresh = MoELayer(config(name), device="cpu")
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(9, layer.cfg.hidden_size)
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("weight_format", available_formats())
def test_state_dict_round_trip_of_every_format(weight_format: str, tmp_path: Any) -> None:
    layer = make("deepseek_v3", seed=2, weight_format=weight_format)
    if layer.activation_format == "nvfp4":
        layer.set_static_scales(torch.tensor(1e-3), torch.rand(16) * 1e-3 + 1e-4)
    if layer.gate.bias_vl is None:
        layer.gate.load(layer.gate.weight.clone(), torch.zeros(16), torch.randn(16))
    file = tmp_path / "layer.safetensors"
    save_file(layer.state_dict(), file)
    fresh = MoELayer(config("deepseek_v3"), device="cpu", weight_format=weight_format)
    fresh.load_state_dict(load_file(file))
    saved, loaded = layer.state_dict(), fresh.state_dict()
    assert saved.keys() == loaded.keys()
    for key in saved:
        assert torch.equal(bits(saved[key]), bits(loaded[key])), key
    x, image = torch.randn(2, 7, 96), torch.rand(2, 7) < 0.5
    assert torch.equal(fresh(x, image_mask=image), layer(x, image_mask=image))


def test_a_loaded_layer_forgets_scales_that_were_not_saved() -> None:
    plain, other = make("mixtral", seed=3, weight_format="nvfp4"), make("mixtral", seed=4, weight_format="nvfp4")
    other.set_static_scales(torch.tensor(1e-3), torch.full((8,), 1e-3))
    other.load_state_dict(plain.state_dict())
    assert other.input_global_scale is None and other.fc1_output_global_scale is None
    x = torch.randn(5, 64)
    assert torch.equal(other(x), plain(x))


def test_inside_a_model() -> None:
    """As a child of another module the same keys work under a prefix."""
    model, fresh = (torch.nn.ModuleDict({"mlp": make("mixtral", seed=s, weight_format="mxfp4")}) for s in (5, 6))
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(fresh["mlp"](x), model["mlp"](x))


KEY = "routed_experts.gate_up.data"


@pytest.mark.parametrize(("damage", "message"), [
    (lambda s: s.pop(KEY), 'Missing key(s) in state_dict: "routed_experts.gate_up.data"'),
    (lambda s: s.pop("gate.e_score_correction_bias"), '"gate.e_score_correction_bias"'),
    (lambda s: s.update(more=torch.zeros(1)), 'Unexpected key(s) in state_dict: "more"'),
    (lambda s: s.update({KEY: s[KEY][:, :, :-1]}), "size mismatch for routed_experts.gate_up.data"),
    (lambda s: s.update({KEY: s[KEY].view(torch.int8)}), f"{KEY} is torch.int8, expected torch.uint8"),
    (lambda s: s.update({KEY: s[KEY].float()}), f"{KEY} is torch.float32, expected torch.uint8"),
])  # fmt: skip
def test_damaged_state_dicts(damage: Any, message: str) -> None:
    """bf16 → uint8 by a cast loses everything silently (vllm#35324); so any other dtype is refused."""
    state = make("deepseek_v3", seed=7, weight_format="mxfp4").state_dict()
    damage(state)
    fresh = MoELayer(config("deepseek_v3"), device="cpu", weight_format="mxfp4")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        fresh.load_state_dict(state)


def test_load_experts_takes_transformers_layout() -> None:
    layer = make("deepseek_v3", seed=8, **FP32)
    experts = layer.routed_experts
    gate_up = experts.gate_up.data.flatten(1, 2).clone()
    assert gate_up.shape == (16, 128, 96)
    fresh = fill(MoELayer(config("deepseek_v3"), device="cpu", **FP32), 8)
    fresh.routed_experts.gate_up.data.fill_(torch.nan)
    fresh.routed_experts.down.data.fill_(torch.nan)
    fresh.load_experts(gate_up, experts.down.data[:, 0].clone())
    x = torch.randn(6, 96)
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("weight_format", available_formats())
def test_load_experts_quantizes(weight_format: str) -> None:
    layer = MoELayer(config("mixtral"), device="cpu", weight_format=weight_format)
    gate_up, down = torch.randn(8, 160, 64), torch.randn(8, 64, 80)
    layer.load_experts(gate_up, down)
    fmt = get_format(weight_format)
    for stack, part, e, source in (
        (layer.routed_experts.gate_up, 1, 3, gate_up[3, 80:]),
        (layer.routed_experts.down, 0, 7, down[7]),
    ):
        got = fmt.dequantize(stack.weights().expert(e, part))
        step = {"fp32": 0, "bf16": 2**-8, "int4": 0.12, "mxfp4": 0.2, "nvfp4": 0.12}.get(weight_format, 0.05)
        assert (got - source).norm() <= step * source.norm(), weight_format


def one_rank(ranks: Any, gate_up: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
    layer = MoELayer(config("mixtral"), ExpertParallel(ranks.group, device="cpu"), device="cpu", dtype=torch.float32)
    layer.load_experts(gate_up, down)
    return [layer.routed_experts.gate_up.data, layer.routed_experts.down.data]


def test_load_experts_takes_the_local_slice(run_ranks: Any) -> None:
    gate_up, down = torch.randn(8, 160, 64), torch.randn(8, 64, 80)
    results = run_ranks(one_rank, 3, gate_up, down)
    assert torch.equal(torch.cat([r[0] for r in results]).flatten(1, 2), gate_up)
    assert torch.equal(torch.cat([r[1] for r in results])[:, 0], down)
    assert [len(r[0]) for r in results] == [3, 3, 2]


def test_load_quantized_experts() -> None:
    layer = MoELayer(config("mixtral"), device="cpu", weight_format="mxfp4")
    fmt = get_format("mxfp4")
    gate, up, down = (fmt.quantize(torch.randn(n, k)) for n, k in ((80, 64), (80, 64), (64, 80)))
    for expert in range(8):
        layer.load_expert(expert, gate, up, down)
    stored = layer.routed_experts.gate_up.weights().expert(5, 1)
    assert torch.equal(stored.data, up.data) and torch.equal(stored.scale, up.scale)


def test_load_errors() -> None:
    layer = MoELayer(config("mixtral"), device="cpu", weight_format="mxfp4")
    gate_up, down = torch.randn(8, 160, 64), torch.randn(8, 64, 80)
    good = [torch.randn(80, 64), torch.randn(80, 64), torch.randn(64, 80)]
    fmt = get_format("mxfp4")
    scaleless = fmt.quantize(good[0])
    scaleless = QuantizedTensor("mxfp4", scaleless.data, None, None, 64)
    for call, message in (
        (lambda: layer.load_experts(gate_up[:7], down), "gate_up_proj is [7, 160, 64], expected [8, 160, 64]"),
        (lambda: layer.load_experts(gate_up, down.mT), "down_proj is [8, 80, 64], expected [8, 64, 80]"),
        (lambda: layer.load_expert(8, *good), "expert 8 does not exist: the layer has 8"),
        (lambda: layer.load_expert(2, good[2], *good[1:]), "expert 2 gate is [64, 80] torch.float32, expected"),
        (lambda: layer.load_expert(2, good[0].int(), *good[1:]), "expert 2 gate is [80, 64] torch.int32, expected"),
        (lambda: layer.load_expert(2, get_format("nvfp4").quantize(good[0]), *good[1:]),
         "expert 2 gate: format is nvfp4, but these experts are stored as mxfp4"),
        (lambda: layer.load_expert(2, scaleless, *good[1:]), "expert 2 gate: scale is missing"),
        (lambda: layer.load_expert(2, fmt.quantize(good[0][:79]), *good[1:]),
         "expert 2 gate: data is [79, 32] torch.uint8, expected [80, 32] torch.uint8"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=re.escape(message)):
            call()


def test_experts_that_were_never_loaded() -> None:
    layer = MoELayer(config("mixtral"), device="cpu")
    layer.gate.load(torch.randn(8, 64))
    with pytest.raises(CheckpointError, match="layer 0: 24 expert projections have no weights yet"):
        layer(torch.randn(3, 64))
    for expert in range(7):
        layer.load_expert(expert, torch.randn(80, 64), torch.randn(80, 64), torch.randn(64, 80))
    with pytest.raises(CheckpointError, match="layer 0: 3 expert projections have no weights yet"):
        layer(torch.randn(3, 64))


def test_shared_experts_that_were_never_loaded() -> None:
    layer = make("deepseek_v3", seed=9)
    layer.shared_experts = MoELayer(config("deepseek_v3"), device="cpu").shared_experts
    with pytest.raises(CheckpointError, match="layer 0: the shared experts have no weights yet"):
        layer(torch.randn(3, 96))


def test_adopt_takes_tensors_without_a_copy() -> None:
    source, stack = (ExpertStack(2, 2, 80, 64, "mxfp4", device=d) for d in ("cpu", "meta"))
    stack.adopt(source.weights())
    assert stack.data.data_ptr() == source.data.data_ptr() and not stack.unloaded
    with pytest.raises(CheckpointError, match=r"experts: nvfp4 rows of 64 values, expected mxfp4 rows of 64"):
        stack.adopt(ExpertStack(2, 2, 80, 64, "nvfp4").weights())
    with pytest.raises(CheckpointError, match=r"gate: data is \[3, 2, 80, 32\] torch.uint8, expected \[2, 2, 80, 32\]"):
        stack.adopt(ExpertStack(3, 2, 80, 64, "mxfp4").weights(), name="gate")


@pytest.mark.parametrize(("input", "fc1", "error", "message"), [
    (torch.tensor(1.0), torch.ones(7), CheckpointError, "fc1_output_global_scale is [7] torch.float32, expected [8]"),
    (torch.ones(1), torch.ones(8), CheckpointError, "input_global_scale is [1] torch.float32, expected []"),
    (torch.tensor(1.0).double(), torch.ones(8), CheckpointError, "input_global_scale is [] torch.float64"),
    (torch.tensor(0.0), torch.ones(8), FormatError, "input_global_scale must be finite and positive, got [0.0]"),
    (torch.tensor(torch.nan), torch.ones(8), FormatError, "input_global_scale must be finite and positive, got [nan]"),
    (torch.tensor(1.0), torch.tensor([1.0] * 7 + [torch.inf]), FormatError, "fc1_output_global_scale must be finite"),
])  # fmt: skip
def test_bad_static_scales(input: torch.Tensor, fc1: torch.Tensor, error: type[Exception], message: str) -> None:
    """An uninitialised activation scale multiplied experts by 0 in vllm#54189."""
    layer = MoELayer(config("mixtral"), device="cpu", weight_format="nvfp4")
    with pytest.raises(error, match=re.escape(message)):
        layer.set_static_scales(input, fc1)


def test_static_scales_need_a_format_that_has_them() -> None:
    with pytest.raises(ConfigError, match="mxfp8 activations have no static scale"):
        make("mixtral", weight_format="mxfp4").set_static_scales(torch.tensor(1.0), torch.ones(8))
