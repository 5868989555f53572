"""What an error record becomes: an exception that names ranks, phase, step and values."""

from __future__ import annotations

import pytest

from moe_layer.comm.status import GAVE_UP, RECORD_WORDS, ErrorCode, Phase, explain
from moe_layer.errors import CommunicationError, CommunicationTimeoutError, RankMismatchError

NAMES = ("runtime_max_tokens_per_rank", "hidden bytes", "scale bytes", "top_k", "num_experts", "placement")
WORDS = {
    Phase.FENCE_DISPATCH: "dispatch (fence)",
    Phase.FENCE_COMBINE: "combine (fence)",
    Phase.SENTINEL_DISPATCH: "dispatch (sentinel)",
    Phase.SENTINEL_COMBINE: "combine (sentinel)",
    Phase.FENCE_ENTRY: "dispatch (fence, waiting for the step before)",
}
DISPATCHES = (Phase.FENCE_DISPATCH, Phase.SENTINEL_DISPATCH)
COMBINES = (Phase.FENCE_COMBINE, Phase.SENTINEL_COMBINE)


def record(code: ErrorCode, phase: Phase, peer: int, step: int, seen: int) -> list[int]:
    """As Python reads it from the pinned words: signed."""
    words = [code, phase, peer, step, seen] + [0] * (RECORD_WORDS - 5)
    return [word - 2**32 if word >= 2**31 else int(word) for word in words]


def parameters(ranks: int = 4) -> list[list[int]]:
    return [[64, 5120, 160, 6, 384, -1234567, 99, 0] for _ in range(ranks)]


@pytest.mark.parametrize("phase", Phase)
def test_time_out(phase: Phase) -> None:
    error = explain(record(ErrorCode.TIMEOUT, phase, 3, 17, 16), 1, 2.5, parameters())
    assert type(error) is CommunicationTimeoutError
    assert str(error).startswith(f"rank 1, step 17, {WORDS[phase]}: rank 3 did not arrive within 2.5 s")
    assert "last heard of in step 16" in str(error)


def test_steps_beyond_31_bits() -> None:
    """Step counters wrap at 2³²; Python sees signed words."""
    error = explain(record(ErrorCode.TIMEOUT, Phase.FENCE_COMBINE, 0, 2**32 - 1, 2**31), 1, 300.0, parameters())
    assert "rank 1, step 4294967295, " in str(error)
    assert "within 300 s (last heard of in step 2147483648)" in str(error)


@pytest.mark.parametrize("phase", [*DISPATCHES, Phase.FENCE_ENTRY])
@pytest.mark.parametrize("index", range(len(NAMES)))
def test_one_parameter_differs(phase: Phase, index: int) -> None:
    told = parameters()
    told[2][index] += 1
    error = explain(record(ErrorCode.MISMATCH, phase, 2, 5, 12345), 0, 1.0, told)
    assert type(error) is RankMismatchError
    mine, theirs = told[0][index], told[2][index]
    assert str(error) == (
        f"rank 0, step 5, {WORDS[phase]}: ranks 0 and 2 disagree: "
        f"{NAMES[index]} is {mine} on rank 0 and {theirs} on rank 2"
    )


def test_all_that_differs_is_named() -> None:
    told = parameters()
    told[1][:] = [32, 1024, 0, 8, 64, 5, 7, 0]
    text = str(explain(record(ErrorCode.MISMATCH, Phase.FENCE_DISPATCH, 1, 5, 1), 3, 1.0, told))
    for index, name in enumerate(NAMES):
        assert f"{name} is {told[3][index]} on rank 3 and {told[1][index]} on rank 1" in text


def test_hashes_differ_and_nothing_else() -> None:
    """Protocol and weights are in the hash alone."""
    told = parameters()
    told[1][6] = 100
    error = explain(record(ErrorCode.MISMATCH, Phase.SENTINEL_DISPATCH, 1, 5, 100), 0, 1.0, told)
    assert str(error).endswith(
        "ranks 0 and 1 disagree: protocol, hidden_size, router weights or fused quantization differ"
    )


@pytest.mark.parametrize("phase", COMBINES)
@pytest.mark.parametrize(("row", "element"), [(10240, 2), (20480, 4), (131072, 4), (64, 1)])
def test_combine_disagrees(phase: Phase, row: int, element: int) -> None:
    error = explain(record(ErrorCode.MISMATCH, phase, 1, 8, (element << 24) | row), 2, 1.0, parameters())
    assert type(error) is RankMismatchError
    text = str(error)
    assert text.startswith(f"rank 2, step 8, {WORDS[phase]}: rank 1 combines rows of {row} bytes of {element}-byte")
    assert "rank 2" in text.split(": ", 1)[1]


@pytest.mark.parametrize("phase", [*DISPATCHES, *COMBINES])
def test_peer_gave_up(phase: Phase) -> None:
    told = parameters()
    seen = GAVE_UP & 0xFFFFFFFF
    if phase in DISPATCHES:
        told[3][:4] = [GAVE_UP] * 4
        seen = 0
    error = explain(record(ErrorCode.MISMATCH, phase, 3, 2, seen), 1, 1.0, told)
    assert isinstance(error, CommunicationError)
    assert not isinstance(error, (RankMismatchError, TimeoutError))
    assert str(error) == (
        f"rank 1, step 2, {WORDS[phase]}: rank 3 failed before it could take part; its own error says why"
    )
