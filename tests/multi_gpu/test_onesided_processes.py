"""Fence and Sentinel between processes, a GPU each: real symmetric memory, peers that die, layers over it.

With one GPU the processes share it.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_harness import RankPool, Ranks
from emulated_ranks import compile_layers, missing_gpu
from kernel_pool import KernelPool
from layer_kernels import compile_whole_layers
from layers import config, fill
from one_sided_check import byte_rows
from token_pool import LAYERS, PoolOnDevice, TokenPool, Windows

from moe_layer import ExpertParallel, MoELayer
from moe_layer.comm import create_channel
from moe_layer.comm.feasible import OVERLAPPING
from moe_layer.errors import CommunicationError, CommunicationTimeoutError, RankMismatchError

GPUS = torch.cuda.device_count()
EP_SIZE = max(2, min(4, GPUS))
# On one GPU the processes share it: everything but NVLink is as between GPUs, slower since they take turns.
SHARED = GPUS == 1
BACKEND = "gloo" if SHARED else "cpu:gloo,cuda:nccl"  # NCCL refuses two ranks on a GPU
AUTO_LIMIT = 16  # the largest T̂ of a Sentinel step
MAX_TOKENS = 40
PROTOCOLS = ("fence", "sentinel", "auto")

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.timeout(180),
]


def gpu_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % GPUS)


@pytest.fixture(autouse=True, scope="module")
def sharing_allowed() -> Iterator[None]:
    """Before any process starts, since they inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        if SHARED:
            patch.setenv(OVERLAPPING, "1")
        yield


@pytest.fixture(scope="module")
def compiled(kernel_pool: KernelPool) -> None:
    """What the processes will need, before any of them starts."""
    for ep_size in {2, EP_SIZE}:
        compile_layers(kernel_pool, ep_size, list(LAYERS.values()))
    compile_layers(kernel_pool, 2, [OTHER])


@pytest.fixture(scope="module")
def pool(compiled: None) -> Iterator[RankPool]:
    with RankPool(EP_SIZE, BACKEND) as pool:
        yield pool


class Side:
    """This process's rank of a group: a channel, a communicator for each layer, pools of tokens."""

    def __init__(self, group: Any, device: torch.device, protocol: str, seed: int, timeout_s: float = 20.0) -> None:
        from moe_layer.comm.onesided import OneSidedChannel

        torch.cuda.set_device(device)
        self.channel = OneSidedChannel(
            group,
            protocol=protocol,
            max_tokens_per_rank=MAX_TOKENS,
            timeout_s=timeout_s,
            device=device,
            sentinel_tokens_per_rank=AUTO_LIMIT if protocol == "auto" else None,
        )
        self.rank, self.ep_size = self.channel.ep_rank, self.channel.ep_size
        self.device = device
        self.comms, self.pools, self.sides = {}, {}, {}
        for name, layer in LAYERS.items():
            self.comms[name] = self.channel.communicator(layer.placement(self.ep_size), layer.hidden_size)
            self.comms[name].reserve(layer.row_bytes, layer.scale_bytes, layer.top_k, layer.partial_bytes)
            self.pools[name] = TokenPool(layer, self.ep_size, seed, size=96)
            self.sides[name] = PoolOnDevice(self.pools[name], self.rank, device)

    def run(self, plans: list[tuple[str, Windows]], pauses: np.ndarray | None = None) -> None:
        """Steps, checked on the device; before a step the host sleeps for the seconds given."""
        counts = {name: self.pools[name].counts(self.rank, [plan for _, plan in plans]) for name in LAYERS}
        on_device = {name: table.to(self.device) for name, table in counts.items()}
        for step, (name, plan) in enumerate(plans):
            if pauses is not None and pauses[step]:
                time.sleep(pauses[step])
            self.sides[name].step(self.comms[name], plan, on_device[name][step], step)

    def check(self) -> None:
        self.channel.check()
        for side in self.sides.values():
            side.report()
        start, length = self.channel.layout.sentinel_region
        assert bool((self.channel.memory.local[start : start + length] == 0xFF).all()), "words left that must be reset"

    def full(self, t_hat: int, first: int = 0) -> Windows:
        return Windows((first,) * self.ep_size, (t_hat,) * self.ep_size, t_hat)


