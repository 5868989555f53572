"""Processes that run a benchmark's functions on the ranks of a group: started here, or by torchrun.

    with open_session(2) as session:
        results = session.run(function, *arguments)   # function(ranks, *arguments) in every process; a list of results

A function that raises, hangs or takes its process down ends all processes of the session: their GPUs may be in any
state. The next ``run`` starts new ones, so one broken case does not cost the cases after it. Under torchrun, which
starts the processes itself, the exception ends the program instead.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.errors import ConfigError, UnsupportedDeviceError

LAUNCHES = ("auto", "process", "single")
START_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 300.0
# What the other processes get to report once one has failed, which may leave them waiting for it.
AFTER_FAILURE_S = 3.0


class SessionError(Exception):
    """A function did not return on every process. ``str()`` is one line; ``details`` holds tracebacks."""

    def __init__(self, summary: str, details: str = "") -> None:
        super().__init__(summary)
        self.details = details


class Session(ABC):
    """Runs functions on the ranks.

    Attributes:
        size: ranks.
        launch: ``"process"``, ``"single"`` or ``"torchrun"``.
        device_type: ``"cuda"`` or ``"cpu"``.
        is_main: whether this process prints and writes files.
    """

    size: int
    launch: str
    device_type: str
    is_main: bool = True

    @abstractmethod
    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = RUN_TIMEOUT_S) -> list[Any]:
        """``function(ranks, *args)`` in every process, pickled by reference; each process's result.

        Raises:
            SessionError: the function raised in a process, a process ended, or the time was up.
        """

    def close(self) -> None:  # noqa: B027 - nothing to end where torchrun owns the processes
        """End the processes."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_session(size: int | None = None, *, launch: str = "auto", device_type: str | None = None) -> Session:
    """A session of ``size`` ranks.

    Args:
        size: default: the number of GPUs, or two on the CPU; under torchrun its number of processes.
        launch: ``"process"``: a process a rank; ``"single"``: one process for all ranks, GPUs shared where there are
            fewer; ``"auto"``: a process a rank where there are enough GPUs, or on the CPU, else one. torchrun, where it
            started this program, overrides it.
        device_type: ``"cuda"`` or ``"cpu"``; default: CUDA where there is a GPU.

    Raises:
        ConfigError: a launch that the machine or torchrun rules out.
        UnsupportedDeviceError: no GPU, but ``"cuda"`` was asked for.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = device_type or ("cuda" if gpus else "cpu")
    if kind == "cuda" and not gpus:
        raise UnsupportedDeviceError("device 'cuda' was asked for, but PyTorch sees no GPU; device 'cpu' runs here")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        processes = int(os.environ["WORLD_SIZE"])
        if size not in (None, processes):
            raise ConfigError(f"{size} ranks were asked for, but torchrun started {processes} processes")
        return _TorchrunSession(processes, kind)
    size = size or (gpus if kind == "cuda" else 2)
    if launch == "auto":
        launch = "process" if kind == "cpu" or size <= gpus else "single"
    if launch == "process" and kind == "cuda" and size > gpus:
        raise ConfigError(f"a process a rank needs {size} GPUs, but there are {gpus}; launch 'single' shares them")
    if launch == "single" and kind == "cpu" and size > 1:
        raise ConfigError("on the CPU several ranks need a process each; use launch 'process'")
    return _SpawnedSession(size, launch, kind)


class _SpawnedSession(Session):
    """Processes of this program's own, started when first needed."""

    def __init__(self, size: int, launch: str, kind: str) -> None:
        self.size, self.launch, self.device_type = size, launch, kind
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = RUN_TIMEOUT_S) -> list[Any]:
        if not self._processes:
            self._start()
        for connection in self._connections:
            with suppress(ConnectionError):  # a process that has ended since: noticed when its answer is awaited
                connection.send((function, args))
        return self._collect(timeout_s)

    def _start(self) -> None:
        count = 1 if self.launch == "single" else self.size
        context = multiprocessing.get_context("spawn")
        # Through its file the processes also make later connections (NCCL's, symmetric memory's).
        self._folder = tempfile.TemporaryDirectory(prefix="moe-layer-bench-")
        store = str(Path(self._folder.name) / "store")
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(index, count, self.size, self.device_type, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(START_TIMEOUT_S)

    def _collect(self, timeout_s: float) -> list[Any]:
        results: list[Any] = [None] * len(self._connections)
        problems: dict[int, tuple[str, str]] = {}
        waiting: dict[Any, int] = {connection: i for i, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for index in waiting.values() if not problems else ():
                    problems[index] = (f"no answer within {timeout_s:g} s", "")
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                index = waiting.pop(connection)
                good, value = self._receive(index)
                if good:
                    results[index] = value
                else:
                    problems[index] = value
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        if problems:
            self.close()
            # The cause: a process that ended (it has no traceback), else the first in time; others may be consequences.
            first = next((i for i, (_, details) in problems.items() if not details), next(iter(problems)))
            summary = f"process {first}: {problems[first][0]}" if len(results) > 1 else problems[first][0]
            raise SessionError(summary, "\n".join(f"---- process {i}\n{t}" for i, (_, t) in sorted(problems.items())))
        return results

    def _receive(self, index: int) -> tuple[bool, Any]:
        """(good?, result or (summary, details)) of a process that has answered or ended."""
        try:
            answer: tuple[bool, Any] = self._connections[index].recv()
        except (EOFError, ConnectionError):
            self._processes[index].join(AFTER_FAILURE_S)
            return False, (f"the process ended with exit code {self._processes[index].exitcode}", "")
        return answer

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _TorchrunSession(Session):
    """This process is one of those that torchrun started; every one runs the same program."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.launch, self.device_type = size, "torchrun", kind
        rank = int(os.environ["RANK"])
        self.is_main = rank == 0
        self._ranks = _join(rank, size, size, kind, "env://", int(os.environ.get("LOCAL_RANK", rank)))

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = RUN_TIMEOUT_S) -> list[Any]:
        return self._ranks.gather(function(self._ranks, *args))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(index: int, processes: int, size: int, kind: str, init_method: str, local: int) -> Ranks:
    """Set this process up as one of ``processes`` that drive ``size`` ranks."""
    if kind == "cpu":
        torch.set_num_threads(1)  # processes share the cores
        devices = [torch.device("cpu")] * size
    else:
        gpus = torch.cuda.device_count()
        devices = [torch.device("cuda", r % gpus) for r in range(size)] if processes == 1 else []
        devices = devices or [torch.device("cuda", local)]
        torch.cuda.set_device(devices[0])
    if processes == 1:
        return Ranks.in_one_process(devices)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=init_method, rank=index, world_size=processes)
    stream = torch.cuda.Stream(devices[0]) if kind == "cuda" else None
    control = dist.new_group(backend="gloo")
    return Ranks(size, (LocalRank(index, devices[0], stream),), dist.group.WORLD, control)


def _serve(index: int, processes: int, size: int, kind: str, store: str, connection: Connection) -> None:
    """One process: join the others, then run what the parent sends until its end of the pipe closes."""
    try:
        ranks = _join(index, processes, size, kind, f"file://{store}", index)
        connection.send((True, None))
    except BaseException as error:
        connection.send((False, (_summary(error), traceback.format_exc())))
        return
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            os._exit(0)  # no tear-down of groups and GPUs that a case may have broken
        try:
            answer = (True, function(ranks, *args))
        except BaseException as error:
            answer = (False, (_summary(error), traceback.format_exc()))
        connection.send(answer)


def _summary(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
