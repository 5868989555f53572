"""Checkpoints packed on a GPU, an expert while the next one is read: the bits of a load on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from emulated_ranks import missing_gpu

from moe_layer.gemm.register_tiles import RegisterTiles
from moe_layer.models.loader import LayerTensors, load_layer
from moe_layer.models.synthetic import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
]


def packed(folder: Path, layer: int, device: str) -> LayerTensors:
    return load_layer(folder, layer, device=device, progress=False, layout=lambda *shape: RegisterTiles(*shape))


@pytest.mark.parametrize("release", ["deepseek_v41", "kimi_k25", "deepseek_v3_nvfp4"])
def test_loads_are_the_cpus(release: str, tmp_path: Path) -> None:
    """Experts of some MiB, so that copies and packing do overlap; the packed bits are compared, all of them."""
    written = write_checkpoint(tmp_path, release, hidden=1024, inter=768, experts=24, shards=3, values=False)
    layer = written.moe_layers[-1]
    expected = packed(tmp_path, layer, "cpu")
    for _ in range(3):
        torch.cuda.empty_cache()
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(0xA5)  # what new tensors hold
        found = packed(tmp_path, layer, "cuda")
        for name in ("gate_up", "down"):
            mine, theirs = getattr(found, name), getattr(expected, name)
            for part in ("packed", "shift", "factor", "global_scale"):
                a, b = getattr(mine, part), getattr(theirs, part)
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a.cpu(), b), (name, part)


def test_experts_that_cannot_be_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scales too far apart in the middle of a load: all experts are kept as stored, none of them damaged."""
    from safetensors.torch import load_file, save_file

    written = write_checkpoint(tmp_path, "deepseek_v41", hidden=256, inter=256, experts=6, shards=1, values=False)
    layer = written.moe_layers[-1]
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(str(file))
    name = next(n for n in tensors if f"layers.{layer}." in n and "experts.3." in n and n.endswith("scale"))
    bits = tensors[name].view(torch.uint8)
    bits[0, 0], bits[1, 0] = 1, 250
    save_file(tensors, str(file), {"format": "pt"})
    load = partial(packed, tmp_path, layer)
    expected, found = load("cpu"), load("cuda")
    assert "not packed" in caplog.text
    for stack in ("gate_up", "down"):
        a, b = getattr(found, stack), getattr(expected, stack)
        for local in range(6):
            for mine, theirs in zip(a.stored(local), b.stored(local)):
                assert mine is not None and theirs is not None
                assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
