"""Quantizing at the source and at the target: the same bits, other bytes on the wire, empty slots left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_oracle import oracle_of, rel_l2
from layers import CONFIGS, config, make

from moe_layer import ConfigError, MoELayer
from moe_layer.comm import DispatchResult
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.quant.running_amax import RunningAmax
from moe_layer.stages import StageTimer

PAIRS = [("fp8_128x128", "fp8"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("int4", "bf16")]


def both(name: str, **options: Any) -> tuple[MoELayer, MoELayer]:
    return make(name, quantize_at="source", **options), make(name, quantize_at="target", **options)


def tokens(count: int, name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, CONFIGS[name].hidden_size, generator=generator)
    return (x * torch.logspace(-3, 3, count)[:, None]).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_same_bits(weights: str, activations: str) -> None:
    source, target = both("deepseek_v3", seed=1, weight_format=weights, activation_format=activations)
    x = tokens(33, "deepseek_v3")
    expected = source(x)
    assert expected.abs().max() > 0 and same_bits(target(x), expected)


def test_latent_rows_are_rounded_before_they_travel() -> None:
    """Kimi-K3's latent rows are FP32; BF16 ones give the same bits."""
    source, target = both("kimi_k3", seed=1, weight_format="mxfp4")
    x = tokens(30, "kimi_k3")
    assert rel_l2(target(x), source(x).double()) < 2e-2
    ids, weights = source.gate(x)
    z = torch.randn(30, source.cfg.routed_hidden_size).bfloat16()
    assert same_bits(target.experts(z, ids, weights), source.experts(z, ids, weights))


def test_fp32_layers_send_fp32() -> None:
    source, target = both("deepseek_v4", seed=2, dtype=torch.float32, activation_format="mxfp8")
    assert target.dispatch_format == "fp32" and source.dispatch_format == "mxfp8"
    x = tokens(20, "deepseek_v4", torch.float32)
    assert same_bits(target(x), source(x))


def test_other_dtypes_are_rounded_to_the_layers() -> None:
    source, target = both("deepseek_v4", seed=3, weight_format="mxfp4")
    x = tokens(20, "deepseek_v4", torch.float16)
    z, ids, weights = x, *source.gate(x)
    assert same_bits(target.experts(z, ids, weights), source.experts(z.bfloat16(), ids, weights).half())
    assert not same_bits(target.experts(z, ids, weights), source.experts(z, ids, weights))


def test_against_fp64() -> None:
    layer = make("deepseek_v3", seed=4, weight_format="mxfp4", quantize_at="target")
    x = tokens(40, "deepseek_v3")
    assert rel_l2(layer(x), oracle_of(layer)(x)) < 5.7e-3


def watched(layer: MoELayer, monkeypatch: pytest.MonkeyPatch, change: Any = lambda result: result) -> list[Any]:
    """Every payload that the layer hands to dispatch: (rows, scales); ``change`` is done to what arrives."""
    sent: list[Any] = []
    dispatch = layer.comm.dispatch

    def spy(rows: torch.Tensor, *arguments: Any, **options: Any) -> DispatchResult:
        sent.append((rows, options.get("hidden_states_scale")))
        return change(dispatch(rows, *arguments, **options))

    monkeypatch.setattr(layer.comm, "dispatch", spy)
    return sent


def test_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = both("deepseek_v3", seed=5, weight_format="mxfp4")
    x = tokens(9, "deepseek_v3")
    for layer, dtype, scales in ((source, torch.float8_e4m3fn, (9, 3)), (target, torch.bfloat16, None)):
        sent = watched(layer, monkeypatch)
        layer(x)
        ((rows, scale),) = sent
        assert rows.dtype == dtype and rows.shape == (9, 96)
        assert (scale is None) if scales is None else (scale.shape == scales)
    assert same_bits(rows, x)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize(("weights", "activations"), PAIRS[:4])
def test_slots_without_a_token_may_hold_anything(
    weights: str, activations: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make("deepseek_v3", seed=6, weight_format=weights, activation_format=activations, quantize_at="target")
    x = tokens(12, "deepseek_v3")
    expected = layer(x)

    def with_empty_slots(result: DispatchResult) -> DispatchResult:
        """The same slots, each followed by one without a token."""
        assert result.topk_weights is not None

        def spread(t: torch.Tensor, fill: float) -> torch.Tensor:
            return torch.stack((t, torch.full_like(t, fill)), 1).flatten(0, 1)

        return replace(
            result,
            hidden_states=spread(result.hidden_states, poison),
            topk_ids=spread(result.topk_ids, -1),
            topk_weights=spread(result.topk_weights, poison),
        )

    watched(layer, monkeypatch, with_empty_slots)
    buffer = layer.comm.get_combine_input_buffer
    combine = layer.comm.combine
    wide: list[torch.Tensor] = []

    def twice(dtype: torch.dtype) -> torch.Tensor:
        wide.append(torch.full((24, 96), torch.nan, dtype=dtype))
        return wide[-1]

    monkeypatch.setattr(layer.comm, "get_combine_input_buffer", twice)
    monkeypatch.setattr(
        layer.comm, "combine", lambda rows, output: combine(buffer(rows.dtype).copy_(rows[::2]), output=output)
    )
    assert same_bits(layer(x), expected)
    assert wide


def test_running_scale_of_nvfp4() -> None:
    """The scale that a running amax keeps serves both places, and an update is seen without another assignment."""
    source, target = both("deepseek_v3", seed=7, weight_format="nvfp4")
    running = RunningAmax("cpu")
    outputs = []
    for layer in (source, target):
        layer.input_global_scale = running.scale
    for factor in (1.0, 50.0):
        x = tokens(10, "deepseek_v3") * factor
        running.update(x)
        outputs.append(source(x))
        assert same_bits(target(x), outputs[-1])
    rows, scales = source._wire.encoder(running.scale).quantize(x)
    assert scales is not None and scales.shape == (10, 6) and rows.shape == (10, 48)
    running.update(x * 1e4)
    assert not same_bits(source(x), outputs[-1])


def test_stages() -> None:
    for layer in both("mixtral", seed=8, weight_format="mxfp4"):
        layer.profiler = timer = StageTimer()
        layer(tokens(5, "mixtral"))
        assert {"quantize", "dispatch", "fc1"} <= set(timer.seconds())


def test_names() -> None:
    with pytest.raises(ConfigError, match="quantize_at must be one of source, target, got 'middle'"):
        MoELayer(config("mixtral"), device="cpu", quantize_at="middle")
    layer = make("mixtral", weight_format="mxfp4", quantize_at="target")
    assert layer.quantize_at == "target" and layer.activation_format == "mxfp8" and layer.dispatch_format == "bf16"
    assert "activations=mxfp8 at the target" in repr(layer)
    assert make("mixtral").quantize_at == "source"


def test_from_pretrained(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "deepseek_v3", hidden=256, inter=128, shards=1)
    layer = checkpoint.moe_layers[0]
    loaded = [MoELayer.from_pretrained(checkpoint.path, layer, device="cpu", quantize_at=at) for at in
              ("source", "target")]  # fmt: skip
    x = torch.randn(8, 256).bfloat16()
    assert [found.dispatch_format for found in loaded] == ["fp8", "bf16"]
    assert same_bits(loaded[1](x), loaded[0](x))
