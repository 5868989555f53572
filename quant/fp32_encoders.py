"""The activation formats as encoders of FP32 values; those of BF16 are in :mod:`moe_layer.quant.encoders`.

The same interface and the same rules, with a value a word. FP32 has 24 significant bits where BF16 has 8, so a quotient
takes two corrections: the first leaves it within an ulp, the second, with a correctly rounded reciprocal, rounds it
correctly (Markstein).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from moe_layer.quant import registers as reg
from moe_layer.quant.encoders import LARGEST_SCALE, NAN_PAIR, ONE, SMALLEST_SCALE, OneLevel
from moe_layer.quant.fp8 import MIN_SCALE
from moe_layer.quant.nvfp4 import MIN_GLOBAL_SCALE

INFINITY = 0x7F800000  # magnitudes from here on are infinity and NaN
NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF


def largest_magnitude(words: Any) -> Uint32:
    """The bits of the largest magnitude; from ``INFINITY`` on if any is infinite or NaN."""
    tops = [word & Uint32(MAGNITUDE) for word in words]
    while len(tops) > 1:
        tops = [reg.maximum(*tops[i : i + 2]) if i + 1 < len(tops) else tops[i] for i in range(0, len(tops), 2)]
    return tops[0]


def mark_bad(words: Any) -> tuple[list[Uint32], Uint32]:
    """(values with infinities turned into NaN, the largest finite magnitude)."""
    marked, finite = [], []
    for word in words:
        magnitude = word & Uint32(MAGNITUDE)
        bad = magnitude >= Uint32(INFINITY)
        marked.append(reg.select(bad, Uint32(NAN), word))
        finite.append(reg.select(bad, Uint32(0), magnitude))
    return marked, largest_magnitude(finite)


@cute.jit
def finite_magnitude(words: Any) -> Any:
    """As :func:`mark_bad`, quicker where there is nothing to mark."""
    top = largest_magnitude(words)
    if top >= Uint32(INFINITY):
        words, top = mark_bad(words)
    return words, top


def divide_all(values: Any, divisor: Float32, inverse: Float32) -> list[Float32]:
    """``values / divisor``, correctly rounded where normal; ``inverse`` is the correctly rounded ``1 / divisor``."""
    minus = reg.negative(inverse)
    quotients = []
    for x in values:
        opposite = reg.negative(x)
        q = reg.multiply(x, inverse)
        q = reg.fused(minus, reg.fused(divisor, q, opposite), q)
        quotients.append(reg.fused(minus, reg.fused(divisor, q, opposite), q))
    return quotients


def e4m3_words(elements: Any) -> list[Uint32]:
    return [reg.e4m3_word(*elements[j : j + 4]) for j in range(0, len(elements), 4)]


def e2m1_words(elements: Any, factor: Float32, words: Any) -> list[Uint32]:
    """Words of eight codes, of ``elements`` times ``factor`` (:func:`e2m1_operands`); ``words`` have the signs."""
    half = reg.multiply(factor, Float32(0.5))
    return [reg.e2m1_word(elements[j : j + 8], factor, half, words[j : j + 8]) for j in range(0, len(elements), 8)]


def e2m1_operands(words: Any) -> list[Float32]:
    """What :func:`e2m1_words` takes: values, or magnitudes where the signs come from the words."""
    return [reg.number(word if reg.converts_to_e2m1() else word & Uint32(MAGNITUDE)) for word in words]


def floor_code(top: Uint32, max_exponent: int) -> Int32:
    """The E8M0 byte of ``2**(⌊log2 amax⌋ − max_exponent)``, at least 0, from the bits of amax."""
    exponent = Int32(top >> Uint32(23)) - Int32(max_exponent)
    return reg.select(exponent > Int32(0), exponent, Int32(0))


@dataclass(frozen=True)
class Fp8Fp32Encoder(OneLevel):
    """:class:`~moe_layer.quant.fp8.Fp8` with blocks of 1 × 128, eight lanes' vectors."""

    vector_values = 16
    vectors_per_scale = 8
    scale_entry_bytes = 4

    def encode(self, words: Any, scale: Any) -> Any:
        words, top = finite_magnitude(words)
        amax = reg.number(reg.over_lanes(top, self.vectors_per_scale))
        block_scale = reg.larger(reg.quotient(amax, Float32(448.0)), Float32(MIN_SCALE))
        values, divisor = reg.enlarge_small([reg.number(w) for w in words], block_scale)
        return e4m3_words(divide_all(values, divisor, reg.reciprocal(divisor))), reg.bits(block_scale)


