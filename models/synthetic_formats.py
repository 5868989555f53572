"""Random weight matrices as the releases store them, with the values that the bytes stand for.

Codes and scales are drawn at random and the values follow from the formats' definitions, by table. Nothing here uses
:mod:`moe_layer.quant`, so that a loader or a kernel compared with these values is compared with an independent source.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

Stored = tuple[dict[str, torch.Tensor], "np.ndarray | None"]
"""suffix → tensor, and the fp32 values ``[N, K]`` (None if not asked for)."""

Store = Callable[["np.random.Generator", int, int, bool], Stored]
"""``store(rng, rows, columns, with_values)``."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
"""Value of each 4-bit code."""

INT4 = np.arange(-8, 8, dtype=np.float32)
"""compressed-tensors stores an int4 with an offset of 8."""

SAMPLES = 1 << 16  # of a normal distribution, from which codes are drawn


def _e4m3() -> np.ndarray:
    """Value of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; only S.1111.111 is NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


E4M3 = _e4m3()


def _drawer(table: np.ndarray, spread: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """A function that draws uint8 codes of ``table`` such that their values are about normal with this deviation."""
    finite = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    order = finite[np.argsort(table[finite], kind="stable")]
    values = table[order]
    normal = np.random.default_rng(0).standard_normal(SAMPLES).astype(np.float32) * spread
    codes = order[np.searchsorted((values[1:] + values[:-1]) / 2, normal)]

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return codes[rng.integers(0, SAMPLES, shape, dtype=np.uint16)]

    return draw


# (codes, deviation of their values): wide enough that the largest codes occur
_DRAW_E2M1, _E2M1_SPREAD = _drawer(E2M1, 2.0), 2.0
_DRAW_INT4, _INT4_SPREAD = _drawer(INT4, 3.0), 3.0
_DRAW_E4M3, _E4M3_SPREAD = _drawer(E4M3, 128.0), 128.0


def _scale(rng: np.random.Generator, shape: tuple[int, ...], columns: int, spread: float) -> np.ndarray:
    """fp32 scales, no two alike, that give weights a deviation of about 1/√K."""
    return (np.exp2(rng.uniform(-1, 1, shape)) / (spread * math.sqrt(columns))).astype(np.float32)


def _e8m0(rng: np.random.Generator, shape: tuple[int, ...], columns: int, spread: float) -> np.ndarray:
    """Scale bytes, of four neighbouring powers of two; value 2^(byte − 127)."""
    middle = 127 - math.log2(spread * math.sqrt(columns))
    return (round(middle) + rng.integers(-2, 2, shape)).astype(np.uint8)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _spread_blocks(scale: np.ndarray, block: tuple[int, int], rows: int, columns: int) -> np.ndarray:
    """A scale per block → per value; the last blocks may be short."""
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[:rows, :columns]


def _pack(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes a byte, the low nibble the even column; a last odd column is alone in its byte."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def bf16(rng: np.random.Generator, rows: int, columns: int, with_values: bool = True) -> Stored:
    """``weight`` BF16 [N, K]."""
    normal = rng.standard_normal((rows, columns), dtype=np.float32) / math.sqrt(columns)
    weight = torch.from_numpy(normal).to(torch.bfloat16)
    return {"weight": weight}, weight.float().numpy() if with_values else None


def fp8(block: tuple[int, int], suffix: str, *, e8m0: bool) -> Store:
    """``weight`` F8_E4M3 [N, K] and a scale per block, F32 or F8_E8M0 [⌈N/rows⌉, ⌈K/columns⌉]."""

    def store(rng: np.random.Generator, rows: int, columns: int, with_values: bool = True) -> Stored:
        codes = _DRAW_E4M3(rng, (rows, columns))
        shape = (_ceil(rows, block[0]), _ceil(columns, block[1]))
        if e8m0:
            stored = _e8m0(rng, shape, columns, _E4M3_SPREAD)
            scale = torch.from_numpy(stored).view(torch.float8_e8m0fnu)
            factor = np.exp2(stored.astype(np.float32) - 127)
        else:
            factor = _scale(rng, shape, columns, _E4M3_SPREAD)
            scale = torch.from_numpy(factor)
        tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), suffix: scale}
        return tensors, E4M3[codes] * _spread_blocks(factor, block, rows, columns) if with_values else None

    return store


def mxfp4(data: str, data_dtype: torch.dtype, suffix: str, scale_dtype: torch.dtype) -> Store:
    """Packed E2M1 [N, ⌈K/2⌉] as I8 or U8, and E8M0 bytes [N, ⌈K/32⌉] as F8_E8M0 or U8."""

    def store(rng: np.random.Generator, rows: int, columns: int, with_values: bool = True) -> Stored:
        codes = _DRAW_E2M1(rng, (rows, columns))
        stored = _e8m0(rng, (rows, _ceil(columns, 32)), columns, _E2M1_SPREAD)
        tensors = {
            data: torch.from_numpy(_pack(codes)).view(data_dtype),
            suffix: torch.from_numpy(stored).view(scale_dtype),
        }
        if not with_values:
            return tensors, None
        factor = np.exp2(stored.astype(np.float32) - 127)
        return tensors, E2M1[codes] * _spread_blocks(factor, (1, 32), rows, columns)

    return store


def int4(rng: np.random.Generator, rows: int, columns: int, with_values: bool = True) -> Stored:
    """compressed-tensors pack-quantized: I32 words of eight values [N, ⌈K/8⌉], BF16 scales [N, ⌈K/32⌉], the shape."""
    codes = _DRAW_INT4(rng, (rows, columns))
    padded = np.pad(codes, ((0, 0), (0, -columns % 8))).reshape(rows, -1, 8).astype(np.uint32)
    words = (padded << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    scale = torch.from_numpy(_scale(rng, (rows, _ceil(columns, 32)), columns, _INT4_SPREAD)).to(torch.bfloat16)
    tensors = {
        "weight_packed": torch.from_numpy(words.view(np.int32)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if not with_values:
        return tensors, None
    return tensors, INT4[codes] * _spread_blocks(scale.float().numpy(), (1, 32), rows, columns)


def nvfp4(*, compressed_tensors: bool) -> Store:
    """Packed E2M1 [N, ⌈K/2⌉], E4M3 scales [N, ⌈K/16⌉], and the fp32 scales of the matrix and of its input.

    ModelOpt stores the factors that multiply the values, compressed-tensors their reciprocals.
    """

    def store(rng: np.random.Generator, rows: int, columns: int, with_values: bool = True) -> Stored:
        codes = _DRAW_E2M1(rng, (rows, columns))
        # Block scales 1…2⁷, in the upper half of E4M3's range, and the rest of the magnitude in the global scale.
        scale_codes = rng.integers(0x38, 0x70, (rows, _ceil(columns, 16)), dtype=np.uint8)
        weight_scale = np.float32(_scale(rng, (), columns, _E2M1_SPREAD * 16.0))
        input_scale = np.float32(np.exp2(rng.uniform(-9, -7)))
        packed = torch.from_numpy(_pack(codes))
        scales = torch.from_numpy(scale_codes).view(torch.float8_e4m3fn)
        blocks = E2M1[codes] * _spread_blocks(E4M3[scale_codes], (1, 16), rows, columns) if with_values else None
        if compressed_tensors:
            divisor = np.float32(1) / weight_scale
            tensors = {
                "weight_packed": packed,
                "weight_scale": scales,
                "weight_global_scale": torch.tensor([divisor]),
                "input_global_scale": torch.tensor([np.float32(1) / input_scale]),
            }
            return tensors, None if blocks is None else blocks / divisor
        tensors = {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": torch.tensor(weight_scale),
            "input_scale": torch.tensor(input_scale),
        }
        return tensors, None if blocks is None else blocks * weight_scale

    return store
