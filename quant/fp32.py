"""FP32 as a format: values pass through."""

from __future__ import annotations

import torch

from moe_layer.quant import blocks
from moe_layer.quant.base import Format, QuantizedTensor, register_format
from moe_layer.quant.checks import check_input, check_stored


class Fp32(Format):
    """IEEE binary32, no scales. Quantizing contiguous fp32 returns the tensor itself, not a copy."""

    name = "fp32"
    element_bits = 32
    data_dtype = torch.float32

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        return QuantizedTensor(self.name, blocks.as_float32(x), None, None, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        return q.data.to(dtype)


register_format(Fp32())
