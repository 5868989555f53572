"""E8M0 bytes against ml_dtypes, torch's own dtype and exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from moe_layer.quant import e8m0

BYTES = torch.arange(256, dtype=torch.uint8)
MANTISSAS = (0, 1, 0x400000, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF)


def every_exponent() -> torch.Tensor:
    """Every exponent field of fp32 (subnormals and zero, too), each with mantissas on both sides of every threshold."""
    bits = [(e << 23) | m for e in range(255) for m in MANTISSAS]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def test_decode_every_byte():
    got = e8m0.decode(BYTES).numpy()
    np.testing.assert_array_equal(got, BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(got, BYTES.view(torch.float8_e8m0fnu).to(torch.float32).numpy())
    assert got[0] == 2.0**-127 and math.isnan(got[255])


def test_reciprocal_every_byte():
    got = e8m0.reciprocal(BYTES).double()
    assert math.isnan(got[255])
    assert torch.equal(got[:255], 2.0 ** (127 - torch.arange(255, dtype=torch.float64)))


def test_encode_inverts_decode():
    assert torch.equal(e8m0.encode_floor(e8m0.decode(BYTES)), BYTES)


def test_floor_at_every_exponent():
    x = every_exponent()
    for emax in (0, 2, 8):
        got = e8m0.encode_floor(x, emax)
        for value, byte in zip(x.tolist(), got.tolist()):
            expected = 0 if value == 0 else max(0, math.frexp(value)[1] - 1 - emax + 127)
            assert byte == expected, (value, emax)


def test_ceil_is_the_least_power_that_does_not_saturate():
    for max_value in (448.0, 6.0, 57344.0, 2.0):
        x = every_exponent()
        got = e8m0.encode_ceil(x, max_value)
        for value, byte in zip(x.tolist(), got.tolist()):
            assert Fraction(value) <= Fraction(max_value) * Fraction(2) ** (byte - 127), (value, byte)
            assert byte == 0 or Fraction(value) > Fraction(max_value) * Fraction(2) ** (byte - 128), (value, byte)


def test_random_bits(rng):
    bits = torch.from_numpy(rng.integers(0, 0x7F800000, 100_000, dtype=np.int32))
    x = bits.view(torch.float32)
    exponent = np.frexp(x.double().numpy())[1] - 1
    np.testing.assert_array_equal(e8m0.encode_floor(x, 8).numpy(), np.maximum(exponent - 8 + 127, 0))
    ratio = np.ceil(np.log2(x.double().numpy() / 448) - 1e-12)  # random mantissas are never within 1e-12 of a power
    np.testing.assert_array_equal(e8m0.encode_ceil(x, 448.0).numpy(), np.maximum(ratio + 127, 0))


def test_nan_and_infinity_become_255():
    patterns = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert e8m0.encode_floor(patterns, 8).tolist() == [255] * 4
    assert e8m0.encode_ceil(patterns, 448.0).tolist() == [255] * 4
