"""Every served family's config.json, with the releases' own values, and what transformers makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_layer import ConfigError, MoEConfig
from moe_layer.config import QuantizationConfig
from moe_layer.models.config import config_from_dict, known_model_types, read_config

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
V41_FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}  # fmt: skip


def compressed(fmt: str, *, in_group: bool = False, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "weights": {"dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": "mixed" if in_group else fmt, "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, **({"format": fmt} if in_group else {})}},
    }  # fmt: skip


MXFP4 = compressed(
    "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, symmetric=True, scale_dtype="torch.uint8"
)
INT4 = compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True, strategy="group")
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16, symmetric=True)

V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "num_hidden_layers": 27,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}  # fmt: skip
V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1, "quantization_config": FP8,
}  # fmt: skip
V4_FLASH = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 6, "n_shared_experts": 1, "num_hidden_layers": 43, "num_hash_layers": 3,
    "vocab_size": 129280, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1, "expert_dtype": "fp4", "quantization_config": {**FP8, "scale_fmt": "ue8m0"},
}  # fmt: skip
V4_PRO = {
    **V4_FLASH, "hidden_size": 7168, "moe_intermediate_size": 3072, "n_routed_experts": 384, "num_hidden_layers": 61,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
V41_FLASH = {
    "model_type": "deepseek_v41", "dtype": "bfloat16", "quantization_config": V41_FP8,
    "vision_config": {"hidden_size": 1024, "num_hidden_layers": 32},
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "num_hidden_layers": 40,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "rms_norm_eps": 1e-20,
        "num_nextn_predict_layers": 3,
    },
}  # fmt: skip
K2 = {
    **V3, "model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.827,
}  # fmt: skip
K25 = {"model_type": "kimi_k25", "text_config": {**K2, "quantization_config": INT4}, "vision_config": {}}
KIMI_LINEAR = {
    "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "num_hidden_layers": 27,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
K3 = {
    "model_type": "kimi_k3", "vision_config": {"vt_hidden_size": 1024},
    "text_config": {
        **KIMI_LINEAR, "hidden_size": 7168, "intermediate_size": 33792, "moe_intermediate_size": 3072,
        "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "num_hidden_layers": 93,
        "routed_scaling_factor": 1.0, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
        "quantization_config": MXFP4,
    },
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_hidden_layers": 46,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip

# release → (its config.json, the layer it describes)
RELEASES: dict[str, tuple[dict[str, Any], MoEConfig]] = {
    "DeepSeek-V2-Lite": (
        V2_LITE,
        MoEConfig(
            "deepseek_v2", 2048, 1408, 64, 6, n_shared_experts=2, scoring_func="softmax", group_score="max",
            norm_topk_prob=False, num_hidden_layers=27, first_k_dense_replace=1,
        ),
    ),
    "DeepSeek-V2": (
        {**V2_LITE, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "n_routed_experts": 160,
         "hidden_size": 5120, "moe_intermediate_size": 1536, "num_hidden_layers": 60, "routed_scaling_factor": 16.0},
        MoEConfig(
            "deepseek_v2", 5120, 1536, 160, 6, n_shared_experts=2, n_group=8, topk_group=3, group_score="max",
            norm_topk_prob=False, routed_scaling_factor=16.0, num_hidden_layers=60, first_k_dense_replace=1,
        ),
    ),
    "DeepSeek-V3": (
        V3,
        MoEConfig(
            "deepseek_v3", 7168, 2048, 256, 8, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
            n_group=8, topk_group=4, routed_scaling_factor=2.5, num_hidden_layers=61, first_k_dense_replace=3,
            quantization=QuantizationConfig("fp8", "fp8_128x128"),
        ),
    ),
    "DeepSeek-V3.2": (
        # its scales are powers of two, but still fp32 tensors
        {**V3, "model_type": "deepseek_v32", "quantization_config": {**FP8, "scale_fmt": "ue8m0"}},
        MoEConfig(
            "deepseek_v32", 7168, 2048, 256, 8, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
            n_group=8, topk_group=4, routed_scaling_factor=2.5, num_hidden_layers=61, first_k_dense_replace=3,
            quantization=QuantizationConfig("fp8", "fp8_128x128"),
        ),
    ),
    "DeepSeek-V4-Flash": (
        V4_FLASH,
        MoEConfig(
            "deepseek_v4", 4096, 2048, 256, 6, n_shared_experts=1, scoring_func="sqrtsoftplus",
            use_correction_bias=True, routed_scaling_factor=1.5, swiglu_limit=10.0, num_hidden_layers=43,
            num_hash_layers=3, vocab_size=129280, quantization=QuantizationConfig("fp8", "mxfp4", "fp8_128x128_ue8m0"),
        ),
    ),
    "DeepSeek-V4-Pro": (
        V4_PRO,
        MoEConfig(
            "deepseek_v4", 7168, 3072, 384, 6, n_shared_experts=1, scoring_func="sqrtsoftplus",
            use_correction_bias=True, routed_scaling_factor=2.5, swiglu_limit=10.0, num_hidden_layers=61,
            num_hash_layers=3, vocab_size=129280, quantization=QuantizationConfig("fp8", "mxfp4", "fp8_128x128_ue8m0"),
        ),
    ),
    "DeepSeek-V4.1-Flash": (
        V41_FLASH,
        MoEConfig(
            "deepseek_v41", 5120, 2304, 384, 6, n_shared_experts=1, scoring_func="sqrtsoftplus",
            use_correction_bias=True, routed_scaling_factor=1.5, swiglu_limit=10.0, num_hidden_layers=40,
            rms_norm_eps=1e-20, quantization=QuantizationConfig("fp8", "mxfp4", "fp8_32x32"),
        ),
    ),
    "Kimi-K2": (
        K2,
        MoEConfig(
            "kimi_k2", 7168, 2048, 384, 8, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
            routed_scaling_factor=2.827, num_hidden_layers=61, first_k_dense_replace=1,
            quantization=QuantizationConfig("fp8", "fp8_128x128"),
        ),
    ),
    "Kimi-K2.5": (
        K25,
        MoEConfig(
            "kimi_k25", 7168, 2048, 384, 8, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
            routed_scaling_factor=2.827, num_hidden_layers=61, first_k_dense_replace=1,
            quantization=QuantizationConfig("compressed-tensors", "int4"),
        ),
    ),
    "Kimi-Linear": (
        KIMI_LINEAR,
        MoEConfig(
            "kimi_linear", 2304, 1024, 256, 8, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
            routed_scaling_factor=2.446, num_hidden_layers=27, first_k_dense_replace=1, rms_norm_eps=1e-5,
        ),
    ),
    "Kimi-K3": (
        K3,
        MoEConfig(
            "kimi_k3", 7168, 3072, 896, 16, n_shared_experts=2, scoring_func="sigmoid", use_correction_bias=True,
            routed_scaling_factor=1.0, hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0,
            routed_expert_hidden_size=3584, latent_moe_use_norm=True, rms_norm_eps=1e-5, num_hidden_layers=93,
            first_k_dense_replace=1, quantization=QuantizationConfig("compressed-tensors", "mxfp4"),
        ),
    ),
    "Qwen3-30B-A3B": (QWEN3, MoEConfig("qwen3_moe", 2048, 768, 128, 8, num_hidden_layers=48)),
    "Mixtral-8x7B": (MIXTRAL, MoEConfig("mixtral", 4096, 14336, 8, 2, num_hidden_layers=32, rms_norm_eps=1e-5)),
    "GLM-4.5-Air": (
        GLM,
        MoEConfig(
            "glm4_moe", 4096, 1408, 128, 8, n_shared_experts=1, scoring_func="sigmoid", use_correction_bias=True,
            num_hidden_layers=46, first_k_dense_replace=1, rms_norm_eps=1e-5,
        ),
    ),
}  # fmt: skip


def write(folder: Path, config: Any, name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(config))
    return folder


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in names}


@pytest.mark.parametrize("release", RELEASES)
def test_release(release: str, tmp_path: Path) -> None:
    raw, expected = RELEASES[release]
    assert MoEConfig.from_pretrained(write(tmp_path, raw)) == expected


def test_kimi_k3_widths() -> None:
    cfg = config_from_dict(K3)
    assert (cfg.routed_hidden_size, cfg.shared_intermediate_size) == (3584, 6144)


@pytest.mark.parametrize(
    "release", ["DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3", "DeepSeek-V4-Pro", "Kimi-Linear", "Qwen3-30B-A3B",
                "Mixtral-8x7B", "GLM-4.5-Air"]
)  # fmt: skip
def test_transformers_understands_the_same(release: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw, _ = RELEASES[release]
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {raw['model_type']}")
    theirs = transformers.AutoConfig.from_pretrained(write(tmp_path, raw))
    ours = read_config(tmp_path)

    def of(*names: str) -> Any:
        return next(getattr(theirs, n) for n in names if getattr(theirs, n, None) is not None)

    assert ours.hidden_size == theirs.hidden_size
    assert ours.moe_intermediate_size == of("moe_intermediate_size", "intermediate_size")
    assert ours.n_routed_experts == of("num_local_experts", "num_experts", "n_routed_experts")
    assert ours.num_experts_per_tok == theirs.num_experts_per_tok
    assert ours.hidden_act == theirs.hidden_act
    assert ours.num_hidden_layers == theirs.num_hidden_layers
    for name in ("n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "swiglu_limit", "scoring_func"):
        if hasattr(theirs, name):
            assert getattr(ours, name) == getattr(theirs, name), name
    if ours.n_group > 1:
        assert (ours.n_group, ours.topk_group) == (theirs.n_group, theirs.topk_group)
    types = getattr(theirs, "mlp_layer_types", None)
    if types:
        assert [ours.is_moe_layer(i) for i in range(len(types))] == [t != "dense" for t in types]
        assert [ours.is_hash_layer(i) for i in range(len(types))] == [t == "hash_moe" for t in types]


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_linear", "kimi_k25", "qwen3_moe", "mixtral", "glm4_moe"],
)
def test_reads_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    """transformers writes other names than the releases (num_local_experts, mlp_layer_types, …)."""
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    theirs = transformers.AutoConfig.for_model(model_type)
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    text = theirs.get_text_config()
    experts = getattr(text, "num_local_experts", None) or text.n_routed_experts
    assert (ours.model_type, ours.n_routed_experts) == (model_type, experts)
    assert ours.num_experts_per_tok == text.num_experts_per_tok
    types = getattr(text, "mlp_layer_types", None)
    if types:
        assert [ours.is_moe_layer(i) for i in range(len(types))] == [t != "dense" for t in types]


def test_explicit_layer_lists() -> None:
    types = ["dense", "sparse", "dense", "sparse"]
    cfg = config_from_dict({**KIMI_LINEAR, "num_hidden_layers": 4, "mlp_layer_types": types})
    assert [cfg.is_moe_layer(i) for i in range(4)] == [False, True, False, True]
    cfg = config_from_dict({**QWEN3, "num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2})
    assert [cfg.is_moe_layer(i) for i in range(6)] == [False, False, False, True, False, True]
    types = ["hash_moe", "moe", "moe"]
    cfg = config_from_dict({**without(V4_FLASH, "num_hash_layers"), "num_hidden_layers": 3, "mlp_layer_types": types})
    assert [cfg.is_hash_layer(i) for i in range(3)] == [True, False, False]


def test_deepseek_v2_normalises_or_scales() -> None:
    """DeepSeek's own gate does one or the other."""
    cfg = config_from_dict({**V2_LITE, "norm_topk_prob": True, "routed_scaling_factor": 16.0})
    assert (cfg.norm_topk_prob, cfg.routed_scaling_factor) == (True, 1.0)


