"""E4M3 (``torch.float8_e4m3fn``): 1 sign, 4 exponent (bias 7) and 3 mantissa bits; largest value 448, no infinity.

Source: OCP 8-bit Floating Point specification (OFP8) v1.0. Codes 0x7F and 0xFF are NaN; subnormals are multiples of
2**−9.
"""

from __future__ import annotations

import math

import torch

MAX = 448.0
MAX_EXPONENT = 8  # of the binade that holds MAX
MIN_SUBNORMAL = 2.0**-9


def encode(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 ``[...]`` to ``float8_e4m3fn`` ``[...]``: nearest, ties to even; finite values saturate at ±448.

    NaN and ±infinity become NaN (0x7F), so that they stay visible. The sign of zero is kept.
    """
    # torch's cast rounds to nearest even, but whether it saturates or gives NaN above 464 depends on its version.
    return torch.where(x.abs() < math.inf, x.clamp(-MAX, MAX), math.nan).to(torch.float8_e4m3fn)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values of ``float8_e4m3fn`` ``[...]`` as BF16 ``[...]``, which holds every E4M3 value exactly."""
    if codes.device.type != "cpu":
        return codes.to(torch.bfloat16)
    # On CPUs torch converts value by value; looking the 256 values up is about 2.5 times as fast.
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    return values.index_select(0, codes.reshape(-1).view(torch.uint8).to(torch.int32)).view(codes.shape)
