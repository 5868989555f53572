"""What careless callers and damaged configs do to a layer: each was a defect once."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from moe_layer import CheckpointError, ConfigError, ExpertParallel, MoEConfig, MoELayer
from moe_layer.cli import main
from moe_layer.models.synthetic import write_checkpoint


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v3")
    write_checkpoint(folder, "deepseek_v3", values=False)
    return folder


def tokens(layer: MoELayer, count: int = 5) -> torch.Tensor:
    return torch.randn(count, layer.cfg.hidden_size).bfloat16()


def test_interrupt_between_dispatch_and_combine(v3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step leaves the group usable, for other layers too."""
    with ExpertParallel() as ep:
        a, b = (MoELayer.from_pretrained(v3, 3, ep=ep) for _ in range(2))
        x = tokens(a)
        expected = a(x)

        def interrupted(*_: object) -> torch.Tensor:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(a, "_compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                a(x)
        assert torch.equal(b(x), expected)
        assert torch.equal(a(x), expected)


def test_router_without_weights() -> None:
    cfg = MoEConfig("test", hidden_size=64, moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=4)
    layer = MoELayer(cfg)
    layer.load_experts(torch.randn(16, 64, 64), torch.randn(16, 32, 64).transpose(1, 2).contiguous())
    with pytest.raises(CheckpointError, match=r"gate\.weight holds NaN or Inf: never loaded"):
        layer(tokens(layer))
    layer.gate.load(torch.randn(16, 64))
    assert bool(torch.isfinite(layer(tokens(layer))).all())
    layer.gate.weight[3, 5] = torch.inf
    with pytest.raises(CheckpointError, match=r"gate\.weight holds NaN or Inf"):
        layer(tokens(layer))


def test_autocast_changes_nothing(v3: Path) -> None:
    layer = MoELayer.from_pretrained(v3, 3)
    x = tokens(layer)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("change", ["bfloat16", "half", "double"])
def test_casts_leave_the_layer_as_it_is(v3: Path, change: str) -> None:
    """A model's ``.to(dtype)`` must not round the router or reinterpret quantized weights."""
    layer = MoELayer.from_pretrained(v3, 3)
    x = tokens(layer, 200)
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "mlp": copy.deepcopy(layer)})
    getattr(model, change)()
    assert model["norm"].weight.dtype == getattr(torch, change)
    assert model["mlp"].gate.weight.dtype == torch.float32
    assert torch.equal(model["mlp"](x), layer(x))


@pytest.mark.parametrize("release", ["deepseek_v4", "deepseek_v41", "deepseek_v3_modelopt"])
def test_state_dict_into_a_layer_made_from_the_config(release: str, tmp_path: Path) -> None:
    """The shared experts' format follows from the config, not from the routed experts' alone."""
    write_checkpoint(tmp_path, release, values=False)
    cfg = MoEConfig.from_pretrained(tmp_path)
    number = next(i for i in range(cfg.num_hidden_layers) if cfg.is_moe_layer(i) and not cfg.is_hash_layer(i))
    source = MoELayer.from_pretrained(tmp_path, number)
    target = MoELayer(cfg, layer=number)
    target.load_state_dict(source.state_dict())
    x = tokens(source)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_routed_experts", 10**30, "exceeds 65536"),
        ("num_hidden_layers", 10**9, "exceeds 16384"),
        ("num_hidden_layers", -1, "num_hidden_layers must be an integer of at least 0, got -1"),
        ("moe_layer_freq", 0, "moe_layer_freq must be a positive integer, got 0"),
        ("routed_scaling_factor", float("nan"), "routed_scaling_factor must be finite and positive, got nan"),
    ],
)
def test_impossible_config(
    v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object, message: str
) -> None:
    raw = json.loads((v3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
    with pytest.raises(ConfigError, match=message):
        MoEConfig.from_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_impossible_values_by_hand() -> None:
    base = {"hidden_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    for field, value in [("n_shared_experts", -1), ("swiglu_limit", float("nan")), ("hidden_size", True)]:
        with pytest.raises(ConfigError, match=field):
            MoEConfig("test", **(base | {field: value}))  # type: ignore[arg-type]


def test_wrong_arguments_of_from_pretrained(v3: Path) -> None:
    with pytest.raises(ConfigError, match="layer must be an integer, got '3'"):
        MoELayer.from_pretrained(v3, "3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ep must be an ExpertParallel or None, got str"):
        MoELayer.from_pretrained(v3, 3, ep="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "4", "--device", "zzz"], "device 'zzz' is none that PyTorch knows"),
        (["--random", "4", "--output", "/nowhere/y.safetensors"], "not a file in a folder that exists"),
    ],
)
def test_run_with_a_bad_option(
    v3: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["run", str(v3), "--layer", "3", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
