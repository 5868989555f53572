"""Quantizers on a GPU: the CPU's bytes, and fit for capture in a CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_layer.quant import available_formats, dequantize, get_format, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FORMATS = available_formats()


def rows(seed: int) -> torch.Tensor:
    """Gaussian rows over a wide range of exponents, with ties, zeros of both signs, subnormals, NaN and infinities."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal((150, 333)), rng.integers(-130, 110, (150, 1)))
    x[:40] = rng.integers(-31, 32, (40, 333)) / 4
    x[40:44] = 0.0
    x[44, ::3] = -0.0
    x[50, 7], x[51, 100], x[52, 300] = np.nan, np.inf, -np.inf
    return torch.from_numpy(x.astype(np.float32))


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).cpu()


def assert_same_values(got: torch.Tensor, expected: torch.Tensor) -> None:
    nan = expected.isnan()
    assert torch.equal(got.isnan().cpu(), nan)
    assert torch.equal(raw(got.cpu().masked_fill(nan, 0)), raw(expected.masked_fill(nan, 0)))


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_the_cpus(name):
    x = rows(1)
    here, there = quantize(x, name), quantize(x.cuda(), name)
    if name not in ("fp32", "bf16"):  # NaN payloads of plain floats may differ
        assert torch.equal(raw(there.data), raw(here.data))
    for mine, theirs in ((here.scale, there.scale), (here.global_scale, there.global_scale)):
        assert mine is None or torch.equal(raw(theirs), raw(mine))
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_values(dequantize(there, dtype), dequantize(here, dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_first_call_inside_a_graph_capture(name):
    """No host sync, no copy from the host, no state kept from one call to the next."""
    fmt = get_format(name)
    static = rows(2).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = fmt.quantize(static)
        if fmt.is_activation_format:
            q = fmt.from_wire(*fmt.to_wire(q), static.shape[1])
        values = fmt.dequantize(q)
    for seed in (3, 4):
        x = rows(seed)
        static.copy_(x)
        if values.data_ptr() != static.data_ptr():  # the identity format returns its input
            values.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_values(values, fmt.dequantize(fmt.quantize(x)))


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_waits_for_the_device(name):
    x = rows(5).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dequantize(quantize(x, name))
    finally:
        torch.cuda.set_sync_debug_mode("default")
