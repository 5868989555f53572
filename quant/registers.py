"""Arithmetic of the number formats on registers: BF16 pairs in, elements and scales out, to the bits of the references.

The references divide in fp32 and round the quotient to the element; here, too, every quotient is the correctly rounded
one where that decides an element. Two ways, both verified for every mantissa (tests/quant/test_registers.py):

* ``q = x·y`` with ``y ≈ 1/d``, corrected once by its residual (Markstein): exact for E4M3 with scales ``amax / 448``
  and any ``y`` within 2 ulp. The residual is taken as ``d·q − x``, which keeps the sign of zeros.
* ``q = x·high + x·low``, of an ``x`` with 8 bits (:func:`split_reciprocal`), for the sides of E2M1's and E4M3's
  midpoints with any ``d``: two instructions a value, and nothing that a small or large ``x`` or ``d`` could spoil.

E2M1 needs sm_100 for a conversion of its own. Elsewhere magnitudes are rounded by additions whose sums have the unit of
a grid of E2M1 as their last bit, and the least result is the code (:func:`e2m1_word_of_magnitudes`).
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
SMALL_DIVISOR, LARGE_DIVISOR = 2.0**-60, 2.0**100  # beyond them residuals leave fp32's range
# Added to a magnitude m: sums that count E2M1's half units up to m = 2 (2**22 has the last bit 1/2) and its units from
# there on; added to m/2: sums that count its twice units. Code c is CODE_ZERO + c as bits, where it is right.
FINE, COARSE = 2.0**23 - 2, 2.0**23
CODE_ZERO, CODES = 0x4AFFFFFC, 8


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


def permute(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Four bytes of ``a`` (numbers 0 to 3) and ``b`` (4 to 7), picked by the digits of ``selector``, lowest first.

    A digit 8 higher gives eight times the byte's highest bit.
    """
    return inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def magnitudes(pair: Uint32) -> Uint32:
    """Of two BF16. Opaque to the compiler, which would take them for the maximum and again for each value."""
    return inline_ptx(f"and.b32 {{$w0}}, {{$r0}}, {HALVES};", write_only_types=[Uint32], read_only_args=[pair])


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


def largest_of_pairs(pairs: Any) -> Uint32:
    """The largest of two magnitudes a word."""
    top = pairs[0]
    for pair in pairs[1:]:
        top = maximum_of_halves(top, pair)
    return maximum(top & Uint32(0xFFFF), top >> Uint32(16))


def largest_magnitude(words: Any) -> Uint32:
    """The largest magnitude of BF16 pairs, as BF16 bits; from ``NON_FINITE`` on if any is infinite or NaN."""
    return largest_of_pairs([magnitudes(word) for word in words])


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
    """``values / divisor`` with ``inverse ≈ 1 / divisor``, corrected once: see above."""
    minus = negative(inverse)
    quotients = []
    for x in values:
        q = multiply(x, inverse)
        quotients.append(fused(minus, fused(divisor, q, negative(x)), q))
    return quotients


def split_reciprocal(divisor: Float32) -> tuple[Float32, Float32]:
    """``high``, ``low`` with ``high + low = (1 + e) / divisor``, −2**−40 < e < 2**−35, both above 0.

    ``high`` has 16 significant bits, so that its product with 8 bits is exact and :func:`split_quotient` rounds but
    once; ``low`` is what is missing, ``(1 − divisor·high) / divisor``. Quotients of 8 bits by 24 lie further than
    2**−34 from where fp32 starts to round to a midpoint of E2M1 or E4M3, or to a neighbour of it. One exception,
    2**n / (2 − 2**−23), lies 2**−48 above; there e is positive, so that the result lies above as well.

    Args:
        divisor: positive, so that its reciprocal is normal.
    """
    inverse = multiply(rough_reciprocal(divisor), Float32(1.0 + 2.0**-22))  # not below 1 / divisor
    high = number((bits(inverse) - Uint32(0x100)) & Uint32(0xFFFFFF00))  # below it
    return high, multiply(fused(negative(divisor), high, Float32(1.0)), inverse)


def split_quotient(x: Float32, high: Float32, low: Float32) -> Float32:
    """``x / divisor`` of an ``x`` with 8 significant bits, from :func:`split_reciprocal`; beyond fp32, infinity."""
    return fused(x, low, multiply(x, high))


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


def sign_bytes(words: Any) -> tuple[Uint32, Uint32]:
    """Of eight values, four BF16 pairs or eight FP32: all bits of byte j are value 2j's sign, and value 2j + 1's."""
    if len(words) == 4:
        a, b = (permute(words[j], words[j + 1], 0x7531) for j in (0, 2))  # the bytes with the signs, in order
        return permute(a, b, 0xECA8), permute(a, b, 0xFDB9)
    of_pairs = [permute(words[j], words[j + 2], 0x0073) for j in (0, 1, 4, 5)]
    return permute(of_pairs[0], of_pairs[2], 0xDC98), permute(of_pairs[1], of_pairs[3], 0xDC98)


def e2m1_word_of_magnitudes(values: Any, factor: Float32, half: Float32, words: Any) -> Uint32:
    """Eight E2M1 in a word, the first value lowest, of magnitudes times ``factor`` and the ``words`` with their signs.

    The code is the least of ``[m]`` on the finer grids, on the coarsest, and 7. A sum rounds to nearest even as E2M1
    does, since codes are even where sums are. That leaves to the slower integer pipe three operations a value.

    Args:
        half: ``factor / 2``.
        words: as of :func:`sign_bytes`.
    """
    word = Uint32(-sum(CODE_ZERO << 4 * j for j in range(CODES)) & 0xFFFFFFFF)
    for j, value in enumerate(values):
        fine, coarse = bits(fused(value, factor, Float32(FINE))), bits(fused(value, half, Float32(COARSE)))
        code = minimum(minimum(fine, coarse), Uint32(CODE_ZERO + CODES - 1))
        word = word + (code << Uint32(4 * j))
    even, odd = sign_bytes(words)
    return word | (even & Uint32(0x08080808)) | (odd & Uint32(0x80808080))


def e2m1_word(values: Any, factor: Float32, half: Float32, words: Any) -> Uint32:
    """Eight E2M1 in a word of :func:`e2m1_operands` times ``factor``; the rest as above."""
    if converts_to_e2m1():
        return e2m1_word_of_sm100([multiply(x, factor) for x in values])
    return e2m1_word_of_magnitudes(values, factor, half, words)


def e2m1_operands(pairs: Any, magnitudes_of_pairs: Any) -> list[Float32]:
    """What :func:`e2m1_word` takes of BF16 pairs: values, or magnitudes where the signs come from the pairs."""
    return unpack(pairs if converts_to_e2m1() else magnitudes_of_pairs)


def power_of_two(exponent: Int32) -> Float32:
    """``2**(exponent − 127)``, for −22 ≤ exponent ≤ 254."""
    normal = Uint32(exponent) << Uint32(23)
    subnormal = Uint32(0x00400000) >> Uint32(select(exponent < Int32(0), Int32(0) - exponent, Int32(0)))
    return number(select(exponent > Int32(0), normal, subnormal))
