"""The portable transport: rank-major dispatch and combine over torch.distributed.

Works wherever a process group does: gloo between CPU processes, NCCL between GPUs and across NVLink domains and hosts,
also on a subgroup of the world. A step is

    dispatch   all-gather of headers (what the ranks agree on, and how many rows go where) · all-to-all of packed rows
    combine    all-gather of headers · all-to-all of the partial results of the slots that hold a token · sum

Tokens stand in token order at the start of each region. The host must know the row counts, so dispatch waits for the
stream and cannot be captured into a CUDA graph; NCCL alone, without gloo beside it in the group, has the lower latency.

Errors. Arguments that are wrong on one rank are reported in its header: that rank raises its own error, its peers a
:class:`CommunicationError` that quotes it, and the next step works. Calls out of order (dispatch in flight, combine
without dispatch, destroyed channel) raise at once, without a message to the peers: they change nothing, so a rank that
then makes the right call is still in step, and peers in another call learn that from its header or by their time-out.
A wait that fails leaves messages under way in the group; channel and group are unusable from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
import torch.distributed as dist

from moe_layer.comm.base import INVALID_EXPERT_ID, DispatchResult, ExpertParallelComm
from moe_layer.comm.channel import DEFAULT_TIMEOUT_S, Channel
from moe_layer.comm.destinations import clean_ids, copies_to_send, count_experts
from moe_layer.comm.encoder import Encoder, encoded
from moe_layer.comm.exchange import Exchange, PeerExchange, StreamExchange
from moe_layer.comm.header import ABSENT, BACKENDS, CALLS, Header, agree, dtype_code, table_code
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.comm.rows import (
    RowLayout,
    Workspace,
    as_byte_rows,
    as_typed_rows,
    copy_rows,
    row_bytes,
    row_shape,
    select_rows,
)
from moe_layer.comm.validation import check_combine, check_dispatch, check_partial_dtype, check_topk_ids
from moe_layer.errors import TensorError, UnsupportedDeviceError

_DISPATCH, _COMBINE, _EXPERT_LOAD = range(len(CALLS))
_GLOO, _NCCL = range(len(BACKENDS))


class CollectiveChannel(Channel):
    """The channel over a torch.distributed group.

    Args:
        group: a group with gloo for CPU tensors, NCCL (or gloo, through host memory) for CUDA tensors; None for this
            process alone.
        max_tokens_per_rank, timeout_s: as in :class:`Channel`. With NCCL the group's own time-out still guards
            synchronisations outside this library.

    Raises:
        ConfigError: the process is not in the group.
        UnsupportedDeviceError: the group has neither gloo nor NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        max_tokens_per_rank: int = 4096,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(group, max_tokens_per_rank=max_tokens_per_rank, timeout_s=timeout_s)
        self.workspace = Workspace()
        self._peer_exchange: PeerExchange | None = None
        self._stream_exchange: StreamExchange | None = None
        config = "cpu:gloo" if group is None else dist.get_backend_config(group)
        backends = dict(entry.split(":") for entry in config.split(","))
        if "gloo" in backends.values():
            self._peer_exchange = PeerExchange(group, self.ep_rank, self.ep_size, timeout_s)
        if backends.get("cuda") == "nccl" and group is not None:
            device = torch.device("cuda", torch.cuda.current_device())
            self._stream_exchange = StreamExchange(group, self.ep_rank, self.ep_size, timeout_s, device)
        control = self._peer_exchange or self._stream_exchange
        if control is None:
            raise UnsupportedDeviceError(
                f"the collective transport needs a group with gloo or nccl, but this one has {config}"
            )
        # Headers take one way whatever the tensors' device, so a rank with a tensor on the wrong device is heard.
        self._control: Exchange = control

    def communicator(self, placement: ExpertPlacement, hidden_size: int) -> CollectiveComm:
        self.check_layer(placement, hidden_size)
        return CollectiveComm(self, placement, hidden_size)

    def exchange_for(self, name: str, tensor: torch.Tensor) -> Exchange:
        """What moves rows from and to the device of ``tensor``, the argument ``name``.

        Raises:
            TensorError: the group cannot reach that device.
        """
        on_stream = self._stream_exchange
        if tensor.is_cuda and on_stream is not None:
            if tensor.device != on_stream.device:
                found = f"{name} is on {tensor.device}; expected {on_stream.device}, current when the channel was made"
                raise TensorError(f"rank {self.ep_rank}: {found}")
            return on_stream
        if self._peer_exchange is None:
            found = f"{name} is on {tensor.device}; expected a CUDA tensor: the group has NCCL only, no gloo"
            raise TensorError(f"rank {self.ep_rank}: {found}")
        return self._peer_exchange

    def backend_of(self, exchange: Exchange) -> int:
        """The index in ``BACKENDS`` of what ``exchange`` uses."""
        return _NCCL if exchange is self._stream_exchange else _GLOO

    def settle(self, what: str) -> None:
        """Wait, with the time limit, for the rows of earlier calls."""
        if self._stream_exchange is None:
            return
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedDeviceError(
                f"rank {self.ep_rank}: {what} cannot be captured into a CUDA graph: protocol 'collective' sizes its "
                "messages on the host; run the layer outside the capture, or with a protocol that counts on the device"
            )
        with self.committed():
            self._stream_exchange.settle(what)

    def agree(self, header: Header, counts: list[int], what: str) -> torch.Tensor:
        """Exchange headers: see :func:`moe_layer.comm.header.agree`."""
        with self.committed():
            headers = self._control.gather_headers(header.encode(counts), what)
        return agree(headers, self.ep_rank, what)

    def report(self, header: Header, error: Exception, what: str) -> None:
        """Tell the peers, who wait for this rank's header, that it failed."""
        with self.committed():
            self._control.gather_headers(header.encode_failure(error, self.ep_size), what)

    @contextmanager
    def committed(self) -> Iterator[None]:
        """Code that peers count on: an exception in it leaves them waiting, so the channel is of no more use."""
        try:
            yield
        except BaseException as error:
            self.failure = str(error) or type(error).__name__
            raise

    def destroy(self) -> None:
        """Release the buffers. Sends nothing, so it works after a failure; the group remains the caller's."""
        super().destroy()
        self.workspace.clear()


