"""Cutting a tensor into the blocks that share a scale, and back.

A block is ``(rows, columns)``. With one row it lies along K and a split tensor is ``[..., C, columns]``; otherwise it
is ``[..., R, rows, C, columns]``, with R = ⌈N/rows⌉ and C = ⌈K/columns⌉. Short last blocks are filled up with zeros,
which change no block's largest magnitude.
"""

from __future__ import annotations

import torch


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """``x`` as contiguous fp32 without gradient. May be ``x`` itself: do not write to it."""
    return x.detach().to(torch.float32).contiguous()


def divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """``x / number``, correctly rounded everywhere: by a Python number, CUDA multiplies with the rounded reciprocal."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def split(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``[..., N, K]`` → blocks. A view of ``x`` if every block is full, else a padded copy."""
    rows, columns = block
    pad_columns = -x.shape[-1] % columns
    pad_rows = -x.shape[-2] % rows if rows > 1 else 0
    if pad_columns or pad_rows:
        x = torch.nn.functional.pad(x, (0, pad_columns, 0, pad_rows) if rows > 1 else (0, pad_columns))
    x = x.unflatten(-1, (x.shape[-1] // columns, columns))
    return x if rows == 1 else x.unflatten(-3, (x.shape[-3] // rows, rows))


def merge(blocks: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The inverse of :func:`split`: blocks → contiguous ``shape`` = ``[..., N, K]``, padding cut off."""
    x = blocks.flatten(-2)
    if block[0] == 1:
        return x[..., : shape[-1]].contiguous()
    return x.flatten(-3, -2)[..., : shape[-2], : shape[-1]].contiguous()


def spread(scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Scales ``[..., R, C]`` (one-row blocks: ``[..., C]``) as a view that broadcasts over the blocks."""
    return scale.unsqueeze(-1) if block[0] == 1 else scale.unsqueeze(-1).unsqueeze(-3)


def amax(blocks: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block, fp32 ``[..., R, C]``; NaN or infinity where the block holds one."""
    return blocks.abs().amax(_dims(block))


def finite_amax(blocks: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest finite magnitude of each block, fp32 ``[..., R, C]``; 0 where there is none."""
    return blocks.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(_dims(block))


def _dims(block: tuple[int, int]) -> tuple[int, ...]:
    return (-1,) if block[0] == 1 else (-3, -1)
