"""PyTorch's grouped product (``torch._grouped_mm``) of BF16 rows already in order: no gather, no activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_layer.benchmarks.gemm_case import Case
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.weights import ExpertWeights


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    if case.operands != "bf16":
        return f"it multiplies BF16, not {case.operands}"
    return None if hasattr(torch, "_grouped_mm") else "this PyTorch has no _grouped_mm"


def call(case: Case, weights: ExpertWeights, index: ExpertIndex) -> Callable[[], Any]:
    """The product of as many random rows."""
    x = torch.randn(sum(case.counts()), case.k, device=weights.data.device).bfloat16()
    transposed = weights.data.flatten(1, 2).transpose(1, 2)
    return lambda: torch._grouped_mm(x, transposed, offs=index.offsets[1:])
