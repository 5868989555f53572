"""Formats without kernels of their own, on the BF16 kernels: operands are widened to BF16.

Weights are widened once, at their first use, and kept: twice the bytes of 8-bit weights, four times those of 4-bit
ones, beside the originals (``state_dict`` stays as the checkpoint has it). A warning says how much. Activations are
widened at every step, and quantized where the layer says they are: between FC1 and FC2 too.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.sm90_backend import Sm90Backend
from moe_layer.gemm.sm90_spec import GroupedSpec
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor, get_format

logger = logging.getLogger(__name__)
FC1_OUTPUT = "fp32"  # quantized afterwards


class WidenedBackend(ComputeBackend):
    """Any weight and activation format on the BF16 kernels; see the module's docstring."""

    name: ClassVar[str] = "sm90-widened"

    def __init__(self) -> None:
        self._kernels = Sm90Backend()
        # By the identity of the tensor that holds the original; an entry dies with it.
        self._widened: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def grouped_specs(
        self, gate_up: ExpertWeights, down: ExpertWeights, rows: int, activation: Activation, activation_format: str
    ) -> list[GroupedSpec]:
        gate_up, down = (bf16_weights(weights, torch.device("meta")) for weights in (gate_up, down))
        return self._kernels.grouped_specs(gate_up, down, rows, activation, FC1_OUTPUT)

    def build_index(
        self,
        topk_ids: torch.Tensor,
        first_expert: int,
        num_local_experts: int,
        *,
        local_table: torch.Tensor | None = None,
    ) -> ExpertIndex:
        return self._kernels.build_index(topk_ids, first_expert, num_local_experts, local_table=local_table)

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
        h = self._kernels.fc1(widen_rows(x), self._wide(weights), index, activation, FC1_OUTPUT).data
        return quantize_rows(h, output_format, index, output_global_scale)

    def fc2(self, h: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex) -> torch.Tensor:
        return self._kernels.fc2(widen_rows(h), self._wide(weights), index)

    def finalize(
        self, rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        return self._kernels.finalize(rows, index, topk_weights, output)

    def _wide(self, weights: ExpertWeights) -> ExpertWeights:
        if weights.format == "bf16":
            return weights
        found = self._widened.get(weights.storage)
        if found is None or found[0] != weights.storage._version:
            found = (weights.storage._version, widen_weights(weights))
            self._widened[weights.storage] = found
            logger.warning(
                "%d experts × %d × %d in %s have no kernel here: widened to BF16, %.2f GiB more memory",
                weights.num_local_experts, weights.parts * weights.rows, weights.columns, weights.format,
                found[1].data.nbytes / 2**30,
            )  # fmt: skip
        wide: ExpertWeights = found[1]
        return wide


def widen_rows(x: QuantizedTensor) -> QuantizedTensor:
    """Activations as BF16."""
    if x.format == "bf16":
        return x
    return QuantizedTensor("bf16", get_format(x.format).dequantize(x, torch.bfloat16), None, None, x.columns)


def quantize_rows(
    h: torch.Tensor, output_format: str, index: ExpertIndex, global_scale: torch.Tensor | None
) -> QuantizedTensor:
    """FC1's output in the format that FC2 takes.

    Args:
        h: fp32 ``[rows, N]``, grouped by expert.
        global_scale: ``[num_local_experts]`` fp32 for two-level formats, or None for one per row.
    """
    scale = None
    if global_scale is not None:
        # Rows past the last expert's get whatever scale.
        numbers = torch.arange(h.shape[0], dtype=torch.int32, device=h.device)
        expert = torch.searchsorted(index.offsets[1:], numbers, right=True)
        scale = global_scale[expert.clamp_(max=global_scale.numel() - 1)].unsqueeze(1)
    return get_format(output_format).quantize(h, global_scale=scale)


def widen_weights(weights: ExpertWeights) -> ExpertWeights:
    """Weights as BF16, one part of one expert at a time."""
    fmt, wide = get_format(weights.format), bf16_weights(weights, weights.storage.device)
    for expert in range(weights.num_local_experts):
        for part in range(weights.parts):
            wide.data[expert, part] = fmt.dequantize(weights.expert(expert, part), torch.bfloat16)
    return wide


def bf16_weights(like: ExpertWeights, device: torch.device) -> ExpertWeights:
    """Room for as many BF16 weights as ``like`` has."""
    shape = (like.num_local_experts, like.parts, like.rows, like.columns)
    return ExpertWeights("bf16", torch.empty(shape, dtype=torch.bfloat16, device=device), None, None, like.columns)
