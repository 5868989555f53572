"""Dequantization of any stored bytes, not only of those our quantizers write."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moe_layer.quant import QuantizedTensor, dequantize, e8m0

ALL_SCALE_BYTES = np.arange(256, dtype=np.uint8)


def e8m0_values(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def every_code(element: str, rows: int) -> tuple[torch.Tensor, np.ndarray]:
    """Rows that hold every code of an element format: stored data, and fp64 values ``[rows, 256 or 32]``."""
    if element == "e4m3":
        codes = np.tile(np.arange(256, dtype=np.uint8), (rows, 1))
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    codes = np.tile(np.arange(16, dtype=np.uint8), (rows, 2))
    data = torch.from_numpy(codes[:, 0::2] + 16 * codes[:, 1::2])
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) if element == "e2m1" else codes.astype(float) - 8
    return data, values


def assert_same(got: torch.Tensor, expected: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(got.float().numpy(), expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got.float().numpy())[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize(("name", "element"), [("mxfp4", "e2m1"), ("mxfp8", "e4m3")])
def test_mx_every_code_times_every_scale(name, element):
    data, values = every_code(element, 256)
    scale = torch.from_numpy(np.repeat(ALL_SCALE_BYTES[:, None], values.shape[1] // 32, axis=1))
    q = QuantizedTensor(name, data, scale, None, values.shape[1])
    expected = values * e8m0_values(ALL_SCALE_BYTES)[:, None]
    assert_same(dequantize(q), expected)
    # BF16 and FP16 results are those of fp32, rounded once.
    for dtype in (torch.bfloat16, torch.float16):
        with np.errstate(over="ignore"):
            once = torch.from_numpy(expected.astype(np.float32)).to(dtype)
        assert_same(dequantize(q, dtype), once.float().numpy())


@pytest.mark.parametrize("rows", [33, 257])
@pytest.mark.parametrize("name", ["fp8_32x32", "fp8_128x128_ue8m0"])
def test_e8m0_weight_blocks(rng, name, rows):
    block = 32 if name == "fp8_32x32" else 128
    data, values = every_code("e4m3", rows)
    scale = rng.integers(0, 256, (-(-rows // block), 256 // block), dtype=np.uint8)
    expected = values * np.kron(e8m0_values(scale), np.ones((block, block)))[:rows]
    q = QuantizedTensor(name, data, torch.from_numpy(scale), None, 256)
    assert_same(dequantize(q), expected)
    with np.errstate(over="ignore"):
        once = torch.from_numpy(expected.astype(np.float32)).bfloat16()
    assert_same(dequantize(q, torch.bfloat16), once.float().numpy())


def test_fp8_every_code_is_rounded_once(rng):
    """element · fp32 scale, in fp64 and rounded to fp32; scales over the whole range, subnormal ones too."""
    data, values = every_code("e4m3", 200)
    scale = np.ldexp(rng.uniform(1, 2, (200, 2)), rng.integers(-140, 128, (200, 2))).astype(np.float32)
    expected = values * np.repeat(scale.astype(np.float64), 128, axis=1)
    assert_same(dequantize(QuantizedTensor("fp8", data, torch.from_numpy(scale), None, 256)), expected)
    blocks = scale[:2]
    expected = values * np.kron(blocks.astype(np.float64), np.ones((128, 128)))[:200]
    assert_same(dequantize(QuantizedTensor("fp8_128x128", data, torch.from_numpy(blocks), None, 256)), expected)


def test_nvfp4_every_code_and_scale_is_rounded_once(rng):
    """(element · E4M3 scale) · global in fp64, rounded to fp32 once: no BF16 and no rounded product of scales."""
    data, values = every_code("e2m1", 256)
    scale = torch.from_numpy(np.repeat(ALL_SCALE_BYTES[:, None], 2, axis=1))
    global_scale = np.ldexp(rng.uniform(1, 2, (256, 1)), rng.integers(-110, 100, (256, 1))).astype(np.float32)
    factor = ALL_SCALE_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None]
    stored = QuantizedTensor("nvfp4", data, scale.view(torch.float8_e4m3fn), torch.from_numpy(global_scale), 32)
    assert_same(dequantize(stored), values * factor * global_scale.astype(np.float64))
    tiny = np.float32(3.1e-9)  # underflowed where a peer multiplied the scales in 16 bits
    for shape in ((), (1,)):
        g = torch.full(shape, float(tiny))
        q = QuantizedTensor("nvfp4", data, scale.view(torch.float8_e4m3fn), g, 32)
        assert_same(dequantize(q), values * factor * float(tiny))


def test_int4_every_code_is_exact(rng):
    data, values = every_code("int4", 300)
    scale = torch.from_numpy(np.ldexp(rng.uniform(1, 2, (300, 1)), rng.integers(-120, 120, (300, 1)))).bfloat16()
    q = QuantizedTensor("int4", data, scale, None, 32)
    assert_same(dequantize(q), values * scale.double().numpy())


@pytest.mark.parametrize("name", ["fp8_128x128", "fp8_128x128_ue8m0", "fp8_32x32", "mxfp8", "mxfp4"])
def test_against_transformers(rng, name):
    """transformers' loader of FP8 and FP4 checkpoints (sizes that its blocks divide)."""
    block = {"fp8_128x128": (128, 128), "fp8_128x128_ue8m0": (128, 128), "fp8_32x32": (32, 32)}.get(name, (1, 32))
    n, k = 256, 384
    raw = rng.integers(0, 256, (n, k // 2 if name == "mxfp4" else k), dtype=np.uint8)
    scale_shape = (n // block[0], k // block[1])
    if name == "fp8_128x128":
        scale = torch.from_numpy(rng.uniform(1e-4, 1e-2, scale_shape).astype(np.float32))
        theirs = scale
    else:
        scale = torch.from_numpy(rng.integers(100, 150, scale_shape, dtype=np.uint8))
        theirs = scale.view(torch.float8_e8m0fnu)
    data = torch.from_numpy(raw)
    if name != "mxfp4":
        raw[(raw & 0x7F) == 0x7F] = 0
        data = data.view(torch.float8_e4m3fn)
    their_data = data.view(torch.int8) if name == "mxfp4" else data
    expected = Fp8Dequantize(None)._dequantize_one(their_data, theirs, output_dtype=torch.float32)
    assert torch.equal(dequantize(QuantizedTensor(name, data, scale, None, k)), expected)


def test_strided_storage(rng):
    """Experts sliced out of a stacked tensor."""
    data = torch.from_numpy(rng.integers(0, 256, (3, 2, 8, 24), dtype=np.uint8))
    scale = torch.from_numpy(rng.integers(120, 130, (3, 2, 8, 2), dtype=np.uint8))
    q = QuantizedTensor("mxfp4", data, scale, None, 48)
    whole = dequantize(q)
    part = dequantize(QuantizedTensor("mxfp4", data[:, 1, ::2], scale[:, 1, ::2], None, 48))
    assert torch.equal(part, whole[:, 1, ::2])


def test_stored_tensors_are_not_written(rng):
    for name, data, scale in (
        ("mxfp4", rng.integers(0, 256, (4, 16), dtype=np.uint8), rng.integers(1, 254, (4, 1), dtype=np.uint8)),
        ("mxfp8", rng.integers(0, 127, (4, 32), dtype=np.uint8), rng.integers(1, 254, (4, 1), dtype=np.uint8)),
    ):
        stored = torch.from_numpy(data.copy())
        q = QuantizedTensor(
            name, stored if name == "mxfp4" else stored.view(torch.float8_e4m3fn), torch.from_numpy(scale), None, 32
        )
        for dtype in (torch.float32, torch.bfloat16):
            dequantize(q, dtype)
        np.testing.assert_array_equal(stored.numpy(), data)


def test_e8m0_is_never_a_number():
    """A checkpoint's float8_e8m0fnu scales, viewed as bytes, give 2**(b − 127); a numeric cast would give 0."""
    stored = torch.tensor([[2.0**-7]]).to(torch.float8_e8m0fnu)
    assert stored.to(torch.uint8).item() == 0
    assert e8m0.decode(stored.view(torch.uint8)).item() == 2.0**-7
