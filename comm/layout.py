"""Where everything lies in a rank's symmetric allocation.

Every rank allocates the same bytes with the same layout, so an offset is valid on every peer. Words that peers write
and words that only the owner touches lie in one allocation, apart by region:

    control    state: step counters, error word, blocks finished, time-out, error record, code   owner
               counters: Fence's slots taken on each target rank                                owner
               sync, an entry a peer: dispatch flag, combine flag, announcement, parameters     peers write, owner polls
    slots      per token and rank: the slot that dispatch took there, −1 for none               owner
    present    Sentinel: per landing slot, the header received in dispatch                       owner
    dispatch   W_d: hidden rows, scale rows, routing rows, each [ep_size*T̂, …]                  peers (Fence) or owner
    combine    W_c: partial results [ep_size*T̂, hidden]                                         owner writes, peers pull
    meta       I: two banks of Sentinel's header, ids and weights slots                    peers write, owner resets
    landing    L: Sentinel's landing slots                                                 peers write, owner resets
    escape     which words of a landing slot held the sentinel pattern                     peers write, owner resets
    partials   M: Sentinel's combine slots                                                 peers write, owner resets

meta, landing, escape and partials hold the sentinel in every word at rest. Their slot strides are those of the largest
layer and never change, so that a slot's words are reset by whoever consumed them, whatever the step's T̂ and widths
(docs/protocols.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_layer.comm.base import MAX_TOP_K, ROW_ALIGNMENT

STATE_BYTES = 128
STATE_STEP_DISPATCH, STATE_STEP_COMBINE, STATE_ERROR, STATE_DONE, STATE_TIMEOUT, STATE_RECORD = 0, 4, 8, 12, 16, 24
STATE_COMBINED = 32  # the code (element bytes, row bytes) of this rank's last combine
MAX_PARTS = 4  # blocks that share a Sentinel slot
META_WORDS = 8 + 2 * MAX_TOP_K  # a header a part, weight escapes (low and high 16 bits), 2 unused, ids, weights
META_STRIDE = META_WORDS * 4


def align(n: int, to: int = ROW_ALIGNMENT) -> int:
    """``n`` rounded up to a multiple of ``to``."""
    return -(-n // to) * to


@dataclass(frozen=True)
class Capacity:
    """The largest step that an allocation serves.

    Attributes:
        ep_size: ranks.
        max_tokens_per_rank: largest T̂.
        sentinel_tokens_per_rank: largest T̂ of a Sentinel step; its landing slots need no more.
        hidden_bytes, scale_bytes: longest payload rows.
        top_k: largest top_k.
        combine_bytes: longest row of partial results.
    """

    ep_size: int
    max_tokens_per_rank: int
    sentinel_tokens_per_rank: int
    hidden_bytes: int
    scale_bytes: int
    top_k: int
    combine_bytes: int

    def covers(self, other: Capacity) -> bool:
        """Whether every step within ``other`` fits."""
        return self.ep_size == other.ep_size and all(
            getattr(self, name) >= getattr(other, name) for name in self.__dataclass_fields__ if name != "ep_size"
        )

    def union(self, other: Capacity) -> Capacity:
        """The smallest capacity that covers both."""
        return Capacity(*(max(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class SyncOffsets:
    """Offsets that depend on the number of ranks alone, hence constants of a kernel."""

    ep_size: int

    @property
    def counters(self) -> int:
        return STATE_BYTES

    @property
    def dispatch_flags(self) -> int:
        return align(self.counters + 4 * self.ep_size, 128)

    @property
    def combine_flags(self) -> int:
        return self.dispatch_flags + 8 * self.ep_size

    @property
    def announcements(self) -> int:
        return self.combine_flags + 8 * self.ep_size

    @property
    def combined(self) -> int:
        """Bytes from a peer's announcement to its combine flag."""
        return self.combine_flags - self.announcements

    @property
    def parameters(self) -> int:
        return align(self.announcements + 8 * self.ep_size)

    @property
    def end(self) -> int:
        return align(self.parameters + 32 * self.ep_size, 128)


@dataclass(frozen=True)
class WorkspaceLayout:
    """Byte offsets of the regions, from a capacity."""

    capacity: Capacity

    def __post_init__(self) -> None:
        c = self.capacity
        p, t, ts = c.ep_size, c.max_tokens_per_rank, c.sentinel_tokens_per_rank
        sizes = {
            "control": SyncOffsets(p).end,
            "slots": 4 * t * p,
            "present": 4 * ts * p,
            "dispatch": p * t * (align(c.hidden_bytes) + align(c.scale_bytes) + 8 * c.top_k) + 3 * 128,
            "combine": p * t * align(c.combine_bytes),
            "meta": 2 * p * ts * META_STRIDE,
            "landing": p * ts * self.landing_stride,
            "escape": p * ts * self.landing_stride // 4,
            "partials": p * ts * self.partial_stride,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end = align(end + size, 128)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "total_bytes", end)

    sizes: dict[str, int] = None  # type: ignore[assignment]
    offsets: dict[str, int] = None  # type: ignore[assignment]
    total_bytes: int = 0

    @property
    def landing_stride(self) -> int:
        """Bytes between landing slots; also four times the bytes between escape slots."""
        return align(align(self.capacity.hidden_bytes) + align(self.capacity.scale_bytes), 64)

    @property
    def partial_stride(self) -> int:
        """Bytes between Sentinel's combine slots."""
        return align(self.capacity.combine_bytes)

    @property
    def sentinel_region(self) -> tuple[int, int]:
        """(offset, bytes) of what holds the sentinel at rest."""
        start = self.offsets["meta"]
        return start, self.total_bytes - start

    def dispatch_rows(self, slots: int, hidden_bytes: int, scale_bytes: int) -> tuple[int, int, int]:
        """Offsets of the hidden rows, scale rows and routing rows of a step with ``slots`` = ep_size·T̂ slots.

        A routing row is top_k ids and then top_k weights, so that one packet carries both.
        """
        hidden = self.offsets["dispatch"]
        scale = align(hidden + slots * align(hidden_bytes), 128)
        return hidden, scale, align(scale + slots * align(scale_bytes), 128)
