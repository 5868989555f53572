"""Payload rows as raw bytes: one packed row per token carries the hidden state, its scales, the ids and the weights.

Rows of any dtype and byte length are moved as bytes, so every bit pattern (NaN payloads, −0) arrives as it left. Each
part of a packed row starts 16-byte aligned, which lets copies move the widest words that divide the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_layer.comm.base import ROW_ALIGNMENT

_WORDS = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class RowLayout:
    """Where each part lies in a packed row.

    Attributes:
        offsets, sizes: bytes, one entry a part.
        row_bytes: length of a packed row, a multiple of 16.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    row_bytes: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> RowLayout:
        """The layout of parts of ``sizes`` bytes, in this order."""
        offsets = []
        end = 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return cls(tuple(offsets), tuple(sizes), end)

    def part(self, packed: torch.Tensor, index: int) -> torch.Tensor:
        """Part ``index`` of ``packed`` ``[n, row_bytes]`` uint8: a view ``[n, sizes[index]]``."""
        return packed[:, self.offsets[index] : self.offsets[index] + self.sizes[index]]


def row_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of one row of ``tensor`` ``[n, *row]``."""
    return tuple(tensor.shape[1:])


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row of ``tensor`` ``[n, *row]``."""
    return tensor.shape[1:].numel() * tensor.element_size()


def as_byte_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous ``[n, *row]`` of any dtype as ``[n, bytes]`` uint8, sharing memory."""
    shape = (tensor.shape[0], row_bytes(tensor))
    if tensor.numel() == 0:  # NumPy gives these strides that view() refuses
        return torch.empty(shape, dtype=torch.uint8, device=tensor.device)
    if tensor.ndim == 2 and tensor.stride(1) == 1:  # one view instead of three
        return tensor.view(torch.uint8)
    return tensor.view(-1).view(torch.uint8).view(shape)


def aligned_rows(tensor: torch.Tensor | None, alignment: int = ROW_ALIGNMENT) -> tuple[torch.Tensor | None, int]:
    """(byte rows, bytes of one), starts and lengths at multiples of ``alignment``; others are copied, zero-padded."""
    if tensor is None:
        return None, 0
    rows = as_byte_rows(tensor)
    length = rows.shape[1]
    wanted = -(-length // alignment) * alignment
    if length != wanted:
        rows = torch.nn.functional.pad(rows, (0, wanted - length))
    elif rows.data_ptr() % alignment:
        rows = rows.clone()
    return rows, wanted


def takes_vectors(output: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a combine kernel may store 16-byte vectors straight into ``output``."""
    return (
        output.dtype == dtype
        and output.stride(1) == 1
        and (output.stride(0) * dtype.itemsize) % 16 == 0
        and output.data_ptr() % 16 == 0
    )


def as_typed_rows(buffer: torch.Tensor, num_rows: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The start of a flat uint8 ``buffer`` as ``[num_rows, *shape]`` of ``dtype``, sharing memory."""
    count = num_rows * torch.Size(shape).numel()
    return buffer[: count * dtype.itemsize].view(dtype).view(num_rows, *shape)


def select_rows(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = source[index[i]]`` for byte rows; ``source`` contiguous, ``out`` may be parts of longer rows."""
    source, out = _widen(source, out)
    torch.index_select(source, 0, index, out=out)


def copy_rows(source: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = source[i]`` for byte rows that may be parts of longer ones."""
    source, out = _widen(source, out)
    out.copy_(source)


def _widen(source: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both views in the widest integer that their lengths, strides and addresses allow: fewer, longer accesses."""
    for word in _WORDS:
        sizes = (source.shape[1], source.stride(0), source.data_ptr(), out.stride(0), out.data_ptr())
        offsets = (source.storage_offset(), out.storage_offset())
        if all(value % word.itemsize == 0 for value in sizes + offsets):
            return source.view(word), out.view(word)
    return source, out


class Workspace:
    """Named flat byte buffers that live as long as the channel, shared by its layers and grown to the largest."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], torch.Tensor] = {}

    def take(self, name: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Flat uint8 buffer of at least ``num_bytes``; its contents are whatever the last user left."""
        key = (name, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            # Drop the old buffer first: the two need not exist together.
            buffer = None
            self._buffers.pop(key, None)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        return buffer

    def buffers(self) -> list[torch.Tensor]:
        """The buffers taken so far."""
        return list(self._buffers.values())

    def clear(self) -> None:
        """Forget the buffers; views that callers still hold keep theirs alive."""
        self._buffers.clear()
