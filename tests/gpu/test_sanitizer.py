"""compute-sanitizer over a few small steps of both protocols, where the CUDA toolkit brings it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_ranks import compile_layers, missing_gpu
from kernel_pool import KernelPool

PROGRAM = Path(__file__).parent / "sanitizer_cases.py"
FOUND = 97  # exit code for "the sanitizer found something"


def sanitizer() -> str | None:
    """compute-sanitizer from PATH or the toolkit's usual places."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    return shutil.which("compute-sanitizer", path=path)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.skipif(sanitizer() is None, reason="needs compute-sanitizer (CUDA toolkit)"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(kernel_pool: KernelPool, tool: str) -> None:
    spec = importlib.util.spec_from_file_location("sanitizer_cases", PROGRAM)
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    compile_layers(kernel_pool, 2, list(cases.LAYERS.values()))
    command = [str(sanitizer()), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.count("as the oracle has it") == 2 * len(cases.LAYERS) * len(cases.BATCHES)
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