@dataclass(frozen=True)
class MxFp8Fp32Encoder(OneLevel):
    """MXFP8: blocks of 1 × 32, two lanes' vectors."""

    vector_values = 16
    vectors_per_scale = 2
    scale_entry_bytes = 1

    def encode(self, words: Any, scale: Any) -> Any:
        words, top = finite_magnitude(words)
        code = floor_code(reg.over_lanes(top, self.vectors_per_scale), 8)
        factor = reg.power_of_two(Int32(254) - code)
        return e4m3_words([reg.multiply(reg.number(w), factor) for w in words]), Uint32(code)


@dataclass(frozen=True)
class MxFp4Fp32Encoder(OneLevel):
    """MXFP4: blocks of 1 × 32, a vector each."""

    vector_values = 32
    vectors_per_scale = 1
    scale_entry_bytes = 1

    def encode(self, words: Any, scale: Any) -> Any:
        top = largest_magnitude(words)
        bad = top >= Uint32(INFINITY)
        words = reg.clear_if(bad, words)
        code = floor_code(top, 2)
        wire = e2m1_words(e2m1_operands(words), reg.power_of_two(Int32(254) - code), words)
        return wire, reg.select(bad, Uint32(255), Uint32(code))


@dataclass(frozen=True)
class NvFp4Fp32Encoder:
    """NVFP4: blocks of 1 × 16, two in a vector, below a scale of the row's own or one read from memory."""

    row_scale: bool

    vector_values = 32
    vectors_per_scale = 1
    scale_entry_bytes = 2

    @property
    def common_scale(self) -> bool:
        return not self.row_scale

    def magnitude(self, words: Any) -> Any:
        """The largest of blocks that are finite throughout."""
        out = Uint32(0)
        for block in range(0, len(words), 16):
            top = largest_magnitude(words[block : block + 16])
            out = reg.maximum(out, reg.select(top < Uint32(INFINITY), top, Uint32(0)))
        return out

    def scale_of_row(self, magnitude: Any) -> Any:
        return reg.bits(reg.larger(reg.quotient(reg.number(magnitude), Float32(2688.0)), Float32(MIN_GLOBAL_SCALE)))

    def encode(self, words: Any, scale: Any) -> Any:
        global_scale = reg.number(scale)
        six = reg.multiply(global_scale, Float32(6.0))
        blocks, amaxes, ratios, bad = [], [], [], []
        for j in range(2):
            block = words[16 * j : 16 * j + 16]
            top = largest_magnitude(block)
            bad.append(top >= Uint32(INFINITY))
            blocks.append(reg.clear_if(bad[j], block))
            amax = reg.number(reg.select(bad[j], Uint32(0), top))
            ratio = reg.smaller(reg.larger(reg.quotient(amax, six), Float32(SMALLEST_SCALE)), Float32(LARGEST_SCALE))
            ratios.append(reg.select(amax == Float32(0.0), Float32(ONE), ratio))
            amaxes.append(amax)
        entry = reg.e4m3_pair(*ratios)
        wire = []
        for j, block_scale in enumerate(reg.e4m3_values(entry)):
            divisor = reg.multiply(block_scale, global_scale)
            values, divisor = reg.bring_near(e2m1_operands(blocks[j]), divisor, amaxes[j])
            elements = divide_all(values, divisor, reg.reciprocal(divisor))
            wire += e2m1_words(elements, Float32(1.0), blocks[j])
        low = reg.select(bad[0], Uint32(NAN_PAIR & 0xFF), entry & Uint32(0xFF))
        high = reg.select(bad[1], Uint32(NAN_PAIR & 0xFF00), entry & Uint32(0xFF00))
        return wire, low | high
