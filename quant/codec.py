"""What a number format brings for kernels: its arithmetic on values in registers.

An encoder is what dispatch asks for, too (``moe_layer.comm.encoder.KernelEncoder``), so that a format that has one can
be quantized inside dispatch, to the same bits. Both are frozen dataclasses; their repr is part of a kernel's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class KernelEncoder(Protocol):
    """Values → a 16-byte vector of elements, a thread's, and scale entries.

    Attributes:
        vector_values: consecutive values of a vector: 16 of 8 bits, 32 of 4 bits.
        vectors_per_scale: vectors that share a scale entry, in as many consecutive lanes; a power of two, at most 32.
        scale_entry_bytes: 1, 2 or 4.
        row_scale: each row has an fp32 scale of its own, made from the largest :meth:`magnitude` of its vectors.
        common_scale: an fp32 scale is read from memory.
    """

    @property
    def vector_values(self) -> int: ...
    @property
    def vectors_per_scale(self) -> int: ...
    @property
    def scale_entry_bytes(self) -> int: ...
    @property
    def row_scale(self) -> bool: ...
    @property
    def common_scale(self) -> bool: ...

    def magnitude(self, words: Sequence[Any]) -> Any:
        """With ``row_scale``: a Uint32 whose maximum over a row's vectors is what its scale is made from."""

    def scale_of_row(self, magnitude: Any) -> Any:
        """With ``row_scale``: the fp32 scale's bits from the row's largest magnitude."""

    def encode(self, words: Sequence[Any], scale: Any) -> tuple[Sequence[Any], Any]:
        """One vector; all lanes of a warp together.

        Args:
            words: Uint32; BF16 pairs, the first value in the low half, or FP32 values; zeros beyond a row's end.
            scale: bits of the row's or the common scale; 0 without either.

        Returns:
            The four words, and the scale entry in the low bytes of a Uint32 (the same in lanes that share it).
        """


class KernelDecoder(Protocol):
    """Elements and scales → values.

    Attributes:
        element_bits: 4 or 8.
        block: consecutive values that share a scale entry; a multiple of 8.
        scale_entry_bytes: 1, 2 or 4.
        global_scale: an fp32 scale over the entries is read from memory.
    """

    @property
    def element_bits(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def scale_entry_bytes(self) -> int: ...
    @property
    def global_scale(self) -> bool: ...

    def decode(self, words: Sequence[Any], count: int, entry: Any, global_scale: Any) -> Sequence[Any]:
        """``count`` (4 or 8) consecutive values of one block.

        Args:
            words: their elements, lowest address first, in Uint32 words; 4 of 4 bits in the low half of one.
            entry: the scale entry, in the low bytes of a Uint32.
            global_scale: bits of the fp32 scale; 0 without one.

        Returns:
            Float32 values.
        """
