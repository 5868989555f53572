"""What a kernel reports when it gives up a wait, and the exception it becomes.

A rank's error record lies in pinned host memory, which the kernel writes and Python reads without synchronizing:
words ``[code, phase, peer, step, seen]``. The code is written last (release), so a non-zero code means a full record.
"""

from __future__ import annotations

from enum import IntEnum

from moe_layer.errors import CommunicationError, CommunicationTimeoutError, RankMismatchError

RECORD_WORDS = 8


class ErrorCode(IntEnum):
    """Why a wait ended."""

    OK = 0
    TIMEOUT = 1
    MISMATCH = 2


class Phase(IntEnum):
    """Which wait it was."""

    FENCE_DISPATCH = 1
    FENCE_COMBINE = 2
    SENTINEL_DISPATCH = 3
    SENTINEL_COMBINE = 4
    FENCE_ENTRY = 5  # a Fence dispatch waits for the peers' combine of the step before


PHASE_NAMES = {
    Phase.FENCE_DISPATCH: "dispatch (fence)",
    Phase.FENCE_COMBINE: "combine (fence)",
    Phase.SENTINEL_DISPATCH: "dispatch (sentinel)",
    Phase.SENTINEL_COMBINE: "combine (sentinel)",
    Phase.FENCE_ENTRY: "dispatch (fence, waiting for the step before)",
}

COMBINE_PHASES = (Phase.FENCE_COMBINE, Phase.SENTINEL_COMBINE)
GAVE_UP = -1  # T̂, or the combine code, of a rank that failed on the host


def explain(record: list[int], rank: int, timeout_s: float, parameters: list[list[int]]) -> CommunicationError:
    """The exception for an error record.

    Args:
        record: the words a kernel wrote.
        rank: this rank.
        timeout_s: the time-out in force.
        parameters: for each rank, what it last announced: T̂, hidden bytes, scale bytes, top_k, experts, placement,
            hash.
    """
    code, phase, peer, step, seen = (word & 0xFFFFFFFF for word in record[:5])
    where = f"rank {rank}, step {step}, {PHASE_NAMES[Phase(phase)]}"
    if code == ErrorCode.TIMEOUT:
        return CommunicationTimeoutError(
            f"{where}: rank {peer} did not arrive within {timeout_s:g} s (last heard of in step {seen}); "
            "it is dead, stuck or issued other calls"
        )
    if parameters[peer][0] == GAVE_UP or (phase in COMBINE_PHASES and seen == GAVE_UP & 0xFFFFFFFF):
        return CommunicationError(f"{where}: rank {peer} failed before it could take part; its own error says why")
    if phase in COMBINE_PHASES:
        return RankMismatchError(
            f"{where}: rank {peer} combines rows of {seen & 0xFFFFFF} bytes of {seen >> 24}-byte elements, "
            f"unlike rank {rank}"
        )
    names = ("runtime_max_tokens_per_rank", "hidden bytes", "scale bytes", "top_k", "num_experts", "placement")
    differing = [
        f"{name} is {parameters[rank][j]} on rank {rank} and {parameters[peer][j]} on rank {peer}"
        for j, name in enumerate(names)
        if parameters[rank][j] != parameters[peer][j]
    ]
    reason = "; ".join(differing) or "protocol, hidden_size, router weights or fused quantization differ"
    return RankMismatchError(f"{where}: ranks {rank} and {peer} disagree: {reason}")
