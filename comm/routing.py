"""Steps that the kernels of both protocols share: announcing a step, routing a token, addressing rows, summing."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from moe_layer.comm import device as dev
from moe_layer.comm.layout import SyncOffsets
from moe_layer.comm.spec import WARP


class PeerBases:
    """Peers' base addresses: up to eight ranks in registers, loaded ahead of the barrier that they are used after."""

    def __init__(self, peers: Int64, ep_size: int) -> None:
        self._peers = peers
        self._held = [dev.load_i64(peers + r * 8) for r in range(ep_size)] if ep_size <= 8 else None

    def __getitem__(self, r: int) -> Int64:
        return dev.load_i64(self._peers + r * 8) if self._held is None else self._held[r]


@cute.jit
def announce(
    spec: cutlass.Constexpr, ws: Int64, peers: Int64, rank: Int32, step: Uint32, own_hash: Uint32, placement: Uint32,
    t_hat: Int32, lane: Int32,
):  # fmt: skip
    """Tell every peer this step's parameters and their hash, for ranks that disagree to find out.

    Nobody waits for it; only the slow path of a wait reads it, so it is sent after the payload.
    """
    sync = SyncOffsets(spec.ep_size)
    for r in range(lane, spec.ep_size, WARP):
        peer = dev.load_i64(peers + Int64(r) * 8)
        record = peer + sync.parameters + Int64(rank) * 32
        dev.store_vector_sys(
            record, (Uint32(t_hat), Uint32(spec.hidden_bytes), Uint32(spec.scale_bytes), Uint32(spec.top_k))
        )
        dev.store_vector_sys(record + 16, (Uint32(spec.num_experts), placement, own_hash, Uint32(0)))
        dev.store_u64_sys(peer + sync.announcements + Int64(rank) * 8, dev.flag_word(step, own_hash))


@cute.jit
def load_routing(
    spec: cutlass.Constexpr, ids: Int64, weights: Int64, table: Int64, token: Int32, lane: Int32, valid: Int32
) -> tuple[Int32, Uint32, Int32]:
    """Lane j's part of a token's routing: (expert id or −1, weight bits, target rank or −1).

    With top_k ≤ 16, weight j lies in lane top_k + j, so that ids and weights leave in one store; else in lane j.
    """
    expert = Int32(-1)
    weight = Uint32(0)
    shift = spec.top_k if spec.top_k <= WARP // 2 else 0
    if valid != Int32(0):
        if lane < Int32(spec.top_k):
            expert = load_expert(spec, ids, token * spec.top_k + lane)
        if const_expr(spec.has_weights):
            if lane >= Int32(shift) and lane < Int32(shift + spec.top_k):
                weight = dev.load_u32(weights + Int64(token * spec.top_k + lane - shift) * 4)
    target = dev.expert_rank(expert, spec.num_experts, spec.ep_size, table, spec.contiguous)
    if target < Int32(0):
        expert = Int32(-1)
    return expert, weight, target


