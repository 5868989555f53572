"""Where every tensor of an MoE layer lies and how it is stored, from names and file headers alone.

A plan is what :mod:`moe_layer.models.loader` executes and :mod:`moe_layer.models.inspect` reports. Names are checked
for all experts, so that every rank of a damaged checkpoint fails alike; headers are read for the experts asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError, ConfigError, MoELayerError
from moe_layer.models.checkpoint import Checkpoint, TensorInfo
from moe_layer.models.names import (
    DOWN,
    FUSED_DOWN,
    FUSED_GATE_UP,
    GATE,
    LATENT_DOWN,
    LATENT_NORM,
    LATENT_UP,
    ROUTER,
    UP,
    BlockNames,
    find_block,
)
from moe_layer.models.storage import SCHEMES, StoredMatrix, identify
from moe_layer.quant import get_format

FACTOR_BYTES = 4  # second-level and input scales are fp32

_FLOATS = ("BF16", "F32", "F16")
_SUFFIXES = {
    suffix
    for s in SCHEMES
    for suffix in (s.data, *s.scale, s.global_scale, s.input_scale, s.shape)
    if suffix is not None
}


class Problems:
    """What is wrong with a checkpoint: raised at once, or kept for a report.

    Attributes:
        missing, unexpected: tensor names.
        messages: one sentence each.
    """

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.messages: list[str] = []
        self._seen: set[str] = set()

    def add(self, error: MoELayerError, *, missing: str | None = None, unexpected: Sequence[str] = ()) -> None:
        if not self.collect:
            raise error
        if missing:
            self.missing.append(missing)
        self.unexpected.extend(unexpected)
        if str(error) not in self._seen:  # a missing file is found missing once per tensor
            self._seen.add(str(error))
            self.messages.append(str(error))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Errors raised inside are added."""
        try:
            yield
        except MoELayerError as error:
            self.add(error)


@dataclass
class MatrixGroup:
    """Gate and up, or down, of some experts: one format, one shape.

    Attributes:
        rows, columns: N and K of one part.
        matrices: (expert, part) → where it lies. Fused, there is one entry per expert (part 0) with the shared stack.
        fused: the gate and up parts follow each other in a stack over all experts.
    """

    rows: int
    columns: int
    parts: int
    fused: bool = False
    matrices: dict[tuple[int, int], StoredMatrix] = field(default_factory=dict)

    @property
    def format(self) -> str | None:
        """Registry name, None where no matrix could be identified."""
        return next((m.format for m in self.matrices.values()), None)

    @property
    def has_input_scale(self) -> bool:
        return any(m.input_scale is not None for m in self.matrices.values())

    def expert_nbytes(self) -> int:
        """Bytes of one expert's weights and their scales, once loaded."""
        if self.format is None:
            return 0
        fmt = get_format(self.format)
        factors = self.parts if fmt.two_level else 0
        return fmt.nbytes((self.parts, self.rows, self.columns)) + factors * FACTOR_BYTES


@dataclass
class LayerPlan:
    """All tensors of one MoE layer. Optional parts are None where the model has none."""

    layer: int
    names: BlockNames
    gate_up: MatrixGroup
    down: MatrixGroup
    router: TensorInfo | None = None
    bias: TensorInfo | None = None
    bias_vl: TensorInfo | None = None
    tid2eid: TensorInfo | None = None
    shared_gate_up: MatrixGroup | None = None
    shared_down: MatrixGroup | None = None
    latent_down: TensorInfo | None = None
    latent_norm: TensorInfo | None = None
    latent_up: TensorInfo | None = None

    @property
    def singles(self) -> list[TensorInfo]:
        """Router and latent tensors."""
        parts = (
            self.router, self.bias, self.bias_vl, self.tid2eid, self.latent_down, self.latent_norm, self.latent_up,
        )  # fmt: skip
        return [t for t in parts if t is not None]


def moe_layers(config: MoEConfig) -> list[int]:
    """Indices of the decoder's MoE layers."""
    return [i for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]


def check_layer(config: MoEConfig, layer: int) -> None:
    """Refuse a layer that is not MoE. Multi-token prediction layers, which follow the decoder's, are.

    Raises:
        ConfigError: names the MoE layers that there are.
    """
    following = config.extra.get("num_nextn_predict_layers", 0)
    last = config.num_hidden_layers + (following if isinstance(following, int) else 0)
    if not 0 <= layer < last or not config.is_moe_layer(layer):
        known = moe_layers(config)
        if not known:
            which = "it has none"
        elif known == list(range(known[0], known[-1] + 1)):
            which = f"its MoE layers are {known[0]} to {known[-1]}"
        else:
            which = f"its MoE layers are {', '.join(map(str, known))}"
        raise ConfigError(f"layer {layer} is not an MoE layer of this {config.model_type}: {which}")


