"""The order of codes in the 32-bit words that a thread turns into WGMMA's register operand.

Eight weights are a thread's share of an m64 × k16 operand: the pairs p = 0 … 3, each two neighbours along K, of which
the first belongs in the low half of a register and the second in the high half. Both halves of a word are therefore
made alike, from the first and from the second code of each pair, and what happens inside a half is a permutation of
its bits: codes are laid side by side (p = 0 lowest), then each bit moves to where the kernel finds it by a mask and a
shift. A permutation has an inverse; it is applied as a table of the 65536 halves.
"""

from __future__ import annotations

from functools import cache

import torch

# Destination of each bit, the lowest first, of the codes laid side by side.
# E2M1, m e0 e1 s: exponent and mantissa of a BF16 number begin at bit 6 and its sign is bit 15 after a shift left by 0,
# 3 and 6 for p = 0, 1, 2; p = 3 has the bits that are left over.
E2M1_BITS = (6, 7, 8, 15, 3, 4, 5, 12, 0, 1, 2, 9, 11, 13, 14, 10)
# E4M3, m0 m1 m2 e0 … e3 s: two codes a half; the first begins at bit 4, the second has the bits that are left over.
E4M3_BITS = (4, 5, 6, 7, 8, 9, 10, 15, 1, 2, 3, 11, 12, 13, 14, 0)


def transpose_nibbles(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Of each 2 × 2 nibbles, (row h, code i) → (half i, row h): bytes of two neighbouring codes → halves of words.

    Args:
        rows: uint8 ``[2, …]``: a byte of row 0 and one of row 1, the first code of a pair in the low nibble.
        out: uint8 ``[2, …]``: first codes, then second codes; row 0 in the low nibble. Its own inverse.
    """
    torch.bitwise_or(rows[0] & 0xF, rows[1] << 4, out=out[0])
    torch.bitwise_or(rows[0] >> 4, rows[1] & 0xF0, out=out[1])
    return out


def permute_bits_(halves: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Bit i of every 16-bit half moves to bit ``order[i]``, in place.

    Args:
        halves: contiguous int16, any shape.
        order: a permutation of 0 … 15.
    """
    flat = halves.view(-1)
    index = flat.to(torch.int32).bitwise_and_(0xFFFF)
    torch.index_select(_table(order, halves.device), 0, index, out=flat)
    return halves


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes ``order``."""
    return tuple(order.index(bit) for bit in range(len(order)))


@cache
def _table(order: tuple[int, ...], device: torch.device) -> torch.Tensor:
    half = torch.arange(1 << 16, dtype=torch.int32, device=device)
    moved = torch.zeros_like(half)
    for source, target in enumerate(order):
        moved |= ((half >> source) & 1) << target
    return moved.to(torch.int16)
