"""Which tiles exist and which block computes them: a persistent schedule over device-side offsets.

Work is (expert, token tile, column tile), numbered expert by expert; experts without rows have no number. Within an
expert, ``group`` token tiles at a time sweep over all column tiles, token tiles innermost: neighbours in number, which
run at the same time, share a weight tile, and the rows of a group stay in L2 for the sweep. Cluster b computes tiles b,
b + clusters, …; every warp of it walks the same list by itself. Blocks of a cluster divide a tile's tokens.

Shared memory: ``2·(experts + 1)`` words, filled once a launch: the row offsets and the number of token tiles before
each expert. A lookup is a binary search (6 loads for 48 experts).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.sm90_spec import WARP


@cute.jit
def fill_schedule(spec: cutlass.Constexpr, offsets: Int64, rows: cute.Tensor, tiles: cute.Tensor, lane: Int32):
    """By one warp: ``rows[e]`` = first row of expert e, ``tiles[e]`` = token tiles before expert e."""
    carry = Int32(0)
    for chunk in range_constexpr(-(-(spec.experts + 1) // WARP)):
        e = Int32(chunk * WARP) + lane
        inside = e < Int32(spec.experts)
        first = dev.load_i32(offsets + Int64(e if e <= Int32(spec.experts) else Int32(spec.experts)) * 4)
        last = dev.load_i32(offsets + Int64(e + 1 if inside else Int32(spec.experts)) * 4)
        own = (last - first + Int32(spec.work_tokens - 1)) // Int32(spec.work_tokens) if inside else Int32(0)
        total = own
        for step in range_constexpr(5):
            below = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
            if lane >= Int32(1 << step):
                total = total + below
        if e <= Int32(spec.experts):
            rows[e] = first
            tiles[e] = carry + total - own
        carry = carry + cute.arch.shuffle_sync(total, WARP - 1)


@cute.jit
def locate(spec: cutlass.Constexpr, tile: Int32, rows: Any, tiles: Any) -> tuple[Any, Any, Any, Any]:
    """``(expert, first row, rows in the block's tile (0 or less: none), column tile)`` of a tile number."""
    columns = Int32(spec.column_tiles)
    token_tile = tile // columns
    # The last expert whose first tile is not after this one.
    low, high = Int32(0), Int32(spec.experts)
    for _ in range_constexpr(spec.experts.bit_length()):
        middle = (low + high) // 2
        if tiles[middle] <= token_tile:
            low = middle
        else:
            high = middle
    expert = low
    first_tile = tiles[expert]
    count = tiles[expert + 1] - first_tile
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


def block_in_cluster() -> Int32:
    return cute.arch.block_idx_in_cluster()
