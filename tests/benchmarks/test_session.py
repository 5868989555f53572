"""Processes that run functions, and what becomes of them when one fails; machine records."""

from __future__ import annotations

import json
from collections.abc import Iterator

import bench_functions
import pytest

from moe_layer.benchmarks import machine
from moe_layer.benchmarks.session import Session, SessionError, open_session
from moe_layer.errors import ConfigError, UnsupportedDeviceError

TOPOLOGY = """\
	GPU0	GPU1	NIC0	CPU Affinity	NUMA Affinity
GPU0	 X 	NV18	PIX	0-31	0
GPU1	NV18	 X 	SYS	0-31	0
NIC0	PIX	SYS	 X

Legend:
  X    = Self
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with open_session(2, device_type="cpu") as session:
        yield session


def test_functions_run_on_every_rank(session: Session) -> None:
    results = session.run(bench_functions.who, "hello")
    assert results == [("hello", 2, [rank], [[0], [1]]) for rank in range(2)]


def test_a_failure_ends_the_processes_and_the_next_run_has_new_ones(session: Session) -> None:
    with pytest.raises(SessionError, match=r"^process 1: ValueError: rank 1 is broken$") as error:
        session.run(bench_functions.fail_on, 1)
    assert "Traceback" in error.value.details and "fail_on" in error.value.details
    assert [r[2] for r in session.run(bench_functions.who, "again")] == [[0], [1]]


def test_a_process_that_ends(session: Session) -> None:
    with pytest.raises(SessionError, match="process 0: the process ended with exit code 3"):
        session.run(bench_functions.die_on, 0)


def test_one_process_and_time_out() -> None:
    with open_session(1, device_type="cpu") as session:
        assert session.run(bench_functions.who, "x") == [("x", 1, [0], [[0]])]
        with pytest.raises(SessionError, match=r"^no answer within 0.2 s$"):
            session.run(bench_functions.sleep, 60.0, timeout_s=0.2)


def test_sessions_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="on the CPU several ranks need a process each"):
        open_session(2, launch="single", device_type="cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="PyTorch sees no GPU"):
        open_session(2, device_type="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="a process a rank needs 4 GPUs, but there are 2"):
        open_session(4, launch="process")
    assert open_session(4).launch == "single" and open_session(2).launch == "process" and open_session().size == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="2 ranks were asked for, but torchrun started 4"):
        open_session(2)


def test_link_of_two_gpus() -> None:
    assert machine.link_of(TOPOLOGY) == "NV18"
    assert machine.link_of(TOPOLOGY.replace("NV18", "\x1b[4mPHB\x1b[0m")) == "PHB"
    assert machine.link_of("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n") is None
    assert machine.link_of(None) is None and machine.link_of("no topology") is None


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LAYER_COMMIT", "abc123")
    record = json.loads(json.dumps(machine.provenance("cpu")))
    assert record["commit"] == "abc123"
    assert "nothing for GPUs" in record["note"] and record["machine"]["device"] == "cpu"
    assert {"moe-layer", "python", "torch", "cuda", "nvidia-cutlass-dsl"} <= set(record["versions"])
    assert machine.describe(record).startswith("CPU (")
    gpu = {"machine": {"device": "cuda", "gpu": "NVIDIA H200", "gpus": 2, "link": "NV18"}}
    assert machine.describe(gpu) == "2 × NVIDIA H200, NV18"
