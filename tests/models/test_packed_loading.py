"""Checkpoints straight into packed weights: the bytes as without packing, an expert at a time, the same refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packing_backend import PackingBackend, layout, live_bytes
from safetensors.torch import load_file, save_file

from moe_layer import FormatError, MoELayer
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.gemm.register_tiles import BLOCK_FORMATS, PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.models.checkpoint import Checkpoint
from moe_layer.models.loader import load_layer
from moe_layer.models.synthetic import SyntheticCheckpoint, write_checkpoint
from moe_layer.models.synthetic_releases import RELEASES
from moe_layer.packed_weights import PackedExpertStack

LOW_BIT = ("deepseek_v3_modelopt", "deepseek_v3_nvfp4", "deepseek_v4", "deepseek_v41", "kimi_k25", "kimi_k3")


def assert_same(packed: ExpertWeights | None, plain: ExpertWeights | None) -> None:
    assert (packed is None) == (plain is None)
    if packed is None or plain is None:
        return
    assert (packed.packed is not None) == (plain.format in (*PACKED_FORMATS, *BLOCK_FORMATS))
    back = packed.unpacked()
    for name in ("data", "scale", "global_scale"):
        got, expected = getattr(back, name), getattr(plain, name)
        assert (got is None) == (expected is None)
        if expected is not None:
            assert got.dtype == expected.dtype
            assert torch.equal(got.contiguous().view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_the_same_bytes(release: str, tmp_path: Path) -> None:
    """Every release, experts over three ranks, a layer in several files; other formats are left as they are."""
    ckpt = write_checkpoint(tmp_path, release, hidden=416, inter=160, experts=10, shards=4, seed=11, values=False)
    options: dict[str, Any] = {"placement": ExpertPlacement.contiguous(10, 3), "rank": 1}
    plain = load_layer(ckpt.path, ckpt.moe_layers[-1], **options)
    packed = load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout, shared_layout=layout, **options)
    assert_same(packed.gate_up, plain.gate_up)
    assert_same(packed.down, plain.down)
    assert_same(packed.shared_gate_up, plain.shared_gate_up)
    assert_same(packed.shared_down, plain.shared_down)
    assert torch.equal(packed.router_weight, plain.router_weight)
    only_routed = load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout, **options)
    assert only_routed.shared_gate_up is None or only_routed.shared_gate_up.packed is None


def fuse(ckpt: SyntheticCheckpoint) -> None:
    """Put the experts' tensors into stacks, as transformers' own layout has them."""
    file = ckpt.path / "model.safetensors"
    tensors = load_file(str(file))
    stacks: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name in [n for n in tensors if re.search(r"\.experts\.\d+\.w[123]\.", n)]:
        block, expert, w, suffix = re.fullmatch(r"(.*\.experts)\.(\d+)\.w([123])\.(.*)", name).groups()
        matrix = "down_proj" if w == "2" else "gate_up_proj"
        full = f"{block}.{matrix}" + {"weight": "", "scale": "_scale_inv"}[suffix]
        stacks.setdefault(full, {})[int(expert), {"1": 0, "3": 1, "2": 0}[w]] = tensors.pop(name)
    for full, parts in stacks.items():
        experts = 1 + max(e for e, _ in parts)
        rows = [torch.cat([parts[e, p] for p in range(2) if (e, p) in parts]) for e in range(experts)]
        tensors[full] = torch.stack(rows)
    save_file(tensors, str(file))


def test_fused_stacks(tmp_path: Path) -> None:
    """Experts that lie in one tensor, their scales in another: still an expert at a time."""
    ckpt = write_checkpoint(tmp_path, "deepseek_v41", hidden=192, inter=96, experts=4, seed=3, values=False)
    plain = load_layer(ckpt.path, ckpt.moe_layers[-1])
    fuse(ckpt)
    packed = load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout)
    assert packed.gate_up.packed is not None
    assert_same(packed.gate_up, plain.gate_up)
    assert_same(packed.down, plain.down)


@pytest.mark.parametrize("release", LOW_BIT)
def test_peak_is_the_packed_weights_and_one_expert(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at while each expert is packed, when most is held: what is packed, and its stored bytes once."""
    ckpt = write_checkpoint(tmp_path, release, hidden=1024, inter=512, experts=6, values=False)
    load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout)  # tables that are made once
    held: list[int] = []
    original = RegisterTiles.pack

    def watching(self: RegisterTiles, data: torch.Tensor, scale: torch.Tensor, **options: Any) -> Any:
        held.append(live_bytes(least=4096) - before)
        return original(self, data, scale, **options)

    monkeypatch.setattr(RegisterTiles, "pack", watching)
    before = live_bytes(least=4096)
    loaded = load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout)
    assert len(held) == 12
    one = sum(t[0].nbytes for t in (loaded.gate_up.data, loaded.gate_up.scale))
    assert loaded.gate_up.packed.nbytes + loaded.down.packed.nbytes < max(held) <= loaded.nbytes + one
    del loaded
    assert live_bytes(least=4096) <= before


