"""row_matmul: a row's bits depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch

from moe_layer.gemm.matmul import TILE_ROWS, ieee_fp32, row_matmul

SHAPES = [(1, 77), (2, 3), (7, 1024), (33, 500), (64, 7168), (192, 448), (448, 192), (1407, 96), (300, 2304)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_against_fp64(n: int, k: int) -> None:
    x, w = torch.randn(70, k), torch.randn(n, k)
    truth = x.double() @ w.double().t()
    error = (row_matmul(x, w).double() - truth).norm() / truth.norm()
    assert error < 1e-6


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_row_does_not_see_place_or_number_or_neighbours(n: int, k: int) -> None:
    w, x = torch.randn(n, k), torch.randn(k)
    alone = bits(row_matmul(x[None], w))[0]
    for rows in (2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS + 5):
        # every place at once
        assert (bits(row_matmul(x.expand(rows, k), w)) == alone).all()
        # neighbours of other magnitudes, and NaN
        for neighbour in (torch.randn(rows, k) * 1e6, torch.full((rows, k), torch.nan)):
            place = int(torch.randint(rows, ()))
            neighbour[place] = x
            assert torch.equal(bits(row_matmul(neighbour, w))[place], alone)


@pytest.mark.usefixtures("threads")
def test_row_does_not_see_addresses() -> None:
    n, k, rows = 190, 333, 40
    w, x = torch.randn(n, k), torch.randn(rows, k)
    expected = bits(row_matmul(x, w))
    for offset in range(1, 16, 3):
        unaligned_w = torch.empty(n * k + 16)[offset : offset + n * k].view(n, k).copy_(w)
        unaligned_x = torch.empty(rows * k + 16)[offset : offset + rows * k].view(rows, k).copy_(x)
        assert torch.equal(bits(row_matmul(unaligned_x, unaligned_w)), expected)
    strided = torch.empty(k, n).copy_(w.t()).t()
    assert torch.equal(bits(row_matmul(x.repeat(1, 2)[:, :k], strided)), expected)


def test_a_plain_product_does_see_the_number_of_rows() -> None:
    """Else this file would test nothing: the BLAS here must be one whose bits depend on the number of rows."""
    w, x = torch.randn(250, 4496), torch.randn(1, 4496)
    products = [bits((x.expand(rows, -1).contiguous() @ w.t())[:1]) for rows in (1, 2, 3, 5, 33, 100)]
    if all(torch.equal(p, products[0]) for p in products):
        pytest.skip("this BLAS gives the same bits for any number of rows")


def test_no_rows() -> None:
    assert row_matmul(torch.zeros(0, 5), torch.randn(3, 5)).shape == (0, 3)


@pytest.mark.parametrize("how", ["medium precision", "autocast"])
def test_stays_fp32_whatever_the_program_allows(how: str) -> None:
    x, w = torch.randn(64, 512), torch.randn(96, 512)
    truth = x.double() @ w.double().t()
    before = torch.get_float32_matmul_precision()
    try:
        if how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert (x @ w.t()).dtype == torch.bfloat16
                got = row_matmul(x, w)
        else:
            torch.set_float32_matmul_precision("medium")
            got = row_matmul(x, w)
            assert torch.get_float32_matmul_precision() == "medium", "the program's setting must be restored"
    finally:
        torch.set_float32_matmul_precision(before)
    assert got.dtype == torch.float32
    assert (got.double() - truth).norm() / truth.norm() < 1e-6


def test_setting_is_restored_after_an_error() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(RuntimeError), ieee_fp32(torch.device("cpu")):
        raise RuntimeError
    assert torch.backends.mkldnn.matmul.fp32_precision == before
