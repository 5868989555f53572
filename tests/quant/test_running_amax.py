"""NVFP4's scale from a running amax: what it sees, forgets and passes over, and how ranks agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from moe_layer.errors import ConfigError, TensorError
from moe_layer.quant import dequantize, get_format, quantize
from moe_layer.quant.running_amax import RunningAmax

LEAST = np.float32(2.0**-117)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_finite_magnitude_so_far(dtype: torch.dtype, rng: np.random.Generator) -> None:
    running = RunningAmax("cpu")
    assert running.scale.item() == LEAST
    seen = np.float32(0)
    for step in range(5):
        values = torch.from_numpy(rng.standard_normal((7, 33)).astype(np.float32) * 2.0**-step).to(dtype)
        values[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
        numbers = values.float().numpy()
        seen = max(seen, np.abs(numbers[np.isfinite(numbers)]).max())
        scale = running.update(values)
        assert scale is running.scale and scale.dim() == 0 and scale.dtype == torch.float32
        assert running.amax.item() == seen
        assert scale.item() == np.float32(seen / np.float32(2688))


def test_decay_forgets_an_outlier() -> None:
    running = RunningAmax("cpu", decay=0.5)
    for x, expected in ((-64.0, 64.0), (1.0, 32.0), (1.0, 16.0), (20.0, 20.0), (0.0, 10.0)):
        running.update(torch.tensor([x]))
        assert running.amax.item() == expected
    running.update(torch.zeros(0, 5))
    assert running.amax.item() == 5.0
    running.reset()
    assert running.amax.item() == 0.0 and running.scale.item() == LEAST


def test_only_bad_values_are_as_nothing() -> None:
    running = RunningAmax("cpu")
    running.update(torch.tensor([math.nan, math.inf]))
    assert running.amax.item() == 0.0 and running.scale.item() == LEAST


def test_the_scale_keeps_its_place(rng: np.random.Generator) -> None:
    """Whoever holds ``scale`` sees updates, which is what a captured graph does; nothing saturates."""
    running = RunningAmax("cpu")
    held, place = running.scale, running.scale.data_ptr()
    for step in range(3):
        x = torch.from_numpy(rng.standard_normal((20, 64)).astype(np.float32) * 10.0**step)
        running.update(x)
        assert held.data_ptr() == place == running.scale.data_ptr()
        q = quantize(x, "nvfp4", global_scale=held)
        # The largest value of all is a block's largest and lands on 6 · 448 · scale, but for rounding.
        at = x.abs().argmax()
        assert math.isclose(dequantize(q).flatten()[at].item(), x.flatten()[at].item(), rel_tol=1e-6)
        _, scales = get_format("nvfp4").to_wire(q)
        assert scales is not None and scales.shape == (20, 4)  # no row brings a scale of its own


def test_errors() -> None:
    for decay in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match="decay must lie in"):
            RunningAmax("cpu", decay=decay)
    running = RunningAmax("cpu")
    with pytest.raises(TensorError, match=r"largest magnitude of torch.int32"):
        running.update(torch.ones(3, dtype=torch.int32))
    with pytest.raises(TensorError, match="the tensor is on meta, but the running amax is on cpu"):
        running.update(torch.ones(3, device="meta"))


def agree_on_rank(ranks: Any) -> tuple[torch.Tensor, float, torch.Tensor]:
    together = RunningAmax("cpu", group=ranks.group)
    together.update(torch.full((4,), 3.0) if ranks.rank else torch.zeros(0))
    alone = RunningAmax("cpu")
    alone.update(torch.tensor([float(1 + ranks.rank)]))
    before = alone.amax.item()
    alone.agree(ranks.group)
    return together.scale, before, alone.scale


def test_ranks_agree(run_ranks: Any) -> None:
    for rank, (together, before, alone) in enumerate(run_ranks(agree_on_rank, 2)):
        assert together.item() == np.float32(np.float32(3) / np.float32(2688))
        assert before == 1 + rank
        assert alone.item() == np.float32(np.float32(2) / np.float32(2688))
