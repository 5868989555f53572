"""The quantizers' kernels: rows in BF16 or FP32 → elements and scales, and back. Memory-bound; no thread waits twice.

A format brings its arithmetic on registers (:mod:`moe_layer.quant.codec`); the kernels here load, reduce where a scale
spans lanes, and store. All threads of a block are alike, and there is no barrier but where said.

*encode_flat*: a unit is a 16-byte vector of the output, one thread's, made of 16 (8-bit elements) or 32 (4-bit)
consecutive values: 2 to 8 loads of 16 bytes, all in flight before the first is used (they share sectors, which L1
keeps). Units are numbered through all rows; a row's are filled up to whole scale blocks, so that a block's lanes never
belong to two rows; what lies beyond a row's end is zeros and is not stored. Lanes that share a scale meet by shuffles;
the first of them stores it.

*encode_rows*: for formats with a scale of the row's own. ``warps_per_row`` warps hold a row in registers, find its
largest magnitude (a warp reduction, then ``rows × warps_per_row`` words of shared memory and one barrier of the block,
barrier 0, unless a warp holds the row), and then encode. A row is read once. Rows of scales may lie apart, with the
row's own behind them, and words of zeros behind that: as they travel.

*decode*: a unit is 16 bytes of the output, 8 BF16 or 4 FP32 values, so that a warp's stores are whole lines; its
elements are one load of 2 to 8 bytes, its scale another that neighbouring lanes share. ``chunks`` units a thread, all
loads before the first store.

Dependents may launch once a block's loads are under way.

Instructions a value on the usual path, sm_90a, from BF16 (from FP32): fp8 9 (12), mxfp8 7 (7), mxfp4 8 (11), nvfp4 12
(17), of which 5 go to the integer pipe, which has half the rate. At copy rate an H200 can issue about 20 a BF16 value
of an 8-bit format, 17 of a 4-bit one.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.arch import inline_ptx

from moe_layer.quant import device as dev
from moe_layer.quant import registers as reg
from moe_layer.quant.launch import WARP

# Named for the compiler, which needs a GPU to find a carve-out of its own when kernels ask for room for several blocks.
DEFAULT_CARVEOUT = -1


def load_vector(spec: Any, inside: Any, addr: Int64) -> list[Uint32]:
    """The values of a unit of an encode kernel, as the words they lie in."""
    words = []
    for j in range(spec.vector_bytes // 16):
        words += dev.load_16_if(inside, addr + 16 * j)
    return words


@cute.jit
def store_entry(spec: cutlass.Constexpr, inside: Any, unit: Uint32, scale: Int64, entry: Uint32):
    """A scale entry, by the first of the lanes that share it."""
    e = spec.encoder
    if inside & (unit % Uint32(e.vectors_per_scale) == Uint32(0)):
        dev.store(scale + Int64(unit // Uint32(e.vectors_per_scale)) * e.scale_entry_bytes, entry, e.scale_entry_bytes)


@cute.kernel
def encode_flat_kernel(
    spec: cutlass.Constexpr, x: Int64, x_stride: Int64, data: Int64, scale: Int64, given: Int64, given_stride: Int64,
    rows: Int32,
):  # fmt: skip
    e = spec.encoder
    first = Uint32(cute.arch.block_idx()[0]) * Uint32(spec.threads * spec.chunks) + Uint32(cute.arch.thread_idx()[0])
    units = Uint32(rows) * Uint32(spec.padded_vectors)
    cute.arch.griddepcontrol_wait()
    work = []
    for c in range_constexpr(spec.chunks):
        unit = first + Uint32(c * spec.threads)
        row = unit // Uint32(spec.padded_vectors)
        v = unit - row * Uint32(spec.padded_vectors)
        inside = unit < units
        if const_expr(spec.padded_vectors != spec.vectors):
            inside = inside & (v < Uint32(spec.vectors))
        common = Uint32(0)
        if const_expr(e.common_scale):
            common = dev.load_if(inside, given + Int64(row) * given_stride, 4)[0]
        words = load_vector(spec, inside, x + Int64(row) * x_stride + Int64(v * Uint32(spec.vector_bytes)))
        work.append((unit, row, v, inside, common, words))
    cute.arch.griddepcontrol_launch_dependents()
    for c in range_constexpr(spec.chunks):
        unit, row, v, inside, common, words = work[c]
        wire, entry = e.encode(words, common)
        at = unit
        if const_expr(spec.padded_vectors != spec.vectors):
            at = row * Uint32(spec.vectors) + v
        if inside:
            dev.store_16(data + Int64(at) * 16, wire)
        store_entry(spec, inside, unit, scale, entry)


@cute.jit
def encode_flat(
    spec: cutlass.Constexpr, anchor: cute.Tensor,
    x: Int64, x_stride: Int64, data: Int64, scale: Int64, given: Int64, given_stride: Int64, rows: Int32, grid: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`encode_flat_kernel` on ``anchor``'s current stream; strides in bytes."""
    encode_flat_kernel(spec, x, x_stride, data, scale, given, given_stride, rows).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True,
        min_blocks_per_mp=spec.blocks_per_sm, preferred_smem_carveout=DEFAULT_CARVEOUT,
    )  # fmt: skip


def store_shared(addr: Int32, value: Uint32) -> None:
    inline_ptx("st.shared.u32 [{$r0}], {$r1};", read_only_args=[addr, value])


