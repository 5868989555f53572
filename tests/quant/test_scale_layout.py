"""Layouts of block scales: round trips, and every byte where an index formula puts it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_layer.errors import TensorError
from moe_layer.quant import quantize
from moe_layer.quant.scale_layout import RowMajor, ScaleLayout, Swizzled128x4

LAYOUTS = [RowMajor(), Swizzled128x4(), Swizzled128x4(fill=127)]
SHAPES = [(1, 1), (128, 4), (127, 3), (129, 5), (300, 448), (1, 224), (0, 8), (384, 12)]


def offset_128x4(row: int, column: int, columns: int) -> int:
    """Where cuBLAS' documentation puts a scale: tile, then ``(row % 32)·16 + (row // 32)·4 + column`` in it."""
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_round_trip(layout: ScaleLayout, shape: tuple[int, int], rng: np.random.Generator) -> None:
    for lead in ((), (3,), (2, 2)):
        scale = torch.from_numpy(rng.integers(0, 256, (*lead, *shape), dtype=np.uint8))
        stored = layout.swizzle(scale)
        assert stored.is_contiguous() and tuple(stored.shape) == (*lead, *layout.shape(*shape))
        back = layout.unswizzle(stored, *shape)
        assert back.is_contiguous() and torch.equal(back, scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_of_128x4(shape: tuple[int, int], rng: np.random.Generator) -> None:
    rows, columns = shape
    scale = rng.integers(0, 256, shape, dtype=np.uint8)
    expected = np.full(-(-rows // 128) * 128 * (-(-columns // 4) * 4), 77, np.uint8)
    for row in range(rows):
        for column in range(columns):
            expected[offset_128x4(row, column, columns)] = scale[row, column]
    stored = Swizzled128x4(fill=77).swizzle(torch.from_numpy(scale))
    np.testing.assert_array_equal(stored.numpy(), expected)


def test_views_and_dtypes(rng: np.random.Generator) -> None:
    """Non-contiguous scales, and E4M3 as well as bytes."""
    q = quantize(torch.from_numpy(rng.standard_normal((130, 640)).astype(np.float32)), "nvfp4")
    assert q.scale is not None
    layout = Swizzled128x4()
    stored = layout.swizzle(q.scale)
    assert stored.dtype == torch.float8_e4m3fn
    assert torch.equal(layout.unswizzle(stored, 130, 40).view(torch.uint8), q.scale.view(torch.uint8))
    wide = torch.from_numpy(rng.integers(0, 256, (130, 80), dtype=np.uint8))
    assert torch.equal(layout.swizzle(wide[:, ::2]), layout.swizzle(wide[:, ::2].contiguous()))


def test_layouts_are_values() -> None:
    assert Swizzled128x4() == Swizzled128x4(fill=0) != Swizzled128x4(fill=1)
    assert {RowMajor(), RowMajor()} == {RowMajor()}


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=repr)
def test_wrong_operands(layout: ScaleLayout) -> None:
    with pytest.raises(TensorError, match=r"one byte each .* got torch.float32"):
        layout.swizzle(torch.zeros(4, 4))
    with pytest.raises(TensorError, match="at least 2 dimension"):
        layout.swizzle(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(TensorError, match="scales of 130 × 5 blocks have shape"):
        layout.unswizzle(torch.zeros(128, 4, dtype=torch.uint8), 130, 5)
