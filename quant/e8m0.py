"""E8M0: an unsigned power of two in a byte, the scale of the OCP MX formats.

Byte ``b`` is ``2**(b − 127)``; 255 is NaN; there is neither zero nor infinity nor a sign. Bytes are held as
``torch.uint8``, so a numeric cast of one is never a value: go through :func:`decode`. (``torch.float8_e8m0fnu`` tensors
become bytes by ``.view(torch.uint8)``; ``.to(torch.uint8)`` would turn 2**−7 into 0.)

Everything works on the bits of fp32, so there is no rounding of a logarithm. Source: OCP Microscaling Formats (MX)
specification v1.0, §5.4.1 (E8M0) and §6.3 (conversion).
"""

from __future__ import annotations

import math

import torch

BIAS = 127
NAN = 255
_MANTISSA_BITS = 23  # of fp32
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_INF_BITS = 0x7F800000  # fp32 infinity; any larger pattern of a non-negative fp32 is NaN


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values of E8M0 bytes: uint8 ``[...]`` → fp32 ``[...]``, exact. Byte 0 is the fp32 subnormal 2**−127."""
    # The two ends differ from a plain shift into fp32's exponent only in the top mantissa bit: byte 0 would be zero
    # and must be the subnormal 2**−127, byte 255 would be infinity and must be NaN.
    end = (codes == 0) | (codes == NAN)
    bits = (codes.to(torch.int32) << _MANTISSA_BITS) | (end.to(torch.int32) << (_MANTISSA_BITS - 1))
    return bits.view(torch.float32)


def reciprocal(codes: torch.Tensor) -> torch.Tensor:
    """``1 / decode(codes)``: uint8 ``[...]`` → fp32 ``[...]``, exact. Byte 255 gives NaN."""
    return decode(torch.where(codes == NAN, NAN, 2 * BIAS - codes))


def encode_floor(x: torch.Tensor, exponent: int = 0) -> torch.Tensor:
    """``2**(⌊log2 x⌋ − exponent)`` as E8M0 bytes, the scale rule of OCP MX v1.0 §6.3.

    Args:
        x: fp32 ``[...]``, non-negative (a block's largest magnitude).
        exponent: of the element format's largest binade (E4M3: 8, E2M1: 2).

    Returns:
        uint8 ``[...]``; 255 for NaN and infinity; byte 0 where the result would be below 2**−127, as for ``x`` = 0.
    """
    bits = x.view(torch.int32)
    code = ((bits >> _MANTISSA_BITS) - exponent).clamp(min=0)
    return torch.where(bits >= _INF_BITS, NAN, code).to(torch.uint8)


def encode_ceil(x: torch.Tensor, max_value: float) -> torch.Tensor:
    """The smallest power of two ``s`` with ``x ≤ max_value · s`` as E8M0 bytes, so that ``x / s`` cannot saturate.

    DeepSeek's rule for E4M3 with ``scale_fmt: ue8m0``: ``2**⌈log2(amax / 448)⌉``.

    Args:
        x: fp32 ``[...]``, non-negative.
        max_value: the element format's largest value, an fp32 number of at least 2.

    Returns:
        uint8 ``[...]``; byte 0 where 2**−127 is already enough, 255 for NaN and infinity.
    """
    fraction, exponent = math.frexp(max_value)  # max_value = (2·fraction) · 2**(exponent − 1)
    mantissa = int((2 * fraction - 1) * (1 << _MANTISSA_BITS))
    bits = x.view(torch.int32)
    finite = bits.clamp(max=_INF_BITS)  # keeps the sum below within int32 for NaN
    # The addend carries into the exponent exactly when x's mantissa is above max_value's.
    code = ((finite + (_MANTISSA_MASK - mantissa)) >> _MANTISSA_BITS) - (exponent - 1)
    return torch.where(bits >= _INF_BITS, NAN, code.clamp(min=0)).to(torch.uint8)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where ``element · decode(scale)`` may be computed when the result is wanted in ``dtype``.

    E2M1 and E4M3 elements times a power of two lose nothing in BF16's 8 bits but what underflows, and that is rounded
    once either way. A third of the time of going through fp32. (Not so for fp32, BF16 or E4M3 scales.)
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
