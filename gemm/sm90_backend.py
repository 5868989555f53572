"""MoE compute on Hopper GPUs: the stages of :class:`ComputeBackend` by this package's kernels.

Serves BF16 weights with BF16 activations, and FP8 (128×128) weights with FP8 (1×128) activations. No stage waits for
the device or reads anything back, so all of them may be captured in a CUDA graph, once each kernel has run outside of
one. Shapes that the kernels cannot address (rows that are not whole 16-byte vectors) run through PyTorch, with a
warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch

from moe_layer.errors import TensorError
from moe_layer.gemm import finalize_launch, index_launch, reference
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.sm90_spec import SCALE_BLOCK, GroupedSpec
from moe_layer.gemm.tile_choice import choose_tile
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.kernel_cache import anchor, get_kernel
from moe_layer.quant import QuantizedTensor

logger = logging.getLogger(__name__)
ARCH = "sm_90a"
# Registry names → operand types of the kernels.
WEIGHT_DTYPES = {"bf16": "bf16", "fp8_128x128": "fp8"}
ACTIVATION_DTYPES = {"bf16": "bf16", "fp8": "fp8"}
# FC1's outputs by operand type; FP32 is for whoever quantizes it further.
FC1_OUTPUTS = {"bf16": ("bf16", "fp32"), "fp8": ("fp8",)}
# By GroupedSpec.out.
OUTPUT_DTYPES = {
    "bf16": torch.bfloat16, "mxfp8": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
OPERAND_BYTES = {"bf16": 2, "fp8": 1}
VECTOR_BYTES = 16


class Sm90Backend(ComputeBackend):
    """Kernels for sm_90a; see the module's docstring."""

    name: ClassVar[str] = "sm90"

    def __init__(self) -> None:
        self._reference = reference.ReferenceBackend()

    def grouped_specs(
        self, gate_up: ExpertWeights, down: ExpertWeights, rows: int, activation: Activation, activation_format: str
    ) -> list[GroupedSpec]:
        specs = []
        if whole_vectors(gate_up):
            specs.append(fc1_spec(gate_up, rows, activation, activation_format))
        if whole_vectors(down):
            specs.append(fc2_spec(down, rows))
        return specs

    def build_index(
        self,
        topk_ids: torch.Tensor,
        first_expert: int,
        num_local_experts: int,
        *,
        local_table: torch.Tensor | None = None,
    ) -> ExpertIndex:
        table = 0 if local_table is None else local_table.numel()
        if num_local_experts > index_launch.MAX_EXPERTS or table > index_launch.MAX_TABLE:
            return self._reference.build_index(topk_ids, first_expert, num_local_experts, local_table=local_table)
        return index_launch.build_index(topk_ids, first_expert, num_local_experts, local_table=local_table)

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
        spec = fc1_spec(weights, expected_rows(index), activation, output_format)
        if not served(x, weights):
            return self._reference.fc1(
                x, weights, index, activation, output_format, output_global_scale=output_global_scale
            )
        capacity, device = index.slots.numel(), x.data.device
        data = torch.empty(capacity, weights.rows, dtype=OUTPUT_DTYPES[spec.out], device=device)
        scale = None
        if spec.out == "fp8":
            scale = torch.empty(capacity, -(-weights.rows // SCALE_BLOCK), dtype=torch.float32, device=device)
        grouped_gemm(spec, x, weights, index, data, scale)
        return QuantizedTensor(output_format, data, scale, None, weights.rows)

    def fc2(self, h: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex) -> torch.Tensor:
        """As :meth:`ComputeBackend.fc2`; BF16 rows."""
        check_operands("fc2", h, weights, index, parts=1)
        if not served(h, weights):
            return self._reference.fc2(h, weights, index)
        spec = fc2_spec(weights, expected_rows(index))
        out = torch.empty(h.data.shape[0], weights.rows, dtype=OUTPUT_DTYPES[spec.out], device=h.data.device)
        grouped_gemm(spec, h, weights, index, out, None)
        return out

    def finalize(
        self, rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        return finalize_launch.finalize(rows, index, topk_weights, output)


def check_operands(stage: str, x: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex, *, parts: int) -> None:
    """Raise TensorError where the operands of a stage do not fit each other, or are none that the kernels know."""
    reference.check_operands(stage, x, weights, index, parts=parts)
    operands = ACTIVATION_DTYPES.get(x.format), WEIGHT_DTYPES.get(weights.format)
    if None in operands or operands[0] != operands[1]:
        raise TensorError(f"{stage}: no kernel multiplies {x.format} rows by {weights.format} weights")
    for name, tensor in (("rows", x.data), ("weights", weights.data), ("offsets", index.offsets)):
        if tensor.device.type != "cuda" or tensor.device != x.data.device:
            raise TensorError(f"{stage}: {name} lie on {tensor.device}, rows on {x.data.device}; kernels need one GPU")
    if x.data.dim() != 2 or (x.data.numel() and x.data.stride(1) != 1):
        raise TensorError(f"{stage}: rows must be [rows, K] with contiguous rows, got strides {x.data.stride()}")
    if not weights.data.is_contiguous() or (weights.scale is not None and not weights.scale.is_contiguous()):
        raise TensorError(f"{stage}: weights and their scales must be contiguous")
    if x.scale is not None and x.scale.numel() and x.scale.stride(1) != 1:
        raise TensorError(f"{stage}: scales must have contiguous rows, got strides {x.scale.stride()}")


def operand_type(weights: ExpertWeights) -> str:
    """Of the products: ``"bf16"`` or ``"fp8"``."""
    return "bf16" if weights.packed is not None else WEIGHT_DTYPES[weights.format]


def whole_vectors(weights: ExpertWeights) -> bool:
    """Whether there are experts, whose rows and results are whole 16-byte vectors."""
    vector = VECTOR_BYTES // OPERAND_BYTES[operand_type(weights)]
    return weights.num_local_experts > 0 and weights.rows % vector == 0 and weights.columns % vector == 0


def served(x: QuantizedTensor, weights: ExpertWeights) -> bool:
    """Whether the kernels can address the operands: whole 16-byte vectors everywhere."""
    aligned = x.data.data_ptr() % VECTOR_BYTES == 0 and x.data.stride(0) * x.data.element_size() % VECTOR_BYTES == 0
    if not (aligned and whole_vectors(weights)):
        _warn_unserved(weights.rows, weights.columns, weights.format)
        return False
    return True


@cache
def _warn_unserved(n: int, k: int, weight_format: str) -> None:
    logger.warning(
        "N = %d, K = %d in %s: rows are not whole 16-byte vectors; these experts run through PyTorch",
        n,
        k,
        weight_format,
    )


def expected_rows(index: ExpertIndex) -> int:
    """By which tiles are chosen: as many as there can be, if nobody knows better."""
    return index.slots.numel() if index.expected_rows is None else index.expected_rows


def fc1_spec(weights: ExpertWeights, rows: int, activation: Activation, output_format: str) -> GroupedSpec:
    """What FC1 of weights that are not packed launches for ``rows`` expected rows.

    Raises:
        TensorError: no kernel gives rows of that format.
    """
    if output_format not in FC1_OUTPUTS[operand_type(weights)]:
        raise TensorError(f"fc1: {weights.format} weights give no {output_format} rows here")
    return grouped_spec(weights, rows, output_format, activation=activation)


def fc2_spec(weights: ExpertWeights, rows: int) -> GroupedSpec:
    """What FC2 of weights that are not packed launches for ``rows`` expected rows; BF16 rows."""
    return grouped_spec(weights, rows, "bf16", activation=None)


def grouped_spec(
    weights: ExpertWeights, rows: int, out: str, *, activation: Activation | None, token_factors: bool = False
) -> GroupedSpec:
    """The kernel for ``rows`` expected rows and these weights, which lie anywhere, the meta device too.

    Args:
        out, token_factors: as :class:`GroupedSpec` has them.
        activation: makes it FC1, which gathers its rows; None: FC2.
    """
    low_bit, dtype = "" if weights.tiles is None else weights.tiles.kernel_format, operand_type(weights)
    tile = choose_tile(ARCH, low_bit or dtype, rows, weights.num_local_experts)
    return GroupedSpec(
        weights.num_local_experts, weights.parts, weights.rows, weights.columns, dtype, out, tile.tokens,
        activation is not None, activation, tile.cluster, weights=low_bit, token_factors=token_factors,
    )  # fmt: skip


def grouped_gemm(
    spec: GroupedSpec,
    x: QuantizedTensor,
    weights: ExpertWeights,
    index: ExpertIndex,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    """Launch one grouped GEMM on the current stream.

    Packed weights take BF16 rows, which may have an FP32 factor each, or one in common, as their global scale.

    Args:
        spec: of :func:`grouped_spec` for these weights.
        x: ``[S, K]`` read through ``index.slots`` (``spec.gather``), or ``[rows, K]`` in order.
        out: ``[≥ rows, N]`` of ``OUTPUT_DTYPES[spec.out]``; rows past ``index.offsets[-1]`` are left as they are.
        out_scale: ``[≥ rows, ⌈N/128⌉]`` fp32 for FP8 output, else None.
    """
    kernel = grouped_kernel(spec)
    w_scale = weights.factor if spec.weights else weights.scale
    x_scale = x.global_scale if spec.token_factors else x.scale
    # One factor for all rows is one that is read again and again.
    x_stride = 0 if x_scale is None or x_scale.dim() < 2 else x_scale.stride(0) * 4
    kernel(
        anchor(x.data.device),
        weights.storage.data_ptr(), index.offsets.data_ptr(), index.slots.data_ptr(),
        x.data.data_ptr(), x.data.stride(0) * x.data.element_size(),
        0 if x_scale is None else x_scale.data_ptr(), x_stride,
        0 if w_scale is None else w_scale.data_ptr(),
        out.data_ptr(), out.stride(0) * out.element_size(),
        0 if out_scale is None else out_scale.data_ptr(), 0 if out_scale is None else out_scale.stride(0) * 4,
        _multiprocessors(x.data.device) // spec.cluster * spec.cluster,
    )  # fmt: skip


@cache
def grouped_kernel(spec: GroupedSpec) -> Callable[..., None]:
    """The compiled launch function, from memory, disk or the compiler."""
    from moe_layer.gemm import sm90_grouped

    return get_kernel(sm90_grouped.grouped_gemm, spec, sm90_grouped.SIGNATURE, ARCH)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