def random_plans(side: Side, seed: int, steps: int) -> list[tuple[str, Windows]]:
    """The same on every rank."""
    rng = np.random.default_rng(seed)
    plans = []
    for _ in range(steps):
        name = list(LAYERS)[rng.integers(len(LAYERS))]
        t_hat = int(rng.integers(0, MAX_TOKENS + 1) if rng.random() < 0.5 else rng.integers(12, 21))
        plans.append((name, side.pools[name].windows(rng, t_hat)))
    return plans


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_steps(pool: RankPool, protocol: str) -> None:
    pool.run(run_random_steps, EP_SIZE, protocol, secrets.randbits(31), 200)


def run_random_steps(ranks: Ranks, protocol: str, seed: int, steps: int) -> None:
    side = Side(ranks.group, gpu_of(ranks.rank), protocol, seed)
    plans = random_plans(side, seed, steps)
    # Each process is late at points of its own.
    rng = np.random.default_rng([seed, ranks.rank])
    pauses = np.where(rng.random(steps) < 0.1, rng.uniform(0, 0.01, steps), 0.0)
    for start in range(0, steps, 50):
        side.run(plans[start : start + 50], pauses[start : start + 50])
        try:
            side.check()
        except AssertionError as error:
            raise AssertionError(f"{protocol}, seed {seed}, steps {start} to {start + 49}: {error}") from error
    side.channel.destroy()


def test_two_channels_at_once(pool: RankPool) -> None:
    """Two groups of layers, one of a protocol each; their steps alternate."""
    pool.run(run_two_channels, EP_SIZE, secrets.randbits(31))


def run_two_channels(ranks: Ranks, seed: int) -> None:
    device = gpu_of(ranks.rank)
    sides = [Side(ranks.group, device, protocol, seed + n) for n, protocol in enumerate(("fence", "sentinel"))]
    for n in range(10):
        for side in sides:
            side.run(random_plans(side, seed + n, 3))
    for side in sides:
        side.check()
        side.channel.destroy()


def test_graph_replays(pool: RankPool) -> None:
    pool.run(run_graph, EP_SIZE, secrets.randbits(31), timeout_s=90)


def run_graph(ranks: Ranks, seed: int) -> None:
    """Both protocols in one graph, captured and replayed in every process, each at its own pace."""
    device = gpu_of(ranks.rank)
    side = Side(ranks.group, device, "auto", seed)
    sequence = [("even", 8), ("odd", 40), ("even", 40), ("odd", 16)]
    side.run([(name, side.full(t_hat)) for name, t_hat in sequence])
    side.check()
    rng = np.random.default_rng(seed)
    replays = 200
    plans = [[side.pools[name].windows(rng, t_hat) for _ in range(replays)] for name, t_hat in sequence]
    tables = [side.sides[name].controls(plan) for (name, _), plan in zip(sequence, plans)]
    controls = [table[0].clone() for table in tables]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number, (name, t_hat) in enumerate(sequence):
            side.sides[name].padded_step(side.comms[name], controls[number], t_hat, number)
    own = np.random.default_rng([seed, ranks.rank])
    for n in range(replays):
        for control, table in zip(controls, tables):
            control.copy_(table[n])
        graph.replay()
        if own.random() < 0.05:
            time.sleep(own.uniform(0, 0.01))
    side.check()
    side.channel.destroy()


# --- ranks that disagree ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", ["fence", "sentinel"])
def test_another_maximum_on_one_rank(pool: RankPool, protocol: str) -> None:
    for rank, text in enumerate(pool.run(run_another_maximum, EP_SIZE, protocol, secrets.randbits(31))):
        assert text.startswith(f"rank {rank}, step 4, dispatch ({protocol}): ranks {rank} and ")
        assert "runtime_max_tokens_per_rank is " in text
        assert f"{9 if rank == 1 else 8} on rank {rank} and " in text


def run_another_maximum(ranks: Ranks, protocol: str, seed: int) -> str:
    side = Side(ranks.group, gpu_of(ranks.rank), protocol, seed, timeout_s=10)
    side.run([("even", side.full(8, first)) for first in range(3)])
    side.check()
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        side.run([("even", side.full(9 if ranks.rank == 1 else 8))])
        side.channel.check()
    assert time.monotonic() - start < 3
    check_dead(side, str(caught.value))
    return str(caught.value)


