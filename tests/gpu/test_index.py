"""The indexing kernels on a GPU, every variant, against an oracle in NumPy; nothing but their output changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from emulated_ranks import missing_gpu
from kernel_pool import KernelPool

from moe_layer.errors import TensorError
from moe_layer.gemm import index_launch
from moe_layer.gemm.index_launch import IndexSpec, build_index, variants
from moe_layer.gemm.reference import ReferenceBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu()))]

POISON = -0x21524111
GUARD = 64  # words after each output
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Layer:
    """Local experts ``first … first + experts − 1`` of ``num_experts``, or by a random table."""

    experts: int
    top_k: int
    first: int
    num_experts: int
    table: bool = False

    @property
    def kernels(self) -> dict[str, IndexSpec]:
        return variants(self.experts, self.top_k, self.num_experts if self.table else 0)


LAYERS = {
    "one of one": Layer(1, 1, 0, 1),
    "7 from 3": Layer(7, 32, 3, 64),
    "V4.1": Layer(48, 6, 48, 384),
    "V3": Layer(32, 8, 224, 256),
    "K3": Layer(112, 16, 784, 896),
    "all of 384": Layer(384, 22, 0, 384),
    "all of 512": Layer(512, 10, 0, 512),
    "most": Layer(1024, 5, 0, 1024),
    "table": Layer(50, 8, 0, 397, table=True),
}
SLOTS = (1, 31, 33, 2048, 2049, 32768)
PATTERNS = ("random", "zipf", "one expert", "elsewhere", "duplicates", "any int32")


@pytest.fixture(scope="module")
def compiled(kernel_pool: KernelPool) -> Iterator[None]:
    arch = index_launch.device_arch(torch.device("cuda"))
    kernel_pool.compile(
        ("moe_layer.gemm.index_kernel", "build_index_kernels", spec, index_launch.SIGNATURE, arch)
        for layer in LAYERS.values()
        for spec in layer.kernels.values()
    )
    yield


def draw_ids(layer: Layer, slots: int, pattern: str, rng: np.random.Generator) -> np.ndarray:
    """``[slots, top_k]`` int32; an eighth of the slots is empty."""
    shape = (slots, layer.top_k)
    ids = rng.integers(0, layer.num_experts, shape)
    if pattern == "zipf":
        ids = (layer.first + np.minimum(rng.zipf(1.2, shape) - 1, layer.num_experts)) % layer.num_experts
    elif pattern == "one expert":
        ids[:] = layer.first + layer.experts - 1
    elif pattern == "elsewhere":
        ids = rng.choice([-1, layer.num_experts, layer.num_experts + 5], shape)
    elif pattern == "duplicates":
        ids[:] = ids[:, :1]
    elif pattern == "any int32":
        edges = [layer.first - 1, layer.first, layer.first + layer.experts - 1, layer.first + layer.experts]
        ids = rng.choice([INT32_MIN, INT32_MIN + 1, INT32_MAX, -1, *edges], shape)
    ids[rng.random(slots) < 1 / 8] = -1
    return ids.astype(np.int32)


def draw_table(layer: Layer, rng: np.random.Generator) -> np.ndarray | None:
    """A random placement; some entries lie out of range, which means elsewhere as well."""
    if not layer.table:
        return None
    table = rng.choice([-1, -7, layer.experts, INT32_MAX], layer.num_experts)
    table[rng.permutation(layer.num_experts)[: layer.experts]] = rng.permutation(layer.experts)
    return table.astype(np.int32)


def oracle(layer: Layer, ids: np.ndarray, table: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, slots of the rows, rows) from the definition: selections of each expert in turn."""
    wide = ids.astype(np.int64)
    if table is None:
        local = wide - layer.first
    else:
        known = (wide >= 0) & (wide < table.size)
        local = np.where(known, table[np.where(known, wide, 0)], -1)
    flat = np.where((local >= 0) & (local < layer.experts), local, layer.experts).reshape(-1)
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=layer.experts + 1)[: layer.experts]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    order = order[: offsets[-1]]
    rows = np.full(flat.size, -1)
    rows[order] = np.arange(order.size)
    return offsets, order // ids.shape[1], rows


class Case:
    """Ids between weights, as in a dispatch workspace, and guarded outputs."""

    def __init__(self, layer: Layer, ids: np.ndarray, table: np.ndarray | None) -> None:
        self.layer, self.selections = layer, ids.size
        self.routing = torch.full((ids.shape[0], 2 * layer.top_k), POISON, dtype=torch.int32, device="cuda")
        self.ids = self.routing[:, : layer.top_k]
        self.table = None if table is None else torch.from_numpy(table).cuda()
        self.buffers = [
            torch.empty(n + GUARD, dtype=torch.int32, device="cuda") for n in (layer.experts + 1, ids.size, ids.size)
        ]
        self.fill(ids, table)

    def fill(self, ids: np.ndarray, table: np.ndarray | None) -> None:
        self.ids.copy_(torch.from_numpy(ids))
        self.expected = oracle(self.layer, ids, table)

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(POISON)

    def run(self, spec: IndexSpec) -> None:
        offsets, slots, rows = self.buffers
        index_launch.launch(
            spec, self.ids, self.layer.first, self.table, offsets[:-GUARD], slots[:-GUARD],
            rows[:-GUARD].view(-1, self.layer.top_k),
        )  # fmt: skip

    def check(self) -> None:
        for buffer, expected in zip(self.buffers, self.expected):
            got = buffer.cpu().numpy()
            assert np.array_equal(got[: expected.size], expected)
            assert (got[expected.size :] == POISON).all(), "written past its end"


