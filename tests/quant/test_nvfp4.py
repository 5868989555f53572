"""What is particular to NVFP4: two levels of scales, and how they travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_layer.errors import FormatError, TensorError
from moe_layer.quant import QuantizedTensor, dequantize, get_format, quantize

FMT = get_format("nvfp4")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("factor", [1.0, 0.37, 1e-3, 300.0])
def test_given_global_scale(oracle, wild, rng, shape, factor):
    """Used as it is: for the data's own range, for data far too large (saturation) and far too small (underflow)."""
    x = rng.standard_normal((20, 70)).astype(np.float32)
    g = np.float32(np.abs(x).max() / 2688 * factor)
    q = quantize(torch.from_numpy(x), "nvfp4", global_scale=torch.full(shape, float(g)))
    reference = oracle.quantize("nvfp4", x, float(g))
    assert q.global_scale.shape == shape and q.global_scale.item() == g
    np.testing.assert_array_equal(oracle.scale(q.scale), reference.scale)
    np.testing.assert_array_equal(oracle.codes("nvfp4", q.data, 70), reference.codes)
    np.testing.assert_array_equal(dequantize(q).numpy(), reference.values.astype(np.float32))


def test_given_global_scale_per_row(oracle, rng):
    """FC1's output rows carry their expert's scale."""
    x = rng.standard_normal((6, 40)).astype(np.float32)
    g = rng.uniform(1e-4, 1e-2, (6, 1)).astype(np.float32)
    q = quantize(torch.from_numpy(x), "nvfp4", global_scale=torch.from_numpy(g))
    for i in range(6):
        reference = oracle.quantize("nvfp4", x[i : i + 1], float(g[i, 0]))
        np.testing.assert_array_equal(oracle.codes("nvfp4", q.data[i : i + 1], 40), reference.codes)
        np.testing.assert_array_equal(dequantize(q)[i].numpy(), reference.values[0].astype(np.float32))


def test_infinity_in_the_data_with_a_given_scale_is_nan_and_overflow_is_not():
    x = torch.full((1, 32), 3e38)
    x[0, 20] = float("inf")
    q = quantize(x, "nvfp4", global_scale=torch.tensor(1e-30))
    values = dequantize(q)
    assert (values[0, :16] == 6 * 448 * torch.tensor(1e-30)).all()  # x / scale overflows fp32 and saturates
    assert values[0, 16:].isnan().all()


@pytest.mark.parametrize("columns", [1, 16, 40, 64, 83])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_wire_with_a_global_scale_per_row(wild, tokens, columns):
    x = torch.from_numpy(wild(tokens, columns)) if tokens else torch.empty(0, columns)
    q = quantize(x, "nvfp4")
    data, scale = FMT.to_wire(q)
    assert scale.dtype == torch.uint8
    assert scale.shape == (tokens, FMT.scale_row_bytes(columns, per_row_global_scale=True))
    assert data.shape == (tokens, FMT.row_bytes(columns))
    for i in range(tokens):
        raw, end = scale[i].numpy().tobytes(), q.scale.shape[1]
        assert raw[:end] == q.scale[i].view(torch.uint8).numpy().tobytes()
        assert np.frombuffer(raw[end : end + 4], np.float32)[0] == q.global_scale[i, 0]
        assert len(raw) % 16 == 0 and len(raw) - end < 20 and not any(raw[end + 4 :])
    assert all(torch.equal(a, b) for a, b in zip(FMT.quantize_to_wire(x), (data, scale)))
    back = FMT.from_wire(data, scale, columns)
    assert torch.equal(back.global_scale, q.global_scale)
    assert torch.equal(dequantize(back), dequantize(q))


def test_wire_from_a_padded_workspace(rng):
    """Received rows are views with a pitch, at any byte offset."""
    q = quantize(torch.from_numpy(rng.standard_normal((4, 83)).astype(np.float32)), "nvfp4")
    data, scale = FMT.to_wire(q)
    workspace = torch.full((4, 64), 0xFF, dtype=torch.uint8)
    workspace[:, 3 : 3 + scale.shape[1]] = scale
    for rows in (slice(None), slice(1, 2)):
        back = FMT.from_wire(data[rows], workspace[rows, 3 : 3 + scale.shape[1]], 83)
        assert torch.equal(dequantize(back), dequantize(q)[rows])


