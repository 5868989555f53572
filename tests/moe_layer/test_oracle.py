"""The fp64 oracle of `demo` and `run --check` is itself held to independent number formats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_layer import oracle
from moe_layer.config import MoEConfig


def values(seed: int, n: int = 4096) -> torch.Tensor:
    """Magnitudes over many binades, zeros of both signs, and ties of both 4- and 8-bit grids."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-14, 10, (n,), generator=generator).double())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0**-10, 3 * 2.0**-10, 17 / 16, 19 / 16, 1e9, -1e9])
    return torch.cat([x, ties.double(), -ties.double(), torch.tensor([0.0, -0.0], dtype=torch.float64)])


def test_e4m3_rounds_as_torch_does() -> None:
    x = values(1)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(oracle.e4m3(x), expected)


def test_e2m1_rounds_as_ml_dtypes_does() -> None:
    x = values(2)
    expected = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert np.array_equal(oracle.e2m1(x).numpy(), expected)


def test_stored_codes_are_read_as_ml_dtypes_reads_them() -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = oracle.decode_e2m1(torch.from_numpy(codes)[None])[0].numpy()
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
    assert np.array_equal(got, nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    scales = oracle.decode_e8m0(torch.from_numpy(codes[:255])).numpy()
    assert np.array_equal(scales, codes[:255].view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


@pytest.mark.parametrize(
    ("name", "limit"), [("bf16", 0.0024), ("fp8", 0.035), ("mxfp8", 0.035), ("mxfp4", 0.16), ("nvfp4", 0.12)]
)
def test_round_to_stays_within_the_format(name: str, limit: float) -> None:
    x = torch.randn(7, 200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rounded = oracle.round_to(x, name)
    assert rounded.shape == x.shape
    assert 0 < oracle.relative_l2(rounded, x) < limit
    assert torch.equal(
        oracle.round_to(torch.zeros(2, 64, dtype=torch.float64), name), torch.zeros(2, 64, dtype=torch.float64)
    )


def test_mx_scale_is_the_floor() -> None:
    """amax 7 → scale 2^(2−8): 7 lies at 448 of E4M3; 7.9 would lie at 505 and saturates at 448."""
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0], x[0, 1] = 7.9, 1.0
    assert oracle.round_to(x, "mxfp8")[0, :2].tolist() == [7.0, 1.0]


def test_relative_l2() -> None:
    a = torch.tensor([3.0, 4.0])
    assert oracle.relative_l2(a, a) == 0
    assert oracle.relative_l2(a * 1.01, a) == pytest.approx(0.01, rel=1e-6)
    assert oracle.relative_l2(torch.tensor([3.0, math.nan]), a) == math.inf
    assert oracle.relative_l2(torch.tensor([1.0, 0.0]), torch.zeros(2)) == math.inf
    assert oracle.relative_l2(torch.empty(0, 4), torch.empty(0, 4)) == 0


def config(**changes: object) -> MoEConfig:
    base: dict[str, object] = {"model_type": "t", "hidden_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 8}
    return MoEConfig(**{**base, "num_experts_per_tok": 2, **changes})  # type: ignore[arg-type]


def test_group_limit_and_scores() -> None:
    scores = [0.9, 0.0, 0.5, 0.5, 0.1, 0.2, 0.3, 0.4]
    assert oracle.choose(scores, config()) == [0, 2]
    # Group sums of the two best: 0.9, 1.0, 0.3, 0.7; the best single score is in group 0.
    assert oracle.choose(scores, config(n_group=4, topk_group=1)) == [2, 3]
    assert oracle.choose(scores, config(n_group=4, topk_group=1, group_score="max")) == [0, 1]
    for kind, function in {
        "softmax": lambda v: torch.softmax(v, -1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda v: torch.nn.functional.softplus(v).sqrt(),
    }.items():
        logits = torch.randn(9, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 5
        assert oracle.score(logits.tolist(), kind) == pytest.approx(function(logits).tolist(), rel=1e-12)
