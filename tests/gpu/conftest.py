"""Fixtures of the GPU tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from kernel_pool import KernelPool

# Emulated ranks wait for one another, so that no two may share a hardware queue; by default a GPU has eight.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture(scope="session")
def kernel_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelPool]:
    """Compiles kernels side by side; into a folder of the session's own, unless ``MOE_LAYER_CACHE`` names one."""
    with pytest.MonkeyPatch.context() as environment:
        if "MOE_LAYER_CACHE" not in os.environ:
            environment.setenv("MOE_LAYER_CACHE", str(tmp_path_factory.mktemp("kernels")))
        pool = KernelPool()
        yield pool
        pool.close()
