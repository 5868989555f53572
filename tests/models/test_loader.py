"""Every release layout: what is loaded means what was written, for any split over ranks, and nothing else is read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layer import ConfigError
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.models import checkpoint as checkpoint_module
from moe_layer.models import loader as loader_module
from moe_layer.models.checkpoint import Checkpoint
from moe_layer.models.config import read_config
from moe_layer.models.loader import LayerTensors, load_layer
from moe_layer.models.synthetic import LayerValues, SyntheticCheckpoint, write_checkpoint
from moe_layer.models.synthetic_releases import RELEASES
from moe_layer.quant import dequantize

FORMATS = {
    "deepseek_v2": ("bf16", "bf16"), "deepseek_v3": ("fp8_128x128", "fp8_128x128"),
    "deepseek_v3_modelopt": ("nvfp4", "nvfp4"), "deepseek_v3_nvfp4": ("nvfp4", "bf16"),
    "deepseek_v3_fused": ("bf16", "bf16"), "deepseek_v32": ("fp8_128x128", "fp8_128x128"),
    "deepseek_v4": ("mxfp4", "fp8_128x128_ue8m0"), "deepseek_v4_base": ("fp8_128x128", "fp8_128x128"),
    "deepseek_v41": ("mxfp4", "fp8_32x32"), "kimi_k2": ("fp8_128x128", "fp8_128x128"),
    "kimi_k2_thinking": ("int4", "bf16"), "kimi_k25": ("int4", "bf16"), "kimi_linear": ("bf16", "bf16"),
    "kimi_k3": ("mxfp4", "bf16"), "mixtral": ("bf16", None), "qwen3_moe": ("bf16", None),
}  # fmt: skip
"""Release → formats of routed and shared experts (models.md's table of tensors on disk)."""


def check_weights(weights: ExpertWeights | None, values: list[torch.Tensor] | None) -> None:
    """``values``: ``[E_local, N, K]`` of each part."""
    if weights is None:
        assert values is None
        return
    assert values is not None
    assert (weights.num_local_experts, weights.parts) == (values[0].shape[0], len(values))
    for e in range(weights.num_local_experts):
        for part, expected in enumerate(values):
            # exact but for NVFP4's global scale, whose reciprocal is rounded once more
            rtol = 2e-7 if weights.format == "nvfp4" else 0
            torch.testing.assert_close(dequantize(weights.expert(e, part)), expected[e], rtol=rtol, atol=0)


def check_layer(loaded: LayerTensors, values: LayerValues, experts: list[int]) -> None:
    assert list(loaded.experts) == experts
    check_weights(loaded.gate_up, [values.gate[experts], values.up[experts]])
    check_weights(loaded.down, [values.down[experts]])
    if values.shared_gate is None:
        assert loaded.shared_gate_up is None and loaded.shared_down is None
    else:
        check_weights(loaded.shared_gate_up, [values.shared_gate[None], values.shared_up[None]])
        check_weights(loaded.shared_down, [values.shared_down[None]])
    for ours, theirs in (
        (loaded.router_weight, values.router),
        (loaded.router_bias, values.router_bias),
        (loaded.router_bias_vl, values.router_bias_vl),
        (loaded.tid2eid, values.tid2eid),
        (loaded.latent_down, values.latent_down),
        (loaded.latent_norm, values.latent_norm),
        (loaded.latent_up, values.latent_up),
    ):
        assert (ours is None) == (theirs is None)
        assert theirs is None or torch.equal(ours.to(theirs.dtype), theirs)
    if values.input_scales is None:
        assert loaded.gate_up_input_scale is None and loaded.down_input_scale is None
    else:
        expected = values.input_scales[experts]
        torch.testing.assert_close(loaded.gate_up_input_scale, expected[:, :2].amax(1), rtol=2e-7, atol=0)
        torch.testing.assert_close(loaded.down_input_scale, expected[:, 2], rtol=2e-7, atol=0)


@pytest.fixture(params=sorted(RELEASES))
def ckpt(request: pytest.FixtureRequest, tmp_path: Path) -> SyntheticCheckpoint:
    """K and N are no multiples of 128 (nor of 64), and a layer lies in several files."""
    return write_checkpoint(tmp_path, request.param, hidden=416, inter=160, experts=10, layers=2, shards=4, seed=11)


def test_values(ckpt: SyntheticCheckpoint, request: pytest.FixtureRequest) -> None:
    for layer in ckpt.moe_layers:
        loaded = load_layer(ckpt.path, layer)
        check_layer(loaded, ckpt.values[layer], list(range(10)))
        shared = loaded.shared_gate_up.format if loaded.shared_gate_up else None
        assert (loaded.gate_up.format, shared) == FORMATS[request.node.callspec.params["ckpt"]]


@pytest.mark.parametrize("ep_size", [3, 12])
def test_each_rank_loads_its_experts_and_reads_no_others(
    ckpt: SyntheticCheckpoint, ep_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten experts over 3 ranks (4, 3, 3) and over 12 (two ranks have none)."""
    read: list[tuple[str, object]] = []
    original = checkpoint_module.Checkpoint._get

    class Part:
        """Records which experts of a stack are read."""

        def __init__(self, name: str, inner: object) -> None:
            self.name, self.inner = name, inner

        def __getattr__(self, attribute: str) -> object:
            return getattr(self.inner, attribute)

        def __getitem__(self, index: object) -> torch.Tensor:
            read.append((self.name, index))
            return self.inner[index]

    def spy(self: Checkpoint, name: str, method: str) -> object:
        if method == "get_tensor":
            read.append((name, None))
            return original(self, name, method)
        return Part(name, original(self, name, method))

    monkeypatch.setattr(checkpoint_module.Checkpoint, "_get", spy)
    layer = ckpt.moe_layers[-1]
    placement = ExpertPlacement.contiguous(10, ep_size)
    seen = []
    for rank in range(ep_size):
        read.clear()
        loaded = load_layer(ckpt.path, layer, placement=placement, rank=rank)
        experts = placement.local_experts(rank)
        check_layer(loaded, ckpt.values[layer], experts)
        names = [(n.split(".experts.")[1], i) for n, i in read if ".experts." in n]
        touched = {i if n.split(".")[0].endswith("_proj") else int(n.split(".")[0]) for n, i in names}
        assert touched == set(experts)
        assert all(f".{layer}." in n for n, _ in read)
        # every tensor once; gate and up share a stack
        assert max(map(read.count, read), default=0) <= 2
        seen += experts
    assert seen == list(range(10))


def test_any_placement(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, "deepseek_v41", hidden=64, inter=32, experts=6)
    placement = ExpertPlacement.from_table([1, 0, 1, 0, 0, 1], 2)
    for rank, experts in ((0, [1, 3, 4]), (1, [0, 2, 5])):
        check_layer(load_layer(tmp_path, 0, placement=placement, rank=rank), ckpt.values[0], experts)


def test_more_than_512_experts(tmp_path: Path) -> None:
    """Kimi-K3 has 896; llama.cpp had a fixed maximum of 512 (llama.cpp#26185)."""
    ckpt = write_checkpoint(tmp_path, "kimi_k3", hidden=64, inter=32, experts=896, top_k=16)
    placement = ExpertPlacement.contiguous(896, 8)
    loaded = load_layer(tmp_path, 1, placement=placement, rank=7)
    check_layer(loaded, ckpt.values[1], list(range(784, 896)))


def test_e8m0_scales_are_bytes_not_numbers(tmp_path: Path) -> None:
    """vllm#43416: a numeric cast of E8M0 to uint8 turns 2⁻⁷ into 0. Every byte but NaN comes through as it is."""
    write_checkpoint(tmp_path, "deepseek_v4", hidden=64 * 32, inter=32, experts=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    name = "layers.1.ffn.experts.1.w3.scale"
    scale = torch.arange(32 * 64, dtype=torch.int32).remainder(255).to(torch.uint8).view(32, 64)
    tensors[name] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, str(file))
    loaded = load_layer(tmp_path, 1)
    assert torch.equal(loaded.gate_up.scale[1, 1], scale)


def test_kimi_k3_scales_declared_as_e8m0(tmp_path: Path) -> None:
    """U8 or F8_E8M0, the byte is the same."""
    ckpt = write_checkpoint(tmp_path, "kimi_k3", hidden=128, inter=64, experts=3)
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    for name in list(tensors):
        if name.endswith(".weight_scale"):
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
    save_file(tensors, str(file))
    check_layer(load_layer(tmp_path, 1), ckpt.values[1], [0, 1, 2])


def test_fp32_scales_keep_every_bit(tmp_path: Path) -> None:
    """sglang#39193, transformers#47030: scales that are no powers of two are neither rounded nor turned into UE8M0."""
    write_checkpoint(tmp_path, "deepseek_v3", hidden=256, inter=128, experts=2)
    stored = load_file(str(tmp_path / "model.safetensors"))
    loaded = load_layer(tmp_path, 3)
    for e in range(2):
        for part, projection in enumerate(("gate_proj", "up_proj")):
            scale = stored[f"model.layers.3.mlp.experts.{e}.{projection}.weight_scale_inv"]
            mantissa, _ = np.frexp(scale.numpy())
            assert (mantissa != 0.5).any()
            assert torch.equal(loaded.gate_up.scale[e, part], scale)


def test_nvfp4_global_scales_stay_fp32(tmp_path: Path) -> None:
    """vllm#34577: in BF16 they lose their value. compressed-tensors' reciprocal is inverted once."""
    for release in ("deepseek_v3_modelopt", "deepseek_v3_nvfp4"):
        write_checkpoint(tmp_path / release, release, hidden=64, inter=32, experts=2)
        stored = load_file(str(tmp_path / release / "model.safetensors"))
        loaded = load_layer(tmp_path / release, 3)
        base = "model.layers.3.mlp.experts.1.up_proj"
        if release == "deepseek_v3_modelopt":
            expected = stored[f"{base}.weight_scale_2"].item()
        else:
            expected = 1.0 / stored[f"{base}.weight_global_scale"].item()
        assert loaded.gate_up.global_scale.dtype == torch.float32
        assert loaded.gate_up.global_scale[1, 1].item() == np.float32(expected)
        assert loaded.gate_up.global_scale[1, 1] != loaded.gate_up.global_scale[1, 1].bfloat16()


def test_nvfp4_without_any_input_scales(tmp_path: Path) -> None:
    """Weight-only quantization: activations get scales of their own, so none need be stored."""
    ckpt = write_checkpoint(tmp_path, "deepseek_v3_modelopt", hidden=64, inter=32, experts=3)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(str(file)).items() if not n.endswith(".input_scale")}, str(file))
    values = ckpt.values[3]
    values.input_scales = None
    check_layer(load_layer(tmp_path, 3), values, [0, 1, 2])


def test_nvfp4_block_scales_may_have_underflowed(tmp_path: Path) -> None:
    """A block of small values has an E4M3 scale of zero in released checkpoints, which says: all zero."""
    write_checkpoint(tmp_path, "deepseek_v3_modelopt", hidden=64, inter=32, experts=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    tensors["model.layers.3.mlp.experts.1.down_proj.weight_scale"].view(torch.uint8)[5, 1] = 0
    save_file(tensors, str(file))
    values = dequantize(load_layer(tmp_path, 3).down.expert(1, 0))
    assert not values[5, 16:32].any() and values[5, :16].any()


@pytest.mark.parametrize(("dtype", "block"), [(torch.float8_e4m3fn, 128), (torch.int8, 32)])
def test_quantized_stacks_of_transformers(tmp_path: Path, dtype: torch.dtype, block: int) -> None:
    """transformers' FP8 and FP4 experts in memory: gate_up_proj and gate_up_proj_scale_inv."""
    release = "deepseek_v3" if dtype == torch.float8_e4m3fn else "deepseek_v4"
    ckpt = write_checkpoint(tmp_path, release, hidden=256, inter=128, experts=3)
    layer = ckpt.moe_layers[-1]
    tensors = load_file(str(tmp_path / "model.safetensors"))
    names, suffix = (("w1", "w3", "w2"), "scale") if dtype == torch.int8 else (None, "weight_scale_inv")
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    block_name = f"layers.{layer}.ffn" if dtype == torch.int8 else f"model.layers.{layer}.mlp"

    def stack(projection: str, which: str) -> torch.Tensor:
        parts = [tensors.pop(f"{block_name}.experts.{e}.{projection}.{which}") for e in range(3)]
        return torch.stack([p.view(torch.uint8) if p.element_size() == 1 else p for p in parts]).view(
            parts[0].dtype if parts[0].element_size() == 1 else torch.float32
        )

    def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.element_size() > 1:
            return torch.cat((a, b), 1)
        return torch.cat((a.view(torch.uint8), b.view(torch.uint8)), 1).view(a.dtype)

    fused = {
        "gate_up_proj": join(stack(gate, "weight"), stack(up, "weight")),
        "gate_up_proj_scale_inv": join(stack(gate, suffix), stack(up, suffix)),
        "down_proj": stack(down, "weight"),
        "down_proj_scale_inv": stack(down, suffix),
    }
    tensors.update({f"{block_name}.experts.{n}": t.contiguous() for n, t in fused.items()})
    save_file(tensors, str(tmp_path / "model.safetensors"))
    placement = ExpertPlacement.contiguous(3, 2)
    check_layer(load_layer(tmp_path, layer, placement=placement, rank=1), ckpt.values[layer], [2])


def test_multi_token_prediction_layer(tmp_path: Path) -> None:
    """DeepSeek-V3's layer 61 is beyond the decoder's own, under the same names."""
    ckpt = write_checkpoint(tmp_path, "deepseek_v3", hidden=64, inter=32, experts=4, layers=2)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.update(num_hidden_layers=4, num_nextn_predict_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_layer(load_layer(tmp_path, 4), ckpt.values[4], [0, 1, 2, 3])
    with pytest.raises(ConfigError, match="layer 5 is not an MoE layer"):
        load_layer(tmp_path, 5)


def test_open_checkpoint_and_config_can_be_shared(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, "kimi_linear", hidden=64, inter=32, experts=4, layers=2)
    config = read_config(tmp_path)
    with Checkpoint(tmp_path) as shared:
        for layer in ckpt.moe_layers:
            check_layer(load_layer(shared, layer, config=config), ckpt.values[layer], [0, 1, 2, 3])
    check_layer(load_layer(tmp_path / "model.safetensors", 1), ckpt.values[1], [0, 1, 2, 3])


def test_loaded_tensors_do_not_alias_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "kimi_k3", hidden=64, inter=32, experts=2)
    loaded = load_layer(tmp_path, 1)
    before = (tmp_path / "model.safetensors").read_bytes()
    for tensor in (loaded.router_weight, loaded.gate_up.data, loaded.gate_up.scale, loaded.latent_up):
        tensor.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert load_layer(tmp_path, 1).router_weight.any()


def test_nbytes_counts_every_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v41", hidden=64, inter=32, experts=4)
    loaded = load_layer(tmp_path, 0)
    expected = 0
    for name, tensor in load_file(str(tmp_path / "model.safetensors")).items():
        expected += tensor.nbytes if ".ffn." in name else 0
    assert loaded.nbytes == expected


def test_peak_memory_is_the_loaded_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the size of an expert is allocated beside the result, whatever the format."""
    allocated = 0
    original = torch.empty

    def counting(*args: object, **options: object) -> torch.Tensor:
        nonlocal allocated
        out = original(*args, **options)
        allocated += out.nbytes
        return out

    for release in ("deepseek_v41", "kimi_k25", "deepseek_v3", "deepseek_v3_modelopt", "kimi_linear"):
        folder = tmp_path / release
        ckpt = write_checkpoint(folder, release, hidden=1024, inter=512, experts=4, values=False)
        layer = ckpt.moe_layers[-1]
        allocated = 0
        with monkeypatch.context() as patch:
            patch.setattr(loader_module.torch, "empty", counting)
            before = anonymous_bytes()
            tracemalloc.start()
            loaded = load_layer(folder, layer)
            python_peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            grown = anonymous_bytes() - before
        expert = loaded.gate_up.data[0].nbytes + loaded.down.data[0].nbytes
        assert allocated <= loaded.nbytes
        assert python_peak < expert
        assert grown < loaded.nbytes + expert + 2**20


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("needs /proc")


def test_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, for long loads on a terminal only."""
    write_checkpoint(tmp_path, "kimi_linear", hidden=64, inter=32, experts=4)

    def shown(terminal: bool, delay: float, progress: bool) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(loader_module, "PROGRESS_DELAY_S", delay)
            import sys

            patch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
            load_layer(tmp_path, 1, progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        return "loading layer 1" in err

    assert shown(terminal=True, delay=0, progress=True)
    assert not shown(terminal=True, delay=0, progress=False)
    assert not shown(terminal=False, delay=0, progress=True)
    assert not shown(terminal=True, delay=60, progress=True)


def test_arguments(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v3", hidden=64, inter=32, experts=4)
    with pytest.raises(ConfigError, match=r"placement has 5 experts, but the config n_routed_experts=4"):
        load_layer(tmp_path, 3, placement=ExpertPlacement.contiguous(5, 1))
    with pytest.raises(ConfigError, match=r"rank 2 is outside the placement's ranks 0…1"):
        load_layer(tmp_path, 3, placement=ExpertPlacement.contiguous(4, 2), rank=2)
    for layer in (-1, 0, 2, 4):
        with pytest.raises(ConfigError, match=rf"layer {layer} is not an MoE layer of this deepseek_v3: .* are 3 to 3"):
            load_layer(tmp_path, layer)
