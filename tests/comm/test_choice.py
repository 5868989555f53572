"""What ``protocol="auto"`` takes: the same on every rank, and why."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed_harness import RankPool, Ranks
from layers import config

from moe_layer import ExpertParallel, MoELayer
from moe_layer.comm import create_channel, feasible
from moe_layer.comm.feasible import OVERLAPPING, RankFacts, obstacle_between, own_facts
from moe_layer.errors import ConfigError, MoELayerError

GPUS = ("GPU-a", "GPU-b", "GPU-c")


def on_gpu(number: int, **changes: Any) -> RankFacts:
    """A rank on GPU ``number`` of a host with three that all reach each other."""
    fact = RankFacts("the same", "host", None, GPUS[number], number, dict.fromkeys(GPUS, True))
    return replace(fact, **changes)


def test_gpus_that_reach_each_other() -> None:
    assert obstacle_between([on_gpu(0), on_gpu(1)]) is None
    assert obstacle_between([on_gpu(2), on_gpu(0), on_gpu(1)]) is None
    # GPUs outside the group do not matter.
    apart = {"GPU-a": True, "GPU-b": True, "GPU-c": False}
    assert obstacle_between([on_gpu(0, reaches=apart), on_gpu(1, reaches=apart)]) is None


BLIND = {"GPU-a": True}
FAR = {"GPU-a": True, "GPU-b": False, "GPU-c": True}
CPU_RANK = RankFacts("", "host", "runs on the CPU, not on a GPU")
OBSTACLES: dict[str, tuple[list[RankFacts], str]] = {
    "a rank on the CPU": ([on_gpu(0), CPU_RANK], "rank 1: runs on the CPU"),
    "no DSL on one rank": ([on_gpu(0, obstacle="no CuTe DSL"), on_gpu(1)], "rank 0: no CuTe DSL"),
    "two hosts": ([on_gpu(0, host="x"), on_gpu(1, host="y")], "the group spans hosts x, y;"),
    "no peer access": (
        [on_gpu(0, reaches=FAR), on_gpu(1)],
        "the GPU of rank 0 cannot access the memory of the GPU of rank 1",
    ),
    "GPU not visible": (
        [on_gpu(1), on_gpu(0, reaches=BLIND)],
        "rank 1 does not see the GPU of rank 0; let CUDA_VISIBLE",
    ),
    "a GPU shared": ([on_gpu(0), on_gpu(1), on_gpu(0)], f"ranks 0 and 2 share a GPU ({OVERLAPPING}=1 on every rank"),
    "a GPU shared, allowed by one": ([on_gpu(0), on_gpu(0, may_overlap=True)], "ranks 0 and 1 share a GPU"),
    "numbered alike": ([on_gpu(0), on_gpu(1, index=0)], "ranks 0 and 1 call different GPUs cuda:0; let CUDA_VISIBLE"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_obstacles(case: str) -> None:
    facts, expected = OBSTACLES[case]
    found = obstacle_between(facts)
    assert found is not None
    assert found.startswith(expected)


def test_overlapping_gpus_where_every_rank_allows_it() -> None:
    facts = [on_gpu(0, may_overlap=True), on_gpu(0, may_overlap=True), on_gpu(1, index=0, may_overlap=True)]
    assert obstacle_between(facts) is None
    unreachable = [on_gpu(0, may_overlap=True, reaches=BLIND), on_gpu(1, may_overlap=True)]
    assert obstacle_between(unreachable) is not None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda of a machine with two GPUs that do not reach each other."""

    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = GPUS[index]

    monkeypatch.delenv(OVERLAPPING, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    monkeypatch.setattr(feasible, "_symmetric_memory_backend", lambda device: "CUDA")


SECOND = torch.device("cuda", 1)


@pytest.mark.usefixtures("machine")
def test_own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = own_facts(SECOND, "something")
    assert (fact.request, fact.obstacle, fact.gpu, fact.index) == ("something", None, "GPU-b", 1)
    assert fact.reaches == {"GPU-a": False, "GPU-b": True}
    assert not fact.may_overlap
    for value, allowed in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(OVERLAPPING, value)
        assert own_facts(SECOND).may_overlap == allowed


@pytest.mark.usefixtures("machine")
def test_own_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_facts(None).obstacle == "runs on the CPU, not on a GPU"
    assert own_facts(torch.device("cpu")).obstacle == "runs on cpu, not on a GPU"
    for backend, words in (("NVSHMEM", "is set to NVSHMEM"), (None, "is missing")):
        monkeypatch.setattr(feasible, "_symmetric_memory_backend", lambda device, backend=backend: backend)
        assert words in str(own_facts(SECOND).obstacle)
    monkeypatch.setattr("moe_layer.kernel_cache.dsl_available", lambda: False)
    assert "the CuTe DSL is not installed" in str(own_facts(SECOND).obstacle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Some GPU has compute capability 8.0" in str(own_facts(SECOND).obstacle)


# ---- between processes ----


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes of this file's own, so that nothing else has imported the DSL there."""
    with RankPool(3) as pool:
        yield pool


class Recorded:
    """In the place of OneSidedChannel."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.options = options


def choose(ranks: Ranks, facts: list[RankFacts] | None, options: dict[str, Any] | list[dict[str, Any]]) -> Any:
    """The kind of channel that this rank gets and its options, or the error; and what is logged.

    Args:
        facts: what each rank says of itself, or None for what it is.
        options: of ``create_channel``, or a list of each rank's.
    """
    mine = options[ranks.rank] if isinstance(options, list) else options
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("moe_layer.comm.channel")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    one_sided = type(sys)("one_sided")
    one_sided.OneSidedChannel = Recorded  # type: ignore[attr-defined]

    def fake(device: torch.device | None, request: str) -> RankFacts:
        return own_facts(device, request) if facts is None else replace(facts[ranks.rank], request=request)

    try:
        with (
            mock.patch.object(feasible, "own_facts", fake),
            mock.patch.dict(sys.modules, {"moe_layer.comm.onesided": one_sided}),
        ):
            channel = create_channel(ranks.group, **mine)
        assert not any(name.partition(".")[0] == "cutlass" for name in sys.modules)
        return type(channel).__name__, getattr(channel, "options", None), records
    except MoELayerError as error:
        return type(error).__name__, str(error), records
    finally:
        logger.removeHandler(handler)


def test_one_sided_between_gpus(pool: RankPool) -> None:
    facts = [on_gpu(1), on_gpu(0), on_gpu(2)]
    for asked, given in (("auto", "auto"), ("one-sided", "auto"), ("fence", "fence"), ("sentinel", "sentinel")):
        options = {"protocol": asked, "max_tokens_per_rank": 7, "timeout_s": 9.0, "device": "cpu", "fp8_combine": True}
        said = ["INFO protocol='auto' takes one-sided over 3 ranks, cpu here"] if asked == "auto" else []
        for kind, passed, records in pool.run(choose, 3, facts, options):
            assert kind == "Recorded"
            assert passed == {**options, "protocol": given, "device": torch.device("cpu")}
            assert records == said


@pytest.mark.parametrize("case", OBSTACLES)
def test_collective_on_every_rank(pool: RankPool, case: str) -> None:
    facts, expected = OBSTACLES[case]
    results = pool.run(choose, len(facts), facts, {"protocol": "auto", "device": "cpu"})
    assert len({repr(result) for result in results}) == 1
    kind, _, records = results[0]
    assert kind == "CollectiveChannel"
    assert len(records) == 1
    assert records[0].startswith(f"INFO protocol='auto' takes collective over {len(facts)} ranks: {expected}")
    for kind, text, records in pool.run(choose, len(facts), facts, {"protocol": "one-sided", "device": "cpu"}):
        assert kind == "UnsupportedDeviceError"
        assert text.startswith(f"protocol 'one-sided' cannot run: {expected}")
        assert text.endswith("; protocol='collective' works there")
        assert records == []


def test_on_cpus(pool: RankPool) -> None:
    for kind, _, records in pool.run(choose, 3, None, {"device": "cpu"}):
        assert kind == "CollectiveChannel"
        assert records == ["INFO protocol='auto' takes collective over 3 ranks: rank 0: runs on cpu, not on a GPU"]
    for kind, _, records in pool.run(choose, 3, None, {"device": "cpu", "protocol": "collective"}):
        assert (kind, records) == ("CollectiveChannel", [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_some_ranks_hope_for_a_gpu(pool: RankPool) -> None:
    """A rank whose GPU is not there says so instead of leaving the others waiting; those on a CPU answer, too."""
    for devices in (("cuda:0", "cpu", None), ("cpu", "cuda", "cuda:7")):
        results = pool.run(choose, 3, None, [{"device": device} for device in devices])
        assert len({repr(result) for result in results}) == 1
        assert results[0][0] == "CollectiveChannel"


def test_fp8_combine_needs_one_sided(pool: RankPool) -> None:
    expected = "fp8_combine is for the one-sided protocols, but protocol {} takes another{}"
    for kind, text, _ in pool.run(choose, 2, None, {"device": "cpu", "fp8_combine": True}):
        assert kind == "ConfigError"
        assert text == expected.format("'auto'", ": rank 0: runs on cpu, not on a GPU")
    for kind, text, _ in pool.run(choose, 2, None, {"protocol": "collective", "fp8_combine": True}):
        assert kind == "ConfigError"
        assert text == expected.format("'collective'", "")


@pytest.mark.parametrize(("other", "words"), [
    ({"protocol": "fence"}, "protocol='fence' and fp8_combine=False"),
    ({"protocol": "auto", "fp8_combine": True}, "protocol='auto' and fp8_combine=True"),
])  # fmt: skip
def test_ranks_that_ask_for_different_things(pool: RankPool, other: dict[str, Any], words: str) -> None:
    results = pool.run(choose, 3, [on_gpu(0), on_gpu(1), on_gpu(2)], [{}, {}, other])
    for rank, (kind, text, _) in enumerate(results):
        assert kind == "RankMismatchError"
        assert text == (
            f"rank {rank}: ranks disagree about the transport: rank 0 asks for protocol='auto' and "
            f"fp8_combine=False, rank 2 for {words}"
        )


def test_not_a_member(pool: RankPool) -> None:
    pool.run(join_others, 3)


def join_others(ranks: Ranks) -> None:
    group = ranks.new_group((0, 1))
    if ranks.rank == 2:
        with pytest.raises(ConfigError, match="not a member of the group"):
            create_channel(group)
    else:
        assert type(create_channel(group)).__name__ == "CollectiveChannel"


def test_layer_on_another_device() -> None:
    ep = ExpertParallel(device="cpu")
    ep.channel.device = SECOND
    expected = "a layer on cpu, but the transport of its group serves cuda:1; give ExpertParallel device='cpu'"
    with pytest.raises(ConfigError, match=expected):
        MoELayer(config("mixtral"), ep, device="cpu")
    ep.channel.device = torch.device("cpu")
    MoELayer(config("mixtral"), ep, device="cpu")
