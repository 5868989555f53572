"""E2M1, the 4-bit float: 1 sign, 2 exponent (bias 1) and 1 mantissa bit; no NaN, no infinity.

Codes 0…7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; codes 8…15 their negatives, −0 included. Source: OCP MX v1.0 §5.3.3.
"""

from __future__ import annotations

import torch

MAX = 6.0
MAX_EXPONENT = 2  # of the binade that holds MAX
_BIAS, _MANTISSA_BITS, _EXPONENT_MASK = 127, 23, 0x7F800000  # of fp32


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``[...]`` to codes, uint8 0…15 ``[...]``: nearest, ties to even, saturating at ±6.

    The sign of zero is kept, also of values that round to zero. NaN has no code and becomes +0: formats mark it in the
    block's scale.
    """
    x = x.nan_to_num(nan=0.0)  # a copy, so that what follows may work in place
    magnitude = x.abs().clamp_(max=MAX)
    # Codes are half a binade apart: 0.5 below 2, then 1, then 2. Adding 2**22 binades leaves the magnitude's number of
    # such steps in the sum's lowest bits, rounded to nearest even by the addition itself. (Comparing with the seven
    # midpoints takes 1.7 times as long on a CPU.)
    binade = magnitude.clamp(min=1.0).view(torch.int32).bitwise_and_(_EXPONENT_MASK)  # the bits of 1, 2 or 4
    shift = binade + (22 << _MANTISSA_BITS)
    code = magnitude.add_(shift.view(torch.float32)).view(torch.int32).sub_(shift)
    # Each binade above 1 starts two codes later: add twice the exponent, less twice that of 1.
    code.add_(binade.bitwise_right_shift_(_MANTISSA_BITS - 1)).sub_(2 * _BIAS)
    sign = x.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8)
    return code.bitwise_or_(sign).to(torch.uint8)


def values(device: torch.device) -> torch.Tensor:
    """BF16 ``[16]``: the value of each code. Computed on the device, so that it may be captured in a CUDA graph."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    exponent, mantissa = (code >> 1) & 3, code & 1
    twice = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    magnitude = twice.to(torch.bfloat16) * 0.5
    return torch.where(code < 8, magnitude, -magnitude)
