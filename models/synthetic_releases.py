"""The release layouts of the served models: tensor names, how each is stored, and ``config.json`` as published.

Spelled out here on its own, not shared with the reader (:mod:`moe_layer.models.names`, ``families``), so that a mistake
in either shows up when they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_layer.models import synthetic_formats as formats
from moe_layer.models.synthetic_formats import Store

HF_NAMES = ("gate_proj", "up_proj", "down_proj")
W_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Sizes:
    """Reduced dimensions; field names as in :func:`moe_layer.models.synthetic.write_checkpoint`."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    num_layers: int
    latent: int | None
    vocab: int
    n_group: int
    topk_group: int
    hash_layers: int


@dataclass(frozen=True)
class Release:
    """One published layout.

    Attributes:
        config: sizes → ``config.json``.
        block: name of an MoE block, with ``{layer}``.
        routed, shared: how a matrix of a routed and of a shared expert is stored.
        names, shared_names: gate, up and down of either.
        num_shared: shared experts, 0 for none.
        bias: the correction bias, relative to the block, or None.
        bias_vl: whether there is one for image tokens.
        first_dense: dense layers before the first MoE layer.
        hash_layers: hash-routed layers before the others.
        latent: routed experts work in a latent space.
        fused: experts lie in transformers' two stacks.
        hf_quant_config: contents of that file, or None.
    """

    config: Callable[[Sizes], dict[str, Any]]
    block: str
    routed: Store
    shared: Store = formats.bf16
    names: tuple[str, str, str] = HF_NAMES
    shared_names: tuple[str, str, str] = HF_NAMES
    num_shared: int = 1
    bias: str | None = "gate.e_score_correction_bias"
    bias_vl: bool = False
    first_dense: int = 0
    hash_layers: int = 0
    latent: bool = False
    fused: bool = False
    hf_quant_config: Mapping[str, Any] | None = None


FP8_128 = formats.fp8((128, 128), "weight_scale_inv", e8m0=False)
V4_BASE = formats.fp8((128, 128), "scale", e8m0=False)
V4_DENSE = formats.fp8((128, 128), "scale", e8m0=True)
V41_DENSE = formats.fp8((32, 32), "scale", e8m0=True)
DEEPSEEK_FP4 = formats.mxfp4("weight", torch.int8, "scale", torch.float8_e8m0fnu)
KIMI_MXFP4 = formats.mxfp4("weight_packed", torch.uint8, "weight_scale", torch.uint8)
MODELOPT = formats.nvfp4(compressed_tensors=False)
COMPRESSED_NVFP4 = formats.nvfp4(compressed_tensors=True)

FP8_CONFIG = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip


def _weights_group(fmt: str, **weights: Any) -> dict[str, Any]:
    """A compressed-tensors config with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {"dynamic": False, "observer": "minmax", "symmetric": True, **weights},
            }
        },
    }


K3_QUANTIZATION = _weights_group(
    "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
)
K3_QUANTIZATION["config_groups"]["group_0"]["format"] = "mxfp4-pack-quantized"
INT4_QUANTIZATION = _weights_group("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
NVFP4_QUANTIZATION = _weights_group(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
)


def deepseek_v2(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
        "hidden_size": s.hidden, "moe_intermediate_size": s.inter, "intermediate_size": 2 * s.inter,
        "n_routed_experts": s.experts, "num_experts_per_tok": s.top_k, "n_shared_experts": 2,
        "num_hidden_layers": s.num_layers, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": s.vocab,
        "topk_method": "group_limited_greedy", "n_group": s.n_group, "topk_group": s.topk_group,
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip


def deepseek_v3(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "hidden_size": s.hidden, "moe_intermediate_size": s.inter, "intermediate_size": 2 * s.inter,
        "n_routed_experts": s.experts, "num_experts_per_tok": s.top_k, "n_shared_experts": 1,
        "num_hidden_layers": s.num_layers, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": s.vocab,
        "topk_method": "noaux_tc", "n_group": s.n_group, "topk_group": s.topk_group, "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 0, "num_attention_heads": 4, "num_key_value_heads": 4,
        "quantization_config": FP8_CONFIG,
    }  # fmt: skip


def deepseek_v32(s: Sizes) -> dict[str, Any]:
    quantization = {**FP8_CONFIG, "scale_fmt": "ue8m0"}
    return {
        **deepseek_v3(s), "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "quantization_config": quantization,
    }  # fmt: skip


def kimi_k2(s: Sizes) -> dict[str, Any]:
    return {
        **deepseek_v3(s), "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827,
    }  # fmt: skip


def kimi_k2_thinking(s: Sizes) -> dict[str, Any]:
    return {**kimi_k2(s), "quantization_config": INT4_QUANTIZATION}


def kimi_k25(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "vision_config": {"model_type": "kimi_k25_vision"},
        "text_config": {**kimi_k2(s), "quantization_config": INT4_QUANTIZATION},
    }  # fmt: skip


def deepseek_v3_modelopt(s: Sizes) -> dict[str, Any]:
    """The quantization is in ``hf_quant_config.json`` only, as in ModelOpt's earlier exports."""
    return {k: v for k, v in deepseek_v3(s).items() if k != "quantization_config"}


def deepseek_v3_nvfp4(s: Sizes) -> dict[str, Any]:
    return {**deepseek_v3(s), "quantization_config": NVFP4_QUANTIZATION}


