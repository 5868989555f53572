"""Which rows each expert computes: the paper's indexing kernel (§3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertIndex:
    """Slots grouped by local expert, and the way back.

    A *row* is one (slot, selection) pair of a local expert. Rows are numbered expert by expert, and within an expert in
    (slot, selection) order, so they are stable from run to run.

    Attributes:
        offsets: ``[num_local_experts + 1]`` int32; expert e owns rows ``offsets[e] … offsets[e+1] − 1``.
        slots: ``[slots × top_k]`` int32; the dispatch slot of each row. Entries past ``offsets[-1]`` are undefined.
        rows: ``[slots, top_k]`` int32; the row of each selection, −1 where its expert is elsewhere or the slot empty.
        expected_rows: how many rows to expect, known to the host, from which kernels choose their tiles; None: as many
            as there can be.
    """

    offsets: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    expected_rows: int | None = None
