"""One rank of a group that is not there: what peers would have sent lies in the workspace before the step.

For timing a rank's own work at the model's real number of ranks and experts on one GPU. Dispatch returns prepared
tensors, combine takes partial results and returns nothing of use; neither launches anything.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from moe_layer.comm import Channel, DispatchResult, ExpertParallelComm, ExpertPlacement
from moe_layer.comm.encoder import Encoder


class StandInChannel(Channel):
    """The channel of one rank of ``ep_size``.

    Args:
        ep_size: ranks.
        max_tokens_per_rank: T̂.
        ep_rank: this rank.

    Attributes:
        received: what every dispatch returns; set it before the first.
        partials: ``[ep_size*T̂, hidden]``, what the last step left for combine; None before it.
    """

    def __init__(self, ep_size: int, *, max_tokens_per_rank: int, ep_rank: int = 0) -> None:
        super().__init__(None, max_tokens_per_rank=max_tokens_per_rank)
        self.ep_size, self.ep_rank = ep_size, ep_rank
        self.received: DispatchResult | None = None
        self.partials: torch.Tensor | None = None

    def communicator(self, placement: ExpertPlacement, hidden_size: int) -> StandInComm:
        self.check_layer(placement, hidden_size)
        return StandInComm(self, placement, hidden_size)


class StandInComm(ExpertParallelComm):
    """:class:`ExpertParallelComm` without communication."""

    protocol: ClassVar[str] = "none"
    channel: StandInChannel

    def fuses(self, encoder: Encoder, hidden_states: torch.Tensor, runtime_max_tokens_per_rank: int | None) -> bool:
        return True  # so that nothing quantizes before it

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
        assert self.channel.received is not None
        return self.channel.received

    def get_combine_input_buffer(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        received = self.channel.received
        assert received is not None
        shape, device = (received.topk_ids.shape[0], self.hidden_size), received.topk_ids.device
        if self.channel.partials is None:
            self.channel.partials = torch.empty(shape, dtype=dtype, device=device)
        return self.channel.partials

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        self.channel.end()
        return expert_output[:0] if output is None else output