def damage(ckpt: SyntheticCheckpoint, name: str, byte: int) -> None:
    file = ckpt.path / "model.safetensors"
    tensors = load_file(str(file))
    (full,) = [n for n in tensors if n.endswith(name) and f"layers.{ckpt.moe_layers[-1]}." in n]
    tensors[full].view(torch.uint8)[1, 1] = byte
    save_file(tensors, str(file))


@pytest.mark.parametrize(("release", "name", "byte", "message"), [
    ("deepseek_v4", "experts.3.w2.scale", 255, "experts.3.w2.scale: scale at [1, 1] is NaN (E8M0 byte 255)"),
    ("kimi_k3", "experts.0.w3.weight_scale", 255, "experts.0.w3.weight_scale: scale at [1, 1] is NaN"),
    ("deepseek_v3_modelopt", "experts.1.gate_proj.weight_scale", 0x7F, "experts.1.gate_proj.weight_scale: scale at"),
    ("deepseek_v3_modelopt", "experts.1.up_proj.weight_scale", 0xB8, "experts.1.up_proj.weight_scale: scale at"),
    ("kimi_k25", "experts.1.down_proj.weight_scale", 0xFF, "experts.1.down_proj.weight_scale: scale at"),
])  # fmt: skip
def test_bad_scales_are_named(release: str, name: str, byte: int, message: str, tmp_path: Path) -> None:
    """As without packing, whose tests damage every tensor: the tensor, the position, the value."""
    ckpt = write_checkpoint(tmp_path, release, hidden=128, inter=64, experts=4)
    damage(ckpt, name, byte)
    errors = []
    for how in (None, layout):
        with pytest.raises(FormatError, match=re.escape(message)) as caught:
            load_layer(ckpt.path, ckpt.moe_layers[-1], layout=how)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_weights_that_cannot_be_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = write_checkpoint(tmp_path, "deepseek_v4", hidden=128, inter=64, experts=4)
    damage(ckpt, "experts.2.w3.scale", 254)
    plain = load_layer(ckpt.path, ckpt.moe_layers[-1])
    loaded = load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout)
    assert re.search(r"experts\.2\.w1\.weight: mxfp4: scales of part 1 reach from", caplog.text)
    assert loaded.gate_up.packed is None and loaded.down.packed is not None
    for name in ("data", "scale"):
        assert torch.equal(getattr(loaded.gate_up, name), getattr(plain.gate_up, name))
    assert_same(loaded.down, plain.down)


@pytest.mark.parametrize("release", LOW_BIT)
def test_from_pretrained(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that wants packed weights gets them without being asked for, and the layer's output is the same."""
    ckpt = write_checkpoint(tmp_path, release, hidden=320, inter=192, experts=8, top_k=2, vocab=50, values=False)
    layer = ckpt.moe_layers[-1]
    plain = MoELayer.from_pretrained(ckpt.path, layer, device="cpu")
    for module in ("moe_layer.backend", "moe_layer.layer"):
        monkeypatch.setattr(f"{module}.select_backend", lambda *args: PackingBackend())
    packed = MoELayer.from_pretrained(ckpt.path, layer, device="cpu")
    for stack in (packed.routed_experts.gate_up, packed.routed_experts.down):
        assert isinstance(stack, PackedExpertStack) and stack.packed is not None and stack.data is None
    x = torch.randn(7, packed.cfg.hidden_size)
    assert torch.equal(packed(x), plain(x))
    saved, expected = packed.state_dict(), plain.state_dict()
    assert list(saved) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(saved[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key


def test_order_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection group of an expert at a time, the groups in the order in which they begin on disk."""
    ckpt = write_checkpoint(tmp_path, "deepseek_v41", hidden=128, inter=64, experts=6, shards=3, values=False)
    read: list[str] = []
    original = Checkpoint.tensor

    def spy(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", spy)
    load_layer(ckpt.path, ckpt.moe_layers[-1], layout=layout)
    with Checkpoint(ckpt.path) as checkpoint:
        position = {name: i for i, name in enumerate(checkpoint.storage_order(list(dict.fromkeys(read))))}
    groups: list[tuple[str, list[int]]] = []
    for name in read:
        found = re.search(r"\.experts\.(\d+)\.w([123])\.(weight|scale)$", name)
        if found is None or "shared" in name:
            continue
        key = f"{found[1]}.{'down' if found[2] == '2' else 'gate_up'}"
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        groups[-1][1].append(position[name])
    assert len(groups) == len({key for key, _ in groups}) == 12
    assert sorted(len(where) for _, where in groups) == [2] * 6 + [4] * 6
    assert [where for _, where in groups] == sorted(sorted(where) for _, where in groups)
