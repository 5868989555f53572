"""Many one-sided steps without the host waiting: stragglers, both protocols on one workspace, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from emulated_ranks import Group, missing_gpu
from kernel_pool import KernelPool
from one_sided_check import Batch, dtype_of
from token_pool import LAYERS, PoolOnDevice, TokenPool, Windows

from moe_layer.errors import CapacityError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.timeout(180),
]

AUTO_LIMIT = 16  # the largest T̂ of a Sentinel step
MAX_TOKENS = 40
CYCLES_PER_MS = 1_800_000  # about, at the clock of an H200
STEPS = 10_000


class Stress:
    """A group with a pool of tokens for each layer, on every rank."""

    def __init__(self, ep_size: int, protocol: str, kernel_pool: KernelPool, seed: int, timeout_s: float = 5.0) -> None:
        options = {"sentinel_tokens_per_rank": AUTO_LIMIT} if protocol == "auto" else {}
        self.group = Group(
            ep_size, protocol, LAYERS, pool=kernel_pool, max_tokens_per_rank=MAX_TOKENS, timeout_s=timeout_s, **options
        )
        self.ep_size = ep_size
        size = 256 if ep_size <= 3 else 96
        self.pools = {name: TokenPool(layer, ep_size, seed, size) for name, layer in LAYERS.items()}
        self.sides = {
            name: [PoolOnDevice(pool, rank, device) for rank, device in enumerate(self.group.devices)]
            for name, pool in self.pools.items()
        }

    def warm(self) -> None:
        """Every T̂ of every layer once, with a wait between the phases: no later step is a torch kernel's first, nor
        must the allocator ask for memory, both of which may wait for a GPU on which a rank waits for the next one."""
        everything = tuple(range(self.ep_size))
        for name, layer in LAYERS.items():
            for t_hat in (AUTO_LIMIT, MAX_TOKENS):
                self.group.step(name, Batch((t_hat,) * self.ep_size, t_hat), t_hat)
            for t_hat in range(MAX_TOKENS + 1):
                plan = Windows((t_hat,) * self.ep_size, (t_hat,) * self.ep_size, t_hat)
                counts = [self.pools[name].counts(r, [plan])[0].to(d) for r, d in enumerate(self.group.devices)]
                results, buffers, outputs = [], [], []
                for rank in everything:
                    with self.group.on(rank):
                        torch.cuda._sleep(100)
                        side = self.sides[name][rank]
                        results.append(self.group.comms[name][rank].dispatch(**side.arguments(plan)))
                self.group.check()
                for rank in everything:
                    with self.group.on(rank):
                        buffer = self.group.comms[name][rank].get_combine_input_buffer(dtype_of(layer.partial_dtype))
                        self.sides[name][rank].receive(results[rank], buffer, counts[rank], -1)
                        buffers.append(buffer)
                self.group.synchronize()
                for rank in everything:
                    with self.group.on(rank):
                        side = self.sides[name][rank]
                        outputs.append(side.combine(self.group.comms[name][rank], buffers[rank], t_hat))
                self.group.check()
                for rank in everything:
                    with self.group.on(rank):
                        self.sides[name][rank].check_output(outputs[rank], plan, -1)
        with naming("before the test's own steps"):
            self.check()

    def check(self) -> None:
        self.group.check()
        for sides in self.sides.values():
            for side in sides:
                side.report()
        self.group.check_at_rest()


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds ``what`` to an AssertionError."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


@pytest.mark.parametrize(("ep_size", "steps"), [(2, STEPS), (3, STEPS // 5), (8, STEPS // 10)])
def test_random_steps_with_a_straggler(kernel_pool: KernelPool, ep_size: int, steps: int) -> None:
    """Random T, T̂ and layer, both protocols on one workspace, a rank asleep now and then for up to 10 ms."""
    seed = int(torch.randint(2**31, ()))
    stress = Stress(ep_size, "auto", kernel_pool, seed)
    stress.warm()
    rng = np.random.default_rng(seed)
    # Around the crossover most of the time, so that both protocols meet in every order.
    t_hats = np.where(rng.random(steps) < 0.5, rng.integers(0, MAX_TOKENS + 1, steps), rng.integers(12, 21, steps))
    names = [list(LAYERS)[i] for i in rng.integers(0, len(LAYERS), steps)]
    plans = [stress.pools[name].windows(rng, int(t_hat)) for name, t_hat in zip(names, t_hats)]
    counts = {}
    for name in LAYERS:
        mine = [plan if which == name else plans[names.index(name)] for plan, which in zip(plans, names)]
        counts[name] = [stress.pools[name].counts(r, mine).to(d) for r, d in enumerate(stress.group.devices)]
    sleepers, points = rng.integers(0, ep_size, steps), rng.integers(0, 3, steps)
    # In a fifth of the steps: mostly tens of microseconds, once in 40 up to 10 ms.
    naps = np.where(rng.random(steps) < 0.2, rng.exponential(0.03, steps), 0.0)
    naps = np.where((naps > 0) & (rng.random(steps) < 1 / 40), rng.uniform(1.0, 10.0, steps), naps)

    def nap(step: int, rank: int, point: int) -> None:
        if naps[step] and sleepers[step] == rank and points[step] == point:
            torch.cuda._sleep(int(naps[step] * CYCLES_PER_MS))

    group = stress.group
    for step, (name, plan) in enumerate(zip(names, plans)):
        layer, comms, sides = LAYERS[name], group.comms[name], stress.sides[name]
        results, outputs = [], []
        for rank, comm in enumerate(comms):
            with group.on(rank):
                nap(step, rank, 0)
                results.append(comm.dispatch(**sides[rank].arguments(plan)))
        for rank, comm in enumerate(comms):
            with group.on(rank):
                nap(step, rank, 1)
                buffer = comm.get_combine_input_buffer(dtype_of(layer.partial_dtype))
                sides[rank].receive(results[rank], buffer, counts[name][rank][step], step)
                nap(step, rank, 2)
                outputs.append(sides[rank].combine(comm, buffer, plan.tokens[rank]))
        for rank, output in enumerate(outputs):
            with group.on(rank):
                sides[rank].check_output(output, plan, step)
        if step % 1000 == 999 or step in (0, 10, 100, steps - 1):
            with naming(f"seed {seed}, by step {step}"):
                stress.check()
    assert {bool(t_hat <= AUTO_LIMIT) for t_hat in t_hats} == {True, False}
    group.close()


@pytest.mark.parametrize(
    ("ep_size", "protocol"), [(1, "auto"), (2, "fence"), (2, "sentinel"), (2, "auto"), (4, "auto")]
)
def test_graph_replays_with_changing_inputs(kernel_pool: KernelPool, ep_size: int, protocol: str) -> None:
    """A graph of several steps of two layers, replayed hundreds of times; T varies up to the captured T̂."""
    seed = int(torch.randint(2**31, ()))
    stress = Stress(ep_size, protocol, kernel_pool, seed)
    stress.warm()
    group = stress.group
    rng = np.random.default_rng(seed)
    sequence = [("even", 8), ("odd", 40), ("even", 40), ("even", 3), ("odd", 16), ("odd", 17)]
    replays = 300
    plans = [[stress.pools[name].windows(rng, t_hat) for _ in range(replays)] for name, t_hat in sequence]
    tables = [
        [stress.sides[name][rank].controls(plan) for (name, _), plan in zip(sequence, plans)] for rank in range(ep_size)
    ]
    controls = [[table[0].clone() for table in tables[rank]] for rank in range(ep_size)]
    graphs = []
    group.synchronize()
    for rank in range(ep_size):
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(group.devices[rank]),
            torch.cuda.graph(graph, stream=group.streams[rank], capture_error_mode="thread_local"),
        ):
            for number, (name, t_hat) in enumerate(sequence):
                stress.sides[name][rank].padded_step(group.comms[name][rank], controls[rank][number], t_hat, number)
        graphs.append(graph)

    def replay(first: int, end: int) -> None:
        for n in range(first, end):
            for rank, graph in enumerate(graphs):
                with group.on(rank):
                    for control, table in zip(controls[rank], tables[rank]):
                        control.copy_(table[n])
                    graph.replay()

    replay(0, 3)
    with naming(f"seed {seed}, first replays"):
        stress.check()
    replay(3, replays)
    with naming(f"seed {seed}, {replays} replays"):
        stress.check()
    # Steps outside a graph and replays share the counters on the device.
    for name in LAYERS:
        group.step(name, Batch((7,) * ep_size, 7), 7)
    replay(0, 5)
    with naming(f"seed {seed}, replays after steps without a graph"):
        stress.check()
    group.close()


def test_graph_of_hundreds_of_steps(kernel_pool: KernelPool) -> None:
    """Back to back on the device, as a benchmark runs them: a rank may run ahead as far as the protocol lets it."""
    seed = int(torch.randint(2**31, ()))
    stress = Stress(2, "auto", kernel_pool, seed)
    stress.warm()
    group = stress.group
    rng = np.random.default_rng(seed)
    sides, comms = stress.sides["even"], group.comms["even"]
    t_hats = [int(t) for t in rng.integers(1, MAX_TOKENS + 1, 100)]
    controls = []
    for rank in range(2):
        plans = [stress.pools["even"].windows(np.random.default_rng(seed + n), t) for n, t in enumerate(t_hats)]
        controls.append(sides[rank].controls(plans))
    graphs = []
    group.synchronize()
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(group.devices[rank]),
            torch.cuda.graph(graph, stream=group.streams[rank], capture_error_mode="thread_local"),
        ):
            for number, t_hat in enumerate(t_hats):
                sides[rank].padded_step(comms[rank], controls[rank][number], t_hat, number)
        graphs.append(graph)
    for n in range(20):
        for rank in range(2):
            with group.on(rank):
                if n % 3 == rank:
                    torch.cuda._sleep(CYCLES_PER_MS)
                graphs[rank].replay()
    with naming(f"seed {seed}"):
        stress.check()
    group.close()


def test_first_call_inside_a_capture_is_refused(kernel_pool: KernelPool) -> None:
    """Nothing is allocated or compiled while a graph is captured (DeepEP#404); the message says what to do."""
    group = Group(2, "fence", {"even": LAYERS["even"]}, pool=kernel_pool)
    layer = LAYERS["even"]
    rows = torch.zeros(3, *layer.row, dtype=torch.uint8, device=group.devices[0])
    scale = torch.zeros(3, *(layer.scale or ()), dtype=torch.uint8, device=group.devices[0])
    ids = torch.zeros(3, layer.top_k, dtype=torch.int32, device=group.devices[0])
    weights = torch.zeros(3, layer.top_k, device=group.devices[0])
    group.synchronize()
    with (
        pytest.raises(CapacityError, match="run it once before capturing a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=group.streams[0]),
    ):
        group.comms["even"][0].dispatch(rows, ids, weights, hidden_states_scale=scale, runtime_max_tokens_per_rank=3)
