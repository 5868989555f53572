"""Compiling, loading and sizing the one-sided kernels.

A family of kernels is a dict from variant to launch function: :data:`FENCE`, :data:`FP8_PARTIALS`, or Sentinel's number
of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moe_layer.comm.layout import MAX_PARTS, STATE_ERROR
from moe_layer.comm.spec import CombineSpec, DispatchSpec, GiveUpSpec
from moe_layer.kernel_cache import get_kernel

Kernels = dict[int, Callable[..., None]]
FENCE = 0
FP8_PARTIALS = -1  # turns BF16 partial results into E4M3 before a Fence combine
# Scalars of the launch functions, a letter each (kernel_cache.get_kernel).
FENCE_DISPATCH, FENCE_COMBINE = "lll" + "llllll" + "lll" + "iiiuuii", "lllll" + "iiiui"
SENTINEL_DISPATCH, SENTINEL_COMBINE = "lll" + "llllll" + "lll" + "lllll" + "iiiiuui", "lllll" + "llli" + "iiiui"
# With few tokens a GPU has multiprocessors to spare, and one of them moves a row no faster than its own stores go:
# up to this T̂ (a quarter of the multiprocessors of an H200) MAX_PARTS blocks share a token
# (measured: docs/performance.md).
PARTS_UP_TO_TOKENS = 32


def sentinel_parts(t_hat: int, vectors: int) -> int:
    """Blocks that share a Sentinel slot; the same on every rank, since T̂ and the widths are."""
    return MAX_PARTS if t_hat <= PARTS_UP_TO_TOKENS and vectors >= 32 * MAX_PARTS else 1


def grid_size(slots: int, parts: int, resident: int) -> int:
    """Blocks for ``slots`` slots, about as many as are resident at once; the same on every rank with equal GPUs."""
    share = max(1, parts)
    return max(1, min(slots, resident // share)) * share


def dispatch_kernels(spec: DispatchSpec, arch: str) -> Kernels:
    """Every dispatch kernel of a layer."""
    from moe_layer.comm.fence import fence_dispatch
    from moe_layer.comm.sentinel import sentinel_dispatch

    kernels = {FENCE: get_kernel(fence_dispatch, spec, FENCE_DISPATCH, arch)}
    for parts in (1, MAX_PARTS):
        kernels[parts] = get_kernel(sentinel_dispatch, replace(spec, parts=parts), SENTINEL_DISPATCH, arch)
    return kernels


def combine_kernels(spec: CombineSpec, arch: str) -> Kernels:
    """Every combine kernel of a layer for one pair of dtypes."""
    from moe_layer.comm.fence import fence_combine
    from moe_layer.comm.sentinel import sentinel_combine

    kernels = {FENCE: get_kernel(fence_combine, spec, FENCE_COMBINE, arch)}
    if spec.element_bytes == 1:
        from moe_layer.comm.fp8_combine import fp8_partials

        return kernels | {FP8_PARTIALS: get_kernel(fp8_partials, spec, "lll" + "iiii", arch)}
    for parts in (1, MAX_PARTS):
        kernels[parts] = get_kernel(sentinel_combine, replace(spec, parts=parts), SENTINEL_COMBINE, arch)
    return kernels


def give_up_kernel(ep_size: int, in_combine: bool, arch: str) -> Callable[..., None]:
    """The kernel by which a rank that failed on the host tells its peers."""
    from moe_layer.comm.routing import give_up

    return get_kernel(give_up, GiveUpSpec(ep_size, in_combine), "lli", arch)


def load_kernels(
    dispatch: Kernels, combines: list[Kernels], others: list[Callable[..., None]], ep_size: int, device: torch.device
) -> None:
    """Run every kernel once on a workspace of its own whose error word is set, so that it does nothing.

    CUDA loads a kernel at its first launch, which can wait for the GPU to go idle, and so for a peer that spins.
    """
    scratch = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    scratch[STATE_ERROR] = 1
    here = scratch.data_ptr()
    far = 1 << 19  # region offset, past what a kernel reads at the start of each
    peers = torch.full((ep_size,), here, dtype=torch.int64, device=device)
    base = [here, peers.data_ptr()]
    for variant, kernel in dispatch.items():
        regions, waiters = ([], [1]) if variant == FENCE else ([far] * 4 + [0, 1], [])
        kernel(scratch, *base, here, *[here] * 4, 0, 0, *[far] * 3, *regions, 0, 0, 0, 0, 0, *waiters, max(1, variant))
    for combine in combines:
        for variant, kernel in combine.items():
            if variant == FP8_PARTIALS:
                kernel(scratch, here, far, here, 0, 0, 0, 1)
                continue
            regions = [] if variant == FENCE else [far, far, 0, 1]
            kernel(scratch, *base, far, here, 0, *regions, 0, 0, 0, 0, max(1, variant))
    for kernel in others:
        kernel(scratch, *base, 0)
    torch.cuda.synchronize(device)
