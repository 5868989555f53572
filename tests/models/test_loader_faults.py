"""Damaged, incomplete and misleading checkpoints: each is refused before anything is computed, by name.

Several of these loaded silently in other engines; the issue is cited where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layer import CheckpointError, FormatError, MoELayerError
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.models.loader import load_layer
from moe_layer.models.synthetic import SyntheticCheckpoint, write_checkpoint
from moe_layer.quant import dequantize

Tensors = dict[str, torch.Tensor]
E8M0 = torch.float8_e8m0fnu


def make(folder: Path, release: str, change: Callable[[Tensors, str], object], **sizes: int) -> SyntheticCheckpoint:
    """A checkpoint of four experts, after ``change(tensors, block)`` of its last MoE layer."""
    options = {"hidden": 128, "inter": 64, "experts": 4, **sizes}
    ckpt = write_checkpoint(folder, release, **options)  # type: ignore[arg-type]
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    layer = ckpt.moe_layers[-1]
    block = next(n for n in tensors if f"layers.{layer}." in n and n.endswith(".gate.weight"))
    change(tensors, block.removesuffix(".gate.weight"))
    save_file(tensors, str(file))
    return ckpt


def refuse(ckpt: SyntheticCheckpoint, error: type[MoELayerError], *parts: str, rank: int = 0, ep: int = 1) -> None:
    """Loading raises ``error``, whose message holds each of ``parts``."""
    with pytest.raises(error) as caught:
        load_layer(ckpt.path, ckpt.moe_layers[-1], placement=ExpertPlacement.contiguous(4, ep), rank=rank)
    for part in parts:
        assert part in str(caught.value)


def drop(name: str) -> Callable[[Tensors, str], object]:
    """Remove the tensors of the block whose relative name matches the pattern."""

    def change(tensors: Tensors, block: str) -> None:
        found = [n for n in tensors if re.fullmatch(name, n.removeprefix(block + "."))]
        assert found
        for full in found:
            del tensors[full]

    return change


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], object]:
    """Replace a tensor of the block by a function of it."""

    def change(tensors: Tensors, block: str) -> None:
        tensors[f"{block}.{name}"] = value(tensors[f"{block}.{name}"]).contiguous()

    return change


def add(name: str, value: torch.Tensor) -> Callable[[Tensors, str], object]:
    def change(tensors: Tensors, block: str) -> None:
        assert f"{block}.{name}" not in tensors
        tensors[f"{block}.{name}"] = value

    return change


def poke(code: int | float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Set the last value: bytes by code, others by number."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).flatten()
        flat[-1] = code
        return flat.view(tensor.dtype).view(tensor.shape)

    return change


# ---- scales that give no value ----


@pytest.mark.parametrize(
    ("release", "name", "code", "found"),
    [
        ("deepseek_v3", "experts.2.up_proj.weight_scale_inv", float("nan"), "nan"),
        ("deepseek_v3", "experts.2.up_proj.weight_scale_inv", float("inf"), "inf"),
        ("deepseek_v3", "experts.2.up_proj.weight_scale_inv", 0.0, "0"),
        ("deepseek_v3", "experts.2.up_proj.weight_scale_inv", -1.0, "-1"),
        ("deepseek_v3", "shared_experts.down_proj.weight_scale_inv", float("nan"), "nan"),
        ("deepseek_v4", "experts.3.w2.scale", 255, "NaN"),
        ("deepseek_v4", "shared_experts.w1.scale", 255, "NaN"),
        ("deepseek_v4_base", "experts.3.w2.scale", float("nan"), "nan"),
        ("deepseek_v41", "shared_experts.w3.scale", 255, "NaN"),
        ("kimi_k3", "experts.0.w1.weight_scale", 255, "NaN"),
        ("kimi_k25", "experts.1.down_proj.weight_scale", float("nan"), "nan"),
        ("kimi_k25", "experts.1.down_proj.weight_scale", -0.5, "-0.5"),
        ("kimi_k25", "experts.1.down_proj.weight_scale", 0.0, "0"),
        ("deepseek_v3_modelopt", "experts.1.gate_proj.weight_scale", 0x7F, "nan"),
        ("deepseek_v3_modelopt", "experts.1.gate_proj.weight_scale", 0xB8, "-1"),
        ("deepseek_v3_modelopt", "experts.1.gate_proj.weight_scale_2", 0.0, "0"),
        ("deepseek_v3_modelopt", "experts.1.gate_proj.weight_scale_2", float("nan"), "nan"),
        # vllm#54189: an activation scale that was never written multiplied every expert by zero
        ("deepseek_v3_modelopt", "experts.1.down_proj.input_scale", 0.0, "0"),
        ("deepseek_v3_modelopt", "experts.1.down_proj.input_scale", float("inf"), "inf"),
        ("deepseek_v3_nvfp4", "experts.1.up_proj.weight_global_scale", 0.0, "0"),
        ("deepseek_v3_nvfp4", "experts.1.up_proj.weight_global_scale", float("inf"), "inf"),
        ("deepseek_v3_nvfp4", "experts.1.up_proj.input_global_scale", -1.0, "-1"),
    ],
)
def test_scales_that_give_no_value(tmp_path: Path, release: str, name: str, code: float, found: str) -> None:
    ckpt = make(tmp_path, release, put(name, poke(code)))
    refuse(ckpt, FormatError, f".{name}", f" is {found}", "expected", "finite and ")


def test_bad_scales_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    ckpt = make(tmp_path, "deepseek_v3", put("experts.2.up_proj.weight_scale_inv", poke(float("nan"))))
    refuse(ckpt, FormatError, "experts.2.up_proj.weight_scale_inv", rank=1, ep=2)
    load_layer(tmp_path, 3, placement=ExpertPlacement.contiguous(4, 2), rank=0)


def test_nvfp4_scales_that_were_never_written(tmp_path: Path) -> None:
    ckpt = make(tmp_path, "deepseek_v3_modelopt", put("experts.3.up_proj.weight_scale", torch.zeros_like))
    refuse(ckpt, FormatError, "experts.3.up_proj.weight_scale: every scale is zero")


# ---- missing ----


@pytest.mark.parametrize(
    ("release", "name", "message"),
    [
        ("deepseek_v3", r"gate\.weight", "missing tensor model.layers.3.mlp.gate.weight"),
        ("kimi_k25", r"gate\.weight", "language_model.model.layers.1.mlp.gate.weight or model.language_model.layers.1"),
        ("deepseek_v3", r"gate\.e_score.*", "mlp.gate.e_score_correction_bias: expected BF16 or F32 or F16 [4]"),
        ("deepseek_v4", r"gate\.bias", "layers.1.ffn.gate.bias: expected BF16 or F32 or F16 [4]"),
        ("deepseek_v3", r"shared_experts\.up_proj\..*", "mlp.shared_experts.up_proj.weight"),
        ("deepseek_v3", r"experts\.2\.up_proj\.weight", "mlp.experts.2.up_proj.weight, which expert 0 has"),
        ("deepseek_v3", r"experts\.0\.up_proj\.weight", "mlp.experts.0.up_proj.weight, which expert 1 has"),
        ("deepseek_v3", r"experts\.2\.down_proj\..*", "mlp.experts.2.down_proj.weight, which expert 0 has"),
        ("deepseek_v3", r"experts\..*\.down_proj\..*", "mlp.experts.0.down_proj.weight or any other of its names"),
        ("deepseek_v3_fused", r"experts\.down_proj", "model.layers.3.mlp.experts.down_proj"),
        ("kimi_k3", r"routed_expert_norm\.weight", "block_sparse_moe.routed_expert_norm.weight: expected"),
        (
            "kimi_k3",
            r"routed_expert_up_proj\.weight",
            "routed_expert_up_proj.weight: expected BF16 or F32 or F16 [128, 64]",
        ),
        ("kimi_k25", r"experts\..*\.weight_shape", "mlp.experts.0.gate_proj.weight_shape of int4"),
    ],
)
def test_missing_tensors(tmp_path: Path, release: str, name: str, message: str) -> None:
    refuse(make(tmp_path, release, drop(name)), CheckpointError, "missing tensor ", message)


def test_missing_tensors_of_another_rank_fail_on_every_rank(tmp_path: Path) -> None:
    """Else one rank would raise and the others wait for it."""
    ckpt = make(tmp_path, "kimi_k3", drop(r"experts\.3\.w2\.weight_scale"))
    for rank in range(4):
        refuse(ckpt, CheckpointError, "missing tensor ", ".experts.3.w2.weight_scale, which expert 0", rank=rank, ep=4)


@pytest.mark.parametrize(
    ("release", "name", "message"),
    [
        ("deepseek_v3", r"experts\..*\.weight_scale_inv", "experts.0.gate_proj.weight_scale_inv"),
        ("deepseek_v3", r"shared_experts\..*\.weight_scale_inv", "shared_experts.gate_proj.weight_scale_inv"),
        ("deepseek_v4", r"experts\..*\.scale", "w1.scale or layers.1.ffn.experts.0.w1.weight_scale_inv: "),
        ("deepseek_v4", r"experts\..*\.scale", "layers.1.ffn.experts.0.w1.weight is I8, so it is mxfp4"),
        ("kimi_k3", r"experts\..*\.weight_scale", "experts.0.w1.weight_scale"),
        ("kimi_k25", r"experts\..*\.weight_scale", "experts.0.gate_proj.weight_scale"),
        # vllm#54444: NVFP4 without its scales
        ("deepseek_v3_modelopt", r"experts\..*\.weight_scale", "experts.0.gate_proj.weight_scale"),
        ("deepseek_v3_modelopt", r"experts\..*\.weight_scale_2", "experts.0.gate_proj.weight_scale_2: nvfp4 weights"),
        ("deepseek_v3_nvfp4", r"experts\..*\.weight_scale", "experts.0.gate_proj.weight_scale"),
        ("deepseek_v3_nvfp4", r"experts\..*\.weight_global_scale", "gate_proj.weight_global_scale: nvfp4 weights"),
        ("deepseek_v3_modelopt", r"experts\..*\.weight_scale.*", "experts.0.gate_proj.weight_scale"),
    ],
)
def test_missing_scales(tmp_path: Path, release: str, name: str, message: str) -> None:
    refuse(make(tmp_path, release, drop(name)), FormatError, "missing scale ", message, "no value without")


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_input_scale_missing_for_one_expert(tmp_path: Path, expert: int, rank: int) -> None:
    """vllm#45212: infinity and NaN from the one expert without. Refused on every rank, whoever holds it."""
    ckpt = make(tmp_path, "deepseek_v3_modelopt", drop(rf"experts\.{expert}\.down_proj\.input_scale"))
    message = (
        f"missing tensor model.layers.3.mlp.experts.{expert}.down_proj.input_scale, which expert {int(expert == 0)} has"
    )
    refuse(ckpt, CheckpointError, message, rank=rank, ep=2)


