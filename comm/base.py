"""The contract of an expert-parallel all-to-all (paper §3; the interface is FlashInfer's ``MoEEpCommunication``).

Rank-major layout: what a rank receives is ``ep_size`` regions of ``T̂`` slots; only source rank s writes region s. A
token takes at most one slot on a rank, however many of that rank's experts it selects, and brings all its ``top_k``
ids and weights. A slot without a token has every id −1; its other contents are undefined and must not be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from moe_layer.comm.channel import Channel
    from moe_layer.comm.encoder import Encoder
    from moe_layer.comm.placement import ExpertPlacement

INVALID_EXPERT_ID = -1
MAX_TOP_K = 32
ROW_ALIGNMENT = 16  # bytes; every payload row of a workspace starts so aligned, whatever its length


@dataclass(frozen=True)
class DispatchResult:
    """What a rank received. Flat views over ``ep_size * tokens_per_rank`` slots, valid until the matching combine.

    Attributes:
        hidden_states: ``[ep_size*T̂, *row]`` in the dtype dispatched.
        topk_ids: ``[ep_size*T̂, top_k]`` int32 global expert ids; a slot without a token has −1 in every position.
            Ids of other ranks' experts, and ids that the source passed out of range, are −1 or another rank's id:
            compute evaluates local ids only.
        topk_weights: ``[ep_size*T̂, top_k]`` fp32, or None where none were dispatched.
        tokens_per_rank: T̂ of this step, the slots of a region.
        hidden_states_scale: ``[ep_size*T̂, *scale_row]``, or None where none was dispatched.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_rank: int
    hidden_states_scale: torch.Tensor | None = None


class ExpertParallelComm(ABC):
    """Dispatch and combine of one layer, over a :class:`Channel` that the layers of a model share.

    Args:
        channel: the shared state.
        placement: which rank holds which expert.
        hidden_size: width of the partial results that combine returns.

    One dispatch/combine pair is in flight per channel at a time; all ranks issue the same sequence of calls.
    """

    protocol: ClassVar[str]
    encodes_in_kernel: ClassVar[bool] = False  # whether an encoder's kernel form is of any use

    def __init__(self, channel: Channel, placement: ExpertPlacement, hidden_size: int) -> None:
        self.channel = channel
        self.placement = placement
        self.hidden_size = hidden_size

    @property
    def ep_rank(self) -> int:
        return self.channel.ep_rank

    @property
    def ep_size(self) -> int:
        return self.channel.ep_size

    def reserve(  # noqa: B027
        self, hidden_bytes: int, scale_bytes: int, top_k: int, element_bytes: int = 2, encoder: Encoder | None = None
    ) -> None:
        """Announce the longest rows that this layer will send, for transports that size their buffers once.

        Args:
            hidden_bytes, scale_bytes: bytes of one payload row and of its scales.
            top_k: experts a token.
            element_bytes: 2 for BF16 partial results, 4 for FP32.
            encoder: makes such rows; for transports that compile kernels, so that they are ready before they are used.
        """

    def fuses(self, encoder: Encoder, hidden_states: torch.Tensor, runtime_max_tokens_per_rank: int | None) -> bool:
        """Whether it pays to leave quantizing ``hidden_states`` to :meth:`dispatch`, instead of doing it before.

        The same on every rank, as T̂ and the rows' width and dtype are; a rank without tokens goes along with any dtype.
        """
        return False

    @abstractmethod
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
        """Send each token to every rank that holds one of its experts.

        Args:
            hidden_states: ``[T, *row]`` contiguous rows of any dtype, quantized or not.
            topk_ids: ``[T, top_k]`` int32 or int64 global ids, top_k ≤ 32. An id < 0 or ≥ num_experts has no
                destination. A repeated id counts each time, but the token still takes one slot.
            topk_weights: ``[T, top_k]`` fp32, carried as they are.
            hidden_states_scale: ``[T, *scale_row]`` contiguous, carried with the rows.
            runtime_max_tokens_per_rank: T̂, the largest T of any rank in this step, the same on every rank;
                None means the channel's ``max_tokens_per_rank``.
            encoder: ``hidden_states`` are ``[T, K]`` values that it quantizes on their way, in the kernel where the
                transport can, before it otherwise; what arrives is the same to the bit. All ranks or none.

        Raises:
            TensorError: a wrong dtype, shape, device or stride; an encoder, and scales as well.
            CapacityError: T > T̂, or T̂ > max_tokens_per_rank.
            CommunicationError: a dispatch is already in flight, or the channel was destroyed.
            RankMismatchError: ranks disagree about T̂, row widths, top_k or the number of experts.
        """

    @abstractmethod
    def get_combine_input_buffer(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """``[ep_size*T̂, hidden_size]`` buffer of the step in flight, for the expert computation to write into.

        Passing it to :meth:`combine` saves a copy. Only slots that hold a token need be written.
        """

    @abstractmethod
    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """Return each token's partial results, summed over ranks.

        ``output[i] = Σ_r expert_output_r[slot of token i on r]``, summed in fp32 in ascending rank order from +0.0 (the
        same bits every run and every protocol), then rounded once to the output's dtype. A token without destination
        gets zeros.

        Args:
            expert_output: ``[ep_size*T̂, hidden]`` BF16 or FP32, weighted and summed over this rank's experts.
            output: optional ``[T, hidden]`` BF16, FP16 or FP32; default: a new tensor of ``expert_output``'s dtype.

        Ends the pair, also where it raises after the first check.

        Raises:
            CommunicationError: no dispatch of this communicator in flight.
            RankMismatchError: ranks disagree about hidden_size or the dtype.
            TensorError: a wrong dtype, shape, device or stride.
        """

    @torch.no_grad()
    def expert_load(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """How often the group's tokens select each expert, for load balancers (EPLB). Collective; allowed in flight.

        Args:
            topk_ids: ``[T, top_k]`` int32 or int64 global ids of this rank's tokens; T may differ between ranks.

        Returns:
            ``[num_experts]`` int32 on the ids' device, the same on every rank. A repeated id counts each time; an id
            out of range counts nowhere.

        Raises:
            TensorError: a wrong dtype, shape or stride.
        """
        # These modules build on this one.
        from moe_layer.comm.destinations import count_experts
        from moe_layer.comm.validation import check_topk_ids

        self.channel.check_usable("expert_load")
        check_topk_ids(self.ep_rank, topk_ids)
        counts = count_experts(topk_ids, self.placement.num_experts)
        if self.ep_size > 1:
            dist.all_reduce(counts, group=self.channel.group)
        return counts

    def give_up(self, error: Exception) -> None:
        """Tell the peers that this rank cannot make the call that they are in, because of ``error``.

        For failures outside dispatch and combine, which report their own. The call given up is combine where this
        communicator's dispatch is in flight, else dispatch. Where a transport can tell, the peers raise
        ``CommunicationError`` with the message and the group stays usable; else they wait for their time-out.
        """
        if self.channel.in_flight is self:
            self.channel.end()

    def destroy(self) -> None:
        """Release the channel's resources. Collective, idempotent."""
        self.channel.destroy()
