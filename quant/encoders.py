"""The activation formats as encoders inside another kernel: a 16-byte vector of the wire a thread, out of BF16 pairs.

What a dispatch kernel (``moe_layer.comm.encoder.KernelEncoder``) asks of a format. Blocks that are longer than a vector
are shared by neighbouring lanes. The bits are those of the formats' ``quantize`` and ``to_wire``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from moe_layer.quant import registers as reg
from moe_layer.quant.fp8 import MIN_SCALE
from moe_layer.quant.nvfp4 import MIN_GLOBAL_SCALE

ONE, SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**-9, 448.0  # of E4M3 block scales
NAN_PAIR = 0x7F7F
E4M3_NAN, E4M3_ONE = 0x7F, 0x38
# Global scales beyond which block scale · global scale, or its reciprocal, could be subnormal.
SMALL_GLOBAL, LARGE_GLOBAL = 2.0**-100, 2.0**100


class OneLevel:
    """Formats without a second-level scale."""

    row_scale = False
    common_scale = False

    def magnitude(self, words: Any) -> Any:
        raise NotImplementedError

    def scale_of_row(self, magnitude: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8Encoder(OneLevel):
    """:class:`~moe_layer.quant.fp8.Fp8` with blocks of 1 × 128, eight lanes' vectors."""

    vector_values = 16
    vectors_per_scale = 8
    scale_entry_bytes = 4

    def encode(self, words: Any, scale: Any) -> Any:
        words, top = reg.finite_magnitude(words)
        amax = reg.number(reg.over_lanes(top, self.vectors_per_scale) << Uint32(16))
        block_scale = reg.larger(reg.by_constant(amax, 448.0, 1.0 / 448.0), Float32(MIN_SCALE))
        values, divisor = reg.enlarge_small(reg.unpack(words), block_scale)
        inverse = reg.rough_reciprocal(divisor)
        elements = reg.divide_all(values, divisor, inverse)
        return [reg.e4m3_word(*elements[4 * j : 4 * j + 4]) for j in range(4)], reg.bits(block_scale)


@dataclass(frozen=True)
class MxFp8Encoder(OneLevel):
    """MXFP8: blocks of 1 × 32, two lanes' vectors."""

    vector_values = 16
    vectors_per_scale = 2
    scale_entry_bytes = 1

    def encode(self, words: Any, scale: Any) -> Any:
        words, top = reg.finite_magnitude(words)
        exponent = Int32(reg.over_lanes(top, self.vectors_per_scale) >> Uint32(7)) - Int32(8)
        code = reg.select(exponent > Int32(0), exponent, Int32(0))
        factor = reg.power_of_two(Int32(254) - code)
        elements = [reg.multiply(x, factor) for x in reg.unpack(words)]
        return [reg.e4m3_word(*elements[4 * j : 4 * j + 4]) for j in range(4)], Uint32(code)


@dataclass(frozen=True)
class MxFp4Encoder(OneLevel):
    """MXFP4: blocks of 1 × 32, a vector each."""

    vector_values = 32
    vectors_per_scale = 1
    scale_entry_bytes = 1

    def encode(self, words: Any, scale: Any) -> Any:
        magnitudes = [reg.magnitudes(word) for word in words]
        top = reg.largest_of_pairs(magnitudes)
        bad = top >= Uint32(reg.NON_FINITE)
        exponent = Int32(top >> Uint32(7)) - Int32(2)
        code = reg.select(exponent > Int32(0), exponent, Int32(0))
        factor = reg.power_of_two(Int32(254) - code)
        half = reg.multiply(factor, Float32(0.5))
        values = reg.e2m1_operands(words, magnitudes)
        # NaN and infinities run through the arithmetic of their block, which is cleared at the end.
        wire = []
        for j in range(4):
            word = reg.e2m1_word(values[8 * j : 8 * j + 8], factor, half, words[4 * j : 4 * j + 4])
            wire.append(reg.select(bad, Uint32(0), word))
        return wire, reg.select(bad, Uint32(255), Uint32(code))