def plan_layer(
    checkpoint: Checkpoint,
    config: MoEConfig,
    layer: int,
    experts: Sequence[int],
    problems: Problems | None = None,
) -> LayerPlan:
    """Find and check every tensor of a layer.

    Args:
        experts: global ids of the experts whose headers are read. Where it is empty, the first expert's are.
        problems: collects what is wrong instead of raising it; what could not be found is then absent in the plan.

    Raises:
        ConfigError: not an MoE layer.
        CheckpointError, FormatError: tensors missing, extra, mis-shaped or of unknown format.
    """
    check_layer(config, layer)
    problems = problems or Problems()
    names = find_block(checkpoint, config.model_type, layer)
    width, inter = config.routed_hidden_size, config.moe_intermediate_size
    plan = LayerPlan(layer, names, MatrixGroup(inter, width, 2), MatrixGroup(width, inter, 1))
    _plan_singles(checkpoint, config, plan, problems)
    if names.fused:
        _plan_fused(checkpoint, config, plan, experts or [0], problems)
    else:
        _check_expert_names(config, names, problems)
        for group, projections in ((plan.gate_up, (GATE, UP)), (plan.down, (DOWN,))):
            _plan_matrices(
                checkpoint,
                group,
                {
                    (e, part): (names.expert_base(e, p), names.experts.get((e, p)))
                    for e in (experts or [0])
                    for part, p in enumerate(projections)
                },
                problems,
            )
    _plan_shared(checkpoint, config, plan, problems)
    return plan


def _plan_singles(checkpoint: Checkpoint, config: MoEConfig, plan: LayerPlan, problems: Problems) -> None:
    experts, hidden, latent = config.n_routed_experts, config.hidden_size, config.routed_expert_hidden_size
    layout, is_hash = plan.names.layout, config.is_hash_layer(plan.layer)
    remaining = dict(plan.names.single)

    def take(relative: str, dtypes: Sequence[str], shape: tuple[int, ...], *, needed: bool = True) -> TensorInfo | None:
        full = remaining.pop(relative, None)
        if full is None:
            name = f"{plan.names.block}.{relative}"
            if needed:
                text = f"missing tensor {name}: expected {' or '.join(dtypes)} {list(shape)}"
                problems.add(CheckpointError(text), missing=name)
            return None
        with problems.guard():
            info = checkpoint.info(full)
            if info.dtype not in dtypes or info.shape != shape:
                raise CheckpointError(f"{full} is {info}; expected {' or '.join(dtypes)} {list(shape)}")
            return info
        return None

    plan.router = take(ROUTER, _FLOATS, (experts, hidden))
    if config.use_correction_bias:
        # Hash layers of DeepSeek-V4 may carry a bias that takes no part in anything.
        bias = take(layout.bias, _FLOATS, (experts,), needed=not is_hash)
        plan.bias = None if is_hash else bias
        plan.bias_vl = take(layout.bias_vl, _FLOATS, (experts,), needed=False)
    if is_hash:
        plan.tid2eid = take(layout.tid2eid, ("I64", "I32"), (config.vocab_size, config.num_experts_per_tok))
    if latent is not None:
        plan.latent_down = take(LATENT_DOWN, _FLOATS, (latent, hidden))
        plan.latent_up = take(LATENT_UP, _FLOATS, (hidden, latent))
        if config.latent_moe_use_norm:
            plan.latent_norm = take(LATENT_NORM, _FLOATS, (latent,))
    if remaining:
        names = sorted(remaining.values())
        problems.add(
            CheckpointError(
                f"extra tensor {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: "
                f"this {config.model_type} layer has no such part, ignoring it would change the result"
            ),
            unexpected=names,
        )


