"""Router logits on Hopper: ``x [T, hidden] · weight [E, hidden]``, BF16 rows, FP32 weights as exact BF16 terms.

Weights are WGMMA's M, tokens its N, whatever the number of tokens: a logit is the same chain of the same instructions.
A block computes a tile of experts × tokens over one segment of the hidden dimension (few tokens) or over a group of
segments (many), see :mod:`moe_layer.gemm.router_spec`, and writes partial sums to ``partials[part, token, expert]``.

Warps: one or two consumer warpgroups of 64 experts each, then one producer warp.

    producer, a stage:  wait empty · expect the stage's bytes · TMA: the weight tiles of all terms, the token tile
    consumer, a stage:  wait full · 4·terms WGMMA (K = 16 each) · arrive on empty when the WGMMAs before have ended
    segment's end:      wait for all WGMMAs · add to the block's sums, FP32, round to nearest

Barriers (two a stage): full counts 1 (the producer's expect); empty counts one for each consumer warpgroup of each
block of the cluster, and is not used where every stage is filled once. In a cluster (two neighbouring token tiles)
each block loads half of every weight tile into both.

The weights of the first stages are loaded before the wait for the kernel ahead, so that they stream while it ends. That
is sound: the terms are written by PyTorch, whose kernels let no dependent start before they end, and every kernel
between them and this one has therefore started, at the earliest, after they had ended.

Shared memory: per stage the weight tiles [term][rows][128 B] and the token tile [tokens][128 B], 128-byte swizzle.
With few tokens all loads of a block are in flight at once; nothing is exposed but one latency and the stream.

Predicted for an H200, this and the choice together in a chain of PDL launches, µs (V4.1 / K3 / V3): up to 16 tokens
4.5 / 6 / 5; 4096 tokens 38 / 115 / 33, bound by loads from L2 (85 FLOP a byte: 128 × 128 tiles, weights shared by two).
Not measured yet.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.router_spec import K_STEP, MMA_ROWS, WARP, WARPGROUP, LogitsSpec


def tile_layout(rows: int, stages: int) -> Any:
    """``(rows, K_STEP, stages)`` in the 128-byte swizzle, K-major."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, K_STEP, stages), order=(0, 1, 2))


def make_mma(spec: LogitsSpec) -> Any:
    """One warpgroup, both operands K-major in shared memory."""
    return make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (MMA_ROWS, spec.tokens)
    )


@cute.jit
def release(spec: cutlass.Constexpr, barrier: cute.Pointer, tid: Int32):
    """This warpgroup has read the stage; every block of the cluster is told, since each fills all of them."""
    for r in range_constexpr(spec.cluster):
        if tid % WARPGROUP == Int32(r * WARP):
            if const_expr(spec.cluster == 1):
                cute.arch.mbarrier_arrive(barrier)
            else:
                cute.arch.mbarrier_arrive(barrier, r)


@cute.jit
def load_weights(
    spec: cutlass.Constexpr, tma: cute.CopyAtom, to: cute.Tensor, source: cute.Tensor, full: cute.Pointer,
    row_tile: Int32, step: Int32, stage: Int32,
):  # fmt: skip
    """Announce a stage's bytes and start loading its weights, by one warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, spec.stage_bytes)
    for term in range_constexpr(spec.terms):
        cute.copy(
            tma,
            source[(None, (row_tile, step, term))],
            to[(None, stage * spec.terms + term)],
            tma_bar_ptr=full + stage,
            mcast_mask=Int16((1 << spec.cluster) - 1) if spec.cluster > 1 else None,
        )


@cute.jit
def produce(
    spec: cutlass.Constexpr, tma_w: cute.CopyAtom, w_to: cute.Tensor, w_from: cute.Tensor,
    tma_x: cute.CopyAtom, x_to: cute.Tensor, x_from: cute.Tensor, full: cute.Pointer, empty: cute.Pointer,
    row_tile: Int32, token_tile: Int32, first: Int32, steps: Int32,
):  # fmt: skip
    """The producer warp's work: ``steps`` K steps from ``first``."""
    ahead = dev.smaller(steps, Int32(spec.stages))
    for i in range(ahead):
        load_weights(spec, tma_w, w_to, w_from, full, row_tile, first + i, i)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    for i in range(ahead):
        cute.copy(tma_x, x_from[(None, (token_tile, first + i))], x_to[(None, i)], tma_bar_ptr=full + i)
    if const_expr(spec.refills):
        stage, phase = Int32(0), Int32(0)
        for i in range(ahead, steps):
            cute.arch.mbarrier_wait(empty + stage, phase)
            load_weights(spec, tma_w, w_to, w_from, full, row_tile, first + i, stage)
            cute.copy(tma_x, x_from[(None, (token_tile, first + i))], x_to[(None, stage)], tma_bar_ptr=full + stage)
            stage += 1
            if stage == Int32(spec.stages):
                stage = Int32(0)
                phase = phase ^ 1


