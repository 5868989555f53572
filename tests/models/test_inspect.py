"""``moe-layer inspect``'s engine: sizes agree with what is loaded, and no tensor data is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layer import CheckpointError, ConfigError
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.models.checkpoint import Checkpoint
from moe_layer.models.inspect import inspect_checkpoint, print_report
from moe_layer.models.loader import load_layer
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.models.synthetic_releases import RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_a_sound_checkpoint(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = write_checkpoint(tmp_path, release, hidden=160, inter=96, experts=5, layers=2, shards=3)
    loaded = [
        [load_layer(tmp_path, i, placement=ExpertPlacement.contiguous(5, 3), rank=r).nbytes for i in ckpt.moe_layers]
        for r in range(3)
    ]

    def no_data(*args: object) -> None:
        raise AssertionError("inspect reads headers only")

    monkeypatch.setattr(Checkpoint, "tensor", no_data)
    report = json.loads(json.dumps(inspect_checkpoint(tmp_path, ep_size=3)))
    assert report["ok"] and not report["problems"] and not report["missing"] and not report["unexpected"]
    assert report["moe_layers"] == ckpt.moe_layers == [d["layer"] for d in report["layers"]]
    assert (report["files"], report["tensors"]) == (3, len(ckpt.tensors))
    assert report["file_bytes"] == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert [r["experts"] for r in report["ranks"]] == [2, 2, 1]
    for rank, sizes in zip(report["ranks"], loaded):
        assert rank["total_bytes"] == sum(sizes)
        assert rank["total_bytes"] == rank["routed_bytes"] + rank["shared_bytes"] + rank["router_bytes"]


def test_formats_by_group(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v41", hidden=64, inter=32, layers=3)
    report = inspect_checkpoint(tmp_path)
    assert report["announced_format"] == "mxfp4"
    assert report["config"]["swiglu_limit"] == 10.0
    assert report["formats"] == {
        "routed gate_up": {"mxfp4": 3},
        "routed down": {"mxfp4": 3},
        "shared gate_up": {"fp8_32x32": 3},
        "shared down": {"fp8_32x32": 3},
        "router": {"bf16": 3},
    }


def test_one_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "kimi_k3", hidden=64, inter=32, layers=3)
    report = inspect_checkpoint(tmp_path, layer=2, ep_size=2)
    assert report["moe_layers"] == [2] and len(report["layers"]) == 1
    assert report["layers"][0]["module"] == "language_model.model.layers.2.block_sparse_moe"
    with pytest.raises(ConfigError, match=r"layer 0 is not an MoE layer of this kimi_k3: its MoE layers are 1 to 3"):
        inspect_checkpoint(tmp_path, layer=0)


def test_everything_wrong_is_listed(tmp_path: Path) -> None:
    """All of it, not the first; loading would stop there."""
    write_checkpoint(tmp_path, "kimi_k3", hidden=64, inter=32, experts=4, layers=3)
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    block = "language_model.model.layers.{}.block_sparse_moe"
    del tensors[f"{block.format(1)}.experts.2.w1.weight_scale"]
    del tensors[f"{block.format(1)}.gate.e_score_correction_bias"]
    tensors[f"{block.format(2)}.experts.1.w2.bias"] = torch.zeros(4)
    tensors[f"{block.format(2)}.surprise"] = torch.zeros(4)
    tensors[f"{block.format(3)}.routed_expert_norm.weight"] = torch.ones(31)
    tensors[f"{block.format(3)}.experts.3.w3.weight_packed"] = torch.ones(32, 15, dtype=torch.uint8)
    save_file(tensors, str(file))
    report = inspect_checkpoint(tmp_path)
    assert not report["ok"]
    assert report["missing"] == [
        f"{block.format(1)}.gate.e_score_correction_bias",
        f"{block.format(1)}.experts.2.w1.weight_scale",
    ]
    assert report["unexpected"] == [f"{block.format(2)}.surprise", f"{block.format(2)}.experts.1.w2.bias"]
    text = "\n".join(report["problems"])
    for part in (
        "routed_expert_norm.weight is F32 [31]; expected BF16 or F32 or F16 [32]",
        "experts.3.w3.weight_packed is U8 [32, 15]; expected U8 [32, 16] (mxfp4)",
        "missing tensor language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
    ):
        assert part in text
    assert [d["layer"] for d in report["layers"]] == [1, 2, 3]


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, "kimi_k2", hidden=64, inter=32, layers=4, shards=4)
    (tmp_path / "model-00004-of-00004.safetensors").unlink()
    report = inspect_checkpoint(tmp_path)
    assert report["missing_files"] == ["model-00004-of-00004.safetensors"]
    # one line for the file, not one for each of its tensors
    assert len([p for p in report["problems"] if "missing shard" in p]) == 1
    assert not report["ok"] and report["moe_layers"] == ckpt.moe_layers

    third = tmp_path / "model-00003-of-00004.safetensors"
    third.write_bytes(third.read_bytes()[:-1])
    assert any(f"{third}: truncated or damaged" in p for p in inspect_checkpoint(tmp_path)["problems"])
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read as JSON"):
        (tmp_path / "model.safetensors.index.json").write_text("{")
        inspect_checkpoint(tmp_path)


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral", hidden=64, inter=32, layers=2)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    report = inspect_checkpoint(tmp_path)
    assert len(report["layers"]) == 2 and len(report["problems"]) == 1
    assert "no router of an MoE layer 2 of mixtral: missing tensor model.layers.2.block" in report["problems"][0]


def test_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, "deepseek_v3_modelopt", hidden=64, inter=32, experts=5)
    print_report(inspect_checkpoint(tmp_path, ep_size=4))
    out = capsys.readouterr().out
    for part in ("deepseek_v3", "nvfp4", "5 routed, top-2, 1 shared", "0 ", "1–3", "nothing missing"):
        assert part in out
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        inspect_checkpoint(tmp_path)
