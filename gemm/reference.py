"""MoE compute in PyTorch: any registered activation format with any registered weight format, on any device.

Operands are widened exactly to fp32, one expert at a time (so that memory stays at one expert's fp32 weights beyond the
quantized ones), and multiplied in fp32. What a row becomes depends on that row and its expert alone, to the bit:
products go through :func:`~moe_layer.gemm.matmul.row_matmul`, all else is elementwise. ``fc1``, ``fc2`` and
``finalize`` read offsets back to the host; ``build_index`` does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

import torch

from moe_layer.errors import CapacityError, TensorError
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.matmul import row_matmul
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor, get_format


class ReferenceBackend(ComputeBackend):
    """The stages in PyTorch; the truth that kernels are compared with, and what runs where no kernel does."""

    name: ClassVar[str] = "reference"

    def build_index(
        self,
        topk_ids: torch.Tensor,
        first_expert: int,
        num_local_experts: int,
        *,
        local_table: torch.Tensor | None = None,
    ) -> ExpertIndex:
        if topk_ids.dim() != 2 or topk_ids.dtype != torch.int32:
            raise TensorError(f"topk_ids must be [slots, top_k] int32, got {list(topk_ids.shape)} {topk_ids.dtype}")
        slots, top_k = topk_ids.shape
        selections = slots * top_k
        if selections >= 2**31:
            raise CapacityError(f"{slots} slots × top_k {top_k} = {selections} selections do not fit int32 row numbers")
        # Experts that are not here sort behind all that are.
        elsewhere = num_local_experts
        if local_table is None:
            here = (topk_ids >= first_expert) & (topk_ids < first_expert + num_local_experts)
            local = torch.where(here, topk_ids - first_expert, elsewhere)
        else:
            known = (topk_ids >= 0) & (topk_ids < local_table.numel())
            local = local_table[torch.where(known, topk_ids, 0).long()]
            local = torch.where(known & (local >= 0), local, elsewhere)
        key, order = torch.sort(local.flatten(), stable=True)
        experts = torch.arange(num_local_experts + 1, dtype=key.dtype, device=key.device)
        offsets = torch.searchsorted(key, experts, out_int32=True)
        numbers = torch.arange(selections, dtype=torch.int32, device=key.device)
        rows = torch.empty_like(numbers).scatter_(0, order, numbers).view(slots, top_k)
        rows = torch.where(local < elsewhere, rows, -1)
        return ExpertIndex(offsets, (order // max(top_k, 1)).int(), rows)

    def fc1(
        self,
        x: QuantizedTensor,
        weights: ExpertWeights,
        index: ExpertIndex,
        activation: Activation,
        output_format: str,
        *,
        output_global_scale: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        check_operands("fc1", x, weights, index, parts=2)
        x_format, w_format, h_format = get_format(x.format), get_format(weights.format), get_format(output_format)
        outputs = []
        for expert, start, stop in _experts_with_rows(index):
            slots = index.slots[start:stop].long()
            rows = x_format.dequantize(_take_rows(x, slots))
            gate = row_matmul(rows, w_format.dequantize(weights.expert(expert, 0)))
            up = row_matmul(rows, w_format.dequantize(weights.expert(expert, 1)))
            scale = None if output_global_scale is None else output_global_scale[expert]
            outputs.append(h_format.quantize(activation(gate, up), global_scale=scale))
        if not outputs:
            return h_format.quantize(torch.zeros(0, weights.rows, device=x.data.device))
        return _concatenate(outputs)

    def fc2(self, h: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex) -> torch.Tensor:
        check_operands("fc2", h, weights, index, parts=1)
        h_format, w_format = get_format(h.format), get_format(weights.format)
        out = torch.empty(h.data.shape[0], weights.rows, dtype=torch.float32, device=h.data.device)
        for expert, start, stop in _experts_with_rows(index):
            rows = h_format.dequantize(_take_rows(h, slice(start, stop)))
            out[start:stop] = row_matmul(rows, w_format.dequantize(weights.expert(expert, 0)))
        return out

    def finalize(
        self, rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        slots, top_k = index.rows.shape
        if topk_weights.shape != (slots, top_k) or topk_weights.dtype != torch.float32:
            raise TensorError(
                f"topk_weights must be [{slots}, {top_k}] float32, got {list(topk_weights.shape)} {topk_weights.dtype}"
            )
        if output.shape != (slots, rows.shape[1]):
            raise TensorError(f"output must be [{slots}, {rows.shape[1]}], got {list(output.shape)}")
        used = (index.rows >= 0).any(1).nonzero().squeeze(1)
        row_of, weight_of = index.rows[used], topk_weights[used]
        total = torch.zeros(used.numel(), rows.shape[1], dtype=torch.float32, device=rows.device)
        for j in range(top_k):
            present = (row_of[:, j] >= 0).nonzero().squeeze(1)
            term = rows[row_of[present, j].long()].float() * weight_of[present, j, None]
            total[present] += term
        output[used] = total.to(output.dtype)
        return output


def _experts_with_rows(index: ExpertIndex) -> Iterator[tuple[int, int, int]]:
    """(local expert, first row, end row) of every expert that has rows; one copy of the offsets to the host."""
    offsets = index.offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(offsets)):
        if start < stop:
            yield expert, start, stop


def _take_rows(q: QuantizedTensor, rows: torch.Tensor | slice) -> QuantizedTensor:
    scale = None if q.scale is None else q.scale[rows]
    per_row = q.global_scale is not None and q.global_scale.dim() > 0
    global_scale = q.global_scale[rows] if per_row and q.global_scale is not None else q.global_scale
    return QuantizedTensor(q.format, q.data[rows], scale, global_scale, q.columns)


def _concatenate(parts: list[QuantizedTensor]) -> QuantizedTensor:
    """The rows of all parts; scalar global scales become one per row."""

    def join(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [t for t in tensors if t is not None]
        return torch.cat(present) if present else None

    scales = [
        None if p.global_scale is None else p.global_scale.reshape(-1, 1).expand(p.data.shape[0], 1) for p in parts
    ]
    first = parts[0]
    data = torch.cat([p.data for p in parts])
    return QuantizedTensor(first.format, data, join([p.scale for p in parts]), join(scales), first.columns)


def check_operands(stage: str, x: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex, *, parts: int) -> None:
    """Raise TensorError where rows, weights and index of a stage do not fit each other."""
    if weights.parts != parts:
        raise TensorError(f"{stage}: weights must have {parts} part(s) an expert, got {weights.parts}")
    if weights.columns != x.columns:
        raise TensorError(f"{stage}: rows have {x.columns} columns, but the weights take {weights.columns}")
    if index.offsets.numel() != weights.num_local_experts + 1:
        raise TensorError(
            f"{stage}: the index counts {index.offsets.numel() - 1} local experts, "
            f"but there are weights of {weights.num_local_experts}"
        )
