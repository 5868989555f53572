"""The oracle of the quantizer tests: NumPy, one block at a time, elements rounded by ml_dtypes."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

F32 = np.float32


@dataclass(frozen=True)
class Spec:
    """What the documentation says about a block-scaled format; written down here a second time on purpose."""

    block: tuple[int, int]
    element: str  # "e4m3", "e2m1", "int4"
    rule: str  # how a block's scale follows from its largest magnitude


SPECS = {
    "fp8": Spec((1, 128), "e4m3", "amax/448"),
    "fp8_128x128": Spec((128, 128), "e4m3", "amax/448"),
    "fp8_128x128_ue8m0": Spec((128, 128), "e4m3", "ceil"),
    "fp8_32x32": Spec((32, 32), "e4m3", "ceil"),
    "mxfp8": Spec((1, 32), "e4m3", "floor"),
    "mxfp4": Spec((1, 32), "e2m1", "floor"),
    "nvfp4": Spec((1, 16), "e2m1", "nvfp4"),
    "int4": Spec((1, 32), "int4", "amax/7.5"),
}

CODEBOOK = {
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "e2m1": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64),
    "int4": np.arange(16, dtype=np.float64) - 8,
}


@dataclass(frozen=True)
class Quantized:
    """``codes`` uint8 ``[N, K]`` (not packed); ``scale`` as its raw bits; ``values`` fp64 ``[N, K]``."""

    codes: np.ndarray
    scale: np.ndarray
    global_scale: np.ndarray | None
    values: np.ndarray


def round_elements(x: np.ndarray, element: str) -> np.ndarray:
    """Codes of fp32 values; NaN (a block without value) becomes the code of zero, except in E4M3, which has NaN."""
    with np.errstate(invalid="ignore"):
        if element == "e4m3":
            codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            return np.where(np.isfinite(x), codes, 0x7F).astype(np.uint8)
        x = np.where(np.isnan(x), F32(0), x)
        if element == "e2m1":
            return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        return (np.clip(np.rint(x), -8, 7) + 8).astype(np.uint8)


def _floor_exponent(amax: float, emax: int) -> int:
    return -127 if amax == 0 else max(-127, math.frexp(amax)[1] - 1 - emax)


def _ceil_exponent(amax: float) -> int:
    k = -127
    while amax > 448 * 2.0**k:  # exact in fp64
        k += 1
    return k


def _quantize_block(x: np.ndarray, spec: Spec, global_scale: np.float32 | None) -> tuple[np.ndarray, float | int]:
    """Codes and stored scale (E8M0: its byte) of one block of fp32 values."""
    magnitude = np.abs(x)
    finite = magnitude[np.isfinite(magnitude)]
    spoiled = finite.size < x.size
    amax = F32(finite.max()) if finite.size else F32(0)
    if spec.rule == "amax/448":
        scale = max(F32(amax / F32(448)), F32(2.0**-126))
        return round_elements(x / scale, spec.element), float(scale)
    if spec.rule in ("floor", "ceil"):
        if spoiled and spec.element == "e2m1":
            return np.zeros(x.shape, np.uint8), 255
        k = _ceil_exponent(float(amax)) if spec.rule == "ceil" else 0
        if spec.rule == "floor":
            k = _floor_exponent(float(amax), 8 if spec.element == "e4m3" else 2)
        # Exact in fp64; elements far below the least subnormal round to zero either way.
        return round_elements((x.astype(np.float64) * 2.0**-k).astype(F32), spec.element), k + 127
    if spec.rule == "amax/7.5":
        if spoiled:
            return np.full(x.shape, 8, np.uint8), math.nan
        scale = F32(max(F32(amax / F32(7.5)), F32(2.0**-126)).astype(ml_dtypes.bfloat16))
        return round_elements(x / scale, spec.element), float(scale)
    assert spec.rule == "nvfp4" and global_scale is not None
    if spoiled:
        return np.zeros(x.shape, np.uint8), math.nan
    ratio = F32(1) if amax == 0 else np.clip(amax / F32(F32(6) * global_scale), F32(2.0**-9), F32(448))
    scale = F32(ratio.astype(ml_dtypes.float8_e4m3fn))
    return round_elements(x / F32(scale * global_scale), spec.element), float(scale)


def _row_global_scale(row: np.ndarray) -> np.float32:
    """NVFP4's scale of one row: from the 16-blocks that hold finite values only."""
    amax = F32(0)
    for c in range(0, row.size, 16):
        block = np.abs(row[c : c + 16])
        if np.isfinite(block).all():
            amax = max(amax, F32(block.max()))
    return max(F32(amax / F32(2688)), F32(2.0**-117))


class Oracle:
    """Independent quantizer and dequantizer of every format."""

    specs = SPECS
    codebook = CODEBOOK
    round_elements = staticmethod(round_elements)

    @staticmethod
    def quantize(name: str, x: np.ndarray, global_scale: float | None = None) -> Quantized:
        """``x`` fp32 ``[N, K]``."""
        spec = SPECS[name]
        rows, columns = spec.block
        n, k = x.shape
        codes = np.zeros((n, k), np.uint8)
        scale = np.zeros((-(-n // rows), -(-k // columns)))
        values = np.zeros((n, k))
        per_row = None
        if spec.rule == "nvfp4":
            per_row = (
                np.full((n, 1), F32(global_scale)) if global_scale else np.array([[_row_global_scale(r)] for r in x])
            )
            per_row = per_row.reshape(n, 1).astype(F32)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                g = None if per_row is None else per_row[i, 0]
                codes[at], scale[i, j] = _quantize_block(x[at], spec, g)
                value = 2.0 ** (scale[i, j] - 127) if spec.rule in ("floor", "ceil") else scale[i, j]
                if spec.rule in ("floor", "ceil") and scale[i, j] == 255:
                    value = math.nan
                values[at] = CODEBOOK[spec.element][codes[at]] * value * (1.0 if g is None else float(g))
        return Quantized(codes, scale, per_row, values)

    @staticmethod
    def codes(name: str, data: torch.Tensor, columns: int) -> np.ndarray:
        """Unpacked codes of stored data, uint8 ``[..., K]``."""
        raw = data.contiguous().view(torch.uint8).numpy()
        if SPECS[name].element == "e4m3":
            return raw
        out = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)
        out[..., 0::2], out[..., 1::2] = raw % 16, raw // 16
        assert (out[..., columns:] == 0).all(), "the padding nibble of an odd row must be zero"
        return out[..., :columns]

    @staticmethod
    def scale(scale: torch.Tensor) -> np.ndarray:
        """Stored scales as fp64 (E8M0: the byte)."""
        return scale.to(torch.float64).numpy() if scale.dtype != torch.uint8 else scale.numpy().astype(np.float64)


@pytest.fixture
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, the same every run."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def wild(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """fp32 values over the whole exponent range, wide within a row, more so between rows; ties, ±0, subnormals."""
    exponent = rng.integers(-140, 118, (*shape[:-1], 1)) + rng.integers(-12, 8, shape)
    x = np.ldexp(rng.standard_normal(shape), exponent)
    ties = np.ldexp(rng.integers(-31, 32, shape) / 4.0, rng.integers(-2, 3, (*shape[:-1], 1)))
    x = np.where(rng.random((*shape[:-1], 1)) < 0.4, ties, x)
    x = np.where(rng.random(shape) < 0.05, -0.0, x)
    x = np.where(rng.random((*shape[:-1], 1)) < 0.1, 0.0, x)
    return x.astype(F32)


@pytest.fixture(name="wild")
def _wild(rng: np.random.Generator):
    return lambda *shape: wild(rng, *shape)
