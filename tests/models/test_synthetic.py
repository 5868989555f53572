"""The synthetic checkpoints are what other tests compare with, so their values are checked against other libraries."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_layer import ConfigError
from moe_layer.models import synthetic_formats as formats
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.models.synthetic_releases import RELEASES


def test_code_tables() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(formats.E4M3, theirs, equal_nan=True)
    nibbles = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(formats.E2M1.view(np.uint32), nibbles.view(np.uint32))


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (200, 328), (33, 40)])
@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_fp8(rows: int, columns: int, e8m0: bool, block: tuple[int, int]) -> None:
    tensors, values = formats.fp8(block, "s", e8m0=e8m0)(np.random.default_rng(1), rows, columns)
    assert tensors["s"].dtype == (torch.float8_e8m0fnu if e8m0 else torch.float32)
    scale = tensors["s"].float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    assert torch.equal(tensors["weight"].float() * scale, torch.from_numpy(values))


def test_mxfp4_against_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    store = formats.mxfp4("weight_packed", torch.uint8, "weight_scale", torch.uint8)
    tensors, values = store(np.random.default_rng(2), 24, 96)
    unpacked = helpers.unpack_fp4_from_uint8(tensors["weight_packed"], 24, 96, torch.float32)
    scale = torch.from_numpy(tensors["weight_scale"].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert torch.equal(unpacked * scale.repeat_interleave(32, 1), torch.from_numpy(values))


def test_int4_against_compressed_tensors() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    for columns in (64, 100):
        tensors, values = formats.int4(np.random.default_rng(3), 24, columns)
        unpacked = unpack_from_int32(tensors["weight_packed"], 4, torch.Size(tensors["weight_shape"].tolist()))
        scale = tensors["weight_scale"].float().repeat_interleave(32, 1)[:, :columns]
        assert torch.equal(unpacked.float() * scale, torch.from_numpy(values))


def test_nvfp4_global_scales_are_reciprocal() -> None:
    """ModelOpt's factor multiplies, compressed-tensors' divides; both must mean weights of the usual size."""
    for kind in (False, True):
        tensors, values = formats.nvfp4(compressed_tensors=kind)(np.random.default_rng(4), 64, 256)
        codes = tensors["weight_packed" if kind else "weight"].numpy()
        elements = np.stack([codes & 15, codes >> 4], -1).reshape(64, 256).view(ml_dtypes.float4_e2m1fn)
        block = tensors["weight_scale"].float().repeat_interleave(16, 1).numpy()
        product = elements.astype(np.float32) * block
        if kind:
            assert tensors["weight_global_scale"].shape == (1,)
            expected = product / tensors["weight_global_scale"].numpy()
        else:
            assert tensors["weight_scale_2"].shape == ()
            expected = product * tensors["weight_scale_2"].numpy()
        assert np.array_equal(values, expected)
        assert 0.2 < values.std() * 16 < 5


@pytest.mark.parametrize("store", [formats.bf16, formats.int4, *(r.routed for r in RELEASES.values())])
def test_weights_are_of_the_usual_size(store: formats.Store) -> None:
    _, values = store(np.random.default_rng(5), 128, 512, True)
    assert 0.3 < values.std() * 512**0.5 < 3 and np.isfinite(values).all()
    assert len(np.unique(values)) > 20


@pytest.mark.parametrize("release", RELEASES)
def test_same_seed_same_bytes(release: str, tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", release, seed=7, hidden=64, inter=32)
    again = write_checkpoint(tmp_path / "b", release, seed=7, hidden=64, inter=32, values=False)
    other = write_checkpoint(tmp_path / "c", release, seed=8, hidden=64, inter=32)
    raw = [(c.path / "model.safetensors").read_bytes() for c in (first, again, other)]
    assert raw[0] == raw[1] != raw[2]
    assert first.values and not again.values


def test_shards_split_a_layer(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, "kimi_k3", hidden=64, inter=32, shards=3)
    expert = [n for n in ckpt.tensors if ".experts." in n]
    assert len({ckpt.tensors[n] for n in expert}) > 1
    loaded = {n: f for f in set(ckpt.tensors.values()) for n in load_file(str(tmp_path / f))}
    assert loaded == ckpt.tensors


def test_unknown_release() -> None:
    with pytest.raises(ConfigError, match=r"unknown release 'gpt2'; known: deepseek_v2, .*qwen3_moe"):
        write_checkpoint("/nonexistent", "gpt2")
