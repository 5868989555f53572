"""Launches the quantizers' kernels with destinations in poisoned memory, and inputs that are hard on them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from moe_layer.quant import QuantizedTensor
from moe_layer.quant.base import Format
from moe_layer.quant.launch import DecodeSpec, EncodeSpec, decode_specs, encode_specs, kernel

GUARD = 4096  # bytes before and after a destination
POISON = 0xA5


class Guarded:
    """A tensor of ``nbytes`` between guard bytes, all of them poison."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.everything = torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.bytes = self.everything[GUARD : GUARD + nbytes]

    def poison(self) -> None:
        self.everything.fill_(POISON)

    def intact(self) -> bool:
        return bool((self.everything[:GUARD] == POISON).all() and (self.everything[-GUARD:] == POISON).all())


class Encoding:
    """A kernel that quantizes ``x`` ``[T, K]`` into guarded destinations, as often as wanted."""

    def __init__(self, fmt: Format, spec: EncodeSpec, x: torch.Tensor, given: torch.Tensor | None, arch: str) -> None:
        self.fmt, self.spec, self.x, self.given = fmt, spec, x, given
        rows, columns = x.shape
        shape = fmt.scale_shape(rows, columns)
        assert shape is not None and fmt.scale_dtype is not None
        self.data = Guarded(rows * fmt.row_bytes(columns), x.device)
        self.scale = Guarded(shape[0] * shape[1] * fmt.scale_dtype.itemsize, x.device)
        self.row_scale = Guarded(4 * rows, x.device)
        self.function = kernel(spec, arch)

    def __call__(self, x: torch.Tensor | None = None) -> None:
        x = self.x if x is None else x
        if self.spec.encoder.row_scale:
            row_bytes = self.scale.bytes.numel() // max(1, self.x.shape[0])
            pointers: tuple[int, ...] = (row_bytes, self.row_scale.bytes.data_ptr(), 4, 0)
        else:
            given = self.given
            pointers = (0, 0) if given is None else (given.data_ptr(), 4 if given.numel() > 1 else 0)
        self.function(
            self.data.everything, x.data_ptr(), x.stride(0) * x.element_size(), self.data.bytes.data_ptr(),
            self.scale.bytes.data_ptr(), *pointers, x.shape[0], self.spec.grid(x.shape[0]),
        )  # fmt: skip

    def poison(self) -> None:
        for part in (self.data, self.scale, self.row_scale):
            part.poison()

    def difference(self, expected: QuantizedTensor) -> str:
        """What is wrong after a launch; "" if nothing is. ``expected`` may lie on any device."""
        pairs = [("data", self.data, expected.data), ("scales", self.scale, expected.scale)]
        if self.spec.encoder.row_scale:
            pairs.append(("row scales", self.row_scale, expected.global_scale))
        found = []
        for what, got, wanted in pairs:
            assert wanted is not None
            bytes_wanted = wanted.contiguous().view(torch.uint8).reshape(-1).to(got.bytes.device)
            wrong = int((got.bytes != bytes_wanted).sum())
            if wrong:
                at = int((got.bytes != bytes_wanted).nonzero()[0])
                found.append(f"{wrong} of {bytes_wanted.numel()} bytes of {what} differ, the first is {at}")
            if not got.intact():
                found.append(f"written outside of {what}")
        return "; ".join(found)


class Decoding:
    """A kernel that dequantizes ``q`` (data ``[T, …]``) into a guarded destination."""

    def __init__(self, spec: DecodeSpec, q: QuantizedTensor, arch: str) -> None:
        self.spec, self.q = spec, q
        self.rows = q.data.shape[0]
        self.out = Guarded(self.rows * q.columns * spec.out_bytes, q.data.device)
        self.function = kernel(spec, arch)

    def __call__(self, q: QuantizedTensor | None = None) -> None:
        q = self.q if q is None else q
        assert q.scale is not None
        over: Any = q.global_scale
        self.function(
            self.out.everything, q.data.data_ptr(), q.data.stride(0) * q.data.element_size(), q.scale.data_ptr(),
            q.scale.stride(0) * q.scale.element_size(), 0 if over is None else over.data_ptr(),
            4 if over is not None and over.numel() > 1 else 0, self.out.bytes.data_ptr(), self.rows,
            self.spec.grid(self.rows),
        )  # fmt: skip

    def poison(self) -> None:
        self.out.poison()

    def difference(self, expected: torch.Tensor) -> str:
        """What is wrong after a launch; NaN equals NaN."""
        got = self.out.bytes.view(expected.dtype).view(expected.shape)
        expected = expected.to(got.device)
        nan = expected.isnan()
        wrong = (got.isnan() != nan).sum() + (
            _bits(got.masked_fill(nan, 0)) != _bits(expected.masked_fill(nan, 0))
        ).sum()
        found = [f"{int(wrong)} of {nan.numel()} values differ"] if wrong.any() else []
        return "; ".join([*found, *([] if self.out.intact() else ["written outside of the values"])])


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