@dataclass(frozen=True)
class _Step:
    """What combine must know of its dispatch."""

    exchange: Exchange
    device: torch.device
    num_tokens: int
    tokens_per_rank: int
    token_index: torch.Tensor  # of each copy sent, grouped by destination rank
    sent: list[int]  # copies to each rank
    received: list[int]  # copies from each rank


class CollectiveComm(ExpertParallelComm):
    """:class:`ExpertParallelComm` over torch.distributed."""

    protocol: ClassVar[str] = "collective"
    channel: CollectiveChannel
    _step: _Step

    def __init__(self, channel: CollectiveChannel, placement: ExpertPlacement, hidden_size: int) -> None:
        super().__init__(channel, placement, hidden_size)
        self._placement_code = table_code(placement.rank_of)
        self._rank_tables: dict[torch.device, torch.Tensor] = {}

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
        channel = self.channel
        channel.begin(self)
        try:
            what = f"dispatch of step {channel.step + 1}"
            channel.settle(what)
            try:
                hidden_states, hidden_states_scale = encoded(encoder, hidden_states, hidden_states_scale)
                check_dispatch(self.ep_rank, hidden_states, topk_ids, topk_weights, hidden_states_scale)
                t_hat = channel.tokens_per_rank(hidden_states.shape[0], runtime_max_tokens_per_rank)
                exchange = channel.exchange_for("hidden_states", hidden_states)
                ids = clean_ids(topk_ids, self.placement.num_experts)
                copies = copies_to_send(ids, self._rank_table(ids.device), self.ep_size)
                header = Header(
                    _DISPATCH,
                    channel.step,
                    backend=channel.backend_of(exchange),
                    num_experts=self.placement.num_experts,
                    placement=self._placement_code,
                    tokens_per_rank=t_hat,
                    top_k=topk_ids.shape[1],
                    row_dtype=dtype_code(hidden_states.dtype),
                    row_bytes=row_bytes(hidden_states),
                    has_weights=int(topk_weights is not None),
                    scale_dtype=ABSENT if hidden_states_scale is None else dtype_code(hidden_states_scale.dtype),
                    scale_bytes=0 if hidden_states_scale is None else row_bytes(hidden_states_scale),
                    hidden_size=self.hidden_size,
                )
            except Exception as error:
                channel.report(Header(_DISPATCH, channel.step), error, what)
                raise
            matrix = channel.agree(header, copies.counts, what)
            self._step = _Step(
                exchange, hidden_states.device, hidden_states.shape[0], t_hat,
                copies.token_index, copies.counts, matrix[:, self.ep_rank].tolist(),
            )  # fmt: skip
            with channel.committed():
                result = self._send_rows(hidden_states, ids, topk_weights, hidden_states_scale, what)
        except BaseException:
            channel.end()
            raise
        channel.step += 1
        return result

    def _send_rows(
        self,
        hidden_states: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        hidden_states_scale: torch.Tensor | None,
        what: str,
    ) -> DispatchResult:
        """Pack a row per copy, exchange the rows, and lay them out rank-major."""
        step = self._step
        take = self.channel.workspace.take
        tensors = {"hidden_states": hidden_states, "topk_ids": ids}
        if topk_weights is not None:
            tensors["topk_weights"] = topk_weights
        if hidden_states_scale is not None:
            tensors["hidden_states_scale"] = hidden_states_scale
        layout = RowLayout.of([row_bytes(t) for t in tensors.values()])

        packed = {}
        for side, counts in (("send", step.sent), ("receive", step.received)):
            buffer = take(side, sum(counts) * layout.row_bytes, step.device)
            packed[side] = as_typed_rows(buffer, sum(counts), (layout.row_bytes,), torch.uint8)
        for i, tensor in enumerate(tensors.values()):
            select_rows(as_byte_rows(tensor), step.token_index, layout.part(packed["send"], i))
        step.exchange.all_to_all(packed["send"].split(step.sent), packed["receive"].split(step.received), what)

        num_slots = self.ep_size * step.tokens_per_rank
        arrived = packed["receive"].split(step.received)
        fields: dict[str, torch.Tensor] = {}
        for i, (name, tensor) in enumerate(tensors.items()):
            buffer = take(name, num_slots * row_bytes(tensor), step.device)
            fields[name] = as_typed_rows(buffer, num_slots, row_shape(tensor), tensor.dtype)
            if name == "topk_ids":
                fields[name].fill_(INVALID_EXPERT_ID)
            rows = as_byte_rows(fields[name])
            for source, region in enumerate(_regions(rows, step)):
                copy_rows(layout.part(arrived[source], i), region)
        return DispatchResult(
            fields["hidden_states"],
            fields["topk_ids"],
            fields.get("topk_weights"),
            step.tokens_per_rank,
            fields.get("hidden_states_scale"),
        )

    def get_combine_input_buffer(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        self.channel.check_in_flight(self, "get_combine_input_buffer")
        check_partial_dtype(self.ep_rank, "the combine input buffer", dtype)
        num_slots = self.ep_size * self._step.tokens_per_rank
        buffer = self.channel.workspace.take(
            "combine", num_slots * self.hidden_size * dtype.itemsize, self._step.device
        )
        return as_typed_rows(buffer, num_slots, (self.hidden_size,), dtype)

    @torch.no_grad()
    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        channel = self.channel
        channel.check_in_flight(self, "combine")
        step = self._step
        try:
            what = f"combine of step {channel.step}"
            try:
                check_combine(
                    self.ep_rank, expert_output, output,
                    num_slots=self.ep_size * step.tokens_per_rank, num_tokens=step.num_tokens,
                    hidden_size=self.hidden_size, device=step.device,
                )  # fmt: skip
                header = Header(
                    _COMBINE,
                    channel.step,
                    backend=channel.backend_of(step.exchange),
                    hidden_size=self.hidden_size,
                    partial_dtype=dtype_code(expert_output.dtype),
                )
            except Exception as error:
                channel.report(Header(_COMBINE, channel.step), error, what)
                raise
            channel.agree(header, [0] * self.ep_size, what)
            with channel.committed():
                partials = self._return_rows(expert_output, what)
            return self._sum(partials, expert_output.dtype, output)
        finally:
            channel.end()

    def give_up(self, error: Exception) -> None:
        channel = self.channel
        in_flight = channel.in_flight is self
        super().give_up(error)
        if channel.destroyed or channel.failure is not None:
            return
        if in_flight:
            channel.report(Header(_COMBINE, channel.step), error, f"combine of step {channel.step}")
        else:
            what = f"dispatch of step {channel.step + 1}"
            channel.settle(what)
            channel.report(Header(_DISPATCH, channel.step), error, what)

    def _return_rows(self, expert_output: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Send each slot's partial result to the rank its token came from; slots without a token stay behind.

        Returns:
            for each rank ``[sent[rank], hidden]``, its partial results in the order the copies were sent.
        """
        step = self._step
        rows = as_byte_rows(expert_output)
        num_copies = sum(step.sent)
        buffer = self.channel.workspace.take("receive", num_copies * rows.shape[1], step.device)
        returned = as_typed_rows(buffer, num_copies, (rows.shape[1],), torch.uint8)
        step.exchange.all_to_all(_regions(rows, step), returned.split(step.sent), what)
        partials = as_typed_rows(buffer, num_copies, (self.hidden_size,), expert_output.dtype)
        return list(partials.split(step.sent))

    def _sum(self, partials: list[torch.Tensor], dtype: torch.dtype, output: torch.Tensor | None) -> torch.Tensor:
        """Each token's partial results, added in ascending rank order in fp32."""
        step = self._step
        total = torch.zeros(step.num_tokens, self.hidden_size, dtype=torch.float32, device=step.device)
        for tokens, rows in zip(step.token_index.split(step.sent), partials):
            # A token occurs at most once in `tokens`, so either way adds each element once, in this order of ranks.
            if total.is_cuda:  # where index_add_ uses atomics, which flush subnormals
                total.index_copy_(0, tokens, total.index_select(0, tokens).add_(rows))
            else:  # 2.4 times as fast as the other on a CPU
                total.index_add_(0, tokens, rows.to(torch.float32))
        if output is None:
            return total.to(dtype)
        return output.copy_(total)

    @torch.no_grad()
    def expert_load(self, topk_ids: torch.Tensor) -> torch.Tensor:
        channel = self.channel
        channel.check_usable("expert_load")
        what = f"expert_load after step {channel.step}"
        channel.settle(what)
        try:
            check_topk_ids(self.ep_rank, topk_ids)
            exchange = channel.exchange_for("topk_ids", topk_ids)
            counts = count_experts(topk_ids, self.placement.num_experts)
            header = Header(
                _EXPERT_LOAD,
                channel.step,
                backend=channel.backend_of(exchange),
                num_experts=self.placement.num_experts,
            )
        except Exception as error:
            channel.report(Header(_EXPERT_LOAD, channel.step), error, what)
            raise
        channel.agree(header, [0] * self.ep_size, what)
        with channel.committed():
            rows = as_byte_rows(counts[None])
            gathered = torch.empty(self.ep_size, rows.shape[1], dtype=torch.uint8, device=counts.device)
            exchange.all_to_all([rows[0]] * self.ep_size, list(gathered), what)
        return gathered.view(torch.int32).sum(0, dtype=torch.int32)

    def _rank_table(self, device: torch.device) -> torch.Tensor:
        """``[num_experts + 1]`` int64: the rank of each expert, then ``ep_size`` for "no destination"."""
        table = self._rank_tables.get(device)
        if table is None:
            table = torch.tensor([*self.placement.rank_of, self.ep_size], dtype=torch.int64, device=device)
            self._rank_tables[device] = table
        return table


def _regions(rows: torch.Tensor, step: _Step) -> list[torch.Tensor]:
    """For each source rank, the slots of ``rows`` ``[ep_size*T̂, bytes]`` that hold a token of it."""
    starts = accumulate([0] + [step.tokens_per_rank] * (len(step.received) - 1))
    return [rows[start : start + count] for start, count in zip(starts, step.received)]
