"""Grouped GEMMs with packed low-bit weights against fp64 on the dequantized operands: all tiles, codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from emulated_ranks import missing_gpu

from moe_layer.gemm.activation import Activation
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.register_tiles import PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.sm90_spec import token_tiles
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.oracle import decode_e2m1, decode_e8m0, spread
from moe_layer.quant import QuantizedTensor, get_format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
SWIGLU = Activation()
RAGGED = (3, 0, 17, 257, 64, 1, 129)


def rel_l2(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def random_codes(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every code, evenly; E4M3's NaN excepted."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    if name != "mxfp8":
        return codes
    return torch.where((codes & 0x7F) == 0x7F, 0x31, codes).view(torch.float8_e4m3fn)


def random_scales(name: str, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    if name == "int4":
        return (torch.rand(shape, device="cuda") * 0.2 + 0.01).bfloat16()
    codes = torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")
    return codes.view(torch.float8_e4m3fn) if name == "nvfp4" else codes


class Problem:
    """One grouped GEMM with random bytes as weights; gathered rows repeat and lie between rows of NaN."""

    def __init__(
        self, name: str, counts: Sequence[int], parts: int, n: int, k: int,
        *, scales: tuple[int, int] | None = None, magnitude: float = 1.0,
    ) -> None:  # fmt: skip
        fmt = get_format(name)
        low, high = scales or {"nvfp4": (20, 0x7E)}.get(name, (115, 124))
        experts, rows = len(counts), sum(counts)
        self.counts, self.parts, self.n, self.k = counts, parts, n, k
        data = random_codes(name, (experts, parts, n, fmt.data_columns(k)))
        shape = fmt.scale_shape(n, k)
        assert shape is not None
        scale = random_scales(name, (experts, parts, *shape), low, high)
        glob = torch.rand(experts, parts, device="cuda") + 0.5 if fmt.two_level else None
        self.stored = ExpertWeights(name, data, scale, glob, k)
        tiles = RegisterTiles(name, parts, n, k)
        packed = torch.empty(tiles.shape(experts), dtype=torch.uint8, device="cuda")
        shifts = [tiles.pack(data[e], scale[e], out=packed[e])[1] for e in range(experts)]
        shift = torch.stack(shifts)
        factor = tiles.epilogue_factor(shift, glob)
        meta = (t.to("meta") for t in (data, scale))
        self.weights = ExpertWeights(name, *meta, glob, k, tiles, packed, shift, factor)
        slots = 2 * (rows // 2 + 1) if parts == 2 else rows
        x = torch.randn(slots, k, device="cuda") * torch.randn(slots, 1, device="cuda").exp() * magnitude
        used = torch.arange(rows)
        if parts == 2:
            x[1::2] = torch.nan
            used = torch.randint(0, slots // 2, (rows,)) * 2
        self.capacity = rows + 70
        order = torch.full((self.capacity,), 2**30, dtype=torch.int32, device="cuda")  # undefined past the last row
        order[:rows] = used.int()
        if parts == 1:
            x = torch.cat([x, torch.full((70, k), torch.nan, device="cuda")])
        self.x = QuantizedTensor("bf16", x.bfloat16(), None, None, k)
        offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        self.index = ExpertIndex(offsets, order, torch.empty(0, 1, dtype=torch.int32, device="cuda"))

    def values(self, expert: int, part: int) -> torch.Tensor:
        """fp64 ``[N, K]`` weights; those of MX formats may exceed fp32's range."""
        stored = self.stored.expert(expert, part)
        if stored.format not in ("mxfp4", "mxfp8"):
            return get_format(stored.format).dequantize_reference(stored).double()
        assert stored.scale is not None
        data = decode_e2m1(stored.data.cpu()) if stored.format == "mxfp4" else stored.data.cpu().double()
        whole = data * spread(decode_e8m0(stored.scale.cpu()), 1, 32)[:, : data.shape[1]]
        return whole[:, : self.k].cuda()

    def truth(self) -> torch.Tensor:
        out, start = [], 0
        for expert, count in enumerate(self.counts):
            numbers = torch.arange(start, start + count, device="cuda")
            taken = self.x.data[self.index.slots[numbers].long() if self.parts == 2 else numbers].double()
            parts = [taken @ self.values(expert, p).t() for p in range(self.parts)]
            out.append(SWIGLU(*parts) if self.parts == 2 else parts[0])
            start += count
        return torch.cat(out)

    def run(self, monkeypatch: pytest.MonkeyPatch, tokens: int, output: str = "fp32") -> torch.Tensor:
        """The kernel's rows, poisoned before the run; rows past the last one must keep the poison."""
        from moe_layer.gemm import sm90_backend
        from moe_layer.gemm.tile_choice import Tile

        monkeypatch.setattr(sm90_backend, "choose_tile", lambda *_: Tile(tokens, 1))
        dtype = torch.float32 if output == "fp32" else torch.bfloat16
        out = torch.full((self.capacity, self.n), torch.nan, dtype=dtype, device="cuda")
        spec = sm90_backend.grouped_spec(
            self.weights, self.capacity, output, activation=SWIGLU if self.parts == 2 else None,
            token_factors=self.x.global_scale is not None,
        )  # fmt: skip
        sm90_backend.grouped_gemm(spec, self.x, self.weights, self.index, out, None)
        rows = sum(self.counts)
        assert out[rows:].isnan().all()
        return out[:rows]


