"""The timing harness: what a step of several ranks costs when steps follow one another without a host in between.

On GPUs each rank captures one CUDA graph of ``warmup`` + ``steps`` steps with two events inside it, around the timed
steps. A repeat draws fresh inputs, poisons the outputs, replays all ranks' graphs and checks the outputs. A repeat's
time per step is the largest of the ranks' spans divided by ``steps``; the result is the median over repeats. The first
replay, which uploads the graph, is not counted.

With ``l2_flush`` a memset of twice the L2 cache precedes each step, so every step finds its inputs in memory; a graph
of memsets alone is timed alongside and its span subtracted, rank by rank and repeat by repeat.

Phases of a step come from CUPTI kernel records (torch.profiler) of the same graphs, without barrier or event between
phases (paper, Appendix B): a phase lasts from the end of the kernel before its first to the end of its last, so phases
add up to the step however programmatic dependent launch lets kernels overlap. Recording disturbs the steps somewhat;
take the step's time from :func:`measure`, and the phases in processes of their own.

What cannot be captured, and everything on the CPU, is timed by the host's clock; on the CPU the numbers say nothing
about GPUs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.errors import ConfigError

EAGER_STEPS = 3  # before a capture: lazy initialisation must be over
DEFAULT_L2_BYTES = 128 << 20  # where the driver does not tell; no GPU so far has more

Call = Callable[[], object]


@dataclass(frozen=True)
class Options:
    """How to time.

    Attributes:
        warmup, steps: steps before and inside the timed span.
        repeats: timed replays.
        l2_flush: flush the L2 cache before each step (GPUs).
    """

    warmup: int = 10
    steps: int = 100
    repeats: int = 10
    l2_flush: bool = False

    def but(self, warmup: int | None, steps: int | None, repeats: int | None, *, l2_flush: bool) -> Options:
        """These with the values given; None leaves one as it is."""
        given = {"warmup": warmup, "steps": steps, "repeats": repeats}
        return replace(self, l2_flush=l2_flush, **{k: v for k, v in given.items() if v is not None})


@dataclass
class Work:
    """One rank's work.

    Attributes:
        phases: a step's parts in order, by name; each enqueues on the current stream, and always the same work.
        refresh: new random inputs in place, outputs poisoned; gets the number of the repeat. Called between barriers.
        check: raises unless the outputs are right. Called after each repeat, outside the timed span.
        capturable: whether a step can be captured in a CUDA graph.
    """

    phases: Mapping[str, Call]
    refresh: Callable[[int], None] = lambda repeat: None
    check: Call = lambda: None
    capturable: bool = True

    def step(self) -> None:
        for phase in self.phases.values():
            phase()


@dataclass(frozen=True)
class Timing:
    """Microseconds per step.

    Attributes:
        step_us, min_us, max_us: median, least and largest over repeats of the slowest rank.
        spread: (largest − least) / median.
        repeats_us: each repeat.
        method: ``"graph"``, ``"stream"`` (GPU work issued step by step, by the host's clock) or ``"host"`` (CPU).
        flush_us: what was taken out for a flush; None without.
        phases_us: by name, mean over steps and ranks; None where the method does not tell.
    """

    step_us: float
    min_us: float
    max_us: float
    spread: float
    repeats_us: list[float]
    method: str
    flush_us: float | None = None
    phases_us: dict[str, float] | None = field(default=None)

    def as_results(self) -> dict[str, Any]:
        """What a result line has of it: ``us`` for the step, ``phases_us`` only where it is known."""
        values = asdict(self)
        if values["phases_us"] is None:
            del values["phases_us"]
        return {"us": values.pop("step_us"), **values}


def measure(ranks: Ranks, works: Sequence[Work], options: Options) -> Timing:
    """Time the step of ``works``, one for each of ``ranks.local``. Collective; every process gets the same result.

    Raises:
        ConfigError: a flush where the step cannot be captured.
        Exception: whatever a check raises.
    """
    captured = ranks.is_cuda and all(work.capturable for work in works)
    if options.l2_flush and not captured:
        raise ConfigError("an L2 flush needs a GPU and a step that can be captured in a CUDA graph")
    run_steps(ranks, works, EAGER_STEPS)
    return _measure_graphs(ranks, works, options) if captured else _measure_by_clock(ranks, works, options)


def run_steps(ranks: Ranks, works: Sequence[Work], count: int) -> None:
    """Untimed steps, phase by phase over the ranks, with fresh inputs and checks."""
    for _ in range(count):
        ranks.synchronize()
        each(ranks, works, lambda work: work.refresh(0))
        ranks.synchronize()
        for name in works[0].phases:
            each(ranks, works, lambda work, name=name: work.phases[name]())  # type: ignore[misc]
        ranks.synchronize()
        each(ranks, works, lambda work: work.check())


def summarize(
    repeats_us: Sequence[float],
    method: str,
    flush_us: float | None = None,
    phases_us: dict[str, float] | None = None,
) -> Timing:
    """The timing of repeats whose slowest ranks took ``repeats_us``."""
    median = statistics.median(repeats_us)
    least, largest = min(repeats_us), max(repeats_us)
    spread = (largest - least) / median if median > 0 else float("inf")
    return Timing(median, least, largest, spread, list(repeats_us), method, flush_us, phases_us)


def slowest(per_process: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Each repeat's largest value over all ranks, from ``[process][repeat][local rank]``."""
    return [max(v for process in per_process for v in process[i]) for i in range(len(per_process[0]))]


def each(ranks: Ranks, works: Sequence[Work], call: Callable[[Work], object]) -> None:
    for rank, work in zip(ranks.local, works):
        with rank.active():
            call(work)


class Graph:
    """One rank's steps in a CUDA graph, with events around the timed ones."""

    def __init__(self, rank: LocalRank, step: Call, options: Options) -> None:
        self.rank = rank
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(rank.device):
            self.start = torch.cuda.Event(enable_timing=True, external=True)
            self.end = torch.cuda.Event(enable_timing=True, external=True)
            # Thread-local: NCCL's watchdog thread queries events meanwhile.
            with torch.cuda.graph(self.graph, stream=rank.stream, capture_error_mode="thread_local"):
                for _ in range(options.warmup):
                    step()
                self.start.record()
                for _ in range(options.steps):
                    step()
                self.end.record()

    def replay(self) -> None:
        with self.rank.active():
            self.graph.replay()

    def span_us(self) -> float:
        return self.start.elapsed_time(self.end) * 1e3


def replay(ranks: Ranks, graphs: Sequence[Graph]) -> list[float]:
    """Replay together; each local rank's span in µs."""
    ranks.synchronize()
    for graph in graphs:
        graph.replay()
    ranks.synchronize()
    return [graph.span_us() for graph in graphs]


def _measure_graphs(ranks: Ranks, works: Sequence[Work], options: Options) -> Timing:
    flushes = [_flusher(rank) for rank in ranks.local] if options.l2_flush else []

    def flushed(flush: Call, work: Work) -> Call:
        def step() -> None:
            flush()
            work.step()

        return step

    steps = [flushed(f, w) for f, w in zip(flushes, works)] if flushes else [work.step for work in works]
    graphs = [Graph(rank, step, options) for rank, step in zip(ranks.local, steps)]
    flush_graphs = [Graph(rank, flush, options) for rank, flush in zip(ranks.local, flushes)]
    spans, flush_spans = [], []
    for repeat in range(options.repeats + 1):
        ranks.synchronize()
        each(ranks, works, lambda work: work.refresh(repeat))  # noqa: B023 - called at once
        span = replay(ranks, graphs)
        flush_span = replay(ranks, flush_graphs) if flush_graphs else [0.0] * len(graphs)
        each(ranks, works, lambda work: work.check())
        if repeat:
            spans.append([(a - b) / options.steps for a, b in zip(span, flush_span)])
            flush_spans.append([b / options.steps for b in flush_span])
    gathered = ranks.gather((spans, flush_spans))
    flush_us = statistics.median(slowest([f for _, f in gathered])) if flush_graphs else None
    return summarize(slowest([s for s, _ in gathered]), "graph", flush_us)


def _flusher(rank: LocalRank) -> Call:
    size = getattr(torch.cuda.get_device_properties(rank.device), "L2_cache_size", 0) or DEFAULT_L2_BYTES
    buffer = torch.empty(2 * size, dtype=torch.uint8, device=rank.device)

    def flush() -> None:
        buffer.zero_()

    return flush


def _measure_by_clock(ranks: Ranks, works: Sequence[Work], options: Options) -> Timing:
    """Steps issued by the host. One rank a process, so that ranks run concurrently."""
    if len(works) > 1:
        raise ConfigError("steps that cannot be captured are timed with one rank a process; use launch 'process'")
    work, rank = works[0], ranks.local[0]
    spans, phases = [], dict.fromkeys(work.phases, 0.0)
    for repeat in range(options.repeats + 1):
        ranks.synchronize()
        with rank.active():
            work.refresh(repeat)
            ranks.synchronize()
            for _ in range(options.warmup):
                work.step()
            ranks.synchronize()
            begin = last = time.perf_counter()
            for _ in range(options.steps):
                for name, phase in work.phases.items():
                    phase()
                    now = time.perf_counter()
                    if repeat:
                        phases[name] += now - last
                    last = now
            if rank.stream is not None:
                rank.stream.synchronize()
            span = time.perf_counter() - begin
            ranks.synchronize()
            work.check()
        if repeat:
            spans.append([span * 1e6 / options.steps])
    gathered = ranks.gather((spans, phases))
    phases_us = None
    if not ranks.is_cuda:  # on a GPU the host only issues the phases
        calls = len(gathered) * options.steps * options.repeats
        phases_us = {name: sum(p[name] for _, p in gathered) * 1e6 / calls for name in phases}
    return summarize(slowest([s for s, _ in gathered]), "host" if not ranks.is_cuda else "stream", None, phases_us)


@dataclass(frozen=True)
class KernelRecord:
    """One kernel's execution, in µs of the trace's clock."""

    name: str
    start_us: float
    end_us: float


def measure_phases(ranks: Ranks, works: Sequence[Work], options: Options) -> dict[str, float]:
    """Each phase's µs from CUPTI kernel records: mean over the timed steps and over ranks. Collective.

    A kernel belongs to the phase whose name its own contains. Wants a process in which nothing else is timed.

    Raises:
        ConfigError: ranks share a GPU, or CUPTI recorded no kernels of some phase.
    """
    if not ranks.is_cuda or ranks.share_devices:
        raise ConfigError("phases are told apart by kernel records, which need a GPU for each rank")
    watch_kernels(ranks)
    run_steps(ranks, works, EAGER_STEPS)
    graphs = [Graph(rank, work.step, options) for rank, work in zip(ranks.local, works)]
    ranks.synchronize()
    each(ranks, works, lambda work: work.refresh(1))
    replay(ranks, graphs)
    records = kernel_records(ranks, lambda: replay(ranks, graphs))
    each(ranks, works, lambda work: work.check())
    names = list(works[0].phases)
    own = [split_phases(kernels, names, options.steps) for kernels in records.values()]
    every = [phases for process in ranks.gather(own) for phases in process]
    return {name: statistics.fmean(phases[name] for phases in every) for name in names}


def watch_kernels(ranks: Ranks) -> None:
    """CUPTI must watch before a graph is captured to record its kernels, and stay. Collective."""
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with _profiler():
        ranks.synchronize()


def kernel_records(ranks: Ranks, run: Call) -> dict[int | None, list[KernelRecord]]:
    """The kernels that ``run`` executes, by index of the local ranks' devices. ``run`` ends with the devices idle."""
    with _profiler() as profiler:
        run()
        ranks.synchronize()
    records: dict[int | None, list[KernelRecord]] = {rank.device.index: [] for rank in ranks.local}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.device_index in records:
            records[event.device_index].append(KernelRecord(event.name, event.time_range.start, event.time_range.end))
    return records


def _profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def split_phases(records: Sequence[KernelRecord], phases: Sequence[str], steps: int) -> dict[str, float]:
    """Mean µs of each phase over the last ``steps`` steps of one rank's kernel records.

    Raises:
        ConfigError: the phases do not follow one another, or there are fewer than ``steps`` + 1 of them.
    """
    ends: list[tuple[str, float]] = []  # (phase, end of its last kernel)
    for record in sorted(records, key=lambda r: r.end_us):
        phase = next((p for p in phases if p in record.name), None)
        if phase is None:
            continue
        if ends and ends[-1][0] == phase:
            ends[-1] = (phase, record.end_us)
        else:
            ends.append((phase, record.end_us))
    wanted = len(phases) * steps + 1
    ends = ends[-wanted:]
    expected = [phases[-1], *list(phases) * steps]
    if [phase for phase, _ in ends] != expected:
        raise ConfigError(f"CUPTI recorded {len(ends)} phases that do not repeat as {' → '.join(phases)}")
    total = dict.fromkeys(phases, 0.0)
    for (_, before), (phase, end) in pairwise(ends):
        total[phase] += end - before
    return {phase: t / steps for phase, t in total.items()}
