"""Hopper grouped GEMM that gathers its rows: one mainloop for FC1 and FC2, BF16 and FP8, few tokens and many.

``out[row] = epilogue(W[e] · x[row])`` for the rows of every local expert e (paper §3.3). A weight tile is 256 rows of
an expert's weights; FC1's are 128 gate rows and 128 up rows, interleaved eight by eight: a thread holds gate and
up of the same output in neighbouring registers and the activation costs no exchange.

Two shapes of the product, from the same operands in shared memory:

* *swapped* (8 … 96 tokens a tile): weights are WGMMA's M, tokens its N. A consumer warpgroup takes 128 weight rows
  (two m64) and all tokens. Bound by the stream of weights.
* *wide* (128 tokens): tokens are M, weights N. A warpgroup takes 64 tokens and all 256 weight rows (BF16: one n256;
  FP8: two n128, one at a time). Bound by the tensor cores.

Warps: warpgroup 0 produces, warpgroups 1 and 2 consume; 384 threads, one block a multiprocessor, persistent.

    producer, a stage:  wait empty · thread 0: expect 32 KiB, TMA weight tile · all: cp.async the token rows' 128 bytes
                        (and FP8 scales), arrive on full when they have landed
    consumer, a stage:  wait full · proxy fence · WGMMA over 128 bytes of K · wait for the WGMMA (BF16: of the stage
                        before) · FP8: scale and add to FP32 registers · arrive on empty

Barriers (two a stage): full counts 1 (TMA's expect) + 128 (cp.async); empty counts 2, one for each consumer warpgroup.
The producer runs ahead over tile borders, so weights stream on during epilogues.

Shared memory: stages of weight tile [256][128 B] and token tile [tokens][128 B] (both in the 128-byte swizzle: 16-byte
chunk c of row r lies at chunk c ^ (r mod 8)), FP8 scales of a stage (a float a token, two of the weights), the
epilogue's staging, the schedule, the barriers.

Ideas: NVIDIA CUTLASS's warp-specialised Hopper kernels (roles, register hand-over), DeepGEMM (FP32 promotion of FP8
every 128 of K), quack (gather by cp.async beside TMA on one barrier).
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.sm90_epilogue import store_swapped, store_wide
from moe_layer.gemm.sm90_pipeline import release
from moe_layer.gemm.sm90_schedule import block_in_cluster, fill_schedule, locate, row_number
from moe_layer.gemm.sm90_spec import (
    REGISTERS,
    STAGE_ROW_BYTES,
    WARP,
    WARPGROUP,
    WEIGHT_ROWS,
    GroupedSpec,
)
from moe_layer.gemm.sm90_widen import consume_widened


def element_type(spec: GroupedSpec) -> Any:
    return BFloat16 if spec.dtype == "bf16" else Float8E4M3FN


def tile_layout(spec: GroupedSpec, rows: int, stages: int) -> Any:
    """``(rows, k_tile, stages)`` in the 128-byte swizzle, K-major."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element_type(spec))
    return cute.tile_to_shape(atom, (rows, spec.k_tile, stages), order=(0, 1, 2))


