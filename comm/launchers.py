"""One layer's launches: the kernels' arguments, with all that stays the same from step to step worked out once.

A launcher lives as long as the workspace, whose addresses it holds. What depends on the step's shape is kept per
(protocol, T̂); the rest of a step's host work is to put its tensors' addresses between the two.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_layer.comm.auto import sentinel_limit
from moe_layer.comm.encoder import KernelEncoder
from moe_layer.comm.launch import (
    FENCE,
    FP8_PARTIALS,
    combine_kernels,
    dispatch_kernels,
    give_up_kernel,
    grid_size,
    load_kernels,
    sentinel_parts,
)
from moe_layer.comm.layout import align
from moe_layer.comm.spec import CombineSpec, DispatchSpec
from moe_layer.errors import CapacityError

if TYPE_CHECKING:
    from moe_layer.comm.onesided import OneSidedComm

# Hidden bytes, scale bytes (both as they travel), top_k, weights?, bytes an id, and what makes the rows of BF16 ones.
DispatchKey = tuple[int, int, int, bool, int, KernelEncoder | None]


@dataclass
class Step:
    """What combine must know of its dispatch."""

    tokens: int
    t_hat: int
    sentinel: bool
    top_k: int
    routing: int  # address of the routing rows
    routing_words: int  # words of one


class DispatchLauncher:
    """Dispatches of one set of widths. Compiles and loads every kernel that the layer may ask for."""

    def __init__(self, comm: OneSidedComm, key: DispatchKey) -> None:
        hidden_bytes, scale_bytes, top_k, has_weights, id_bytes, encoder = key
        channel = comm.channel
        assert channel.layout is not None and channel.memory is not None
        capacity = channel.layout.capacity
        if hidden_bytes > capacity.hidden_bytes or scale_bytes > capacity.scale_bytes or top_k > capacity.top_k:
            raise CapacityError(
                f"rank {comm.ep_rank}: rows of {hidden_bytes} + {scale_bytes} bytes with top_k={top_k}, but the "
                f"workspace was sized for {capacity.hidden_bytes} + {capacity.scale_bytes} with "
                f"top_k={capacity.top_k}; reserve() the largest layer first"
            )
        spec = DispatchSpec(
            comm.ep_size, top_k, comm.placement.num_experts, comm._contiguous, hidden_bytes, scale_bytes, has_weights,
            id_bytes, encoder=encoder,
        )  # fmt: skip
        self.comm, self.spec = comm, spec
        self.kernels = dispatch_kernels(spec, channel.arch)
        # Any combine that this layer may ask for later, so that no step waits for a compiler.
        combines = [
            combine_kernels(
                CombineSpec(comm.ep_size, align(comm.hidden_size * max(2, element_bytes)), element_bytes, output_bytes),
                channel.arch,
            )
            for element_bytes in ((1, 2, 4) if channel.fp8_combine else (2, 4))
            for output_bytes in (2, 4)
        ]
        others = [give_up_kernel(comm.ep_size, in_combine, channel.arch) for in_combine in (False, True)]
        load_kernels(self.kernels, combines, others, comm.ep_size, channel.device)
        if channel.protocol == "fence":
            self.sentinel_limit = -1
        elif channel.protocol == "sentinel":
            self.sentinel_limit = capacity.sentinel_tokens_per_rank
        else:
            row = spec.hidden_bytes + spec.scale_bytes + align(comm.hidden_size * 2)
            self.sentinel_limit = min(capacity.sentinel_tokens_per_rank, sentinel_limit(comm.ep_size, row, spec.top_k))
        self._plans: dict[tuple[bool, int], tuple[int, int, tuple[int, ...], int]] = {}

    def run(
        self, sentinel: bool, hidden: torch.Tensor, scale: torch.Tensor | None, ids: torch.Tensor,
        weights: torch.Tensor | None, tokens: int, t_hat: int,
    ) -> None:  # fmt: skip
        """Launch one dispatch on the current stream.

        Args:
            sentinel: which protocol.
            hidden, scale: ``[T, bytes]`` uint8 rows, aligned; with an encoder BF16 rows as bytes, and the common scale
                ``[1]`` or None.
            ids, weights: ``[T, top_k]``.
            tokens, t_hat: T and T̂.
        """
        plan = self._plans.get((sentinel, t_hat))
        if plan is None:
            plan = self._plans[sentinel, t_hat] = self._plan(sentinel, t_hat)
        parts, resident, regions, own_hash = plan
        comm, channel = self.comm, self.comm.channel
        memory = channel.memory
        assert memory is not None
        grid = grid_size(t_hat if sentinel else tokens, parts, resident)
        waiters = () if sentinel else (min(grid, channel.num_sms),)
        self.kernels[parts](
            memory.local, memory.local.data_ptr(), memory.peers.data_ptr(), comm._table.data_ptr(),
            hidden.data_ptr(), 0 if scale is None else scale.data_ptr(), ids.data_ptr(),
            0 if weights is None else weights.data_ptr(), hidden.stride(0), 0 if scale is None else scale.stride(0),
            *regions, comm.ep_rank, tokens, t_hat, own_hash, comm._placement_hash, *waiters, grid,
        )  # fmt: skip

    def _plan(self, sentinel: bool, t_hat: int) -> tuple[int, int, tuple[int, ...], int]:
        """(parts, blocks resident at once, where the regions lie, hash of what ranks must agree on) of a step shape."""
        comm, spec, channel = self.comm, self.spec, self.comm.channel
        layout = channel.layout
        assert layout is not None
        if channel.protocol == "sentinel" and not sentinel:
            raise CapacityError(
                f"rank {comm.ep_rank}: runtime_max_tokens_per_rank is {t_hat}, but Sentinel's slots were sized for "
                f"{self.sentinel_limit} (sentinel_tokens_per_rank)"
            )
        told: tuple[object, ...] = (
            sentinel,
            t_hat,
            comm.hidden_size,
            spec.hidden_bytes,
            spec.scale_bytes,
            spec.top_k,
            spec.num_experts,
            spec.has_weights,
        )
        parts = sentinel_parts(t_hat, spec.vectors) if sentinel else FENCE
        if parts > 1 and spec.encoder is not None:  # the parts of such a row are others
            told += ("fused",)
        own_hash = zlib.crc32(repr((*told, comm._placement_hash)).encode())
        regions: tuple[int, ...] = layout.dispatch_rows(comm.ep_size * t_hat, spec.hidden_bytes, spec.scale_bytes)
        if sentinel:
            regions += (
                layout.offsets["present"], layout.offsets["meta"], layout.offsets["landing"], layout.offsets["escape"],
                layout.landing_stride, layout.capacity.sentinel_tokens_per_rank,
            )  # fmt: skip
        return parts, channel.max_blocks or channel.num_sms * spec.blocks_per_sm, regions, own_hash


class CombineLauncher:
    """Combines of one pair of dtypes.

    Args:
        comm: the layer.
        dtype: of the partial results.
        wire_dtype: BF16 or FP32, what the kernel stores.
        fp8: partial results are turned into E4M3 first.
    """

    def __init__(self, comm: OneSidedComm, dtype: torch.dtype, wire_dtype: torch.dtype, fp8: bool) -> None:
        channel = comm.channel
        layout, memory = channel.layout, channel.memory
        assert layout is not None and memory is not None
        spec = CombineSpec(
            comm.ep_size, align(comm.hidden_size * dtype.itemsize), 1 if fp8 else dtype.itemsize, wire_dtype.itemsize
        )
        self.comm, self.spec, self.fp8 = comm, spec, fp8
        # Elements of a row as stored: whole vectors, of which E4M3's hold more than those of BF16.
        self.width = spec.vectors * 16 // spec.element_bytes
        self.kernels = combine_kernels(spec, channel.arch)
        self._code = (spec.element_bytes << 24) | spec.combine_bytes
        self._resident = channel.max_blocks or channel.num_sms * spec.blocks_per_sm
        self._workspace = (memory.local.data_ptr(), memory.peers.data_ptr(), layout.offsets["combine"])
        self._sentinel_regions = (
            layout.offsets["present"], layout.offsets["partials"], layout.partial_stride,
            layout.capacity.sentinel_tokens_per_rank,
        )  # fmt: skip

    def run(self, step: Step, output: torch.Tensor) -> None:
        """Launch the combine of ``step`` into ``output`` ``[T, width]`` on the current stream."""
        channel = self.comm.channel
        memory = channel.memory
        assert memory is not None
        regions: tuple[int, ...] = ()
        parts, slots = FENCE, step.tokens
        if step.sentinel:
            parts, slots, regions = sentinel_parts(step.t_hat, self.spec.vectors), step.t_hat, self._sentinel_regions
        if self.fp8:
            received = self.comm.ep_size * step.t_hat
            self.kernels[FP8_PARTIALS](
                memory.local, memory.local.data_ptr(), self._workspace[2], step.routing, step.routing_words,
                step.top_k, received, min(max(1, received), channel.num_sms * self.spec.blocks_per_sm),
            )  # fmt: skip
        self.kernels[parts](
            memory.local, *self._workspace, output.data_ptr(), output.stride(0) * output.element_size(), *regions,
            self.comm.ep_rank, step.tokens, step.t_hat, self._code, grid_size(slots, parts, self._resident),
        )  # fmt: skip
