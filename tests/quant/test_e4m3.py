"""The E4M3 codec against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from moe_layer.quant import e4m3

CODES = np.arange(256, dtype=np.uint8)


def encoded(x: np.ndarray) -> np.ndarray:
    return e4m3.encode(torch.from_numpy(np.ascontiguousarray(x, np.float32))).view(torch.uint8).numpy()


def expected(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isfinite(x), codes, 0x7F)


def test_decode_every_code():
    codes = torch.from_numpy(CODES).view(torch.float8_e4m3fn)
    got = e4m3.decode(codes)
    assert got.dtype == torch.bfloat16
    np.testing.assert_array_equal(got.float().numpy(), CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    shaped = e4m3.decode(codes.view(4, 8, 8).transpose(0, 2))
    assert torch.equal(shaped.nan_to_num(7e4), got.view(4, 8, 8).transpose(0, 2).nan_to_num(7e4))


def test_encode_inverts_decode():
    finite = (CODES & 0x7F) != 0x7F
    np.testing.assert_array_equal(
        encoded(CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))[finite], CODES[finite]
    )


def test_ties_go_to_even_and_their_neighbours_to_the_nearer():
    positive = CODES[:0x7F].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middle = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)  # exact in fp32
    even = np.where(CODES[:0x7E] % 2 == 0, CODES[:0x7E], CODES[1:0x7F])
    np.testing.assert_array_equal(encoded(middle), even)
    np.testing.assert_array_equal(encoded(-middle), even | 0x80)
    np.testing.assert_array_equal(encoded(np.nextafter(middle, np.float32(0))), CODES[:0x7E])
    np.testing.assert_array_equal(encoded(np.nextafter(middle, np.float32(1e9))), CODES[1:0x7F])


def test_saturation_nan_infinity_and_zero():
    x = np.array(
        [448, 463.9, 464, 464.1, 480, 1e30, 3.4e38, np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30, -1e-30], np.float32
    )
    got = encoded(x)
    assert got.tolist() == [0x7E] * 7 + [0x7F] * 3 + [0, 0x80, 0, 0x80]
    assert encoded(-x[:7]).tolist() == [0xFE] * 7


def test_every_bf16_and_every_fp16():
    patterns = np.arange(65536, dtype=np.uint16)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        x = patterns.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(encoded(x), expected(x))


def test_random_fp32_bits(rng):
    x = rng.integers(-(2**31), 2**31, 200_000).astype(np.int32).view(np.float32)
    near = np.ldexp(rng.standard_normal(200_000), rng.integers(-12, 9, 200_000)).astype(np.float32)
    for values in (x, near):
        np.testing.assert_array_equal(encoded(values), expected(values))
