"""Packing of 4-bit codes against compressed-tensors and a plain loop."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

from moe_layer.quant import nibbles


def by_hand(codes: np.ndarray) -> list[int]:
    row = [*codes.tolist(), 0]
    return [row[i] + 16 * row[i + 1] for i in range(0, len(codes), 2)]


@pytest.mark.parametrize("columns", [1, 2, 3, 8, 17, 32])
def test_pack_by_hand(rng, columns):
    codes = torch.from_numpy(rng.integers(0, 16, (2, 3, columns), dtype=np.uint8))
    packed = nibbles.pack(codes)
    for i in range(2):
        for j in range(3):
            assert packed[i, j].tolist() == by_hand(codes[i, j].numpy())
    assert torch.equal(nibbles.unpack(packed, columns), codes)


def test_against_compressed_tensors(rng):
    codes = torch.from_numpy(rng.integers(0, 16, (16, 64), dtype=np.uint8))
    values = torch.from_numpy(codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    packed = pack_fp4_to_uint8(values)
    assert torch.equal(nibbles.pack(codes), packed)
    table = torch.from_numpy(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)).bfloat16()
    assert torch.equal(nibbles.lookup(packed, table, 64), unpack_fp4_from_uint8(packed, 16, 64))


@pytest.mark.parametrize("columns", [512, 511])
def test_lookup_every_byte(rng, columns):
    packed = torch.from_numpy(rng.permutation(256).astype(np.uint8))
    table = torch.from_numpy(rng.standard_normal(16).astype(np.float32)).bfloat16()
    got = nibbles.lookup(packed, table, columns).float().numpy()
    expected = [v for byte in packed.tolist() for v in (table[byte % 16].item(), table[byte // 16].item())]
    np.testing.assert_array_equal(got, np.array(expected[:columns], np.float32))


def test_lookup_of_strided_and_empty_input(rng):
    packed = torch.from_numpy(rng.integers(0, 256, (6, 10), dtype=np.uint8))
    table = torch.arange(16.0).bfloat16()
    got = nibbles.lookup(packed.t()[:, ::2], table, 6)
    expected = nibbles.unpack(packed.t()[:, ::2].clone(), 6)
    assert torch.equal(got, expected.bfloat16())
    assert nibbles.lookup(packed[:0], table, 20).shape == (0, 20)