def encoders_of(fmt: Format, dtype: torch.dtype, columns: int, *, given: bool = False) -> dict[str, EncodeSpec]:
    encoder = fmt.kernel_encoder(dtype, per_row_global_scale=not given)
    assert encoder is not None
    return encode_specs(encoder, dtype.itemsize, columns)


def decoders_of(fmt: Format, dtype: torch.dtype, columns: int) -> dict[str, DecodeSpec]:
    decoder = fmt.kernel_decoder()
    assert decoder is not None
    return decode_specs(decoder, dtype.itemsize, columns)


KINDS = ("normal", "any bits", "exponents", "bad values", "zeros", "ties", "real")


def values(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """``[rows, columns]`` on the CPU: of each kind, what quantizers stumble over."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    if kind == "any bits":
        if dtype == torch.bfloat16:
            return torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int16)).view(dtype)
        return torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, shape, dtype=np.int64).astype(np.int32)).view(dtype)
    if kind == "zeros":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    elif kind == "ties":  # and, in FP32, their neighbours
        x = np.ldexp(rng.integers(-63, 64, shape) / 8.0, rng.integers(-3, 4, (rows, 1)))
        if dtype == torch.float32:
            x = np.nextafter(x.astype(np.float32), rng.choice([-np.inf, np.inf], shape).astype(np.float32))
            x = np.where(rng.random(shape) < 0.5, x, np.ldexp(rng.integers(-63, 64, shape) / 8.0, 0))
    elif kind == "normal":
        x = rng.standard_normal(shape)
    elif kind == "real":  # tokens of very different sizes, some features far above the others
        x = rng.standard_normal(shape) * rng.lognormal(0, 1.5, (rows, 1))
        x[:, rng.integers(0, columns, max(1, columns // 200))] *= 40
    else:
        # Blocks of 16 of every exponent, subnormals among them.
        top = np.repeat(rng.integers(-149, 128, (rows, -(-columns // 16))), 16, axis=1)[:, :columns]
        x = np.ldexp(rng.uniform(1, 2, shape), top - rng.integers(0, 14, shape)) * rng.choice([-1, 1], shape)
        if kind == "bad values":
            x = np.where(rng.random(shape) < 0.01, rng.choice([np.inf, -np.inf, np.nan], shape), x)
    with np.errstate(over="ignore"):
        return torch.from_numpy(x.astype(np.float32)).to(dtype)


def at_midpoints(name: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FP32 ``[rows, columns]`` whose quotients by their scales are an element's rounding boundary, or an ulp off it.

    For ``fp8`` and ``nvfp4``, whose scales are no powers of two; the latter with a given global scale a row.
    """
    rng = np.random.default_rng(seed)
    f32 = np.float32
    unit = rng.uniform(1, 2, (rows, 1)).astype(f32) * np.exp2(rng.integers(-20, 20, (rows, 1))).astype(f32)
    if name == "fp8":
        block, largest = 128, unit * f32(448)
        divisor = np.repeat(largest / f32(448), columns, axis=1)
        codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f32)
        largest = np.repeat(largest, columns, axis=1)
    else:
        block, codes = 16, np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(f32)
        scales = rng.integers(40, 127, (rows, -(-columns // 16)), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        scales = np.repeat(scales.astype(f32), 16, axis=1)[:, :columns]
        divisor, largest = scales * unit, f32(6) * unit * scales
    x = (rng.choice((codes[1:] + codes[:-1]) / 2, (rows, columns)) * divisor).astype(f32)
    x = (x.view(np.int32) + rng.integers(-1, 2, x.shape).astype(np.int32)).view(f32)
    x[:, ::block] = largest[:, ::block]
    x *= rng.choice(np.array([-1, 1], f32), x.shape)
    return torch.from_numpy(x), None if name == "fp8" else torch.from_numpy(unit)
