"""vLLM's ``fused_experts``: all experts on one rank, in Triton, BF16. Written from its sources, not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.layer_case import Case
from moe_layer.benchmarks.peers.fused_experts import why_not, works_of
from moe_layer.benchmarks.ranks import Ranks


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    return why_not(case)


@contextmanager
def works(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The local rank's work."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    with works_of(ranks, case, fused_experts) as found:
        yield found
