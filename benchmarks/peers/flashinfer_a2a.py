"""FlashInfer's one-sided all-to-all (``flashinfer.comm.MoeAlltoAll``), the paper's own Fence.

Written from flashinfer at fb28d72, not run. Its time contains the sanitizing of ids past each count.
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

TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # for which its kernels are compiled


def cannot(case: Case) -> str | None:
    """Why it does not do a case."""
    if case.shape.top_k not in TOP_KS:
        return f"its top_k is one of {', '.join(map(str, TOP_KS))}, not {case.shape.top_k}"
    return None if case.ep_size <= 64 else f"it serves 64 ranks, not {case.ep_size}"


@contextmanager
def works(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The local rank's work."""
    if ranks.group is None:
        raise ConfigError("peer 'flashinfer' needs a process a rank (launch 'process')")
    from flashinfer.comm import Mapping, MoeAlltoAll
    from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend

    (rank,) = ranks.local
    size = ranks.size
    mapping = Mapping(rank=rank.rank, world_size=size, gpus_per_node=size, tp_size=size, moe_ep_size=size)
    known = KnownRows(rank, case)
    payloads = [known.rows, *([] if known.scales is None else [known.scales]), known.ids, known.weights]
    transport = MoeAlltoAll(
        mapping,
        max_num_tokens=case.tokens,
        top_k=case.shape.top_k,
        num_experts=case.shape.num_experts,
        hidden_size=case.shape.hidden_size,
        mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend(ranks.control)),
    )
    last: dict[str, Any] = {}

    def dispatch() -> None:
        transport.dispatch(
            known.ids, payloads, case.tokens, invalid_token_expert_id=-1, expert_id_payload_index=len(payloads) - 2
        )

    def combine() -> None:
        last["input"] = transport.get_combine_payload_tensor_in_workspace(
            case.tokens, case.shape.hidden_size, torch.bfloat16
        )
        last["output"] = transport.combine(last["input"], case.tokens, payload_in_workspace=True)

    def refresh(repeat: int) -> None:
        known.repeat = repeat
        if "input" in last:
            last["input"].copy_(known.row(rank.rank).expand_as(last["input"]))
            last["output"].fill_(float("nan"))

    def check() -> None:
        if known.repeat:  # the first step finds nothing in the combine input yet
            known.compare(last["output"], known.sum_over_ranks())

    yield [Work({"dispatch": dispatch, "combine": combine}, refresh, check)]
