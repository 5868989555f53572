"""Low-bit weights on Hopper: consumers widen them to BF16 in registers, as WGMMA's register operand.

``out[row] = epilogue(W[e] · x[row])`` as in sm90_grouped, which produces the stages: 256 weight rows × 128 of K in
packed form, one bulk copy, beside the tokens' BF16 rows. Weights are WGMMA's M, tokens its N.

There are two consumer warpgroups of two m64 each, or, for few tokens, four of one. For a step of 16 K a thread owns 8
weights of an m64: WGMMA's fragment. They lie in one 32-bit word (8-bit weights: two), and the words of four steps in
one 16-byte vector, so that a stage costs a thread two vectors an m64, without bank conflicts and without a shuffle; the
bytes were put in this order once, at load (gemm/register_tiles.py).

Widening is exact and works on bit patterns. E2M1 ``s e1 e0 m`` at bits 15 and 8 … 6 of a half word is the BF16 number
``value · 2⁻¹²⁶`` (E4M3 at 15 and 10 … 4: ``value · 2⁻¹²⁰``), subnormals included; one BF16 multiplication by the
block's scale, which has the missing power of two in its exponent, gives weight · scale. The word is laid out so that a
shift by 0, 3 or 6 and a mask give three of the four pairs of a word; the fourth takes three shifts. INT4's scales have
eight significant bits, too many for the product to be a BF16 number: its integers go to the tensor cores as they are,
and the FP32 sums are scaled every 32 of K.

In the main loop the widening of one step runs beside the WGMMAs of the ``IN_FLIGHT`` steps before it.

Barriers and shared memory: as sm90_grouped, with packed weights in place of the weight tile.

Idea: fetching 4-bit weights in the order of the matrix instruction's registers and finding a number's pattern by mask
and shift are known from Marlin (W4A16 on Ampere) and FP6-LLM.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.sm90_epilogue import store_swapped
from moe_layer.gemm.sm90_pipeline import release, release_if
from moe_layer.gemm.sm90_schedule import locate, row_number
from moe_layer.gemm.sm90_spec import WARP, WARPGROUP, GroupedSpec

STEP_K = 16  # of a WGMMA
STEPS = 8  # WGMMAs along K of a packed tile
E2M1_BITS, E4M3_BITS = 0x81C081C0, 0x87F087F0
# Exponent field of NVFP4's multiplier at byte 0: a scale of 1.mmm · 2^(e - 10) becomes scale · 2^118, so that its
# largest, 448, is still finite; the epilogue's factor has the remaining 2^8.
NVFP4_BASE = 118 - 10 + 127


def widen_e2m1(word: Uint32) -> list[Uint32]:
    """A word's four pairs: (row, row + 8) × (K, K + 8)."""
    mask = Uint32(E2M1_BITS)
    last = ((word >> Uint32(6)) & Uint32(0x01800180)) | ((word >> Uint32(5)) & Uint32(0x00400040))
    last = last | ((word << Uint32(5)) & Uint32(0x80008000))
    return [word & mask, (word << Uint32(3)) & mask, (word << Uint32(6)) & mask, last]


def widen_e4m3(first: Uint32, second: Uint32) -> list[Uint32]:
    """Two words' pairs, as :func:`widen_e2m1`."""
    pairs = []
    for word in (first, second):
        other = ((word >> Uint32(4)) & Uint32(0x07800780)) | ((word << Uint32(3)) & Uint32(0x00700070))
        pairs += [word & Uint32(E4M3_BITS), other | ((word << Uint32(15)) & Uint32(0x80008000))]
    return pairs


def widen_int4(word: Uint32) -> list[Uint32]:
    """As :func:`widen_e2m1`: 128 + code as BF16, less 136."""
    pairs = [((word >> Uint32(4 * p)) & Uint32(0x000F000F)) | Uint32(0x43004300) for p in range(4)]
    return [dev.add_bf16x2(pair, Uint32(0xC308C308)) for pair in pairs]