def with_odd_blocks(tops: Any, wire: Any, entry: Uint32) -> tuple[list[Uint32], Uint32]:
    """Each block's two words and E4M3 scale, as they are to be where its largest magnitude is 0, infinite or NaN."""
    words = []
    for j, top in enumerate(tops):
        bad = top >= Uint32(reg.NON_FINITE)
        words += [reg.select(bad, Uint32(0), word) for word in wire[2 * j : 2 * j + 2]]
        other = entry & Uint32(0xFF00 >> 8 * j)
        entry = reg.select(bad, other | Uint32(E4M3_NAN << 8 * j), entry)
        entry = reg.select(top == Uint32(0), other | Uint32(E4M3_ONE << 8 * j), entry)
    return words, entry


@cute.jit
def mend_odd_blocks(tops: Any, wire: Any, entry: Uint32) -> Any:
    """:func:`with_odd_blocks`, quicker where there are none."""
    if reg.maximum(tops[0] - Uint32(1), tops[1] - Uint32(1)) >= Uint32(reg.NON_FINITE - 1):
        wire, entry = with_odd_blocks(tops, wire, entry)
    return wire, entry


@dataclass(frozen=True)
class NvFp4Encoder:
    """NVFP4: blocks of 1 × 16, two in a vector, below a scale of the row's own or one that all rows share.

    NaN and infinities run through the arithmetic of their block; it and blocks of zeros are mended at the end, where
    there are any.
    """

    row_scale: bool

    vector_values = 32
    vectors_per_scale = 1
    scale_entry_bytes = 2

    @property
    def common_scale(self) -> bool:
        return not self.row_scale

    def magnitude(self, words: Any) -> Any:
        """The largest of blocks that are finite throughout, as BF16 bits."""
        tops = [reg.largest_magnitude(words[j : j + 8]) for j in range(0, len(words), 8)]
        finite = [reg.select(top < Uint32(reg.NON_FINITE), top, Uint32(0)) for top in tops]
        return reg.maximum(*finite)

    def scale_of_row(self, magnitude: Any) -> Any:
        amax = reg.number(magnitude << Uint32(16))
        return reg.bits(reg.larger(reg.by_constant(amax, 2688.0, 1.0 / 2688.0), Float32(MIN_GLOBAL_SCALE)))

    def encode(self, words: Any, scale: Any) -> Any:
        global_scale = reg.number(scale)
        # Of another scale quotients are those times ``factor``.
        factor = reg.select(global_scale < Float32(SMALL_GLOBAL), Float32(2.0**64), Float32(1.0))
        factor = reg.select(global_scale > Float32(LARGE_GLOBAL), Float32(2.0**-64), factor)
        half = reg.multiply(factor, Float32(0.5))
        global_scale = reg.multiply(global_scale, factor)
        magnitudes = [reg.magnitudes(word) for word in words]
        tops = [reg.largest_of_pairs(magnitudes[j : j + 8]) for j in (0, 8)]
        sixth = reg.split_reciprocal(reg.multiply(global_scale, Float32(6.0)))
        ratios = [reg.split_quotient(reg.number(top << Uint32(16)), *sixth) for top in tops]
        # The conversion saturates at 448.
        ratios = [reg.larger(reg.multiply(ratio, factor), Float32(SMALLEST_SCALE)) for ratio in ratios]
        entry = reg.e4m3_pair(*ratios)
        wire = []
        for j, block_scale in enumerate(reg.e4m3_values(entry)):
            block = words[8 * j : 8 * j + 8]
            reciprocal = reg.split_reciprocal(reg.multiply(block_scale, global_scale))
            values = reg.e2m1_operands(block, magnitudes[8 * j : 8 * j + 8])
            quotients = [reg.split_quotient(x, *reciprocal) for x in values]
            for k in range(2):
                wire.append(reg.e2m1_word(quotients[8 * k : 8 * k + 8], factor, half, block[4 * k : 4 * k + 4]))
        return mend_odd_blocks(tops, wire, entry)
