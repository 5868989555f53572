"""What a one-sided kernel is compiled for: everything about a step that does not change from token to token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from moe_layer.comm.encoder import KernelEncoder
from moe_layer.comm.layout import align

VECTOR_BYTES = 16
WARP = 32
# At about 40 registers a thread, which the Fence kernels of two ranks take, so many threads are resident together.
THREADS_PER_SM = 1536
# With an encoder that makes 4-bit values, 32 a thread: at about 60 registers.
THREADS_PER_SM_OF_32_VALUES = 1024
# (ranks up to, payload warps at most). With the routing warp 31 fill a block's 1024 threads; a thread holds a vector
# and an address for each rank, so that more ranks need more registers a thread and leave room for fewer threads.
PAYLOAD_WARP_LIMITS = ((4, 31), (8, 15), (1 << 30, 7))


def _warps(vectors: int, ep_size: int) -> int:
    """Warps that hold ``vectors`` with as few chunks as fit, then as few idle lanes as possible."""
    limit = next(warps for ranks, warps in PAYLOAD_WARP_LIMITS if ep_size <= ranks)
    chunks = -(-vectors // (limit * WARP))
    return max(1, -(-vectors // (chunks * WARP)))


class _RowSpec(ABC):
    """How a row of ``vectors`` 16-byte vectors is spread over ``parts`` blocks of payload warps and a routing warp."""

    ep_size: int
    parts: int

    @property
    @abstractmethod
    def vectors(self) -> int:
        """16-byte vectors of a row."""

    @property
    def splits_scales(self) -> bool:
        """Whether a part has the scales of its own values, instead of the next stretch of the row."""
        return False

    @property
    def part_vectors(self) -> int:
        """Vectors of one part."""
        return -(-self.vectors // self.parts)

    @property
    def payload_warps(self) -> int:
        return _warps(self.part_vectors, self.ep_size)

    @property
    def chunks(self) -> int:
        """Vectors a payload thread holds."""
        return -(-self.part_vectors // (self.payload_warps * WARP))

    @property
    def threads(self) -> int:
        return (self.payload_warps + 1) * WARP

    @property
    def threads_per_sm(self) -> int:
        return THREADS_PER_SM

    @property
    def blocks_per_sm(self) -> int:
        """Blocks a multiprocessor that a grid is sized for; progress does not depend on their being resident."""
        return max(1, self.threads_per_sm // self.threads)


@dataclass(frozen=True)
class DispatchSpec(_RowSpec):
    """One layer's dispatch.

    Attributes:
        ep_size, top_k, num_experts: the paper's P, k, E.
        contiguous: the default placement, computed; otherwise read from a table.
        hidden_bytes, scale_bytes: payload row lengths, multiples of 16 (the caller pads others); 0 scale bytes for
            none.
        has_weights: whether router weights travel.
        id_bytes: 4 or 8, the width of the ids passed in.
        parts: blocks that share a token (Sentinel at few tokens), each with its own stretch of the row.
        encoder: makes the payload out of BF16 rows, whose vectors of the wire are all whole; None: it is loaded.
    """

    ep_size: int
    top_k: int
    num_experts: int
    contiguous: bool
    hidden_bytes: int
    scale_bytes: int
    has_weights: bool
    id_bytes: int
    parts: int = 1
    encoder: KernelEncoder | None = None

    @property
    def hidden_vectors(self) -> int:
        return self.hidden_bytes // VECTOR_BYTES

    @property
    def vectors(self) -> int:
        """16-byte vectors of a token's payload: hidden row, then scale row."""
        return (self.hidden_bytes + self.scale_bytes) // VECTOR_BYTES

    @property
    def threads_per_sm(self) -> int:
        wide = self.encoder is not None and self.encoder.vector_values == 32
        return THREADS_PER_SM_OF_32_VALUES if wide else THREADS_PER_SM

    @property
    def splits_scales(self) -> bool:
        return self.encoder is not None and self.parts > 1

    @property
    def part_scale_vectors(self) -> int:
        """Vectors of scales of one part, where it has those of its own values."""
        return -(-(self.scale_bytes // VECTOR_BYTES) // self.parts)

    @property
    def part_hidden_vectors(self) -> int:
        """Vectors of values of one part: those of its vectors of scales."""
        assert self.encoder is not None
        values_of_scales = self.encoder.vectors_per_scale * VECTOR_BYTES // self.encoder.scale_entry_bytes
        return self.part_scale_vectors * values_of_scales

    @property
    def part_vectors(self) -> int:
        if not self.splits_scales:
            return super().part_vectors
        return self.part_hidden_vectors + self.part_scale_vectors


@dataclass(frozen=True)
class CombineSpec(_RowSpec):
    """One layer's combine.

    Attributes:
        combine_bytes: distance of two rows of partial results, a multiple of 16.
        element_bytes: 2 (BF16) or 4 (FP32) partial results; 1 for BF16 rows that were turned into E4M3 in place.
        output_bytes: 2 or 4, the element width of the output.
        parts: blocks that share a token.
    """

    ep_size: int
    combine_bytes: int
    element_bytes: int
    output_bytes: int
    parts: int = 1

    @property
    def vectors(self) -> int:
        row = self.combine_bytes if self.element_bytes > 1 else align(self.combine_bytes // 2)
        return row // VECTOR_BYTES


@dataclass(frozen=True)
class GiveUpSpec:
    """A rank that cannot make its dispatch, or its combine, tells its peers."""

    ep_size: int
    in_combine: bool
