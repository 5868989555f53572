"""The finalize kernel (paper §3.3): each slot's FC2 rows, weighted and summed, into the combine workspace.

``output[slot] = round(((0 + w_a·row_a) + w_b·row_b) + …)`` over the slot's local selections a < b < …; every product
and every sum rounded to FP32 by itself (no fused multiply-add), so that the bits are those of the PyTorch reference.
Slots without a local row are not touched, and weights of selections elsewhere do not matter.

A unit of work is (slot, part of the row), one warp's; all warps are alike, need no shared memory and never meet. Warp w
computes units w, w + warps, …, neighbours in number side by side. It looks up several units at a time, lane t selection
t % top_k of unit t // top_k (its row, −1 for none, and its weight), and does so one look-up ahead. A ballot finds a
slot's local selections; then the warp loads its part of ``rows`` of them at once (16 bytes a lane and chunk) before it
adds the first. Empty slots cost a bit test.

Two shapes of it: for many slots 1024 threads a multiprocessor with 2 rows × 2 chunks × 16 B each in flight, 64 KiB a
multiprocessor (4.3 TB/s at 1 µs is 33 KiB); for few, blocks of 4 warps with narrow parts over many multiprocessors, 8
rows at once. Rows are read once and pass by L1.

Predicted for an H200: 2.0 µs for 8 slots of 7168 in a chain of PDL launches (empty kernel 0.7, two loads from L2 one
after the other 0.6, the rest block start, arithmetic and stores); ≥ 90 % of copy rate from 4096 slots.
Measured: 1.3 µs, and 3.3 to 3.9 TB/s (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.arch import inline_ptx

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.finalize_launch import VECTOR_BYTES, WARP


def load_word(addr: Int64, valid: Any, otherwise: Int32) -> Int32:
    """A word, or ``otherwise`` without reading."""
    return inline_ptx(
        "{\n.reg .pred p;\n.reg .b32 t;\nsetp.ne.b32 p, {$r1}, 0;\nmov.b32 t, {$r2};\n"
        "@p ld.global.b32 t, [{$r0}];\nmov.b32 {$w0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[addr, Int32(valid), otherwise],
    )


def load_16(addr: Int64, valid: Any) -> list[Uint32]:
    """16 bytes that are read once, or zeros without reading."""
    return list(
        inline_ptx(
            "{\n.reg .pred p;\n.reg .b32 a, b, c, d;\nsetp.ne.b32 p, {$r1}, 0;\n"
            "mov.b32 a, 0;\nmov.b32 b, 0;\nmov.b32 c, 0;\nmov.b32 d, 0;\n"
            "@p ld.global.L1::no_allocate.v4.b32 {a, b, c, d}, [{$r0}];\n"
            "mov.b32 {$w0}, a;\nmov.b32 {$w1}, b;\nmov.b32 {$w2}, c;\nmov.b32 {$w3}, d;\n}",
            write_only_types=[Uint32] * 4,
            read_only_args=[addr, Int32(valid)],
        )
    )


def load_value(addr: Int64, valid: Any, nbytes: int) -> list[Uint32]:
    """One BF16 (in the low half) or FP32 value, or zero without reading."""
    kind = "u16" if nbytes == 2 else "b32"
    return [
        inline_ptx(
            "{\n.reg .pred p;\n.reg .b32 t;\nsetp.ne.b32 p, {$r1}, 0;\nmov.b32 t, 0;\n"
            f"@p ld.global.{kind} t, [{{$r0}}];\nmov.b32 {{$w0}}, t;\n}}",
            write_only_types=[Uint32],
            read_only_args=[addr, Int32(valid)],
        )
    ]


def multiply(a: Float32, b: Float32) -> Float32:
    """A product by itself, rounded to FP32; subnormals kept."""
    return inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def add(a: Float32, b: Float32) -> Float32:
    """A sum by itself, rounded to FP32; subnormals kept."""
    return inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def lowest_bit(mask: Uint32) -> Int32:
    """The number of the lowest bit set; −1 for none."""
    return inline_ptx(
        "{\n.reg .b32 t;\nbrev.b32 t, {$r0};\nbfind.shiftamt.u32 {$w0}, t;\n}",
        write_only_types=[Int32],
        read_only_args=[mask],
    )


def load_vector(spec: Any, addr: Int64, valid: Any) -> list[Uint32]:
    """A vector of ``spec.width`` values as the words they lie in."""
    if not spec.vectors:
        return load_value(addr, valid, spec.row_bytes)
    found = []
    for i in range(spec.width * spec.row_bytes // VECTOR_BYTES):
        found += load_16(addr + i * VECTOR_BYTES, valid)
    return found


def widen(spec: Any, words: list[Uint32]) -> list[Float32]:
    """The values of a vector; exact."""
    if spec.row_bytes == 4:
        return [dev.bits_to_f32(w) for w in words]
    if not spec.vectors:
        return [dev.bits_to_f32(words[0] << Uint32(16))]
    values = []
    for w in words:
        values += [dev.bits_to_f32(w << Uint32(16)), dev.bits_to_f32(w & Uint32(0xFFFF0000))]
    return values


def store_vector(spec: Any, addr: Int64, values: list[Float32]) -> None:
    """Round to the output's type and store."""
    if not spec.vectors:
        if spec.output_bytes == 4:
            dev.store_f32(addr, values[0])
        else:
            dev.store_u16(addr, dev.f32_pair_to_bf16(values[0], values[0]) & Uint32(0xFFFF))
        return
    if spec.output_bytes == 4:
        found = [dev.f32_to_bits(v) for v in values]
    else:
        found = [dev.f32_pair_to_bf16(values[i], values[i + 1]) for i in range(0, spec.width, 2)]
    for i in range(0, len(found), 4):
        dev.store_v4(addr + i * 4, found[i : i + 4])


