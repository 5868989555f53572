"""The symmetric allocation: every word that a kernel addresses lies in its region, and no two uses share one.

The addresses below restate what the kernels compute (comm/fence.py, comm/sentinel.py), word by word, so that a region
that is too small or a stride that aliases shows as an overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np
import pytest

from moe_layer.comm.auto import sentinel_limit
from moe_layer.comm.layout import (
    MAX_PARTS,
    META_STRIDE,
    STATE_BYTES,
    STATE_COMBINED,
    STATE_DONE,
    STATE_ERROR,
    STATE_RECORD,
    STATE_STEP_COMBINE,
    STATE_STEP_DISPATCH,
    STATE_TIMEOUT,
    Capacity,
    SyncOffsets,
    WorkspaceLayout,
    align,
)

MIB = 1 << 20
REGIONS = ("control", "slots", "present", "dispatch", "combine", "meta", "landing", "escape", "partials")
AT_REST = REGIONS[5:]  # the sentinel in every word
TINY = Capacity(3, 4, 2, 48, 16, 5, 80)
CAPACITIES = [
    TINY,
    Capacity(1, 1, 1, 16, 0, 1, 16),
    Capacity(2, 7, 7, 5120, 160, 6, 10240),
    Capacity(6, 5, 1, 1040, 48, 32, 2064),
    Capacity(8, 9, 3, 13, 3, 22, 30),  # lengths that are no multiple of 16
    Capacity(64, 2, 2, 32, 16, 8, 32),
]


def check_apart(spans: Iterable[tuple[str, int, int]], start: int, end: int) -> None:
    """No two (name, first byte, length) overlap, all within [start, end)."""
    ordered = sorted(spans, key=lambda span: span[1])
    assert ordered
    for (name, at, length), (follower, next_at, _) in zip(ordered, [*ordered[1:], ("the end", end, 0)]):
        assert length > 0
        assert at >= start
        assert at + length <= next_at, f"{name} at {at}, {length} bytes, runs into {follower} at {next_at}"


def region(layout: WorkspaceLayout, name: str) -> tuple[int, int]:
    return layout.offsets[name], layout.offsets[name] + layout.sizes[name]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_regions(capacity: Capacity) -> None:
    layout = WorkspaceLayout(capacity)
    assert tuple(layout.offsets) == tuple(layout.sizes) == REGIONS
    check_apart([(name, layout.offsets[name], layout.sizes[name]) for name in REGIONS], 0, layout.total_bytes)
    assert all(offset % 128 == 0 for offset in layout.offsets.values())
    assert layout.total_bytes % 128 == 0
    start, length = layout.sentinel_region
    for name in REGIONS:
        first, end = region(layout, name)
        assert (start <= first and end <= start + length) == (name in AT_REST)
        assert name in AT_REST or end <= start
    # What is zeroed at the start: control, slots and headers received, all of it ahead of the dispatch workspace.
    assert all(region(layout, name)[1] <= layout.offsets["dispatch"] for name in REGIONS[:3])


@pytest.mark.parametrize("ep_size", [1, 2, 3, 5, 8, 17, 72, 1024])
def test_control_words(ep_size: int) -> None:
    sync = SyncOffsets(ep_size)
    state = {
        "dispatch step": (STATE_STEP_DISPATCH, 4),
        "combine step": (STATE_STEP_COMBINE, 4),
        "error": (STATE_ERROR, 4),
        "blocks finished": (STATE_DONE, 4),
        "time-out": (STATE_TIMEOUT, 8),
        "record": (STATE_RECORD, 8),
        "code of the last combine": (STATE_COMBINED, 4),
    }
    spans = [(name, at, size) for name, (at, size) in state.items()]
    check_apart(spans, 0, STATE_BYTES)
    # A kernel reads both step counters and the error word as one vector.
    assert STATE_STEP_DISPATCH % 16 == 0
    assert (STATE_STEP_COMBINE, STATE_ERROR) == (STATE_STEP_DISPATCH + 4, STATE_STEP_DISPATCH + 8)
    entries = {"counters": 4, "dispatch_flags": 8, "combine_flags": 8, "announcements": 8, "parameters": 32}
    for name, size in entries.items():
        base = getattr(sync, name)
        assert base % min(size, 16) == 0  # a store of this width, two vectors for the parameters
        spans += [(f"{name}[{r}]", base + size * r, size) for r in range(ep_size)]
    check_apart(spans, 0, sync.end)
    # The slow path of a wait knows the announcement's address alone.
    for r in range(ep_size):
        assert sync.announcements + 8 * r + sync.combined == sync.combine_flags + 8 * r
    # Words that peers write share no 128-byte line with those of this rank alone.
    assert sync.dispatch_flags // 128 > (sync.counters + 4 * ep_size - 1) // 128


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_regions_of_the_largest_step(capacity: Capacity) -> None:
    """A kernel finds the taken slots at SyncOffsets.end; it does not know the capacity."""
    layout = WorkspaceLayout(capacity)
    assert layout.offsets["control"] == 0
    assert layout.offsets["slots"] == SyncOffsets(capacity.ep_size).end
    slots = capacity.max_tokens_per_rank * capacity.ep_size
    assert layout.sizes["slots"] >= 4 * slots
    assert layout.sizes["combine"] >= align(capacity.combine_bytes) * slots


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_dispatch_rows_of_every_step(capacity: Capacity) -> None:
    """Rows of any step that the capacity covers, not only the largest."""
    layout = WorkspaceLayout(capacity)
    start, end = region(layout, "dispatch")
    for t_hat in range(capacity.max_tokens_per_rank + 1):
        for hidden in {16, align(capacity.hidden_bytes)}:
            for scale in {0, align(capacity.scale_bytes)}:
                for top_k in {1, capacity.top_k}:
                    slots = capacity.ep_size * t_hat
                    at = layout.dispatch_rows(slots, hidden, scale)
                    assert all(offset % 128 == 0 for offset in at)
                    lengths = (slots * hidden, slots * scale, slots * 8 * top_k)
                    spans = [span for span in zip(("rows", "scales", "routing"), at, lengths) if span[2]]
                    if spans:
                        check_apart(spans, start, end)
    # Rows whose bytes are no multiple of 16 are moved as if they were.
    assert layout.dispatch_rows(100, 13, 3) == layout.dispatch_rows(100, 16, 16)


def words(base: int, *strided: tuple[int, int], length: int) -> np.ndarray:
    """Addresses of all 4-byte words of ``length`` bytes at base + Σ index · stride, for (count, stride) pairs."""
    addresses = np.arange(base, base + length, 4)
    for count, stride in strided:
        addresses = (addresses[None, :] + (np.arange(count) * stride)[:, None]).reshape(-1)
    return addresses


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_sentinel_slots(capacity: Capacity) -> None:
    """Slot i of source s, in either bank: no word serves two, all lie in their region."""
    layout = WorkspaceLayout(capacity)
    p, t = capacity.ep_size, capacity.sentinel_tokens_per_rank
    hidden, scale, combine = align(capacity.hidden_bytes), align(capacity.scale_bytes), align(capacity.combine_bytes)
    routing = 4 * (MAX_PARTS + 2)  # headers and weight escapes; the rest of a meta slot begins at word 8
    assert routing <= 32
    slots = [(p, t * META_STRIDE), (t, META_STRIDE)]
    uses = {
        "meta": words(0, (2, p * t * META_STRIDE), *slots, length=32 + 8 * capacity.top_k),
        "landing": words(0, (p, t * layout.landing_stride), (t, layout.landing_stride), length=hidden + scale),
        # one word of four mask bits a vector
        "escape": words(
            0, (p, t * layout.landing_stride // 4), (t, layout.landing_stride // 4), length=(hidden + scale) // 4
        ),
        "partials": words(0, (t * p, layout.partial_stride), length=combine),
        "present": words(0, (p, 4 * t), (t, 4), length=4),
    }
    assert layout.landing_stride % 64 == 0  # so that the masks of a slot start at a word of their own
    for name, addresses in uses.items():
        assert len(np.unique(addresses)) == len(addresses), name
        assert addresses.max() + 4 <= layout.sizes[name], name


def test_slots_stay_where_they_are() -> None:
    """A slot's address depends on the allocation alone: no dependence on a step's T̂, widths or top_k exists."""
    large = WorkspaceLayout(TINY)
    for name in ("landing_stride", "partial_stride"):
        assert getattr(large, name) >= getattr(WorkspaceLayout(replace(TINY, hidden_bytes=16, combine_bytes=16)), name)
    assert META_STRIDE == 4 * (8 + 2 * 32)  # room for the largest top_k, whatever the layer's


def test_offsets_beyond_32_bits() -> None:
    """A large model's workspace passes 4 GiB."""
    layout = WorkspaceLayout(Capacity(72, 8192, 512, 14336, 0, 8, 14336))
    rows = 72 * 8192 * 14336
    assert rows > 2**32
    assert layout.offsets["meta"] >= 2 * rows
    at = layout.dispatch_rows(72 * 8192, 14336, 0)
    assert at[2] == align(layout.offsets["dispatch"] + rows, 128)


