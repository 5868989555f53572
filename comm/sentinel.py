"""Sentinel: the data are their own flags; no fence, no handshake (paper §4.2, Algorithm 2).

Dispatch. Block b serves slots b, b + grid, … < T̂ (grid order is push order, so the lowest unfinished slot of any rank
always has every peer's token on its way). Per slot i, warps and what they wait for:

    every warp      finds the target ranks of token i itself (lane j: selection j; a warp-wide OR), no barrier
    payload warps   push a 16-byte vector a thread and chunk into landing slot i of each target rank; the own rank's
                    copy goes straight to its dispatch workspace
    one barrier     ORs "some word equals the sentinel" over the block
    routing warp    then pushes header, ids and weights to the target ranks, and a bare header to the others
    every warp      takes a first look at all sources' headers and its own vectors in one batch of loads, then polls
                    source by source, copies what arrived to the dispatch workspace and resets it to the sentinel
    one barrier     before the headers, which every warp reads, are reset

A payload may hold any bit pattern, the sentinel's too (0xFFFFFFFF): the producer flips the lowest bit of such a word,
says so in the slot's header, and each of its threads writes a 4-bit mask beside its vector, which the consumer applies.
Nothing is added to the wire, and nothing is waited for, unless such a word occurs.

Combine. Block of slot i: pushes the partial results of slot i to the sources that sent a token there, then polls the
partial results of its own token i, resets them and adds in ascending rank order in FP32. BF16 and FP32 partial results
need no escape: the sentinel is a NaN, which the producer replaces by another NaN. Block 0's routing warp also posts the
combine flag that a later Fence step waits for, and compares the peers' flags of the step before with its own.

With an encoder, payload warps make their vectors out of BF16 rows (:mod:`moe_layer.comm.encode_row`) before they push;
scales meet behind a barrier of the payload warps. Parts then split a row so that each has the scales of its own values.
Escapes act on the words that are sent, whoever made them.

Shared memory: none but the barriers'; with an encoder a part's scales and a word a warp. Invariants: docs/protocols.md.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from moe_layer.comm import device as dev
from moe_layer.comm.encode_row import allocate_scales, encode_row, payload_barrier, pick_up_scales
from moe_layer.comm.layout import (
    MAX_PARTS,
    META_STRIDE,
    STATE_COMBINED,
    STATE_STEP_COMBINE,
    STATE_STEP_DISPATCH,
    SyncOffsets,
)
from moe_layer.comm.routing import (
    PeerBases,
    announce,
    destination_bits,
    load_routing,
    part_vector,
    payload_source,
    row_address,
    store_routing,
    sum_partials,
)
from moe_layer.comm.spec import WARP
from moe_layer.comm.status import ErrorCode, Phase

# Vectors a thread looks at before it waits for the first of them; more spill.
FIRST_LOOKS = 4
# Header: bit 31 clear (never the sentinel), bit 30 a token follows, bit 29 some payload word of the part was escaped,
# rest the low 29 bits of the step's parameter hash.
PRESENT, ESCAPED, HASH = 1 << 30, 1 << 29, (1 << 29) - 1
# A meta slot: a header a part, then weight escapes in two half words (so that neither can equal the sentinel), then
# from word 8 top_k ids plus one and top_k weights.
META_ESCAPES, META_ROUTING = 4 * MAX_PARTS, 32


@cute.kernel
def sentinel_dispatch_kernel(
    spec: cutlass.Constexpr,
    ws: Int64, peers: Int64, table: Int64,
    hidden: Int64, scale: Int64, ids: Int64, weights: Int64, hidden_stride: Int64, scale_stride: Int64,
    to_hidden: Int64, to_scale: Int64, to_routing: Int64,
    present: Int64, meta: Int64, landing: Int64, escape: Int64, landing_stride: Int64,
    capacity: Int32, rank: Int32, num_tokens: Int32, t_hat: Int32, own_hash: Uint32, placement: Uint32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    grid = cute.arch.grid_dim()[0]
    warp = cute.arch.make_warp_uniform(tid // WARP)
    lane = tid % WARP
    p = spec.ep_size
    sync = SyncOffsets(p)
    routing = warp == Int32(spec.payload_warps)
    phase = Uint32(Phase.SENTINEL_DISPATCH)
    s = Uint32(dev.SENTINEL)
    part = block % Int32(spec.parts)
    leads = part == Int32(0)  # the first part also carries ids and weights

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    step_before, _, error, _ = dev.load_vector(ws)
    step = step_before + Uint32(1)
    # Two banks of meta slots: a rank that nothing is sent to may be a step behind when the next ids arrive.
    bank = meta + Int64(step & Uint32(1)) * (Int64(p * META_STRIDE) * Int64(capacity))
    alive = error == Uint32(0)
    bases = PeerBases(peers, p)
    if const_expr(spec.encoder is not None):
        scales, per_warp = allocate_scales(spec, 1)

    # T̂ = 0 still exchanges one empty slot, so that every step synchronizes.
    slots = t_hat if t_hat > Int32(0) else Int32(1)
    for i in range(block // spec.parts, slots, grid // spec.parts):
        # --- push ------------------------------------------------------------------------------------------------
        own_token = i < num_tokens
        token = i if own_token else Int32(0)
        vectors = []
        for c in range_constexpr(spec.chunks if spec.encoder is None else 0):
            v = part_vector(spec, part, tid, c)
            at = payload_source(spec, v, token, hidden, scale, hidden_stride, scale_stride)
            vectors.append(dev.load_vector(at if own_token else ws))
        expert, weight, target = load_routing(
            spec, ids, weights, table, token, lane, Int32(1) if own_token else Int32(0)
        )
        words = [destination_bits(target, w) for w in range(-(-p // WARP))]
        sends = []
        for r in range_constexpr(p):
            sends.append((words[r // WARP] >> Uint32(r % WARP)) & Uint32(1))
        slot_here = Int64(rank) * Int64(capacity) + Int64(i)
        if const_expr(spec.encoder is not None):
            at = hidden + Int64(token) * hidden_stride
            words_made = [Uint32(0)] * (4 * spec.chunks)
            if not routing:
                words_made = encode_row(spec, scales, per_warp, part, tid, at, Uint32(own_token), scale)
                payload_barrier(spec)
            for c in range_constexpr(spec.chunks):
                v = part_vector(spec, part, tid, c)
                vectors.append(pick_up_scales(spec, scales, part, v, words_made[4 * c : 4 * c + 4]))

        masks = []
        any_escape = Uint32(0)
        for c in range_constexpr(spec.chunks):
            mask = Uint32(0)
            if not routing and part_vector(spec, part, tid, c) < Int32(spec.vectors):
                mask = dev.sentinel_mask(*vectors[c])
            masks.append(mask)
            any_escape = any_escape | mask
        if not routing and alive:
            for c in range_constexpr(spec.chunks):
                v = part_vector(spec, part, tid, c)
                if v < Int32(spec.vectors):
                    for r in range_constexpr(p):
                        if sends[r] != Uint32(0):
                            if rank == Int32(r):
                                dev.store_vector(
                                    row_address(spec, v, ws, to_hidden, to_scale, Int64(r * t_hat + i)), vectors[c]
                                )
                            else:
                                dev.store_vector_sys(
                                    bases[r] + landing + slot_here * landing_stride + Int64(v) * 16,
                                    dev.flip_masked(masks[c], *vectors[c]),
                                )
        escaped = dev.block_or(any_escape)
        if not routing and escaped != Uint32(0) and alive:
            for c in range_constexpr(spec.chunks):
                v = part_vector(spec, part, tid, c)
                if v < Int32(spec.vectors):
                    for r in range_constexpr(p):
                        if sends[r] != Uint32(0) and rank != Int32(r):
                            at = bases[r] + escape + (slot_here * landing_stride + Int64(v) * 16) // 4
                            dev.store_u32_sys(at, masks[c])
        if routing and alive:
            weight_escapes = Uint32(0)
            sent_weight = weight
            if const_expr(spec.has_weights):
                weight_escapes = Uint32(cute.arch.vote_ballot_sync(weight == s))
                sent_weight = dev.select(weight == s, s ^ Uint32(1), weight)
            header = own_hash & Uint32(HASH)
            full = header | Uint32(PRESENT)
            if escaped != Uint32(0):
                full = full | Uint32(ESCAPED)
            for r in range_constexpr(p):
                if rank != Int32(r):
                    to = bases[r] + bank + slot_here * META_STRIDE
                    if lane == Int32(0):
                        dev.store_u32_sys(to + Int64(part) * 4, full if sends[r] != Uint32(0) else header)
                    if leads and sends[r] != Uint32(0):
                        store_routing(spec, to + META_ROUTING, Uint32(expert + 1), sent_weight, lane)
                        if const_expr(spec.has_weights):
                            if lane < Int32(2):
                                half = (weight_escapes >> Uint32(16 * lane)) & Uint32(0xFFFF)
                                dev.store_u32_sys(to + META_ESCAPES + Int64(lane) * 4, half)
                elif leads:
                    if i < t_hat:
                        own = expert if sends[r] != Uint32(0) else Int32(-1)
                        store_routing(
                            spec, ws + to_routing + Int64(r * t_hat + i) * (8 * spec.top_k), Uint32(own), weight, lane
                        )
                    if lane == Int32(0):
                        dev.store_u32(ws + present + Int64(r * capacity + i) * 4, sends[r] * Uint32(PRESENT))
            if leads and own_token:
                for w in range_constexpr(-(-p // WARP)):
                    r = lane + w * WARP
                    if r < Int32(p):
                        taken = i if (words[w] >> Uint32(lane)) & Uint32(1) != Uint32(0) else Int32(-1)
                        dev.store_u32(ws + sync.end + Int64(i * p + r) * 4, Uint32(taken))
        if routing and block == Int32(0) and i == Int32(0):
            announce(spec, ws, peers, rank, step, own_hash, placement, t_hat, lane)
            if lane == Int32(0):
                dev.store_u32(ws + STATE_STEP_COMBINE, step)

        # --- receive: a first look at a batch of sources, then source by source ---------------------------------------
        batch = max(1, FIRST_LOOKS // spec.chunks)
        for first in range_constexpr(0, p, batch):
            headers = []
            looks = []
            for r in range_constexpr(first, min(p, first + batch)):
                slot = Int64(r) * Int64(capacity) + Int64(i)
                headers.append(dev.load_u32_sys(ws + bank + slot * META_STRIDE + Int64(part) * 4))
                for c in range_constexpr(spec.chunks):
                    v = part_vector(spec, part, tid, c)
                    at = ws + landing + slot * landing_stride + Int64(v) * 16
                    looks.append(dev.load_vector_sys(at if v < Int32(spec.vectors) else ws))
            for r in range_constexpr(first, min(p, first + batch)):
                if rank != Int32(r):
                    slot = Int64(r) * Int64(capacity) + Int64(i)
                    told = ws + sync.announcements + r * 8
                    header = headers[r - first]
                    if alive:
                        at = ws + bank + slot * META_STRIDE + Int64(part) * 4
                        header = dev.poll_word(header, at, told, ws, phase, Uint32(r), step, own_hash, sync.combined)
                        if header == s:
                            header = Uint32(0)
                        elif (header ^ own_hash) & Uint32(HASH) != Uint32(0):
                            dev.record_error(
                                ws, Uint32(ErrorCode.MISMATCH), phase, Uint32(r), step, header & Uint32(HASH)
                            )
                            header = Uint32(0)
                    else:
                        header = Uint32(0)
                    arrives = header & Uint32(PRESENT) != Uint32(0)
                    row = Int64(r * t_hat + i)
                    if routing:
                        if leads:
                            receive_routing(
                                spec, ws, bank + slot * META_STRIDE, told, to_routing, row, phase, Uint32(r), step,
                                own_hash, lane, arrives, i < t_hat,
                            )  # fmt: skip
                            if lane == Int32(0):
                                dev.store_u32(ws + present + Int64(r * capacity + i) * 4, header)
                    elif arrives:
                        for c in range_constexpr(spec.chunks):
                            v = part_vector(spec, part, tid, c)
                            if v < Int32(spec.vectors):
                                at = ws + landing + slot * landing_stride + Int64(v) * 16
                                look = looks[(r - first) * spec.chunks + c]
                                a, b, d, e = dev.poll_vector(
                                    *look, at, told, ws, phase, Uint32(r), step, own_hash, sync.combined
                                )
                                if header & Uint32(ESCAPED) != Uint32(0):
                                    word = ws + escape + (slot * landing_stride + Int64(v) * 16) // 4
                                    mask = dev.poll_word(
                                        dev.load_u32_sys(word), word, told, ws, phase, Uint32(r), step, own_hash
                                    )
                                    dev.store_u32(word, s)
                                    a, b, d, e = dev.flip_masked(mask, a, b, d, e)
                                dev.store_vector(row_address(spec, v, ws, to_hidden, to_scale, row), (a, b, d, e))
                                dev.store_vector(at, (s, s, s, s))
        cute.arch.sync_threads()
        if routing and alive:
            for r in range(lane, p, WARP):
                slot = Int64(r) * Int64(capacity) + Int64(i)
                dev.store_u32(ws + bank + slot * META_STRIDE + Int64(part) * 4, s)


@cute.jit
def receive_routing(
    spec: cutlass.Constexpr, ws: Int64, slot: Int64, told: Int64, to_routing: Int64, row: Int64, phase: Uint32,
    r: Uint32, step: Uint32, own_hash: Uint32, lane: Int32, arrives: cutlass.Boolean, in_range: cutlass.Boolean,
):  # fmt: skip
    """The routing warp's part of a slot: poll, copy out and reset ids and weights, or mark the slot empty."""
    s = Uint32(dev.SENTINEL)
    to = ws + to_routing + row * (8 * spec.top_k)
    words = 2 * spec.top_k if spec.has_weights else spec.top_k
    if arrives:
        escapes = Uint32(0)
        if const_expr(spec.has_weights):
            half = ws + slot + META_ESCAPES + Int64(lane % 2) * 4
            own_half = dev.poll_word(dev.load_u32_sys(half), half, told, ws, phase, r, step, own_hash)
            escapes = cute.arch.shuffle_sync(own_half, 0) | (cute.arch.shuffle_sync(own_half, 1) << Uint32(16))
            if lane < Int32(2):
                dev.store_u32(half, s)
        # The sender's lane of weight j, whose bit says that it was escaped: see load_routing.
        shift = spec.top_k if spec.top_k <= WARP // 2 else 0
        for j in range(lane, words, WARP):
            at = ws + slot + META_ROUTING + Int64(j) * 4
            word = dev.poll_word(dev.load_u32_sys(at), at, told, ws, phase, r, step, own_hash)
            dev.store_u32(at, s)
            if j < Int32(spec.top_k):
                word = word - Uint32(1)
            elif (escapes >> Uint32(j - spec.top_k + shift)) & Uint32(1) != Uint32(0):
                word = s
            dev.store_u32(to + Int64(j) * 4, word)
    elif in_range and lane < Int32(spec.top_k):
        dev.store_u32(to + Int64(lane) * 4, s)


