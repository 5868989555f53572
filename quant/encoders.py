"""The activation formats as encoders inside another kernel: a 16-byte vector of the wire a thread, out of BF16 pairs.

What a dispatch kernel (``moe_layer.comm.encoder.KernelEncoder``) asks of a format. Blocks that are longer than a vector
are shared by neighbouring lanes. The bits are those of the formats' ``quantize`` and ``to_wire``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Uint32

from moe_layer.quant import registers as reg
from moe_layer.quant.fp8 import MIN_SCALE
from moe_layer.quant.nvfp4 import MIN_GLOBAL_SCALE

ONE, SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**-9, 448.0  # of E4M3 block scales
NAN_PAIR = 0x7F7F


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
        top = reg.largest_magnitude(words)
        bad = top >= Uint32(reg.NON_FINITE)
        words = reg.clear_if(bad, words)
        exponent = Int32(top >> Uint32(7)) - Int32(2)
        code = reg.select(exponent > Int32(0), exponent, Int32(0))
        factor = reg.power_of_two(Int32(254) - code)
        elements = [reg.multiply(x, factor) for x in reg.e2m1_operands(words)]
        wire = [reg.e2m1_word(elements[8 * j : 8 * j + 8], words[4 * j : 4 * j + 4]) for j in range(4)]
        return wire, reg.select(bad, Uint32(255), Uint32(code))


@dataclass(frozen=True)
class NvFp4Encoder:
    """NVFP4: blocks of 1 × 16, two in a vector, below a scale of the row's own or one that all rows share."""

    row_scale: bool

    vector_values = 32
    vectors_per_scale = 1
    scale_entry_bytes = 2

    @property
    def common_scale(self) -> bool:
        return not self.row_scale

    def magnitude(self, words: Any) -> Any:
        """The largest of blocks that are finite throughout, as BF16 bits."""
        out = Uint32(0)
        for block in range(0, len(words), 8):
            top = reg.largest_magnitude(words[block : block + 8])
            out = reg.maximum(out, reg.select(top < Uint32(reg.NON_FINITE), top, Uint32(0)))
        return out

    def scale_of_row(self, magnitude: Any) -> Any:
        amax = reg.number(magnitude << Uint32(16))
        return reg.bits(reg.larger(reg.by_constant(amax, 2688.0, 1.0 / 2688.0), Float32(MIN_GLOBAL_SCALE)))

    def encode(self, words: Any, scale: Any) -> Any:
        global_scale = reg.number(scale)
        six = reg.multiply(global_scale, Float32(6.0))
        blocks, amaxes, ratios, bad = [], [], [], []
        for j in range(2):
            block = words[8 * j : 8 * j + 8]
            top = reg.largest_magnitude(block)
            bad.append(top >= Uint32(reg.NON_FINITE))
            blocks.append(reg.clear_if(bad[j], block))
            amax = reg.number(reg.select(bad[j], Uint32(0), top) << Uint32(16))
            ratio = reg.smaller(reg.larger(reg.quotient(amax, six), Float32(SMALLEST_SCALE)), Float32(LARGEST_SCALE))
            ratios.append(reg.select(amax == Float32(0.0), Float32(ONE), ratio))
            amaxes.append(amax)
        entry = reg.e4m3_pair(*ratios)
        wire = []
        for j, block_scale in enumerate(reg.e4m3_values(entry)):
            divisor = reg.multiply(block_scale, global_scale)
            values, divisor = reg.bring_near(reg.e2m1_operands(blocks[j]), divisor, amaxes[j])
            elements = reg.divide_all(values, divisor, reg.reciprocal(divisor))
            wire += [reg.e2m1_word(elements[8 * k : 8 * k + 8], blocks[j][4 * k : 4 * k + 4]) for k in range(2)]
        low = reg.select(bad[0], Uint32(NAN_PAIR & 0xFF), entry & Uint32(0xFF))
        high = reg.select(bad[1], Uint32(NAN_PAIR & 0xFF00), entry & Uint32(0xFF00))
        return wire, low | high