def deepseek_v4_base(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "hidden_size": s.hidden, "moe_intermediate_size": s.inter, "n_routed_experts": s.experts,
        "num_experts_per_tok": s.top_k, "n_shared_experts": 1, "num_hidden_layers": s.num_layers,
        "num_hash_layers": s.hash_layers, "vocab_size": s.vocab, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 1, "quantization_config": FP8_CONFIG,
    }  # fmt: skip


def deepseek_v4(s: Sizes) -> dict[str, Any]:
    quantization = {**FP8_CONFIG, "scale_fmt": "ue8m0"}
    return {**deepseek_v4_base(s), "expert_dtype": "fp4", "quantization_config": quantization}


def deepseek_v41(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": "deepseek_v41_text", "hidden_size": s.hidden, "moe_intermediate_size": s.inter,
            "n_routed_experts": s.experts, "num_experts_per_tok": s.top_k, "n_shared_experts": 1,
            "num_hidden_layers": s.num_layers, "vocab_size": s.vocab, "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
            "hidden_act": "silu", "rms_norm_eps": 1e-20, "num_nextn_predict_layers": 3,
        },
        "vision_config": {"model_type": "deepseek_v41_vision", "hidden_size": 1024},
    }  # fmt: skip


def kimi_linear(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
        "hidden_size": s.hidden, "moe_intermediate_size": s.inter, "intermediate_size": 2 * s.inter,
        "num_experts": s.experts, "num_experts_per_token": s.top_k, "num_shared_experts": 1,
        "num_hidden_layers": s.num_layers, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": s.vocab,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
        "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "num_attention_heads": 4, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def kimi_k3(s: Sizes) -> dict[str, Any]:
    text = {
        **kimi_linear(s), "num_shared_experts": 2, "routed_scaling_factor": 1.0, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "routed_expert_hidden_size": s.latent,
        "latent_moe_use_norm": True, "topk_method": "noaux_tc", "quantization_config": K3_QUANTIZATION,
    }  # fmt: skip
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "text_config": text, "vision_config": {"vt_hidden_size": 1024},
    }  # fmt: skip


def qwen3_moe(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "hidden_size": s.hidden, "moe_intermediate_size": s.inter, "intermediate_size": 2 * s.inter,
        "num_experts": s.experts, "num_experts_per_tok": s.top_k, "num_hidden_layers": s.num_layers,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "hidden_act": "silu",
        "vocab_size": s.vocab, "rms_norm_eps": 1e-6, "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip


def mixtral(s: Sizes) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16",
        "hidden_size": s.hidden, "intermediate_size": s.inter, "num_local_experts": s.experts,
        "num_experts_per_tok": s.top_k, "num_hidden_layers": s.num_layers, "hidden_act": "silu",
        "vocab_size": s.vocab, "rms_norm_eps": 1e-5, "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip


_MLP = "model.layers.{layer}.mlp"
_FFN = "layers.{layer}.ffn"
_MOE = "model.layers.{layer}.block_sparse_moe"
_V4: dict[str, Any] = {"names": W_NAMES, "shared_names": W_NAMES, "bias": "gate.bias"}

RELEASES: dict[str, Release] = {
    "deepseek_v2": Release(deepseek_v2, _MLP, formats.bf16, num_shared=2, bias=None, first_dense=1),
    "deepseek_v3": Release(deepseek_v3, _MLP, FP8_128, FP8_128, first_dense=3),
    "deepseek_v3_modelopt": Release(
        deepseek_v3_modelopt, _MLP, MODELOPT, MODELOPT, first_dense=3,
        hf_quant_config={
            "producer": {"name": "modelopt", "version": "0.23.0"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None},
        },
    ),
    "deepseek_v3_nvfp4": Release(deepseek_v3_nvfp4, _MLP, COMPRESSED_NVFP4, first_dense=3),
    "deepseek_v3_fused": Release(deepseek_v3_modelopt, _MLP, formats.bf16, first_dense=3, fused=True),
    "deepseek_v32": Release(deepseek_v32, _MLP, FP8_128, FP8_128, first_dense=3),
    "deepseek_v4": Release(deepseek_v4, _FFN, DEEPSEEK_FP4, V4_DENSE, hash_layers=1, **_V4),
    "deepseek_v4_base": Release(deepseek_v4_base, _FFN, V4_BASE, V4_BASE, hash_layers=1, **_V4),
    "deepseek_v41": Release(deepseek_v41, _FFN, DEEPSEEK_FP4, V41_DENSE, bias_vl=True, **_V4),
    "kimi_k2": Release(kimi_k2, _MLP, FP8_128, FP8_128, first_dense=1),
    "kimi_k2_thinking": Release(kimi_k2_thinking, _MLP, formats.int4, first_dense=1),
    "kimi_k25": Release(kimi_k25, f"language_model.{_MLP}", formats.int4, first_dense=1),
    "kimi_linear": Release(kimi_linear, _MOE, formats.bf16, names=W_NAMES, first_dense=1),
    "kimi_k3": Release(
        kimi_k3, f"language_model.{_MOE}", KIMI_MXFP4, names=W_NAMES, num_shared=2, first_dense=1, latent=True
    ),
    "mixtral": Release(mixtral, _MOE, formats.bf16, names=W_NAMES, num_shared=0, bias=None),
    "qwen3_moe": Release(qwen3_moe, _MLP, formats.bf16, num_shared=0, bias=None),
}  # fmt: skip
"""Release → its layout. ``deepseek_v3_fused`` is transformers' memory layout, saved as it is."""
