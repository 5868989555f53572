"""How block scales lie in memory: row by row, as the wire carries them, or as Blackwell's block-scaled MMA reads them.

A layout is an object with ``swizzle`` and its inverse ``unswizzle``; both only move bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from moe_layer.errors import TensorError


class ScaleLayout(ABC):
    """An order of the scales of a matrix, ``[..., rows, columns]`` of one byte each (E8M0, E4M3)."""

    @abstractmethod
    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of one matrix's scales in this layout, padding included."""

    @abstractmethod
    def swizzle(self, scale: torch.Tensor) -> torch.Tensor:
        """``[..., rows, columns]`` → ``[..., *shape(rows, columns)]``, contiguous. May be ``scale`` itself.

        Raises:
            TensorError: scales that are not one byte each, or of fewer than two dimensions.
        """

    @abstractmethod
    def unswizzle(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The inverse: contiguous ``[..., rows, columns]``; padding is dropped.

        Raises:
            TensorError: not ``[..., *shape(rows, columns)]``, or scales that are not one byte each.
        """

    def _check(self, scale: torch.Tensor, dimensions: int) -> None:
        if scale.element_size() != 1:
            raise TensorError(f"scales must be one byte each (E8M0 or E4M3), got {scale.dtype}")
        if scale.dim() < dimensions:
            raise TensorError(f"scales must have at least {dimensions} dimension(s), got shape {list(scale.shape)}")

    def _check_stored(self, stored: torch.Tensor, rows: int, columns: int) -> None:
        expected = self.shape(rows, columns)
        self._check(stored, len(expected))
        if tuple(stored.shape[-len(expected) :]) != expected:
            raise TensorError(
                f"scales of {rows} × {columns} blocks have shape [..., {', '.join(map(str, expected))}] in this "
                f"layout, got {list(stored.shape)}"
            )


@dataclass(frozen=True)
class RowMajor(ScaleLayout):
    """Row after row without padding: :class:`~moe_layer.quant.QuantizedTensor`'s own and the wire's."""

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns

    def swizzle(self, scale: torch.Tensor) -> torch.Tensor:
        self._check(scale, 2)
        return scale.contiguous()

    def unswizzle(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        self._check_stored(stored, rows, columns)
        return stored.contiguous()


@dataclass(frozen=True)
class Swizzled128x4(ScaleLayout):
    """Tiles of 128 rows × 4 columns, 512 bytes each, in which a row's four scales lie together.

    The operand of ``tcgen05.mma`` with ``block_scale`` and of cuBLAS' block-scaled products (its documentation: "1D
    block scaling factors layout"); the same for blocks of 32 (MXFP8, MXFP4) and of 16 (NVFP4). Tiles follow one another
    along a row of tiles, then down. Inside a tile the scale of row r and column c is byte
    ``(r mod 32) · 16 + ⌊r / 32⌋ · 4 + c``: tensor memory has 32 lanes for each of four warps, and 16 bytes hold the
    scales of the rows r, r + 32, r + 64 and r + 96.

    Attributes:
        fill: byte of the padding up to whole tiles; 0 is E8M0's 2**−127 and E4M3's zero, and meets only operands that
            are padding, too.
    """

    fill: int = 0

    ROWS, COLUMNS, LANES = 128, 4, 32

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        tiles = -(-rows // self.ROWS), -(-columns // self.COLUMNS)
        return (tiles[0] * tiles[1] * self.ROWS * self.COLUMNS,)

    def swizzle(self, scale: torch.Tensor) -> torch.Tensor:
        self._check(scale, 2)
        rows, columns = scale.shape[-2:]
        padding = (0, -columns % self.COLUMNS, 0, -rows % self.ROWS)
        padded = torch.nn.functional.pad(scale.view(torch.uint8), padding, value=self.fill)
        # [tile row, warp, lane, tile column, scale] → [tile row, tile column, lane, warp, scale]
        down, across = -(-rows // self.ROWS), -(-columns // self.COLUMNS)
        split = padded.unflatten(-2, (down, self.ROWS // self.LANES, self.LANES)).unflatten(-1, (across, self.COLUMNS))
        tiles = split.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
        return tiles.flatten(-5).contiguous().view(scale.dtype)

    def unswizzle(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        self._check_stored(stored, rows, columns)
        tile = (self.LANES, self.ROWS // self.LANES, self.COLUMNS)
        tiles = (
            stored.contiguous()
            .view(torch.uint8)
            .unflatten(-1, (-(-rows // self.ROWS), -(-columns // self.COLUMNS), *tile))
        )
        split = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
        padded = split.flatten(-5, -3).flatten(-2)
        return padded[..., :rows, :columns].contiguous().view(stored.dtype)
