"""What a layer refuses, with the message; devices and backends."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from layers import config, make

import moe_layer.backend as backends
from moe_layer import ConfigError, FormatError, MoELayer, TensorError, UnsupportedDeviceError
from moe_layer.backend import register_kernels, resolve_device, select_backend
from moe_layer.gemm.reference import ReferenceBackend
from moe_layer.stages import STAGES, StageTimer


@pytest.mark.parametrize(("x", "message"), [
    (torch.zeros(3, 95), "x has shape [3, 95], expected [T, 96] or [B, S, 96]"),
    (torch.zeros(96), "x has shape [96], expected [T, 96] or [B, S, 96]"),
    (torch.zeros(1, 1, 3, 96), "x has shape [1, 1, 3, 96]"),
    (torch.zeros(3, 96, dtype=torch.float64), "x has dtype torch.float64, expected torch.bfloat16"),
    (torch.zeros(3, 96, dtype=torch.int32), "x has dtype torch.int32"),
    (torch.zeros(3, 96, device="meta"), "x is on meta, but the layer is on cpu"),
    ([[0.0]], "x must be a tensor, got list"),
])  # fmt: skip
def test_bad_tokens(x: Any, message: str) -> None:
    layer = make("deepseek_v3")
    with pytest.raises(TensorError, match=re.escape(message)):
        layer(x)
    layer(torch.zeros(3, 96))


def test_bad_selections() -> None:
    layer = make("kimi_k3")
    z, ids, weights = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for arguments, message in (
        ((torch.randn(3, 128), ids, weights), "z has shape [3, 128], expected [T, 64]"),
        ((z, ids.float(), weights), "topk_ids has dtype torch.float32"),
        ((z, ids[:2], weights[:2]), "topk_ids has shape [2, 2]"),
        ((z, ids, weights.double()), "topk_weights has dtype torch.float64"),
        ((z, ids, weights[:, :1]), "topk_weights has shape [3, 1]"),
        ((z, ids.repeat(1, 17), weights.repeat(1, 17)), "top_k=34"),
        ((z, None, weights), "topk_ids must be a tensor, got NoneType"),
    ):
        with pytest.raises(TensorError, match=re.escape(message)):
            layer.experts(*arguments)
    layer.experts(z, ids, weights)


def test_missing_input_ids() -> None:
    layer = make("deepseek_v4", changes={"num_hash_layers": 1, "vocab_size": 9})
    with pytest.raises(TensorError, match="pass input_ids"):
        layer(torch.zeros(3, 96))
    layer(torch.zeros(3, 96), input_ids=torch.zeros(3, dtype=torch.int64))


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match=r"dtype must be torch.bfloat16 or torch.float32, got torch.float16"):
        MoELayer(config("mixtral"), dtype=torch.float16, device="cpu")
    with pytest.raises(FormatError, match="unknown format 'fp3'; known: bf16"):
        MoELayer(config("mixtral"), weight_format="fp3", device="cpu")
    with pytest.raises(FormatError, match="unknown format 'fp3'"):
        MoELayer(config("mixtral"), activation_format="fp3", device="cpu")


# ---- devices and backends ----


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match=r"device cuda was asked for, but .*device='cpu' runs the PyTorch"):
        MoELayer(config("mixtral"), device="cuda")
    assert resolve_device(None) == torch.device("cpu")
    with pytest.raises(UnsupportedDeviceError, match="device mps: the layer runs on 'cuda' and on 'cpu'"):
        resolve_device("mps")


def test_a_gpu_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(UnsupportedDeviceError, match=re.escape("this machine has 2 GPU(s): cuda:0 … cuda:1")):
        resolve_device("cuda:2")
    assert resolve_device(None) == resolve_device("cuda") == torch.device("cuda:1")


class FakeKernels(ReferenceBackend):
    name = "fake"


def test_kernels_are_chosen_by_architecture_and_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_KERNELS", [])
    monkeypatch.setattr(backends, "architecture", lambda device: "sm_90a")
    target = f"{__name__}:FakeKernels"
    register_kernels("sm_90a", target, weights={"bf16", "mxfp4"}, activations={"bf16"})
    register_kernels("sm_100a", "no.such.module:X", weights={"bf16"}, activations={"bf16"})
    monkeypatch.setitem(
        __import__("sys").modules, __name__, __import__("types").SimpleNamespace(FakeKernels=FakeKernels)
    )
    assert select_backend("cpu", "mxfp4", "bf16").name == "fake"
    assert select_backend("cpu", "mxfp4", "mxfp8").name == "reference"
    assert select_backend("cpu", "int4", "bf16").name == "reference"
    monkeypatch.setattr(backends, "architecture", lambda device: "sm_120a")
    assert select_backend("cpu", "bf16", "bf16").name == "reference"


def test_the_cpu_runs_the_reference() -> None:
    layer = make("mixtral")
    assert layer.backend.name == "reference" and layer.comm.protocol == "loopback"
    text = repr(layer)
    for part in (
        "experts=8/8",
        "top_k=2",
        "weights=bf16",
        "activations=bf16",
        "backend=reference",
        "protocol=loopback",
    ):
        assert part in text


# ---- stages ----


def test_stage_timer() -> None:
    layer = make("kimi_k3", weight_format="mxfp4")
    timer = layer.profiler = StageTimer("cpu")
    layer(torch.randn(5, 128))
    seconds = timer.seconds()
    assert tuple(seconds) == STAGES and all(s > 0 for s in seconds.values())
    layer(torch.randn(5, 128))
    assert all(timer.seconds()[stage] > s for stage, s in seconds.items())
    timer.reset()
    assert timer.seconds() == {}
    with timer("dispatch"):
        time.sleep(0.02)
    assert 0.02 <= timer.seconds()["dispatch"] < 1


def test_any_context_serves_as_profiler() -> None:
    seen = []

    class Recorder:
        def __init__(self, stage: str) -> None:
            seen.append(stage)

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    layer = make("deepseek_v3")
    layer.profiler = Recorder
    x = torch.randn(4, 96)
    got = layer(x)
    assert list(dict.fromkeys(seen)) == list(STAGES)
    layer.profiler = None
    assert torch.equal(layer(x), got)
