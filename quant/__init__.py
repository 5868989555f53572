"""Number formats: each a small file with quantize, dequantize and packing, found by name in a registry."""

from moe_layer.quant.base import Format, QuantizedTensor, available_formats, get_format, register_format

__all__ = ["Format", "QuantizedTensor", "available_formats", "get_format", "register_format"]
