"""Arithmetic of the number formats on registers: BF16 pairs in, elements and scales out, to the bits of the references.

The references divide in fp32 and round the quotient to the element; here, too, every quotient is the correctly rounded
one where that decides an element. A quotient by a scale is ``q = x·y`` with ``y ≈ 1/d``, corrected once by its residual
(Markstein): exact for E4M3 with scales ``amax / 448`` and any ``y`` within 2 ulp, and for the sides of E2M1's midpoints
with any ``d`` and the correctly rounded ``y``. Both were verified for every mantissa (tests/quant/test_registers.py).
The residual is taken as ``d·q − x``, which keeps the sign of zeros.

E2M1 needs sm_100 for a conversion of its own. Elsewhere magnitudes are rounded on three grids at once, by additions to
2**23, and the least result is the code (:func:`e2m1_word_of_magnitudes`). Or, where no BF16 pairs bring the signs,
codes are read off FP16: scaled by 2**−14, a magnitude has E2M1's exponent in FP16's low exponent bits, FP16's
subnormals are E2M1's, and the code is the bits from the highest mantissa bit up, rounded to nearest even as an integer,
two values at a time.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.base_dsl import Arch
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.cute.arch import inline_ptx

NON_FINITE = 0x7F80  # BF16 magnitudes from here on are infinity and NaN
HALVES = 0x7FFF7FFF  # the magnitudes of two BF16 or FP16
SMALL_DIVISOR, LARGE_DIVISOR = 2.0**-60, 2.0**100  # beyond them residuals or aligned divisors leave fp32's range
E2M1_ALIGNMENT = 14  # binades by which E2M1 lies below one in FP16
CODE_ZERO = 0x4B000000  # 2**23 as FP32, where the lowest bit is 1
FP16_SIX = 0x0E000E00  # 6 · 2**−14 as FP16, twice


# ---- single instructions ----


def bits(value: Float32) -> Uint32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def number(word: Uint32) -> Float32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def negative(value: Float32) -> Float32:
    """Part of the instruction that takes it, where a flip of the sign bit would be one of its own."""
    return inline_ptx("neg.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def multiply(a: Float32, b: Float32) -> Float32:
    return inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def fused(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a·b + c``, rounded once."""
    return inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def larger(a: Float32, b: Float32) -> Float32:
    return inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def smaller(a: Float32, b: Float32) -> Float32:
    return inline_ptx("min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def quotient(a: Float32, b: Float32) -> Float32:
    """``a / b``, correctly rounded; about ten instructions."""
    return inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def reciprocal(a: Float32) -> Float32:
    """``1 / a``, correctly rounded."""
    return inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def rough_reciprocal(a: Float32) -> Float32:
    """``1 / a`` within 1 ulp, for a normal result."""
    return inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[a])


