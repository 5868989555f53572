"""A matrix product whose rows do not depend on their neighbours.

A BLAS picks its kernel, and with it the order of the sum over K, by the number of rows: the same token gets other bits
in another batch, or on another rank. Here every call has the same number of rows: the input goes through in tiles of
``TILE_ROWS``, the last one padded. Within a call of fixed shape the bits of a row depend neither on its place nor on
the other rows (MKL, 1 and 2 threads: 20 000 random shapes with N up to 3000 and K up to 6000, 77 000 more with N = 1,
unaligned operands and NaN neighbours among them; ``tests/gemm/test_matmul.py`` repeats a sample).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# MKL on 2 cores, K 7168, N 2048: 4.4 ms a call at 16 rows, 5.9 at 32, 10.8 at 64; few experts have more than 32 rows.
TILE_ROWS = 32


@contextmanager
def ieee_fp32(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32, whatever the program allows elsewhere (TF32, BF16)."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    settings = backend.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def row_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in fp32: ``[R, K]``, ``[N, K]`` → ``[R, N]``.

    Row r of the result is a function of row r of ``x`` and of ``weight`` alone, to the bit (on one machine, with one
    number of threads).
    """
    rows, n = x.shape[0], weight.shape[0]
    x = x.contiguous()
    columns = weight.contiguous().t()
    tiles = -(-rows // TILE_ROWS)
    out = x.new_empty(tiles * TILE_ROWS, n)
    with ieee_fp32(x.device):
        for start in range(0, tiles * TILE_ROWS, TILE_ROWS):
            tile = x[start : start + TILE_ROWS]
            if tile.shape[0] < TILE_ROWS:
                tile = torch.nn.functional.pad(tile, (0, 0, 0, TILE_ROWS - tile.shape[0]))
            # With out=, which autocast leaves alone.
            torch.mm(tile, columns, out=out[start : start + TILE_ROWS])
    return out[:rows]
