"""What vLLM's and SGLang's ``fused_experts`` have in common: all experts on one rank, BF16, without an all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.layer_case import Case
from moe_layer.benchmarks.layer_truth import check_rows
from moe_layer.benchmarks.ranks import Ranks

# Relative L2: FC1's output is rounded to BF16 before and after the activation.
LIMIT = 1e-2

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def why_not(case: Case) -> str | None:
    """Why such a function does not do a case."""
    shape = case.shape
    if case.ep_size != 1:
        return f"one rank computes all experts, but there are {case.ep_size}"
    if (case.weight_format, shape.activation_format) != ("bf16", "bf16"):
        return f"called with BF16 here, not {case.weight_format} × {shape.activation_format}"
    if shape.activation.kind != "swiglu" or shape.activation.limit is not None:
        return "called with plain SwiGLU here"
    return None


@contextmanager
def works_of(ranks: Ranks, case: Case, experts: Experts) -> Iterator[list[Work]]:
    """The local rank's work; ``experts(hidden_states, w1, w2, topk_weights, topk_ids)``."""
    (rank,) = ranks.local
    gate_up, down = case.bf16_experts(0, rank.device)
    ids, weights = case.ids(0).to(rank.device), case.weights(0).to(rank.device)
    x = torch.empty(case.tokens, case.shape.hidden_size, dtype=torch.bfloat16, device=rank.device)
    last: dict[str, Any] = {}

    def step() -> None:
        last["output"] = experts(x, gate_up, down, weights, ids)

    def refresh(repeat: int) -> None:
        x.copy_(case.z(0, repeat, rank.device))
        if "output" in last:
            last["output"].fill_(float("nan"))

    yield [Work({"layer": step}, refresh, lambda: check_rows(case, 0, x, last["output"], LIMIT))]