def load_scales(spec: GroupedSpec, words: Int32, block: Any, tile: int, lane: Int32, warp: Int32) -> list[Any]:
    """``[h][word]``: the scales in a stage's packed tile of rows ``lane / 4`` and ``lane / 4 + 8`` of a warp's 16."""
    assert spec.low_bit is not None
    size = spec.low_bit.scale_bytes
    at = words + tile * spec.low_bit.stage_bytes + spec.low_bit.word_bytes
    at = at + ((block * 4 + warp) * 8 + lane // 4) * (2 * size)
    if size == 4:
        first, second = dev.load_shared_v2(at)
        return [[first], [second]]
    scales = dev.load_shared_v4(at)
    return [scales[:2], scales[2:]]


def multiplier(spec: GroupedSpec, words: Any, step: int) -> Uint32:
    """A row's block scale at a step of the stage, as a pair of BF16."""
    if spec.weights == "nvfp4":
        base = NVFP4_BASE << 7
        return dev.multiply_add(dev.spread_byte(words[step // 4], step % 4), 1 << 4, base << 16 | base)
    return dev.multiply_add(dev.spread_byte(words[0], step // 2), 1 << 7, 0)


def integer_scale(words: Any, block: int) -> Float32:
    """A row's BF16 scale for a block of 32 K."""
    word = words[block // 2]
    return dev.bits_to_f32(word << Uint32(16) if block % 2 == 0 else word & Uint32(0xFFFF0000))


def load_weights(spec: GroupedSpec, words: Int32, block: Any, half: int, tid: Int32) -> list[Any]:
    """A thread's words of one m64 for the ``half``-th 64 K of a stage: ``[step][word]``."""
    assert spec.low_bit is not None
    vectors = spec.low_bit.bits // 4
    at = words + half // 2 * spec.low_bit.stage_bytes
    at = at + ((half % 2 * 4 + block) * vectors * WARPGROUP + tid % WARPGROUP) * 16
    flat = [w for v in range(vectors) for w in dev.load_shared_v4(at + v * (WARPGROUP * 16))]
    return [flat[vectors * s : vectors * (s + 1)] for s in range(4)]


def widen(spec: GroupedSpec, words: Any, scales: Any) -> list[Uint32]:
    """The registers of one m64 × k16; ``scales``: of both rows."""
    if spec.weights == "int4":
        return widen_int4(*words)
    pairs = widen_e4m3(*words) if spec.weights == "mxfp8" else widen_e2m1(*words)
    return [dev.multiply_bf16x2(pair, scales[p % 2]) for p, pair in enumerate(pairs)]


class Registers:
    """WGMMA's register operand of one m64 × k16."""

    def __init__(self) -> None:
        self.words = cute.make_rmem_tensor(4, Uint32)
        values = cute.recast_tensor(self.words, BFloat16)
        self.fragment = cute.make_tensor(values.iterator, cute.make_layout(((2, 2, 2), 1), stride=((1, 2, 4), 0)))

    def set(self, words: Any) -> None:
        for i, word in enumerate(words):
            self.words[i] = word


@cute.jit
def consume_widened(
    spec: cutlass.Constexpr, packed: Int32, token_tile: cute.Tensor, staging: Int32,
    full: cute.Pointer, empty: cute.Pointer, rows: cute.Tensor, order: cute.Tensor, tiles: cute.Tensor,
    factors: Int64, slots: Int64, token_factors: Int64, token_stride: Int64,
    out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64,
):  # fmt: skip
    """A consumer warpgroup's work.

    Sums are multiplied by ``factors`` (``[experts, parts]`` FP32) and, if the specification has them, by FP32
    ``token_factors``, one every ``token_stride`` bytes for each row of ``x``.
    """
    tid = cute.arch.thread_idx()[0] - WARPGROUP
    first_tile, grid = cute.arch.block_idx()[0] // spec.cluster, cute.arch.grid_dim()[0] // spec.cluster
    group = cute.arch.make_warp_uniform(tid // WARPGROUP)
    total = tiles[spec.experts] * spec.column_tiles
    first_mma, mma = make_mma(spec.tokens), make_mma(spec.tokens)
    first_mma.set(warpgroup.Field.ACCUMULATE, False)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    tokens = mma.make_fragment_B(mma.get_slice(0).partition_B(token_tile))
    shape = mma.partition_shape_C((64, spec.tokens))
    blocks = spec.weight_blocks
    sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(blocks)]
    stage, phase = Int32(0), Int32(0)
    for tile in range(first_tile, total, grid):
        expert, row, count, column = locate(spec, tile, rows, order, tiles)
        for block in range_constexpr(blocks):
            sums[block].fill(0.0)
        if const_expr(spec.weights == "int4"):
            stage, phase = accumulate_integers(
                spec, first_mma, mma, tokens, sums, packed, full, empty, tid, group, stage, phase
            )
        else:
            stage, phase = accumulate(spec, mma, tokens, sums, packed, full, empty, tid, group, stage, phase)
        factor = factors + Int64(expert) * (4 * spec.parts)
        by_row = [dev.load_f32(factor), dev.load_f32(factor + 4 * (spec.parts - 1))]
        for block in range_constexpr(blocks):
            for i in range_constexpr(spec.tokens // 2):
                sums[block][i] = sums[block][i] * by_row[i // 2 % 2]
        if const_expr(spec.token_factors):
            for c in range_constexpr(spec.tokens // 8):
                for i in range_constexpr(2):
                    token = row_number(spec, slots, row, count, c * 8 + tid % 4 * 2 + i)
                    factor_of_token = dev.load_f32(token_factors + Int64(token) * token_stride)
                    for b in range_constexpr(blocks):
                        for h in range_constexpr(2):
                            at = i + 2 * h + 4 * c
                            sums[b][at] = sums[b][at] * factor_of_token
        store_swapped(spec, sums, staging, tid, group, row, count, column, out, out_stride, out_scale, out_scale_stride)


@cute.jit
def accumulate(
    spec: cutlass.Constexpr, mma: cutlass.Constexpr, tokens: cute.Tensor, sums: cutlass.Constexpr, packed: Int32,
    full: cute.Pointer, empty: cute.Pointer, tid: Int32, group: Int32, stage: Int32, phase: Int32,
):  # fmt: skip
    """The main loop over K of one tile; weights times their scales are BF16 numbers."""
    lane, warp = tid % WARP, tid % WARPGROUP // WARP
    blocks, together, steps = len(sums), spec.steps_together, spec.k_tile // STEP_K
    mine = [group * blocks + b for b in range(blocks)]
    previous = stage
    for step in range(spec.k_steps):
        # Else the addresses of the WGMMAs' tokens are computed in vector registers and moved, two instructions each.
        stage = cute.arch.make_warp_uniform(stage)
        cute.arch.mbarrier_wait(full + stage, phase)
        # The tokens came by cp.async, which the tensor cores' reads do not see without this.
        cute.arch.fence_view_async_shared()
        words = packed + stage * spec.weight_stage_bytes
        following = [load_weights(spec, words, block, 0, tid) for block in mine]
        for first in range_constexpr(0, steps, together):
            if const_expr(first % STEPS == 0):
                scales = [load_scales(spec, words, block, first // STEPS, lane, warp) for block in mine]
            if const_expr(first % 4 == 0):
                # The next half is fetched while this one is widened.
                weights = following
                if const_expr(first + 4 < steps):
                    following = [load_weights(spec, words, block, first // 4 + 1, tid) for block in mine]
            warpgroup.wait_group(1)
            if const_expr(2 * first == steps):
                release_if(empty + previous, tid, Int32(step))
            own = [[Registers() for _ in range(blocks)] for _ in range(together)]
            for k in range_constexpr(together):
                for b in range_constexpr(blocks):
                    by_row = [multiplier(spec, scales[b][h], (first + k) % STEPS) for h in range(2)]
                    own[k][b].set(widen(spec, weights[b][(first + k) % 4], by_row))
            warpgroup.fence()
            for k in range_constexpr(together):
                for b in range_constexpr(blocks):
                    multiply(mma, sums[b], own[k][b], tokens, first + k, stage)
            warpgroup.commit_group()
        previous = stage
        stage += 1
        if stage == Int32(spec.stages):
            stage = Int32(0)
            phase = phase ^ 1
    warpgroup.wait_group(0)
    release(spec, empty + previous, tid)
    return stage, phase


@cute.jit
def accumulate_integers(
    spec: cutlass.Constexpr, first_mma: cutlass.Constexpr, next_mma: cutlass.Constexpr, tokens: cute.Tensor,
    sums: cutlass.Constexpr, packed: Int32, full: cute.Pointer, empty: cute.Pointer, tid: Int32, group: Int32,
    stage: Int32, phase: Int32,
):  # fmt: skip
    """As :func:`accumulate`, for weights whose scales are applied to the sums of 32 of K.

    While one m64's sums over 32 of K are scaled, the next one's WGMMAs run, if there are registers for both.
    """
    lane, warp = tid % WARP, tid % WARPGROUP // WARP
    blocks = len(sums)
    mine = [group * blocks + b for b in range(blocks)]
    turns = 2 if spec.tokens <= 64 else 1
    parts = [cute.make_rmem_tensor(sums[0].shape, Float32) for _ in range(turns)]
    order = [(block32, b) for block32 in range(spec.k_tile // 32) for b in range(blocks)]
    for _ in range(spec.k_steps):
        stage = cute.arch.make_warp_uniform(stage)
        cute.arch.mbarrier_wait(full + stage, phase)
        cute.arch.fence_view_async_shared()
        words = packed + stage * spec.weight_stage_bytes
        tiles = range(spec.stage_units)
        scales = [[load_scales(spec, words, block, tile, lane, warp) for block in mine] for tile in tiles]
        for n in range_constexpr(len(order) + turns - 1):
            if const_expr(n < len(order)):
                block32, b = order[n]
                if const_expr(block32 % 2 == 0 and b == 0):
                    weights = [load_weights(spec, words, block, block32 // 2, tid) for block in mine]
                own = [Registers() for _ in range(2)]
                for j in range_constexpr(2):
                    own[j].set(widen(spec, weights[b][block32 % 2 * 2 + j], None))
                warpgroup.fence()
                for j in range_constexpr(2):
                    mma = first_mma if j == 0 else next_mma
                    multiply(mma, parts[n % turns], own[j], tokens, block32 * 2 + j, stage)
                warpgroup.commit_group()
            if const_expr(n >= turns - 1):
                warpgroup.wait_group(turns - 1 if n < len(order) else 0)
                done = n - (turns - 1)
                block32, b = order[done]
                by_row = [integer_scale(scales[block32 // 4][b][h], block32 % 4) for h in range(2)]
                for i in range_constexpr(spec.tokens // 2):
                    sums[b][i] = sums[b][i] + parts[done % turns][i] * by_row[i // 2 % 2]
        release(spec, empty + stage, tid)
        stage += 1
        if stage == Int32(spec.stages):
            stage = Int32(0)
            phase = phase ^ 1
    return stage, phase


def make_mma(columns: int) -> Any:
    """One warpgroup, m64; weights in registers, tokens K-major in shared memory."""
    return make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, columns),
        a_source=warpgroup.OperandSource.RMEM,
    )  # fmt: skip


def multiply(mma: Any, sums: Any, weights: Registers, tokens: Any, k: int, stage: Int32) -> None:
    """One WGMMA of the warpgroup: 16 of K."""
    columns = cute.append_ones(tokens[(None, 0, k, stage)], 2)
    cute.gemm(mma, sums, weights.fragment, columns, sums)
