"""FP8 with E8M0 scales for blocks of rows, arranged for registers: MXFP8 with repeated scales, and back bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from packed_weights import products

from moe_layer.errors import FormatError, UnrepresentableError
from moe_layer.gemm.register_tiles import BLOCK_FORMATS, RegisterTiles
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import get_format

BLOCK = {"fp8_32x32": 32, "fp8_128x128_ue8m0": 128}
SHAPES = [(2, 96, 160), (1, 256, 128), (2, 136, 200), (1, 40, 392), (1, 300, 72)]


def draw(fmt: str, parts: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every E4M3 code but NaN, scales of twenty binades."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (parts, n, k), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x31
    shape = (parts, -(-n // BLOCK[fmt]), -(-k // BLOCK[fmt]))
    scale = rng.integers(110, 130, shape, dtype=np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale)


def values(fmt: str, data: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """fp64, element by element from its own block's scale."""
    elements = data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    _, n, k = elements.shape
    rows, columns = np.arange(n) // BLOCK[fmt], np.arange(k) // BLOCK[fmt]
    return elements * 2.0 ** (scale.numpy().astype(np.float64)[:, rows][:, :, columns] - 127)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize(("parts", "n", "k"), SHAPES)
def test_products_and_way_back(fmt: str, parts: int, n: int, k: int) -> None:
    data, scale = draw(fmt, parts, n, k)
    tiles = RegisterTiles(fmt, parts, n, k)
    packed, shift = tiles.pack(data, scale)
    assert packed.shape == tiles.shape(1)[1:] == RegisterTiles("mxfp8", parts, n, k).shape(1)[1:]
    factor = tiles.epilogue_factor(shift, None).double().numpy()
    got = products("mxfp8", parts, n, k, packed.numpy()) * factor[:, None, None]
    assert np.array_equal(got, values(fmt, data, scale))
    again = tiles.unpack(packed, shift)
    assert again[0].dtype == data.dtype and again[1].dtype == torch.uint8 and again[1].shape == scale.shape
    assert torch.equal(again[0].view(torch.uint8), data.view(torch.uint8)) and torch.equal(again[1], scale)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_the_librarys_own_values(fmt: str) -> None:
    fmt_ = get_format(fmt)
    q = fmt_.quantize(torch.randn(200, 264) * torch.logspace(-3, 1, 200)[:, None])
    assert q.scale is not None
    tiles = RegisterTiles(fmt, 1, 200, 264)
    packed, shift = tiles.pack(q.data[None], q.scale[None])
    got = torch.from_numpy(products("mxfp8", 1, 200, 264, packed.numpy())[0]).float() * 2.0 ** shift.float()
    assert torch.equal(got, fmt_.dequantize(q))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_what_cannot_be_arranged(fmt: str) -> None:
    data, scale = draw(fmt, 1, 256, 256)
    nan = scale.clone()
    nan[0, 1, 0] = 255
    with pytest.raises(FormatError, match="NaN"):
        RegisterTiles(fmt, 1, 256, 256).pack(data, nan)
    apart = scale.clone()
    apart[0, 0, 0], apart[0, 1, 1] = 3, 250
    with pytest.raises(UnrepresentableError, match="too far apart"):
        RegisterTiles(fmt, 1, 256, 256).pack(data, apart)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_the_kernel_is_mxfp8s(fmt: str) -> None:
    """A layer's weights in such a format launch what MXFP8 weights of the same shape do."""
    from moe_layer.backend import backend_of
    from moe_layer.gemm.activation import Activation
    from moe_layer.packed_weights import make_stack

    backend = backend_of("sm_90a", fmt, "bf16")
    assert backend.name == "sm90-low-bit"

    def weights(name: str, parts: int, n: int, k: int) -> ExpertWeights:
        return make_stack(1, parts, n, k, name, "meta", backend.weight_layout(name, parts, n, k)).weights()

    specs = [
        backend.grouped_specs(weights(name, 2, 256, 512), weights(name, 1, 512, 256), 40, Activation(), "bf16")
        for name in (fmt, "mxfp8")
    ]
    assert specs[0] == specs[1] and len(specs[0]) == 2 and {s.weights for s in specs[0]} == {"mxfp8"}
