"""FP8 partial results for Fence: BF16 rows of the combine workspace become E4M3, in place (paper §4.3).

Runs between the expert computation and a Fence combine, on the target rank. A block serves one slot at a time: every
thread loads two vectors of BF16 a chunk, one barrier, and stores them as one vector of E4M3 into the row's first half,
so no second workspace is needed. Slots without a token are skipped. Values beyond ±448 saturate; no scales travel.

Roles: none, all warps alike. Barriers: one a slot. Shared memory: none.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from moe_layer.comm import device as dev


@cute.kernel
def fp8_partials_kernel(
    spec: cutlass.Constexpr, ws: Int64, partials: Int64, ids: Int64, id_stride: Int32, top_k: Int32, slots: Int32
):
    tid = cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    for slot in range(cute.arch.block_idx()[0], slots, cute.arch.grid_dim()[0]):
        taken = Int32(0)
        for j in range(top_k):
            if Int32(dev.load_u32(ids + (Int64(slot) * Int64(id_stride) + Int64(j)) * 4)) >= Int32(0):
                taken = Int32(1)
        row = ws + partials + Int64(slot) * spec.combine_bytes
        wide = []
        for c in range_constexpr(spec.chunks):
            v = tid + c * spec.threads
            # The last E4M3 vector may have only half a pair of BF16 vectors behind it; its other half is padding.
            second = 2 * v + 1 if 2 * v + 1 < Int32(spec.combine_bytes // 16) else 2 * v
            inside = v < Int32(spec.vectors)
            wide.append(dev.load_vector(row + Int64(2 * v if inside else Int32(0)) * 16))
            wide.append(dev.load_vector(row + Int64(second if inside else Int32(0)) * 16))
        cute.arch.sync_threads()
        for c in range_constexpr(spec.chunks):
            v = tid + c * spec.threads
            if taken != Int32(0) and v < Int32(spec.vectors):
                a, b = wide[2 * c], wide[2 * c + 1]
                narrow = [dev.narrow_pairs_to_e4m3(x[j], x[j + 1]) for x in (a, b) for j in (0, 2)]
                dev.store_vector(row + Int64(v) * 16, narrow)


@cute.jit
def fp8_partials(
    spec: cutlass.Constexpr, anchor: cute.Tensor, ws: Int64, partials: Int64, ids: Int64, id_stride: Int32,
    top_k: Int32, slots: Int32, grid: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Launch :func:`fp8_partials_kernel` on ``anchor``'s current stream."""
    fp8_partials_kernel(spec, ws, partials, ids, id_stride, top_k, slots).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream, use_pdl=True
    )