OTHER = replace(LAYERS["even"], top_k=3)


def test_new_width_on_one_rank(compiled: None) -> None:
    """A top_k that one rank sees for the first time, while the other goes on as before: an error on both, no hang."""
    with RankPool(2, BACKEND) as pool:
        texts = pool.run(run_new_width, 2, secrets.randbits(31), timeout_s=40)
    assert "rank 1" in texts[0]
    assert "rank 0" in texts[1]
    assert all("top_k" in text or "did not arrive" in text for text in texts)


def run_new_width(ranks: Ranks, seed: int) -> str:
    side = Side(ranks.group, gpu_of(ranks.rank), "fence", seed, timeout_s=5)
    side.run([("even", side.full(8))])
    side.check()
    arguments = side.sides["even"].arguments(side.full(8))
    if ranks.rank == 1:
        for name in ("topk_ids", "topk_weights"):
            arguments[name] = arguments[name][:, : OTHER.top_k].contiguous()
    torch.cuda.synchronize()
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        side.comms["even"].dispatch(**arguments)
        side.channel.check()
    assert time.monotonic() - start < 5 + 2
    return str(caught.value)


def check_dead(side: Side, text: str) -> None:
    """After an error every call raises at once with its text; the process can still use the GPU and clean up."""
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(CommunicationError) as again:
            side.run([("even", side.full(8))])
        assert text in str(again.value)
    side.channel.destroy()
    side.channel.destroy()
    assert float(torch.ones(1000, device=side.device).sum()) == 1000
    assert time.monotonic() - start < (5 if SHARED else 2)


# --- peers that die ---------------------------------------------------------------------------------------------------
# (protocol, what the victim is at when it dies, call in which its peer finds out). In the first and the last case the
# victim has made the call and its kernel never begins.
DEATHS = [
    (protocol, moment, noticed)
    for protocol in ("fence", "sentinel")
    for moment, noticed in (("dispatch", "dispatch"), ("dispatch, running", "combine"), ("combine", "combine"))
]
TIMEOUT_S = 1.5


@pytest.mark.timeout(240)
def test_killed_peers(compiled: None) -> None:
    """Processes 2i and 2i + 1 are a group of their own, on different GPUs where there are two; the second is killed.

    A survivor for each death, so that none meets what another death left behind.
    """
    size = 2 * len(DEATHS)
    with RankPool(size, "gloo") as pool:
        results = pool.run(survive, size, secrets.randbits(31), timeout_s=120, may_die=range(1, size, 2))
        assert results[1::2] == [None] * len(DEATHS), "a victim survived"
        for (protocol, _, call), (text, seconds) in zip(DEATHS, results[::2]):
            begin = f"rank 0, step 4, {call} ({protocol}): rank 1 did not arrive within {TIMEOUT_S:g} s"
            assert text.startswith(begin), results[::2]
            assert TIMEOUT_S - 0.2 < seconds < TIMEOUT_S + 2, results[::2]
        # The survivors still take part in nothing but their own work, and answer.
        assert pool.run(add_on_gpu, 1) == [[3.0]]


def survive(ranks: Ranks, seed: int) -> tuple[str, float]:
    """One pair after another, so that no two of them take turns on a GPU."""
    # All groups first: every process must be alive to make one.
    pairs = [ranks.new_group((first, first + 1)) for first in range(0, ranks.ep_size, 2)]
    survivors = ranks.new_group(range(0, ranks.ep_size, 2))
    number, is_victim = divmod(ranks.rank, 2)
    protocol, moment, noticed = DEATHS[number]
    side = Side(pairs[number], gpu_of(is_victim), protocol, seed)
    if is_victim:
        die(side, moment)  # the first step waits for the survivor
    outcome = ("", math.nan)
    for turn in range(len(pairs)):
        if turn == number:
            try:
                outcome = outlive(side, moment, noticed)
            except BaseException:  # the other pairs' outcomes are worth having, too
                outcome = (traceback.format_exc(), math.nan)
            print(f"{protocol}, {moment}: {outcome[1]:.2f} s, {outcome[0]}", file=sys.stderr, flush=True)
        dist.barrier(survivors)
    return outcome


