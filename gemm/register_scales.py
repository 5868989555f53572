"""Block scales as the exponent and mantissa bits of BF16 multipliers, and which of a checkpoint's scales they can hold.

A kernel that reads E2M1 or E4M3 bits as a BF16 number has ``value · 2**-126`` or ``value · 2**-120``: exponent field 1
means 2**-126 in BF16, but 2**0 and 2**-6 in those formats. Its multiplier brings the missing power of two along
with the scale. Where the sum is no exponent that BF16 has, all scales of a part are shifted by a power of two, which
the epilogue's factor gives back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from moe_layer.errors import FormatError, UnrepresentableError
from moe_layer.quant import e8m0

FIRST_FIELD, LAST_FIELD = 1, 254  # exponent fields of BF16's normal numbers
# NVFP4's multiplier is an E4M3 scale times 2**118: with this in its exponent field 1.mmm · 2**(e − 10), e = 1 … 18,
# becomes field 236 … 253. All scales are normal numbers then, with one field to spare, and of the 2**126 that E2M1's
# bits lack 2**8 is left to the factor, where it is exact.
NVFP4_EXPONENT = 118 - 10 + 127
NVFP4_FACTOR = 2.0 ** (126 - 118)
E4M3_NAN, E4M3_NEGATIVE_ZERO = 0x7F, 0x80  # above these two come negative numbers and the other NaN
_SUBNORMALS = (0, 8, 16, 20, 24, 26, 28, 30)  # E4M3 bytes 0 … 7, multiples of 2**-9, as [e5 m3]; 0 stays 0
_REBIAS = 24  # E4M3's exponent 1 is 2**-6, that is e = 4


@dataclass(frozen=True)
class PowerOfTwoScales:
    """E8M0 scales, byte s = 2**(s − 127), as exponent fields ``s + offset − shift``.

    Attributes:
        offset: what makes up for the element's exponent bias.
        lowest: the smallest ``s − shift`` with which every product is a BF16 number, subnormal or not. BF16 holds
            multiples of 2**-133, and elements are multiples of 2**-1 (E2M1) or 2**-9 (E4M3).
    """

    offset: int
    lowest: int

    def shifts(self, scale: torch.Tensor, nonzero: Callable[[], torch.Tensor]) -> list[int]:
        """The shift of each part, the one nearest to 0 that serves. Waits for the device.

        Args:
            scale: uint8 ``[parts, N, C]``.
            nonzero: gives bool ``[parts, N, C]``, the blocks that hold a value other than ±0; called only if needed.

        Raises:
            FormatError: NaN (byte 255).
            UnrepresentableError: a part whose scales lie too far apart.
        """
        flat = scale.flatten(1)
        least, most = (t.tolist() for t in torch.stack((flat.amin(1), flat.amax(1))))
        for part, largest in enumerate(most):
            if largest == e8m0.NAN:
                _refuse(f"scale of part {part}", scale[part] == e8m0.NAN, "NaN (E8M0 byte 255)", "a power of two")
        if min(least) >= self.lowest and max(most) <= LAST_FIELD - self.offset:
            return [0] * len(least)
        # A block of zeros has no products that could be inexact.
        used = torch.where(nonzero(), scale, torch.full_like(scale, e8m0.NAN)).flatten(1).amin(1).tolist()
        return [self._shift(part, *limits) for part, limits in enumerate(zip(least, most, used))]

    def _shift(self, part: int, least: int, most: int, least_used: int) -> int:
        low = most + self.offset - LAST_FIELD
        high = least + self.offset - FIRST_FIELD
        if least_used != e8m0.NAN:
            high = min(high, least_used - self.lowest)
        if low > high:
            raise UnrepresentableError(
                f"scales of part {part} reach from 2**{least - e8m0.BIAS} to 2**{most - e8m0.BIAS}, too far apart for "
                f"products that are all BF16 numbers"
            )
        return min(max(0, low), high)

    def encode(self, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """uint8 ``[parts, N, C]``, int32 shifts ``[parts]`` → uint8 exponent fields."""
        return (scale.to(torch.int16) + (self.offset - shift.to(torch.int16)).view(-1, 1, 1)).to(torch.uint8)

    def decode(self, fields: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`encode`."""
        return (fields.to(torch.int16) - (self.offset - shift.to(torch.int16)).view(-1, 1, 1)).to(torch.uint8)


E2M1_SCALES = PowerOfTwoScales(126, -5)
E4M3_SCALES = PowerOfTwoScales(120, 3)


def check_nvfp4(scale: torch.Tensor, nonzero: Callable[[], torch.Tensor]) -> None:
    """Refuse E4M3 scales that :func:`encode_nvfp4` has no byte for. Waits for the device.

    Args:
        scale: uint8 ``[parts, N, C]``, E4M3 bytes.
        nonzero: as of :meth:`PowerOfTwoScales.shifts`.

    Raises:
        FormatError: NaN or a negative scale.
        UnrepresentableError: −0, or a zero scale of a block that is not all ±0: its multiplier is not zero.
    """
    least, most = torch.stack((scale.amin(), scale.amax())).tolist()
    if most >= E4M3_NAN:
        bad = (scale == E4M3_NAN) | (scale > E4M3_NEGATIVE_ZERO)
        _refuse("block scale", bad, "NaN or negative", "finite and not negative")
        raise UnrepresentableError("a block scale is −0")
    if least == 0 and bool(((scale == 0) & nonzero()).any()):
        raise UnrepresentableError("a block scale is zero, but not all elements of its block")


def encode_nvfp4(scale: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes → ``e << 3 | mmm`` of the same value, 1.mmm · 2**(e − 10); 0 → 0. uint8, any shape."""
    return _nvfp4_tables(scale.device)[0].index_select(0, scale.reshape(-1).to(torch.int32)).view(scale.shape)


def decode_nvfp4(stored: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`encode_nvfp4`."""
    return _nvfp4_tables(stored.device)[1].index_select(0, stored.reshape(-1).to(torch.int32)).view(stored.shape)


@cache
def _nvfp4_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    there = [*_SUBNORMALS, *(byte + _REBIAS for byte in range(8, E4M3_NAN))]
    back = [0] * 256
    for byte, stored in enumerate(there):
        back[stored] = byte
    return tuple(torch.tensor(table, dtype=torch.uint8, device=device) for table in (there, back))  # type: ignore[return-value]


def _refuse(what: str, bad: torch.Tensor, found: str, expected: str) -> None:
    if bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        raise FormatError(f"{what} at {position} is {found}, expected {expected} ({int(bad.sum())} are not)")
