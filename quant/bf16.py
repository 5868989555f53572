"""BF16: 8 exponent and 7 mantissa bits, no scales."""

from __future__ import annotations

import torch

from moe_layer.quant.base import Format, QuantizedTensor, register_format
from moe_layer.quant.checks import check_input, check_stored


class Bf16(Format):
    """bfloat16, rounded to nearest even from fp32. NaN, infinities and the sign of zero are kept.

    Values beyond the largest BF16 (3.3895e38) round to infinity, as IEEE rounding does. Quantizing contiguous BF16
    returns the tensor itself, not a copy.
    """

    name = "bf16"
    element_bits = 16
    data_dtype = torch.bfloat16

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        return QuantizedTensor(self.name, x.detach().to(torch.bfloat16).contiguous(), None, None, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        return q.data.to(dtype)


register_format(Bf16())