@cute.jit
def look_up(
    spec: cutlass.Constexpr, rows_of: Int64, weights: Int64, weight_stride: Int64, first: Int32, warps: Int32,
    units: Int32, lane: Int32,
) -> Any:  # fmt: skip
    """Lane t's selection of the units ``first``, ``first + warps``, …: (row or −1, bits of its weight)."""
    ahead = lane // spec.top_k
    j = lane - ahead * spec.top_k
    unit = first + ahead * warps
    valid = (ahead < Int32(spec.looked_up)) & (unit < units)
    slot = Int64(unit // spec.parts)
    row = load_word(rows_of + (slot * spec.top_k + Int64(j)) * 4, valid, Int32(-1))
    return row, load_word(weights + slot * weight_stride + Int64(j) * 4, valid, Int32(0))


@cute.jit
def sum_rows(
    spec: cutlass.Constexpr, mask: Uint32, row: Int32, weight: Int32, source: Int64, row_stride: Int64,
    target: Int64, left: Int32,
):  # fmt: skip
    """One unit: the rows of the lanes that ``mask`` names, in order of lanes, with those lanes' weights.

    Args:
        source, target: addresses of this lane's first vector of row 0 and of the output's row.
        left: vectors from there to the row's end; a lane's next chunk is 32 vectors further.
    """
    in_row, in_output = WARP * spec.width * spec.row_bytes, WARP * spec.width * spec.output_bytes
    total = [Float32(0.0) for _ in range(spec.chunks * spec.width)]
    while mask != Uint32(0):
        loaded = []
        factors = []
        some = []
        for _ in range_constexpr(spec.rows):
            present = mask != Uint32(0)
            lowest = lowest_bit(mask)
            lane = lowest if present else Int32(0)
            mask = mask & (mask - Uint32(1))
            some.append(present)
            factors.append(dev.bits_to_f32(Uint32(cute.arch.shuffle_sync(weight, lane))))
            at = source + Int64(cute.arch.shuffle_sync(row, lane)) * row_stride
            for c in range_constexpr(spec.chunks):
                loaded.append(load_vector(spec, at + c * in_row, present & (left > Int32(c * WARP))))
        for r in range_constexpr(spec.rows):
            if some[r]:
                for c in range_constexpr(spec.chunks):
                    values = widen(spec, loaded[r * spec.chunks + c])
                    for i in range_constexpr(spec.width):
                        k = c * spec.width + i
                        total[k] = add(total[k], multiply(values[i], factors[r]))
    for c in range_constexpr(spec.chunks):
        if left > Int32(c * WARP):
            store_vector(spec, target + c * in_output, total[c * spec.width : (c + 1) * spec.width])


@cute.kernel
def finalize_rows_kernel(
    spec: cutlass.Constexpr, rows: Int64, row_stride: Int64, rows_of: Int64, weights: Int64, weight_stride: Int64,
    output: Int64, output_stride: Int64, units: Int32,
):  # fmt: skip
    tid = cute.arch.thread_idx()[0]
    lane = tid % WARP
    warp = cute.arch.block_idx()[0] * spec.warps + cute.arch.make_warp_uniform(tid // WARP)
    warps = cute.arch.grid_dim()[0] * spec.warps

    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    next_row, next_weight = look_up(spec, rows_of, weights, weight_stride, warp, warps, units, lane)
    stride = warps * spec.looked_up
    for first in range(warp, units, stride):
        row, weight = next_row, next_weight
        next_row, next_weight = look_up(
            spec, rows_of, weights, weight_stride, first + stride, warps, units, lane
        )  # fmt: skip
        present = Uint32(cute.arch.vote_ballot_sync(row >= Int32(0)))
        for ahead in range(spec.looked_up):
            mask = present & (Uint32(spec.selection_mask) << Uint32(ahead * spec.top_k))
            if mask != Uint32(0):
                unit = first + ahead * warps
                slot = unit // spec.parts
                column = (unit - slot * spec.parts) * (WARP * spec.chunks) + lane
                sum_rows(
                    spec, mask, row, weight,
                    rows + Int64(column) * (spec.width * spec.row_bytes), row_stride,
                    output + Int64(slot) * output_stride + Int64(column) * (spec.width * spec.output_bytes),
                    Int32(spec.columns) - column,
                )  # fmt: skip


@cute.jit
def finalize_rows(
    spec: cutlass.Constexpr, anchor: cute.Tensor,
    rows: Int64, row_stride: Int64, rows_of: Int64, weights: Int64, weight_stride: Int64,
    output: Int64, output_stride: Int64, units: Int32, grid: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`finalize_rows_kernel` on ``anchor``'s current stream; strides in bytes."""
    finalize_rows_kernel(spec, rows, row_stride, rows_of, weights, weight_stride, output, output_stride, units).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True, min_blocks_per_mp=1
    )
