"""The indexing kernel (paper §3.3): rank-major expert ids → rows grouped by local expert, stable, and the way back.

A selection i = slot·top_k + j is local or elsewhere. Its row is ``offsets[e]`` + the local selections of its expert e
before i. Blocks take consecutive chunks of selections, warps consecutive parts of a tile, so that this number is a sum
over earlier blocks, earlier warps, and what is left inside the warp.

A tile (``threads × steps`` selections) in a block:

    load       all of a thread's ids at once, coalesced over lanes; global id → local expert
    rank       a step (32 selections) at a time: lanes of one expert find each other (match.any); the lowest of them
               adds their number to the warp's counter of the expert
    scan       thread e sums the warps' counters of expert e; a scan over experts gives each its place in the tile;
               then the counters hold where each warp's selections of an expert go in the tile
    stage      (number in the tile, expert) to that place in shared memory
    exchange   thread e learns what all blocks and the blocks before its own counted of expert e; a scan gives offsets
    write      ``rows`` in the order of the selections, ``slots`` in that of the tile's places: runs of consecutive
               words, where selections in their own order would scatter them (a sector each)

How blocks exchange counts depends on the number of selections:

    one block      not at all (decoding: 512 slots of top-8)
    one cluster    8 blocks send each other their counts (st.async into distributed shared memory); a block waits for
                   all 8 on its own barrier (one arrival, which expects 32·experts bytes). No block ends before it has
                   heard from all, so none is written to after its end; that all are there is established by a cluster
                   barrier before the wait for the kernel ahead
    grid           two launches: the first counts and writes ``counts[block, expert]``, the second reads all of them.
                   By programmatic dependent launch the second one's blocks come up beside the first one's and do
                   everything up to `stage` meanwhile. A launch boundary costs about what a barrier of the grid costs,
                   needs no counter that outlives a launch, and cannot hang: no block waits for one of its own grid

Reading ids before the second kernel's wait is sound: it starts only after every block of the first has passed its own
wait, so whatever wrote the ids has ended. They are read past L1 (relaxed, gpu scope).

All warps do the same; only the warps that hold an expert's thread scan. Issue slots, not latencies, bound a full tile
(about 45 instructions a step and warp), hence 16 warps with 8 steps each rather than 32 with 4: less is fixed.

Shared memory, words: warps·(experts + 1) counters (the last of a warp collects what is elsewhere), a tile of staged
selections, 3·(experts + 4), the table, 2·warps, and in a cluster 8·experts counts received. At 48 experts 21 KiB, at
512 in a cluster 72 KiB, at 1024 with a full table 221 KiB.

Predicted for an H200 in a chain of PDL launches, µs:

                                        launch  ids   rank  scan  stage  exchange  write  sum
    48 selections, one block             0.7    0.3   0.05  0.25   0.05     –       0.2   1.6
    2048 slots of top-16, cluster        0.7    0.35  0.5   0.3    0.1     0.3      0.5   2.8
    32768 of top-16, 128 blocks          0.7    0.4   0.4    –      –      1.7      0.7   4.0 … 5.0

(the grid's exchange is the end of one launch, 0.8, and 57 KB of counts from L2). Measured: docs/performance.md.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.arch import inline_ptx
from cutlass.memory import SmemAllocator

from moe_layer.gemm.index_launch import WARP

# Rows of other blocks' counts that a thread loads at a time, 16 bytes of each.
LOADS = 8
QUAD = 4
EXPERT_SHIFT = 16  # a staged selection: its number in the tile below, its expert above


def load_past_l1(addr: Int64, valid: Any, otherwise: Int32) -> Int32:
    """The word at ``addr``, or ``otherwise`` without reading."""
    return inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 t;\nsetp.ne.b32 p, {$r1}, 0;\nmov.b32 t, {$r2};\n"
        "@p ld.relaxed.gpu.global.b32 t, [{$r0}];\nmov.b32 {$w0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[addr, Int32(valid), otherwise],
    )


def load_quad_past_l1(addr: Int64, valid: Any) -> Any:
    """Four words, or zeros without reading."""
    return inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 a, b, c, d;\nsetp.ne.b32 p, {$r1}, 0;\n"
        "mov.b32 a, 0;\nmov.b32 b, 0;\nmov.b32 c, 0;\nmov.b32 d, 0;\n"
        "@p ld.relaxed.gpu.global.v4.b32 {a, b, c, d}, [{$r0}];\n"
        "mov.b32 {$w0}, a;\nmov.b32 {$w1}, b;\nmov.b32 {$w2}, c;\nmov.b32 {$w3}, d;\n}",
        write_only_types=[Int32] * QUAD,
        read_only_args=[addr, Int32(valid)],
    )


def send(shared: Int32, barrier: Int32, block: int, value: Int32) -> None:
    """Store a word at the same shared-memory address in a block of the cluster; its barrier counts the 4 bytes."""
    inline_ptx(
        "{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, {$r0}, {$r2};\n"
        "mapa.shared::cluster.u32 bar, {$r1}, {$r2};\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], {$r3}, [bar];\n}",
        read_only_args=[shared, barrier, Int32(block), value],
    )


def add_shared(shared: Int32, value: Int32) -> None:
    inline_ptx("red.shared.add.u32 [{$r0}], {$r1};", read_only_args=[shared, value])


def store(addr: Int64, value: Int32) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def smallest(a: Int32, b: Int32) -> Int32:
    return inline_ptx("min.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def smallest_unsigned(a: Uint32, b: Uint32) -> Int32:
    return inline_ptx("min.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def words(smem: SmemAllocator, count: int) -> Any:
    """``count`` words of shared memory."""
    return cute.make_tensor(smem.allocate_array(Int32, count), cute.make_layout(count))


def address(tensor: Any) -> Int32:
    return Int32(tensor.iterator.toint())


def steps_for(spec: Any, selections: Int32) -> Int32:
    """Steps that a tile of so many selections takes, evenly over the warps; at most ``steps``."""
    return smallest((selections + (spec.threads - 1)) // spec.threads, Int32(spec.steps))


def first_in_tile(steps: Int32, tid: Int32) -> Int32:
    """The selection of a tile that a thread holds in step 0; in step s it is 32·s further."""
    return (tid // WARP) * (steps * WARP) + tid % WARP


def limit(selections: Int32, steps: Int32, tid: Int32) -> Int32:
    """A thread holds a selection in step s where 32·s is below this, of a tile of so many (or more) selections."""
    warp_part = steps * WARP
    return smallest(selections - (tid // WARP) * warp_part, warp_part) - tid % WARP


@cute.jit
def load_ids(
    spec: cutlass.Constexpr, ids: Int64, stride: Int32, start: Int32, steps: Int32, end: Int32, tid: Int32
) -> Any:
    """A thread's ids of the tile that begins at selection ``start``; −1 where it holds none (see :func:`limit`)."""
    i = Uint32(start + first_in_tile(steps, tid))
    slot = i // Uint32(spec.top_k)
    j = Int32(i - slot * Uint32(spec.top_k))
    addr = ids + Int64(slot) * Int64(stride) + Int64(j) * 4
    whole, rest = WARP // spec.top_k, WARP % spec.top_k
    step_bytes = Int64(stride) * whole + 4 * rest
    found = []
    for s in range_constexpr(spec.steps):
        found.append(load_past_l1(addr, Int32(s * WARP) < end, Int32(-1)))
        addr = addr + step_bytes
        if const_expr(rest > 0):
            j = j + rest
            if j >= Int32(spec.top_k):
                j = j - spec.top_k
                addr = addr + Int64(stride - 4 * spec.top_k)
    return found


