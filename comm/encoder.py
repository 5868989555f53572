"""Quantizing inside dispatch: what a number format brings, so that dispatch turns BF16 rows into the rows that travel.

The format's arithmetic comes in from outside, as an :class:`Encoder`; this package knows no format. A transport whose
kernel can, encodes in registers (:mod:`moe_layer.comm.encode_row`); every other one quantizes first, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe_layer.errors import TensorError

# The widest model's rows. Of wider ones, kernels of three ranks and more spill.
MAX_COLUMNS = 7168


class KernelEncoder(Protocol):
    """A format's arithmetic on registers. A frozen dataclass, hashable; its repr is part of the kernel's key.

    A thread makes one 16-byte vector of the wire at a time, out of consecutive values; ``vectors_per_scale`` such
    vectors, in as many consecutive lanes, add ``scale_entry_bytes`` bytes to the row's scales. A row whose values do
    not fill its last scale block ends in zeros.

    Attributes:
        vector_values: values of one vector, 16 or 32.
        vectors_per_scale: vectors that share a scale entry; a power of two, at most 32.
        scale_entry_bytes: 1, 2 or 4.
        row_scale: each row ends its scales with an fp32 scale of its own.
        common_scale: all rows share an fp32 scale, read from memory.
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
        """With ``row_scale``: what a row's scale is made from, of some of its BF16 pairs, as a Uint32 whose maximum
        over all of them is that of the row."""

    def scale_of_row(self, magnitude: Any) -> Any:
        """With ``row_scale``: the fp32 scale's bits, Uint32, from the row's largest :meth:`magnitude`."""

    def encode(self, words: Sequence[Any], scale: Any) -> tuple[Sequence[Any], Any]:
        """One vector. All lanes of a warp call it together.

        Args:
            words: ``vector_values / 2`` BF16 pairs, Uint32, the first value in the low half.
            scale: bits of the row's or the common fp32 scale, Uint32; 0 without either.

        Returns:
            The vector's four words, and the scale entry, in the low bytes of a Uint32 (the same in all lanes that
            share it).
        """


@dataclass(frozen=True, eq=False)
class Encoder:
    """A number format as dispatch sees it.

    Attributes:
        quantize: BF16 (or other floating) ``[T, K]`` → (rows, scales or None), the tensors that dispatch carries.
        kernel: the same on registers, to the same bits; None: there is no such form.
        common_scale: ``[1]`` fp32 on the GPU, for a ``kernel`` that asks for it.
    """

    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    kernel: KernelEncoder | None = None
    common_scale: torch.Tensor | None = None

    def fuses(self, hidden_states: torch.Tensor) -> bool:
        """Whether a kernel can encode these rows: BF16 ``[T, K]`` (or none at all), K as in :func:`encodes_columns`."""
        return (
            self.kernel is not None
            and isinstance(hidden_states, torch.Tensor)
            and hidden_states.ndim == 2
            and (hidden_states.dtype == torch.bfloat16 or hidden_states.shape[0] == 0)
            and encodes_columns(self.kernel, hidden_states.shape[1])
        )


def encodes_columns(kernel: KernelEncoder, columns: int) -> bool:
    """Whether rows of ``columns`` values are whole vectors of the wire, and not too long."""
    return 0 < columns <= MAX_COLUMNS and columns % kernel.vector_values == 0


def encoded(
    encoder: Encoder | None, hidden_states: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows and scales that travel, for transports that do not fuse.

    Raises:
        TensorError: an encoder, and rows that bring scales already.
    """
    if encoder is None:
        return hidden_states, scale
    check_unscaled(scale)
    return encoder.quantize(hidden_states)


def check_unscaled(scale: torch.Tensor | None) -> None:
    """Raise if rows that an encoder is to quantize have scales."""
    if scale is not None:
        raise TensorError("hidden_states_scale was given with an encoder, which makes the scales itself; expected None")
