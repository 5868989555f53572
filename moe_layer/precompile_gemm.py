"""Which grouped GEMMs the layers of a model launch, for ``moe-layer compile``.

Routed experts and shared ones, on every rank and for any number of tokens: what the backends themselves choose
(:meth:`~moe_layer.gemm.backend.ComputeBackend.grouped_specs`) for weights of the model's formats and shapes on the
meta device. On architectures without grouped GEMMs there are none.

Weights that turn out not to be packable (:class:`~moe_layer.packed_weights.PackedExpertStack` warns of them) and
placements other than contiguous blocks of experts need other kernels, which their first step compiles.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from moe_layer.backend import backend_of
from moe_layer.benchmarks.routers import ROUTERS
from moe_layer.benchmarks.shapes import get_shape
from moe_layer.config import MoEConfig
from moe_layer.gated_mlp import GatedMLP
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.sm90_spec import GroupedSpec
from moe_layer.gemm.tile_choice import telling_rows
from moe_layer.precompile import Family
from moe_layer.wire import shared_activation_format

# A rank's in a step: what ExpertParallel takes unless it is told otherwise.
MAX_TOKENS = 4096
# The shared experts of the models of benchmarks/shapes.py as released: width of the fused MLP, and weight format.
SHARED = {
    "deepseek_v3": (2048, "fp8_128x128"),
    "deepseek_v4": (2048, "fp8_128x128_ue8m0"),
    "deepseek_v4_pro": (3072, "fp8_128x128_ue8m0"),
    "deepseek_v41": (2304, "fp8_32x32"),
    "kimi_k2": (2048, "fp8_128x128"),
    "kimi_k2_thinking": (2048, "bf16"),
    "kimi_linear": (1024, "bf16"),
    "kimi_k3": (6144, "bf16"),
}
# Of models that name an activation format for their weights: the format whose scales span rows.
WEIGHT_FORMATS = {"fp8": "fp8_128x128"}


@dataclass(frozen=True)
class Experts:
    """Experts that a rank computes together.

    Attributes:
        count: how many.
        hidden_size, intermediate_size: of each.
        weight_format, activation_format: registry names.
        activation: between FC1 and FC2.
        rows: the most that they get in a step.
    """

    count: int
    hidden_size: int
    intermediate_size: int
    weight_format: str
    activation_format: str
    activation: Activation
    rows: int

    def specs(self, arch: str) -> list[GroupedSpec]:
        """Their kernels, for up to ``rows`` rows: FC1's, then FC2's; each from the fewest tokens a tile on."""
        backend = backend_of(arch, self.weight_format, self.activation_format)
        mlp = GatedMLP(self.count, self.hidden_size, self.intermediate_size, self.weight_format, "meta", backend)
        weights = mlp.gate_up.weights(), mlp.down.weights()
        chosen = (
            backend.grouped_specs(*weights, rows, self.activation, self.activation_format)
            for rows in telling_rows(arch, self.rows, self.count)
        )
        found = dict.fromkeys(spec for specs in chosen for spec in specs)
        return sorted(found, key=lambda spec: -spec.parts)


def experts_of(model: str, ep_sizes: Sequence[int]) -> list[Experts]:
    """Those of one model: routed ones, which the first ranks may hold one more of, and shared ones.

    Args:
        model: as :func:`~moe_layer.benchmarks.shapes.get_shape` takes it.

    Raises:
        ConfigError, FormatError: as that function.
    """
    return list(dict.fromkeys((*_routed(model, ep_sizes), *_shared(model))))


def _routed(model: str, ep_sizes: Sequence[int]) -> Iterator[Experts]:
    shape = get_shape(model)
    for ep_size in ep_sizes:
        for count in (-(-shape.num_experts // ep_size), shape.num_experts // ep_size):
            if count:
                # Tiles are chosen by an estimate that the layer makes, of at most all selections.
                yield Experts(
                    count, shape.hidden_size, shape.intermediate_size,
                    WEIGHT_FORMATS.get(shape.weight_format, shape.weight_format), shape.activation_format,
                    shape.activation, ep_size * MAX_TOKENS * shape.top_k,
                )  # fmt: skip


def _shared(model: str) -> Iterator[Experts]:
    """One expert that every token of the rank passes, with the width of all shared ones."""
    shape = get_shape(model)
    name = model if os.path.exists(model) else model.partition(":")[0]
    if name in SHARED:
        hidden, (width, weight_format) = ROUTERS[name].hidden, SHARED[name]
    else:
        cfg = MoEConfig.from_pretrained(name)
        hidden, width, weight_format = cfg.hidden_size, cfg.shared_intermediate_size, _shared_format(cfg)
    if width:
        activations = shared_activation_format(shape.activation_format)
        yield Experts(1, hidden, width, weight_format, activations, shape.activation, MAX_TOKENS)


def _shared_format(cfg: MoEConfig) -> str:
    """What the config announces, as :class:`~moe_layer.layer.MoELayer` understands it."""
    if cfg.quantization is None:
        return "bf16"
    routed = cfg.quantization.expert_format
    return cfg.quantization.shared_format or (routed if routed.startswith("fp8") else "bf16")


def gemm_families(models: Sequence[str], ep_sizes: Sequence[int], archs: Sequence[str]) -> list[Family]:
    """The grouped GEMMs of these models' layers, and the indexing that shared experts add; a family once.

    Args:
        models: as :func:`experts_of` takes them.
    """
    from moe_layer.gemm import index_launch

    found: dict[tuple[str, object], Family] = {}
    for arch in archs:
        for experts in dict.fromkeys(experts for model in models for experts in experts_of(model, ep_sizes)):
            for stage, parts in (("FC1", 2), ("FC2", 1)):
                specs = tuple(spec for spec in experts.specs(arch) if spec.parts == parts)
                if specs:
                    found.setdefault((arch, specs), Family(arch, _name(stage, experts, specs), partial(load, specs)))
        if any(shared.specs(arch) for model in models for shared in _shared(model)):
            name = "indexing of the tokens of shared experts"
            found[arch, "index"] = Family(arch, name, partial(index_launch.index_kernels, 1, 1, 0, arch))
    return list(found.values())


def load(specs: Sequence[GroupedSpec]) -> None:
    """Load or compile kernels, as their first launch does."""
    from moe_layer.gemm.sm90_backend import grouped_kernel

    for spec in specs:
        grouped_kernel(spec)


def _name(stage: str, experts: Experts, specs: Sequence[GroupedSpec]) -> str:
    first, tokens = specs[0], [spec.tokens for spec in specs]
    name = (
        f"{stage} of {first.experts} expert{'s' if first.experts > 1 else ''}, {first.n} × {first.k}, "
        f"{experts.weight_format} weights, {experts.activation_format} rows"
    )
    if first.activation is not None:
        kind = {"swiglu": "SwiGLU", "situ": "SiTU"}[first.activation.kind]
        name += f", {kind}" + ("" if first.activation.limit is None else f" up to {first.activation.limit:g}")
    return name + f", tiles of {min(tokens)} to {max(tokens)} tokens"