@cute.jit
def local_expert(spec: cutlass.Constexpr, expert: Int32, first: Int32, table: cute.Tensor) -> Int32:
    """The local index of a global id; ``experts`` where it is elsewhere. As unsigned, negative numbers are large."""
    local = Uint32(expert) - Uint32(first)
    if const_expr(spec.table > 0):
        known = Uint32(expert) < Uint32(spec.table)
        entry = Int32(table[expert if known else Int32(0)])
        local = Uint32(entry if known else Int32(-1))
    return smallest_unsigned(local, Uint32(spec.experts))


@cute.jit
def fill(tensor: cute.Tensor, count: cutlass.Constexpr, tid: Int32, threads: cutlass.Constexpr):
    """Zeros."""
    for i in range(tid, count, threads):
        tensor[i] = Int32(0)


@cute.jit
def load_table(spec: cutlass.Constexpr, source: Int64, table: cute.Tensor, tid: Int32):
    """The block's copy of the table."""
    if const_expr(spec.table > 0):
        for i in range(tid, spec.table, spec.threads):
            table[i] = load_past_l1(source + Int64(i) * 4, Int32(1), Int32(-1))


@cute.jit
def scan_experts(spec: cutlass.Constexpr, value: Int32, sums: cute.Tensor, tid: Int32) -> Int32:
    """For thread e the sum of the values of threads before it; one barrier of the block. ``sums``: a word a warp."""
    lane, warp = tid % WARP, tid // WARP
    scanning = warp < Int32(spec.scanning_warps)
    total = value
    if scanning:
        for power in range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << power, mask_and_clamp=0)
            if lane >= Int32(1 << power):
                total = total + below
        if lane == Int32(WARP - 1):
            sums[warp] = total
    cute.arch.sync_threads()
    if scanning:
        earlier = Int32(0)
        if lane < warp:
            earlier = Int32(sums[lane])
        total = total - value + cute.arch.warp_redux_sync(earlier, "add")
    return total


