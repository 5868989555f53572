"""Elementwise functions and sums: right, and independent of place, number and threads to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from moe_layer.errors import ConfigError
from moe_layer.gemm import rowwise
from moe_layer.gemm.activation import Activation

TRUTH = {
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "softplus": torch.nn.functional.softplus,
}
SPECIAL = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 87.0, -87.0, 104.0, -104.0, 3e38, math.inf, math.nan])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def functions() -> dict[str, object]:
    swiglu, situ = Activation("swiglu", limit=2.0), Activation("situ")
    return {
        **{name: getattr(rowwise, name) for name in TRUTH},
        "swiglu": lambda x: swiglu(x, x.flip(-1)),
        "situ": lambda x: situ(x, x * 3),
    }


@pytest.mark.parametrize("name", TRUTH)
def test_values(name: str) -> None:
    x = torch.randn(4000) * 5
    truth = TRUTH[name](x.double())
    assert ((getattr(rowwise, name)(x).double() - truth).abs() <= 4e-7 * truth.abs() + 1e-7).all()


@pytest.mark.parametrize("name", TRUTH)
def test_limits(name: str) -> None:
    x = torch.tensor([-200.0, 200.0, math.inf, math.nan])
    truth = TRUTH[name](x.double())
    torch.testing.assert_close(getattr(rowwise, name)(x).double(), truth, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_an_element_does_not_see_its_place(name: str) -> None:
    f = getattr(rowwise, name)
    x = torch.cat([torch.randn(70_000) * 4, SPECIAL])
    x = x[torch.randperm(x.numel())]
    whole = bits(f(x))
    for start in (0, 1, 3, 7, 13, 500):
        for length in (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 100, 3001, 65_000):
            part = x[start : start + length]
            expected = whole[start : start + length]
            assert torch.equal(bits(f(part)), expected)
            assert torch.equal(bits(f(part.clone())), expected)
    grid = x[:4000].view(40, 100)
    assert torch.equal(bits(f(grid.t()).t()), whole[:4000].view(40, 100))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("act", [Activation(), Activation(limit=1.5), Activation("situ")], ids=repr)
def test_an_activation_does_not_see_neighbours(act: Activation) -> None:
    gate, up = torch.randn(50, 193) * 3, torch.randn(50, 193) * 30
    whole = bits(act(gate, up))
    for row in (0, 1, 17, 49):
        assert torch.equal(bits(act(gate[row : row + 1], up[row : row + 1]))[0], whole[row])
    assert torch.equal(bits(act(gate[:, 5:23], up[:, 5:23])), whole[:, 5:23])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 384, 896, 3584, 40_001])
def test_row_sum(n: int) -> None:
    x = torch.randn(9, n)
    truth = x.double().sum(-1)
    got = rowwise.row_sum(x)
    assert ((got.double() - truth).abs() <= 1e-6 * x.double().abs().sum(-1)).all()
    assert torch.equal(bits(rowwise.row_sum(x[4:5])), bits(got)[4:5])
    assert torch.equal(bits(rowwise.row_sum(x[::2])), bits(got)[::2])


def test_row_sum_of_nothing() -> None:
    assert torch.equal(rowwise.row_sum(torch.zeros(3, 0)), torch.zeros(3))


@pytest.mark.parametrize("n", [1, 6, 64, 896])
def test_softmax(n: int) -> None:
    x = torch.randn(11, n) * 20
    got = rowwise.softmax(x)
    torch.testing.assert_close(got.double(), x.double().softmax(-1), rtol=2e-6, atol=1e-12)
    assert torch.equal(bits(rowwise.softmax(x[3:4])), bits(got)[3:4])


@pytest.mark.parametrize("limit", [None, 0.75, 10.0])
def test_swiglu(limit: float | None) -> None:
    """The formula of models.md §3, in fp64; the clamp must act on both sides of up and on the upper side of gate."""
    gate, up = torch.randn(3000).double() * 12, torch.randn(3000).double() * 12
    g, u = gate, up
    if limit is not None:
        g = torch.minimum(g, torch.tensor(limit, dtype=torch.float64))
        u = torch.maximum(torch.minimum(u, torch.tensor(limit, dtype=torch.float64)), torch.tensor(-limit).double())
    truth = g / (1 + (-g).exp()) * u
    torch.testing.assert_close(Activation(limit=limit)(gate, up), truth, rtol=1e-12, atol=1e-14)


def test_situ() -> None:
    gate, up = torch.randn(3000).double() * 8, torch.randn(3000).double() * 60
    truth = 4 * torch.tanh(gate / 4) / (1 + (-gate).exp()) * (25 * torch.tanh(up / 25))
    torch.testing.assert_close(Activation("situ")(gate, up), truth, rtol=1e-12, atol=1e-14)


def test_unknown_activation() -> None:
    with pytest.raises(ConfigError, match="unknown activation 'gelu'; known: swiglu, situ"):
        Activation("gelu")
