"""Arithmetic of the router's scores, instruction by instruction: the same bits in every kernel that uses it."""

from __future__ import annotations

import struct
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from moe_layer.gemm import sm90_device as dev


def literal(value: float) -> str:
    """An FP32 number in PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


LOG2_E_HIGH, LOG2_E_LOW = 1.44269502162933349609375, 1.925963033500e-8
LN_2 = 0.693147180559945
# e**x stays finite below 88.72 and is zero below −103.97.
LARGEST_EXPONENT, SMALLEST_EXPONENT = 88.7, -104.0
# Terms of the series of atanh: z² ≤ 1/9, so that the tenth is below 2⁻²⁸ of the sum.
SERIES = 9


def exponential(x: Any) -> Float32:
    """``e**x`` within 3 ulp, from 2⁻¹⁴⁹ up to e**88.7, where it stays; NaN stays NaN.

    The rounding of x·log₂e is made good, which 2**(x·log₂e) alone is not: it costs |x| / 2 ulp.
    """
    return inline_ptx(
        f"{{\n.reg .f32 c, t, r, y;\nmin.NaN.f32 c, {{$r0}}, {literal(LARGEST_EXPONENT)};\n"
        f"max.NaN.f32 c, c, {literal(SMALLEST_EXPONENT)};\nmul.rn.f32 t, c, {literal(LOG2_E_HIGH)};\n"
        f"neg.f32 r, t;\nfma.rn.f32 r, c, {literal(LOG2_E_HIGH)}, r;\nfma.rn.f32 r, c, {literal(LOG2_E_LOW)}, r;\n"
        f"mul.rn.f32 r, r, {literal(LN_2)};\nex2.approx.f32 y, t;\nfma.rn.f32 {{$w0}}, y, r, y;\n}}",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def log1p(e: Any) -> Float32:
    """``ln(1 + e)`` for e in [0, 1], within 3 ulp: 2·atanh(z), z = e / (2 + e)."""
    steps = [f"mov.f32 p, {literal(1 / (2 * SERIES - 1))};"]
    steps += [f"fma.rn.f32 p, p, w, {literal(1 / (2 * n - 1))};" for n in range(SERIES - 1, 0, -1)]
    return inline_ptx(
        f"{{\n.reg .f32 z, w, p;\nadd.rn.f32 z, {{$r0}}, {literal(2.0)};\ndiv.rn.f32 z, {{$r0}}, z;\n"
        "mul.rn.f32 w, z, z;\n" + "\n".join(steps) + "\nadd.rn.f32 z, z, z;\nmul.rn.f32 {$w0}, z, p;\n}",
        write_only_types=[Float32],
        read_only_args=[e],
    )


def add(a: Float32, b: Float32) -> Float32:
    return inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def subtract(a: Float32, b: Float32) -> Float32:
    return inline_ptx("sub.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def multiply(a: Float32, b: Float32) -> Float32:
    return inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def square_root(x: Float32) -> Float32:
    return inline_ptx("sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def sigmoid(x: Float32) -> Float32:
    return dev.divide(Float32(1.0), add(Float32(1.0), exponential(-x)))


def sqrt_softplus(x: Float32) -> Float32:
    rest = log1p(exponential(-dev.magnitude(x)))
    return square_root(add(dev.maximum(x, Float32(0.0)), rest))


def sort_key(choice: Float32) -> Uint32:
    """A word that orders as the choice does, never 0; −0 as +0, NaN as −∞."""
    return inline_ptx(
        "{\n.reg .f32 c;\n.reg .pred p;\n.reg .b32 b, s;\nsetp.nan.f32 p, {$r0}, {$r0};\n"
        "selp.f32 c, 0fFF800000, {$r0}, p;\nadd.rn.f32 c, c, 0f00000000;\nmov.b32 b, c;\n"
        "shr.s32 s, b, 31;\nor.b32 s, s, 0x80000000;\nxor.b32 {$w0}, b, s;\n}",
        write_only_types=[Uint32],
        read_only_args=[choice],
    )


def key_value(key: Uint32) -> Float32:
    """The choice of a sort key."""
    return inline_ptx(
        "{\n.reg .b32 s;\nshr.s32 s, {$r0}, 31;\nnot.b32 s, s;\nor.b32 s, s, 0x80000000;\nxor.b32 s, s, {$r0};\n"
        "mov.b32 {$w0}, s;\n}",
        write_only_types=[Float32],
        read_only_args=[key],
    )


def load_floats(addr: Int64, valid: Any) -> Any:
    """Four floats, or zeros without reading."""
    return inline_ptx(
        "{\n.reg .pred p;\n.reg .f32 a, b, c, d;\nsetp.ne.b32 p, {$r1}, 0;\n"
        "mov.f32 a, 0f00000000;\nmov.f32 b, a;\nmov.f32 c, a;\nmov.f32 d, a;\n"
        "@p ld.global.v4.f32 {a, b, c, d}, [{$r0}];\n"
        "mov.f32 {$w0}, a;\nmov.f32 {$w1}, b;\nmov.f32 {$w2}, c;\nmov.f32 {$w3}, d;\n}",
        write_only_types=[Float32] * 4,
        read_only_args=[addr, Int32(valid)],
    )


def load_float(addr: Int64, valid: Any) -> Float32:
    """A float, or zero without reading."""
    return inline_ptx(
        "{\n.reg .pred p;\n.reg .f32 a;\nsetp.ne.b32 p, {$r1}, 0;\nmov.f32 a, 0f00000000;\n"
        "@p ld.global.f32 a, [{$r0}];\nmov.f32 {$w0}, a;\n}",
        write_only_types=[Float32],
        read_only_args=[addr, Int32(valid)],
    )


def load_byte(addr: Int64) -> Uint32:
    return inline_ptx("ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def store_i32(addr: Int64, value: Int32) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])