def test_memory_of_the_paper() -> None:
    """§3: 8 ranks, 4096 tokens of V4.1-Flash: 160 MiB of rows, 320 MiB of partial results, a few MiB besides."""
    fence = WorkspaceLayout(Capacity(8, 4096, 1, 5120, 160, 6, 10240))
    assert fence.sizes["combine"] == 320 * MIB
    hidden, scale, routing = fence.dispatch_rows(8 * 4096, 5120, 160)
    assert scale - hidden == 160 * MIB
    assert routing - scale + 8 * 4096 * 48 < 7 * MIB  # scales, ids and weights
    assert fence.total_bytes < 488 * MIB
    # Sentinel adds landing slots with their escapes, and combine slots, for the T̂ that it serves.
    limit = sentinel_limit(8, 5120 + 160 + 10240, 6)
    assert limit < 4096
    auto = WorkspaceLayout(Capacity(8, 4096, limit, 5120, 160, 6, 10240))
    a_slot = (5120 + 160 + 32) * 5 // 4 + 10240 + 2 * META_STRIDE + 4
    assert auto.total_bytes - fence.total_bytes < 8 * limit * a_slot + 4096
    assert auto.total_bytes < 570 * MIB


def test_capacities() -> None:
    assert TINY.covers(TINY)
    for field in fields(Capacity):
        if field.name == "ep_size":
            continue
        more = replace(TINY, **{field.name: getattr(TINY, field.name) + 1})
        assert more.covers(TINY)
        assert not TINY.covers(more), field.name
        other = replace(TINY, max_tokens_per_rank=9, combine_bytes=16)
        both = more.union(other)
        assert both.covers(more)
        assert both.covers(other)
        for name in (f.name for f in fields(Capacity)):
            assert getattr(both, name) == max(getattr(more, name), getattr(other, name))
    # More ranks need another allocation, never a larger one.
    assert not replace(TINY, ep_size=4).covers(TINY)


@pytest.mark.parametrize("to", [16, 64, 128])
def test_align(to: int) -> None:
    for n in range(300):
        rounded = align(n, to)
        assert rounded % to == 0
        assert 0 <= rounded - n < to
