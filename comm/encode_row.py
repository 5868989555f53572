"""Quantizing in registers, by the payload warps of a dispatch kernel: BF16 rows in, vectors of the wire out.

A thread of a payload warp loads the values of its 16-byte vector of the wire and encodes them
(:class:`~moe_layer.comm.encoder.KernelEncoder`; scale blocks that span vectors are reduced by shuffles). The scales
meet in shared memory; behind a barrier the threads whose vectors are scales pick them up there, and from then on
encoded rows are as if they had been loaded. A scale of the whole row costs one more reduction and barrier, of the
payload warps alone.

Where several blocks share a row (Sentinel's parts), each has the scales of its own values
(:class:`~moe_layer.comm.spec.DispatchSpec`), so nothing passes between blocks; for a scale of the row each block looks
at all of it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.arch import inline_ptx

from moe_layer.comm import device as dev
from moe_layer.comm.routing import part_vector
from moe_layer.comm.spec import WARP

PAYLOAD_BARRIER = 1  # barrier 0 is the whole block's


def allocate_scales(spec: Any, rows: int) -> tuple[Int32, Int32]:
    """Shared memory for the scales of ``rows`` rows and for a word a warp: the address of each."""
    nbytes = rows * 16 * spec.part_scale_vectors
    start = Int32(cute.arch.alloc_smem(Uint32, nbytes // 4 + WARP, alignment=16).toint())
    return start, start + nbytes


def store_shared(addr: Int32, value: Uint32, nbytes: int) -> None:
    inline_ptx(
        {
            1: "{\n.reg .b16 h;\ncvt.u16.u32 h, {$r1};\nst.shared.u8 [{$r0}], h;\n}",
            2: "{\n.reg .b16 h;\ncvt.u16.u32 h, {$r1};\nst.shared.u16 [{$r0}], h;\n}",
            4: "st.shared.u32 [{$r0}], {$r1};",
        }[nbytes],
        read_only_args=[addr, value],
    )


def load_shared(addr: Int32) -> Uint32:
    return inline_ptx("ld.shared.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


def load_shared_vector(addr: Int32) -> Any:
    return inline_ptx(
        "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def load_vector_if(inside: Any, addr: Int64) -> Any:
    """16 bytes, or zeros where ``inside`` is false."""
    return inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.u32 p, {$r1}, 0;\nmov.u32 {$w0}, 0;\nmov.u32 {$w1}, 0;\nmov.u32 {$w2}, 0;\n"
        "mov.u32 {$w3}, 0;\n@p ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];\n}",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr, Uint32(inside)],
    )


def payload_barrier(spec: Any) -> None:
    cute.arch.barrier(barrier_id=PAYLOAD_BARRIER, number_of_threads=spec.payload_warps * WARP)


@cute.jit
def encode_row(
    spec: cutlass.Constexpr, scales: Int32, per_warp: Int32, part: Int32, tid: Int32, row: Int64, given: Uint32,
    common_scale: Int64,
) -> Any:  # fmt: skip
    """The vectors of the BF16 row at ``row``, chunk by chunk, as one list of words; zeros where ``given`` is 0.

    Called by the payload warps. Vectors of scales are left for :func:`pick_up_scales`, behind a barrier.
    """
    e = spec.encoder
    lane = tid % WARP
    loads = e.vector_values // 8
    values = []
    for c in range_constexpr(spec.chunks):
        v = part_vector(spec, part, tid, c)
        inside = (v < Int32(spec.hidden_vectors)) & (given != Uint32(0))
        words = []
        for j in range_constexpr(loads):
            words += load_vector_if(inside, row + (Int64(v) * loads + j) * 16)
        values.append(words)

    scale = Uint32(0)
    if const_expr(e.common_scale):
        scale = dev.load_u32(common_scale)
    if const_expr(e.row_scale):
        largest = Uint32(0)
        if const_expr(spec.parts == 1):
            for c in range_constexpr(spec.chunks):
                largest = dev.maximum(largest, e.magnitude(values[c]))
        else:
            # Whole vectors of the wire, as above: a block with NaN or infinity in it counts for nothing as a whole.
            threads = spec.payload_warps * WARP
            for j in range_constexpr(-(-spec.hidden_vectors // threads)):
                u = tid + j * threads
                inside = (u < Int32(spec.hidden_vectors)) & (given != Uint32(0))
                words = []
                for k in range_constexpr(loads):
                    words += load_vector_if(inside, row + (Int64(u) * loads + k) * 16)
                largest = dev.maximum(largest, e.magnitude(words))
        largest = cute.arch.warp_redux_sync(largest, "umax")
        if lane == Int32(0):
            store_shared(per_warp + (tid // WARP) * 4, largest, 4)
        payload_barrier(spec)
        if lane < Int32(spec.payload_warps):
            largest = load_shared(per_warp + lane * 4)
        scale = e.scale_of_row(cute.arch.warp_redux_sync(largest, "umax"))

    first = part * (16 * spec.part_scale_vectors)  # of the part's bytes in the row of scales
    vectors = []
    for c in range_constexpr(spec.chunks):
        v = part_vector(spec, part, tid, c)
        wire, entry = e.encode(values[c], scale)
        vectors += wire
        if lane % e.vectors_per_scale == Int32(0) and v < Int32(spec.hidden_vectors):
            store_shared(scales + (v // e.vectors_per_scale) * e.scale_entry_bytes - first, entry, e.scale_entry_bytes)
    # Behind the entries: the row's own scale in half words (where there is one, the entries are as long), and padding.
    unit = 2 if e.row_scale else 1
    end = -(-spec.hidden_vectors // e.vectors_per_scale) * e.scale_entry_bytes
    at = end + tid * unit - first
    if at >= Int32(0) and at < Int32(16 * spec.part_scale_vectors) and end + tid * unit < Int32(spec.scale_bytes):
        value = Uint32(0)
        if const_expr(e.row_scale):
            value = dev.select(tid < Int32(2), scale >> Uint32(16 * tid), value)
        store_shared(scales + at, value, unit)
    return vectors


@cute.jit
def pick_up_scales(spec: cutlass.Constexpr, scales: Int32, part: Int32, v: Int32, vector: Any) -> Any:
    """Vector v after the barrier: from shared memory if it is one of scales, else ``vector``."""
    a, b, c, d = vector
    if v >= Int32(spec.hidden_vectors) and v < Int32(spec.vectors):
        a, b, c, d = load_shared_vector(scales + (v - spec.hidden_vectors - part * spec.part_scale_vectors) * 16)
    return a, b, c, d