def test_missing_hash_table(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v4", hidden=64, inter=32, experts=4)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(str(file)).items() if "tid2eid" not in n}, str(file))
    with pytest.raises(
        CheckpointError, match=r"missing tensor layers\.0\.ffn\.gate\.tid2eid: expected I64 or I32 \[64, 2\]"
    ):
        load_layer(tmp_path, 0)


# ---- extra ----


@pytest.mark.parametrize(
    ("release", "name", "message"),
    [
        ("deepseek_v3", "experts.2.up_proj.bias", "no format has a bias, and experts have no bias"),
        ("kimi_k25", "experts.2.up_proj.weight_zero_point", "no format has a weight_zero_point"),
        ("kimi_k25", "experts.2.up_proj.weight_g_idx", "no format has a weight_g_idx"),
        ("deepseek_v3", "experts.4.up_proj.weight", "expert 4 of a layer whose config has n_routed_experts=4"),
        ("deepseek_v3", "gate.bias", "this deepseek_v3 layer has no such part, ignoring it would change the result"),
        ("deepseek_v3", "gate.tid2eid", "has no such part"),
        ("deepseek_v3", "shared_expert_gate.weight", "has no such part"),
        ("deepseek_v3", "experts.1.up_proj_old.weight", "has no such part"),
        ("deepseek_v2", "gate.e_score_correction_bias", "has no such part"),
        ("kimi_linear", "routed_expert_norm.weight", "has no such part"),
        ("mixtral", "shared_experts.up_proj.weight", "the config has no shared experts"),
        (
            "deepseek_v3_fused",
            "experts.1.up_proj.weight",
            "expert 1 is also part of model.layers.3.mlp.experts.gate_up",
        ),
        # transformers#45930: a suffix that merely begins like a scale is none
        ("deepseek_v3", "experts.1.up_proj.weight_scale_inv_old", "no format has a weight_scale_inv_old"),
        # a scale of another format
        ("deepseek_v3", "shared_experts.up_proj.input_scale", "fp8_128x128 weights have no input_scale"),
        ("kimi_linear", "shared_experts.up_proj.weight_scale", "bf16 weights have no weight_scale"),
    ],
)
def test_extra_tensors(tmp_path: Path, release: str, name: str, message: str) -> None:
    ckpt = make(tmp_path, release, add(name, torch.ones(64)))
    for rank in (0, 1):  # whoever holds the expert
        refuse(ckpt, CheckpointError, "extra tensor ", f".{name}", message, rank=rank, ep=2)


def test_names_are_not_matched_by_substring(tmp_path: Path) -> None:
    """transformers#45930. Layer 1 beside 11 and expert 1 beside 11, in one file."""
    ckpt = write_checkpoint(tmp_path, "kimi_k2", hidden=64, inter=32, experts=12, layers=11)
    for layer in (1, 11):
        loaded = load_layer(tmp_path, layer)
        for expert in (1, 11):
            assert torch.equal(dequantize(loaded.gate_up.expert(expert, 0)), ckpt.values[layer].gate[expert])


def test_a_bias_on_hash_layers_has_no_use(tmp_path: Path) -> None:
    """Some V4 checkpoints keep one there; the table decides."""
    write_checkpoint(tmp_path, "deepseek_v4", hidden=64, inter=32, experts=4)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(str(file)), "layers.0.ffn.gate.bias": torch.ones(4)}, str(file))
    loaded = load_layer(tmp_path, 0)
    assert loaded.router_bias is None and loaded.tid2eid is not None


