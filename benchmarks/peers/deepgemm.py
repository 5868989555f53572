"""DeepGEMM's grouped products: rows already in order, padded for each expert; no gather, no activation.

Written from DeepGEMM at 54e2261, not run. Few rows an expert take its masked form, a fixed number of rows for each;
many its contiguous one, whose rows are padded to its alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_layer.benchmarks.gemm_case import Case
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import get_format

MASKED_ROWS = 64  # up to so many rows an expert; the padding of the contiguous form would be most of it


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    if case.operands not in ("bf16", "fp8"):
        return f"it multiplies BF16 or FP8, not {case.operands}"
    if case.operands == "fp8" and (case.n % 128 or case.k % 128):
        return f"its scales are of 128 × 128 values, but a part is {case.n} × {case.k}"
    return None


def call(case: Case, weights: ExpertWeights, index: ExpertIndex) -> Callable[[], Any]:
    """The product of as many random rows."""
    import deep_gemm

    device, counts = weights.data.device, case.counts()
    masked = max(counts) <= MASKED_ROWS
    align = 1 if masked else deep_gemm.get_mk_alignment_for_contiguous_layout()
    padded = [max(counts)] * len(counts) if masked else [-(-count // align) * align for count in counts]
    rows = torch.randn(sum(padded), case.k, device=device).bfloat16()
    n = case.parts * case.n
    out = torch.empty(sum(padded), n, dtype=torch.bfloat16, device=device)
    a: Any = rows
    b: Any = weights.data.flatten(1, 2)
    if case.operands == "fp8":
        q = get_format("fp8").quantize(rows)
        assert q.scale is not None and weights.scale is not None
        a, b = (q.data, q.scale), (b, weights.scale.flatten(1, 2))
    kind = "fp8" if case.operands == "fp8" else "bf16"
    if masked:
        shape = (len(counts), max(counts))
        a = tuple(t.view(*shape, -1) for t in a) if isinstance(a, tuple) else a.view(*shape, -1)
        filled = torch.tensor(counts, dtype=torch.int32, device=device)
        product = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_masked")
        return lambda: product(a, b, out.view(*shape, n), filled, max(1, case.tokens))
    layout = torch.full((sum(padded),), -1, dtype=torch.int32, device=device)
    begin = 0
    for expert, (count, whole) in enumerate(zip(counts, padded)):
        layout[begin : begin + count] = expert
        begin += whole
    product = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
    return lambda: product(a, b, out, layout)