@cute.jit
def sentinel_dispatch(
    spec: cutlass.Constexpr,
    anchor: cute.Tensor,
    ws: Int64, peers: Int64, table: Int64,
    hidden: Int64, scale: Int64, ids: Int64, weights: Int64, hidden_stride: Int64, scale_stride: Int64,
    to_hidden: Int64, to_scale: Int64, to_routing: Int64,
    present: Int64, meta: Int64, landing: Int64, escape: Int64, landing_stride: Int64,
    capacity: Int32, rank: Int32, num_tokens: Int32, t_hat: Int32, own_hash: Uint32, placement: Uint32, grid: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`sentinel_dispatch_kernel` on ``anchor``'s current stream."""
    # Promised one block a multiprocessor, the compiler takes 106 registers a thread, and a second block of more than
    # 309 threads finds no room. Promised nothing it takes 78: T = 256 goes from 18.5 to 17.0 us (2 x H200, V4.1).
    # Other widths, more ranks and parts, and 32 values a thread to encode would spill.
    few_values = spec.encoder is None or spec.encoder.vector_values == 16
    two_blocks_fit = spec.parts == 1 and spec.ep_size <= 4 and 309 < spec.threads <= 416 and few_values
    sentinel_dispatch_kernel(
        spec, ws, peers, table, hidden, scale, ids, weights, hidden_stride, scale_stride,
        to_hidden, to_scale, to_routing, present, meta, landing, escape, landing_stride,
        capacity, rank, num_tokens, t_hat, own_hash, placement,
    ).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True,
        min_blocks_per_mp=0 if two_blocks_fit else 1,
    )  # fmt: skip