# ---- of the wrong shape or type ----


def transpose(t: torch.Tensor) -> torch.Tensor:
    return t.t()


def shorten(t: torch.Tensor) -> torch.Tensor:
    return t[:-1]


def narrow(t: torch.Tensor) -> torch.Tensor:
    return t[:, :-1]


F8_E5M2, INT32 = torch.float8_e5m2, torch.int32


@pytest.mark.parametrize(
    ("release", "name", "change", "message"),
    [
        ("deepseek_v3", "experts.1.up_proj.weight", transpose, "F8_E4M3 [200, 64]; expected F8_E4M3 [64, 200]"),
        ("deepseek_v3", "experts.1.up_proj.weight", shorten, "F8_E4M3 [63, 200]; expected F8_E4M3 [64, 200]"),
        # ⌊K/128⌋ columns of scales where there should be ⌈K/128⌉
        ("deepseek_v3", "experts.1.up_proj.weight_scale_inv", narrow, "F32 [1, 1]; expected [1, 2] (fp8_128x128)"),
        ("deepseek_v3", "shared_experts.up_proj.weight", shorten, "F8_E4M3 [63, 200]; expected F8_E4M3 [64, 200]"),
        ("deepseek_v4", "experts.1.w1.weight", shorten, "I8 [63, 100]; expected I8 [64, 100] (mxfp4)"),
        ("deepseek_v4", "experts.1.w1.scale", transpose, "F8_E8M0 [7, 64]; expected [64, 7] (mxfp4)"),
        ("deepseek_v41", "shared_experts.w1.scale", shorten, "[1, 2] (fp8_128x128_ue8m0) or [2, 7] (fp8_32x32) or"),
        ("kimi_k3", "experts.1.w2.weight_packed", shorten, "U8 [99, 32]; expected U8 [100, 32] (mxfp4)"),
        ("kimi_k25", "experts.1.up_proj.weight_packed", shorten, "I32 [63, 25]; expected I32 [64, 25] (int4)"),
        ("kimi_k25", "experts.1.up_proj.weight_shape", lambda t: t.flip(0), "says [200, 64]; expected [64, 200]"),
        ("deepseek_v3_modelopt", "experts.1.up_proj.weight_scale", transpose, "F8_E4M3 [13, 64]; expected [64, 13]"),
        ("deepseek_v3_modelopt", "experts.1.up_proj.weight_scale_2", lambda t: t.expand(2), "F32 [2]; expected F32 []"),
        ("deepseek_v3_fused", "experts.gate_up_proj", shorten, "BF16 [3, 128, 200]; expected BF16 [4, 128, 200]"),
        ("deepseek_v3", "gate.weight", shorten, "BF16 [3, 200]; expected BF16 or F32 or F16 [4, 200]"),
        ("deepseek_v3", "gate.e_score_correction_bias", shorten, "F32 [3]; expected BF16 or F32 or F16 [4]"),
        (
            "kimi_k3",
            "routed_expert_down_proj.weight",
            transpose,
            "BF16 [200, 100]; expected BF16 or F32 or F16 [100, 200]",
        ),
        # dtypes
        ("kimi_linear", "experts.1.w1.weight", torch.Tensor.half, "F16; expected one of BF16, F32, F8_E4M3, I8, U8"),
        ("deepseek_v3", "experts.1.up_proj.weight", lambda t: t.view(F8_E5M2), "F8_E5M2; expected one of BF16, F32"),
        ("deepseek_v3", "gate.weight", lambda t: t.to(INT32), "I32 [4, 200]; expected BF16 or F32 or F16"),
        ("deepseek_v3", "experts.1.up_proj.weight_scale_inv", torch.Tensor.half, "F16; expected scales of F32 or"),
        # vllm#35324: BF16 values copied into a buffer of bytes lose everything but their integer part
        ("kimi_k3", "experts.1.w1.weight_scale", torch.Tensor.bfloat16, "BF16; expected scales of F8_E8M0 or U8"),
        ("deepseek_v3_modelopt", "experts.1.up_proj.weight_scale_2", torch.Tensor.bfloat16, "BF16 []; expected F32 []"),
    ],
)
def test_wrong_shapes_and_dtypes(
    tmp_path: Path, release: str, name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    refuse(make(tmp_path, release, put(name, change), hidden=200), CheckpointError, f".{name} ", message)


def test_experts_of_two_formats(tmp_path: Path) -> None:
    def change(tensors: Tensors, block: str) -> None:
        base = f"{block}.experts.2.w1"
        tensors[f"{base}.weight_packed"] = torch.zeros(64, 8, dtype=torch.int32)
        tensors[f"{base}.weight_scale"] = torch.ones(64, 2, dtype=torch.bfloat16)
        for e in range(4):
            for name in ("w1", "w3", "w2"):
                tensors[f"{block}.experts.{e}.{name}.weight_shape"] = torch.tensor([64, 64])

    ckpt = make(tmp_path, "kimi_k3", change)
    refuse(ckpt, CheckpointError, "experts.0.w1.weight_shape", "mxfp4 weights have no weight_shape")

    def plain(tensors: Tensors, block: str) -> None:
        for name in ("up_proj", "gate_proj"):
            tensors[f"{block}.experts.2.{name}.weight"] = torch.zeros(64, 128, dtype=torch.float32)

    ckpt = make(tmp_path / "plain", "qwen3_moe", plain)
    refuse(ckpt, CheckpointError, "experts.2.gate_proj.weight is stored as fp32", "experts.0.gate_proj.weight as bf16")


def test_hash_table_with_unknown_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v4", hidden=64, inter=32, experts=4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    for expert in (4, -1):
        tensors["layers.0.ffn.gate.tid2eid"][9, 1] = expert
        save_file(tensors, str(file))
        message = rf"layers\.0\.ffn\.gate\.tid2eid sends token 9 to expert {expert}, but there are experts 0…3"
        with pytest.raises(CheckpointError, match=message):
            load_layer(tmp_path, 0)


def test_fused_block_that_straddles_gate_and_up(tmp_path: Path) -> None:
    """64 rows each of gate and up share one 128-row scale block."""

    def change(tensors: Tensors, block: str) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]
        for name, shape in (("gate_up_proj", (4, 128, 128)), ("down_proj", (4, 128, 64))):
            tensors[f"{block}.experts.{name}"] = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[f"{block}.experts.{name}_scale_inv"] = torch.ones(4, 1, 1)

    ckpt = make(tmp_path, "deepseek_v3", change)
    refuse(ckpt, CheckpointError, "gate_up_proj: a scale block of 128 rows straddles gate and up, which have 64 rows")


def test_damaged_shards_name_the_file(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, "kimi_k2", hidden=64, inter=32, experts=4, shards=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-7])
    refuse(ckpt, CheckpointError, f"{second}: truncated or damaged")
    second.unlink()
    refuse(ckpt, CheckpointError, f"{second}: missing shard; it should hold ")
    second.write_bytes(whole)
    load_layer(tmp_path, 1)
