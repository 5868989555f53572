"""The activation formats as decoders inside a kernel: stored elements and scales on registers → FP32 values.

The bits are those of the formats' ``dequantize_reference``, but for the payloads of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Uint32

from moe_layer.quant import device as dev
from moe_layer.quant import registers as reg


@dataclass(frozen=True)
class Fp8Decoder:
    """E4M3 with an fp32 scale a block: the product is rounded once."""

    block: int = 128

    element_bits = 8
    scale_entry_bytes = 4
    global_scale = False

    def decode(self, words: Any, count: int, entry: Any, global_scale: Any) -> Any:
        scale = reg.number(entry)
        return [reg.multiply(value, scale) for word in words for value in dev.e4m3_values(word)]


@dataclass(frozen=True)
class MxFp8Decoder:
    """E4M3 with an E8M0 scale a block."""

    block: int = 32

    element_bits = 8
    scale_entry_bytes = 1
    global_scale = False

    def decode(self, words: Any, count: int, entry: Any, global_scale: Any) -> Any:
        scale = dev.e8m0_value(entry)
        return [reg.multiply(value, scale) for word in words for value in dev.e4m3_values(word)]


@dataclass(frozen=True)
class MxFp4Decoder:
    """E2M1 with an E8M0 scale a block."""

    block: int = 32

    element_bits = 4
    scale_entry_bytes = 1
    global_scale = False

    def decode(self, words: Any, count: int, entry: Any, global_scale: Any) -> Any:
        scale = dev.e8m0_value(entry)
        return [reg.multiply(value, scale) for value in dev.e2m1_values(words[0], count)]


@dataclass(frozen=True)
class NvFp4Decoder:
    """E2M1 with an E4M3 scale a block, whose product is exact, and an fp32 scale over those, which rounds once."""

    block: int = 16

    element_bits = 4
    scale_entry_bytes = 1
    global_scale = True

    def decode(self, words: Any, count: int, entry: Any, global_scale: Any) -> Any:
        scale = reg.e4m3_values(entry)[0]
        over = reg.number(Uint32(global_scale))
        return [reg.multiply(reg.multiply(value, scale), over) for value in dev.e2m1_values(words[0], count)]
