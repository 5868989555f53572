"""One function per model family: the fields of its ``config.json`` as :class:`MoEConfig` arguments.

A field that changes the layer's numbers has a default only where every release of the family agrees on it. Field names
are those of the releases; a second name is the one that transformers writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_layer.models.fields import Fields

Parser = Callable[[Fields], dict[str, Any]]


def deepseek_v2(f: Fields) -> dict[str, Any]:
    """DeepSeek-V2: softmax scores; groups are scored by their best expert and only limit ``group_limited_greedy``."""
    method = f.choice("topk_method", ("greedy", "group_limited_greedy"), default="greedy")
    grouped = method == "group_limited_greedy"
    norm = f.boolean("norm_topk_prob", default=False)
    return {
        **_common(f),
        **_layers(f, first_dense=0),
        "n_routed_experts": f.integer("n_routed_experts", "num_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_tok"),
        "n_shared_experts": f.optional(int, "n_shared_experts") or 0,
        "scoring_func": f.text("scoring_func", default="softmax"),
        "n_group": f.integer("n_group") if grouped else 1,
        "topk_group": f.integer("topk_group") if grouped else 1,
        "group_score": "max",
        "norm_topk_prob": norm,
        # DeepSeek's own gate scales the weights or normalises them, never both.
        "routed_scaling_factor": 1.0 if norm else f.number("routed_scaling_factor", default=1.0),
    }


def deepseek_v3(f: Fields) -> dict[str, Any]:
    """DeepSeek-V3, R1, V3.1, V3.2 and Kimi-K2: sigmoid scores with a correction bias, groups scored by two experts."""
    f.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    return {
        **_common(f),
        **_layers(f),
        "n_routed_experts": f.integer("n_routed_experts", "num_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_tok"),
        "n_shared_experts": f.optional(int, "n_shared_experts") or 0,
        "scoring_func": f.text("scoring_func", default="sigmoid"),
        "use_correction_bias": True,
        "n_group": f.integer("n_group"),
        "topk_group": f.integer("topk_group"),
        "norm_topk_prob": f.boolean("norm_topk_prob"),
        "routed_scaling_factor": f.number("routed_scaling_factor"),
    }


def deepseek_v4(f: Fields) -> dict[str, Any]:
    """DeepSeek-V4: every layer is MoE, the first ``num_hash_layers`` choose experts by token id."""
    types = f.optional(list, "mlp_layer_types")
    hash_layers = f.integer("num_hash_layers", default=3) if types is None else _hash_prefix(f, types)
    return {
        **_deepseek_v4_router(f),
        "num_hash_layers": hash_layers,
        "vocab_size": f.integer("vocab_size") if hash_layers else 0,
    }


def deepseek_v41(f: Fields) -> dict[str, Any]:
    """DeepSeek-V4.1: no hash layers; image tokens choose with a bias of their own, ``gate.bias_vl``."""
    return _deepseek_v4_router(f)


def kimi_linear(f: Fields) -> dict[str, Any]:
    """Kimi-Linear, and the text model of Kimi-K3: SiTU activation and routed experts in a latent space."""
    act = f.text("hidden_act", default="silu")
    latent = f.optional(int, "routed_expert_hidden_size")
    return {
        **_common(f),
        **_layers(f),
        "n_routed_experts": f.integer("num_experts", "num_local_experts", "n_routed_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_token", "num_experts_per_tok"),
        "n_shared_experts": f.optional(int, "num_shared_experts", "n_shared_experts") or 0,
        "scoring_func": f.text("moe_router_activation_func", default="sigmoid"),
        "use_correction_bias": True,
        "n_group": f.integer("num_expert_group", "n_group", default=1),
        "topk_group": f.integer("topk_group", default=1),
        "norm_topk_prob": f.boolean("moe_renormalize", "norm_topk_prob"),
        "routed_scaling_factor": f.number("routed_scaling_factor"),
        "hidden_act": act,
        **(
            {
                "situ_beta": f.number("activation_situ_beta"),
                "situ_linear_beta": f.number("activation_situ_linear_beta"),
            }
            if act == "situ"
            else {}
        ),
        "routed_expert_hidden_size": latent,
        "latent_moe_use_norm": latent is not None and f.boolean("latent_moe_use_norm"),
        "rms_norm_eps": f.number("rms_norm_eps") if latent is not None else f.number("rms_norm_eps", default=1e-5),
    }


def glm4_moe(f: Fields) -> dict[str, Any]:
    """GLM-4.5: DeepSeek-V3's router, with one group unless the config says otherwise."""
    return {
        **_common(f),
        **_layers(f),
        "n_routed_experts": f.integer("n_routed_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_tok"),
        "n_shared_experts": f.optional(int, "n_shared_experts") or 0,
        "scoring_func": "sigmoid",
        "use_correction_bias": True,
        "n_group": f.integer("n_group", default=1),
        "topk_group": f.integer("topk_group", default=1),
        "norm_topk_prob": f.boolean("norm_topk_prob"),
        "routed_scaling_factor": f.number("routed_scaling_factor"),
    }


