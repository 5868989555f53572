"""MXFP4 (OCP MX v1.0): E2M1 elements, an E8M0 scale for every 32 values of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_layer.kernel_cache import dsl_available
from moe_layer.quant import blocks, e2m1, e8m0, nibbles
from moe_layer.quant.base import Format, QuantizedTensor, register_format
from moe_layer.quant.checks import check_input, check_stored

if TYPE_CHECKING:
    from moe_layer.quant.codec import KernelDecoder, KernelEncoder


class MxFp4(Format):
    """``element · scale`` with ``scale = 2**(⌊log2 amax⌋ − 2)``; exact in fp32.

    A block's largest magnitude lands in [4, 8); what lands above 6 saturates (at most one quarter too small). E2M1 has
    no NaN: a block that holds NaN or ±infinity gets scale byte 255, and all of its values are NaN.
    """

    name = "mxfp4"
    element_bits = 4
    data_dtype = torch.uint8
    scale_dtype = torch.uint8
    block = (1, 32)

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        parts = blocks.split(blocks.as_float32(x), self.block)
        scale = e8m0.encode_floor(blocks.amax(parts, self.block), e2m1.MAX_EXPONENT)
        codes = e2m1.encode(parts * blocks.spread(e8m0.reciprocal(scale), self.block))
        data = nibbles.pack(blocks.merge(codes, self.block, x.shape))
        return QuantizedTensor(self.name, data, scale, None, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        assert q.scale is not None
        work = e8m0.product_dtype(dtype)
        values = nibbles.lookup(q.data, e2m1.values(q.data.device), q.columns)
        parts = blocks.split(values.to(work), self.block)
        parts.mul_(blocks.spread(e8m0.decode(q.scale).to(work), self.block))
        return blocks.merge(parts, self.block, values.shape).to(dtype)

    def kernel_encoder(
        self, dtype: torch.dtype = torch.bfloat16, *, per_row_global_scale: bool = True
    ) -> KernelEncoder | None:
        if not dsl_available():
            return None
        from moe_layer.quant import encoders, fp32_encoders

        return encoders.MxFp4Encoder() if dtype == torch.bfloat16 else fp32_encoders.MxFp4Fp32Encoder()

    def kernel_decoder(self) -> KernelDecoder | None:
        if not dsl_available():
            return None
        from moe_layer.quant.decoders import MxFp4Decoder

        return MxFp4Decoder()


register_format(MxFp4())