def ready_to_die(side: Side) -> dict[str, Any]:
    """Steps in which all kernels are loaded, which takes long where processes share a GPU; arguments of the next."""
    side.run([("even", side.full(8, first)) for first in range(3)])
    side.check()
    side.channel.set_timeout(TIMEOUT_S)
    arguments = side.sides["even"].arguments(side.full(8))
    torch.cuda.synchronize()
    side.channel.barrier()
    return arguments


def die(side: Side, moment: str) -> None:
    comm, arguments = side.comms["even"], ready_to_die(side)
    if moment == "combine":
        comm.dispatch(**arguments)
        side.channel.check()
    if moment != "dispatch, running":
        held = hold_stream(side.device)
        assert not held.is_cpu
    if moment == "combine":
        comm.combine(comm.get_combine_input_buffer())
    else:
        comm.dispatch(**arguments)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def hold_stream(device: torch.device) -> torch.Tensor:
    """Keep what is put on the current stream from now on from beginning, without a kernel that would occupy the GPU.

    Returns:
        the word that the stream waits for.
    """
    word = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    at_least = ctypes.c_uint(0)  # CU_STREAM_WAIT_VALUE_GEQ
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    assert wait(stream, ctypes.c_uint64(word.data_ptr()), ctypes.c_uint32(1), at_least) == 0
    return word


def outlive(side: Side, moment: str, noticed: str) -> tuple[str, float]:
    """What the survivor is told, and after how many seconds."""
    comm, arguments = side.comms["even"], ready_to_die(side)
    if moment == "dispatch, running":
        time.sleep(1.0)  # until the victim's kernel has sent all it has, and is gone
    if noticed == "combine":
        comm.dispatch(**arguments)
        side.channel.check()
    start = time.monotonic()
    with pytest.raises(CommunicationTimeoutError) as caught:
        if noticed == "dispatch":
            comm.dispatch(**arguments)
        else:
            comm.combine(comm.get_combine_input_buffer())
        side.channel.check()
    seconds = time.monotonic() - start
    check_dead(side, str(caught.value))
    return str(caught.value), seconds


def add_on_gpu(ranks: Ranks) -> list[float]:
    return (torch.ones(1, device="cuda:0") + 2).tolist()


# --- layers -----------------------------------------------------------------------------------------------------------
LAYER_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("deepseek_v3", {"dtype": torch.float32}),
    "fp8": ("deepseek_v3", {"weight_format": "fp8_128x128"}),
    "latent mxfp8 × mxfp4": ("kimi_k3", {"weight_format": "mxfp4"}),
    "nvfp4": ("deepseek_v4", {"weight_format": "nvfp4"}),
}


TOKENS = (24, 9, 0, 17)[:EP_SIZE]
STEPS = (24, 32)  # their T̂


@pytest.mark.timeout(300)
def test_layers_are_the_collective_ones(pool: RankPool, kernel_pool: KernelPool) -> None:
    """A layer gives bitwise what it gives over torch.distributed, whatever carries its tokens."""
    start = time.monotonic()
    missing = compile_whole_layers(kernel_pool, list(LAYER_OPTIONS.values()), TOKENS, STEPS)
    print(f"compiled in {time.monotonic() - start:.1f} s {missing}", file=sys.stderr, flush=True)
    pool.run(compare_layers, EP_SIZE, ["fence", "sentinel", "auto"], secrets.randbits(31), timeout_s=240)


