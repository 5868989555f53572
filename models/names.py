"""What each family calls its tensors. Names are built and compared whole, never searched for by substring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_layer.errors import CheckpointError, ConfigError
from moe_layer.models.checkpoint import Checkpoint

GATE, UP, DOWN = 0, 1, 2
"""Projections of an expert, by position in a name triple."""

_HF = ("gate_proj", "up_proj", "down_proj")
_W = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Layout:
    """Names of one MoE block.

    Attributes:
        block: the block's module, with ``{layer}``.
        routed, shared: names of (gate, up, down) of a routed expert and of the shared MLP.
        bias: the correction bias, relative to the block; ``bias_vl`` the one of image tokens.
        tid2eid: the token id → expert ids table of hash layers.
    """

    block: str
    routed: tuple[str, str, str] = _HF
    shared: tuple[str, str, str] = _HF
    bias: str = "gate.e_score_correction_bias"
    bias_vl: str = "gate.bias_vl"
    tid2eid: str = "gate.tid2eid"


ROUTER = "gate.weight"
LATENT_DOWN = "routed_expert_down_proj.weight"
LATENT_NORM = "routed_expert_norm.weight"
LATENT_UP = "routed_expert_up_proj.weight"
FUSED_GATE_UP = "experts.gate_up_proj"
FUSED_DOWN = "experts.down_proj"

_MLP = Layout("model.layers.{layer}.mlp")
# transformers' own names for models whose releases use others; experts are fused there
_MLP_W = Layout("model.layers.{layer}.mlp", routed=_W)
_V4 = Layout("layers.{layer}.ffn", routed=_W, shared=_W, bias="gate.bias")
# what transformers' save_pretrained writes of it
_V4_SAVED = Layout("model.layers.{layer}.ffn", routed=_W, shared=_W, bias="gate.bias")
_MULTIMODAL = (
    Layout("language_model.model.layers.{layer}.mlp"),
    Layout("model.language_model.layers.{layer}.mlp"),
)
_KIMI = Layout("model.layers.{layer}.block_sparse_moe", routed=_W)

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "deepseek_v2": (_MLP,),
    "deepseek_v3": (_MLP,),
    "deepseek_v32": (_MLP,),
    "deepseek_v4": (_V4, _V4_SAVED, _MLP_W),
    "deepseek_v41": (_V4, _MLP_W),
    "glm4_moe": (_MLP,),
    "kimi_k2": (_MLP,),
    "kimi_k25": (*_MULTIMODAL, _MLP),
    "kimi_k3": (
        Layout("language_model.model.layers.{layer}.block_sparse_moe", routed=_W),
        _KIMI,
    ),
    "kimi_linear": (_KIMI, _MLP_W),
    "mixtral": (_KIMI, _MLP_W),
    "qwen3_moe": (_MLP,),
}
"""model_type → layouts, the release's first."""

# A fused tensor's scales hang on its name by an underscore: gate_up_proj_scale_inv.
_FUSED_SUFFIXES = {"": "weight", "_scale_inv": "weight_scale_inv"}


@dataclass
class BlockNames:
    """All tensors of one MoE block, sorted by what they are.

    Attributes:
        block: the module's full name.
        layout: how its parts are called.
        experts: (expert, projection) → suffix → full name.
        fused: fused tensor (``experts.gate_up_proj``, ``experts.down_proj``) → suffix → full name.
        shared: projection → suffix → full name.
        single: names relative to the block of everything else → full name.
    """

    block: str
    layout: Layout
    experts: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    fused: dict[str, dict[str, str]] = field(default_factory=dict)
    shared: dict[int, dict[str, str]] = field(default_factory=dict)
    single: dict[str, str] = field(default_factory=dict)

    def expert_base(self, expert: int, projection: int) -> str:
        return f"{self.block}.experts.{expert}.{self.layout.routed[projection]}"

    def shared_base(self, projection: int) -> str:
        return f"{self.block}.shared_experts.{self.layout.shared[projection]}"


def layouts_of(model_type: str) -> Sequence[Layout]:
    """The layouts that checkpoints of ``model_type`` may have.

    Raises:
        ConfigError: no tensor names are known for it.
    """
    if model_type not in LAYOUTS:
        raise ConfigError(f"no tensor names known for model_type {model_type!r}; known: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[model_type]


def find_block(checkpoint: Checkpoint, model_type: str, layer: int) -> BlockNames:
    """The MoE block of ``layer``: the one layout whose router is there.

    Raises:
        ConfigError: an unknown ``model_type``.
        CheckpointError: no layout fits; the message lists the names looked for.
    """
    tried = []
    for layout in layouts_of(model_type):
        block = layout.block.format(layer=layer)
        tried.append(f"{block}.{ROUTER}")
        if tried[-1] in checkpoint:
            return _sort_names(checkpoint, block, layout)
    raise CheckpointError(
        f"{checkpoint.path}: no router of an MoE layer {layer} of {model_type}: missing tensor {' or '.join(tried)}"
    )


def _sort_names(checkpoint: Checkpoint, block: str, layout: Layout) -> BlockNames:
    names = BlockNames(block, layout)
    routed = {name: i for i, name in enumerate(layout.routed)}
    shared = {name: i for i, name in enumerate(layout.shared)}
    for full in checkpoint.names_under(block):
        relative = full[len(block) + 1 :]
        parts = relative.split(".")
        if len(parts) == 4 and parts[0] == "experts" and parts[1].isdecimal() and parts[2] in routed:
            names.experts.setdefault((int(parts[1]), routed[parts[2]]), {})[parts[3]] = full
        elif len(parts) == 3 and parts[0] == "shared_experts" and parts[1] in shared:
            names.shared.setdefault(shared[parts[1]], {})[parts[2]] = full
        else:
            for base in (FUSED_GATE_UP, FUSED_DOWN):
                if relative.startswith(base) and relative[len(base) :] in _FUSED_SUFFIXES:
                    names.fused.setdefault(base, {})[_FUSED_SUFFIXES[relative[len(base) :]]] = full
                    break
            else:
                names.single[relative] = full
    return names