@cute.jit
def count_step(counter: cute.Tensor, at: Int32, mates: Uint32) -> Int32:
    """How many selections of its expert precede a lane's in the warp's part; all lanes call together."""
    before = Int32(cute.arch.popc(mates & cute.arch.lanemask_lt()))
    earlier = counter[at]
    cute.arch.sync_warp()
    if before == Int32(0):
        counter[at] = earlier + Int32(cute.arch.popc(mates))
    cute.arch.sync_warp()
    return earlier + before


@cute.kernel
def count_kernel(
    spec: cutlass.Constexpr, ids: Int64, stride: Int32, table_source: Int64,
    first: Int32, selections: Int32, chunk: Int32, counts: Int64,
):  # fmt: skip
    """The first of the grid's two launches: ``counts[block, expert]``. Order within a block does not matter here."""
    tid = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    smem = SmemAllocator()
    counter = words(smem, spec.counts_row)
    table = words(smem, max(1, spec.table))
    start = block * chunk
    length = smallest(selections - start, chunk)

    fill(counter, spec.counts_row, tid, spec.threads)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    load_table(spec, table_source, table, tid)
    cute.arch.sync_threads()
    for tile in range(Int32(0), length, spec.tile):
        steps = steps_for(spec, length - tile)
        found = load_ids(spec, ids, stride, start + tile, steps, limit(length - tile, steps, tid), tid)
        for s in range_constexpr(spec.steps):
            expert = local_expert(spec, found[s], first, table)
            # One add for all lanes of an expert: a tile of one expert must not queue at its counter.
            mates = cute.arch.match_sync(0xFFFFFFFF, expert, "any")
            leads = (mates & cute.arch.lanemask_lt()) == Uint32(0)
            if leads and expert < Int32(spec.experts):
                add_shared(address(counter) + expert * 4, Int32(cute.arch.popc(mates)))
    cute.arch.sync_threads()
    for e in range(tid, spec.counts_row, spec.threads):
        store(counts + (Int64(block) * spec.counts_row + Int64(e)) * 4, counter[e])


