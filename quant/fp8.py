"""FP8: E4M3 elements with one scale per block, as DeepSeek's FP8 checkpoints and kernels use them.

| name | block | scale | used for |
|---|---|---|---|
| ``fp8`` | 1 × 128 | fp32 | activations |
| ``fp8_128x128`` | 128 × 128 | fp32 | weights (DeepSeek-V3, R1, V3.2; ``weight_scale_inv``) |
| ``fp8_128x128_ue8m0`` | 128 × 128 | E8M0 | dense weights of DeepSeek-V4 |
| ``fp8_32x32`` | 32 × 32 | E8M0 | dense weights of DeepSeek-V4.1 |

A value is ``element · scale``. A scale is derived from its block's finite values only; NaN and ±infinity become the
element's NaN, so one bad value spoils neither its block nor its row's other blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_layer.kernel_cache import dsl_available
from moe_layer.quant import blocks, e4m3, e8m0
from moe_layer.quant.base import Format, QuantizedTensor, register_format
from moe_layer.quant.checks import check_input, check_stored

if TYPE_CHECKING:
    from moe_layer.quant.codec import KernelDecoder, KernelEncoder

# The smallest normal fp32. Blocks below 448 times that (all-zero ones too) keep it as their scale: no scale and no
# reciprocal of one is zero, subnormal or infinite, in kernels that flush subnormals neither.
MIN_SCALE = torch.finfo(torch.float32).tiny


class Fp8(Format):
    """E4M3 with ``scale = amax / 448`` in fp32 (at least 2**−126); elements are ``x / scale`` to nearest even."""

    element_bits = 8
    data_dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32
    block: tuple[int, int]

    def __init__(self, name: str, block: tuple[int, int]) -> None:
        self.name = name
        self.block = block

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        parts = blocks.split(blocks.as_float32(x), self.block)
        scale = blocks.divide(blocks.finite_amax(parts, self.block), e4m3.MAX).clamp_(min=MIN_SCALE)
        elements = e4m3.encode(parts / blocks.spread(scale, self.block))
        return QuantizedTensor(self.name, blocks.merge(elements, self.block, x.shape), scale, None, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        assert q.scale is not None
        parts = blocks.split(e4m3.decode(q.data).to(torch.float32), self.block)
        parts.mul_(blocks.spread(q.scale, self.block))
        return blocks.merge(parts, self.block, q.data.shape).to(dtype)

    def kernel_encoder(
        self, dtype: torch.dtype = torch.bfloat16, *, per_row_global_scale: bool = True
    ) -> KernelEncoder | None:
        if self.block != (1, 128) or not dsl_available():
            return None
        from moe_layer.quant import encoders, fp32_encoders

        return encoders.Fp8Encoder() if dtype == torch.bfloat16 else fp32_encoders.Fp8Fp32Encoder()

    def kernel_decoder(self) -> KernelDecoder | None:
        if self.block[0] != 1 or not dsl_available():
            return None
        from moe_layer.quant.decoders import Fp8Decoder

        return Fp8Decoder(self.block[1])


class PowerOfTwoFp8(Format):
    """E4M3 with an E8M0 scale, so that ``element · scale`` is exact.

    Args:
        saturating: the scale rule. False: ``2**⌈log2(amax / 448)⌉``, DeepSeek's: no value saturates. True:
            ``2**(⌊log2 amax⌋ − 8)``, that of OCP MX v1.0: a block's amax lands in [256, 512), and what lands above 448
            saturates (at most one eighth too small).
    """

    element_bits = 8
    data_dtype = torch.float8_e4m3fn
    scale_dtype = torch.uint8
    block: tuple[int, int]

    def __init__(self, name: str, block: tuple[int, int], *, saturating: bool = False) -> None:
        self.name = name
        self.block = block
        self.saturating = saturating

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        parts = blocks.split(blocks.as_float32(x), self.block)
        amax = blocks.finite_amax(parts, self.block)
        scale = e8m0.encode_floor(amax, e4m3.MAX_EXPONENT) if self.saturating else e8m0.encode_ceil(amax, e4m3.MAX)
        elements = e4m3.encode(parts * blocks.spread(e8m0.reciprocal(scale), self.block))
        return QuantizedTensor(self.name, blocks.merge(elements, self.block, x.shape), scale, None, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        assert q.scale is not None
        work = e8m0.product_dtype(dtype)
        parts = blocks.split(e4m3.decode(q.data).to(work), self.block)
        parts.mul_(blocks.spread(e8m0.decode(q.scale).to(work), self.block))
        return blocks.merge(parts, self.block, q.data.shape).to(dtype)

    def kernel_encoder(
        self, dtype: torch.dtype = torch.bfloat16, *, per_row_global_scale: bool = True
    ) -> KernelEncoder | None:
        if self.block != (1, 32) or not self.saturating or not dsl_available():
            return None
        from moe_layer.quant import encoders, fp32_encoders

        return encoders.MxFp8Encoder() if dtype == torch.bfloat16 else fp32_encoders.MxFp8Fp32Encoder()

    def kernel_decoder(self) -> KernelDecoder | None:
        if self.block[0] != 1 or not dsl_available():
            return None
        from moe_layer.quant.decoders import MxFp8Decoder

        return MxFp8Decoder(self.block[1])


register_format(Fp8("fp8", (1, 128)))
register_format(Fp8("fp8_128x128", (128, 128)))
register_format(PowerOfTwoFp8("fp8_128x128_ue8m0", (128, 128)))
register_format(PowerOfTwoFp8("fp8_32x32", (32, 32)))
