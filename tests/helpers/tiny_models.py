"""Tiny random transformers models of every MoE family that the library serves."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 64
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_V3 = {
    "moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_SIZES, **_MLA, "moe_intermediate_size": 44, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
        "norm_topk_prob": False, "routed_scaling_factor": 4.0, "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**_SIZES, **_MLA, **_V3},
    "deepseek_v4": {
        **{k: v for k, v in _SIZES.items() if k != "intermediate_size"},  # V4 has no dense layers and one name for both
        "moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "routed_scaling_factor": 1.5, "swiglu_limit": 0.05, "num_hidden_layers": 4, "num_key_value_heads": 1,
        "head_dim": 32, "q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 8, "sliding_window": 32, "num_hash_layers": 2,
    },
    "kimi_linear": {
        **_SIZES, **_MLA, "q_lora_rank": None, "moe_intermediate_size": 48, "num_experts": 16,
        "num_experts_per_token": 4, "num_shared_experts": 1, "num_expert_group": 1, "topk_group": 1,
        "moe_renormalize": True, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", **_SIZES, **_MLA, **_V3, "n_group": 1, "topk_group": 1},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "patch_size": 4,
        },
    },
    "qwen3_moe": {
        **_SIZES, "moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "head_dim": 16,
    },
    "mixtral": {**_SIZES, "intermediate_size": 80, "num_local_experts": 8, "num_experts_per_tok": 2},
}  # fmt: skip


def tiny_config(name: str) -> Any:
    return AutoConfig.for_model(name, **CONFIGS[name])


@torch.no_grad()
def tiny_model(name: str, seed: int = 0) -> Any:
    """A causal LM in fp32 with random weights, biases and hash tables that spread the tokens over the experts."""
    torch.manual_seed(seed)
    config = tiny_config(name)
    if name == "kimi_k25":
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith("gate.weight"):
            tensor.normal_(std=0.3)
        elif ".experts." in key or "shared_experts" in key:
            tensor.normal_(std=0.25)
        elif key.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
        elif key.endswith("tid2eid"):
            experts = config.n_routed_experts
            tensor.copy_(torch.stack([torch.randperm(experts)[: tensor.shape[1]] for _ in range(len(tensor))]))
    return model.eval()


def moe_blocks(model: Any) -> dict[int, Any]:
    """Decoder layer → its MoE block."""
    text = getattr(model.model, "language_model", model.model)
    blocks = {}
    for i, layer in enumerate(text.layers):
        block = next((getattr(layer, n) for n in ("mlp", "block_sparse_moe", "ffn") if hasattr(layer, n)), None)
        if hasattr(block, "experts"):
            blocks[i] = block
    return blocks
