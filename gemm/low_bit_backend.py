"""Low-bit weights on Hopper: packed once at load, widened to BF16 in the grouped GEMM's registers.

Weights in MXFP4, NVFP4, INT4 (groups of 32) and MXFP8 stay as large as the checkpoint has them; FP8 with power-of-two
scales of 32×32 or 128×128 values (DeepSeek-V4's shared experts) becomes MXFP8, a 32nd larger. Activations are widened
to BF16 at every step. FC1's output is quantized where the layer says so: MXFP8 in the kernel, whose BF16 rows then hold
MXFP8's values, other formats after it, from FP32.

NVFP4 activations have a second-level scale that BF16 cannot hold beside the first: rows are widened without it, and the
kernel multiplies its sums by it.

Weights that are not packed (their values cannot be, or nobody asked for it) run as in :mod:`moe_layer.gemm.widened`,
with NVFP4 activations through PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch

from moe_layer.errors import TensorError
from moe_layer.gemm import reference, sm90_backend
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.register_tiles import BLOCK_FORMATS, PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.sm90_spec import GroupedSpec
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.gemm.widened import WidenedBackend, quantize_rows, widen_rows
from moe_layer.quant import QuantizedTensor

# Rows are whole 16-byte vectors of BF16, both those that a GEMM reads (K) and those that it writes (N).
VECTOR = 8
# FC1's output formats that the kernel gives itself, and what it then writes: BF16 rows of that format's values.
KERNEL_OUTPUTS = ("bf16", "mxfp8")
# Activations whose rows have a factor each beside their BF16 values.
FACTORED = "nvfp4"


class LowBitBackend(WidenedBackend):
    """Packed weights in place of widened ones; see the module's docstring."""

    name: ClassVar[str] = "sm90-low-bit"

    def __init__(self) -> None:
        super().__init__()
        self._reference = reference.ReferenceBackend()

    def weight_layout(self, weight_format: str, parts: int, rows: int, columns: int) -> RegisterTiles | None:
        if weight_format not in (*PACKED_FORMATS, *BLOCK_FORMATS) or rows % VECTOR or columns % VECTOR:
            return None
        return RegisterTiles(weight_format, parts, rows, columns)

    def grouped_specs(
        self, gate_up: ExpertWeights, down: ExpertWeights, rows: int, activation: Activation, activation_format: str
    ) -> list[GroupedSpec]:
        """As :meth:`ComputeBackend.grouped_specs`. Layers pack all weights that the kernels can address."""
        specs = []
        if gate_up.packed is not None and sm90_backend.whole_vectors(gate_up):
            specs.append(fc1_spec(gate_up, rows, activation, activation_format, activation_format))
        if down.packed is not None and sm90_backend.whole_vectors(down):
            specs.append(fc2_spec(down, rows, result_format(activation_format)))
        return specs

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
        rows = rows_and_factors(x)
        if weights.packed is None or not sm90_backend.served(rows, weights):
            other = self._reference.fc1 if x.format == "nvfp4" else super().fc1
            return other(x, weights, index, activation, output_format, output_global_scale=output_global_scale)
        spec = fc1_spec(weights, sm90_backend.expected_rows(index), activation, x.format, output_format)
        dtype = sm90_backend.OUTPUT_DTYPES[spec.out]
        h = torch.empty(index.slots.numel(), weights.rows, dtype=dtype, device=rows.data.device)
        sm90_backend.grouped_gemm(spec, rows, weights, index, h, None)
        if spec.out == output_format:
            return QuantizedTensor(result_format(output_format), h, None, None, weights.rows)
        return quantize_rows(h, output_format, index, output_global_scale)

    def fc2(self, h: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex) -> torch.Tensor:
        """As :meth:`ComputeBackend.fc2`; BF16 rows."""
        check_operands("fc2", h, weights, index, parts=1)
        rows = rows_and_factors(h)
        if weights.packed is None or not sm90_backend.served(rows, weights):
            other = self._reference.fc2 if h.format == "nvfp4" else super().fc2
            return other(h, weights, index)
        spec = fc2_spec(weights, sm90_backend.expected_rows(index), h.format)
        dtype = sm90_backend.OUTPUT_DTYPES[spec.out]
        out = torch.empty(rows.data.shape[0], weights.rows, dtype=dtype, device=rows.data.device)
        sm90_backend.grouped_gemm(spec, rows, weights, index, out, None)
        return out


def fc1_spec(
    weights: ExpertWeights, rows: int, activation: Activation, row_format: str, output_format: str
) -> GroupedSpec:
    """What FC1 of packed weights launches for ``rows`` expected rows, given in ``row_format``."""
    out = output_format if output_format in KERNEL_OUTPUTS else "fp32"
    return sm90_backend.grouped_spec(weights, rows, out, activation=activation, token_factors=row_format == FACTORED)


def fc2_spec(weights: ExpertWeights, rows: int, row_format: str) -> GroupedSpec:
    """What FC2 of packed weights launches for ``rows`` expected rows, given in ``row_format``; BF16 rows."""
    return sm90_backend.grouped_spec(weights, rows, "bf16", activation=None, token_factors=row_format == FACTORED)


def result_format(output_format: str) -> str:
    """Of FC1's rows, asked for in ``output_format``: what the kernel rounds to that lies in BF16."""
    return "bf16" if output_format in KERNEL_OUTPUTS else output_format


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)


def rows_and_factors(x: QuantizedTensor) -> QuantizedTensor:
    """Activations as BF16 rows; of NVFP4 without its second-level scale, which becomes the rows' own."""
    if x.format != FACTORED:
        return widen_rows(x)
    rows = widen_rows(replace(x, global_scale=_one(x.data.device)))
    return replace(rows, global_scale=x.global_scale)


def check_operands(stage: str, x: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex, *, parts: int) -> None:
    """Raise TensorError where the operands of a stage do not fit each other, or do not lie on one GPU."""
    reference.check_operands(stage, x, weights, index, parts=parts)
    for name, tensor in (("rows", x.data), ("weights", weights.storage), ("offsets", index.offsets)):
        if tensor.device.type != "cuda" or tensor.device != x.data.device:
            raise TensorError(f"{stage}: {name} lie on {tensor.device}, rows on {x.data.device}; kernels need one GPU")
    if x.data.dim() != 2 or (x.data.numel() and x.data.stride(1) != 1):
        raise TensorError(f"{stage}: rows must be [rows, K] with contiguous rows, got strides {x.data.stride()}")