# ---- quantization ----


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, None),
        (FP8, "fp8_128x128"),
        ({**FP8, "scale_fmt": "ue8m0"}, "fp8_128x128_ue8m0"),
        ({**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp8"}, "fp8_128x128_ue8m0"),
        ({**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}, "mxfp4"),
        ({**V41_FP8, "expert_dtype": None}, "fp8_32x32"),
        ({**V41_FP8, "weight_block_size": [1, 32], "expert_dtype": None}, "mxfp8"),
        (MXFP4, "mxfp4"),
        (compressed("mxfp4-pack-quantized", in_group=True, num_bits=4, type="float", group_size=32), "mxfp4"),
        (NVFP4, "nvfp4"),
        (INT4, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_algo": "NVFP4", "group_size": 16}, "nvfp4"),
    ],
)
def test_quantization(quantization: dict[str, Any] | None, expected: str | None) -> None:
    config = without(V4_FLASH, "expert_dtype")
    cfg = config_from_dict({**config, "quantization_config": quantization})
    assert (cfg.quantization and cfg.quantization.expert_format) == expected


def test_v4_expert_dtype_beside_the_quantization_config() -> None:
    cfg = config_from_dict({**V4_FLASH, "quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "expert_dtype": "fp4"})
    assert cfg.quantization == QuantizationConfig("fp8", "mxfp4", "fp8_128x128_ue8m0")


def test_hf_quant_config_of_modelopt(tmp_path: Path) -> None:
    write(tmp_path, without(V3, "quantization_config"))
    write(tmp_path, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "hf_quant_config.json")
    assert read_config(tmp_path).quantization == QuantizationConfig("modelopt", "nvfp4", "nvfp4")
    write(tmp_path, {"quantization": {"quant_algo": "W4A8_AWQ"}}, "hf_quant_config.json")
    with pytest.raises(
        ConfigError, match=r"hf_quant_config.json: unknown quantization: .*'W4A8_AWQ'.*; known: .*NVFP4"
    ):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({"quant_method": "awq"}, r"quant_method 'awq'"),
        ({"quant_method": "fp8"}, r"weight_block_size None"),
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({**FP8, "weight_block_size": [32, 32]}, r"\[32, 32\] and scale_fmt None"),
        ({**FP8, "expert_dtype": "int3"}, r"expert_dtype 'int3'"),
        (compressed("pack-quantized", num_bits=4, type="int", group_size=128, symmetric=True), r"groups of 128"),
        (compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=False), r"4-bit int"),
        (compressed("float-quantized", num_bits=8, type="float"), r"float-quantized with 8-bit float"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"quant_algo 'FP8'"),
    ],
)
def test_unknown_quantization_lists_the_known(quantization: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"cfg: unknown quantization: .*{found}.*; known: fp8 with .*modelopt NVFP4"):
        config_from_dict({**without(V4_FLASH, "expert_dtype"), "quantization_config": quantization}, source="cfg")


