"""How a step is spread over threads and blocks: everything is covered once, and everything is resident that must be."""

from __future__ import annotations

import itertools

import pytest

from moe_layer.comm.launch import PARTS_UP_TO_TOKENS, grid_size, sentinel_parts
from moe_layer.comm.layout import MAX_PARTS
from moe_layer.comm.spec import CombineSpec, DispatchSpec

WIDTHS = (16, 32, 496, 512, 528, 3584 + 112, 5120 + 160, 7168, 14336, 15872, 16384, 32768, 65536, 131072 + 16)
RANKS = (1, 2, 3, 4, 5, 6, 8, 9, 16, 72)
WARP = 32


def dispatch(ep_size: int, width: int, parts: int) -> DispatchSpec:
    return DispatchSpec(ep_size, 8, 64, True, width, 0, True, 4, parts)


def combine(ep_size: int, width: int, parts: int) -> CombineSpec:
    return CombineSpec(ep_size, width, 2, 2, parts)


def handled(spec: DispatchSpec | CombineSpec) -> list[int]:
    """The 16-byte vectors that the payload threads of all parts move, as the kernels number them."""
    payload_threads = spec.payload_warps * WARP
    found = []
    for part, thread, chunk in itertools.product(range(spec.parts), range(payload_threads), range(spec.chunks)):
        local = thread + chunk * payload_threads
        vector = part * spec.part_vectors + local
        if local < spec.part_vectors and vector < spec.vectors:
            found.append(vector)
    return found


@pytest.mark.parametrize("make", [dispatch, combine])
@pytest.mark.parametrize("parts", [1, MAX_PARTS])
@pytest.mark.parametrize("ep_size", RANKS)
def test_every_vector_is_moved_once(make, parts: int, ep_size: int) -> None:
    for width in WIDTHS:
        spec = make(ep_size, width, parts)
        assert sorted(handled(spec)) == list(range(width // 16))
        assert spec.threads == (spec.payload_warps + 1) * WARP <= 1024  # one warp more, for the routing
        assert spec.blocks_per_sm >= 1
        assert spec.blocks_per_sm * spec.threads <= 2048
        # No warp without work: with one warp fewer the chunks would not suffice.
        assert (spec.payload_warps - 1) * WARP * spec.chunks < spec.part_vectors


def test_payload_is_rows_and_scales() -> None:
    spec = DispatchSpec(2, 6, 384, True, 5120, 160, True, 4)
    assert (spec.hidden_vectors, spec.vectors) == (320, 330)
    assert handled(spec) == handled(dispatch(2, 5280, 1))


def test_e4m3_rows_are_half_as_long() -> None:
    """FP8 partial results lie in the first half of their BF16 rows, padded to 16 bytes."""
    for hidden in (8, 24, 5120, 7168, 72):
        row = CombineSpec(2, -(-2 * hidden // 16) * 16, 1, 2)
        assert row.vectors * 16 >= hidden
        assert row.vectors * 16 <= row.combine_bytes
        assert row.vectors * 16 - hidden < 32


def test_blocks() -> None:
    for slots, parts, resident in itertools.product((0, 1, 2, 31, 132, 133, 4096), (0, 1, 4), (1, 3, 4, 16, 133, 528)):
        grid = grid_size(slots, parts, resident)
        share = max(1, parts)
        assert grid % share == 0
        assert grid >= share  # one slot's blocks at least, which also run at T = 0
        assert grid <= max(share, resident)
        assert grid // share <= max(1, slots)
        # No slot is left to a second round while blocks are free.
        assert grid // share == max(1, slots) or grid + share > resident


def test_parts_are_the_same_on_every_rank() -> None:
    """They follow from what ranks agree on, and a part is at least a warp's width."""
    for t_hat, vectors in itertools.product(
        (0, 1, PARTS_UP_TO_TOKENS, PARTS_UP_TO_TOKENS + 1, 4096), (1, 127, 128, 330)
    ):
        parts = sentinel_parts(t_hat, vectors)
        assert parts in (1, MAX_PARTS)
        if parts > 1:
            assert vectors // parts >= WARP
            assert t_hat <= PARTS_UP_TO_TOKENS
    assert sentinel_parts(1, 330) == MAX_PARTS
    assert sentinel_parts(4096, 330) == sentinel_parts(1, 16) == 1
