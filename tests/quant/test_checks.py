"""Errors: each names the tensor or format, what was found and what was expected."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from moe_layer.errors import FormatError, MoELayerError, TensorError
from moe_layer.quant import QuantizedTensor, available_formats, dequantize, get_format, quantize, validate_scales

FORMATS = available_formats()
TWO_DIMENSIONAL = ["fp8_128x128", "fp8_128x128_ue8m0", "fp8_32x32"]


@pytest.mark.parametrize("name", FORMATS)
def test_bad_input(name):
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(TensorError, match=f"{name}: cannot quantize dtype {dtype}"):
            quantize(torch.ones(2, 32).to(dtype), name)
    with pytest.raises(TensorError, match=rf"{name}: cannot quantize shape \(\)"):
        quantize(torch.tensor(1.0), name)
    with pytest.raises(TensorError, match=rf"{name}: cannot quantize shape \(3, 0\).*rows of at least one value"):
        quantize(torch.ones(3, 0), name)
    if name in TWO_DIMENSIONAL:
        with pytest.raises(TensorError, match=rf"{name}: cannot quantize shape \(64,\); expected at least 2"):
            quantize(torch.ones(64), name)
    if name != "nvfp4":
        with pytest.raises(TensorError, match=f"{name} has no global scale"):
            quantize(torch.ones(2, 32), name, global_scale=torch.tensor(1.0))


@pytest.mark.parametrize("name", FORMATS)
def test_bad_storage(name):
    q = quantize(torch.ones(40, 48), name)
    with pytest.raises(FormatError, match=f"{name}: cannot dequantize a tensor of format 'bogus'"):
        get_format(name).dequantize(dataclasses.replace(q, format="bogus"))
    with pytest.raises(TensorError, match=f"{name}: data has dtype torch.int64"):
        dequantize(dataclasses.replace(q, data=q.data.to(torch.int64)))
    with pytest.raises(TensorError, match=rf"{name}: data has shape .* for rows of 51 values"):
        dequantize(dataclasses.replace(q, columns=51))
    if q.scale is None:
        return
    with pytest.raises(FormatError, match=f"{name}: the scales are missing"):
        dequantize(dataclasses.replace(q, scale=None))
    expected = re.escape(f"expected {tuple(q.scale.shape)}")
    with pytest.raises(TensorError, match=rf"{name}: scales have shape \(.*\), {expected}"):
        dequantize(dataclasses.replace(q, scale=torch.cat((q.scale, q.scale), -1)))
    with pytest.raises(TensorError, match=f"{name}: scales have dtype torch.float16, expected {q.scale.dtype}"):
        dequantize(dataclasses.replace(q, scale=torch.ones(q.scale.shape, dtype=torch.float16)))


def test_scale_rows_of_weight_blocks():
    """⌈N/rows⌉ scale rows: the floor, a fault of other loaders, is refused."""
    q = quantize(torch.ones(129, 128), "fp8_128x128")
    assert q.scale.shape == (2, 1)
    with pytest.raises(TensorError, match=r"scales have shape \(1, 1\), expected \(2, 1\) for data \(129, 128\)"):
        dequantize(dataclasses.replace(q, scale=q.scale[:1]))
    with pytest.raises(TensorError, match=r"data has shape \(128,\), expected \[..., N, columns\]"):
        dequantize(dataclasses.replace(q, data=q.data[0]))


def test_e8m0_scales_must_be_bytes():
    q = quantize(torch.ones(2, 32), "mxfp4")
    with pytest.raises(TensorError, match=r"view them as torch\.uint8, do not cast"):
        dequantize(dataclasses.replace(q, scale=q.scale.view(torch.float8_e8m0fnu)))


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("bf16", "fp32")])
def test_validate_scales_accepts_what_the_quantizers_write(name):
    x = torch.randn(64, 300)
    x[:40] = 0
    x[50] *= 1e-38
    validate_scales(quantize(x, name), "w")
    validate_scales(quantize(torch.empty(0, 64), name), "empty")


def test_validate_scales_without_scales():
    validate_scales(quantize(torch.full((2, 2), float("nan")), "bf16"), "w")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("name", ["fp8", "fp8_128x128", "int4"])
def test_validate_scales_names_the_bad_one(name, bad):
    q = quantize(torch.ones(300, 300), name)
    q.scale[1, 2] = bad
    with pytest.raises(
        FormatError, match=rf"^experts\.3\.w1: scale at \[1, 2\] is {bad:g}, expected finite and positive \(1 of"
    ):
        validate_scales(q, "experts.3.w1")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "fp8_32x32", "fp8_128x128_ue8m0"])
def test_validate_scales_finds_e8m0_nan(name):
    q = quantize(torch.ones(300, 300), name)
    q.scale[1, 1] = 255
    q.scale[2, 0] = 255
    with pytest.raises(
        FormatError, match=r"^w: scale at \[1, 1\] is NaN \(E8M0 byte 255\), expected .* \(2 of \d+ are not\)"
    ):
        validate_scales(q, "w")
    q.scale[:] = 254
    validate_scales(q, "w")


def test_validate_scales_of_nvfp4():
    q = quantize(torch.randn(4, 64), "nvfp4")
    bytes_ = q.scale.view(torch.uint8)
    bytes_[1, 2] = 0  # E4M3 zero: a released quantizer's underflow, worth zeros
    validate_scales(q, "w")
    bytes_[1, 2] = 0x80 + 0x38
    with pytest.raises(FormatError, match=r"w: scale at \[1, 2\] is -1, expected finite and not negative"):
        validate_scales(q, "w")
    bytes_[1, 2] = 0x7F
    with pytest.raises(FormatError, match=r"w: scale at \[1, 2\] is nan"):
        validate_scales(q, "w")
    bytes_[:] = 0
    with pytest.raises(FormatError, match="w: every scale is zero"):
        validate_scales(q, "w")
    bytes_[:] = 0x38
    for bad in (float("nan"), float("inf"), 0.0, -2.0):
        with pytest.raises(FormatError, match=rf"w: global scale at \[\] is {bad:g}, expected finite and positive"):
            validate_scales(dataclasses.replace(q, global_scale=torch.tensor(bad)), "w")
    with pytest.raises(FormatError, match=r"w: nvfp4 needs a global scale, but there is none"):
        validate_scales(dataclasses.replace(q, global_scale=None), "w")
    with pytest.raises(FormatError, match=r"w: nvfp4 needs scales, but there are none"):
        validate_scales(dataclasses.replace(q, scale=None), "w")
    with pytest.raises(FormatError, match=r"w: scales have dtype torch\.uint8, expected torch\.float8_e4m3fn"):
        validate_scales(dataclasses.replace(q, scale=bytes_), "w")


def test_errors_are_the_librarys_own():
    assert issubclass(TensorError, MoELayerError) and issubclass(FormatError, MoELayerError)
    with pytest.raises(FormatError, match="unknown format 'nope'; known: bf16, fp32, fp8"):
        quantize(torch.ones(1, 1), "nope")
    with pytest.raises(FormatError, match="unknown format 'nope'"):
        dequantize(QuantizedTensor("nope", torch.ones(1, 1), None, None, 1))