def test_an_aligned_scale_is_read_where_it_lies(rng):
    q = quantize(torch.from_numpy(rng.standard_normal((4, 128)).astype(np.float32)), "nvfp4")
    data, scale = FMT.to_wire(q)
    back = FMT.from_wire(data, scale, 128)
    assert back.global_scale.data_ptr() == scale.data_ptr() + 8
    assert torch.equal(back.global_scale, q.global_scale) and torch.equal(dequantize(back), dequantize(q))


def test_wire_with_a_common_global_scale(rng):
    x = torch.from_numpy(rng.standard_normal((3, 48)).astype(np.float32))
    g = torch.tensor(0.002)
    q = quantize(x, "nvfp4", global_scale=g)
    data, scale = FMT.to_wire(q)
    assert scale.dtype == torch.uint8 and scale.shape == (3, FMT.scale_row_bytes(48))
    assert torch.equal(dequantize(FMT.from_wire(data, scale, 48, g)), dequantize(q))


def test_wire_errors(rng):
    q = quantize(torch.ones(2, 32), "nvfp4")
    data, scale = FMT.to_wire(q)
    with pytest.raises(
        TensorError, match=r"with a common global scale need torch.uint8 scales \[T, 2\], got torch.uint8 \(2, 16\)"
    ):
        FMT.from_wire(data, scale, 32, torch.tensor(1.0))
    with pytest.raises(
        TensorError, match=r"with their own global scale need torch.uint8 scales \[T, 16\], got torch.float8_e4m3fn"
    ):
        FMT.from_wire(data, q.scale, 32)
    with pytest.raises(TensorError, match="got none"):
        FMT.from_wire(data, None, 32)
    with pytest.raises(TensorError, match=r"\[T, K\] rows, got data of shape \(1, 2, 16\)"):
        FMT.to_wire(quantize(torch.ones(1, 2, 32), "nvfp4"))


def test_missing_or_wrong_global_scale():
    q = quantize(torch.ones(2, 32), "nvfp4")
    with pytest.raises(FormatError, match="nvfp4: the global scale is missing"):
        dequantize(QuantizedTensor("nvfp4", q.data, q.scale, None, 32))
    with pytest.raises(
        TensorError, match=r"global scale has shape \(3, 1\), expected a scalar .* broadcasts to \(2, 1\)"
    ):
        quantize(torch.ones(2, 32), "nvfp4", global_scale=torch.ones(3, 1))
    with pytest.raises(TensorError, match=r"global scale has shape \(2,\)"):  # would broadcast along K, silently
        dequantize(QuantizedTensor("nvfp4", q.data, q.scale, torch.ones(2), 32))
    with pytest.raises(TensorError, match=r"dtype torch\.bfloat16, expected torch\.float32"):
        quantize(torch.ones(2, 32), "nvfp4", global_scale=torch.ones((), dtype=torch.bfloat16))


def test_the_reciprocal_of_the_global_scale_is_not_the_scale(rng):
    """compressed-tensors stores 1/global: taking one for the other is off by its square, not by a little."""
    x = torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32))
    g = x.abs().max() / 2688
    q = quantize(x, "nvfp4", global_scale=g)
    right = dequantize(q)
    wrong = dequantize(QuantizedTensor("nvfp4", q.data, q.scale, 1 / g, 64))
    assert (right - x).norm() < 0.12 * x.norm()
    assert wrong.norm() > 1e3 * x.norm()


def test_modelopt_bytes(rng):
    """Against NVIDIA ModelOpt itself, where it is installed."""
    module = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    x = torch.from_numpy(rng.standard_normal((64, 256)).astype(np.float32))
    x[7, 32:64] = 0
    x[9, :16] *= 1e-5
    packed, scale, global_scale = module.NVFP4QTensor.quantize(x.clone(), 16)
    q = quantize(x, "nvfp4", global_scale=global_scale)
    assert torch.equal(global_scale, x.abs().max() / (6 * 448))
    assert torch.equal(q.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(q.data, packed._quantized_data)
