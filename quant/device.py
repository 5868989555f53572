"""The vocabulary of the quantizers' own kernels: loads, stores, and the elements and scales read back.

The arithmetic of quantizing is in :mod:`moe_layer.quant.registers`, shared with kernels that quantize on the way.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from moe_layer.quant import registers as reg

BF16_2_TO_126 = 0x7E807E80  # as BF16, twice


def load_16_if(inside: Any, addr: Int64) -> list[Uint32]:
    """16 bytes, or zeros without reading."""
    return list(
        inline_ptx(
            "{\n.reg .pred p;\nsetp.ne.u32 p, {$r1}, 0;\nmov.u32 {$w0}, 0;\nmov.u32 {$w1}, 0;\nmov.u32 {$w2}, 0;\n"
            "mov.u32 {$w3}, 0;\n@p ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];\n}",
            write_only_types=[Uint32] * 4,
            read_only_args=[addr, Uint32(inside)],
        )
    )


def load_if(inside: Any, addr: Int64, nbytes: int) -> list[Uint32]:
    """1, 2, 4 or 8 bytes in one word or two, the upper bits zero; zeros without reading."""
    if nbytes == 8:
        return list(
            inline_ptx(
                "{\n.reg .pred p;\nsetp.ne.u32 p, {$r1}, 0;\nmov.u32 {$w0}, 0;\nmov.u32 {$w1}, 0;\n"
                "@p ld.global.v2.u32 {{$w0}, {$w1}}, [{$r0}];\n}",
                write_only_types=[Uint32] * 2,
                read_only_args=[addr, Uint32(inside)],
            )
        )
    kind = {1: "u8", 2: "u16", 4: "u32"}[nbytes]
    return [
        inline_ptx(
            "{\n.reg .pred p;\n.reg .b32 t;\nsetp.ne.u32 p, {$r1}, 0;\nmov.u32 t, 0;\n"
            f"@p ld.global.{kind} t, [{{$r0}}];\nmov.u32 {{$w0}}, t;\n}}",
            write_only_types=[Uint32],
            read_only_args=[addr, Uint32(inside)],
        )
    ]


def store_16(addr: Int64, v: Any) -> None:
    inline_ptx("st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *v])


def store(addr: Int64, value: Uint32, nbytes: int) -> None:
    """The low 1, 2 or 4 bytes of a word."""
    kind = {1: "u8", 2: "u16", 4: "u32"}[nbytes]
    inline_ptx(f"st.global.{kind} [{{$r0}}], {{$r1}};", read_only_args=[addr, value])


def bf16_pair(low: Float32, high: Float32) -> Uint32:
    """Two FP32 → a word of two BF16, round to nearest even, low half first."""
    return inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high])


def bf16_products(a: Uint32, b: Uint32) -> Uint32:
    """Two products of BF16, subnormals kept."""
    return inline_ptx(
        "{\n.reg .b32 m;\nmov.b32 m, {$r1};\nmul.rn.bf16x2 {$w0}, {$r0}, m;\n}",  # takes no constant
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def e2m1_values(word: Uint32, count: int) -> list[Float32]:
    """The values of the lowest 4 or 8 E2M1 codes of a word (of 4, its upper half must be zero), exact.

    As BF16 bits ``s…eem`` with the exponent's other bits zero, a code is its value · 2**−126, subnormals included. The
    codes of one half of ``count`` are turned in the low half of a word, those of the other in its upper half.
    """
    half = count // 2
    if count == 4:
        word = word | (word << Uint32(8))  # code 2 moves to bit 16
    lower, upper = [], []
    for j in range(half):
        codes = word >> Uint32(4 * j) if j else word
        scaled = ((codes & Uint32(0x00070007)) << Uint32(6)) | ((codes & Uint32(0x00080008)) << Uint32(12))
        pair = bf16_products(scaled, Uint32(BF16_2_TO_126))
        lower.append(reg.number(pair << Uint32(16)))
        upper.append(reg.number(pair & Uint32(0xFFFF0000)))
    return lower + upper


def e4m3_values(word: Uint32) -> list[Float32]:
    """The values of four E4M3, exact."""
    return [*reg.e4m3_values(word & Uint32(0xFFFF)), *reg.e4m3_values(word >> Uint32(16))]


def e8m0_value(code: Uint32) -> Float32:
    """The value of an E8M0 byte, exact; 255 is NaN."""
    # A shift into fp32's exponent, but for both ends: 0 is a subnormal, 255 is not infinity (quant/e8m0.py).
    end = (code == Uint32(0)) | (code == Uint32(255))
    return reg.number((code << Uint32(23)) | (Uint32(end) << Uint32(22)))
