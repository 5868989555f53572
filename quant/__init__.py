"""Number formats: each a small file with quantize, dequantize and packing, found by name in a registry."""

import torch

# Importing a format's file registers it.
from moe_layer.quant import bf16, fp8, fp32, int4, mxfp4, mxfp8, nvfp4  # noqa: F401
from moe_layer.quant.base import Format, QuantizedTensor, available_formats, get_format, register_format
from moe_layer.quant.checks import validate_scales

__all__ = [
    "Format",
    "QuantizedTensor",
    "available_formats",
    "dequantize",
    "get_format",
    "quantize",
    "register_format",
    "validate_scales",
]


def quantize(x: torch.Tensor, format: str, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
    """``x`` ``[..., N, K]`` in the registered ``format``; see :meth:`Format.quantize`."""
    return get_format(format).quantize(x, global_scale=global_scale)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of ``q`` ``[..., N, K]``; see :meth:`Format.dequantize`."""
    return get_format(q.format).dequantize(q, dtype)