def weight_tensor(spec: GroupedSpec, weights: Int64) -> Any:
    """The weights as TMA sees them, ``(tile rows, K, experts)``: FC1's gate and up in alternating groups of 8 rows."""
    pointer = cute.make_ptr(element_type(spec), weights, cute.AddressSpace.gmem, assumed_align=16)
    n, k = spec.n, spec.k
    if spec.parts == 1:
        layout = cute.make_layout((n, k, spec.experts), stride=(k, 1, n * k))
    else:
        layout = cute.make_layout(((8, 2, n // 8), k, spec.experts), stride=((k, n * k, 8 * k), 1, 2 * n * k))
    return cute.make_tensor(pointer, layout)


@cute.jit
def produce(
    spec: cutlass.Constexpr, tma: Any, weights_to: Any, weights_from: Any,
    tokens_to: Int32, scales_to: Int32, full: cute.Pointer, empty: cute.Pointer,
    rows: cute.Tensor, order: cute.Tensor, tiles: cute.Tensor, slots: Int64, x: Int64, x_stride: Int64,
    x_scale: Int64, x_scale_stride: Int64, weight_scale: Int64, packed: Any, packed_to: Any,
):  # fmt: skip
    """The producer warpgroup's work."""
    tid = cute.arch.thread_idx()[0]
    block, grid = cute.arch.block_idx()[0] // spec.cluster, cute.arch.grid_dim()[0] // spec.cluster
    warp = cute.arch.make_warp_uniform(tid // WARP)
    total = tiles[spec.experts] * spec.column_tiles
    # Thread t copies chunk t mod 8 of rows t div 8, t div 8 + 16, …; eight threads read 128 contiguous bytes.
    chunk, first = tid % 8, tid // 8
    copies = -(-spec.tokens // 16)
    everyone = Int16((1 << spec.cluster) - 1)
    target = tokens_to + first * STAGE_ROW_BYTES + ((chunk ^ (first % 8)) * 16)
    stage, phase = Int32(0), Int32(1)
    for tile in range(block, total, grid):
        expert, row, count, column = locate(spec, tile, rows, order, tiles)
        # Row numbers, not addresses: half the registers.
        sources = [row_number(spec, slots, row, count, first + 16 * i) for i in range(copies)]
        scale_source = Int64(0)
        weight_scales = Int64(0)
        if const_expr(spec.scaled):
            if tid < Int32(spec.tokens):
                scale_source = x_scale + Int64(row_number(spec, slots, row, count, tid)) * x_scale_stride
            weight_scales = weight_scale + scale_offset(spec, expert, column, tid % 2)
        for step in range(spec.k_steps):
            cute.arch.mbarrier_wait(empty + stage, phase)
            if warp == Int32(0):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, spec.weight_stage_bytes)
                    if const_expr(spec.low_bit is not None):
                        dev.copy_bulk(
                            packed_to + stage * spec.weight_stage_bytes,
                            packed + packed_offset(spec, expert, column, Int32(step)),
                            spec.weight_stage_bytes,
                            dev.shared_address(full + stage),
                        )
                if const_expr(spec.low_bit is None):
                    cute.copy(
                        tma,
                        weights_from[(None, (column, step, expert))],
                        weights_to[(None, stage)],
                        tma_bar_ptr=full + stage,
                        mcast_mask=everyone if spec.cluster > 1 else None,
                    )
            for line in range_constexpr(spec.stage_lines):
                line_of_row = step * spec.stage_lines + line if spec.stage_lines > 1 else step
                size = Int32(16)
                # Past the row's end lie zeros, whatever the memory there holds.
                if line_of_row * STAGE_ROW_BYTES + chunk * 16 >= Int32(spec.k * spec.element_bytes):
                    size = Int32(0)
                for i in range_constexpr(copies):
                    # Rows past the tile's last keep what was there before: nothing of them is stored.
                    if first + 16 * i < count:
                        dev.copy_16(
                            target + stage * spec.token_stage_bytes + (line * spec.tokens + 16 * i) * STAGE_ROW_BYTES,
                            x + Int64(sources[i]) * x_stride + Int64(line_of_row * STAGE_ROW_BYTES + chunk * 16),
                            size,
                        )
            if const_expr(spec.scaled):
                to = scales_to + stage * (4 * spec.scale_stage_floats)
                if tid < count:
                    dev.copy_4(to + tid * 4, scale_source + Int64(step) * 4)
                if tid < Int32(2):
                    dev.copy_4(to + spec.tokens * 4 + tid * 4, weight_scales + Int64(step) * 4)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
            stage += 1
            if stage == Int32(spec.stages):
                stage = Int32(0)
                phase = phase ^ 1
    # Nothing may land in the shared memory of a block that has ended.
    cute.arch.cp_async_wait_group(0)


def packed_offset(spec: GroupedSpec, expert: Int32, column: Int32, step: Int32) -> Int64:
    """Bytes to a stage of packed weights."""
    return ((Int64(expert) * spec.column_tiles + Int64(column)) * spec.k_steps + Int64(step)) * spec.weight_stage_bytes


def scale_offset(spec: GroupedSpec, expert: Int32, column: Int32, which: Int32) -> Int64:
    """Bytes to the first of the tile's two rows of weight scales: gate and up, or the tile's two blocks of 128 rows."""
    per_expert = spec.parts * spec.scale_rows * spec.scale_columns
    if spec.parts == 2:
        row = which * spec.scale_rows + column
    else:
        last = Int32(spec.scale_rows - 1)
        row = column * 2 + which
        row = dev.smaller(row, last)
    return (Int64(expert) * per_expert + Int64(row) * spec.scale_columns) * 4


@cute.jit
def consume(
    spec: cutlass.Constexpr, weight_tile: cute.Tensor, token_tile: cute.Tensor, scales: Int32, staging: Int32,
    full: cute.Pointer, empty: cute.Pointer, rows: cute.Tensor, order: cute.Tensor, tiles: cute.Tensor,
    out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64,
):  # fmt: skip
    """A consumer warpgroup's work."""
    tid = cute.arch.thread_idx()[0] - WARPGROUP
    block, grid = cute.arch.block_idx()[0] // spec.cluster, cute.arch.grid_dim()[0] // spec.cluster
    group = cute.arch.make_warp_uniform(tid // WARPGROUP)
    total = tiles[spec.experts] * spec.column_tiles
    kind = element_type(spec)
    columns = spec.tokens if spec.swap else (WEIGHT_ROWS if not spec.scaled else WEIGHT_ROWS // 2)
    first_mma = make_mma(kind, columns)
    next_mma = make_mma(kind, columns)
    first_mma.set(warpgroup.Field.ACCUMULATE, False)
    next_mma.set(warpgroup.Field.ACCUMULATE, True)
    thread = next_mma.get_slice(0)
    a_tile, b_tile = (weight_tile, token_tile) if const_expr(spec.swap) else (token_tile, weight_tile)
    a = next_mma.make_fragment_A(thread.partition_A(a_tile))
    b = next_mma.make_fragment_B(thread.partition_B(b_tile))
    # Products of the tile: swapped, two blocks of 64 weight rows; wide, the halves of the weight rows (BF16: all).
    halves = 2 if spec.swap or spec.scaled else 1
    shape = next_mma.partition_shape_C((64, columns))
    sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(halves)]
    stage, phase = Int32(0), Int32(0)
    for tile in range(block, total, grid):
        _, row, count, column = locate(spec, tile, rows, order, tiles)
        # A warpgroup whose rows are all past the tile's end only keeps the pipeline going.
        working = Int32(1)
        if const_expr(not spec.swap):
            working = Int32(1) if group * 64 < count else Int32(0)
        if working != Int32(0):
            stage, phase = accumulate(
                spec, first_mma, next_mma, a, b, sums, scales, full, empty, tid, group, stage, phase
            )
        else:
            stage, phase = skip(spec, full, empty, tid, stage, phase)
        if const_expr(spec.swap):
            store_swapped(
                spec, sums, staging, tid, group, row, count, column, out, out_stride, out_scale, out_scale_stride
            )
        elif working != Int32(0):
            # Looked up again rather than kept: the main loop needs the registers.
            _, row, count, column = locate(spec, tile, rows, order, tiles)
            store_wide(
                spec, sums, staging, tid, group, row, count, column, out, out_stride, out_scale, out_scale_stride
            )


@cute.jit
def accumulate(
    spec: cutlass.Constexpr, first_mma: cutlass.Constexpr, next_mma: cutlass.Constexpr,
    a: cute.Tensor, b: cute.Tensor, sums: cutlass.Constexpr, scales: Int32,
    full: cute.Pointer, empty: cute.Pointer, tid: Int32, group: Int32, stage: Int32, phase: Int32,
):  # fmt: skip
    """The main loop over K of one tile."""
    halves = len(sums)
    for half in range_constexpr(halves):
        sums[half].fill(0.0)
    previous = stage
    for step in range(spec.k_steps):
        cute.arch.mbarrier_wait(full + stage, phase)
        if const_expr(spec.scaled and spec.swap):
            parts = [cute.make_rmem_tensor(sums[0].shape, Float32) for _ in range(halves)]
            warpgroup.fence()
            for half in range_constexpr(halves):
                for k in range_constexpr(4):
                    multiply(spec, first_mma if k == 0 else next_mma, parts[half], a, b, group, half, k, stage)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            promote_swapped(spec, sums, parts, scales + stage * (4 * spec.scale_stage_floats), tid, group)
            release(spec, empty + stage, tid)
        elif const_expr(spec.scaled):
            factors = wide_factors(spec, scales + stage * (4 * spec.scale_stage_floats), tid, group)
            for half in range_constexpr(halves):
                part = cute.make_rmem_tensor(sums[0].shape, Float32)
                warpgroup.fence()
                for k in range_constexpr(4):
                    multiply(spec, first_mma if k == 0 else next_mma, part, a, b, group, half, k, stage)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if const_expr(half == halves - 1):
                    release(spec, empty + stage, tid)
                promote_wide(sums[half], part, factors[half])
        else:
            warpgroup.fence()
            for k in range_constexpr(4):
                for half in range_constexpr(halves):
                    multiply(spec, next_mma, sums[half], a, b, group, half, k, stage)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if step > 0:
                release(spec, empty + previous, tid)
            previous = stage
        stage += 1
        if stage == Int32(spec.stages):
            stage = Int32(0)
            phase = phase ^ 1
    if const_expr(not spec.scaled):
        warpgroup.wait_group(0)
        release(spec, empty + previous, tid)
    return stage, phase


@cute.jit
def skip(
    spec: cutlass.Constexpr, full: cute.Pointer, empty: cute.Pointer, tid: Int32, stage: Int32, phase: Int32
):  # fmt: skip
    """Give back a tile's stages unread."""
    for _ in range(spec.k_steps):
        cute.arch.mbarrier_wait(full + stage, phase)
        release(spec, empty + stage, tid)
        stage += 1
        if stage == Int32(spec.stages):
            stage = Int32(0)
            phase = phase ^ 1
    return stage, phase


def make_mma(kind: Any, columns: int) -> Any:
    """One warpgroup, m64, both operands K-major in shared memory."""
    return make_trivial_tiled_mma(kind, kind, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, columns))


def multiply(
    spec: GroupedSpec, mma: Any, sums: Any, a: Any, b: Any, group: Int32, half: int, k: int, stage: Int32
) -> None:
    """One WGMMA of the warpgroup: 32 bytes of K."""
    if spec.swap:
        m, n = group * 2 + half, 0
    else:
        m, n = group, half
    rows = cute.append_ones(a[(None, m, k, stage)], 2)
    columns = cute.append_ones(b[(None, n, k, stage)], 2)
    cute.gemm(mma, sums, rows, columns, sums)


def promote_swapped(spec: GroupedSpec, sums: Any, parts: Any, scales: Int32, tid: Int32, group: Int32) -> None:
    """FP8: products over 128 of K, times their token's and their weights' scale, into the FP32 sums.

    Register ``i + 2h + 4c`` of a fragment holds row ``16·warp + lane/4 + 8h`` and column ``8c + 2·(lane mod 4) + i``.
    Rows are weights: FC1 has gate in h = 0 and up in h = 1, FC2 a block of 128 rows a warpgroup.
    """
    weight = dev.load_shared_f32x2(scales + spec.tokens * 4)
    by_row = weight if spec.parts == 2 else [dev.select_f32(group == Int32(0), *weight)] * 2
    for c in range(spec.tokens // 8):
        token = dev.load_shared_f32x2(scales + (c * 8 + (tid % 4) * 2) * 4)
        for h in range(2):
            for i in range(2):
                at = i + 2 * h + 4 * c
                factor = token[i] * by_row[h]
                for total, part in zip(sums, parts):
                    total[at] = total[at] + part[at] * factor


def wide_factors(spec: GroupedSpec, scales: Int32, tid: Int32, group: Int32) -> Any:
    """FP8, tokens as rows: ``[half][h][column group parity]``, the products of both scales."""
    row = group * 64 + (tid % WARPGROUP // WARP) * 16 + tid % WARP // 4
    weight = dev.load_shared_f32x2(scales + spec.tokens * 4)
    token = [dev.load_shared_f32(scales + row * 4), dev.load_shared_f32(scales + row * 4 + 32)]
    if spec.parts == 2:  # of the groups of 8 columns, the even are gate and the odd are up
        return [[[t * w for w in weight] for t in token]] * 2
    return [[[t * w] * 2 for t in token] for w in weight]


def promote_wide(sums: Any, part: Any, factors: Any) -> None:
    """As :func:`promote_swapped`, for one half of the weight rows."""
    for c in range(WEIGHT_ROWS // 16):
        for h in range(2):
            for i in range(2):
                at = i + 2 * h + 4 * c
                sums[at] = sums[at] + part[at] * factors[h][c % 2]


@cute.kernel
def grouped_gemm_kernel(
    spec: cutlass.Constexpr, tma: Any, tma_weights: Any,
    offsets: Int64, slots: Int64, x: Int64, x_stride: Int64, x_scale: Int64, x_scale_stride: Int64,
    weight_scale: Int64, out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64, weights: Any,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(tid // WARP)
    smem = SmemAllocator()
    kind = element_type(spec)
    token_layout = tile_layout(spec, spec.tokens, spec.stages)
    if const_expr(spec.low_bit is None):
        weight_layout = tile_layout(spec, WEIGHT_ROWS, spec.stages)
        weight_tile = smem.allocate_tensor(kind, weight_layout.outer, 1024, weight_layout.inner)
        packed = Int32(0)
    else:
        packed = dev.shared_address(smem.allocate(spec.stages * spec.weight_stage_bytes, 1024))
    token_tile = smem.allocate_tensor(kind, token_layout.outer, 1024, token_layout.inner)
    staging = smem.allocate(spec.staging_bytes, 128)
    scales = smem.allocate(4 * spec.stages * spec.scale_stage_floats, 16) if spec.scaled else staging
    rows = cute.make_tensor(smem.allocate_array(Int32, spec.experts + 1), cute.make_layout(spec.experts + 1))
    order = cute.make_tensor(smem.allocate_array(Int32, spec.experts + 1), cute.make_layout(spec.experts + 1))
    tiles = cute.make_tensor(smem.allocate_array(Int32, spec.experts + 1), cute.make_layout(spec.experts + 1))
    full = smem.allocate_array(Int64, spec.stages)
    empty = smem.allocate_array(Int64, spec.stages)

    if const_expr(spec.low_bit is None):  # noqa: SIM102 (one is decided when compiling, the other when running)
        if warp == Int32(1):
            cpasync.prefetch_descriptor(tma)
    if tid == Int32(0):
        for i in range_constexpr(spec.stages):
            cute.arch.mbarrier_init(full + i, 1 + WARPGROUP)
            cute.arch.mbarrier_init(empty + i, spec.consumer_warpgroups * spec.cluster)
        cute.arch.mbarrier_init_fence()
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if warp == Int32(0):
        fill_schedule(spec, offsets, rows, order, tiles, tid % WARP)
    if const_expr(spec.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    if warp < Int32(WARPGROUP // WARP):
        cute.arch.setmaxregister_decrease(REGISTERS[spec.consumer_warpgroups][0])
        to, source = None, None
        if const_expr(spec.low_bit is None):
            tiled = cute.zipped_divide(tma_weights, (WEIGHT_ROWS, spec.k_tile))
            to, source = cpasync.tma_partition(
                tma,
                block_in_cluster() if spec.cluster > 1 else 0,
                cute.make_layout(spec.cluster),
                cute.group_modes(weight_tile, 0, 2),
                cute.group_modes(tiled, 0, 1),
            )
        produce(
            spec, tma, to, source, dev.shared_address(token_tile.iterator), dev.shared_address(scales),
            full, empty, rows, order, tiles, slots, x, x_stride, x_scale, x_scale_stride, weight_scale, weights, packed,
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(REGISTERS[spec.consumer_warpgroups][1])
        if const_expr(spec.low_bit is None):
            consume(
                spec, weight_tile, token_tile, dev.shared_address(scales), dev.shared_address(staging),
                full, empty, rows, order, tiles, out, out_stride, out_scale, out_scale_stride,
            )  # fmt: skip
        else:
            consume_widened(
                spec, packed, token_tile, dev.shared_address(staging), full, empty, rows, order, tiles,
                weight_scale, slots, x_scale, x_scale_stride, out, out_stride, out_scale, out_scale_stride,
            )  # fmt: skip
    if const_expr(spec.cluster > 1):
        # No block ends while another may still write into its shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


SIGNATURE = "lllllllllllli"


@cute.jit
def grouped_gemm(
    spec: cutlass.Constexpr, anchor: cute.Tensor,
    weights: Int64, offsets: Int64, slots: Int64, x: Int64, x_stride: Int64, x_scale: Int64, x_scale_stride: Int64,
    weight_scale: Int64, out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64,
    grid: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`grouped_gemm_kernel`; strides in bytes."""
    tma, tma_weights = None, None
    if const_expr(spec.low_bit is None):
        tma, tma_weights = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp() if spec.cluster > 1 else cpasync.CopyBulkTensorTileG2SOp(),
            weight_tensor(spec, weights),
            cute.select(tile_layout(spec, WEIGHT_ROWS, 1), mode=[0, 1]),
            (WEIGHT_ROWS, spec.k_tile),
            spec.cluster,
        )
    grouped_gemm_kernel(
        spec, tma, tma_weights, offsets, slots, x, x_stride, x_scale, x_scale_stride, weight_scale,
        out, out_stride, out_scale, out_scale_stride, weights if spec.low_bit is not None else None,
    ).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], cluster=[spec.cluster, 1, 1], stream=stream, use_pdl=True,
        min_blocks_per_mp=1,
    )  # fmt: skip