def test_mixed_compressed_groups_are_refused() -> None:
    int4, nvfp4 = INT4["config_groups"]["group_0"], NVFP4["config_groups"]["group_0"]
    groups = {"group_0": int4, "group_1": {**nvfp4, "format": "nvfp4-pack-quantized"}}
    mixed = {**INT4, "config_groups": groups}
    with pytest.raises(ConfigError, match=r"config_groups of 2 formats \(int4, nvfp4\)"):
        config_from_dict({**V3, "quantization_config": mixed})


# ---- errors ----


def test_unknown_model_type_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"cfg: unknown model_type 'llama'; known: deepseek_v2, deepseek_v3, .*qwen3_moe"
    ):
        config_from_dict({**V3, "model_type": "llama"}, source="cfg")
    assert {"deepseek_v41", "kimi_k3", "mixtral"} <= set(known_model_types())


@pytest.mark.parametrize(
    ("release", "field"),
    [
        ("DeepSeek-V3", "hidden_size"), ("DeepSeek-V3", "n_group"), ("DeepSeek-V3", "routed_scaling_factor"),
        ("DeepSeek-V3", "num_hidden_layers"), ("DeepSeek-V2", "num_experts_per_tok"), ("Kimi-Linear", "num_experts"),
        ("DeepSeek-V4-Pro", "swiglu_limit"), ("Qwen3-30B-A3B", "norm_topk_prob"), ("Mixtral-8x7B", "intermediate_size"),
    ],
)  # fmt: skip
def test_missing_field_names_field_and_file(release: str, field: str, tmp_path: Path) -> None:
    write(tmp_path, without(RELEASES[release][0], field))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.json: missing field {field}"):
        read_config(tmp_path)


