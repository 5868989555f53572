"""Packing on the GPU: the CPU's bytes, without a second copy of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_ranks import missing_gpu

from moe_layer.gemm.register_tiles import CHUNK_BYTES, PACKED_FORMATS, RegisterTiles
from moe_layer.models.loader import load_layer
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.packed_weights import PackedExpertStack
from moe_layer.quant import get_format
from moe_layer.weights import ExpertStack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
]


def stack_of(fmt: str, parts: int, n: int, k: int) -> ExpertStack:
    plain = ExpertStack(2, parts, n, k, fmt)
    for e in range(2):
        for p in range(parts):
            plain.quantize_expert(e, p, torch.randn(n, k))
    return plain


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@pytest.mark.parametrize(("parts", "n", "k"), [(2, 136, 168), (1, 520, 1000), (2, 1024, 3584)])
def test_same_bytes_as_on_the_cpu(fmt: str, parts: int, n: int, k: int) -> None:
    plain, tiles = stack_of(fmt, parts, n, k), RegisterTiles(fmt, parts, n, k)
    here, there = PackedExpertStack(2, tiles), PackedExpertStack(2, tiles, "cuda")
    here.load_state_dict(plain.state_dict())
    there.load_state_dict(plain.state_dict())
    assert there.packed.is_cuda
    for name in ("packed", "shift", "factor"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name
    saved = there.state_dict()
    for name, tensor in plain.state_dict().items():
        assert saved[name].is_cuda
        assert torch.equal(saved[name].cpu().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    moved = here.to("cuda")
    assert torch.equal(moved.packed, there.packed)


@pytest.mark.parametrize("release", ["deepseek_v41", "kimi_k25", "kimi_k3", "deepseek_v3_modelopt"])
def test_peak_memory_of_a_load(release: str, tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, release, hidden=2048, inter=1024, experts=8, values=False)

    def layout(fmt: str, parts: int, rows: int, columns: int) -> RegisterTiles:
        return RegisterTiles(fmt, parts, rows, columns)

    load_layer(ckpt.path, ckpt.moe_layers[-1], device="cuda", layout=layout)  # tables, workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_layer(ckpt.path, ckpt.moe_layers[-1], device="cuda", layout=layout)
    peak = torch.cuda.max_memory_allocated() - before
    expert = sum(get_format(w.format).nbytes((w.parts, w.rows, w.columns)) for w in (loaded.gate_up, loaded.down))
    # The allocator rounds to 512 bytes; an expert of a real model is larger than the temporaries of a chunk.
    assert peak <= loaded.nbytes + max(expert, expert * 2 // 3 + 4 * CHUNK_BYTES) + 2**16