def load_shared(addr: Int32) -> Uint32:
    return inline_ptx("ld.shared.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[addr])


@cute.kernel
def encode_rows_kernel(
    spec: cutlass.Constexpr, x: Int64, x_stride: Int64, data: Int64, scale: Int64, scale_stride: Int64,
    row_scale: Int64, row_scale_stride: Int64, padding: Int32, rows: Int32,
):  # fmt: skip
    e = spec.encoder
    tid = cute.arch.thread_idx()[0]
    lane = tid % WARP
    warp = tid // WARP
    row = Uint32(cute.arch.block_idx()[0] * spec.rows + tid // spec.threads_per_row)
    first = Uint32(tid % spec.threads_per_row)
    present = row < Uint32(rows)
    cute.arch.griddepcontrol_wait()
    work = []
    for c in range_constexpr(spec.chunks):
        v = first + Uint32(c * spec.threads_per_row)
        inside = present & (v < Uint32(spec.vectors))
        words = load_vector(spec, inside, x + Int64(row) * x_stride + Int64(v * Uint32(spec.vector_bytes)))
        work.append((v, inside, words))
    cute.arch.griddepcontrol_launch_dependents()
    largest = Uint32(0)
    for c in range_constexpr(spec.chunks):
        largest = reg.maximum(largest, e.magnitude(work[c][2]))
    largest = cute.arch.warp_redux_sync(largest, "umax")
    if const_expr(spec.warps_per_row > 1):
        per_warp = Int32(cute.arch.alloc_smem(Uint32, spec.threads // WARP, alignment=16).toint())
        if lane == Int32(0):
            store_shared(per_warp + warp * 4, largest)
        cute.arch.sync_threads()
        if lane < Int32(spec.warps_per_row):
            largest = load_shared(per_warp + (warp // spec.warps_per_row * spec.warps_per_row + lane) * 4)
        largest = cute.arch.warp_redux_sync(largest, "umax")
    whole = e.scale_of_row(largest)
    for c in range_constexpr(spec.chunks):
        v, inside, words = work[c]
        wire, entry = e.encode(words, whole)
        if inside:
            dev.store_16(data + Int64(row * Uint32(spec.vectors) + v) * 16, wire)
        store_entry(spec, inside, v, scale + Int64(row) * scale_stride, entry)
    at = row_scale + Int64(row) * row_scale_stride
    if present & (first == Uint32(0)):
        dev.store(at, whole, 4)
    if present & (first < Uint32(padding)):
        dev.store(at + Int64(first + Uint32(1)) * 4, Uint32(0), 4)


@cute.jit
def encode_rows(
    spec: cutlass.Constexpr, anchor: cute.Tensor,
    x: Int64, x_stride: Int64, data: Int64, scale: Int64, scale_stride: Int64, row_scale: Int64,
    row_scale_stride: Int64, padding: Int32, rows: Int32, grid: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`encode_rows_kernel` on ``anchor``'s current stream; strides in bytes, ``padding`` in words."""
    encode_rows_kernel(
        spec, x, x_stride, data, scale, scale_stride, row_scale, row_scale_stride, padding, rows
    ).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True,
        min_blocks_per_mp=spec.blocks_per_sm, preferred_smem_carveout=DEFAULT_CARVEOUT,
    )  # fmt: skip


@cute.kernel
def decode_kernel(
    spec: cutlass.Constexpr, data: Int64, data_stride: Int64, scale: Int64, scale_stride: Int64, over: Int64,
    over_stride: Int64, out: Int64, rows: Int32,
):  # fmt: skip
    d = spec.decoder
    first = Uint32(cute.arch.block_idx()[0]) * Uint32(spec.threads * spec.chunks) + Uint32(cute.arch.thread_idx()[0])
    units = Uint32(rows) * Uint32(spec.units)
    cute.arch.griddepcontrol_wait()
    work = []
    for c in range_constexpr(spec.chunks):
        unit = first + Uint32(c * spec.threads)
        row = unit // Uint32(spec.units)
        u = unit - row * Uint32(spec.units)
        inside = unit < units
        words = dev.load_if(
            inside, data + Int64(row) * data_stride + Int64(u * Uint32(spec.unit_bytes)), spec.unit_bytes
        )
        block = u // Uint32(d.block // spec.values)
        entry = dev.load_if(
            inside, scale + Int64(row) * scale_stride + Int64(block * Uint32(d.scale_entry_bytes)), d.scale_entry_bytes
        )[0]
        common = Uint32(0)
        if const_expr(d.global_scale):
            common = dev.load_if(inside, over + Int64(row) * over_stride, 4)[0]
        work.append((unit, inside, words, entry, common))
    cute.arch.griddepcontrol_launch_dependents()
    for c in range_constexpr(spec.chunks):
        unit, inside, words, entry, common = work[c]
        values = d.decode(words, spec.values, entry, common)
        if const_expr(spec.out_bytes == 2):
            vector = [dev.bf16_pair(values[i], values[i + 1]) for i in range(0, 8, 2)]
        else:
            vector = [reg.bits(value) for value in values]
        if inside:
            dev.store_16(out + Int64(unit) * 16, vector)


@cute.jit
def decode(
    spec: cutlass.Constexpr, anchor: cute.Tensor,
    data: Int64, data_stride: Int64, scale: Int64, scale_stride: Int64, over: Int64, over_stride: Int64, out: Int64,
    rows: Int32, grid: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`decode_kernel` on ``anchor``'s current stream; strides in bytes."""
    decode_kernel(spec, data, data_stride, scale, scale_stride, over, over_stride, out, rows).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True,
        min_blocks_per_mp=spec.blocks_per_sm, preferred_smem_carveout=DEFAULT_CARVEOUT,
    )  # fmt: skip
