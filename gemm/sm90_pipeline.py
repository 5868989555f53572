"""How consumers of the Hopper grouped GEMM give stages back."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from moe_layer.gemm.sm90_spec import WARP, WARPGROUP


@cute.jit
def release(spec: cutlass.Constexpr, barrier: cute.Pointer, tid: Int32):
    """This warpgroup has read the stage: all of its WGMMAs are complete in every one of its threads.

    Every block of the cluster is told, since each writes its part of the weights into all of them.
    """
    for r in range_constexpr(spec.cluster):
        if tid % WARPGROUP == Int32(r * WARP):
            if const_expr(spec.cluster == 1):
                cute.arch.mbarrier_arrive(barrier)
            else:
                cute.arch.mbarrier_arrive(barrier, r)
