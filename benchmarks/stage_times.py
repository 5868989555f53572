"""How long each stage of a layer takes inside back-to-back CUDA graph replays, from CUPTI kernel records.

Nothing lies between the stages of a timed step: no event, barrier or marker (paper, Appendix B). Which kernel belongs
to which stage is found beforehand, in one eager step whose stages are set apart by marker kernels; in the graph the
same kernels follow one another in the same order, so a kernel's place in the step tells its stage.

Two times of a stage. *Share*: from the end of the stage before it to its own end, so that shares add up to the step
however programmatic dependent launch lets kernels overlap. *Span*: from the start of its first kernel to the end of its
last, as the paper's tables have it; spans overlap, so they add up to more than the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from moe_layer.benchmarks.harness import (
    EAGER_STEPS,
    Graph,
    KernelRecord,
    Options,
    Work,
    each,
    kernel_records,
    replay,
    run_steps,
    watch_kernels,
)  # fmt: skip
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.errors import ConfigError
from moe_layer.stages import Profiler

MARKER = "spin_kernel"  # part of the name of the kernel of torch.cuda._sleep
OTHER = "other"  # kernels of a step that are in no stage

Attach = Callable[["Profiler | None"], None]


class Markers:
    """A layer's profiler that launches a marker kernel before and after each stage.

    Attributes:
        stages: names in the order of their calls.
    """

    def __init__(self) -> None:
        self.stages: list[str] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.stages.append(stage)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]


def stages_of_kernels(names: Sequence[str], stages: Sequence[str]) -> list[tuple[str, str]]:
    """(stage, kernel) of each kernel of a marked step, in order, without the markers.

    Args:
        names: kernels of the step in order of their start, markers among them.
        stages: stages in order of their calls.

    Raises:
        ConfigError: not two markers a stage.
    """
    found, markers = [], 0
    for name in names:
        if MARKER in name:
            markers += 1
        else:
            inside = markers % 2 == 1 and markers // 2 < len(stages)
            found.append((stages[markers // 2] if inside else OTHER, name))
    if markers != 2 * len(stages):
        raise ConfigError(f"CUPTI recorded {markers} markers around {len(stages)} stages")
    return found


def split_stages(
    records: Sequence[KernelRecord], step: Sequence[tuple[str, str]], steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean (share, span) in µs of each stage over the last ``steps`` steps of one rank's records.

    Args:
        records: of whole steps, in any order.
        step: (stage, kernel) of each kernel of a step, in order.
        steps: how many to take; one more must precede them.

    Raises:
        ConfigError: other kernels than those of ``step``, or too few.
    """
    ordered = in_order(records)
    size = len(step)
    if not size or len(ordered) < size * (steps + 1) or len(ordered) % size:
        raise ConfigError(f"CUPTI recorded {len(ordered)} kernels, which are not steps of {size}")
    names = [name for _, name in step]
    ordered = ordered[-size * (steps + 1) :]
    for i, record in enumerate(ordered):
        if record.name != names[i % size]:
            raise ConfigError(
                f"kernel {i % size} of a step is {record.name!r} in the graph, {names[i % size]!r} eagerly"
            )
    shares = dict.fromkeys((stage for stage, _ in step), 0.0)
    spans = dict(shares)
    last = max(r.end_us for r in ordered[:size])
    for begin in range(size, len(ordered), size):
        first_last: dict[str, list[float]] = {}
        for (stage, _), record in zip(step, ordered[begin : begin + size]):
            # A kernel may end before the one before it; only what it adds to the step is its stage's.
            shares[stage] += max(0.0, record.end_us - last)
            last = max(last, record.end_us)
            edge = first_last.setdefault(stage, [record.start_us, record.end_us])
            edge[1] = max(edge[1], record.end_us)
        for stage, (start, end) in first_last.items():
            spans[stage] += end - start
    return {s: t / steps for s, t in shares.items()}, {s: t / steps for s, t in spans.items()}


def measure_stages(
    ranks: Ranks, works: Sequence[Work], attach: Sequence[Attach], options: Options
) -> dict[str, dict[str, float]]:
    """``{"stages_us": shares, "spans_us": spans}``, means over steps and ranks. Collective.

    Wants a process in which nothing else is timed.

    Args:
        works: whose steps run the stages, one for each of ``ranks.local``.
        attach: for each, sets the profiler of its stages, or none.

    Raises:
        ConfigError: ranks share a GPU, or the records do not tell.
    """
    if not ranks.is_cuda or ranks.share_devices:
        raise ConfigError("stages are told apart by kernel records, which need a GPU for each rank")
    watch_kernels(ranks)
    run_steps(ranks, works, EAGER_STEPS)
    markers = [Markers() for _ in works]
    for set_profiler, mine in zip(attach, markers):
        set_profiler(mine)
    try:
        eager = kernel_records(ranks, lambda: each(ranks, works, lambda work: work.step()))
    finally:
        for set_profiler in attach:
            set_profiler(None)
    steps_of = [
        stages_of_kernels([r.name for r in in_order(eager[rank.device.index])], mine.stages)
        for rank, mine in zip(ranks.local, markers)
    ]
    graphs = [Graph(rank, work.step, options) for rank, work in zip(ranks.local, works)]
    ranks.synchronize()
    each(ranks, works, lambda work: work.refresh(1))
    replay(ranks, graphs)
    timed = kernel_records(ranks, lambda: replay(ranks, graphs))
    each(ranks, works, lambda work: work.check())
    own = [split_stages(timed[rank.device.index], step, options.steps) for rank, step in zip(ranks.local, steps_of)]
    every = [found for process in ranks.gather(own) for found in process]
    names = dict.fromkeys(stage for stage, _ in steps_of[0])
    return {
        "stages_us": {s: statistics.fmean(shares[s] for shares, _ in every) for s in names},
        "spans_us": {s: statistics.fmean(spans[s] for _, spans in every) for s in names},
    }


def in_order(records: Sequence[KernelRecord]) -> list[KernelRecord]:
    return sorted(records, key=lambda r: r.start_us)