@cute.jit
def consume(
    spec: cutlass.Constexpr, weight_tile: cute.Tensor, token_tile: cute.Tensor, full: cute.Pointer,
    empty: cute.Pointer, steps: Int32, tid: Int32, sums: Any,
):  # fmt: skip
    """A consumer warpgroup's sums over ``steps`` K steps."""
    group = cute.arch.make_warp_uniform(tid // WARPGROUP)
    mma = make_mma(spec)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    thread = mma.get_slice(0)
    a = mma.make_fragment_A(thread.partition_A(weight_tile))
    b = mma.make_fragment_B(thread.partition_B(token_tile))
    part = cute.make_rmem_tensor(mma.partition_shape_C((MMA_ROWS, spec.tokens)), Float32)
    sums.fill(Float32(0.0))
    stage, phase, previous = Int32(0), Int32(0), Int32(0)
    for start in range(Int32(0), steps, spec.segment):
        part.fill(Float32(0.0))
        for step in range(dev.smaller(steps - start, Int32(spec.segment))):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for term in range_constexpr(spec.terms):
                for k in range_constexpr(K_STEP // 16):
                    rows = cute.append_ones(a[(None, group, k, stage * spec.terms + term)], 2)
                    columns = cute.append_ones(b[(None, 0, k, stage)], 2)
                    cute.gemm(mma, part, rows, columns, part)
            warpgroup.commit_group()
            if const_expr(spec.refills):
                warpgroup.wait_group(1)
                if step > 0:
                    release(spec, empty + previous, tid)
                previous = stage
            stage += 1
            if stage == Int32(spec.stages):
                stage = Int32(0)
                phase = phase ^ 1
        warpgroup.wait_group(0)
        if const_expr(spec.refills):
            release(spec, empty + previous, tid)
        sums.store(sums.load() + part.load())


@cute.jit
def store(
    spec: cutlass.Constexpr, sums: Any, partials: Int64, part: Int32, row_tile: Int32, token_tile: Int32,
    tokens: Int32, tid: Int32,
):  # fmt: skip
    """Register ``i + 2h + 4c`` holds expert ``16·warp + lane/4 + 8h``, token ``8c + 2·(lane mod 4) + i``: a store of a
    warp writes four whole sectors.
    """
    lane = tid % WARP
    expert = row_tile * spec.rows + (tid // WARP) * 16 + lane // 4
    first = token_tile * spec.tokens + (lane % 4) * 2
    to = partials + ((Int64(part) * Int64(tokens) + Int64(first)) * spec.columns + Int64(expert)) * 4
    for c in range_constexpr(spec.tokens // 8):
        for i in range_constexpr(2):
            if first + (8 * c + i) < tokens:
                for h in range_constexpr(2):
                    dev.store_f32(to + ((8 * c + i) * spec.columns + 8 * h) * 4, sums[i + 2 * h + 4 * c])


@cute.kernel
def logits_kernel(
    spec: cutlass.Constexpr, tma_w: cute.CopyAtom, weights: cute.Tensor, tma_x: cute.CopyAtom, x: cute.Tensor,
    partials: Int64, tokens: Int32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    token_tile, row_tile, part = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // WARP)
    smem = SmemAllocator()
    w_layout = tile_layout(spec.rows, spec.stages * spec.terms)
    x_layout = tile_layout(spec.tokens, spec.stages)
    weight_tile = smem.allocate_tensor(BFloat16, w_layout.outer, 1024, w_layout.inner)
    token_tile_s = smem.allocate_tensor(BFloat16, x_layout.outer, 1024, x_layout.inner)
    full = smem.allocate_array(Int64, spec.stages)
    empty = smem.allocate_array(Int64, spec.stages)
    producing = warp == Int32(spec.consumers * WARPGROUP // WARP)
    if producing:
        cpasync.prefetch_descriptor(tma_w)
        cpasync.prefetch_descriptor(tma_x)
    if tid == Int32(0):
        for i in range_constexpr(spec.stages):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, spec.consumers * spec.cluster)
        cute.arch.mbarrier_init_fence()
    if const_expr(spec.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    first = part * (spec.segment * spec.span)
    steps = dev.smaller(Int32(spec.k_steps) - first, Int32(spec.segment * spec.span))
    if producing:
        w_to, w_from = cpasync.tma_partition(
            tma_w,
            cute.arch.block_idx_in_cluster() if spec.cluster > 1 else 0,
            cute.make_layout(spec.cluster),
            cute.group_modes(weight_tile, 0, 2),
            cute.group_modes(cute.zipped_divide(weights, (spec.rows, K_STEP)), 0, 1),
        )
        x_to, x_from = cpasync.tma_partition(
            tma_x,
            0,
            cute.make_layout(1),
            cute.group_modes(token_tile_s, 0, 2),
            cute.group_modes(cute.zipped_divide(x, (spec.tokens, K_STEP)), 0, 1),
        )
        produce(
            spec, tma_w, w_to, w_from, tma_x, x_to, x_from, full, empty, row_tile, token_tile, first, steps
        )  # fmt: skip
    else:
        sums = cute.make_rmem_tensor(make_mma(spec).partition_shape_C((MMA_ROWS, spec.tokens)), Float32)
        consume(spec, weight_tile, token_tile_s, full, empty, steps, tid, sums)
        # The partial sums of the step before may still be read until here.
        cute.arch.griddepcontrol_wait()
        store(spec, sums, partials, part, row_tile, token_tile, tokens, tid)
    if const_expr(spec.cluster > 1):
        # No block ends while another may still write into its shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def router_logits(
    spec: cutlass.Constexpr, anchor: cute.Tensor, weights: Int64, x: Int64, x_stride: Int64, partials: Int64,
    tokens: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`logits_kernel`; ``x_stride`` in units of 8 values, ``tokens`` ≥ 1."""
    e, k = spec.experts, spec.hidden
    w = cute.make_tensor(
        cute.make_ptr(BFloat16, weights, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((e, k, spec.terms), stride=(k, 1, e * k)),
    )
    rows = cute.make_tensor(
        cute.make_ptr(BFloat16, x, cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout((tokens, k), stride=(cute.assume(x_stride * 8, divby=8), 1)),
    )
    multicast = spec.cluster > 1
    tma_w, weight_tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp(),
        w,
        cute.select(tile_layout(spec.rows, 1), mode=[0, 1]),
        (spec.rows, K_STEP),
        spec.cluster,
    )
    tma_x, token_tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        rows,
        cute.select(tile_layout(spec.tokens, 1), mode=[0, 1]),
        (spec.tokens, K_STEP),
    )
    pairs = (tokens + (spec.tokens * spec.cluster - 1)) // (spec.tokens * spec.cluster)
    logits_kernel(spec, tma_w, weight_tensor, tma_x, token_tensor, partials, tokens).launch(
        grid=[pairs * spec.cluster, spec.row_tiles, spec.parts], block=[spec.threads, 1, 1],
        cluster=[spec.cluster, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1,
    )  # fmt: skip