@pytest.mark.parametrize("parts", [2, 1])
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_every_tile(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP32 sums of exact products: the difference from fp64 is that of FP32 summation."""
    for n, k in ((256, 512), (192, 328), (272, 1152)):
        problem = Problem(name, RAGGED, parts, n, k)
        truth = problem.truth()
        for tokens in token_tiles(name):
            got = problem.run(monkeypatch, tokens)
            assert got.isfinite().all()
            assert rel_l2(got, truth) < 1e-5, (n, k, tokens)


# E4M3 products of large and small scales, E8M0 scales down to 2**-127 and up to what needs a shared exponent.
EXTREMES = {
    "mxfp4": [((0, 24), 2.0**100), ((100, 129), 2.0**-40), ((190, 255), 2.0**-100)],
    "mxfp8": [((0, 24), 2.0**100), ((100, 135), 2.0**-40), ((190, 255), 2.0**-100)],
    "nvfp4": [((1, 12), 1.0), ((0x60, 0x7F), 1.0)],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for scales, magnitude in EXTREMES[name]:
        problem = Problem(name, (9, 40), 1, 256, 512, scales=scales, magnitude=magnitude)
        truth = problem.truth()
        assert 1e-30 < truth.abs().max() < 3e38
        for tokens in (8, 64):
            assert rel_l2(problem.run(monkeypatch, tokens), truth) < 1e-5, (scales, tokens)


@pytest.mark.parametrize("parts", [2, 1])
def test_factors_of_tokens(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of x has an FP32 factor, found through the slot list; or all have one."""
    problem = Problem("nvfp4", RAGGED, parts, 256, 512)
    truth_of = {}
    for kind in ("rows", "one"):
        rows = problem.x.data.shape[0]
        factors = torch.rand(rows, 3, device="cuda")[:, 1:2] + 0.5 if kind == "rows" else torch.full((1,), 0.3).cuda()
        exact = problem.x
        problem.x = replace(exact, data=exact.data.double() * factors)
        truth_of[kind] = problem.truth()
        problem.x = replace(exact, global_scale=factors)
        for tokens in (8, 16, 64, 128):
            assert rel_l2(problem.run(monkeypatch, tokens), truth_of[kind]) < 1e-5, (kind, tokens)
        problem.x = exact


@pytest.mark.parametrize("tokens", [8, 48, 64, 128, 152])
def test_outputs(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 rounds the FP32 sums once; MXFP8 rows hold what the format keeps of them."""
    problem = Problem("mxfp4", RAGGED, 2, 256, 512)
    sums = problem.run(monkeypatch, tokens)
    assert torch.equal(problem.run(monkeypatch, tokens, "bf16"), sums.bfloat16())
    mxfp8 = get_format("mxfp8")
    kept = mxfp8.dequantize_reference(mxfp8.quantize_reference(sums), torch.bfloat16)
    assert torch.equal(problem.run(monkeypatch, tokens, "mxfp8"), kept)


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_a_row_does_not_see_its_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same row gives the same bits at every place of a tile, in every tile, and from run to run."""
    problem = Problem(name, (300, 1, 77), 2, 256, 640)
    problem.index.slots[:378] = 0
    bits = []
    for tokens in token_tiles(name):
        rows = problem.run(monkeypatch, tokens).view(torch.int32)
        for start, stop in ((0, 300), (300, 301), (301, 378)):
            assert (rows[start:stop] == rows[start]).all()
        bits.append(rows[0].clone())
    assert all(torch.equal(row, bits[0]) for row in bits)


@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1), (700,), (900, *[3] * 7), (1,) * 300], ids=len)
def test_groups(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("mxfp4", counts, 2, 64, 128)
    for tokens in (8, 64):
        got = problem.run(monkeypatch, tokens)
        assert not sum(counts) or rel_l2(got, problem.truth()) < 1e-5
