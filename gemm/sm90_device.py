"""The vocabulary of the Hopper GEMM kernels: single instructions and small pieces of arithmetic."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

LOG2_E = 1.4426950408889634


def load_i32(addr: Int64) -> Int32:
    return inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def copy_16(shared: Int32, source: Int64, size: Int32) -> None:
    """Start copying 16 bytes to shared memory, past L1; only ``size`` are read, the rest are zeros."""
    inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[shared, source, size])


def copy_4(shared: Int32, source: Int64) -> None:
    """Start copying 4 bytes to shared memory."""
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[shared, source])


def store_shared_u32(shared: Int32, value: Uint32) -> None:
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[shared, value])


def store_shared_u16(shared: Int32, value: Uint32) -> None:
    inline_ptx("{\n.reg .b16 h;\ncvt.u16.u32 h, {$r1};\nst.shared.b16 [{$r0}], h;\n}", read_only_args=[shared, value])


def load_shared_v4(shared: Int32) -> Any:
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[shared],
    )


def load_shared_f32x2(shared: Int32) -> Any:
    return inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[shared]
    )


def store_shared_f32(shared: Int32, value: Float32) -> None:
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[shared, value])


def load_shared_f32(shared: Int32) -> Float32:
    return inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[shared])


def store_v4(addr: Int64, v: Any) -> None:
    inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def store_v2(addr: Int64, low: Uint32, high: Uint32) -> None:
    inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, low, high])


def store_u32(addr: Int64, value: Uint32) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def store_u16(addr: Int64, value: Uint32) -> None:
    inline_ptx("{\n.reg .b16 h;\ncvt.u16.u32 h, {$r1};\nst.global.b16 [{$r0}], h;\n}", read_only_args=[addr, value])


def store_f32(addr: Int64, value: Float32) -> None:
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def f32_pair_to_bf16(low: Float32, high: Float32) -> Uint32:
    """Two FP32 → a word of two BF16, round to nearest even, low half first."""
    return inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high])


def f32_quad_to_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four FP32 → a word of four E4M3, round to nearest even, saturating; NaN stays NaN; lowest address first."""
    return inline_ptx(
        "{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2};\nmov.b32 {$w0}, {lo, hi};\n}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def minimum(a: Float32, b: Float32) -> Float32:
    """The smaller one; NaN if either is."""
    return inline_ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def maximum(a: Float32, b: Float32) -> Float32:
    """The larger one; NaN if either is."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def larger_magnitude(amax: Float32, value: Float32) -> Float32:
    """``max(amax, |value|)`` over finite values: NaN and infinities are passed over."""
    return inline_ptx(
        "{\n.reg .f32 m;\n.reg .pred p;\nabs.f32 m, {$r1};\nsetp.lt.f32 p, m, 0f7F800000;\n"
        "selp.f32 m, m, 0f00000000, p;\nmax.f32 {$w0}, {$r0}, m;\n}",
        write_only_types=[Float32],
        read_only_args=[amax, value],
    )


def finite_or_nan(value: Float32) -> Float32:
    """Infinities become NaN, as the FP8 quantizer has them."""
    return inline_ptx("fma.rn.f32 {$w0}, {$r0}, 0f00000000, {$r0};", write_only_types=[Float32], read_only_args=[value])


def divide(a: Float32, b: Float32) -> Float32:
    """Correctly rounded quotient."""
    return inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def exponential(x: Float32) -> Float32:
    """``e**x`` within 2 ulp of FP32, by the hardware's 2**x."""
    return inline_ptx("ex2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x * Float32(LOG2_E)])


def reciprocal(x: Float32) -> Float32:
    """``1 / x`` within 1 ulp of FP32."""
    return inline_ptx("rcp.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def shared_address(pointer: Any) -> Int32:
    """The 32-bit address of a shared-memory pointer."""
    return Int32(pointer.toint())


def bits_to_f32(word: Uint32) -> Float32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def f32_to_bits(value: Float32) -> Uint32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def magnitude(value: Float32) -> Float32:
    return inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def smaller(a: Int32, b: Int32) -> Int32:
    return inline_ptx("min.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def select_f32(condition: Any, yes: Float32, no: Float32) -> Float32:
    out = no
    if condition:
        out = yes
    return out


def copy_bulk(shared: Int32, source: Int64, size: int, barrier: Int32) -> None:
    """Start copying ``size`` contiguous bytes to shared memory; they count on the barrier. Both 16-byte aligned."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(size), barrier],
    )


def load_shared_v2(shared: Int32) -> Any:
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[shared]
    )


def load_f32(addr: Int64) -> Float32:
    return inline_ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def multiply_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Products of two pairs of BF16; subnormal operands and results are kept."""
    return inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def add_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Sums of two pairs of BF16. ``b`` may be a constant, which the instruction itself does not take."""
    return inline_ptx(
        "{\n.reg .b32 c;\nmov.b32 c, {$r1};\nadd.rn.bf16x2 {$w0}, {$r0}, c;\n}",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def spread_byte(word: Uint32, index: int) -> Uint32:
    """Byte ``index`` of a word, in the low byte of either half."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, 0, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[word, Uint32(0x4040 + 0x0101 * index)],
    )


def multiply_add(a: Uint32, factor: int, b: int) -> Uint32:
    """``a · factor + b`` of integers, on the multipliers: what shifts and additions would take from the other units."""
    return inline_ptx(
        "mad.lo.u32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[a, Uint32(factor), Uint32(b)],
    )
