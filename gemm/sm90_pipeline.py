"""How consumers of the Hopper grouped GEMM give stages back."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute.arch import inline_ptx

from moe_layer.gemm import sm90_device as dev
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


def release_if(barrier: cute.Pointer, tid: Int32, condition: Int32) -> None:
    """As :func:`release` of a block alone, where ``condition`` is not 0; without a branch.

    ptxas lets WGMMAs with register operands overlap only where enough of them follow one another with no branch between
    them (else its note C7513).
    """
    inline_ptx(
        "{\n.reg .pred p, q;\nsetp.ne.s32 p, {$r1}, 0;\nsetp.eq.and.s32 q, {$r2}, 0, p;\n"
        "@q mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];\n}",
        read_only_args=[dev.shared_address(barrier), condition, tid % WARPGROUP],
    )
