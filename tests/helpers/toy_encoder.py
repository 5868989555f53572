"""A number format that no library has, to see dispatch encode: each value's top byte, and block sums as scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToyEncoder:
    vector_values: int = 16
    vectors_per_scale: int = 2
    scale_entry_bytes: int = 1
    row_scale: bool = False
    common_scale: bool = False

    def magnitude(self, words: Any) -> Any:
        from cutlass import Uint32

        from moe_layer.comm import device as dev

        out = Uint32(0)
        for w in words:
            out = dev.maximum(out, dev.maximum(w & Uint32(0x7FFF), (w >> Uint32(16)) & Uint32(0x7FFF)))
        return out

    def scale_of_row(self, magnitude: Any) -> Any:
        from cutlass import Uint32

        return magnitude << Uint32(16)

    def encode(self, words: Any, scale: Any) -> Any:
        import cutlass.cute as cute
        from cutlass import Uint32

        largest = self.magnitude(words)
        offset = self.vectors_per_scale // 2
        while offset:
            from moe_layer.comm import device as dev

            largest = dev.maximum(largest, cute.arch.shuffle_sync_bfly(largest, offset))
            offset //= 2
        top = [((w >> Uint32(8)) & Uint32(0xFF)) | ((w >> Uint32(16)) & Uint32(0xFF00)) for w in words]
        per = len(words) // 4
        wire = []
        for j in range(4):
            word = top[j * per] | (top[j * per + 1] << Uint32(16))
            for k in range(2, per):
                word = word ^ top[j * per + k]
            wire.append(word)
        return wire, largest + (scale >> Uint32(16))
