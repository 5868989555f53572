"""Bytes and values against compressed-tensors, which wrote the Kimi checkpoints and reads them in other engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from moe_layer.errors import TensorError
from moe_layer.quant import QuantizedTensor, dequantize, e8m0, int4, quantize

INT4 = QuantizationArgs(
    num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.bfloat16
)
NVFP4 = QuantizationArgs(
    num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
)
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8
)
MXFP8 = QuantizationArgs(
    num_bits=8, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8
)


def scheme(args: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=args)


def gaussian(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 0.05)


def block_range(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.unflatten(-1, (-1, size))
    return blocks.amin(-1), blocks.amax(-1)


def test_int4_scales_and_codes(rng):
    x = gaussian(rng, 48, 256)
    x[5, 32:64] = torch.linspace(-7.5, 7.5, 32)  # scale 1: ties at every half
    scale, zero_point = calculate_qparams(*block_range(x, 32), INT4)
    codes = ct_quantize(x, scale, zero_point, INT4, dtype=torch.int8)
    q = quantize(x, "int4")
    assert torch.equal(q.scale, scale.to(torch.bfloat16))
    assert torch.equal(int4.to_words(q.data), pack_to_int32(codes, 4))
    assert codes.min() == -8 and codes.max() == 7


@pytest.mark.parametrize("columns", [1, 7, 8, 33, 64, 100])
def test_int4_words(rng, columns):
    codes = torch.from_numpy(rng.integers(-8, 8, (3, 5, columns), dtype=np.int8))
    words = pack_to_int32(codes, 4)
    data = int4.from_words(words, columns)
    scale = torch.ones(3, 5, -(-columns // 32), dtype=torch.bfloat16)
    assert torch.equal(dequantize(QuantizedTensor("int4", data, scale, None, columns)), codes.float())
    again = int4.to_words(data)
    assert torch.equal(unpack_from_int32(again, 4, torch.Size((3, 5, columns))), codes)
    if columns % 2 == 0:
        assert torch.equal(again, words)
    if columns % 8 == 0:
        assert data.data_ptr() == words.data_ptr(), "full words must load without a copy"


def test_int4_word_errors():
    with pytest.raises(
        TensorError, match=r"rows of 33 values need torch.int32 words \[..., 5\], got torch.int32 \(2, 4\)"
    ):
        int4.from_words(torch.zeros(2, 4, dtype=torch.int32), 33)
    with pytest.raises(TensorError, match=r"got torch.int64 \(2, 4\)"):
        int4.from_words(torch.zeros(2, 4, dtype=torch.int64), 32)


@pytest.mark.parametrize("power", [-3, 0, 11])
def test_nvfp4_bytes(rng, power):
    """With a global scale that is a power of two its reciprocal is exact, and so must be every byte."""
    x = gaussian(rng, 32, 128) * 2.0 ** (8 - power)
    x[3, 16:32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * 2.0 ** (1 - power)  # ties
    x[4, :16] *= 3.2 * 6 * 2.0 ** (-9 - power) / x[4, :16].abs().max()  # a subnormal E4M3 scale
    reciprocal = torch.tensor([2.0**power])
    scale, zero_point = calculate_qparams(*block_range(x, 16), NVFP4, global_scale=reciprocal)
    theirs = NVFP4PackedCompressor.compress(
        {"weight": x, "weight_scale": scale, "weight_zero_point": zero_point, "weight_global_scale": reciprocal},
        scheme(NVFP4),
    )
    q = quantize(x, "nvfp4", global_scale=1 / reciprocal)
    assert torch.equal(q.scale.view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(q.data, theirs["weight_packed"])


def test_nvfp4_values(rng):
    x = gaussian(rng, 32, 128)
    reciprocal = generate_gparam(x.amin(), x.amax())
    scale, zero_point = calculate_qparams(*block_range(x, 16), NVFP4, global_scale=reciprocal)
    state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero_point, "weight_global_scale": reciprocal}
    packed = NVFP4PackedCompressor.compress(state, scheme(NVFP4))
    q = QuantizedTensor("nvfp4", packed["weight_packed"], packed["weight_scale"], 1 / reciprocal, 128)
    theirs = NVFP4PackedCompressor.decompress(
        {k: v.double() if k == "weight_global_scale" else v for k, v in packed.items()}, scheme(NVFP4)
    )["weight"]
    # They compute in BF16; the value differs by its rounding and that of the reciprocal only.
    assert ((dequantize(q) - theirs.float()).abs() <= 2.0**-7 * theirs.float().abs()).all()
    # Our own rule agrees with theirs but for a reciprocal rounded twice: at most a handful of ties.
    ours = quantize(x, "nvfp4", global_scale=1 / reciprocal)
    assert (ours.scale.view(torch.uint8) != packed["weight_scale"].view(torch.uint8)).float().mean() < 0.01
    assert (ours.data != packed["weight_packed"]).float().mean() < 0.02


def test_mxfp4_elements_and_values(rng):
    """Its scale rule rounds amax first (so as not to saturate); given the scales, bytes and values must be the same."""
    x = gaussian(rng, 16, 256)
    q = quantize(x, "mxfp4")
    packed = MXFP4PackedCompressor.compress({"weight": x, "weight_scale": e8m0.decode(q.scale)}, scheme(MXFP4))
    assert torch.equal(packed["weight_scale"], q.scale)
    assert torch.equal(packed["weight_packed"], q.data)
    theirs = MXFP4PackedCompressor.decompress(packed, scheme(MXFP4))["weight"]
    assert torch.equal(dequantize(q, torch.bfloat16), theirs)


def test_mxfp4_written_by_them(rng):
    x = gaussian(rng, 16, 256)
    scale, zero_point = calculate_qparams(*block_range(x, 32), MXFP4)
    packed = MXFP4PackedCompressor.compress(
        {"weight": x, "weight_scale": scale, "weight_zero_point": zero_point}, scheme(MXFP4)
    )
    theirs = MXFP4PackedCompressor.decompress(packed, scheme(MXFP4))["weight"]
    q = QuantizedTensor("mxfp4", packed["weight_packed"], packed["weight_scale"], None, 256)
    assert torch.equal(dequantize(q, torch.bfloat16), theirs)
    assert (dequantize(q) - x).norm() < 0.15 * x.norm()


def test_mxfp8_values(rng):
    x = gaussian(rng, 16, 256)
    q = quantize(x, "mxfp8")
    packed = MXFP8QuantizationCompressor.compress({"weight": x, "weight_scale": e8m0.decode(q.scale)}, scheme(MXFP8))
    assert torch.equal(packed["weight_scale"], q.scale)
    assert torch.equal(packed["weight"].view(torch.uint8), q.data.view(torch.uint8))
    theirs = MXFP8QuantizationCompressor.decompress(packed, scheme(MXFP8))["weight"]
    assert torch.equal(dequantize(q), theirs.float())
