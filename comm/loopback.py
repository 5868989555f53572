"""One rank: the layer's stages without communication.

Slot i of the only region is token i, so where T̂ = T the dispatched tensors are the caller's own, not copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from moe_layer.comm.base import INVALID_EXPERT_ID, DispatchResult, ExpertParallelComm
from moe_layer.comm.channel import DEFAULT_TIMEOUT_S, Channel
from moe_layer.comm.destinations import clean_ids
from moe_layer.comm.encoder import Encoder, encoded
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.comm.rows import Workspace, as_typed_rows, row_bytes, row_shape
from moe_layer.comm.validation import check_combine, check_dispatch, check_partial_dtype


class LoopbackChannel(Channel):
    """The channel of a process that holds every expert. Nothing waits, so ``timeout_s`` is never used."""

    def __init__(self, *, max_tokens_per_rank: int = 4096, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(None, max_tokens_per_rank=max_tokens_per_rank, timeout_s=timeout_s)
        self.workspace = Workspace()

    def communicator(self, placement: ExpertPlacement, hidden_size: int) -> LoopbackComm:
        self.check_layer(placement, hidden_size)
        return LoopbackComm(self, placement, hidden_size)

    def destroy(self) -> None:
        super().destroy()
        self.workspace.clear()


@dataclass(frozen=True)
class _Step:
    """What combine must know of its dispatch."""

    tokens_per_rank: int
    has_destination: torch.Tensor  # [T] bool


class LoopbackComm(ExpertParallelComm):
    """:class:`ExpertParallelComm` on one rank."""

    protocol: ClassVar[str] = "loopback"
    channel: LoopbackChannel
    _step: _Step

    @torch.no_grad()
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        encoder: Encoder | None = None,
    ) -> DispatchResult:
        self.channel.begin(self)
        try:
            hidden_states, hidden_states_scale = encoded(encoder, hidden_states, hidden_states_scale)
            check_dispatch(self.ep_rank, hidden_states, topk_ids, topk_weights, hidden_states_scale)
            num_slots = self.channel.tokens_per_rank(hidden_states.shape[0], runtime_max_tokens_per_rank)
            ids = clean_ids(topk_ids, self.placement.num_experts)
            result = DispatchResult(
                hidden_states=self._region("hidden_states", hidden_states, num_slots),
                topk_ids=self._region("topk_ids", ids, num_slots),
                topk_weights=None if topk_weights is None else self._region("topk_weights", topk_weights, num_slots),
                tokens_per_rank=num_slots,
                hidden_states_scale=(
                    None if hidden_states_scale is None else self._region("scale", hidden_states_scale, num_slots)
                ),
            )
            result.topk_ids[hidden_states.shape[0] :] = INVALID_EXPERT_ID
            self._step = _Step(num_slots, (ids >= 0).any(1))
        except BaseException:
            self.channel.end()
            raise
        self.channel.step += 1
        return result

    def get_combine_input_buffer(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        self.channel.check_in_flight(self, "get_combine_input_buffer")
        check_partial_dtype(self.ep_rank, "the combine input buffer", dtype)
        shape = (self._step.tokens_per_rank, self.hidden_size)
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        buffer = self.channel.workspace.take("combine", num_bytes, self._step.has_destination.device)
        return as_typed_rows(buffer, shape[0], shape[1:], dtype)

    @torch.no_grad()
    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        self.channel.check_in_flight(self, "combine")
        try:
            has_destination = self._step.has_destination
            num_tokens = has_destination.shape[0]
            check_combine(
                self.ep_rank, expert_output, output,
                num_slots=self._step.tokens_per_rank, num_tokens=num_tokens, hidden_size=self.hidden_size,
                device=has_destination.device,
            )  # fmt: skip
            # The sum of one addend starts from +0.0 too, which turns −0 into +0, as on any number of ranks.
            total = expert_output[:num_tokens].to(torch.float32) + 0.0
            total.masked_fill_(~has_destination[:, None], 0.0)
            if output is None:
                return total.to(expert_output.dtype)
            return output.copy_(total)
        finally:
            self.channel.end()

    def _region(self, name: str, rows: torch.Tensor, num_slots: int) -> torch.Tensor:
        """``rows`` followed by undefined ones, ``num_slots`` in all."""
        if rows.shape[0] == num_slots:
            return rows
        buffer = self.channel.workspace.take(name, num_slots * row_bytes(rows), rows.device)
        region = as_typed_rows(buffer, num_slots, row_shape(rows), rows.dtype)
        region[: rows.shape[0]].copy_(rows)
        return region
