"""NVFP4: E2M1 elements, an E4M3 scale for every 16 values of a row, and an fp32 global scale over those.

The rule for scales is that of NVIDIA ModelOpt's ``NVFP4QTensor``, and so are the bytes. compressed-tensors stores the
reciprocal of the global scale (``weight_global_scale``): loaders must invert it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moe_layer.errors import TensorError
from moe_layer.kernel_cache import dsl_available
from moe_layer.quant import blocks, e2m1, e4m3, nibbles
from moe_layer.quant.base import Format, QuantizedTensor, register_format
from moe_layer.quant.checks import check_input, check_stored

if TYPE_CHECKING:
    from moe_layer.quant.codec import KernelDecoder, KernelEncoder

GLOBAL_SCALE_BYTES = 4  # fp32, behind a row's block scales on the wire
WIRE_ALIGNMENT = 16  # transports move whole vectors of so many bytes, and copy rows of other lengths first

# 2**−126 / 2**−9: with at least this, the product of both scales is a normal fp32 for every block scale.
MIN_GLOBAL_SCALE = torch.finfo(torch.float32).tiny / e4m3.MIN_SUBNORMAL


class NvFp4(Format):
    """``element · block scale · global scale``.

    ``global scale = amax / (6 · 448)`` (at least 2**−117) of a row, or as given; ``block scale = amax / (6 · global)``
    rounded to E4M3 within [2**−9, 448], and 1 for an all-zero block; elements are ``x / (block · global)`` rounded to
    nearest even. With a given global scale that is too small for the data, values saturate.

    E2M1 has no NaN: a block that holds NaN or ±infinity gets a NaN scale, and all of its values are NaN; it takes no
    part in the row's global scale, so the other blocks of the row are as if it were zero.

    ``element · block scale`` is exact in fp32 and in BF16; the product with the global scale is rounded once.
    """

    name = "nvfp4"
    element_bits = 4
    data_dtype = torch.uint8
    scale_dtype = torch.float8_e4m3fn
    block = (1, 16)
    two_level = True

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        parts = blocks.split(blocks.as_float32(x), self.block)
        amax = blocks.amax(parts, self.block)
        if global_scale is None:
            row_amax = amax.nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)
            global_scale = blocks.divide(row_amax, e2m1.MAX * e4m3.MAX).clamp_(min=MIN_GLOBAL_SCALE)
        ratio = (amax / (e2m1.MAX * global_scale)).clamp_(e4m3.MIN_SUBNORMAL, e4m3.MAX)
        ratio = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), ratio, math.nan))
        scale = e4m3.encode(ratio)
        codes = e2m1.encode(parts / blocks.spread(scale.to(torch.float32) * global_scale, self.block))
        data = nibbles.pack(blocks.merge(codes, self.block, x.shape))
        return QuantizedTensor(self.name, data, scale, global_scale, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        assert q.scale is not None and q.global_scale is not None
        values = nibbles.lookup(q.data, e2m1.values(q.data.device), q.columns)
        parts = blocks.split(values.to(torch.float32), self.block)
        parts.mul_(blocks.spread(q.scale.to(torch.float32), self.block))
        return blocks.merge(parts, self.block, values.shape).mul_(q.global_scale).to(dtype)

    def to_wire(self, q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(data [T, ⌈K/2⌉], scales)``, both uint8.

        Scale rows are the ⌈K/16⌉ E4M3 bytes, followed, where each row has its own global scale (``[T, 1]``), by the 4
        bytes of that fp32 in host byte order, and zeros up to a multiple of 16 bytes. A single global scale (a tensor
        of at most one dimension) stays behind.

        Raises:
            TensorError: ``q`` is not ``[T, K]``.
        """
        check_stored(self, q)
        assert q.scale is not None and q.global_scale is not None
        if q.data.dim() != 2:
            raise TensorError(f"nvfp4: the wire carries [T, K] rows, got data of shape {tuple(q.data.shape)}")
        scale = q.scale.view(torch.uint8)
        if q.global_scale.dim() < 2:
            return q.data, scale
        tokens, of_blocks = scale.shape
        rows = scale.new_zeros(tokens, self.scale_row_bytes(q.columns, per_row_global_scale=True))
        rows[:, :of_blocks] = scale
        per_row = q.global_scale.expand(tokens, 1).flatten().view(torch.uint8).view(tokens, GLOBAL_SCALE_BYTES)
        rows[:, of_blocks : of_blocks + GLOBAL_SCALE_BYTES] = per_row
        return q.data, rows

    def quantize_to_wire(
        self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(x, torch.Tensor) and x.is_cuda and global_scale is None:
            from moe_layer.quant.launch import quantize_to_wire_by_kernel

            found = quantize_to_wire_by_kernel(self, x)
            if found is not None:
                return found
        return super().quantize_to_wire(x, global_scale=global_scale)

    def scale_row_bytes(self, k: int, *, per_row_global_scale: bool = False) -> int:
        nbytes = super().scale_row_bytes(k, per_row_global_scale=per_row_global_scale)
        return -(-nbytes // WIRE_ALIGNMENT) * WIRE_ALIGNMENT if per_row_global_scale else nbytes

    def from_wire(
        self, data: torch.Tensor, scale: torch.Tensor | None, columns: int, global_scale: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """The inverse of :meth:`to_wire`; without ``global_scale``, each row brings its own.

        Raises:
            TensorError: scale rows that are not uint8 or of the wrong length.
        """
        block_scales = -(-columns // self.block[1])
        expected = self.scale_row_bytes(columns, per_row_global_scale=global_scale is None)
        if scale is None or scale.dtype != torch.uint8 or scale.dim() != 2 or scale.shape[1] != expected:
            found = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
            whose = "their own" if global_scale is None else "a common"
            raise TensorError(
                f"nvfp4: rows of {columns} values with {whose} global scale need torch.uint8 scales [T, {expected}], "
                f"got {found}"
            )
        if global_scale is None:
            own = scale[:, block_scales : block_scales + GLOBAL_SCALE_BYTES]
            places = (own.data_ptr(), own.storage_offset(), own.stride(0))
            if not own.shape[0] or any(place % GLOBAL_SCALE_BYTES for place in places):  # fp32 must be aligned
                own = own.clone(memory_format=torch.contiguous_format)
            global_scale = own.view(torch.float32)
        return QuantizedTensor(
            self.name, data, scale[:, :block_scales].view(torch.float8_e4m3fn), global_scale, columns
        )

    def kernel_encoder(
        self, dtype: torch.dtype = torch.bfloat16, *, per_row_global_scale: bool = True
    ) -> KernelEncoder | None:
        if not dsl_available():
            return None
        from moe_layer.quant import encoders, fp32_encoders

        return (
            encoders.NvFp4Encoder(per_row_global_scale)
            if dtype == torch.bfloat16
            else fp32_encoders.NvFp4Fp32Encoder(per_row_global_scale)
        )

    def kernel_decoder(self) -> KernelDecoder | None:
        if not dsl_available():
            return None
        from moe_layer.quant.decoders import NvFp4Decoder

        return NvFp4Decoder()


register_format(NvFp4())