def _check_expert_names(config: MoEConfig, names: BlockNames, problems: Problems) -> None:
    """Every expert has each projection, and all have the same tensors of it."""
    beyond = sorted({e for e, _ in names.experts if e >= config.n_routed_experts})
    if beyond:
        extra = [n for (e, _), found in names.experts.items() if e >= config.n_routed_experts for n in found.values()]
        problems.add(
            CheckpointError(
                f"extra tensor {extra[0]}: expert {beyond[0]} of a layer whose config has "
                f"n_routed_experts={config.n_routed_experts}"
            ),
            unexpected=extra,
        )
    for projection in (GATE, UP, DOWN):
        sets = {e: names.experts.get((e, projection), {}) for e in range(config.n_routed_experts)}
        for found in sets.values():
            for suffix in sorted(found.keys() - _SUFFIXES):
                problems.add(
                    CheckpointError(
                        f"extra tensor {found[suffix]}: no format has a {suffix}, and experts have no bias"
                    ),
                    unexpected=[found[suffix]],
                )
        union = {suffix for found in sets.values() for suffix in found} & _SUFFIXES
        for e, found in sets.items():
            for suffix in sorted(union - found.keys()):
                name = f"{names.expert_base(e, projection)}.{suffix}"
                owner = next(i for i, other in sets.items() if suffix in other)
                problems.add(CheckpointError(f"missing tensor {name}, which expert {owner} has"), missing=name)
            if not union:
                name = f"{names.expert_base(e, projection)}.weight"
                problems.add(CheckpointError(f"missing tensor {name} or any other of its names"), missing=name)


def _plan_matrices(
    checkpoint: Checkpoint,
    group: MatrixGroup,
    wanted: Mapping[tuple[int, int], tuple[str, dict[str, str] | None]],
    problems: Problems,
) -> None:
    """Identify matrices that lie in tensors of their own; all must be of one format."""
    for key, (base, tensors) in wanted.items():
        if tensors is None:
            continue  # reported with the names
        with problems.guard():
            found = identify(checkpoint, base, tensors, group.rows, group.columns)
            first = next(iter(group.matrices.values()), found)
            if found.format != first.format:
                raise CheckpointError(
                    f"{found.data.name} is stored as {found.format}, but {first.data.name} as {first.format}; "
                    "the experts of a layer must share one format"
                )
            group.matrices[key] = found


def _plan_fused(
    checkpoint: Checkpoint, config: MoEConfig, plan: LayerPlan, experts: Sequence[int], problems: Problems
) -> None:
    """Experts in two stacks, as transformers holds them: ``[E, 2I, H]`` (gate rows first) and ``[E, H, I]``."""
    for (e, _), found in plan.names.experts.items():
        name = next(iter(found.values()))
        text = f"extra tensor {name}: expert {e} is also part of {plan.names.block}.{FUSED_GATE_UP}"
        problems.add(CheckpointError(text), unexpected=list(found.values()))
    for group, relative in ((plan.gate_up, FUSED_GATE_UP), (plan.down, FUSED_DOWN)):
        base = f"{plan.names.block}.{relative}"
        tensors = plan.names.fused.get(relative)
        if tensors is None:
            problems.add(CheckpointError(f"missing tensor {base}"), missing=base)
            continue
        with problems.guard():
            stack = identify(
                checkpoint, base, tensors, group.rows * group.parts, group.columns, stack=config.n_routed_experts
            )
            if group.parts > 1 and group.rows % stack.scheme.block[0]:
                raise CheckpointError(
                    f"{stack.data.name}: a scale block of {stack.scheme.block[0]} rows straddles gate and up, "
                    f"which have {group.rows} rows each"
                )
            group.fused = True
            group.matrices = {(e, 0): stack for e in experts}


def _plan_shared(checkpoint: Checkpoint, config: MoEConfig, plan: LayerPlan, problems: Problems) -> None:
    width = config.shared_intermediate_size
    if not width:
        extra = [name for found in plan.names.shared.values() for name in found.values()]
        if extra:
            text = f"extra tensor {extra[0]}: the config has no shared experts"
            problems.add(CheckpointError(text), unexpected=extra)
        return
    plan.shared_gate_up = MatrixGroup(width, config.hidden_size, 2)
    plan.shared_down = MatrixGroup(config.hidden_size, width, 1)
    for group, projections in ((plan.shared_gate_up, (GATE, UP)), (plan.shared_down, (DOWN,))):
        wanted = {}
        for part, projection in enumerate(projections):
            base, tensors = plan.names.shared_base(projection), plan.names.shared.get(projection)
            if tensors is None:
                text = f"missing tensor {base}.weight or any other of its names"
                problems.add(CheckpointError(text), missing=f"{base}.weight")
            wanted[0, part] = (base, tensors)
        _plan_matrices(checkpoint, group, wanted, problems)
