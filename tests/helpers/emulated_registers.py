"""Runs the register arithmetic of ``moe_layer.quant.registers`` on NumPy arrays, one element a lane.

Every function that is an instruction is replaced by one of this module, which does in NumPy what PTX says it does;
everything made of them runs as it is. A branch becomes a choice.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

F32, U32 = np.float32, np.uint32


def fused(a: Any, b: Any, c: Any) -> Any:
    """``a·b + c`` in fp32, rounded once: the fp64 sum and what it lost (Knuth's two-sum), as fp64 rounds once more."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)  # exact
    addend = np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    rounded = total.astype(F32)
    for toward in (np.inf, -np.inf):
        neighbour = np.nextafter(rounded, F32(toward))
        midway = (neighbour.astype(np.float64) + rounded.astype(np.float64)) / 2 == total
        rounded = np.where(midway & (np.sign(lost) == np.sign(toward)), neighbour, rounded)
    return rounded


def bits(value: Any) -> Any:
    return np.asarray(value, F32).view(U32)


def number(word: Any) -> Any:
    return np.asarray(word, U32).view(F32)


def halves(word: Any) -> tuple[Any, Any]:
    return word & U32(0xFFFF), word >> U32(16)


def e4m3(value: Any) -> Any:
    """cvt.rn.satfinite.e4m3x2.f32: infinities saturate, NaN is 0x7F."""
    code = np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(U32)
    return np.where(np.isnan(value), U32(0x7F), code)


def e2m1(value: Any) -> Any:
    """cvt.rn.satfinite.e2m1x2.f32, for numbers."""
    code = np.clip(value, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return code.view(np.uint8).astype(U32) & U32(15)


def permute(a: Any, b: Any, selector: int) -> Any:
    """prmt.b32, signs included."""
    given = [(np.asarray(word, U32) >> U32(8 * j)) & U32(0xFF) for word in (a, b) for j in range(4)]
    picked = U32(0)
    for j in range(4):
        digit = selector >> 4 * j & 15
        byte = given[digit & 7]
        picked = picked | ((byte if digit < 8 else (byte >> U32(7)) * U32(0xFF)) << U32(8 * j))
    return picked


def as_type(kind: Any) -> Any:
    return lambda value: np.asarray(value).astype(kind)


def from_neighbour(value: Any, distance: int) -> Any:
    lanes = np.arange(value.shape[-1])
    return value[..., lanes ^ distance]


def choose_all(condition: Any, yes: Any, no: Any) -> list[Any]:
    return [np.where(condition, a, b) for a, b in zip(yes, no)]


def emulate(monkeypatch: pytest.MonkeyPatch, *, has_e2m1: bool = False, seed: int = 0) -> Any:
    """``moe_layer.quant.encoders`` on arrays ``[…, lanes]``."""
    from moe_layer.quant import encoders
    from moe_layer.quant import registers as reg

    rng = np.random.default_rng(seed)

    def rough_reciprocal(a: Any) -> Any:
        y = (F32(1) / a).astype(F32)
        return np.nextafter(y, rng.choice(np.array([0.0, np.inf], F32), y.shape)) if seed % 2 else y

    def finite_magnitude(words: Any) -> Any:
        top = reg.largest_magnitude(words)
        marked, finite = reg.mark_bad(words)
        bad = top >= reg.NON_FINITE
        return choose_all(bad, marked, words), np.where(bad, finite, top)

    def enlarge_small(values: Any, divisor: Any) -> Any:
        scaled, larger = reg.rescaled(values, divisor, F32(2.0**64))
        small = divisor < F32(reg.SMALL_DIVISOR)
        return choose_all(small, scaled, values), np.where(small, larger, divisor)

    def bring_near(values: Any, divisor: Any, amax: Any) -> Any:
        factor = reg.middle_factor(divisor)
        clamped, other = reg.rescaled_and_clamped(values, divisor, factor)
        needed = (factor != 1) | (amax > reg.multiply(divisor, F32(1024.0)))
        return choose_all(needed, clamped, values), np.where(needed, other, divisor)

    def e2m1_word_of_sm100(values: Any) -> Any:
        word = U32(0)
        for j, value in enumerate(values):
            word = word | (e2m1(value) << U32(4 * j))
        return word

    instructions: dict[str, Any] = {
        "bits": bits,
        "number": number,
        "negative": lambda value: number(bits(value) ^ U32(0x80000000)),
        "multiply": lambda a, b: np.asarray(a * b, F32),
        "fused": fused,
        "larger": np.fmax,
        "smaller": np.fmin,
        "quotient": lambda a, b: np.asarray(a / b, F32),
        "reciprocal": lambda a: np.asarray(F32(1) / a, F32),
        "rough_reciprocal": rough_reciprocal,
        "maximum": np.maximum,
        "minimum": np.minimum,
        "maximum_of_halves": lambda a, b: _of_halves(np.maximum, a, b),
        "permute": permute,
        "magnitudes": lambda pair: pair & U32(reg.HALVES),
        "from_neighbour": from_neighbour,
        "select": np.where,
        "e4m3_pair": lambda a, b: e4m3(a) | (e4m3(b) << U32(8)),
        "e4m3_word": lambda *v: e4m3(v[0]) | (e4m3(v[1]) << U32(8)) | (e4m3(v[2]) << U32(16)) | (e4m3(v[3]) << U32(24)),
        "e4m3_values": lambda pair: [
            ((pair >> U32(8 * j)) & U32(0xFF)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
            for j in range(2)
        ],
        "e2m1_word_of_sm100": e2m1_word_of_sm100,
        "converts_to_e2m1": lambda: has_e2m1,
        "finite_magnitude": finite_magnitude,
        "clear_if": lambda condition, words: [np.where(condition, U32(0), word) for word in words],
        "enlarge_small": enlarge_small,
        "bring_near": bring_near,
    }
    for name, function in instructions.items():
        monkeypatch.setattr(reg, name, function)

    def mend_odd_blocks(tops: Any, wire: Any, entry: Any) -> Any:
        needed = np.maximum(*(top - U32(1) for top in tops)) >= U32(reg.NON_FINITE - 1)
        mended, other = encoders.with_odd_blocks(tops, wire, entry)
        return choose_all(needed, mended, wire), np.where(needed, other, entry)

    monkeypatch.setattr(encoders, "mend_odd_blocks", mend_odd_blocks)
    for module in (reg, encoders):
        for name, kind in (("Uint32", U32), ("Int32", np.int32), ("Float32", F32)):
            monkeypatch.setattr(module, name, as_type(kind), raising=False)
    return encoders


def _of_halves(function: Any, a: Any, b: Any) -> Any:
    (a0, a1), (b0, b1) = halves(np.asarray(a, U32)), halves(np.asarray(b, U32))
    return function(a0, b0) | (function(a1, b1) << U32(16))


def encode_rows(encoder: Any, rows: Any, common_scale: Any = None) -> tuple[Any, Any]:
    """``[T, K]`` BF16 bits (uint16) → (row bytes, scale bytes), as lanes of warps make them."""
    tokens, columns = rows.shape
    vectors = columns // encoder.vector_values
    lanes = -(-vectors // 32) * 32
    padded = np.zeros((tokens, lanes * encoder.vector_values), np.uint16)
    padded[:, :columns] = rows
    pairs = padded.view(U32).reshape(tokens, lanes, encoder.vector_values // 2)
    words = [pairs[..., j].copy() for j in range(pairs.shape[-1])]
    scale: Any = U32(0)
    if encoder.common_scale:
        scale = bits(common_scale)
    if encoder.row_scale:
        scale = encoder.scale_of_row(encoder.magnitude(words).max(-1, keepdims=True))
    wire, entry = encoder.encode(words, scale)
    data = np.stack([np.broadcast_to(w, (tokens, lanes)) for w in wire], -1).astype(U32)[:, :vectors]
    entries = np.asarray(entry, U32)[:, : vectors : encoder.vectors_per_scale]
    scales = np.ascontiguousarray(entries[..., None]).view(np.uint8)[..., : encoder.scale_entry_bytes]
    scales = scales.reshape(tokens, -1)
    if encoder.row_scale:
        scales = np.concatenate([scales, np.ascontiguousarray(scale).view(np.uint8).reshape(tokens, 4)], -1)
    return np.ascontiguousarray(data).view(np.uint8).reshape(tokens, -1), scales
