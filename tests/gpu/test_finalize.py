"""The finalize kernels on a GPU, every variant, against NumPy in FP32, to the bit; guards stay as they were."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from emulated_ranks import missing_gpu

from moe_layer.gemm import finalize_launch
from moe_layer.gemm.finalize_launch import FinalizeSpec, finalize, variants_for
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.reference import ReferenceBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu()))]

BF16, FP32 = torch.bfloat16, torch.float32
TYPES = [(BF16, BF16), (BF16, FP32), (FP32, BF16), (FP32, FP32)]


def numpy_of(t: torch.Tensor) -> np.ndarray:
    """The bits, as uint16 or uint32."""
    view = torch.int16 if t.element_size() == 2 else torch.int32
    return t.contiguous().cpu().view(view).numpy().view(np.uint16 if t.element_size() == 2 else np.uint32)


def widened(t: torch.Tensor) -> np.ndarray:
    bits = numpy_of(t)
    return bits.view(np.float32) if bits.dtype == np.uint32 else bits.view(ml_dtypes.bfloat16).astype(np.float32)


class Case:
    """Rows in a random order, weights between ids, an output whose rows lie apart, everything poisoned with NaN."""

    def __init__(self, slots: int, top_k: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype], pad: int = 8,
                 local: float = 0.3, seed: int | None = None) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        present = rng.random((slots, top_k)) < local
        present[rng.random(slots) < 0.15] = False
        count = int(present.sum())
        row_of = np.full((slots, top_k), -1, np.int32)
        row_of[present] = rng.permutation(count)
        scale = np.ldexp(1.0, rng.integers(-20, 20, (count + 1, 1)))
        values = torch.from_numpy((rng.standard_normal((count + 1, hidden)) * scale).astype(np.float32))
        values[::3, ::5] = -0.0
        values[count:] = torch.nan
        self.storage = torch.full((count + 1, hidden + pad), torch.nan, dtype=dtypes[0], device="cuda")
        self.rows = self.storage[:, :hidden]
        self.rows.copy_(values)
        self.routing = torch.full((slots, 2 * top_k), torch.nan, device="cuda")
        self.weights = self.routing[:, top_k:]
        weights = torch.from_numpy(rng.standard_normal((slots, top_k)).astype(np.float32))
        self.weights.copy_(weights.masked_fill(torch.from_numpy(~present), torch.nan))
        self.target = torch.full((slots + 1, hidden + pad), torch.nan, dtype=dtypes[1], device="cuda")
        self.output = self.target[:slots, :hidden]
        empty = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.index = ExpertIndex(empty, empty, torch.from_numpy(row_of).cuda())

    def poison(self) -> None:
        self.target.view(torch.uint8).fill_(0xFF)

    def check(self) -> None:
        rows, weights = widened(self.rows), self.weights.cpu().numpy()
        row_of = self.index.rows.cpu().numpy()
        slots, hidden = self.output.shape
        total = np.zeros((slots, hidden), np.float32)
        for j in range(row_of.shape[1]):
            here = np.flatnonzero(row_of[:, j] >= 0)
            term = (rows[row_of[here, j]] * weights[here, j, None]).astype(np.float32)
            total[here] = (total[here] + term).astype(np.float32)
        used = (row_of >= 0).any(1)
        bits = total if self.output.dtype == FP32 else total.astype(ml_dtypes.bfloat16)
        whole = np.invert(np.zeros_like(numpy_of(self.target)))  # poison
        whole[:slots, :hidden][used] = bits.view(whole.dtype)[used]
        assert np.array_equal(numpy_of(self.target), whole)

    def kernels(self) -> list[FinalizeSpec]:
        return list(variants_for(self.rows, self.index.rows.shape[1], self.output).values())

    def run(self, spec: FinalizeSpec) -> None:
        finalize_launch.launch(spec, self.rows, self.index, self.weights, self.output)


@pytest.mark.parametrize("dtypes", TYPES, ids=lambda pair: "→".join(str(d).removeprefix("torch.") for d in pair))
@pytest.mark.parametrize(
    ("hidden", "top_k"), [(7168, 8), (5120, 6), (3584, 16), (8, 1), (264, 22), (520, 32), (7, 3), (1, 2), (1407, 5)]
)
def test_to_the_bit(hidden: int, top_k: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for slots in (1, 33, 300):
        case = Case(slots, top_k, hidden, dtypes)
        for spec in case.kernels():
            assert spec.vectors == (hidden % 8 == 0)
            case.poison()
            case.run(spec)
            case.check()


@pytest.mark.parametrize("local", [0.0, 1.0])
def test_all_or_nothing(local: float) -> None:
    case = Case(200, 8, 512, (BF16, BF16), local=local)
    for spec in case.kernels():
        case.poison()
        case.run(spec)
        case.check()


def test_unaligned_rows_go_by_value() -> None:
    case = Case(50, 4, 256, (BF16, BF16), pad=3)
    for spec in case.kernels():
        assert not spec.vectors
        case.poison()
        case.run(spec)
        case.check()


def test_many_slots() -> None:
    """More units than warps, several look-ups each."""
    case = Case(20000, 8, 1024, (BF16, BF16), local=0.15)
    for spec in case.kernels():
        case.poison()
        case.run(spec)
        case.check()


def test_negative_zeros_nan_and_infinities_stay_in_their_slot() -> None:
    index = ExpertIndex(*[torch.zeros(1, dtype=torch.int32, device="cuda")] * 2,
                        torch.tensor([[0], [1], [2], [3]], dtype=torch.int32, device="cuda"))  # fmt: skip
    rows = torch.randn(4, 64, device="cuda")
    rows[0], rows[1], rows[2, 5] = -0.0, torch.nan, torch.inf
    out = torch.zeros(4, 64, device="cuda")
    finalize(rows, index, torch.ones(4, 1, device="cuda"), out)
    assert not out[0].signbit().any() and (out[0] == 0).all()
    assert out[1].isnan().all() and out[2, 5] == torch.inf
    assert torch.equal(out[3], rows[3]) and out[2].isfinite().sum() == 63


def test_as_the_reference() -> None:
    case = Case(500, 8, 2048, (BF16, BF16))
    case.poison()
    expected = case.target.clone()
    ReferenceBackend().finalize(case.rows, case.index, case.weights, expected[:500, :2048])
    assert finalize(case.rows, case.index, case.weights, case.output) is case.output
    assert np.array_equal(numpy_of(case.target), numpy_of(expected))


@pytest.mark.parametrize("slots", [16, 1500])
def test_back_to_back(slots: int) -> None:
    """Programmatic launches overlap: 200 of them in turn over two sets of rows, each compared."""
    cases = [Case(slots, 8, 1024, (BF16, BF16)) for _ in range(2)]
    for case in cases:
        case.poison()
    targets = [cases[i % 2].target.clone() for i in range(200)]
    torch.cuda.synchronize()
    for i, target in enumerate(targets):
        case = cases[i % 2]
        finalize(case.rows, case.index, case.weights, target[:slots, :1024])
    for case, target in zip(cases, targets, strict=False):
        case.target = target
        case.check()
    for i, target in enumerate(targets):
        assert torch.equal(target.view(torch.uint8), targets[i % 2].view(torch.uint8))


@pytest.mark.parametrize("slots", [16, 3000])
def test_graph_replay_with_new_rows(slots: int) -> None:
    case = Case(slots, 8, 1024, (BF16, BF16))
    finalize(case.rows, case.index, case.weights, case.output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        finalize(case.rows, case.index, case.weights, case.output)
    for seed in range(3):
        other = Case(slots, 8, 1024, (BF16, BF16), seed=seed)
        count = min(case.storage.shape[0], other.storage.shape[0]) - 1
        row_of = torch.where(other.index.rows < count, other.index.rows, -1)
        case.index.rows.copy_(row_of)
        case.storage[:count].copy_(other.storage[:count])
        case.routing.copy_(other.routing)
        case.poison()
        graph.replay()
        case.check()


def test_offsets_past_two_gigabytes() -> None:
    """The last rows of an operand and an output of more than 2³² bytes."""
    hidden, slots = 7168, 300_001
    if torch.cuda.mem_get_info()[0] < 3 * slots * hidden * 2:
        pytest.skip("needs 13 GB of GPU memory")
    rows = torch.empty(slots, hidden, dtype=BF16, device="cuda")
    rows[-1].normal_(), rows[0].normal_()
    output = torch.zeros(slots, hidden, dtype=BF16, device="cuda")
    row_of = torch.full((slots, 2), -1, dtype=torch.int32, device="cuda")
    row_of[-1, 1], row_of[0, 0] = slots - 1, 0
    empty = torch.zeros(1, dtype=torch.int32, device="cuda")
    finalize(rows, ExpertIndex(empty, empty, row_of), torch.full((slots, 2), 0.5, device="cuda"), output)
    assert torch.equal(output[-1], rows[-1] * 0.5) and torch.equal(output[0], rows[0] * 0.5)
    assert not output[1:-1].any()


def test_nothing_to_do() -> None:
    empty = torch.zeros(1, dtype=torch.int32, device="cuda")
    for slots in (0, 3):
        index = ExpertIndex(empty, empty, torch.full((slots, 2), -1, dtype=torch.int32, device="cuda"))
        output = torch.full((slots, 16), torch.nan, device="cuda")
        finalize(torch.zeros(0, 16, device="cuda"), index, torch.zeros(slots, 2, device="cuda"), output)
        assert output.isnan().all()
