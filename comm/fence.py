"""Fence: dispatch pushes, one system-scope release a rank and step, combine pulls (paper §4.1, Algorithm 1).

Dispatch. ``grid`` blocks of ``payload_warps + 1`` warps; block b serves tokens b, b + grid, …

    payload warps   a thread holds one 16-byte vector of the token a chunk and stores it to every target rank
    routing warp    lane j finds the rank of selection j, lane r takes the next slot on rank r (atomic), the lanes store
                    ids and weights, one packet a rank; at the end it releases and waits
    barriers        one a token passes the slots through shared memory (double-buffered by token parity), two at the end

The last block to finish (acq_rel atomic; a grid of one needs none) releases once at system scope and stores one 64-bit
word to each peer: the step above, the slot count below, so count and flag arrive together. The last ``waiters`` blocks
(no more than are resident at one a multiprocessor; blocks before them have left) acquire all peers' words and
invalidate their shares of the ids past the counts. So neither a counter-reset nor a sanitizing
kernel is launched: two launches a step instead of the public implementation's five.

Combine. Block 0 announces with a release that this rank's partial results are written and resets the counters for the
next dispatch; every block acquires all announcements; then each thread loads its vector from all target ranks before
the first add, and adds in ascending rank order in FP32.

Nothing on the way to the first remote access waits for the state word, and what is needed after a barrier is loaded
before it.

With an encoder, payload warps make their vectors out of BF16 rows (:mod:`moe_layer.comm.encode_row`), while the routing
warp takes slots; the scales pass the same barrier as the slots, double-buffered likewise.

Shared memory: 2·ep_size + 1 words; with an encoder two rows' scales and a word a warp. Invariants: docs/protocols.md.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from moe_layer.comm import device as dev
from moe_layer.comm.encode_row import allocate_scales, encode_row, pick_up_scales
from moe_layer.comm.layout import STATE_COMBINED, STATE_DONE, STATE_STEP_COMBINE, STATE_STEP_DISPATCH, SyncOffsets
from moe_layer.comm.routing import (
    PeerBases,
    announce,
    destination_bits,
    load_routing,
    payload_source,
    row_address,
    store_routing,
    sum_partials,
)
from moe_layer.comm.spec import WARP
from moe_layer.comm.status import ErrorCode, Phase


@cute.kernel
def fence_dispatch_kernel(
    spec: cutlass.Constexpr,
    ws: Int64, peers: Int64, table: Int64,
    hidden: Int64, scale: Int64, ids: Int64, weights: Int64, hidden_stride: Int64, scale_stride: Int64,
    to_hidden: Int64, to_scale: Int64, to_routing: Int64,
    rank: Int32, num_tokens: Int32, t_hat: Int32, own_hash: Uint32, placement: Uint32, waiters: Int32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    grid = cute.arch.grid_dim()[0]
    warp = cute.arch.make_warp_uniform(tid // WARP)
    lane = tid % WARP
    p = spec.ep_size
    sync = SyncOffsets(p)
    payload_threads = spec.payload_warps * WARP
    shared = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * p + 1), cute.make_layout(2 * p + 1))
    routing = warp == Int32(spec.payload_warps)
    if const_expr(spec.encoder is not None):
        scales, per_warp = allocate_scales(spec, 2)

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    step_before, _, error, _ = dev.load_vector(ws)
    step = step_before + Uint32(1)
    alive = error == Uint32(0)
    bases = PeerBases(peers, p)

    parity = Int32(0)
    for i in range(block, num_tokens, grid):
        vectors = []
        for c in range_constexpr(spec.chunks if spec.encoder is None else 0):
            v = tid + c * payload_threads
            vectors.append(dev.load_vector(payload_source(spec, v, i, hidden, scale, hidden_stride, scale_stride)))
        expert = Int32(-1)
        weight = Uint32(0)
        if routing:
            expert, weight, target = load_routing(spec, ids, weights, table, i, lane, Int32(1))
            for w in range_constexpr(-(-p // WARP)):
                bits = destination_bits(target, w)
                r = lane + w * WARP
                if r < Int32(p):
                    slot = Int32(-1)
                    if (bits >> Uint32(lane)) & Uint32(1) != Uint32(0) and alive:
                        slot = Int32(dev.atomic_add_relaxed(ws + sync.counters + Int64(r) * 4, Uint32(1)))
                    shared[parity * p + r] = slot
                    dev.store_u32(ws + sync.end + Int64(i * p + r) * 4, Uint32(slot))
        elif i == block and alive:
            # A Sentinel step before this one may leave peers computing on their workspaces (docs/protocols.md, mixing).
            # Payload warps wait, because the routing warp has the longer way to the first barrier.
            if warp == Int32(0):
                for r in range(lane, p, WARP):
                    dev.wait_flag(
                        ws + sync.combine_flags + Int64(r) * 8, ws + sync.announcements + Int64(r) * 8, ws,
                        Uint32(Phase.FENCE_ENTRY), Uint32(r), step_before, step, own_hash,
                    )  # fmt: skip
        if const_expr(spec.encoder is not None):
            words_made = [Uint32(0)] * (4 * spec.chunks)
            if not routing:
                words_made = encode_row(
                    spec, scales + parity * spec.scale_bytes, per_warp, Int32(0), tid,
                    hidden + Int64(i) * hidden_stride, Uint32(1), scale,
                )  # fmt: skip
        cute.arch.sync_threads()
        if const_expr(spec.encoder is not None):
            for c in range_constexpr(spec.chunks):
                v = tid + c * payload_threads
                made = words_made[4 * c : 4 * c + 4]
                vectors.append(pick_up_scales(spec, scales + parity * spec.scale_bytes, Int32(0), v, made))
        for r in range_constexpr(p):
            slot = shared[parity * p + r]
            if slot >= Int32(0):
                peer = bases[r]
                row = Int64(rank * t_hat + slot)
                if routing:
                    store_routing(spec, peer + to_routing + row * (spec.top_k * 8), Uint32(expert), weight, lane)
                else:
                    for c in range_constexpr(spec.chunks):
                        v = tid + c * payload_threads
                        if v < Int32(spec.vectors):
                            dev.store_vector_sys(row_address(spec, v, peer, to_hidden, to_scale, row), vectors[c])
        parity = parity ^ Int32(1)

    if routing and block == Int32(0):
        announce(spec, ws, peers, rank, step, own_hash, placement, t_hat, lane)
        if lane == Int32(0):
            dev.store_u32(ws + STATE_STEP_COMBINE, step)
    # The last block to finish releases for the whole rank.
    cute.arch.sync_threads()
    if tid == Int32(0):
        finished = Int32(0)
        if grid > Int32(1):
            finished = Int32(dev.atomic_add_acq_rel(ws + STATE_DONE, Uint32(1)))
        shared[2 * p] = finished
    cute.arch.sync_threads()
    if routing:
        if alive and shared[2 * p] == grid - 1:
            dev.fence_sys()
            for r in range(lane, p, WARP):
                taken = dev.load_u32_sys(ws + sync.counters + Int64(r) * 4)
                peer = dev.load_i64(peers + Int64(r) * 8)
                dev.store_u64_sys(peer + sync.dispatch_flags + Int64(rank) * 8, dev.flag_word(step, taken))
    waiter = block - (grid - waiters)
    if routing and waiter >= Int32(0):
        for r in range(lane, p, WARP):
            count = Int32(0)
            if alive:
                word = dev.wait_flag(
                    ws + sync.dispatch_flags + Int64(r) * 8, ws + sync.announcements + Int64(r) * 8, ws,
                    Uint32(Phase.FENCE_DISPATCH), Uint32(r), step, step, own_hash, sync.combined,
                )  # fmt: skip
                # A peer that disagrees, or never came, leaves no slot valid.
                told = dev.load_u64_sys(ws + sync.announcements + Int64(r) * 8)
                if dev.high(word) == step:
                    if dev.low(told) == own_hash:
                        count = Int32(dev.low(word))
                    else:
                        dev.record_error(
                            ws, Uint32(ErrorCode.MISMATCH), Uint32(Phase.FENCE_DISPATCH), Uint32(r), step, dev.low(told)
                        )
            shared[r] = count
    cute.arch.sync_threads()
    if waiter >= Int32(0):
        for r in range_constexpr(p):
            count = shared[r]
            for w in range(waiter * spec.threads + tid, (t_hat - count) * spec.top_k, waiters * spec.threads):
                row = Int64(r * t_hat + count + w // spec.top_k)
                at = ws + to_routing + (row * (2 * spec.top_k) + Int64(w % spec.top_k)) * 4
                dev.store_u32(at, Uint32(0xFFFFFFFF))


@cute.jit
def fence_dispatch(
    spec: cutlass.Constexpr,
    anchor: cute.Tensor,
    ws: Int64, peers: Int64, table: Int64,
    hidden: Int64, scale: Int64, ids: Int64, weights: Int64, hidden_stride: Int64, scale_stride: Int64,
    to_hidden: Int64, to_scale: Int64, to_routing: Int64,
    rank: Int32, num_tokens: Int32, t_hat: Int32, own_hash: Uint32, placement: Uint32, waiters: Int32, grid: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`fence_dispatch_kernel` on ``anchor``'s current stream."""
    # An encoder's values are many at once: promised nothing the compiler spills them, promised one block it takes twice
    # the registers, and half the blocks find room. More ranks than two need what they take. The carve-out is CUDA's
    # default; unless named, the compiler asks a GPU for it, and there may be none.
    encodes = spec.encoder is not None
    promised = spec.blocks_per_sm if encodes and spec.ep_size <= 2 else int(encodes)
    fence_dispatch_kernel(
        spec, ws, peers, table, hidden, scale, ids, weights, hidden_stride, scale_stride,
        to_hidden, to_scale, to_routing, rank, num_tokens, t_hat, own_hash, placement, waiters,
    ).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=promised,
        preferred_smem_carveout=-1 if encodes else None,
    )  # fmt: skip