def test_missing_nested_field_names_its_path() -> None:
    text = without(K3["text_config"], "activation_situ_beta")
    with pytest.raises(ConfigError, match=r"config: missing field text_config\.activation_situ_beta"):
        config_from_dict({**K3, "text_config": text})
    with pytest.raises(ConfigError, match=r"config: missing field text_config"):
        config_from_dict({"model_type": "kimi_k3"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "7168"}, r"config: hidden_size must be an integer, got '7168'"),
        ({"hidden_size": True}, r"config: hidden_size must be an integer, got True"),
        ({"norm_topk_prob": 1}, r"config: norm_topk_prob must be true or false, got 1"),
        ({"topk_method": "greedy"}, r"config: topk_method must be one of noaux_tc, got 'greedy'"),
        ({"scoring_func": "tanh"}, r"config: .*unknown scoring_func 'tanh'; known: softmax"),
        ({"hidden_act": "gelu"}, r"config: .*unknown hidden_act 'gelu'; known: silu, situ"),
        ({"num_experts_per_tok": 300}, r"config: .*num_experts_per_tok=300 exceeds"),
        ({"n_group": 7}, r"config: .*n_group=7 must divide n_routed_experts=256"),
        ({"moe_layer_freq": [0, 1]}, r"config: moe_layer_freq must be an integer"),
        ({"mlp_layer_types": ["dense", "wide"]}, r"mlp_layer_types has unknown entries wide; known: dense, sparse"),
        ({"quantization_config": "fp8"}, r"config: quantization_config must be an object, got 'fp8'"),
    ],
)
def test_impossible_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict({**V3, **change})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no config.json in {tmp_path}"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", ')
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.json: cannot be read as JSON: .*line 1"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"expected a JSON object, found list"):
        read_config(tmp_path)


def test_path_may_be_the_file_or_one_beside_it(tmp_path: Path) -> None:
    write(tmp_path, V3)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "model.safetensors", str(tmp_path)):
        assert read_config(path).n_routed_experts == 256
