"""How a layer leaves quantizing to dispatch: the same output, to the bit, and the encoder that is in force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import make

from moe_layer.quant import get_format
from moe_layer.stages import StageTimer
from moe_layer.wire import Wire


@pytest.mark.parametrize(
    ("weights", "activations"), [("fp8_128x128", "fp8"), ("mxfp4", "mxfp8"), ("nvfp4", "nvfp4"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k3"])
def test_dispatch_may_quantize(name: str, weights: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(name, weight_format=weights, activation_format=activations)
    x = torch.randn(7, layer.cfg.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    before = layer(x)
    asked: list[tuple[Any, torch.Tensor, int]] = []

    def fuses(encoder: Any, hidden_states: torch.Tensor, t_hat: int) -> bool:
        asked.append((encoder, hidden_states, t_hat))
        return True

    given: list[dict[str, Any]] = []
    dispatch = layer.comm.dispatch
    monkeypatch.setattr(layer.comm, "fuses", fuses)
    monkeypatch.setattr(layer.comm, "dispatch", lambda *a, **k: given.append(k) or dispatch(*a, **k))
    layer.profiler = timer = StageTimer()
    assert torch.equal(layer(x), before)
    ((encoder, hidden_states, t_hat),) = asked
    assert t_hat == 7 and hidden_states.shape == (7, layer.cfg.routed_hidden_size)
    assert given[0]["encoder"] is encoder and given[0]["hidden_states_scale"] is None
    assert "dispatch" in timer.seconds()
    assert encoder.kernel is None  # of no use here, and importing the compiler takes seconds


def test_static_scale_replaces_the_encoder() -> None:
    fmt = get_format("nvfp4")
    wire = Wire(fmt, in_kernel=False)
    x = torch.randn(3, 64)
    own = wire.encoder(None)
    assert wire.encoder(None) is own
    scale = torch.tensor(1e-3)
    shared = wire.encoder(scale)
    assert shared is not own and wire.encoder(scale) is shared
    assert shared.common_scale is not None and shared.common_scale.data_ptr() == scale.data_ptr()
    for encoder, given in ((own, None), (shared, scale)):
        for got, expected in zip(encoder.quantize(x), fmt.to_wire(fmt.quantize(x, global_scale=given))):
            assert got is not None and expected is not None and torch.equal(got, expected)
    assert wire.encoder(None) is not shared


def test_kernels_follow_the_scale() -> None:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
    wire = Wire(get_format("nvfp4"), in_kernel=True)
    kernels = [wire.encoder(scale).kernel for scale in (None, torch.tensor(1.0))]
    assert [(k.row_scale, k.common_scale) for k in kernels if k is not None] == [(True, False), (False, True)]
    assert Wire(get_format("bf16"), in_kernel=True).encoder(None).kernel is None