def maximum(a: Uint32, b: Uint32) -> Uint32:
    return inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def minimum(a: Uint32, b: Uint32) -> Uint32:
    return inline_ptx("min.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def maximum_of_halves(a: Uint32, b: Uint32) -> Uint32:
    return inline_ptx(
        "{\n.reg .b32 m;\nmov.b32 m, {$r1};\nmax.u16x2 {$w0}, {$r0}, m;\n}",  # takes no constant
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def minimum_of_halves(a: Uint32, b: Uint32) -> Uint32:
    return inline_ptx(
        "{\n.reg .b32 m;\nmov.b32 m, {$r1};\nmin.u16x2 {$w0}, {$r0}, m;\n}",  # takes no constant
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def from_neighbour(value: Uint32, distance: int) -> Uint32:
    """``value`` of the lane whose number differs in the bit ``distance``."""
    return cute.arch.shuffle_sync_bfly(value, distance)


@cute.jit
def select(condition: Any, yes: Any, no: Any) -> Any:
    out = no
    if condition:
        out = yes
    return out


def e4m3_pair(low: Float32, high: Float32) -> Uint32:
    """Two E4M3 in the low half word: to nearest even, saturating, NaN 0x7F."""
    return inline_ptx(
        "{\n.reg .b16 e;\ncvt.rn.satfinite.e4m3x2.f32 e, {$r1}, {$r0};\ncvt.u32.u16 {$w0}, e;\n}",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def e4m3_word(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    return inline_ptx(
        "{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2};\nmov.b32 {$w0}, {lo, hi};\n}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def e4m3_values(pair: Uint32) -> Any:
    """The values of two E4M3 in the low half word, exact."""
    return inline_ptx(
        "{\n.reg .b32 h;\n.reg .b16 e, a, b;\ncvt.u16.u32 e, {$r0};\ncvt.rn.f16x2.e4m3x2 h, e;\n"
        "mov.b32 {a, b}, h;\ncvt.f32.f16 {$w0}, a;\ncvt.f32.f16 {$w1}, b;\n}",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def fp16_pair(low: Float32, high: Float32) -> Uint32:
    return inline_ptx("cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high])


def e2m1_word_of_sm100(v: Any) -> Uint32:
    """Eight E2M1 in a word, the first value lowest: to nearest even, saturating."""
    return inline_ptx(
        "{\n.reg .b8 a, b, c, d;\n"
        + "".join(
            f"cvt.rn.satfinite.e2m1x2.f32 {name}, {{$r{2 * j + 1}}}, {{$r{2 * j}}};\n" for j, name in enumerate("abcd")
        )
        + "mov.b32 {$w0}, {a, b, c, d};\n}",
        write_only_types=[Uint32],
        read_only_args=list(v),
    )


def converts_to_e2m1() -> bool:
    """Whether the architecture compiled for has an instruction for it."""
    return bool(BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_100)


# ---- several ----


def unpack(words: Any) -> list[Float32]:
    """BF16 pairs → FP32, exact."""
    values = []
    for word in words:
        values += [number(word << Uint32(16)), number(word & Uint32(0xFFFF0000))]
    return values


def largest_magnitude(words: Any) -> Uint32:
    """The largest magnitude of BF16 pairs, as BF16 bits; from ``NON_FINITE`` on if any is infinite or NaN."""
    top = words[0] & Uint32(HALVES)
    for word in words[1:]:
        top = maximum_of_halves(top, word & Uint32(HALVES))
    return maximum(top & Uint32(0xFFFF), top >> Uint32(16))


def over_lanes(top: Uint32, lanes: int) -> Uint32:
    """The maximum over aligned groups of ``lanes`` lanes."""
    distance = lanes // 2
    while distance:
        top = maximum(top, from_neighbour(top, distance))
        distance //= 2
    return top


def mark_bad(words: Any) -> tuple[list[Uint32], Uint32]:
    """(pairs with infinities turned into NaN, the largest finite magnitude)."""
    marked, finite = [], []
    for word in words:
        magnitude = word & Uint32(HALVES)
        bad = ((magnitude + Uint32(0x00800080)) >> Uint32(15)) & Uint32(0x00010001)
        marked.append(word | (bad << Uint32(6)))
        finite.append(magnitude & ~(bad * Uint32(0xFFFF)))
    return marked, largest_magnitude(finite)


@cute.jit
def finite_magnitude(words: Any) -> Any:
    """As :func:`mark_bad`, quicker where there is nothing to mark."""
    top = largest_magnitude(words)
    if top >= Uint32(NON_FINITE):
        words, top = mark_bad(words)
    return words, top


@cute.jit
def clear_if(condition: Any, words: Any) -> Any:
    if condition:
        words = [Uint32(0) for _ in words]
    return words


def by_constant(x: Float32, divisor: float, inverse: float) -> Float32:
    """``x / divisor`` of a BF16 ``x``, correctly rounded where the result is normal; ``inverse`` is fp32's nearest."""
    q = multiply(x, Float32(inverse))
    return fused(Float32(-inverse), fused(Float32(divisor), q, negative(x)), q)


def divide_all(values: Any, divisor: Float32, inverse: Float32) -> list[Float32]:
    """``values / divisor`` with ``inverse ≈ 1 / divisor``: see above."""
    minus = negative(inverse)
    quotients = []
    for x in values:
        q = multiply(x, inverse)
        quotients.append(fused(minus, fused(divisor, q, negative(x)), q))
    return quotients


def rescaled(values: Any, divisor: Float32, factor: Float32) -> tuple[list[Float32], Float32]:
    return [multiply(x, factor) for x in values], multiply(divisor, factor)


def rescaled_and_clamped(values: Any, divisor: Float32, factor: Float32) -> tuple[list[Float32], Float32]:
    """As :func:`rescaled`, and no value beyond 8 divisors, which is above every E2M1 as well."""
    values, divisor = rescaled(values, divisor, factor)
    most = multiply(divisor, Float32(8.0))
    return [larger(smaller(x, most), negative(most)) for x in values], divisor


def middle_factor(divisor: Float32) -> Float32:
    """What brings a very small or large divisor towards 1."""
    return select(
        divisor < Float32(SMALL_DIVISOR),
        Float32(2.0**64),
        select(divisor > Float32(LARGE_DIVISOR), Float32(2.0**-64), Float32(1.0)),
    )


@cute.jit
def enlarge_small(values: Any, divisor: Float32) -> Any:
    """Values and divisor away from the subnormals, in which the residual would be lost."""
    if divisor < Float32(SMALL_DIVISOR):
        values, divisor = rescaled(values, divisor, Float32(2.0**64))
    return values, divisor


@cute.jit
def bring_near(values: Any, divisor: Float32, amax: Float32) -> Any:
    """Values and divisor in the middle of fp32's range, and no quotient far above 8."""
    factor = middle_factor(divisor)
    if factor != Float32(1.0) or amax > multiply(divisor, Float32(1024.0)):
        values, divisor = rescaled_and_clamped(values, divisor, factor)
    return values, divisor


def e2m1_word_of_aligned(aligned: Any) -> Uint32:
    """Eight E2M1 in a word, the first value lowest, of values · 2**−14 that FP16 holds exactly down to 1/8 · 2**−14."""
    word = Uint32(0)
    for j in range(4):
        pair = fp16_pair(aligned[j], aligned[j + 4])  # so that all low half words are one half of the result
        magnitude = minimum_of_halves(pair & Uint32(HALVES), Uint32(FP16_SIX))
        code = (magnitude + Uint32(0x00FF00FF) + ((magnitude >> Uint32(9)) & Uint32(0x00010001))) >> Uint32(9)
        code = (code & Uint32(0x00070007)) | ((pair >> Uint32(12)) & Uint32(0x00080008))
        word = word | (code << Uint32(4 * j))
    return word


def e2m1_word_of_magnitudes(magnitudes: Any, signs: Any) -> Uint32:
    """Eight E2M1 in a word, the first value lowest, of magnitudes up to 2**16 and the BF16 pairs that have their signs.

    Codes count half units up to 2, units up to 4 and twice units up to 6, so that the code is the least of ``[2m]``,
    ``[m] + 2``, ``[m/2] + 4`` and 7, each rounded to nearest even as it is added to 2**23. That leaves to the slower
    integer pipe four operations a value.
    """
    word = Uint32(-(CODE_ZERO << 12) - (CODE_ZERO << 8) - (CODE_ZERO << 4) - CODE_ZERO & 0xFFFFFFFF)
    for j in range(4):
        halves = [_e2m1_code(magnitudes[j]), _e2m1_code(magnitudes[j + 4])]
        pair = minimum_of_halves((halves[1] << Uint32(16)) + halves[0], Uint32(CODE_ZERO + 0x00070007))
        word = word + (pair << Uint32(4 * j))
    for j in range(4):
        product = (signs[j] & Uint32(0x80008000)) * Uint32(0x1001)  # the signs in bits 27 and 31
        word = word | ((product >> Uint32(24 - 8 * j)) & Uint32(0x88 << 8 * j))
    return word


def e2m1_operands(words: Any) -> list[Float32]:
    """What :func:`e2m1_word` rounds, of BF16 pairs: their values, or magnitudes where it takes the signs from them."""
    return unpack(words if converts_to_e2m1() else [word & Uint32(HALVES) for word in words])


def e2m1_word(elements: Any, words: Any) -> Uint32:
    """Eight E2M1 in a word, the first value lowest, of scaled :func:`e2m1_operands` of the BF16 pairs ``words``."""
    return e2m1_word_of_sm100(elements) if converts_to_e2m1() else e2m1_word_of_magnitudes(elements, words)


def _e2m1_code(m: Float32) -> Uint32:
    """The code, or more where it is 7, above ``CODE_ZERO``."""
    fine = bits(fused(m, Float32(2.0), Float32(2.0**23)))
    middle = bits(fused(m, Float32(1.0), Float32(2.0**23 + 2)))
    coarse = bits(fused(m, Float32(0.5), Float32(2.0**23 + 4)))
    return minimum(minimum(fine, middle), coarse)


def round_to_odd(value: Float32) -> Float32:
    """To 8 significant bits; the lowest is set if anything is cut off, so that rounding further rounds but once."""
    word = bits(value)
    return number((word | ((word & Uint32(0xFFFF)) + Uint32(0xFFFF))) & Uint32(0xFFFF0000))


def power_of_two(exponent: Int32) -> Float32:
    """``2**(exponent − 127)``, for −22 ≤ exponent ≤ 254."""
    normal = Uint32(exponent) << Uint32(23)
    subnormal = Uint32(0x00400000) >> Uint32(select(exponent < Int32(0), Int32(0) - exponent, Int32(0)))
    return number(select(exponent > Int32(0), normal, subnormal))
