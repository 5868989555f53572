"""Kernel records told apart by stage: places in a step, shares that add up, spans that overlap."""

from __future__ import annotations

import pytest

from moe_layer.benchmarks.harness import KernelRecord
from moe_layer.benchmarks.stage_times import MARKER, split_stages, stages_of_kernels
from moe_layer.errors import ConfigError

MARK = f"void at::cuda::{MARKER}(long)"


def test_markers_tell_the_stages() -> None:
    names = [MARK, "q", MARK, MARK, "d", "d2", MARK, MARK, MARK, "cast"]
    assert stages_of_kernels(names, ["quantize", "dispatch", "index"]) == [
        ("quantize", "q"), ("dispatch", "d"), ("dispatch", "d2"), ("other", "cast"),
    ]  # fmt: skip


def test_between_stages_is_no_stage() -> None:
    assert stages_of_kernels([MARK, MARK, "copy", MARK, "gemm", MARK], ["index", "fc1"]) == [
        ("other", "copy"), ("fc1", "gemm"),
    ]  # fmt: skip


@pytest.mark.parametrize("names", [[MARK, "q"], [MARK, "q", MARK, MARK]])
def test_lost_markers_are_noticed(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"\d markers around 1 stages"):
        stages_of_kernels(names, ["quantize"])


STEP = [("dispatch", "d"), ("fc1", "g"), ("fc2", "g"), ("combine", "c")]


def records(steps: int) -> list[KernelRecord]:
    """Steps of 20 µs; fc2 starts 2 µs before fc1 ends, and the combine ends before fc2 does."""
    found = []
    for i in range(steps):
        t = 20.0 * i
        found += [
            KernelRecord("d", t + 1, t + 4), KernelRecord("g", t + 4, t + 11),
            KernelRecord("g", t + 9, t + 19), KernelRecord("c", t + 12, t + 18),
        ]  # fmt: skip
    return found


def test_shares_add_up_and_spans_overlap() -> None:
    shares, spans = split_stages(records(4), STEP, 3)
    assert shares == pytest.approx({"dispatch": 5.0, "fc1": 7.0, "fc2": 8.0, "combine": 0.0})
    assert sum(shares.values()) == pytest.approx(20.0)
    assert spans == pytest.approx({"dispatch": 3.0, "fc1": 7.0, "fc2": 10.0, "combine": 6.0})


def test_a_stage_of_several_kernels() -> None:
    step = [("dispatch", "d"), ("gemm", "g"), ("gemm", "g"), ("combine", "c")]
    shares, spans = split_stages(records(3), step, 2)
    assert shares["gemm"] == pytest.approx(15.0) and spans["gemm"] == pytest.approx(15.0)


def test_order_of_records_does_not_matter() -> None:
    assert split_stages(records(4)[::-1], STEP, 3) == split_stages(records(4), STEP, 3)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (records(4)[1:], "are not steps of 4"),
        (records(3), "are not steps of 4"),
        (records(3)[:-1] + [KernelRecord("x", 52, 58)] + records(5)[12:16], "kernel 3 of a step is 'x' in the graph"),
    ],
)
def test_other_kernels_are_noticed(broken: list[KernelRecord], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split_stages(broken, STEP, 3)
