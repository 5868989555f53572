"""E2M1, the 4-bit float: 1 sign, 2 exponent (bias 1) and 1 mantissa bit; no NaN, no infinity.

Codes 0…7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; codes 8…15 their negatives, −0 included. Source: OCP MX v1.0 §5.3.3.
"""

from __future__ import annotations

import torch

MAX = 6.0
MAX_EXPONENT = 2  # of the binade that holds MAX


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``[...]`` to codes, uint8 0…15 ``[...]``: nearest, ties to even, saturating at ±6.

    The sign of zero is kept, also of values that round to zero. NaN has no code and becomes +0: formats mark it in the
    block's scale.
    """
    x = x.nan_to_num(nan=0.0)
    magnitude = x.abs()
    # Each value is half a code step past the midpoints below it; a tie goes to the even code, hence > and ≥ in turn.
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code | (x.signbit().to(torch.uint8) << 3)


def values(device: torch.device) -> torch.Tensor:
    """BF16 ``[16]``: the value of each code. Computed on the device, so that it may be captured in a CUDA graph."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    exponent, mantissa = (code >> 1) & 3, code & 1
    twice = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    magnitude = twice.to(torch.bfloat16) * 0.5
    return torch.where(code < 8, magnitude, -magnitude)
