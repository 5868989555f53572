"""Compiles one-sided kernels on all cores of the machine, into the folder that ``MOE_LAYER_CACHE`` names.

A GPU test needs tens of kernels at a second or so each, and the compiler runs one at a time in a process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest

Task = tuple[str, str, Any, str, str]  # module, function, spec, signature, architecture


def tasks_of(dispatch: Iterable[Any], combine: Iterable[Any], arch: str) -> list[Task]:
    """What :mod:`moe_layer.comm.launch` asks the compiler for, given DispatchSpecs and CombineSpecs; no compiling."""
    from moe_layer.comm import launch

    tasks: list[Task] = []

    def record(function: Any, spec: Any, signature: str, arch: str) -> Any:
        tasks.append((function.__module__, function.__name__, spec, signature, arch))
        return lambda *arguments: None

    with mock.patch.object(launch, "get_kernel", record):
        for spec in dispatch:
            launch.dispatch_kernels(spec, arch)
            for in_combine in (False, True):
                launch.give_up_kernel(spec.ep_size, in_combine, arch)
        for spec in combine:
            launch.combine_kernels(spec, arch)
    return tasks


class KernelPool:
    """Worker processes that live as long as the session."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._done: set[str] = set()

    def compile(self, tasks: Iterable[Task]) -> None:
        """Compile what has not been compiled before."""
        if os.environ.get("MOE_LAYER_CACHE") == "off":
            return
        new = {repr(task): task for task in tasks if repr(task) not in self._done}
        if not new:
            return
        # The large ones first, so that none of them is left for the end.
        ordered = sorted(
            new.values(), key=lambda task: ("sentinel_dispatch" not in task[1], -getattr(task[2], "ep_size", 0))
        )
        list(self._workers().map(_compile, ordered))
        self._done |= set(new)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)`` in a worker; the function must be importable there by its module's name."""
        return self._workers().submit(function, *arguments).result()

    def _workers(self) -> ProcessPoolExecutor:
        if self._executor is None:
            workers = max(1, min(12, (os.cpu_count() or 2) - 2))
            self._executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        return self._executor

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


def _compile(task: Task) -> None:
    from moe_layer.kernel_cache import get_kernel

    module, function, spec, signature, arch = task
    get_kernel(getattr(importlib.import_module(module), function), spec, signature, arch)


@pytest.fixture(scope="session")
def kernel_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelPool]:
    """For conftest.py to import. Kernels go to a folder of the session's own, unless ``MOE_LAYER_CACHE`` names one."""
    with pytest.MonkeyPatch.context() as environment:
        if "MOE_LAYER_CACHE" not in os.environ:
            environment.setenv("MOE_LAYER_CACHE", str(tmp_path_factory.mktemp("kernels")))
        pool = KernelPool()
        yield pool
        pool.close()
