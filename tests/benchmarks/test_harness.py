"""What the timing harness counts, subtracts and splits, on the CPU and with graphs that only pretend."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moe_layer.benchmarks import harness
from moe_layer.benchmarks.harness import EAGER_STEPS, KernelRecord, Options, Work, measure, split_phases, summarize
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.errors import ConfigError

CPU = Ranks.in_one_process([torch.device("cpu")])


class Log:
    """Counts what the harness calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def work(self, **phases: float) -> Work:
        def phase(name: str, seconds: float) -> harness.Call:
            def call() -> None:
                self.calls.append(name)
                time.sleep(seconds)

            return call

        return Work(
            {name: phase(name, seconds) for name, seconds in phases.items()},
            refresh=lambda repeat: self.calls.append(f"refresh {repeat}"),
            check=lambda: self.calls.append("check"),
        )


def test_order_of_calls() -> None:
    log = Log()
    measure(CPU, [log.work(a=0, b=0)], Options(warmup=2, steps=3, repeats=2))
    eager = ["refresh 0", "a", "b", "check"] * EAGER_STEPS
    timed = [[f"refresh {repeat}", *["a", "b"] * 5, "check"] for repeat in range(3)]
    assert log.calls == eager + [call for repeat in timed for call in repeat]


def test_time_of_steps_and_phases() -> None:
    timing = measure(CPU, [Log().work(short=0.002, long=0.006)], Options(warmup=1, steps=4, repeats=3))
    assert timing.method == "host" and timing.phases_us is not None
    assert 8_000 <= timing.min_us <= timing.step_us <= timing.max_us
    assert len(timing.repeats_us) == 3 and timing.step_us == sorted(timing.repeats_us)[1]
    assert 2_000 <= timing.phases_us["short"] < timing.phases_us["long"]
    mean = sum(timing.repeats_us) / 3
    assert sum(timing.phases_us.values()) == pytest.approx(mean, rel=0.02)


def test_a_failed_check_is_not_a_time() -> None:
    def check() -> None:
        raise RuntimeError("row 3 differs")

    with pytest.raises(RuntimeError, match="row 3 differs"):
        measure(CPU, [Work({"a": lambda: None}, check=check)], Options(1, 1, 1))


def test_flush_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="an L2 flush needs a GPU"):
        measure(CPU, [Log().work(a=0)], Options(1, 1, 1, l2_flush=True))


def test_several_ranks_of_a_process_cannot_be_timed_by_the_clock() -> None:
    ranks = Ranks(2, CPU.local + (LocalRank(1, torch.device("cpu")),))
    with pytest.raises(ConfigError, match="one rank a process"):
        measure(ranks, [Log().work(a=0)] * 2, Options(1, 1, 1))


def test_summary() -> None:
    timing = summarize([3.0, 1.0, 2.0, 10.0], "graph")
    assert (timing.step_us, timing.min_us, timing.max_us, timing.spread) == (2.5, 1.0, 10.0, 3.6)


def test_slowest_rank_of_each_repeat() -> None:
    first, second = [[1.0, 5.0], [2.0, 2.0]], [[3.0], [4.0]]  # [repeat][local rank] of two processes
    assert harness.slowest([first, second]) == [5.0, 4.0]


class FakeGraph:
    """A replay takes as long as its rank's script says; flush graphs are those whose step is a flush."""

    replays = 0

    def __init__(self, rank: LocalRank, step: Any, options: Options) -> None:
        self.rank, self.options = rank, options
        self.flush_only = getattr(step, "is_flush", False)
        self.count = 0

    def replay(self) -> None:
        self.count += 1

    def span_us(self) -> float:
        """First replay slow; then 100 steps of 4 µs on rank 0 and 6 µs on rank 1, behind flushes of 20 and 50 µs."""
        flush = (20.0, 50.0)[self.rank.rank] if self.options.l2_flush else 0.0
        if self.flush_only:
            return 100 * flush
        first = 1e6 if self.count == 1 else 0.0
        return first + 100 * (flush + (4.0, 6.0)[self.rank.rank] + self.count)


@pytest.mark.parametrize("l2_flush", [False, True])
def test_spans_of_graphs(monkeypatch: pytest.MonkeyPatch, l2_flush: bool) -> None:
    def flusher(rank: LocalRank) -> Any:
        def flush() -> None: ...

        flush.is_flush = True  # type: ignore[attr-defined]
        return flush

    monkeypatch.setattr(harness, "Graph", FakeGraph)
    monkeypatch.setattr(harness, "_flusher", flusher)
    monkeypatch.setattr(Ranks, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(Ranks, "synchronize", lambda self: None)
    ranks = Ranks(2, CPU.local + (LocalRank(1, torch.device("cpu")),))
    timing = measure(ranks, [Log().work(a=0), Log().work(a=0)], Options(10, 100, 3, l2_flush))
    assert timing.repeats_us == [8.0, 9.0, 10.0]  # rank 1's 6 µs + replays 2, 3, 4; the first is not counted
    assert timing.method == "graph" and timing.flush_us == (50.0 if l2_flush else None)


def kernels(steps: int, dispatch: float, combine: float, begin: float = 1000.0) -> list[KernelRecord]:
    """Steps of two dispatch kernels and one combine kernel, each started long before the one before it ends."""
    records, end = [], begin
    for _ in range(steps):
        for name, duration in (("x_dispatch_a", dispatch / 2), ("x_dispatch_b", dispatch / 2), ("y_combine", combine)):
            records.append(KernelRecord(name, end - 5, end + duration))
            end += duration
    return records


def test_phases_from_kernel_records() -> None:
    warmup = kernels(3, 50.0, 70.0)
    records = [*warmup, *kernels(4, 2.0, 3.0, begin=warmup[-1].end_us), KernelRecord("memset", 0.0, 1005.0)]
    phases = split_phases(sorted(records, key=lambda r: r.name), ["dispatch", "combine"], 4)
    assert phases == pytest.approx({"dispatch": 2.0, "combine": 3.0})


@pytest.mark.parametrize(
    "records",
    [[], kernels(4, 1, 1), [r for r in kernels(6, 1, 1) if "dispatch" in r.name], kernels(6, 1, 1)[:-1]],
    ids=["none", "too few", "one phase", "cut off"],
)
def test_records_that_are_no_steps(records: list[KernelRecord]) -> None:
    with pytest.raises(ConfigError, match="do not repeat as dispatch → combine"):
        split_phases(records, ["dispatch", "combine"], 4)
