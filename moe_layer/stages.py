"""Names of the layer's stages, what may wrap them, and a timer for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

STAGES = ("route", "quantize", "dispatch", "index", "fc1", "fc2", "finalize", "combine", "shared")


class Profiler(Protocol):
    """Anything that wraps a stage: :class:`StageTimer`, ``torch.profiler.record_function``."""

    def __call__(self, stage: str) -> AbstractContextManager[Any]: ...


class StageTimer:
    """Seconds spent in each stage, over all calls since :meth:`reset`.

    ``layer.profiler = StageTimer(device)`` turns timing on. On CUDA, events on the current stream are recorded and read
    by :meth:`seconds`, which synchronizes; elsewhere ``time.perf_counter`` is.

    Args:
        device: where the layer runs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._spent: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._events.append((stage, begin, end))
        else:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._add(stage, time.perf_counter() - start)

    def seconds(self) -> dict[str, float]:
        """Stage → seconds, in the order of :data:`STAGES`; stages that never ran are absent."""
        if self._events:
            torch.cuda.synchronize(self.device)
            for stage, begin, end in self._events:
                self._add(stage, begin.elapsed_time(end) / 1e3)
            self._events.clear()
        return {stage: self._spent[stage] for stage in STAGES if stage in self._spent}

    def reset(self) -> None:
        self._spent.clear()
        self._events.clear()

    def _add(self, stage: str, seconds: float) -> None:
        self._spent[stage] = self._spent.get(stage, 0.0) + seconds