@cute.jit
def store_routing(spec: cutlass.Constexpr, row: Int64, id_word: Uint32, weight: Uint32, lane: Int32):
    """Store a routing row, top_k id words and then top_k weights, from the lanes of :func:`load_routing`."""
    if const_expr(spec.top_k <= WARP // 2 and spec.has_weights):
        if lane < Int32(2 * spec.top_k):
            dev.store_u32_sys(row + Int64(lane) * 4, dev.select(lane < Int32(spec.top_k), id_word, weight))
    elif lane < Int32(spec.top_k):
        dev.store_u32_sys(row + Int64(lane) * 4, id_word)
        if const_expr(spec.has_weights):
            dev.store_u32_sys(row + Int64(lane + spec.top_k) * 4, weight)


def load_expert(spec: Any, ids: Int64, index: Int32) -> Int32:
    """A global expert id; 64-bit ids outside the 32-bit range become −1."""
    if spec.id_bytes == 4:
        return Int32(dev.load_u32(ids + Int64(index) * 4))
    return dev.narrow_id(dev.load_i64(ids + Int64(index) * 8))


def destination_bits(target: Int32, word: int) -> Uint32:
    """Warp-wide OR: bit r says that some lane's target is rank 32·word + r."""
    local = target - Int32(word * WARP)
    return cute.arch.warp_redux_sync(dev.bit_if_in_word(local), "or")


def part_vector(spec: Any, part: Int32, tid: Int32, chunk: int) -> Int32:
    """The vector of chunk ``chunk`` of thread ``tid`` of a part; past the part's end, past the row's."""
    local = tid + chunk * (spec.payload_warps * WARP)
    if spec.parts == 1:
        return local
    end = Int32(spec.vectors)
    if not spec.splits_scales:
        return dev.select(local < Int32(spec.part_vectors), part * spec.part_vectors + local, end)
    hidden, scale = part * spec.part_hidden_vectors + local, local - spec.part_hidden_vectors
    of_scales = dev.select(
        scale < Int32(spec.part_scale_vectors), spec.hidden_vectors + part * spec.part_scale_vectors + scale, end
    )
    return dev.select(scale < Int32(0), dev.select(hidden < Int32(spec.hidden_vectors), hidden, end), of_scales)


@cute.jit
def payload_source(
    spec: cutlass.Constexpr, v: Int32, token: Int32, hidden: Int64, scale: Int64, hidden_stride: Int64,
    scale_stride: Int64,
) -> Int64:  # fmt: skip
    """Address of vector v of a token's payload; threads past its end read its first vector."""
    at = hidden + Int64(token) * hidden_stride
    if v < Int32(spec.hidden_vectors):
        at = at + Int64(v) * 16
    elif const_expr(spec.scale_bytes > 0):
        if v < Int32(spec.vectors):
            at = scale + Int64(token) * scale_stride + Int64(v - spec.hidden_vectors) * 16
    return at


@cute.jit
def row_address(spec: cutlass.Constexpr, v: Int32, base: Int64, to_hidden: Int64, to_scale: Int64, row: Int64) -> Int64:
    """Address of vector v of a row of the dispatch workspace at ``base``."""
    at = base + to_hidden + row * spec.hidden_bytes + Int64(v) * 16
    if const_expr(spec.scale_bytes > 0):
        if v >= Int32(spec.hidden_vectors):
            at = base + to_scale + row * spec.scale_bytes + Int64(v - spec.hidden_vectors) * 16
    return at


def sum_partials(spec: Any, loaded: list[Any], present: list[Any], output_row: Int64, v: Int32) -> None:
    """Add the vectors of the ranks that sent one, ascending, from +0.0 in FP32; round once; store vector v."""
    n = 16 // spec.element_bytes
    sums = [Float32(0.0)] * n
    for r in range(spec.ep_size):
        for w in range(4):
            word = dev.select(present[r], loaded[r][w], Uint32(0))
            values = dev.widen_word(word, spec.element_bytes)
            for j, value in enumerate(values, start=w * len(values)):
                sums[j] = dev.add(sums[j], value)
    at = output_row + Int64(v) * (n * spec.output_bytes)
    if spec.output_bytes == 2:
        words = [dev.f32_pair_to_bf16(sums[j], sums[j + 1]) for j in range(0, n, 2)]
    else:
        words = [dev.f32_to_bits(s) for s in sums]
    if len(words) == 2:
        dev.store_pair(at, words)
    else:
        for j in range(0, len(words), 4):
            dev.store_vector(at + j * 4, words[j : j + 4])


@cute.kernel
def give_up_kernel(spec: cutlass.Constexpr, ws: Int64, peers: Int64, rank: Int32):
    lane = cute.arch.thread_idx()[0]
    sync = SyncOffsets(spec.ep_size)
    cute.arch.griddepcontrol_wait()
    steps = dev.load_vector(ws)
    none = Uint32(0xFFFFFFFF)
    for r in range(lane, spec.ep_size, WARP):
        peer = dev.load_i64(peers + Int64(r) * 8)
        if const_expr(spec.in_combine):
            dev.store_u64_sys(peer + sync.combine_flags + Int64(rank) * 8, dev.flag_word(steps[1], none))
        else:
            dev.store_vector_sys(peer + sync.parameters + Int64(rank) * 32, (none, none, none, none))
            dev.fence_sys()
            dev.store_u64_sys(
                peer + sync.announcements + Int64(rank) * 8, dev.flag_word(steps[0] + Uint32(1), Uint32(0))
            )


@cute.jit
def give_up(
    spec: cutlass.Constexpr, anchor: cute.Tensor, ws: Int64, peers: Int64, rank: Int32, stream: cuda.CUstream
):  # fmt: skip
    """Tell every peer that this rank will not make the call they wait in: a hash, or code, that none of them has."""
    give_up_kernel(spec, ws, peers, rank).launch(grid=[1, 1, 1], block=[WARP, 1, 1], stream=stream, use_pdl=True)