def qwen3_moe(f: Fields) -> dict[str, Any]:
    """Qwen3-MoE: softmax scores, no shared experts, some layers dense by a list or a step."""
    layers = f.integer("num_hidden_layers")
    step = f.integer("decoder_sparse_step", default=1)
    dense = set(f.optional(list, "mlp_only_layers") or [])
    moe = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    return {
        **_common(f),
        "moe_layers": None if len(moe) == layers else moe,
        "n_routed_experts": f.integer("num_experts", "num_local_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_tok"),
        "norm_topk_prob": f.boolean("norm_topk_prob"),
    }


def mixtral(f: Fields) -> dict[str, Any]:
    """Mixtral: softmax over all experts, the chosen weights normalised; an expert is ``intermediate_size`` wide."""
    return {
        **_common(f, intermediate="intermediate_size"),
        "n_routed_experts": f.integer("num_local_experts", "num_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_tok"),
        "norm_topk_prob": True,
    }


FLAT: dict[str, Parser] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "glm4_moe": glm4_moe,
    "kimi_k2": deepseek_v3,
    "kimi_linear": kimi_linear,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}
"""model_type → parser, of configs whose fields stand at the top level."""

NESTED: dict[str, Parser] = {
    "deepseek_v41": deepseek_v41,
    "kimi_k25": deepseek_v3,
    "kimi_k3": kimi_linear,
}
"""model_type → parser of ``text_config``, of multimodal models."""


def _common(f: Fields, intermediate: str = "moe_intermediate_size") -> dict[str, Any]:
    """Fields that nearly every family names alike."""
    return {
        "hidden_size": f.integer("hidden_size"),
        "moe_intermediate_size": f.integer(intermediate),
        "num_hidden_layers": f.integer("num_hidden_layers"),
        "hidden_act": f.text("hidden_act", default="silu"),
        "rms_norm_eps": f.number("rms_norm_eps", default=1e-6),
        # Multi-token prediction layers follow the decoder's own under the same names.
        "extra": {"num_nextn_predict_layers": f.optional(int, "num_nextn_predict_layers") or 0},
    }


def _deepseek_v4_router(f: Fields) -> dict[str, Any]:
    limit = f.number("swiglu_limit")
    return {
        **_common(f),
        "n_routed_experts": f.integer("n_routed_experts"),
        "num_experts_per_tok": f.integer("num_experts_per_tok"),
        "n_shared_experts": f.integer("n_shared_experts"),
        "scoring_func": f.text("scoring_func"),
        "use_correction_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": f.number("routed_scaling_factor"),
        "swiglu_limit": limit or None,  # DeepSeek's reference: 0 means no clamp
    }


def _layers(f: Fields, first_dense: int | None = None) -> dict[str, Any]:
    """Which layers are MoE: ``mlp_layer_types`` where transformers wrote it, else the rule of the releases."""
    types = f.optional(list, "mlp_layer_types")
    if types is None:
        return {
            "first_k_dense_replace": f.integer("first_k_dense_replace", default=first_dense),
            "moe_layer_freq": f.integer("moe_layer_freq", default=1),
        }
    unknown = sorted({str(t) for t in types} - {"dense", "sparse"})
    if unknown:
        f.fail(f"{f.prefix}mlp_layer_types has unknown entries {', '.join(unknown)}; known: dense, sparse")
    moe = tuple(i for i, t in enumerate(types) if t == "sparse")
    first = moe[0] if moe else len(types)
    if moe == tuple(range(first, len(types))):
        return {"first_k_dense_replace": first}
    return {"moe_layers": moe}


def _hash_prefix(f: Fields, types: list[Any]) -> int:
    """Number of hash layers of a V4 ``mlp_layer_types``, which must come first."""
    count = sum(t == "hash_moe" for t in types)
    if types != ["hash_moe"] * count + ["moe"] * (len(types) - count):
        f.fail(f"{f.prefix}mlp_layer_types must be hash_moe layers followed by moe layers, got {types}")
    return count
