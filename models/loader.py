"""Loading one rank's share of an MoE layer, straight from the checkpoint's bytes.

Buffers are allocated once, in the layout that the kernels read; every stored tensor is then copied into its place, in
the order in which the tensors lie on disk. Where kernels read packed weights, an expert's tensors are read together and
packed at once, on a GPU while the next one is read, so that no more than two experts are ever held twice. Nothing is
dequantized or converted, and nothing of another rank's experts is read but names. E8M0 scales and packed 4-bit values
are reinterpreted as bytes (``view``); a numeric cast of them would change every value.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm import tqdm

from moe_layer.comm.placement import ExpertPlacement
from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError, ConfigError, FormatError
from moe_layer.gemm.register_tiles import RegisterTiles
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.models.checkpoint import Checkpoint, TensorInfo
from moe_layer.models.config import read_config
from moe_layer.models.plan import LayerPlan, MatrixGroup, plan_layer
from moe_layer.models.storage import StoredMatrix
from moe_layer.packed_weights import PackedExpertStack, make_stack
from moe_layer.quant import QuantizedTensor, get_format, validate_scales
from moe_layer.weights import ExpertStack

PROGRESS_DELAY_S = 2.0  # no bar for loads that are over before one could be read
E4M3_LARGEST, E8M0_LARGEST = 0x7E, 0xFE  # bytes of the largest finite scales

# :meth:`~moe_layer.gemm.backend.ComputeBackend.weight_layout` of the backend that will run weights of the given format.
WeightLayout = Callable[[str, int, int, int], RegisterTiles | None]


@dataclass(frozen=True)
class LayerTensors:
    """One rank's weights of an MoE layer, on one device, as they are stored. E_local is its number of routed experts.

    Attributes:
        layer: decoder layer.
        experts: global ids of the local experts, in local order.
        router_weight: ``[E, hidden_size]`` BF16, FP16 or FP32.
        router_bias: ``[E]`` ``e_score_correction_bias``, or None.
        router_bias_vl: ``[E]`` the bias that image tokens choose with (DeepSeek-V4.1), or None.
        tid2eid: ``[vocab_size, top_k]`` int64 or int32 experts of each token id (hash layers), or None.
        gate_up: gate and up of the local experts: parts = 2, N = moe_intermediate_size, K = routed width.
        down: down of the local experts: parts = 1, N = routed width, K = moe_intermediate_size.
        gate_up_input_scale, down_input_scale: ``[E_local]`` fp32, the factor that the checkpoint calibrated for the
            activations of each expert (NVFP4: ``x ≈ element · block scale · this``; gate and up share the larger one),
            or None where it holds none.
        shared_gate_up, shared_down: the shared experts as one MLP, in a format of their own (E_local = 1), or None.
        latent_down: ``[latent, hidden_size]``, latent_norm: ``[latent]``, latent_up: ``[hidden_size, latent]``; of a
            latent MoE, or None.
    """

    layer: int
    experts: tuple[int, ...]
    router_weight: torch.Tensor
    router_bias: torch.Tensor | None
    router_bias_vl: torch.Tensor | None
    tid2eid: torch.Tensor | None
    gate_up: ExpertWeights
    down: ExpertWeights
    gate_up_input_scale: torch.Tensor | None
    down_input_scale: torch.Tensor | None
    shared_gate_up: ExpertWeights | None
    shared_down: ExpertWeights | None
    latent_down: torch.Tensor | None
    latent_norm: torch.Tensor | None
    latent_up: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0
        for value in vars(self).values():
            if isinstance(value, (torch.Tensor, ExpertWeights)):
                total += value.nbytes
        return total


def load_layer(
    source: str | os.PathLike[str] | Checkpoint,
    layer: int,
    *,
    config: MoEConfig | None = None,
    placement: ExpertPlacement | None = None,
    rank: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    layout: WeightLayout | None = None,
    shared_layout: WeightLayout | None = None,
) -> LayerTensors:
    """Load the experts of ``rank``, and the router, shared experts and latent projections that every rank has.

    Peak memory is the loaded bytes, and two experts where weights are packed; beside it, the page cache holds what was
    read.

    Args:
        source: a checkpoint folder or file, or an open :class:`Checkpoint`, which stays open.
        layer: decoder layer.
        config: the model; None reads it from the folder.
        placement: which rank holds which expert; None means all on rank 0.
        rank: this rank.
        device: where the tensors go; None for the CPU.
        progress: show a progress bar on stderr, if that is a terminal and the load takes longer than 2 s.
        layout, shared_layout: how weights of the routed and of the shared experts are to be packed, called with format,
            parts, N and K of a projection group; None, or where it returns None: as the format stores them.

    Raises:
        ConfigError: not an MoE layer, a placement of another number of experts, a rank outside it.
        CheckpointError: damaged files; missing, extra, mis-shaped tensors, of an unknown dtype.
        FormatError: missing, NaN, zero or negative scales.
    """
    if not isinstance(source, Checkpoint):
        with Checkpoint(source) as checkpoint:
            return load_layer(
                checkpoint, layer, config=config, placement=placement, rank=rank, device=device, progress=progress,
                layout=layout, shared_layout=shared_layout,
            )  # fmt: skip
    config = config or read_config(source.path)
    placement = placement or ExpertPlacement.contiguous(config.n_routed_experts, 1)
    if placement.num_experts != config.n_routed_experts:
        raise ConfigError(
            f"the placement has {placement.num_experts} experts, but the config n_routed_experts="
            f"{config.n_routed_experts}"
        )
    if not 0 <= rank < placement.ep_size:
        raise ConfigError(f"rank {rank} is outside the placement's ranks 0…{placement.ep_size - 1}")
    experts = tuple(placement.local_experts(rank))
    plan = plan_layer(source, config, layer, experts)
    return _Loader(source, plan, experts, torch.device(device or "cpu"), progress, layout, shared_layout).load()


@dataclass(frozen=True)
class _Copy:
    """Bytes of a stored tensor (of its row ``index``, where experts lie in a stack) → their place.

    ``target`` gives that place when the copy's turn has come.
    """

    source: TensorInfo
    target: Callable[[], torch.Tensor]
    nbytes: int
    index: int | None = None
    rows: slice | None = None


@dataclass
class _Job:
    """Copies that are done together, and what is then to do."""

    copies: list[_Copy] = field(default_factory=list)
    finish: Callable[[], None] | None = None


class _Loader:
    """Collects copies while buffers are laid out, then does them in disk order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: LayerPlan,
        experts: Sequence[int],
        device: torch.device,
        progress: bool,
        layout: WeightLayout | None,
        shared_layout: WeightLayout | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.experts = experts
        self.device = device
        self.progress = progress
        self.layout = layout
        self.shared_layout = shared_layout
        self.jobs: list[_Job] = []
        self.checks: list[tuple[MatrixGroup, Sequence[int], ExpertStack]] = []
        self.packed: list[PackedExpertStack] = []

    def load(self) -> LayerTensors:
        plan = self.plan
        assert plan.router is not None  # a strict plan has every required part
        singles = {
            "router_weight": self._tensor(plan.router),
            "router_bias": self._optional(plan.bias),
            "router_bias_vl": self._optional(plan.bias_vl),
            "tid2eid": self._optional(plan.tid2eid),
            "gate_up_input_scale": self._input_scale(plan.gate_up),
            "down_input_scale": self._input_scale(plan.down),
            "latent_down": self._optional(plan.latent_down),
            "latent_norm": self._optional(plan.latent_norm),
            "latent_up": self._optional(plan.latent_up),
        }
        stacks = {
            "gate_up": self._stack(plan.gate_up, self.experts, self.layout),
            "down": self._stack(plan.down, self.experts, self.layout),
            "shared_gate_up": self._optional_stack(plan.shared_gate_up),
            "shared_down": self._optional_stack(plan.shared_down),
        }
        self._run_jobs()
        for group, experts, stack in self.checks:
            _check_scales(group, experts, stack.weights())
        weights = {name: None if stack is None else stack.weights() for name, stack in stacks.items()}
        result = LayerTensors(plan.layer, tuple(self.experts), **singles, **weights)  # type: ignore[arg-type]
        if result.tid2eid is not None and plan.tid2eid is not None:
            _check_table(plan.tid2eid, result.tid2eid, result.router_weight.shape[0])
        return result

    # ---- laying out ----

    def _tensor(self, info: TensorInfo) -> torch.Tensor:
        dtype = _TORCH_DTYPES[info.dtype]
        target = torch.empty(info.shape, dtype=dtype, device=self.device)
        self.jobs.append(_Job([_Copy(info, lambda: target, target.nbytes)]))
        return target

    def _optional(self, info: TensorInfo | None) -> torch.Tensor | None:
        return None if info is None else self._tensor(info)

    def _optional_stack(self, group: MatrixGroup | None) -> ExpertStack | None:
        return None if group is None else self._stack(group, (0,), self.shared_layout)

    def _stack(self, group: MatrixGroup, experts: Sequence[int], layout: WeightLayout | None) -> ExpertStack:
        """Buffers of a projection group of ``experts``, and the jobs that fill them."""
        assert group.format is not None
        shape = (group.format, group.parts, group.rows, group.columns)
        tiles = None if layout is None else layout(*shape)
        stack = make_stack(len(experts), group.parts, group.rows, group.columns, group.format, self.device, tiles)
        like = stack.weights()
        factors = [[1.0] * group.parts for _ in experts]
        for local, expert in enumerate(experts):
            copies = []
            for part in range(group.parts):
                stored = group.matrices[expert, 0 if group.fused else part]
                index = expert if group.fused else None
                self._check_logical_shape(stored)
                for which, (info, buffer) in enumerate(((stored.data, like.data), (stored.scale, like.scale))):
                    if info is None or buffer is None:
                        continue
                    target = buffer[local, part]
                    rows = slice(part * target.shape[0], (part + 1) * target.shape[0]) if group.fused else None
                    place = partial(_place, stack, local, part, which)
                    copies.append(_Copy(info, place, target.nbytes, index, rows))
                if stored.global_scale is not None:
                    factors[local][part] = self._factor(stored, stored.global_scale, index)
            if isinstance(stack, PackedExpertStack):
                self.jobs.append(_Job(copies, partial(_pack, stack, local, group, expert)))
            else:
                self.jobs += [_Job([copy]) for copy in copies]
        if stack.global_scale is not None:
            stack.global_scale.copy_(torch.tensor(factors).view(-1, group.parts))
        if isinstance(stack, PackedExpertStack):
            self.packed.append(stack)
        else:
            self.checks.append((group, experts, stack))
        return stack

    def _input_scale(self, group: MatrixGroup) -> torch.Tensor | None:
        if not group.has_input_scale:
            return None
        values = []
        for expert in self.experts:
            stored = [m for p in range(group.parts) if (m := group.matrices.get((expert, p))) and m.input_scale]
            values.append(max(self._factor(m, m.input_scale, None) for m in stored if m.input_scale))
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _factor(self, stored: StoredMatrix, info: TensorInfo, index: int | None) -> float:
        """An fp32 second-level scale as the factor that multiplies the values."""
        tensor = self.checkpoint.tensor(info.name)
        value = float((tensor if index is None else tensor[index]).reshape(()))
        if not (math.isfinite(value) and value > 0):
            raise FormatError(f"{info.name} is {value:g}, expected a finite and positive scale")
        return 1.0 / value if stored.scheme.reciprocal else value

    def _check_logical_shape(self, stored: StoredMatrix) -> None:
        if stored.shape is None:
            return
        found = self.checkpoint.tensor(stored.shape.name).flatten().tolist()
        if found != [stored.rows, stored.columns]:
            raise CheckpointError(f"{stored.shape.name} says {found}; expected {[stored.rows, stored.columns]}")

    # ---- copying ----

    def _run_jobs(self) -> None:
        names = [copy.source.name for job in self.jobs for copy in job.copies]
        order = {name: i for i, name in enumerate(self.checkpoint.storage_order(names))}
        for job in self.jobs:
            job.copies.sort(key=lambda c: (order[c.source.name], c.index or 0))
        self.jobs.sort(key=lambda job: (order[job.copies[0].source.name], job.copies[0].index or 0))
        total = sum(copy.nbytes for job in self.jobs for copy in job.copies)
        # disable=None: no bar unless stderr is a terminal
        with tqdm(
            total=total, unit="B", unit_scale=True, desc=f"loading layer {self.plan.layer}", leave=False,
            delay=PROGRESS_DELAY_S, file=sys.stderr, disable=None if self.progress else True,
        ) as bar, ExitStack() as packing:  # fmt: skip
            for stack in self.packed:
                packing.enter_context(stack.overlapped())
            for job in self.jobs:
                for copy in job.copies:
                    _copy_bits(copy.target(), self._read(copy))
                    bar.update(copy.nbytes)
                if job.finish is not None:
                    job.finish()

    def _read(self, copy: _Copy) -> torch.Tensor:
        if copy.index is None:
            source = self.checkpoint.tensor(copy.source.name)
        else:
            source = self.checkpoint.slice(copy.source.name)[copy.index]
        return source if copy.rows is None else source[copy.rows]


