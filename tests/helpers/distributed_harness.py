"""Runs test functions on several processes joined by a torch.distributed group.

In a test::

    def check(ranks, x):                       # a function of the test module, not a nested one
        comm = create_channel(ranks.group, protocol="collective") ...
        return result

    def test_it(run_ranks):
        results = run_ranks(check, 3, x)       # 3 ranks; a list with each rank's result

The processes start once and stay for the whole session (``run_ranks`` is a session fixture), so a case costs
milliseconds. An exception on any rank fails the test with every rank's traceback. Test modules are not importable by
name (pytest runs with ``--import-mode=importlib``), so each process loads the function's file by its path, under the
name that pytest gave the module; arguments and results are pickled.

The file is also the program of the processes: ``python distributed_harness.py RANK SIZE STORE BACKEND FD``.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0  # importing torch on a busy machine takes its time
AFTER_FAILURE_S = 10.0  # what the other ranks get to answer once one has failed, which may leave them waiting for it


@dataclass(frozen=True)
class Ranks:
    """What a function on one rank gets as its first argument.

    Attributes:
        rank: this process's rank in ``group`` and in the world.
        ep_size: how many ranks run the function.
        group: a ProcessGroup of ranks 0 … ep_size − 1, reused by every function run on so many ranks.
    """

    rank: int
    ep_size: int
    group: Any

    def new_group(self, members: Collection[int]) -> Any:
        """A fresh group of ``members``, ranks of the world, for a test that breaks it.

        As in torch.distributed, every process of the pool must make the same calls in the same order.
        """
        import torch.distributed as dist

        return dist.new_group(sorted(members))


class RanksFailed(AssertionError):
    """One or more ranks raised, died or did not answer; the message holds their tracebacks."""


class RankPool:
    """``size`` processes in one torch.distributed world.

    Args:
        size: processes, numbered 0 … size − 1.
        backend: of the world, e.g. ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; with nccl, rank r uses GPU r.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        store = os.path.join(self._folder.name, "store")
        # Many processes share few cores: one thread each.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for rank in range(size):
            ours, theirs = Pipe()
            fd = theirs.fileno()
            command = [sys.executable, __file__, str(rank), str(size), store, backend, str(fd)]
            self._processes.append(subprocess.Popen(command, pass_fds=[fd], env=environment, cwd=self._folder.name))
            self._connections.append(ours)
            theirs.close()
        self._collect(range(size), START_TIMEOUT_S, may_die=())

    def run(
        self,
        function: Callable[..., Any],
        ep_size: int,
        *args: Any,
        timeout_s: float = 60.0,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """``function(ranks, *args)`` on ranks 0 … ep_size − 1.

        Returns:
            each rank's result; None for a rank of ``may_die`` that ended without one.

        Raises:
            RanksFailed: a rank raised, ended or did not answer in time. After the latter two the pool is closed.
        """
        if not 1 <= ep_size <= self.size:
            raise ValueError(f"ep_size={ep_size}, but the pool has {self.size} processes")
        task = pickle.dumps((inspect.getsourcefile(function), function.__module__, function.__qualname__, ep_size))
        payload = pickle.dumps(args)
        for rank in range(ep_size):
            self._connections[rank].send_bytes(task)
            self._connections[rank].send_bytes(payload)
        return self._collect(range(ep_size), timeout_s, may_die)

    @property
    def alive(self) -> bool:
        """Whether every process still runs."""
        return bool(self._processes) and all(p.poll() is None for p in self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _collect(self, ranks: Collection[int], timeout_s: float, may_die: Collection[int]) -> list[Any]:
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {self._connections[r]: r for r in ranks}
        deadline = time.monotonic() + timeout_s
        broken = False
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                broken = True
                problems.update(dict.fromkeys(waiting.values(), "no answer in time"))
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    code = self._processes[rank].wait()
                    results[rank] = None
                    if rank not in may_die:
                        broken = True
                        problems[rank] = f"the process ended with exit code {code}"
                else:
                    (results if good else problems)[rank] = value
                if problems:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        if broken:
            self.close()
        if problems:
            raise RanksFailed("\n".join(f"---- rank {rank}\n{text}" for rank, text in sorted(problems.items())))
        return [results[rank] for rank in ranks]


def _serve(rank: int, size: int, store_path: str, backend: str, fd: int) -> None:
    """One process: join the world, then run what the parent sends until its end of the pipe closes."""
    import torch
    import torch.distributed as dist

    connection = Connection(fd)
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    groups = [dist.new_group(list(range(n))) for n in range(1, size + 1)]
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            file, module, qualname, ep_size = pickle.loads(connection.recv_bytes())
            payload = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # no tear-down of groups that a test may have broken
        try:
            function = _load(module, file)
            for name in qualname.split("."):
                function = getattr(function, name)
            value = function(Ranks(rank, ep_size, groups[ep_size - 1]), *pickle.loads(payload))
            answer = pickle.dumps((True, value))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _load(name: str, file: str) -> Any:
    """The module ``name`` from ``file``, as pytest's importlib mode made it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    # Test modules import this one by its name. Its folder stays on sys.path, as conftest.py puts it there for pytest.
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
