"""What all benchmarks have in common: cases, ceilings measured in the same run, a JSON line a case.

:class:`RanksBench` measures on processes of its own, one for each rank or for all of them; :class:`LocalBench` in this
process, on one device. :mod:`moe_layer.benchmarks.show` runs either and shows it.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moe_layer.benchmarks.harness import Options
from moe_layer.benchmarks.machine import provenance
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.session import Session, SessionError, open_session
from moe_layer.errors import MoELayerError

if TYPE_CHECKING:
    from typing_extensions import Self

CPU_OPTIONS = Options(warmup=2, steps=10, repeats=3)


class Bench(ABC):
    """One run. A context manager.

    Attributes:
        kind: of its lines.
        cases: what is measured.
        device_type: ``"cuda"`` or ``"cpu"``.
        is_main: whether this process prints and writes files.
        ceilings: what the machine allows, as plain numbers; None until measured, or where there is nothing to measure.
        ceilings_note: why there are none.
    """

    kind: ClassVar[str]
    failures: ClassVar[tuple[type[Exception], ...]]
    cases: list[Any]
    device_type: str
    is_main = True

    def __init__(self) -> None:
        self.ceilings: dict[str, Any] | None = None
        self.ceilings_note: str | None = None
        self._shared: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Measure :attr:`ceilings`; :attr:`ceilings_note` says why there are none.

        Raises:
            SessionError: the processes do not start.
        """
        self._shared = self.find_provenance()
        try:
            self.ceilings, self.ceilings_note = self.measure_ceilings()
        except self.failures as error:
            self.ceilings_note = str(error)

    @property
    def provenance(self) -> dict[str, Any]:
        """Date, commit, machine and versions, once started."""
        return self._shared

    def records(self) -> Iterator[dict[str, Any]]:
        """A line for each case, as it is measured."""
        for case in self.cases:
            yield self.record(case)

    def record(self, case: Any) -> dict[str, Any]:
        """Measure one case: its line for the results file.

        It has ``results``, or ``error`` and ``details`` if it failed, or ``absent`` for a peer that is not there.
        """
        line: dict[str, Any] = {"kind": self.kind, "parameters": self.parameters(case)}
        absent = self.absent(case)
        if absent is not None:
            return {**line, "absent": absent, **self._shared}
        try:
            line["results"] = self.results(case)
        except self.failures as error:
            details = getattr(error, "details", None) or traceback.format_exc()
            return {**line, "error": " ".join(str(error).split()), "details": details, **self._shared}
        if self.ceilings is not None:
            line["ceilings"] = self.ceilings
        if self.ceilings_note:
            line["ceilings_note"] = self.ceilings_note
        return {**line, **self._shared}

    def absent(self, case: Any) -> str | None:
        """Why a case's peer is not there, or None."""
        return None

    @abstractmethod
    def find_provenance(self) -> dict[str, Any]:
        """:attr:`provenance`."""

    @abstractmethod
    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        """(what :attr:`ceilings` becomes, why something is missing there)."""

    @abstractmethod
    def parameters(self, case: Any) -> dict[str, Any]:
        """What the case is, complete, as plain values."""

    @abstractmethod
    def results(self, case: Any) -> dict[str, Any]:
        """Measure the case. Raises one of :attr:`failures` if it fails."""


def _provenance(ranks: Ranks) -> dict[str, Any]:
    return provenance(ranks.local[0].device.type)


class RanksBench(Bench):
    """A run on processes of its own; leaving it ends them.

    Args:
        ranks, launch, device_type: as of :func:`~moe_layer.benchmarks.session.open_session`.
        options: of the harness; None: 10 + 100 steps and 10 repeats on GPUs, fewer on the CPU.

    Raises:
        UnsupportedDeviceError, ConfigError: as :func:`open_session`.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (SessionError,)

    def __init__(self, ranks: int | None, launch: str, device_type: str | None, options: Options | None = None) -> None:
        super().__init__()
        self.session: Session = open_session(ranks, launch=launch, device_type=device_type)
        self.size, self.device_type = self.session.size, self.session.device_type
        self.is_main = self.session.is_main
        self.options = options or (Options() if self.device_type == "cuda" else CPU_OPTIONS)
        self._stack.enter_context(self.session)
        self._phase_session: Session | None = None

    @property
    def phase_session(self) -> Session:
        """Processes in which nothing is timed but phases, which need a profiler; under torchrun those there are."""
        if self.session.launch == "torchrun":
            return self.session
        if self._phase_session is None:
            self._phase_session = open_session(self.size, launch=self.session.launch, device_type=self.device_type)
            self._stack.enter_context(self._phase_session)
        return self._phase_session

    def procedure(self) -> dict[str, Any]:
        """How all cases are measured: part of their parameters."""
        return {"launch": self.session.launch, **asdict(self.options)}

    def find_provenance(self) -> dict[str, Any]:
        # Asked there, so that this process needs no CUDA context.
        found: dict[str, Any] = self.session.run(_provenance)[0]
        return found


class LocalBench(Bench):
    """A run in this process, on one device.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``; None: CUDA where there is a GPU.
    """

    failures: ClassVar[tuple[type[Exception], ...]] = (MoELayerError, RuntimeError)

    def __init__(self, device_type: str | None) -> None:
        super().__init__()
        self.device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.ranks = Ranks.in_one_process([self.device])

    def active(self) -> AbstractContextManager[None]:
        """Work issued inside goes to the device."""
        return self.ranks.local[0].active()

    def find_provenance(self) -> dict[str, Any]:
        return provenance(self.device_type)