def _place(stack: ExpertStack, local: int, part: int, which: int) -> torch.Tensor:
    """Where data (``which`` = 0) or scales (1) of a part go."""
    if isinstance(stack, PackedExpertStack):
        return stack.staging(local)[which][part]
    buffer = (stack.data, stack.scale)[which]
    assert buffer is not None
    return buffer[local, part]


def _pack(stack: PackedExpertStack, local: int, group: MatrixGroup, expert: int) -> None:
    """Check one expert's scales and pack it."""
    data, scale = stack.staging(local)
    if not _all_good(scale, stack.global_scale is not None):
        for part in range(group.parts):
            factor = None if stack.global_scale is None else stack.global_scale[local, part]
            q = QuantizedTensor(stack.weight_format, data[part], scale[part], factor, stack.columns)
            _validate(group, expert, part, q)
    stack.commit(local, name=group.matrices[expert, 0].data.name)


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy without converting. Where dtypes differ, both hold the same bits (the plan has checked which)."""
    if source.dtype != target.dtype:
        assert target.dtype == torch.uint8, (source.dtype, target.dtype)
        # int32 words hold eight 4-bit values, little-endian; a row may end inside one
        source = source.contiguous().view(torch.uint8)[..., : target.shape[-1]]
    target.copy_(source)


def _check_scales(group: MatrixGroup, experts: Sequence[int], weights: ExpertWeights) -> None:
    """Refuse scales that give no value, by the name of their tensor."""
    if weights.scale is None or _all_good(weights.scale, get_format(weights.format).two_level):
        return
    for local, expert in enumerate(experts):
        for part in range(group.parts):
            _validate(group, expert, part, weights.expert(local, part))


def _validate(group: MatrixGroup, expert: int, part: int, q: QuantizedTensor) -> None:
    stored = group.matrices[expert, 0 if group.fused else part]
    if stored.scale is not None:
        validate_scales(q, stored.scale.name)


def _all_good(scale: torch.Tensor, two_level: bool) -> bool:
    """Whether surely nothing is wrong, in one fast pass over all experts: this much of a load would show otherwise.

    False may be a false alarm (a −0 of NVFP4); :func:`~moe_layer.quant.validate_scales` then decides.
    """
    if scale.numel() == 0:
        return True
    if scale.element_size() > 1:
        low, high = scale.aminmax()  # NaN in either where there is one
        return bool((low > 0) & (high < torch.inf))
    largest = scale.view(torch.uint8).amax((-2, -1))
    # E4M3 bytes are ordered up to 0x7E = 448, then come NaN and the negative ones; in E8M0 255 is NaN.
    limit = E4M3_LARGEST if two_level else E8M0_LARGEST
    return bool((largest <= limit).all() and (not two_level or (largest > 0).all()))


def _check_table(info: TensorInfo, table: torch.Tensor, experts: int) -> None:
    bad = (table < 0) | (table >= experts)
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{info.name} sends token {row} to expert {int(table[row, column])}, but there are experts 0…{experts - 1}"
        )


_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
