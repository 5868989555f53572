"""Which tiles exist and which block computes them: a persistent schedule over device-side offsets.

Work is (expert, token tile, column tile), numbered expert by expert; experts without rows have no number. Within an
expert, ``group`` token tiles at a time sweep over all column tiles, token tiles innermost: neighbours in number, which
run at the same time, share a weight tile, and the rows of a group stay in L2 for the sweep. Blocks of a cluster divide
a tile's tokens. Cluster b computes the tiles at positions b, b + clusters, …; every warp of it walks the same list by
itself.

In the wide kernels experts come by falling number of rows, and every ``WEAVE``-th position takes its tile from the end:
tiles of crowded experts, bound by arithmetic, run beside tiles of the others, bound by their weights' bytes. With even
loads this changes nothing; with 90 % of the rows in one expert, see docs/performance.md.

Shared memory: ``3·(experts + 1)`` words, filled once a launch: row offsets, the experts' order, the number of token
tiles before each in that order. A lookup is a binary search (6 loads for 48 experts).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.sm90_spec import WARP

# Coprime to the 66 clusters and 132 blocks of an H200, so that every one of them takes its share from the end.
WEAVE = 5
# Ordering takes experts² / 32 steps of a warp: beyond this many experts the order stays.
ORDERED_EXPERTS = 128


@cute.jit
def fill_schedule(
    spec: cutlass.Constexpr, offsets: Int64, rows: Any, order: Any, tiles: Any, lane: Int32
):  # fmt: skip
    """By one warp: first rows of the experts; experts by position; token tiles before each position."""
    experts = spec.experts
    chunks = -(-(experts + 1) // WARP)
    for chunk in range_constexpr(chunks):
        e = Int32(chunk * WARP) + lane
        if e <= Int32(experts):
            rows[e] = dev.load_i32(offsets + Int64(e) * 4)
            order[e] = e
    cute.arch.sync_warp()
    if const_expr(not spec.swap and experts <= ORDERED_EXPERTS):
        for chunk in range_constexpr(-(-experts // WARP)):
            e = Int32(chunk * WARP) + lane
            mine = e if e < Int32(experts) else Int32(0)
            own = rows[mine + 1] - rows[mine]
            position = Int32(0)
            for other in cutlass.range(experts, unroll=8):
                theirs = rows[other + 1] - rows[other]
                if theirs > own or (theirs == own and other < mine):
                    position = position + 1
            if e < Int32(experts):
                order[position] = e
        cute.arch.sync_warp()
    carry = Int32(0)
    for chunk in range_constexpr(chunks):
        position = Int32(chunk * WARP) + lane
        own = Int32(0)
        if position < Int32(experts):
            e = order[position]
            own = (rows[e + 1] - rows[e] + Int32(spec.work_tokens - 1)) // Int32(spec.work_tokens)
        total = own
        for step in range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
            if lane >= Int32(1 << step):
                total = total + below
        if position <= Int32(experts):
            tiles[position] = carry + total - own
        carry = carry + cute.arch.shuffle_sync(total, WARP - 1)


@cute.jit
def locate(
    spec: cutlass.Constexpr, position: Int32, rows: Any, order: Any, tiles: Any
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """``(expert, first row, rows in the block's tile (0 or less: none), column tile)`` at a position of the list."""
    columns = Int32(spec.column_tiles)
    tile = position
    if const_expr(not spec.swap):
        total = tiles[spec.experts] * columns
        turn = position // WEAVE
        if position < total // WEAVE * WEAVE:
            tile = position - turn
            if position % WEAVE == Int32(WEAVE - 1):
                tile = total - 1 - turn
        else:
            tile = position - total // WEAVE
    token_tile = tile // columns
    # The last expert whose first tile is not after this one.
    low, high = Int32(0), Int32(spec.experts)
    for _ in range_constexpr(spec.experts.bit_length()):
        middle = (low + high) // 2
        if tiles[middle] <= token_tile:
            low = middle
        else:
            high = middle
    expert = order[low]
    first_tile = tiles[low]
    count = tiles[low + 1] - first_tile
    local = tile - first_tile * columns
    group = spec.group // spec.cluster
    before = local // (columns * group) * group
    width = dev.smaller(count - before, Int32(group))
    rest = local - before * columns
    column = rest // width
    row = rows[expert] + (before + rest - column * width) * spec.work_tokens
    left = dev.smaller(rows[expert + 1] - row, Int32(spec.work_tokens))
    if const_expr(spec.cluster > 1):
        # More than a block holds: the first is full. Else each takes a warpgroup's 64, in half the time.
        share = Int32(spec.tokens) if left > Int32(spec.tokens) else Int32(spec.tokens // 2)
        before_me = block_in_cluster() * share
        row = row + before_me
        left = dev.smaller(left - before_me, share)
    return expert, row, left, column


@cute.jit
def row_number(spec: cutlass.Constexpr, slots: Int64, row: Int32, count: Int32, token: Int32) -> Int32:
    """A token's row of ``x``; past the tile's end, its last row's."""
    index = row + dev.smaller(token, count - 1)
    if const_expr(spec.gather):
        index = dev.load_i32(slots + Int64(index) * 4)
    return index


def block_in_cluster() -> Int32:
    return cute.arch.block_idx_in_cluster()