def compare_layers(ranks: Ranks, protocols: list[str], seed: int) -> None:
    device = gpu_of(ranks.rank)
    torch.cuda.set_device(device)
    tokens = TOKENS[ranks.rank]
    outputs: dict[str, list[torch.Tensor]] = {}
    for protocol in ("collective", *protocols):
        start = time.monotonic()
        # Kernels that are compiled here after all take their time on one rank before the other.
        with ExpertParallel(ranks.group, protocol, max_tokens_per_rank=max(STEPS), timeout_s=60, device=device) as ep:
            layers = []
            for name, options in LAYER_OPTIONS.values():
                layers.append(fill(MoELayer(config(name), ep, device=device, **options), seed))
                assert layers[-1].comm.protocol == ("collective" if protocol == "collective" else "one-sided")
            outputs[protocol] = []
            for repeat, t_hat in enumerate(STEPS):
                for layer in layers:
                    g = torch.Generator().manual_seed(seed + ranks.rank + repeat)
                    x = torch.randn(tokens, layer.cfg.hidden_size, generator=g)
                    dtype = torch.float32 if layer.partial_dtype == torch.float32 else torch.bfloat16
                    outputs[protocol].append(layer(x.to(dtype).to(device), tokens_per_rank=t_hat))
            torch.cuda.synchronize()
        print(f"rank {ranks.rank}, {protocol}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    names = list(LAYER_OPTIONS) * len(STEPS)
    for protocol in protocols:
        for name, got, expected in zip(names, outputs[protocol], outputs["collective"]):
            assert expected.isfinite().all()
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            assert torch.equal(byte_rows(got, tokens), byte_rows(expected, tokens)), (
                f"{protocol}, {name}: {int((got != expected).sum())} of {got.numel()} values differ"
            )


# --- which transport, and which group ---------------------------------------------------------------------------------
def test_auto(pool: RankPool) -> None:
    """One-sided where every rank can; collective on every rank as soon as one says no."""
    assert pool.run(take_auto, EP_SIZE) == [["OneSidedChannel", "CollectiveChannel"]] * EP_SIZE


def take_auto(ranks: Ranks) -> list[str]:
    device = gpu_of(ranks.rank)
    torch.cuda.set_device(device)
    taken = []
    for last in (device, torch.device("cpu")):
        place = last if ranks.rank == ranks.ep_size - 1 else device
        channel = create_channel(ranks.group, max_tokens_per_rank=MAX_TOKENS, device=place)
        taken.append(type(channel).__name__)
        channel.destroy()
    return taken


@pytest.mark.skipif(not SHARED, reason="several GPUs: no process has to share one")
def test_auto_with_a_shared_gpu(pool: RankPool) -> None:
    """Not by itself, nor if only some ranks allow it."""
    assert pool.run(take_auto_with_a_shared_gpu, EP_SIZE) == ["CollectiveChannel"] * EP_SIZE


def take_auto_with_a_shared_gpu(ranks: Ranks) -> str:
    torch.cuda.set_device(gpu_of(ranks.rank))
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.delenv(OVERLAPPING)
        channel = create_channel(ranks.group, max_tokens_per_rank=MAX_TOKENS)
    channel.destroy()
    return type(channel).__name__


def test_groups_that_overlap(kernel_pool: KernelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have shared memory before, in groups that others were not in, share it again: pytorch#196082."""
    monkeypatch.setenv(OVERLAPPING, "1")
    for ep_size in (2, 3):
        compile_layers(kernel_pool, ep_size, list(LAYERS.values()))
    with RankPool(3, "gloo") as pool:
        pool.run(run_overlapping_groups, 3, secrets.randbits(31), timeout_s=120)


def run_overlapping_groups(ranks: Ranks, seed: int) -> None:
    members = [(0, 1), (0, 1, 2), (1, 2)]
    groups = [ranks.new_group(each) for each in members]
    sides = []
    for number, (group, each) in enumerate(zip(groups, members)):
        if ranks.rank in each:
            # A wait for peers that look elsewhere would end with the rendezvous' time-out, and an error.
            side = Side(group, gpu_of(ranks.rank), "auto", seed + number, timeout_s=30)
            side.run([("even", side.full(2)), ("odd", side.full(20))])
            side.check()
            sides.append(side)
        dist.barrier(ranks.group)
    # All three are in use at once, and none sees what is written for another.
    for n in range(3):
        for side in sides:
            side.run([("odd", side.full(3, first=n)), ("even", side.full(20, first=n))])
    for side in sides:
        side.check()
        side.channel.destroy()


# --- more processes than GPUs -----------------------------------------------------------------------------------------
def test_processes_that_share_a_gpu(kernel_pool: KernelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow, since the processes take turns on a GPU, but right."""
    monkeypatch.setenv(OVERLAPPING, "1")
    compile_layers(kernel_pool, 3, list(LAYERS.values()))
    with RankPool(3, "gloo") as pool:
        pool.run(run_on_shared_gpus, 3, secrets.randbits(31), timeout_s=90)


def run_on_shared_gpus(ranks: Ranks, seed: int) -> None:
    side = Side(ranks.group, gpu_of(ranks.rank % 2), "auto", seed, timeout_s=60)
    side.run([("even", side.full(2)), ("odd", side.full(20)), ("even", side.full(3))])
    side.check()
    side.channel.destroy()
