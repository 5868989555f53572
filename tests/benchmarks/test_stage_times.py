"""Kernel records told apart by stage: places in a step, shares that add up, spans that overlap."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from moe_layer.benchmarks import stage_times
from moe_layer.benchmarks.harness import KernelRecord, Options, Work
from moe_layer.benchmarks.ranks import LocalRank, Ranks
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


# ---- the whole measurement, with a pretended GPU ----


class PretendedGpu:
    """Kernels run when they are issued, one after the other, 2 µs each; a graph replays what was issued in it."""

    def __init__(self) -> None:
        self.clock, self.recorded, self.captured = 0.0, [], None  # type: ignore[var-annotated]
        self.watching = False

    def launch(self, name: str) -> None:
        if self.captured is not None:
            self.captured.append(name)
            return
        if self.watching:
            self.recorded.append(KernelRecord(name, self.clock, self.clock + 2))
        self.clock += 3


def test_a_whole_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages and a kernel in none; inputs are refreshed and outputs checked outside what is recorded."""
    gpu = PretendedGpu()
    rank = LocalRank(0, torch.device("cuda", 0))
    profiler: list[Any] = [None]
    calls: list[str] = []

    def stage(name: str, *kernels: str) -> None:
        with nullcontext() if profiler[0] is None else profiler[0](name):
            for kernel in kernels:
                gpu.launch(kernel)

    def step() -> None:
        stage("dispatch", "send", "receive")
        stage("fc1", "gemm")
        gpu.launch("cast")

    class Graph:
        def __init__(self, rank: LocalRank, step: Any, options: Options) -> None:
            gpu.captured = self.kernels = []
            for _ in range(options.warmup + options.steps):
                step()
            gpu.captured = None

    def records(ranks: Ranks, run: Any) -> dict[int, list[KernelRecord]]:
        gpu.watching, gpu.recorded = True, []
        run()
        gpu.watching = False
        return {0: gpu.recorded[::-1]}

    def replay(ranks: Ranks, graphs: list[Any]) -> None:
        for graph in graphs:
            for name in graph.kernels:
                gpu.launch(name)

    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(MARK))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(LocalRank, "active", lambda self: nullcontext())
    for name, stand_in in (
        ("watch_kernels", lambda ranks: calls.append("watch")),
        ("run_steps", lambda ranks, works, count: works[0].step()),
        ("Graph", Graph), ("kernel_records", records), ("replay", replay),
    ):  # fmt: skip
        monkeypatch.setattr(stage_times, name, stand_in)
    work = Work({"layer": step}, lambda repeat: calls.append(f"refresh {repeat}"), lambda: calls.append("check"))

    def attach(given: Any) -> None:
        profiler[0] = given

    found = stage_times.measure_stages(Ranks(1, (rank,)), [work], [attach], Options(warmup=2, steps=5))
    assert calls == ["watch", "refresh 1", "check"] and profiler[0] is None
    assert found["stages_us"] == pytest.approx({"dispatch": 6.0, "fc1": 3.0, "other": 3.0})
    assert found["spans_us"] == pytest.approx({"dispatch": 5.0, "fc1": 2.0, "other": 2.0})


def test_a_gpu_for_each_rank() -> None:
    with pytest.raises(ConfigError, match="need a GPU for each rank"):
        stage_times.measure_stages(Ranks.in_one_process([torch.device("cpu")]), [], [], Options())
