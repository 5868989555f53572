"""Steps that the kernels of both protocols share: announcing a step, routing a token, addressing a payload, summing."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from moe_layer.comm import device as dev
from moe_layer.comm.layout import SyncOffsets
from moe_layer.comm.spec import WARP


@cute.jit
def announce(
    spec: cutlass.Constexpr, ws: Int64, peers: Int64, rank: Int32, step: Uint32, own_hash: Uint32, placement: Uint32,
    t_hat: Int32, lane: Int32,
):  # fmt: skip
    """Tell every peer this step's parameters and their hash, so that ranks that disagree find out. Nobody waits for it."""
    sync = SyncOffsets(spec.ep_size)
    for r in range(lane, spec.ep_size, WARP):
        peer = dev.load_i64(peers + Int64(r) * 8)
        record = peer + sync.parameters + Int64(rank) * 32
        dev.store_vector_sys(
            record, (Uint32(t_hat), Uint32(spec.hidden_bytes), Uint32(spec.scale_bytes), Uint32(spec.top_k))
        )
        dev.store_vector_sys(record + 16, (Uint32(spec.num_experts), placement, own_hash, Uint32(0)))
        dev.store_u64_sys(peer + sync.announcements + Int64(rank) * 8, dev.flag_word(step, own_hash))


def load_expert(spec: Any, ids: Int64, index: Int32) -> Int32:
    """A global expert id; 64-bit ids outside the 32-bit range become −1."""
    if spec.id_bytes == 4:
        return Int32(dev.load_u32(ids + Int64(index) * 4))
    return dev.narrow_id(dev.load_i64(ids + Int64(index) * 8))


def destination_bits(target: Int32, word: int) -> Uint32:
    """Warp-wide OR: bit r says that some lane's target is rank 32·word + r."""
    local = target - Int32(word * WARP)
    return cute.arch.warp_redux_sync(dev.bit_if_in_word(local), "or")


@cute.jit
def payload_source(
    spec: cutlass.Constexpr,
    v: Int32,
    token: Int32,
    hidden: Int64,
    scale: Int64,
    hidden_stride: Int64,
    scale_stride: Int64,
) -> Int64:
    """Address of vector v of a token's payload; threads past its end read its first vector."""
    at = hidden + Int64(token) * hidden_stride
    if v < Int32(spec.hidden_vectors):
        at = at + Int64(v) * 16
    elif const_expr(spec.scale_bytes > 0):
        if v < Int32(spec.vectors):
            at = scale + Int64(token) * scale_stride + Int64(v - spec.hidden_vectors) * 16
    return at


def sum_partials(spec: Any, loaded: list[Any], present: list[Any], output_row: Int64, v: Int32) -> None:
    """Add the vectors of the ranks that sent one, ascending, from +0.0 in FP32; round once; store vector v of the row."""
    n = 16 // spec.element_bytes
    sums = [Float32(0.0)] * n
    for r in range(spec.ep_size):
        for w in range(4):
            word = dev.select(present[r], loaded[r][w], Uint32(0))
            if spec.element_bytes == 2:
                lo, hi = dev.bf16_pair_to_f32(word)
                sums[2 * w] = dev.add(sums[2 * w], lo)
                sums[2 * w + 1] = dev.add(sums[2 * w + 1], hi)
            else:
                sums[w] = dev.add(sums[w], dev.bits_to_f32(word))
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
