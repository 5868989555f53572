"""MXFP8 (OCP MX v1.0): E4M3 elements, an E8M0 scale for every 32 values of a row.

The scale is ``2**(⌊log2 amax⌋ − 8)``: a block's largest magnitude lands in [256, 512), and what lands above 448
saturates. NaN and ±infinity become the element's NaN; the scale comes from the block's finite values.
"""

from __future__ import annotations

from moe_layer.quant.base import register_format
from moe_layer.quant.fp8 import PowerOfTwoFp8

register_format(PowerOfTwoFp8("mxfp8", (1, 32), saturating=True))
