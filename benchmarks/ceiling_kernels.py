"""Kernels that do nothing but what a ceiling is named for: 16-byte stores to a peer, loads from one, a flag, a launch.

They use the loads and stores of the protocols (``moe_layer.comm.device``), so that a ceiling is what those could reach.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint64, const_expr

from moe_layer.comm import device as dev


@dataclass(frozen=True)
class LinkSpec:
    """Rows to a peer (push) or from one (pull).

    Attributes:
        ep_size: ranks; each row's peer is the next in turn.
        row_bytes: a multiple of 16, one vector a thread.
        pull: loads from the peer instead of stores to it.
    """

    ep_size: int
    row_bytes: int
    pull: bool

    @property
    def threads(self) -> int:
        return self.row_bytes // 16


@cute.kernel
def link_rows_kernel(
    spec: cutlass.Constexpr, peers: Int64, to_source: Int64, to_target: Int64, rank: Int32, rows: Int32
):
    own = dev.load_i64(peers + Int64(rank) * 8)
    at = Int64(cute.arch.thread_idx()[0]) * 16
    for row in range(cute.arch.block_idx()[0], rows, cute.arch.grid_dim()[0]):
        other = (rank + Int32(1) + row % Int32(spec.ep_size - 1)) % Int32(spec.ep_size)
        peer = dev.load_i64(peers + Int64(other) * 8)
        offset = Int64(row) * spec.row_bytes + at
        if const_expr(spec.pull):
            dev.store_vector(own + to_target + offset, dev.load_vector_sys(peer + to_source + offset))
        else:
            dev.store_vector_sys(peer + to_target + offset, dev.load_vector(own + to_source + offset))


@cute.jit
def link_rows(
    spec: cutlass.Constexpr, anchor: cute.Tensor, peers: Int64, to_source: Int64, to_target: Int64, rank: Int32,
    rows: Int32, grid: Int32, stream: cuda.CUstream,
):  # fmt: skip
    """Move ``rows`` rows between ``to_source`` and ``to_target``, offsets of the ranks' allocations."""
    link_rows_kernel(spec, peers, to_source, to_target, rank, rows).launch(
        grid=[grid, 1, 1], block=[spec.threads, 1, 1], stream=stream
    )


@dataclass(frozen=True)
class FlagSpec:
    """A flag that two ranks send back and forth.

    Attributes:
        rounds: there and back, timed; as many as ``untimed`` go before.
        untimed: rounds until both sides are up and caches are warm.
        max_polls: of one wait; a peer that never comes ends the kernel instead of hanging it.
    """

    rounds: int
    untimed: int
    max_polls: int


@cute.kernel
def ping_pong_kernel(spec: cutlass.Constexpr, mine: Int64, theirs: Int64, result: Int64, first: Int32):
    if cute.arch.thread_idx()[0] == 0:
        start = Uint64(0)
        missing = Int32(0)
        for n in range(Int32(1), Int32(spec.untimed + spec.rounds + 1), Int32(1)):
            if n == Int32(spec.untimed + 1):
                start = Uint64(cute.arch.globaltimer())
            if first != Int32(0):
                dev.store_u64_sys(theirs, Uint64(n))
            polls = Int32(0)
            # Once a wait has failed the others fail at their first look.
            while missing == Int32(0) and dev.load_u64_sys(mine) < Uint64(n):
                polls += 1
                if polls >= Int32(spec.max_polls):
                    missing = Int32(1)
            if first == Int32(0):
                dev.store_u64_sys(theirs, Uint64(n))
        elapsed = Uint64(cute.arch.globaltimer()) - start
        if missing != Int32(0):
            elapsed = Uint64(0)
        dev.store_u64_sys(result, elapsed)


@cute.jit
def ping_pong(
    spec: cutlass.Constexpr, anchor: cute.Tensor, mine: Int64, theirs: Int64, result: Int64, first: Int32,
    stream: cuda.CUstream,
):  # fmt: skip
    """Play; ``result`` receives the timed rounds' ns, 0 where the peer was missing. ``mine`` must hold 0 before."""
    ping_pong_kernel(spec, mine, theirs, result, first).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@dataclass(frozen=True)
class EmptySpec:
    """A kernel that only takes its place in a chain of dependent launches."""


@cute.kernel
def empty_kernel(spec: cutlass.Constexpr):
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def empty(spec: cutlass.Constexpr, anchor: cute.Tensor, unused: Int32, stream: cuda.CUstream):
    """Launch a kernel of one block that does nothing."""
    empty_kernel(spec).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True)
