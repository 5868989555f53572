"""INT4: symmetric 4-bit integers, a BF16 scale for every 32 values of a row (Kimi-K2-Thinking, K2.5).

Stored as offset binary, ``q + 8``, two nibbles a byte. These are the bytes of compressed-tensors' ``pack-quantized``
int32 words on a little-endian machine, so checkpoints load without repacking (:func:`from_words`).
"""

from __future__ import annotations

import torch

from moe_layer.errors import TensorError
from moe_layer.quant import blocks, nibbles
from moe_layer.quant.base import Format, QuantizedTensor, register_format
from moe_layer.quant.checks import check_input, check_stored

MIN, MAX = -8, 7
OFFSET = 8  # the code of zero
CODES_PER_WORD = 8
# amax becomes ±7.5: −8 is used, and +7.5 saturates to 7, which is no further than half a step either.
HALF_RANGE = (MAX - MIN) / 2
MIN_SCALE = torch.finfo(torch.bfloat16).tiny


class Int4(Format):
    """``q · scale`` with ``scale = amax / 7.5`` rounded to BF16 (at least 2**−126); exact in fp32.

    ``q = x / scale`` is rounded to nearest even and clamped to −8…7; there is no −0. The same rule and the same bytes
    as compressed-tensors, but for the scale of an all-zero block. A block that holds NaN or ±infinity gets a NaN scale,
    and all of its values are NaN.
    """

    name = "int4"
    element_bits = 4
    data_dtype = torch.uint8
    scale_dtype = torch.bfloat16
    block = (1, 32)
    is_activation_format = False  # its rows could be sent, but no model multiplies such activations

    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        check_input(self, x, global_scale)
        parts = blocks.split(blocks.as_float32(x), self.block)
        amax = blocks.amax(parts, self.block)
        scale = blocks.divide(amax, HALF_RANGE).clamp_(min=MIN_SCALE).to(torch.bfloat16)
        scale = torch.where(amax.isfinite(), scale, torch.nan)
        q = (parts / blocks.spread(scale.to(torch.float32), self.block)).round_().clamp_(MIN, MAX).nan_to_num_(nan=0.0)
        codes = (q + OFFSET).to(torch.uint8)
        data = nibbles.pack(blocks.merge(codes, self.block, x.shape))
        return QuantizedTensor(self.name, data, scale, None, x.shape[-1])

    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        check_stored(self, q)
        assert q.scale is not None
        values = nibbles.lookup(q.data, _values(q.data.device), q.columns)
        parts = blocks.split(values.to(torch.float32), self.block)
        parts.mul_(blocks.spread(q.scale.to(torch.float32), self.block))
        return blocks.merge(parts, self.block, values.shape).to(dtype)


def _values(device: torch.device) -> torch.Tensor:
    return (torch.arange(16, dtype=torch.int32, device=device) - OFFSET).to(torch.bfloat16)


def from_words(words: torch.Tensor, columns: int) -> torch.Tensor:
    """compressed-tensors' ``weight_packed``, int32 ``[..., ⌈columns/8⌉]`` → this format's uint8 ``[..., ⌈columns/2⌉]``.

    A view, not a copy, of contiguous words.

    Raises:
        TensorError: not int32, or rows of the wrong length.
    """
    expected = -(-columns // CODES_PER_WORD)
    if words.dtype != torch.int32 or words.dim() == 0 or words.shape[-1] != expected:
        raise TensorError(
            f"int4: rows of {columns} values need torch.int32 words [..., {expected}], "
            f"got {words.dtype} {tuple(words.shape)}"
        )
    return words.contiguous().view(torch.uint8)[..., : -(-columns // 2)]


def to_words(data: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`from_words`: uint8 ``[..., ⌈K/2⌉]`` → int32 ``[..., ⌈K/8⌉]``, unused nibbles zero."""
    return torch.nn.functional.pad(data, (0, -data.shape[-1] % 4)).contiguous().view(torch.int32)


register_format(Int4())
