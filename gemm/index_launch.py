"""Launching the indexing kernels: what they are specialised for, which of them serve a step, checks before a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from moe_layer.errors import CapacityError, TensorError
from moe_layer.gemm.index import ExpertIndex
from moe_layer.kernel_cache import device_arch, get_kernel

WARP = 32
CLUSTER = 8  # the largest cluster that every GPU runs
# What a block's shared memory holds: a counter for every warp and expert, a tile, and the table.
MAX_EXPERTS = 1024
MAX_TABLE = 4096
MAX_TOP_K = 32
INT32_END = 2**31
SIGNATURE = "llllll" + "iiiii"


@dataclass(frozen=True)
class IndexSpec:
    """What an indexing kernel is specialised for.

    Attributes:
        experts: local experts, 1 … ``threads``.
        top_k: selections a slot.
        table: entries of the table global id → local index; 0: the local ids are consecutive.
        blocks: 1; the blocks of a cluster, which is the whole grid; or 0: as many as there are tiles, in two launches.
        threads: of a block.
        steps: selections a thread holds.
    """

    experts: int
    top_k: int
    table: int
    blocks: int
    threads: int
    steps: int

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def scanning_warps(self) -> int:
        """Warps that have a thread for some expert."""
        return -(-self.experts // WARP)

    @property
    def tile(self) -> int:
        """Selections that a block ranks at a time; their numbers within the tile fit 16 bits."""
        return self.threads * self.steps

    @property
    def counts_row(self) -> int:
        """Words of a block's counts in global memory, whole 16-byte vectors."""
        return -(-self.experts // 4) * 4

    @property
    def readers(self) -> int:
        """Rows of counts that a block reads at once, a vector a thread."""
        return self.threads // (self.counts_row // 4)


def variants(experts: int, top_k: int, table: int) -> dict[str, IndexSpec]:
    """Every kernel of a layer. Few selections are ranked by few steps, so that no instructions are spent on none."""
    threads = 512 if experts <= 512 else 1024
    return {
        "few": IndexSpec(experts, top_k, table, 1, threads, 2),
        "block": IndexSpec(experts, top_k, table, 1, threads, 8),
        "cluster": IndexSpec(experts, top_k, table, CLUSTER, threads, 8),
        "grid": IndexSpec(experts, top_k, table, 0, threads, 8),
    }


def choose(experts: int, top_k: int, table: int, selections: int) -> IndexSpec:
    """The kernel for a step of ``selections`` = slots × top_k."""
    by_name = variants(experts, top_k, table)
    for name in ("few", "block"):
        if selections <= by_name[name].tile:
            return by_name[name]
    if selections <= CLUSTER * by_name["cluster"].tile:
        return by_name["cluster"]
    return by_name["grid"]


def chunk_of(spec: IndexSpec, selections: int, multiprocessors: int) -> int:
    """Consecutive selections of one block.

    Every block of a grid reads the counts of all blocks: with many experts half as many blocks, since those reads then
    outweigh a tile.
    """
    if spec.blocks:
        return -(-selections // (spec.blocks * WARP)) * WARP
    tiles = -(-selections // spec.tile)
    most = multiprocessors if spec.experts <= 256 else multiprocessors // 2
    return -(-tiles // most) * spec.tile


def index_kernel(spec: IndexSpec, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, disk or the compiler."""
    from moe_layer.gemm.index_kernel import build_index_kernels

    return get_kernel(build_index_kernels, spec, SIGNATURE, arch)


def index_kernels(experts: int, top_k: int, table: int, arch: str) -> list[Callable[..., None]]:
    """Every indexing kernel of a layer, for steps of any size."""
    return [index_kernel(spec, arch) for spec in variants(experts, top_k, table).values()]


def build_index(
    topk_ids: torch.Tensor, first_expert: int, num_local_experts: int, *, local_table: torch.Tensor | None = None
) -> ExpertIndex:
    """Group the received selections by local expert, as :meth:`ComputeBackend.build_index`, on the ids' GPU.

    Launches on torch's current stream and waits for nothing; may be captured in a CUDA graph once the kernel has been
    loaded by a first call. Keeps no state: any number of streams may do this at a time.

    Args:
        topk_ids: ``[S, top_k]`` int32, top_k ≤ 32; rows may lie apart, each must be contiguous.
        first_expert, num_local_experts: the local ids; at most 1024 of them.
        local_table: ``[num_experts]`` int32 local index of each global id; others than 0 … num_local_experts − 1 mean
            elsewhere. At most 4096 entries.

    Raises:
        TensorError: a wrong dtype, shape, stride or device.
        CapacityError: more selections than int32 numbers rows, or more experts than a block can count.
    """
    slots, top_k = _check_ids(topk_ids)
    selections = slots * top_k
    device = topk_ids.device
    if num_local_experts < 0 or first_expert < 0 or first_expert + num_local_experts >= INT32_END:
        raise TensorError(
            f"local experts {first_expert} … {first_expert} + {num_local_experts} − 1 are no range of int32 ids"
        )
    if num_local_experts > MAX_EXPERTS:
        raise CapacityError(f"{num_local_experts} local experts; the indexing kernel counts up to {MAX_EXPERTS}")
    table = 0 if local_table is None else _check_table(local_table, device)
    rows = torch.empty(slots, top_k, dtype=torch.int32, device=device)
    row_slots = torch.empty(selections, dtype=torch.int32, device=device)
    if num_local_experts == 0 or selections == 0 or (local_table is not None and table == 0):
        return ExpertIndex(
            torch.zeros(num_local_experts + 1, dtype=torch.int32, device=device), row_slots, rows.fill_(-1)
        )
    offsets = torch.empty(num_local_experts + 1, dtype=torch.int32, device=device)
    launch(
        choose(num_local_experts, top_k, table, selections),
        topk_ids,
        first_expert,
        local_table,
        offsets,
        row_slots,
        rows,
    )
    return ExpertIndex(offsets, row_slots, rows)


def launch(
    spec: IndexSpec,
    topk_ids: torch.Tensor,
    first_expert: int,
    local_table: torch.Tensor | None,
    offsets: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Launch the kernels of ``spec`` on checked operands that hold at least one selection.

    Raises:
        CapacityError: ``spec.blocks`` blocks do not reach all selections.
    """
    device = topk_ids.device
    selections = rows.numel()
    kernel, multiprocessors, anchor = _loaded(spec, device)
    chunk = chunk_of(spec, selections, multiprocessors)
    if spec.blocks and chunk > spec.tile:
        raise CapacityError(f"{selections} selections, {spec.blocks} blocks of {spec.tile}")
    blocks = spec.blocks or -(-selections // chunk)
    # The blocks' counts, of this call alone.
    counts = rows if spec.blocks else torch.empty(blocks, spec.counts_row, dtype=torch.int32, device=device)
    kernel(
        anchor, topk_ids.data_ptr(), 0 if local_table is None else local_table.data_ptr(),
        offsets.data_ptr(), slots.data_ptr(), rows.data_ptr(), counts.data_ptr(),
        4 * topk_ids.stride(0) if len(topk_ids) > 1 else 0, first_expert, selections, chunk, blocks,
    )  # fmt: skip


@cache
def _loaded(spec: IndexSpec, device: torch.device) -> tuple[Callable[..., None], int, torch.Tensor]:
    """(launch function, multiprocessors, what tells a launch its device: one-dimensional bytes)."""
    kernel = index_kernel(spec, device_arch(device))
    anchor = torch.zeros(1, dtype=torch.uint8, device=device)
    return kernel, torch.cuda.get_device_properties(device).multi_processor_count, anchor


def _check_ids(topk_ids: torch.Tensor) -> tuple[int, int]:
    if topk_ids.dim() != 2 or topk_ids.dtype != torch.int32:
        raise TensorError(f"topk_ids must be [slots, top_k] int32, got {list(topk_ids.shape)} {topk_ids.dtype}")
    slots, top_k = topk_ids.shape
    if not 1 <= top_k <= MAX_TOP_K:
        raise TensorError(f"topk_ids must have 1 … {MAX_TOP_K} columns, got {list(topk_ids.shape)}")
    if slots * top_k >= INT32_END:
        raise CapacityError(f"{slots} slots × top_k {top_k} = {slots * top_k} selections do not fit int32 row numbers")
    if top_k > 1 and topk_ids.stride(1) != 1:
        raise TensorError(f"topk_ids must have contiguous rows, got strides {topk_ids.stride()}")
    if slots > 1 and not 0 <= 4 * topk_ids.stride(0) < INT32_END:
        raise TensorError(f"topk_ids must have rows less than 2 GiB apart, got strides {topk_ids.stride()}")
    if topk_ids.device.type != "cuda":
        raise TensorError(f"topk_ids must lie on a GPU, got {topk_ids.device}")
    return slots, top_k


def _check_table(local_table: torch.Tensor, device: torch.device) -> int:
    if local_table.dim() != 1 or local_table.dtype != torch.int32:
        raise TensorError(f"local_table must be [num_experts] int32, got {list(local_table.shape)} {local_table.dtype}")
    if local_table.device != device:
        raise TensorError(f"local_table lies on {local_table.device}, topk_ids on {device}")
    entries = local_table.numel()
    if entries > 1 and local_table.stride(0) != 1:
        raise TensorError(f"local_table must be contiguous, got stride {local_table.stride(0)}")
    if entries > MAX_TABLE:
        raise CapacityError(f"local_table has {entries} entries; the indexing kernel holds up to {MAX_TABLE}")
    return entries
