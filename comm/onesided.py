"""One-sided expert-parallel all-to-all over symmetric memory: the host side of Fence and Sentinel.

A :class:`OneSidedChannel` owns one symmetric allocation per rank, sized for the largest layer, and the record into
which kernels write why they gave up. A :class:`OneSidedComm` is one layer's view. Nothing here waits for the GPU: a
step is two launches, and what a kernel reported is raised by the next call (or by :meth:`OneSidedChannel.check`, which
synchronizes).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from moe_layer.comm.auto import fused_limit, sentinel_limit
from moe_layer.comm.base import DispatchResult, ExpertParallelComm
from moe_layer.comm.channel import DEFAULT_TIMEOUT_S, Channel
from moe_layer.comm.encoder import Encoder, KernelEncoder, check_unscaled, encoded
from moe_layer.comm.launch import give_up_kernel
from moe_layer.comm.launchers import CombineLauncher, DispatchKey, DispatchLauncher, Step
from moe_layer.comm.layout import (
    STATE_BYTES,
    STATE_RECORD,
    STATE_TIMEOUT,
    Capacity,
    SyncOffsets,
    WorkspaceLayout,
    align,
)
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.comm.rows import aligned_rows, row_bytes, row_shape, takes_vectors
from moe_layer.comm.status import RECORD_WORDS, explain
from moe_layer.comm.symmetric import SymmetricMemory, TorchSymmetricMemory
from moe_layer.comm.validation import check_combine, check_dispatch, check_output, check_partial_dtype
from moe_layer.errors import CapacityError, CommunicationError, ConfigError
from moe_layer.kernel_cache import device_arch

if TYPE_CHECKING:
    from moe_layer.comm.emulation import Emulation


class OneSidedChannel(Channel):
    """Symmetric memory and step state of one group on one GPU.

    Args:
        group: ranks that can map each other's memory; None only with ``emulation``.
        protocol: ``"fence"``, ``"sentinel"`` or ``"auto"`` (Sentinel up to the measured crossover, then Fence).
        device: this rank's GPU; default the current one.
        sentinel_tokens_per_rank: the largest T̂ that Sentinel's landing slots serve; default the crossover's reach under
            ``auto``, ``max_tokens_per_rank`` under ``sentinel``.
        fp8_combine: Fence steps return BF16 partial results as E4M3, element by element without scales, which halves
            combine's bytes at some loss of precision (paper §4.3). Off by default; Sentinel steps are not affected.
        max_blocks: cap on a kernel's blocks; default what the GPU holds at once. Emulated ranks that share a
            GPU need less.
        emulation: instead of a group, the ranks that live in this process (``moe_layer.comm.emulation``).
        ep_rank: with ``emulation``, this rank's place in it.
    """

    device: torch.device

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        protocol: str = "auto",
        max_tokens_per_rank: int = 4096,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: torch.device | str | None = None,
        sentinel_tokens_per_rank: int | None = None,
        fp8_combine: bool = False,
        max_blocks: int | None = None,
        emulation: Emulation | None = None,
        ep_rank: int = 0,
    ) -> None:
        super().__init__(group, max_tokens_per_rank=max_tokens_per_rank, timeout_s=timeout_s)
        if group is None:
            if emulation is None:
                raise ConfigError("a one-sided channel needs a group, or an emulation of several ranks in one process")
            self.ep_rank, self.ep_size = ep_rank, len(emulation.devices)
        self.protocol = protocol
        self.device = torch.device("cuda" if device is None else device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.arch = device_arch(self.device)
        self.fp8_combine = fp8_combine
        self.max_blocks = max_blocks
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._emulation = emulation
        self.comms: list[OneSidedComm] = []
        self._sentinel_tokens = sentinel_tokens_per_rank
        self.capacity: Capacity | None = None
        self.layout: WorkspaceLayout | None = None
        self.memory: SymmetricMemory | None = None
        self._record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        self._record_words = self._record.numpy().data

    def communicator(self, placement: ExpertPlacement, hidden_size: int) -> OneSidedComm:
        self.check_layer(placement, hidden_size)
        comm = OneSidedComm(self, placement, hidden_size)
        self.comms.append(comm)
        return comm

    def same_layer(self, comm: OneSidedComm) -> list[OneSidedComm]:
        """The communicators of ``comm``'s layer in this process: itself, or with emulated ranks one a rank."""
        if self._emulation is None:
            return [comm]
        index = self.comms.index(comm)
        return [channel.comms[index] for channel in self._emulation.channels]

    def reserve(self, hidden_bytes: int, scale_bytes: int, top_k: int, combine_bytes: int) -> None:
        """Make room for steps of these row lengths; takes effect, collectively, before the next dispatch."""
        if self.protocol == "fence":
            sentinel = 0
        elif self._sentinel_tokens is not None:
            sentinel = min(self._sentinel_tokens, self.max_tokens_per_rank)
        elif self.protocol == "sentinel":
            sentinel = self.max_tokens_per_rank
        else:
            sentinel = min(
                self.max_tokens_per_rank,
                sentinel_limit(self.ep_size, hidden_bytes + scale_bytes + combine_bytes, top_k),
            )
        wanted = Capacity(
            self.ep_size, self.max_tokens_per_rank, max(1, sentinel), hidden_bytes, scale_bytes, top_k, combine_bytes
        )
        self.capacity = wanted if self.capacity is None else self.capacity.union(wanted)

    def prepare(self) -> None:
        """Allocate what was reserved. Collective; does nothing where the allocation suffices."""
        if self.capacity is None:
            raise CommunicationError("prepare() before any layer reserved a capacity")
        if self.layout is not None and self.layout.capacity.covers(self.capacity):
            return
        if torch.cuda.is_current_stream_capturing():
            raise CapacityError("the workspace must grow for this layer: run it once before capturing a CUDA graph")
        self.check()
        layout = WorkspaceLayout(self.capacity)
        torch.cuda.synchronize(self.device)
        memory: SymmetricMemory
        if self._emulation is not None:
            memory = self._emulation.memory(layout.total_bytes, self.ep_rank)
        else:
            assert self.group is not None
            memory = TorchSymmetricMemory(layout.total_bytes, self.group, self.device, self.timeout_s)
        start, length = layout.sentinel_region
        memory.local[: layout.offsets["dispatch"]].zero_()
        memory.local[start : start + length].fill_(0xFF)
        state = memory.local[:STATE_BYTES].view(torch.int64)
        state[STATE_TIMEOUT // 8] = int(self.timeout_s * 1e9)
        state[STATE_RECORD // 8] = self._record.data_ptr()
        torch.cuda.synchronize(self.device)
        self.memory, self.layout = memory, layout
        for comm in self.comms:
            comm.forget_views()
        self.barrier()

    def barrier(self) -> None:
        """All ranks have come this far on the host (no-op for emulated ranks, which one thread drives)."""
        if self.group is not None:
            dist.barrier(self.group)

    def set_timeout(self, seconds: float) -> None:
        """Change the time-out of every later wait, those of captured graphs too."""
        if not seconds > 0:
            raise ConfigError(f"timeout_s must be positive, got {seconds}")
        self.timeout_s = seconds
        if self.memory is not None:
            self.memory.local[:STATE_BYTES].view(torch.int64)[STATE_TIMEOUT // 8] = int(seconds * 1e9)

    def raise_reported(self) -> None:
        """Raise what a kernel has reported so far; does not synchronize."""
        if self._record_words[0]:  # not ErrorCode.OK; an enum's members are slow to look up, and this runs twice a step
            assert self.memory is not None
            torch.cuda.synchronize(self.device)
            at = SyncOffsets(self.ep_size).parameters
            parameters = self.memory.local[at : at + 32 * self.ep_size].view(torch.int32).view(self.ep_size, 8).tolist()
            error = explain(self._record_words.tolist(), self.ep_rank, self.timeout_s, parameters)
            self.failure = str(error)
            self.in_flight = None
            raise error

    def check(self) -> None:
        """Synchronize, then raise what any kernel so far has reported."""
        torch.cuda.synchronize(self.device)
        self.raise_reported()

    def destroy(self) -> None:
        if not self.destroyed and self.memory is not None:
            torch.cuda.synchronize(self.device)
            if self.failure is None:
                self.barrier()
            self.memory = None
        super().destroy()


class OneSidedComm(ExpertParallelComm):
    """:class:`ExpertParallelComm` by Fence or Sentinel."""

    protocol: ClassVar[str] = "one-sided"
    encodes_in_kernel: ClassVar[bool] = True
    channel: OneSidedChannel

    def __init__(self, channel: OneSidedChannel, placement: ExpertPlacement, hidden_size: int) -> None:
        super().__init__(channel, placement, hidden_size)
        contiguous = ExpertPlacement.contiguous(placement.num_experts, placement.ep_size)
        self._contiguous = placement == contiguous
        self._table = placement.rank_table(channel.device)
        self._placement_hash = zlib.crc32(repr(placement.rank_of).encode())
        self._known: dict[Any, Any] = {}
        self._encoders: dict[tuple[int, int], KernelEncoder] = {}  # announced, by the bytes of what they make
        self._used = False
        self._step: Step | None = None

    def forget_views(self) -> None:
        """Drop everything that points into the allocation: another has taken its place."""
        self._known.clear()

    def reserve(
        self, hidden_bytes: int, scale_bytes: int, top_k: int, element_bytes: int = 2, encoder: Encoder | None = None
    ) -> None:
        """Announce the largest rows this layer will send, so that the first allocation already fits it."""
        self.channel.reserve(align(hidden_bytes), align(scale_bytes), top_k, align(self.hidden_size * element_bytes))
        if encoder is not None and encoder.kernel is not None:
            self._encoders[align(hidden_bytes), align(scale_bytes)] = encoder.kernel

    def fuses(self, encoder: Encoder, hidden_states: torch.Tensor, runtime_max_tokens_per_rank: int | None) -> bool:
        t_hat = self.channel.max_tokens_per_rank if runtime_max_tokens_per_rank is None else runtime_max_tokens_per_rank
        return t_hat <= fused_limit() and encoder.fuses(hidden_states)

    def give_up(self, error: Exception) -> None:
        """Tell the peers that this rank will not make the call they are in; the channel cannot be used again."""
        channel = self.channel
        in_combine = channel.in_flight is self
        super().give_up(error)
        if channel.destroyed or channel.failure is not None:
            return
        if channel.memory is not None and not torch.cuda.is_current_stream_capturing():
            kernel = give_up_kernel(self.ep_size, in_combine, channel.arch)
            kernel(channel.memory.local, channel.memory.local.data_ptr(), channel.memory.peers.data_ptr(), self.ep_rank)
        channel.failure = f"rank {self.ep_rank} gave up step {channel.step + (not in_combine)}: {error}"

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
        channel.raise_reported()
        channel.begin(self)
        try:
            if encoder is not None and not encoder.fuses(hidden_states):
                hidden_states, hidden_states_scale = encoded(encoder, hidden_states, hidden_states_scale)
                encoder = None
            check_dispatch(
                self.ep_rank, hidden_states, topk_ids, topk_weights, hidden_states_scale, device=channel.device
            )
            tokens, top_k = topk_ids.shape
            t_hat = channel.tokens_per_rank(tokens, runtime_max_tokens_per_rank)
            hidden, hidden_bytes = aligned_rows(hidden_states)
            assert hidden is not None
            rows, scale_rows, kernel = hidden_states, hidden_states_scale, None  # rows: of the kind that travels
            if encoder is None:
                scale, scale_bytes = aligned_rows(hidden_states_scale)
            else:
                check_unscaled(hidden_states_scale)
                rows, scale_rows = self._encoded_rows(encoder, hidden_states)
                hidden_bytes, scale_bytes = (
                    align(row_bytes(rows)),
                    0 if scale_rows is None else align(row_bytes(scale_rows)),
                )
                scale, kernel = encoder.common_scale, encoder.kernel
            key = (hidden_bytes, scale_bytes, top_k, topk_weights is not None, topk_ids.element_size(), kernel)
            launch = self._known.get(key) or self._prepare(key)
            sentinel = launch.sentinel_limit >= t_hat
            result = self._result(t_hat, rows, scale_rows, top_k, topk_weights is not None)
            launch.run(sentinel, hidden, scale, topk_ids, topk_weights, tokens, t_hat)
            self._step = Step(tokens, t_hat, sentinel, top_k, result.topk_ids.data_ptr(), 2 * top_k)
        except BaseException as error:
            channel.end()
            if isinstance(error, Exception):
                self.give_up(error)
            raise
        channel.step += 1
        return result

    def _prepare(self, key: DispatchKey) -> DispatchLauncher:
        """First use of these widths: allocate, compile and load every kernel, and let the peers do so too.

        Emulated ranks are prepared together, because one thread drives them all and none may be spinning meanwhile.
        """
        layer = self.channel.same_layer(self)
        first = not self._used
        for comm in layer:
            if not comm._used:
                comm.reserve(key[0], key[1], key[2])
                comm._used = True
        for comm in layer:
            comm.channel.prepare()
        # Where dispatch is to encode such rows at some T̂, both kinds of kernel: a graph may be captured next.
        keys = [key]
        kernel = self._encoders.get(key[:2])
        if kernel is not None and fused_limit() >= 0:
            keys = [(*key[:5], None), (*key[:5], kernel)] + [key] * (key[5] not in (None, kernel))
        for comm in layer:
            for each in keys:
                comm._known[each] = DispatchLauncher(comm, each)
        if first:
            # Only where every rank comes: widths that are new to some ranks alone must end in a mismatch, not here.
            self.channel.barrier()
        return self._known[key]  # type: ignore[no-any-return]

    def _encoded_rows(self, encoder: Encoder, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """No rows, but as they will travel: what dtypes and shapes the encoder makes of these."""
        key = ("encoded", encoder.kernel, hidden_states.shape[1])
        found = self._known.get(key)
        if found is None:
            found = encoder.quantize(hidden_states[:0])
            for comm in self.channel.same_layer(self):  # emulated ranks: nothing may be loaded once one of them spins
                comm._known[key] = found
        return found  # type: ignore[no-any-return]

    def _result(
        self, t_hat: int, hidden: torch.Tensor, scale: torch.Tensor | None, top_k: int, has_weights: bool
    ) -> DispatchResult:
        """Views of the dispatch workspace; the same objects for the same step shape."""
        key = (
            t_hat,
            row_shape(hidden),
            hidden.dtype,
            scale is not None and (row_shape(scale), scale.dtype),
            top_k,
            has_weights,
        )
        found = self._known.get(key)
        if found is None:
            assert self.channel.layout is not None
            slots = self.ep_size * t_hat
            scale_bytes = 0 if scale is None else row_bytes(scale)
            to_hidden, to_scale, to_routing = self.channel.layout.dispatch_rows(slots, row_bytes(hidden), scale_bytes)
            routing = self._rows(to_routing, slots, (2 * top_k,), torch.int32, padded=False)
            found = self._known[key] = DispatchResult(
                hidden_states=self._rows(to_hidden, slots, row_shape(hidden), hidden.dtype),
                topk_ids=routing[:, :top_k],
                topk_weights=routing[:, top_k:].view(torch.float32) if has_weights else None,
                tokens_per_rank=t_hat,
                hidden_states_scale=None
                if scale is None
                else self._rows(to_scale, slots, row_shape(scale), scale.dtype),
            )
        return found

    def _rows(
        self, offset: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, *, padded: bool = True
    ) -> torch.Tensor:
        """``[rows, *shape]`` of the local allocation at ``offset``; rows start 16-byte aligned where ``padded``."""
        assert self.channel.memory is not None
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(rows, *shape, dtype=dtype, device=self.channel.device)
        length = count * dtype.itemsize
        stride = align(length) if padded else length
        flat = self.channel.memory.local[offset : offset + rows * stride].view(rows, stride)[:, :length].view(dtype)
        return flat.reshape(rows) if not shape else flat if len(shape) == 1 else flat.unflatten(1, shape)

    def get_combine_input_buffer(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        self.channel.check_in_flight(self, "get_combine_input_buffer")
        check_partial_dtype(self.ep_rank, "the combine input buffer", dtype)
        assert self._step is not None and self.channel.layout is not None
        slots = self.ep_size * self._step.t_hat
        key = ("combine", slots, dtype)
        found = self._known.get(key)
        if found is None:
            length = self.hidden_size * dtype.itemsize
            if align(length) > self.channel.layout.capacity.combine_bytes:
                raise CapacityError(
                    f"rank {self.ep_rank}: partial results of {length} bytes a row, but the workspace was sized for "
                    f"{self.channel.layout.capacity.combine_bytes}; "
                    "call reserve(element_bytes=4) before the first dispatch"
                )
            found = self._rows(self.channel.layout.offsets["combine"], slots, (self.hidden_size,), dtype)
            self._known[key] = found
        return found

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        channel = self.channel
        channel.check_in_flight(self, "combine")
        channel.raise_reported()
        step = self._step
        assert step is not None
        slots, device = self.ep_size * step.t_hat, channel.device
        try:
            buffer = self.get_combine_input_buffer(expert_output.dtype)
            if expert_output.data_ptr() == buffer.data_ptr() and expert_output.shape == buffer.shape:
                if output is not None:
                    check_output(
                        self.ep_rank, output, num_tokens=step.tokens, hidden_size=self.hidden_size, device=device
                    )
            else:
                check_combine(
                    self.ep_rank, expert_output, output, num_slots=slots, num_tokens=step.tokens,
                    hidden_size=self.hidden_size, device=device,
                )  # fmt: skip
                buffer.copy_(expert_output)
            if output is None:
                output = torch.empty(step.tokens, self.hidden_size, dtype=expert_output.dtype, device=device)
            self._run_combine(step, expert_output.dtype, output)
        except Exception as error:
            self.give_up(error)
            raise
        channel.end()
        return output

    def _run_combine(self, step: Step, dtype: torch.dtype, output: torch.Tensor) -> None:
        wire_dtype = output.dtype if output.dtype in (torch.bfloat16, torch.float32) else torch.float32
        fp8 = self.channel.fp8_combine and not step.sentinel and dtype == torch.bfloat16
        key = ("combine launch", dtype, wire_dtype, fp8)
        launch = self._known.get(key)
        if launch is None:
            launch = self._known[key] = CombineLauncher(self, dtype, wire_dtype, fp8)
        if launch.width == self.hidden_size and takes_vectors(output, wire_dtype):
            launch.run(step, output)
            return
        direct = torch.empty(step.tokens, launch.width, dtype=wire_dtype, device=self.channel.device)
        launch.run(step, direct)
        output.copy_(direct[:, : self.hidden_size])
