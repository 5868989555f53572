"""The configuration of an MoE layer, under transformers' DeepSeek-V3 field names."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

from moe_layer.errors import ConfigError

SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")
MAX_EXPERTS = 1 << 16  # far beyond any model; a damaged config must not ask for memory without bound
MAX_LAYERS = 1 << 14
HIDDEN_ACTS = ("silu", "situ")


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint stores its expert weights, as its config says. The tensors themselves decide on a conflict.

    Attributes:
        method: ``quant_method`` of the config: ``"fp8"``, ``"compressed-tensors"``, ``"modelopt"``.
        shared_format: registry name of the shared experts' weights; None: as the routed ones if those are FP8, else
            plain.
        expert_format: registry name of the expert weights, e.g. ``"fp8_128x128"``, ``"mxfp4"``, ``"nvfp4"``.
    """

    method: str
    expert_format: str
    shared_format: str | None = None


@dataclass(frozen=True)
class MoEConfig:
    """One model's MoE layers.

    Attributes:
        model_type: as in config.json, e.g. ``"deepseek_v3"``.
        hidden_size: width of the layer's input and output.
        moe_intermediate_size: width of one routed expert.
        n_routed_experts: the paper's E.
        num_experts_per_tok: the paper's k.
        n_shared_experts: shared experts, fused into one MLP of ``shared_intermediate_size``; 0 for none.
        shared_expert_intermediate_size: width of that MLP; None means ``n_shared_experts × moe_intermediate_size``.
        scoring_func: ``softmax``, ``sigmoid`` or ``sqrtsoftplus``.
        use_correction_bias: whether the router has ``e_score_correction_bias`` (takes part in the choice only).
        n_group, topk_group: experts are limited to the best ``topk_group`` of ``n_group`` groups; 1 and 1 for no limit.
        group_score: how a group is scored: ``"top2_sum"`` (V3) or ``"max"`` (V2).
        norm_topk_prob: divide the chosen weights by their sum.
        routed_scaling_factor: factor on the weights, after normalisation.
        hidden_act: ``silu`` (SwiGLU) or ``situ``.
        swiglu_limit: SwiGLU clamp for routed and shared experts, or None.
        situ_beta, situ_linear_beta: SiTU's β and λ.
        routed_expert_hidden_size: latent width that the routed experts work in (Kimi-K3), or None for ``hidden_size``.
        latent_moe_use_norm: RMSNorm after combine, before the up projection of a latent MoE.
        rms_norm_eps: its epsilon.
        num_hidden_layers, first_k_dense_replace, moe_layer_freq: layer i is MoE if i ≥ first_k_dense_replace and
            i % moe_layer_freq == 0.
        moe_layers: the MoE layers where that rule does not say it (Qwen3's ``mlp_only_layers``), or None.
        num_hash_layers: the first so many MoE layers choose experts by ``tid2eid[input_ids]`` (DeepSeek-V4).
        vocab_size: rows of ``tid2eid``; 0 where there are no hash layers.
        quantization: how expert weights are stored; None for plain BF16/FP32.
        extra: facts of single models that only their checkpoint reader needs.
    """

    model_type: str
    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    scoring_func: str = "softmax"
    use_correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2_sum"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    hidden_act: str = "silu"
    swiglu_limit: float | None = None
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    rms_norm_eps: float = 1e-6
    num_hidden_layers: int = 1
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    moe_layers: tuple[int, ...] | None = None
    num_hash_layers: int = 0
    vocab_size: int = 0
    quantization: QuantizationConfig | None = None
    extra: dict[str, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{self.model_type}: {name} must be a positive integer, got {value!r}")
        for name in (
            "n_shared_experts", "num_hidden_layers", "first_k_dense_replace", "num_hash_layers", "vocab_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{self.model_type}: {name} must be an integer of at least 0, got {value!r}")
        if not isinstance(self.moe_layer_freq, int) or self.moe_layer_freq < 1:
            raise ConfigError(
                f"{self.model_type}: moe_layer_freq must be a positive integer, got {self.moe_layer_freq!r}"
            )
        for name, limit in (("n_routed_experts", MAX_EXPERTS), ("num_hidden_layers", MAX_LAYERS)):
            if getattr(self, name) > limit:
                raise ConfigError(f"{self.model_type}: {name}={getattr(self, name)} exceeds {limit}")
        for name in ("routed_scaling_factor", "situ_beta", "situ_linear_beta", "rms_norm_eps", "swiglu_limit"):
            value = getattr(self, name)
            if value is None and name == "swiglu_limit":
                continue
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"{self.model_type}: {name} must be finite and positive, got {value!r}")
        if self.num_experts_per_tok > min(self.n_routed_experts, 32):
            raise ConfigError(
                f"{self.model_type}: num_experts_per_tok={self.num_experts_per_tok} exceeds "
                f"min(n_routed_experts={self.n_routed_experts}, 32)"
            )
        if self.scoring_func not in SCORING_FUNCS:
            known = ", ".join(SCORING_FUNCS)
            raise ConfigError(f"{self.model_type}: unknown scoring_func {self.scoring_func!r}; known: {known}")
        if self.hidden_act not in HIDDEN_ACTS:
            known = ", ".join(HIDDEN_ACTS)
            raise ConfigError(f"{self.model_type}: unknown hidden_act {self.hidden_act!r}; known: {known}")
        if self.group_score not in ("top2_sum", "max"):
            raise ConfigError(f"{self.model_type}: unknown group_score {self.group_score!r}; known: top2_sum, max")
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ConfigError(
                f"{self.model_type}: n_group={self.n_group} must divide n_routed_experts={self.n_routed_experts} "
                f"and be at least topk_group={self.topk_group}"
            )

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> MoEConfig:
        """Read ``config.json`` of a checkpoint folder (or the file itself).

        Raises:
            ConfigError: no config there, an unknown model_type or quantization, a missing or impossible value.
        """
        # The one upward import: models builds on this class, and this method is the facade to it.
        from moe_layer.models.config import read_config

        return read_config(path)

    @property
    def routed_hidden_size(self) -> int:
        """Width that routed experts read and write: the latent width where there is one."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared expert, 0 where there is none."""
        if self.n_shared_experts == 0:
            return 0
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` is an MoE layer."""
        if self.moe_layers is not None:
            return layer in self.moe_layers
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def is_hash_layer(self, layer: int) -> bool:
        """Whether ``layer`` chooses its experts by token id."""
        return layer < self.num_hash_layers
