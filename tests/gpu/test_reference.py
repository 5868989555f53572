"""The PyTorch reference on a GPU: right, and with the same independence of a row from its neighbours as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from layer_oracle import oracle_of, rel_l2
from layers import CONFIGS, config, fill

from moe_layer.gemm.matmul import TILE_ROWS, row_matmul
from moe_layer.gemm.reference import ReferenceBackend
from moe_layer.gemm.rowwise import row_sum, sigmoid, silu, softmax, softplus
from moe_layer.layer import MoELayer
from moe_layer.stages import STAGES, StageTimer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def make(name: str, seed: int, **options: object) -> MoELayer:
    return fill(MoELayer(config(name), device="cuda", backend=ReferenceBackend(), **options), seed)  # type: ignore[arg-type]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.fixture(params=[False, True], ids=["fp32", "tf32 allowed"])
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param else "highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("n", "k"), [(1, 77), (33, 500), (64, 7168), (448, 192), (1407, 96), (384, 5120), (4608, 5120)]
)
def test_a_row_does_not_see_its_place_or_neighbours(n: int, k: int) -> None:
    w, x = torch.randn(n, k, device="cuda"), torch.randn(k, device="cuda")
    alone = row_matmul(x[None], w)
    truth = x.double() @ w.double().t()
    assert rel_l2(alone[0], truth) < 2e-6
    for rows in (2, TILE_ROWS, 3 * TILE_ROWS + 5):
        assert (bits(row_matmul(x.expand(rows, k), w)) == bits(alone)).all()
        neighbours = torch.full((rows, k), torch.nan, device="cuda")
        neighbours[rows // 2] = x
        assert torch.equal(bits(row_matmul(neighbours, w))[rows // 2], bits(alone)[0])


@pytest.mark.parametrize("f", [sigmoid, silu, softplus, softmax, row_sum], ids=lambda f: f.__name__)
def test_rowwise_functions(f: object) -> None:
    x = torch.randn(3001, 896, device="cuda") * 4
    whole = f(x)  # type: ignore[operator]
    for rows in (slice(0, 1), slice(7, 9), slice(1000, 2999)):
        assert torch.equal(bits(f(x[rows])), bits(whole[rows]))  # type: ignore[operator]


@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "fp8_128x128", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers(name: str, weight_format: str) -> None:
    dtype = torch.float32 if weight_format == "fp32" else torch.bfloat16
    layer = make(name, 1, dtype=dtype, weight_format=weight_format)
    x = torch.randn(40, layer.cfg.hidden_size, device="cuda").to(dtype)
    got = layer(x)
    truth = oracle_of(layer)(x.cpu())
    # But for tokens with a value so near a rounding boundary that fp32 falls to its other side.
    most = (got.cpu().double() - truth).norm(dim=1).argsort()[:36]
    assert rel_l2(got[most], truth[most]) < (2e-6 if dtype == torch.float32 else 4e-3)
    assert rel_l2(got, truth) < (1e-5 if dtype == torch.float32 else 3e-2)
    order = torch.randperm(40, device="cuda")
    assert torch.equal(layer(x[order]), got[order])
    for rows in (order[:1], order[3:20]):
        assert torch.equal(layer(x[rows]), got[rows])


def test_build_index_waits_for_nothing() -> None:
    ids = torch.randint(-1, 64, (500, 6), dtype=torch.int32, device="cuda")
    table = torch.randperm(64, device="cuda").int()
    backend = ReferenceBackend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        index = backend.build_index(ids, 8, 16)
        backend.build_index(ids, 0, 64, local_table=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = backend.build_index(ids.cpu(), 8, 16)
    total = int(on_cpu.offsets[-1])
    assert torch.equal(index.offsets.cpu(), on_cpu.offsets) and torch.equal(index.rows.cpu(), on_cpu.rows)
    assert torch.equal(index.slots[:total].cpu(), on_cpu.slots[:total])


def test_stage_timer() -> None:
    layer = make("deepseek_v3", 2)
    timer = layer.profiler = StageTimer("cuda")
    layer(torch.randn(64, 96, device="cuda"))
    seconds = timer.seconds()
    assert tuple(seconds) == STAGES and all(0 < s < 10 for s in seconds.values())
