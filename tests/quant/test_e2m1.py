"""The E2M1 codec against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from moe_layer.quant import e2m1

CODES = np.arange(16, dtype=np.uint8)


def encoded(x: np.ndarray) -> np.ndarray:
    return e2m1.encode(torch.from_numpy(np.ascontiguousarray(x, np.float32))).numpy()


def expected(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def test_every_code_and_back():
    got = e2m1.values(torch.device("cpu"))
    reference = CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.float().numpy().view(np.int32), reference.view(np.int32))  # −0 is not 0
    np.testing.assert_array_equal(encoded(reference), CODES)


def test_ties_go_to_even_and_their_neighbours_to_the_nearer():
    positive = CODES[:8].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    middle = (positive[1:] + positive[:-1]) / 2
    even = np.where(CODES[:7] % 2 == 0, CODES[:7], CODES[1:8])
    for x, codes in (
        (middle, even),
        (np.nextafter(middle, np.float32(0)), CODES[:7]),
        (np.nextafter(middle, np.float32(9)), CODES[1:8]),
    ):
        np.testing.assert_array_equal(encoded(x), codes)
        np.testing.assert_array_equal(encoded(-x), codes | 8)


def test_saturation_nan_infinity_and_zero():
    x = np.array([6, 6.5, 7, 1e9, 3.4e38, np.inf, 0.0, 1e-40], np.float32)
    assert encoded(x).tolist() == [7] * 6 + [0, 0]
    assert encoded(-x).tolist() == [15] * 6 + [8, 8]
    nan = np.array([0x7FC00000, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    assert encoded(nan).tolist() == [0, 0, 0]


def test_every_bf16_and_random_fp32(rng):
    bf16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    wide = np.ldexp(rng.standard_normal(300_000), rng.integers(-3, 3, 300_000)).astype(np.float32)
    for x in (bf16[np.isfinite(bf16)], wide):
        np.testing.assert_array_equal(encoded(x), expected(x))
