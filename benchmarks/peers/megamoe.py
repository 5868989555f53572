"""DeepGEMM's MegaMoE: dispatch, both products and combine in one kernel, MXFP4 weights and MXFP8 activations.

Written from DeepGEMM at 54e2261, not run; that version's kernels are for sm_100. A step copies its inputs into the
symmetric buffer, as its own test does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.layer_case import Case
from moe_layer.benchmarks.layer_truth import check_rows
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.errors import ConfigError

LIMIT = 5e-2  # relative L2; its conversions to MXFP4 and MXFP8 round scales otherwise than the OCP's


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    shape = case.shape
    if (case.weight_format, shape.activation_format) != ("mxfp4", "mxfp8"):
        return f"it multiplies mxfp4 × mxfp8, not {case.weight_format} × {shape.activation_format}"
    if shape.activation.kind != "swiglu":
        return f"its activation is SwiGLU, not {shape.activation.kind}"
    if shape.hidden_size % 128 or shape.intermediate_size % 128 or shape.num_experts % case.ep_size:
        return "its widths are multiples of 128, its experts of the ranks"
    return None


@contextmanager
def works(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The local rank's work."""
    if ranks.group is None:
        raise ConfigError("peer 'megamoe' needs a process a rank (launch 'process')")
    import deep_gemm
    from deep_gemm.utils import per_token_cast_to_fp4, per_token_cast_to_fp8

    (rank,) = ranks.local
    shape, device = case.shape, rank.device
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        ranks.group, shape.num_experts, case.tokens, shape.top_k, shape.hidden_size, shape.intermediate_size
    )

    def packed(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, n, k = experts.shape
        codes = torch.empty(count, n, k // 2, dtype=torch.int8, device=device)
        scales = torch.empty(count, n, k // 32, dtype=torch.float32, device=device)
        for i in range(count):
            codes[i], scales[i] = per_token_cast_to_fp4(experts[i], use_ue8m0=True, gran_k=32)
        return codes, deep_gemm.transform_sf_into_required_layout(scales, n, k, (1, 32), count)

    gate_up, down = (packed(w) for w in case.bf16_experts(rank.rank, device))
    gate_up, down = deep_gemm.transform_weights_for_mega_moe(gate_up, down)
    ids, weights = case.ids(rank.rank).to(device).long(), case.weights(rank.rank).to(device)
    x = torch.empty(case.tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
    output = torch.empty_like(x)
    rows = list(per_token_cast_to_fp8(x.zero_(), use_ue8m0=True, gran_k=32, use_packed_ue8m0=True))

    def step() -> None:
        for target, source in ((buffer.x, rows[0]), (buffer.x_sf, rows[1])):
            target[: case.tokens].copy_(source)
        buffer.topk_idx[: case.tokens].copy_(ids)
        buffer.topk_weights[: case.tokens].copy_(weights)
        deep_gemm.fp8_fp4_mega_moe(output, gate_up, down, buffer, activation_clamp=shape.activation.limit)

    def refresh(repeat: int) -> None:
        x.copy_(case.z(rank.rank, repeat, device))
        fresh = per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
        for mine, new in zip(rows, fresh):
            mine.copy_(new)
        output.fill_(float("nan"))

    yield [Work({"layer": step}, refresh, lambda: check_rows(case, rank.rank, x, output, LIMIT))]
    buffer.destroy()