def kernels_for(layer: Layer, selections: int) -> list[IndexSpec]:
    return [spec for spec in layer.kernels.values() if not spec.blocks or selections <= spec.blocks * spec.tile]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_kernel_at_every_size(name: str, pattern: str) -> None:
    layer = LAYERS[name]
    rng = np.random.default_rng()
    for slots in SLOTS:
        table = draw_table(layer, rng)
        case = Case(layer, draw_ids(layer, slots, pattern, rng), table)
        for spec in kernels_for(layer, case.selections):
            case.poison()
            case.run(spec)
            case.check()


@pytest.mark.usefixtures("compiled")
def test_chunks_of_several_tiles() -> None:
    """More selections than the multiprocessors hold in a tile each."""
    layer = LAYERS["V4.1"]
    rng = np.random.default_rng()
    case = Case(layer, draw_ids(layer, 400_001, "random", rng), None)
    case.poison()
    case.run(layer.kernels["grid"])
    case.check()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["V4.1", "K3", "all of 512"])
def test_back_to_back(name: str) -> None:
    """Programmatic launches overlap: 200 of them in turn over two sets of ids, each checked."""
    layer = LAYERS[name]
    rng = np.random.default_rng()
    for slots in (40, 700, 2048, 9000):
        cases = [Case(layer, draw_ids(layer, slots, "random", rng), None) for _ in range(2)]
        for spec in kernels_for(layer, cases[0].selections):
            outputs = []
            for i in range(200):
                case = cases[i % 2]
                case.buffers = [torch.full_like(buffer, POISON) for buffer in case.buffers]
                case.run(spec)
                if i % 9 == 0 or i > 195:
                    outputs.append((i % 2, case.buffers))
            for which, buffers in outputs:
                cases[which].buffers = buffers
                cases[which].check()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("slots", [40, 2048, 20000])
def test_ids_written_just_before(slots: int) -> None:
    """What the kernel ahead wrote is what is read, and the kernel behind overwrites it in time, whatever overlaps."""
    layer = LAYERS["V4.1"]
    rng = np.random.default_rng()
    case = Case(layer, draw_ids(layer, slots, "random", rng), None)
    drawn = [draw_ids(layer, slots, "random", rng) for _ in range(2)]
    sources = [torch.from_numpy(ids).cuda() for ids in drawn]
    (spec, *_) = kernels_for(layer, case.selections)
    outputs = []
    for i in range(60):
        case.buffers = [torch.full_like(buffer, POISON) for buffer in case.buffers]
        case.ids.copy_(sources[i % 2])
        case.run(spec)
        outputs.append(case.buffers)
    for i, buffers in enumerate(outputs):
        case.buffers, case.expected = buffers, oracle(layer, drawn[i % 2], None)
        case.check()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("slots", [8, 500, 2048, 20000])
def test_graph_replay_with_new_ids(slots: int) -> None:
    layer = LAYERS["K3"]
    rng = np.random.default_rng()
    case = Case(layer, draw_ids(layer, slots, "random", rng), None)
    build_index(case.ids, layer.first, layer.experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index = [build_index(case.ids, layer.first, layer.experts) for _ in range(3)]
    for pattern in ("random", "one expert", "elsewhere", "zipf"):
        case.fill(draw_ids(layer, slots, pattern, rng), None)
        for one in index:
            one.offsets.fill_(POISON), one.slots.fill_(POISON), one.rows.fill_(POISON)
        graph.replay()
        offsets, row_slots, rows = case.expected
        for one in index:
            assert np.array_equal(one.offsets.cpu().numpy(), offsets)
            assert np.array_equal(one.slots.cpu().numpy()[: row_slots.size], row_slots)
            assert np.array_equal(one.rows.cpu().numpy().reshape(-1), rows)


@pytest.mark.usefixtures("compiled")
def test_two_streams_at_once() -> None:
    layer = LAYERS["V3"]
    rng = np.random.default_rng()
    cases = [Case(layer, draw_ids(layer, 30000, "random", rng), None) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in cases]
    for case in cases:
        case.poison()
        case.run(layer.kernels["grid"])
    torch.cuda.synchronize()
    for _ in range(50):
        for case, stream in zip(cases, streams):
            with torch.cuda.stream(stream):
                case.poison()
                case.run(layer.kernels["grid"])
    torch.cuda.synchronize()
    for case in cases:
        case.check()


@pytest.mark.parametrize(("slots", "experts"), [(0, 5), (0, 0), (9, 0)])
def test_nothing_to_index(slots: int, experts: int) -> None:
    ids = torch.zeros(slots, 3, dtype=torch.int32, device="cuda")
    index = build_index(ids, 0, experts)
    assert index.offsets.tolist() == [0] * (experts + 1)
    assert index.rows.tolist() == [[-1] * 3] * slots and index.slots.shape == (3 * slots,)


def test_as_the_reference() -> None:
    """The same call, the same result; other than by the oracle also for contiguous ids."""
    ids = torch.randint(-1, 300, (777, 8), dtype=torch.int32, device="cuda")
    table = torch.randperm(256, device="cuda").int() - 200
    for how in ({}, {"local_table": table}):
        got = build_index(ids, 32, 48, **how)
        expected = ReferenceBackend().build_index(ids, 32, 48, **how)
        total = int(expected.offsets[-1])
        assert torch.equal(got.offsets, expected.offsets) and torch.equal(got.rows, expected.rows)
        assert torch.equal(got.slots[:total], expected.slots[:total])


def test_tables_elsewhere_are_refused() -> None:
    ids = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(TensorError, match="local_table lies on cpu, topk_ids on cuda:0"):
        build_index(ids, 0, 4, local_table=torch.zeros(8, dtype=torch.int32))