@cute.jit
def rank_tile(
    spec: cutlass.Constexpr, found: Any, steps: Int32, first: Int32, tid: Int32, table: cute.Tensor,
    counter: cute.Tensor,
) -> Any:  # fmt: skip
    """Rank; the counters are zeros before.

    Returns:
        (each step's expert, each step's number among the warp's selections of that expert, thread e's count of expert
        e in the tile).
    """
    at = (tid // WARP) * (spec.experts + 1)
    experts = [local_expert(spec, found[s], first, table) for s in range(spec.steps)]
    mates = [cute.arch.match_sync(0xFFFFFFFF, experts[s], "any") for s in range(spec.steps)]
    numbers = []
    for s in range_constexpr(spec.steps):
        number = Int32(0)
        if Int32(s) < steps:
            number = count_step(counter, at + experts[s], mates[s])
        numbers.append(number)
    cute.arch.sync_threads()
    own = Int32(0)
    if tid < Int32(spec.experts):
        for w in range_constexpr(spec.warps):
            own = own + counter[w * (spec.experts + 1) + tid]
    return experts, numbers, own


@cute.jit
def scan_tile(
    spec: cutlass.Constexpr, own: Int32, tid: Int32, counter: cute.Tensor, rows_here: cute.Tensor, sums: cute.Tensor
) -> Int32:
    """Turn the counters into places in the tile; ends with a barrier, after which ``rows_here[0]`` is the tile's rows.

    Returns:
        the first place of expert e, in thread e.
    """
    place = scan_experts(spec, own, sums, tid)
    if tid < Int32(spec.experts):
        # The counters are read again: more registers would keep the two launches from running side by side.
        running = place
        for w in range_constexpr(spec.warps):
            of_warp = counter[w * (spec.experts + 1) + tid]
            counter[w * (spec.experts + 1) + tid] = running
            running = running + of_warp
        if tid == Int32(spec.experts - 1):
            rows_here[0] = running
    cute.arch.sync_threads()
    return place


@cute.jit
def stage_tile(
    spec: cutlass.Constexpr, experts: Any, numbers: Any, steps: Int32, tid: Int32, counter: cute.Tensor,
    staged: cute.Tensor,
) -> Any:  # fmt: skip
    """Each local selection to its place in the tile; returns the places (of selections elsewhere, anything)."""
    at = (tid // WARP) * (spec.experts + 1)
    places = [numbers[s] + counter[at + experts[s]] for s in range(spec.steps)]
    word = first_in_tile(steps, tid)
    for s in range_constexpr(spec.steps):
        if experts[s] < Int32(spec.experts):
            staged[places[s]] = word + (s * WARP) | (experts[s] << EXPERT_SHIFT)
    return places


@cute.jit
def write_tile(
    spec: cutlass.Constexpr, experts: Any, places: Any, steps: Int32, start: Int32, end: Int32, tid: Int32,
    rows_here: cute.Tensor, staged: cute.Tensor, shift: cute.Tensor, slots: Int64, rows: Int64,
):  # fmt: skip
    """``rows`` of the tile's selections and ``slots`` of its rows; ``shift[e]`` leads from a place to its row."""
    found = [places[s] + shift[experts[s]] for s in range(spec.steps)]
    to = rows + Int64(Uint32(start + first_in_tile(steps, tid))) * 4
    for s in range_constexpr(spec.steps):
        row = found[s] if experts[s] < Int32(spec.experts) else Int32(-1)
        if Int32(s * WARP) < end:
            store(to + s * WARP * 4, row)
    for place in range(tid, Int32(rows_here[0]), spec.threads):
        word = Int32(staged[place])
        i = Uint32(start + (word & Int32((1 << EXPERT_SHIFT) - 1)))
        store(slots + Int64(place + Int32(shift[word >> EXPERT_SHIFT])) * 4, Int32(i // Uint32(spec.top_k)))


@cute.jit
def send_count(
    spec: cutlass.Constexpr, received: Int32, arrivals: Int32, block: Int32, own: Int32, tid: Int32
):  # fmt: skip
    """Thread e tells every block of the cluster, its own too, this block's count of expert e."""
    if tid < Int32(spec.experts):
        here = received + (block * spec.experts + tid) * 4
        for r in range_constexpr(spec.blocks):
            send(here, arrivals, r, own)


@cute.jit
def add_counts(
    spec: cutlass.Constexpr, counts: Int64, blocks: Int32, block: Int32, tid: Int32, total: cute.Tensor,
    before: cute.Tensor,
):  # fmt: skip
    """Add up what all blocks counted, and what blocks before this one counted; the sums are zeros before."""
    quads = spec.counts_row // QUAD
    reader, quad = tid // quads, tid % quads
    everyone = [Int32(0) for _ in range(QUAD)]
    earlier = [Int32(0) for _ in range(QUAD)]
    if reader < Int32(spec.readers):
        for r in range(reader, blocks, LOADS * spec.readers):
            loaded = []
            for q in range_constexpr(LOADS):
                other = r + q * spec.readers
                at = counts + (Int64(other) * spec.counts_row + Int64(quad * QUAD)) * 4
                loaded.append(load_quad_past_l1(at, other < blocks))
            for q in range_constexpr(LOADS):
                precedes = r + q * spec.readers < block
                for c in range_constexpr(QUAD):
                    everyone[c] = everyone[c] + loaded[q][c]
                    earlier[c] = earlier[c] + (loaded[q][c] if precedes else Int32(0))
        for c in range_constexpr(QUAD):
            add_shared(address(total) + (quad * QUAD + c) * 4, everyone[c])
            add_shared(address(before) + (quad * QUAD + c) * 4, earlier[c])


@cute.kernel
def place_kernel(
    spec: cutlass.Constexpr, ids: Int64, stride: Int32, table_source: Int64,
    first: Int32, selections: Int32, chunk: Int32,
    offsets: Int64, slots: Int64, rows: Int64, counts: Int64, blocks: Int32,
):  # fmt: skip
    """Everything for one block or cluster; the second launch for a grid."""
    tid = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    smem = SmemAllocator()
    counter = words(smem, spec.warps * (spec.experts + 1))
    staged = words(smem, spec.tile)
    rows_here = words(smem, 1)
    total = words(smem, spec.counts_row)
    before = words(smem, spec.counts_row)
    shift = words(smem, spec.experts + 1)
    table = words(smem, max(1, spec.table))
    sums = words(smem, spec.warps)
    offset_sums = words(smem, spec.warps)
    received = words(smem, max(1, spec.blocks) * spec.experts)
    arrivals = smem.allocate_array(Int64, 1)
    start = block * chunk
    length = smallest(selections - start, chunk)
    mine = tid < Int32(spec.experts)

    fill(counter, spec.warps * (spec.experts + 1), tid, spec.threads)
    if const_expr(spec.blocks == 0):
        fill(total, spec.counts_row, tid, spec.threads)
        fill(before, spec.counts_row, tid, spec.threads)
    else:
        if const_expr(spec.blocks > 1):
            if tid == Int32(0):
                cute.arch.mbarrier_init(arrivals, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(arrivals, 4 * spec.blocks * spec.experts)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
    steps = steps_for(spec, length)
    end = limit(length, steps, tid)
    found = load_ids(spec, ids, stride, start, steps, end, tid)
    load_table(spec, table_source, table, tid)
    cute.arch.sync_threads()
    experts, numbers, own = rank_tile(spec, found, steps, first, tid, table, counter)
    if const_expr(spec.blocks > 1):
        send_count(spec, address(received), Int32(arrivals.toint()), block, own, tid)
    place = scan_tile(spec, own, tid, counter, rows_here, sums)
    places = stage_tile(spec, experts, numbers, steps, tid, counter, staged)

    # --- exchange ---------------------------------------------------------------------------------------------------
    everyone, offset, base = own, place, place
    if const_expr(spec.blocks != 1):
        earlier = Int32(0)
        everyone = Int32(0)
        if const_expr(spec.blocks > 1):
            cute.arch.mbarrier_wait(arrivals, 0)
            if mine:
                for r in range_constexpr(spec.blocks):
                    theirs = received[r * spec.experts + tid]
                    everyone = everyone + theirs
                    earlier = earlier + (theirs if Int32(r) < block else Int32(0))
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            add_counts(spec, counts, blocks, block, tid, total, before)
            cute.arch.sync_threads()
            if mine:
                everyone = total[tid]
                earlier = before[tid]
        offset = scan_experts(spec, everyone, offset_sums, tid)
        base = offset + earlier
    if mine:
        shift[tid] = base - place
        if block == Int32(0):
            store(offsets + Int64(tid) * 4, offset)
            if tid == Int32(spec.experts - 1):
                store(offsets + spec.experts * 4, offset + everyone)
    cute.arch.sync_threads()
    write_tile(spec, experts, places, steps, start, end, tid, rows_here, staged, shift, slots, rows)

    # --- further tiles of the chunk, with the offsets known -----------------------------------------------------------
    if const_expr(spec.blocks == 0):
        base = base + own
        for tile in range(Int32(spec.tile), length, spec.tile):
            fill(counter, spec.warps * (spec.experts + 1), tid, spec.threads)
            steps = steps_for(spec, length - tile)
            end = limit(length - tile, steps, tid)
            found = load_ids(spec, ids, stride, start + tile, steps, end, tid)
            cute.arch.sync_threads()
            experts, numbers, own = rank_tile(spec, found, steps, first, tid, table, counter)
            place = scan_tile(spec, own, tid, counter, rows_here, sums)
            if mine:
                shift[tid] = base - place
            base = base + own
            places = stage_tile(spec, experts, numbers, steps, tid, counter, staged)
            cute.arch.sync_threads()
            write_tile(spec, experts, places, steps, start + tile, end, tid, rows_here, staged, shift, slots, rows)


@cute.jit
def build_index_kernels(
    spec: cutlass.Constexpr, anchor: cute.Tensor,
    ids: Int64, table: Int64, offsets: Int64, slots: Int64, rows: Int64, counts: Int64,
    stride: Int32, first: Int32, selections: Int32, chunk: Int32, blocks: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch the kernels of ``spec`` on ``anchor``'s current stream; ``stride`` in bytes, ``counts`` of a grid only."""
    if const_expr(spec.blocks == 0):
        count_kernel(spec, ids, stride, table, first, selections, chunk, counts).launch(
            grid=[blocks, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
        )
    place = place_kernel(spec, ids, stride, table, first, selections, chunk, offsets, slots, rows, counts, blocks)
    if const_expr(spec.blocks > 1):
        place.launch(
            grid=[blocks, 1, 1], block=[spec.threads, 1, 1], cluster=[spec.blocks, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip
    else:
        place.launch(grid=[blocks, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1)
