"""DeepEP's normal kernels between the GPUs of a host (``deep_ep.Buffer``).

Written from DeepEP at dd758ca, not run. A step computes the layout, as every layer must, and receives into buffers for
the worst case, so that nothing waits for the host. FP8 rows bring FP32 scales of 128 values, other formats BF16 rows.
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

GPUS = (2, 4, 8)  # of a host, for which its kernels are compiled


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    if case.ep_size not in GPUS:
        return f"between the GPUs of a host it serves {', '.join(map(str, GPUS))} ranks, not {case.ep_size}"
    if case.shape.num_experts % case.ep_size:
        return f"{case.shape.num_experts} experts do not divide by {case.ep_size} ranks"
    return None if case.shape.hidden_size % 128 == 0 else "its rows are multiples of 128 values"


@contextmanager
def works(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The local rank's work."""
    if ranks.group is None:
        raise ConfigError("peer 'deepep' needs a process a rank (launch 'process')")
    import deep_ep

    (rank,) = ranks.local
    known = KnownRows(rank, case)
    row_bytes = 2 * case.shape.hidden_size
    configs = (deep_ep.Buffer.get_dispatch_config(ranks.size), deep_ep.Buffer.get_combine_config(ranks.size))
    room = max(config.get_nvl_buffer_size_hint(row_bytes, ranks.size) for config in configs)
    buffer = deep_ep.Buffer(ranks.group, room, 0, explicitly_destroy=True)
    ids = known.ids.to(deep_ep.topk_idx_t)
    x: Any = known.values
    if case.shape.activation_format == "fp8":
        x = (known.rows.view(torch.float8_e4m3fn), known.scales)
    last: dict[str, Any] = {}
    worst = ranks.size * case.tokens
    partials = torch.empty(worst, case.shape.hidden_size, dtype=torch.bfloat16, device=rank.device)

    def dispatch() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, case.shape.num_experts)
        *_, last["handle"], _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=known.weights,
            num_worst_tokens=worst,
        )

    def combine() -> None:
        last["output"], _, _ = buffer.combine(partials, last["handle"])

    def refresh(repeat: int) -> None:
        known.repeat = repeat
        partials.copy_(known.row(rank.rank).expand_as(partials))

    def check() -> None:
        known.compare(last["output"], known.sum_over_ranks())

    yield [Work({"dispatch": dispatch, "combine": combine}, refresh, check)]
    buffer.destroy()