@cute.kernel
def sentinel_combine_kernel(
    spec: cutlass.Constexpr,
    ws: Int64, peers: Int64, from_partials: Int64, output: Int64, output_stride: Int64,
    present: Int64, partials: Int64, partial_stride: Int64, capacity: Int32,
    rank: Int32, num_tokens: Int32, t_hat: Int32, own_code: Uint32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    grid = cute.arch.grid_dim()[0]
    warp = cute.arch.make_warp_uniform(tid // WARP)
    lane = tid % WARP
    p = spec.ep_size
    sync = SyncOffsets(p)
    phase = Uint32(Phase.SENTINEL_COMBINE)
    s = Uint32(dev.SENTINEL)

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    _, step, error, _ = dev.load_vector(ws)
    alive = error == Uint32(0)
    bases = PeerBases(peers, p)
    part = block % Int32(spec.parts)

    if warp == Int32(spec.payload_warps):
        if block == Int32(0):
            if lane == Int32(0):
                dev.store_u32(ws + STATE_STEP_DISPATCH, step)
            if alive:
                # Nobody in this step waits for it: a later Fence step does, and a peer's slow path reads the code.
                dev.fence_sys()
                for r in range(lane, p, WARP):
                    peer = dev.load_i64(peers + Int64(r) * 8)
                    dev.store_u64_sys(peer + sync.combine_flags + Int64(rank) * 8, dev.flag_word(step, own_code))
                # A rank that its peer sent nothing waits for nothing: what it missed in the step before, it sees here.
                for r in range(lane, p, WARP):
                    flag = dev.load_u64_sys(ws + sync.combine_flags + Int64(r) * 8)
                    dev.check_combined(ws, flag, Uint32(r), step - Uint32(1))
                cute.arch.sync_warp()
            if lane == Int32(0):
                dev.store_u32(ws + STATE_COMBINED, own_code)
    else:
        for i in range(block // spec.parts, t_hat, grid // spec.parts):
            arrived = []
            for r in range_constexpr(p):
                arrived.append(dev.load_u32(ws + present + Int64(r * capacity + i) * 4) & Uint32(PRESENT))
            mine = []
            for r in range_constexpr(p):
                slot = Int32(-1)
                if i < num_tokens and alive:
                    slot = Int32(dev.load_u32(ws + sync.end + Int64(i * p + r) * 4))
                mine.append(slot >= Int32(0))
            for c in range(spec.chunks):
                v = part_vector(spec, part, tid, c)
                if v < Int32(spec.vectors):
                    for r in range_constexpr(p):
                        x = dev.load_vector(
                            ws + from_partials + Int64(r * t_hat + i) * spec.combine_bytes + Int64(v) * 16
                        )
                        if rank != Int32(r) and arrived[r] != Uint32(0) and alive:
                            slot_address = (
                                bases[r] + partials + (Int64(i) * p + Int64(rank)) * partial_stride + Int64(v) * 16
                            )
                            dev.store_vector_sys(slot_address, [dev.other_nan(w, spec.element_bytes) for w in x])
            for c in range(spec.chunks):
                v = part_vector(spec, part, tid, c)
                if v < Int32(spec.vectors) and i < num_tokens:
                    loaded = []
                    for r in range_constexpr(p):
                        at = ws + partials + (Int64(i) * p + Int64(r)) * partial_stride + Int64(v) * 16
                        if rank == Int32(r):
                            at = ws + from_partials + Int64(r * t_hat + i) * spec.combine_bytes + Int64(v) * 16
                        loaded.append(dev.load_vector_sys(at if mine[r] else ws))
                    for r in range_constexpr(p):
                        a, b, d, e = loaded[r]
                        if mine[r] and rank != Int32(r):
                            at = ws + partials + (Int64(i) * p + Int64(r)) * partial_stride + Int64(v) * 16
                            flag = ws + sync.combine_flags + r * 8
                            a, b, d, e = dev.poll_vector(a, b, d, e, at, flag, ws, phase, Uint32(r), step, own_code)
                            dev.store_vector(at, (s, s, s, s))
                        loaded[r] = (a, b, d, e)
                    sum_partials(spec, loaded, mine, output + Int64(i) * output_stride, v)


@cute.jit
def sentinel_combine(
    spec: cutlass.Constexpr,
    anchor: cute.Tensor,
    ws: Int64, peers: Int64, from_partials: Int64, output: Int64, output_stride: Int64,
    present: Int64, partials: Int64, partial_stride: Int64, capacity: Int32,
    rank: Int32, num_tokens: Int32, t_hat: Int32, own_code: Uint32, grid: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`sentinel_combine_kernel` on ``anchor``'s current stream."""
    sentinel_combine_kernel(
        spec, ws, peers, from_partials, output, output_stride, present, partials, partial_stride, capacity,
        rank, num_tokens, t_hat, own_code,
    ).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
    )  # fmt: skip