@cute.kernel
def fence_combine_kernel(
    spec: cutlass.Constexpr,
    ws: Int64, peers: Int64, from_partials: Int64, output: Int64, output_stride: Int64,
    rank: Int32, num_tokens: Int32, t_hat: Int32, own_code: Uint32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    grid = cute.arch.grid_dim()[0]
    warp = cute.arch.make_warp_uniform(tid // WARP)
    lane = tid % WARP
    p = spec.ep_size
    sync = SyncOffsets(p)
    shared = cute.make_tensor(cute.arch.alloc_smem(Int32, 1), cute.make_layout(1))

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    _, step, error, _ = dev.load_vector(ws)
    bases = PeerBases(peers, p)
    first_slots = []
    for r in range_constexpr(p):
        at = ws + sync.end + Int64(block * p + r) * 4
        first_slots.append(Int32(dev.load_u32(at if block < num_tokens else ws)))

    if warp == Int32(spec.payload_warps):
        if block == Int32(0):
            dev.fence_sys()
            for r in range(lane, p, WARP):
                peer = dev.load_i64(peers + Int64(r) * 8)
                if error == Uint32(0):
                    dev.store_u64_sys(peer + sync.combine_flags + Int64(rank) * 8, dev.flag_word(step, own_code))
                dev.store_u32(ws + sync.counters + Int64(r) * 4, Uint32(0))
            if lane == Int32(0):
                dev.store_u32(ws + STATE_DONE, Uint32(0))
                dev.store_u32(ws + STATE_COMBINED, own_code)
                dev.store_u32(ws + STATE_STEP_DISPATCH, step)
        arrived = Int32(1)
        for r in range(lane, p, WARP):
            flag = ws + sync.combine_flags + Int64(r) * 8
            if error == Uint32(0):
                word = dev.wait_flag(flag, flag, ws, Uint32(Phase.FENCE_COMBINE), Uint32(r), step, step, own_code)
                if dev.low(word) != own_code or dev.high(word) != step:
                    arrived = Int32(0)
                    if dev.high(word) == step:
                        dev.record_error(
                            ws, Uint32(ErrorCode.MISMATCH), Uint32(Phase.FENCE_COMBINE), Uint32(r), step, dev.low(word)
                        )
            else:
                arrived = Int32(0)
        everyone = cute.arch.vote_all_sync(arrived == Int32(1))
        if lane == Int32(0):
            shared[0] = Int32(1) if everyone else Int32(0)
    cute.arch.sync_threads()
    everyone_here = shared[0] != Int32(0)

    for i in range(block, num_tokens, grid):
        slots = []
        for r in range_constexpr(p):
            slot = first_slots[r]
            if i != block:
                slot = Int32(dev.load_u32(ws + sync.end + Int64(i * p + r) * 4))
            slots.append(slot if everyone_here else Int32(-1))
        for c in range(spec.chunks):
            v = tid + c * (spec.payload_warps * WARP)
            if v < Int32(spec.vectors) and tid < Int32(spec.payload_warps * WARP):
                loaded = []
                for r in range_constexpr(p):
                    # Ranks without this token read a harmless local line: no branch between the loads.
                    at = ws
                    if slots[r] >= Int32(0):
                        at = (
                            bases[r] + from_partials
                            + Int64(rank * t_hat + slots[r]) * spec.combine_bytes + Int64(v) * 16
                        )  # fmt: skip
                    loaded.append(dev.load_vector_sys(at))
                sum_partials(spec, loaded, [s >= Int32(0) for s in slots], output + Int64(i) * output_stride, v)


@cute.jit
def fence_combine(
    spec: cutlass.Constexpr,
    anchor: cute.Tensor,
    ws: Int64, peers: Int64, from_partials: Int64, output: Int64, output_stride: Int64,
    rank: Int32, num_tokens: Int32, t_hat: Int32, own_code: Uint32, grid: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`fence_combine_kernel` on ``anchor``'s current stream."""
    fence_combine_kernel(
        spec, ws, peers, from_partials, output, output_stride, rank, num_tokens, t_hat, own_code
    ).launch(grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True)  # fmt: skip
