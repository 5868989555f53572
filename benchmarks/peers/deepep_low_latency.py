"""DeepEP's low-latency kernels (``deep_ep.Buffer`` with ``low_latency_mode``).

Written from DeepEP at dd758ca, not run. Dispatch takes BF16 values and quantizes to FP8 itself where the case is FP8 or
MXFP8 (scales of 128 values); it sends a copy for every selected expert and combine returns one for each, weighted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.peers.known_rows import KnownRows
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.errors import ConfigError

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # for which its kernels are compiled
MAX_TOP_K = 11
MAX_TOKENS = 256  # beyond it, its queues are too short (seen with its v1.2.1)


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    shape = case.shape
    if shape.hidden_size not in HIDDEN_SIZES:
        return f"its rows have {', '.join(map(str, HIDDEN_SIZES))} values, not {shape.hidden_size}"
    if shape.top_k > MAX_TOP_K:
        return f"its top_k is at most {MAX_TOP_K}, not {shape.top_k}"
    if shape.num_experts % case.ep_size:
        return f"{shape.num_experts} experts do not divide by {case.ep_size} ranks"
    return None if case.tokens <= MAX_TOKENS else f"it takes at most {MAX_TOKENS} tokens a rank, not {case.tokens}"


@contextmanager
def works(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The local rank's work."""
    if ranks.group is None:
        raise ConfigError("peer 'deepep-ll' needs a process a rank (launch 'process')")
    import deep_ep

    (rank,) = ranks.local
    shape, local = case.shape, case.shape.num_experts // ranks.size
    known = KnownRows(rank, case)
    room = deep_ep.Buffer.get_low_latency_rdma_size_hint(case.tokens, shape.hidden_size, ranks.size, shape.num_experts)
    buffer = deep_ep.Buffer(
        ranks.group, 0, room, low_latency_mode=True, num_qps_per_rank=local, explicitly_destroy=True
    )
    ids = known.ids.to(deep_ep.topk_idx_t)
    quantizes = shape.activation_format in ("fp8", "mxfp8")
    size = (local, ranks.size * case.tokens, shape.hidden_size)
    partials = torch.empty(size, dtype=torch.bfloat16, device=rank.device)
    output = torch.empty(case.tokens, shape.hidden_size, dtype=torch.bfloat16, device=rank.device)
    last: dict[str, Any] = {}

    def dispatch() -> None:
        _, _, last["handle"], _, _ = buffer.low_latency_dispatch(
            known.values,
            ids,
            case.tokens,
            shape.num_experts,
            use_fp8=quantizes,
            round_scale=shape.activation_format == "mxfp8",
        )

    def combine() -> None:
        buffer.low_latency_combine(partials, ids, known.weights, last["handle"], out=output)

    def refresh(repeat: int) -> None:
        known.repeat = repeat
        partials.copy_(known.row(rank.rank).expand_as(partials))
        output.fill_(float("nan"))

    def check() -> None:
        known.compare(output, known.weighted_sum())

    yield [Work({"dispatch": dispatch, "combine": combine}, refresh, check)]
    buffer.destroy()
