"""The Hopper grouped GEMMs against fp64 on the dequantized operands: all tiles, ragged groups, poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from emulated_ranks import missing_gpu

from moe_layer.gemm.activation import Activation
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor, get_format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
TILES = [(8, 1), (16, 1), (32, 1), (64, 1), (96, 1), (128, 1), (128, 2)]
SWIGLU = Activation()
RAGGED = (3, 0, 17, 257, 64, 1, 0, 129, 300, 65, 128)


def rel_l2(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm()) if truth.numel() else 0.0


@dataclass
class Problem:
    """One grouped GEMM with random operands; gathered rows repeat and lie between rows of NaN."""

    counts: Sequence[int]
    parts: int
    n: int
    k: int
    fmt: str  # "bf16" or "fp8"
    activation: Activation = SWIGLU

    def __post_init__(self) -> None:
        experts, rows, device = len(self.counts), sum(self.counts), "cuda"
        gather = self.parts == 2
        w_fmt = get_format("bf16" if self.fmt == "bf16" else "fp8_128x128")
        q = w_fmt.quantize(torch.randn(experts, self.parts, self.n, self.k, device=device) * self.k**-0.5)
        self.weights = ExpertWeights(w_fmt.name, q.data, q.scale, None, self.k)
        slots = 2 * max(rows // 2, 1) if gather else rows
        x = torch.randn(slots, self.k, device=device) * torch.randn(slots, 1, device=device).exp()
        used = torch.randint(0, max(slots // 2, 1), (rows,), device=device) * 2 if gather else torch.arange(rows)
        if gather:
            x[1::2] = torch.nan
        self.x = get_format(self.fmt).quantize(x.bfloat16())
        capacity = rows + 70
        offsets = torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
        order = torch.full((capacity,), 2**30, dtype=torch.int32, device=device)  # undefined past the last row
        order[:rows] = used.int()
        self.index = ExpertIndex(offsets, order, torch.empty(0, 1, dtype=torch.int32, device=device))
        if not gather:
            padding = torch.full((70, *self.x.data.shape[1:]), torch.nan, device=device).to(self.x.data.dtype)
            scale = self.x.scale
            if scale is not None:
                scale = torch.cat([scale, torch.full((70, scale.shape[1]), torch.nan, device=device)])
            self.x = replace(self.x, data=torch.cat([self.x.data, padding]), scale=scale)

    def truth(self) -> torch.Tensor:
        w_fmt, x_fmt = get_format(self.weights.format), get_format(self.x.format)
        rows = x_fmt.dequantize(self.x).double()
        out, start = [], 0
        for expert, count in enumerate(self.counts):
            numbers = torch.arange(start, start + count, device="cuda")
            taken = rows[self.index.slots[numbers].long() if self.parts == 2 else numbers]
            parts = [taken @ w_fmt.dequantize(self.weights.expert(expert, p)).double().t() for p in range(self.parts)]
            out.append(self.activation(*parts) if self.parts == 2 else parts[0])
            start += count
        return torch.cat(out)


def run(problem: Problem, monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int] | None) -> QuantizedTensor:
    """The kernel's output, poisoned before the run; rows past the last one must keep the poison."""
    from moe_layer.gemm import sm90_backend
    from moe_layer.gemm.tile_choice import Tile

    if tile is not None:
        monkeypatch.setattr(sm90_backend, "choose_tile", lambda *_: Tile(*tile))
    two = problem.parts == 2
    fp8 = two and problem.fmt == "fp8"
    capacity, rows = problem.index.slots.numel(), sum(problem.counts)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    out = torch.empty(capacity, problem.n, dtype=dtype, device="cuda")
    out.view(torch.uint8).fill_(0xFF)
    scale = torch.full((capacity, -(-problem.n // 128)), torch.nan, device="cuda") if fp8 else None
    spec = sm90_backend.grouped_spec(
        problem.weights, capacity, "fp8" if fp8 else "bf16", activation=problem.activation if two else None
    )
    sm90_backend.grouped_gemm(spec, problem.x, problem.weights, problem.index, out, scale)
    assert (out[rows:].view(torch.uint8) == 0xFF).all() and (scale is None or scale[rows:].isnan().all())
    cut = None if scale is None else scale[:rows]
    return QuantizedTensor("fp8" if fp8 else "bf16", out[:rows], cut, None, problem.n)


def check(problem: Problem, got: QuantizedTensor) -> None:
    truth = problem.truth()
    values = get_format(got.format).dequantize(got)
    assert values.isfinite().all()
    if got.format == "bf16":
        assert rel_l2(values, truth) < (2.2e-3 if truth.numel() > 1000 else 4e-3)  # BF16's rounding is 1.7e-3
        worst = (values.double() - truth).norm(dim=1) / truth.norm(dim=1).clamp(min=1e-30)
        assert not truth.numel() or worst.max() < 8e-3
    else:
        # The quantizer's own result but for values that lie on a rounding boundary within FP32's error.
        expected = get_format("fp8").quantize(truth.float())
        assert expected.scale is not None and got.scale is not None
        # The tensor core adds FP8 products with some 13 bits, 128 of them before each promotion to FP32.
        assert torch.allclose(got.scale, expected.scale, rtol=2e-3)
        codes, wanted = (q.data.view(torch.uint8) for q in (got, expected))
        assert (codes != wanted).float().mean() < 5e-2
        assert rel_l2(values, get_format("fp8").dequantize(expected).double()) < 1e-2


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile: tuple[int, int], parts: int, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(sum(tile))
    for n, k in ((256, 512), (448, 640), (192, 144), (272, 128)):
        problem = Problem(RAGGED, parts, n, k, fmt)
        check(problem, run(problem, monkeypatch, tile))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1), (700,), (5000, *[3] * 7), tuple(range(40)), (1,) * 512], ids=len)
