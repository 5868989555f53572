"""The registry, and the byte sizes that the rest of the library plans with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_layer.errors import FormatError
from moe_layer.quant import available_formats, get_format, quantize, register_format

# Bytes of a [N, K] = [130, 300] tensor by hand: data, scales.
BYTES = {
    "fp32": (130 * 300 * 4, 0),
    "bf16": (130 * 300 * 2, 0),
    "fp8": (130 * 300, 130 * 3 * 4),
    "fp8_128x128": (130 * 300, 2 * 3 * 4),
    "fp8_128x128_ue8m0": (130 * 300, 2 * 3),
    "fp8_32x32": (130 * 300, 5 * 10),
    "mxfp8": (130 * 300, 130 * 10),
    "mxfp4": (130 * 150, 130 * 10),
    "nvfp4": (130 * 150, 130 * 19),
    "int4": (130 * 150, 130 * 10 * 2),
}


def test_the_registry_is_full():
    assert available_formats() == sorted(BYTES)
    with pytest.raises(FormatError, match="format 'mxfp4' is already registered"):
        register_format(get_format("mxfp4"))


@pytest.mark.parametrize("name", sorted(BYTES))
def test_byte_sizes(name):
    fmt = get_format(name)
    data, scales = BYTES[name]
    q = quantize(torch.ones(130, 300), name)
    assert q.data.nbytes == data and (0 if q.scale is None else q.scale.nbytes) == scales
    assert fmt.nbytes((130, 300)) == data + scales
    assert fmt.nbytes((2, 3, 130, 300)) == 6 * (data + scales)
    assert q.nbytes == data + scales + (130 * 4 if name == "nvfp4" else 0)
    assert fmt.row_bytes(300) * 130 == data
    assert fmt.data_columns(299) == (150 if fmt.element_bits == 4 else 299)
    if fmt.is_activation_format:
        assert fmt.scale_row_bytes(300) * 130 == scales


@pytest.mark.parametrize("name", sorted(BYTES))
def test_wire(name, rng):
    """What dispatch carries is enough to get the same values back."""
    fmt = get_format(name)
    x = torch.from_numpy(rng.standard_normal((5, 71)).astype(np.float32))
    if not fmt.is_activation_format:
        with pytest.raises(FormatError, match=f"{name} cannot carry activations"):
            fmt.to_wire(fmt.quantize(x))
        return
    q = fmt.quantize(x)
    data, scale = fmt.to_wire(q)
    for row in (data, scale):
        assert row is None or (row.is_contiguous() and row.shape[0] == 5)
    assert torch.equal(
        fmt.dequantize(fmt.from_wire(data.clone(), None if scale is None else scale.clone(), 71)), fmt.dequantize(q)
    )


def test_plain_formats_pass_values_through(rng):
    x = torch.from_numpy(rng.integers(-(2**31), 2**31, (64, 64)).astype(np.int32)).view(torch.float32)
    fp32 = quantize(x, "fp32")
    assert torch.equal(get_format("fp32").dequantize(fp32).view(torch.int32), x.view(torch.int32))
    with np.errstate(invalid="ignore"):
        expected = x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    got = get_format("bf16").dequantize(quantize(x, "bf16")).numpy()
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(quantize(every, "bf16").data.view(torch.int16), every.view(torch.int16))
    strided = torch.from_numpy(rng.standard_normal((6, 8)).astype(np.float32)).t()
    for name in ("fp32", "bf16"):
        q = quantize(strided, name)
        assert q.data.is_contiguous() and torch.equal(q.data, strided.to(q.data.dtype))