def test_groups(counts: tuple[int, ...], tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(counts, 2, 64, 128, "bf16")
    check(problem, run(problem, monkeypatch, tile))


@pytest.mark.parametrize("activation", [Activation(limit=0.5), Activation("situ"), Activation("situ", None, 1.5, 3.0)])
@pytest.mark.parametrize("tile", [(32, 1), (128, 1)], ids=str)
def test_activations(activation: Activation, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem((200, 31), 2, 256, 256, "bf16", activation)
    check(problem, run(problem, monkeypatch, tile))


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_row_does_not_see_its_neighbours(tile: tuple[int, int], fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same row gives the same bits at every place of a tile, among other rows, and from run to run."""
    problem = Problem((300, 1, 77), 2, 256, 640, fmt)
    problem.index.slots[:378] = 0
    first = run(problem, monkeypatch, tile)
    starts = (0, 300, 301)
    for start, stop in zip(starts, (300, 301, 378), strict=True):
        assert (first.data[start:stop].view(torch.uint8) == first.data[start].view(torch.uint8)).all()
    problem.index.slots[:378] = torch.randint(0, 180, (378,), dtype=torch.int32, device="cuda") * 2
    problem.index.slots[150] = 0
    for _ in range(5):
        again = run(problem, monkeypatch, tile)
        assert torch.equal(again.data[150].view(torch.uint8), first.data[0].view(torch.uint8))


def test_graph_replays_follow_the_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem((40, 0, 90), 2, 256, 256, "bf16")
    run(problem, monkeypatch, (64, 1))
    from moe_layer.gemm import sm90_backend

    out = torch.empty(problem.index.slots.numel(), 256, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = problem.index.slots.numel()
        spec = sm90_backend.grouped_spec(problem.weights, rows, "bf16", activation=problem.activation)
        sm90_backend.grouped_gemm(spec, problem.x, problem.weights, problem.index, out, None)
    for counts in ((40, 0, 90), (0, 130, 0), (1, 1, 1)):
        problem.counts = counts
        offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        problem.index.offsets.copy_(offsets)
        out.fill_(torch.nan)
        graph.replay()
        assert rel_l2(out[: sum(counts)], problem.truth()) < 2.2e-3
        assert out[sum(counts) :].isnan().all()


def test_rows_past_two_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets past 2³¹ elements, in the gathered rows and in the output."""
    k, n, slots = 8192, 64, 300_000
    x = torch.empty(slots, k, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 262_144, 299_999, 131_072], dtype=torch.int32, device="cuda")
    x[rows.long()] = torch.randn(4, k, device="cuda").bfloat16()
    problem = Problem((4,), 2, n, k, "bf16")
    problem.x = QuantizedTensor("bf16", x, None, None, k)
    problem.index.slots[:4] = rows
    check(problem, run(problem, monkeypatch, (8, 1)))
