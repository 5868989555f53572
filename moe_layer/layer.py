"""The MoE layer (DESIGN §1): route, quantize, dispatch, index, FC1, FC2, finalize, combine, shared experts."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_layer.backend import resolve_device, select_backend, select_layout
from moe_layer.comm import DispatchResult
from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError, ConfigError, FormatError, TensorError
from moe_layer.gated_mlp import GatedMLP, activation_of
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.latent import LatentProjection
from moe_layer.parallel import ExpertParallel
from moe_layer.quant import QuantizedTensor, get_format
from moe_layer.router import Router
from moe_layer.shared_experts import SharedExperts
from moe_layer.stages import Profiler
from moe_layer.wire import Wire, implied_activation_format, shared_activation_format

if TYPE_CHECKING:
    from moe_layer.models.loader import LayerTensors

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _exact(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """No gradients, and no autocast: the formats of every operand are the layer's own."""

    @functools.wraps(method)
    def run(self: MoELayer, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return run


class MoELayer(nn.Module):
    """The MoE block of one decoder layer, with this rank's share of the experts.

    Made empty; :meth:`from_pretrained`, :meth:`load_experts` or ``load_state_dict`` bring the weights. Forward is
    inference only. What a token becomes does not depend on the other tokens, on their number, or on the rank that it
    came from, to the bit.

    Args:
        cfg: the model.
        ep: the group that holds the experts; None: this process holds them all.
        layer: number of the decoder layer (hash layers, per-layer placements).
        activation_format: what tokens travel and are multiplied in; None: what the weight format implies.
        weight_format: of the routed experts; None: what ``cfg.quantization`` says, else that of ``dtype``.
        dtype: of unquantized weights, ``torch.bfloat16`` or ``torch.float32``. With float32 nothing is rounded to BF16
            anywhere, and partial results travel in FP32.
        device: where the layer runs; None: the current GPU where there is one, else the CPU.
        backend: computes the experts; None: the fastest that serves the device and the formats.
        shared_weight_format: of the shared experts; None: that of ``dtype``, or the routed one if it is an FP8 format.
        quantize_at: ``"source"``: tokens are quantized, then dispatched; ``"target"``: they travel in ``dtype`` and are
            quantized on arrival (:mod:`moe_layer.wire`). For rows of that dtype (not Kimi-K3's latent ones, which are
            FP32 otherwise) the output is the same, to the bit.
        allocate: False leaves expert weights without memory, for :meth:`adopt_tensors` to bring.

    Raises:
        ConfigError: an unsupported dtype or ``quantize_at``, an impossible placement.
        FormatError: an unknown format name.
        UnsupportedDeviceError: a device that is not there.

    Attributes:
        gate: :class:`Router`.
        routed_experts: :class:`~moe_layer.gated_mlp.GatedMLP` of the local experts.
        shared_experts: :class:`SharedExperts` or None.
        latent: :class:`LatentProjection` or None.
        weight_format, activation_format: registry names, as chosen.
        dispatch_format: registry name of what tokens travel in.
        local_experts: global ids of this rank's experts, in local order.
        profiler: called with a stage's name, wraps the stage; None for none.
        input_global_scale: scalar fp32, NVFP4's static scale of the activations, the same on every rank; None: each
            row has its own.
        fc1_output_global_scale: ``[num_local_experts]`` fp32, the same for FC1's output of each expert; None likewise.
    """

    input_global_scale: torch.Tensor | None
    fc1_output_global_scale: torch.Tensor | None
    local_table: torch.Tensor | None

    def __init__(
        self,
        cfg: MoEConfig,
        ep: ExpertParallel | None = None,
        *,
        layer: int = 0,
        activation_format: str | None = None,
        weight_format: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: ComputeBackend | None = None,
        shared_weight_format: str | None = None,
        quantize_at: str = "source",
        allocate: bool = True,
    ) -> None:
        super().__init__()
        if dtype not in PLAIN_FORMATS:
            raise ConfigError(f"dtype must be torch.bfloat16 or torch.float32, got {dtype}")
        plain = PLAIN_FORMATS[dtype]
        if weight_format is None:
            weight_format = cfg.quantization.expert_format if cfg.quantization else plain
        if activation_format is None:
            activation_format = implied_activation_format(weight_format)
        if shared_weight_format is None:
            stored = cfg.quantization.shared_format if cfg.quantization else None
            shared_weight_format = stored or (weight_format if weight_format.startswith("fp8") else plain)
        self.cfg = cfg
        self.layer = layer
        self.weight_format = weight_format
        self.activation_format = activation_format
        self._format = get_format(activation_format)
        self.device = resolve_device(device)
        self.backend = backend or select_backend(self.device, weight_format, activation_format)
        self.activation = activation_of(cfg)
        self.ep = ep if ep is not None else ExpertParallel(device=self.device)
        self.ep.check_device(self.device)
        self.placement = self.ep.placement(layer, cfg.n_routed_experts)
        self.local_experts = self.placement.local_experts(self.ep.ep_rank)
        width, inner, count = cfg.routed_hidden_size, cfg.moe_intermediate_size, len(self.local_experts)
        self.comm = self.ep.communicator(self.placement, width)
        self.partial_dtype = torch.float32 if activation_format == "fp32" else torch.bfloat16
        self.quantize_at = quantize_at
        self._wire = Wire(self._format, in_kernel=self.comm.encodes_in_kernel, quantize_at=quantize_at, plain=plain)
        wire = self._wire.travelling
        self.dispatch_format = wire.name
        # A scale a row may travel with two-level formats; see Format.to_wire.
        scale_bytes = wire.scale_row_bytes(width, per_row_global_scale=wire.two_level)
        self.comm.reserve(
            wire.row_bytes(width), scale_bytes, cfg.num_experts_per_tok, self.partial_dtype.itemsize,
            self._wire.encoder(None),
        )  # fmt: skip
        self.profiler: Profiler | None = None

        place = self.device if allocate else torch.device("meta")
        self.gate = Router(cfg, layer=layer, device=self.device)
        self.routed_experts = GatedMLP(count, width, inner, weight_format, place, self.backend)
        self.shared_experts: SharedExperts | None = None
        if cfg.shared_intermediate_size:
            shared_activation = shared_activation_format(activation_format)
            self.shared_experts = SharedExperts(
                cfg.hidden_size,
                cfg.shared_intermediate_size,
                self.activation,
                shared_weight_format,
                shared_activation,
                select_backend(self.device, shared_weight_format, shared_activation),
                place,
            )
        self.latent: LatentProjection | None = None
        if cfg.routed_expert_hidden_size is not None:
            self.latent = LatentProjection(
                cfg.hidden_size,
                width,
                use_norm=cfg.latent_moe_use_norm,
                eps=cfg.rms_norm_eps,
                dtype=dtype,
                device=self.device,
            )
        self.register_buffer("input_global_scale", None)
        self.register_buffer("fc1_output_global_scale", None)
        # Consecutive experts need no table.
        self.first_expert = self.local_experts[0] if self.local_experts else 0
        consecutive = self.local_experts == list(range(self.first_expert, self.first_expert + count))
        table = None if consecutive else self.placement.local_table(self.ep.ep_rank, self.device)
        self.register_buffer("local_table", table, persistent=False)

    # ---- weights ----

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        layer: int,
        ep: ExpertParallel | None = None,
        activation_format: str | None = None,
        device: torch.device | str | None = None,
        *,
        quantize_at: str = "source",
    ) -> MoELayer:
        """Load one decoder layer's MoE block from a checkpoint folder: this rank's experts only.

        Static activation scales that an NVFP4 checkpoint may hold are left aside: a scale for each row, which travels
        with it, saturates nothing and needs no agreement between ranks (:meth:`set_static_scales` sets them).

        Raises:
            ConfigError: a config that is not understood, a layer that is not MoE, or an unknown ``quantize_at``.
            CheckpointError, FormatError: tensors that are missing, extra, mis-shaped or without their scales.
        """
        # The one upward import: models builds on this class, and this method is the facade to it.
        from moe_layer.models.loader import load_layer

        if not isinstance(layer, int) or isinstance(layer, bool):
            raise ConfigError(f"layer must be an integer, got {layer!r}")
        if ep is not None and not isinstance(ep, ExpertParallel):
            raise ConfigError(f"ep must be an ExpertParallel or None, got {type(ep).__name__}")
        cfg = MoEConfig.from_pretrained(path)
        device = resolve_device(device)
        ep = ep if ep is not None else ExpertParallel(device=device)
        placement = ep.placement(layer, cfg.n_routed_experts)
        layouts = [
            functools.partial(select_layout, device, activations)
            for activations in (activation_format, shared_activation_format(activation_format))
        ]
        tensors = load_layer(
            path, layer, config=cfg, placement=placement, rank=ep.ep_rank, device=device,
            layout=layouts[0], shared_layout=layouts[1],
        )  # fmt: skip
        plain = tensors.gate_up.format == "fp32"
        self = cls(
            cfg,
            ep,
            layer=layer,
            activation_format=activation_format,
            weight_format=tensors.gate_up.format,
            dtype=torch.float32 if plain else torch.bfloat16,
            device=device,
            shared_weight_format=None if tensors.shared_gate_up is None else tensors.shared_gate_up.format,
            quantize_at=quantize_at,
            allocate=False,
        )
        self.adopt_tensors(tensors)
        return self

    def adopt_tensors(self, tensors: LayerTensors) -> None:
        """Take what :func:`moe_layer.models.loader.load_layer` loaded; expert weights are not copied.

        Raises:
            CheckpointError: formats or shapes other than the layer's.
        """
        self.routed_experts.gate_up.adopt(tensors.gate_up, name="routed gate_up")
        self.routed_experts.down.adopt(tensors.down, name="routed down")
        if self.shared_experts is not None:
            assert tensors.shared_gate_up is not None and tensors.shared_down is not None
            self.shared_experts.gate_up.adopt(tensors.shared_gate_up, name="shared gate_up")
            self.shared_experts.down.adopt(tensors.shared_down, name="shared down")
        self.gate.load(tensors.router_weight, tensors.router_bias, tensors.router_bias_vl, tensors.tid2eid)
        if self.latent is not None:
            assert tensors.latent_down is not None and tensors.latent_up is not None
            self.latent.load(tensors.latent_down, tensors.latent_up, tensors.latent_norm)

    def load_experts(self, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
        """Take this rank's experts from stacked floating weights, quantizing where the weight format asks for it.

        Args:
            gate_up_proj: ``[n_routed_experts, 2·intermediate, hidden]``, gate rows first (transformers' layout).
            down_proj: ``[n_routed_experts, hidden, intermediate]``.

        Raises:
            CheckpointError: a wrong shape or dtype.
        """
        experts, inner, width = self.cfg.n_routed_experts, self.cfg.moe_intermediate_size, self.cfg.routed_hidden_size
        for name, tensor, shape in (
            ("gate_up_proj", gate_up_proj, [experts, 2 * inner, width]),
            ("down_proj", down_proj, [experts, width, inner]),
        ):
            if list(tensor.shape) != shape:
                raise CheckpointError(f"{name} is {list(tensor.shape)}, expected {shape}")
        for expert in self.local_experts:
            gate, up = gate_up_proj[expert].chunk(2)
            self.load_expert(expert, gate, up, down_proj[expert])

    def load_expert(
        self,
        expert: int,
        gate: torch.Tensor | QuantizedTensor,
        up: torch.Tensor | QuantizedTensor,
        down: torch.Tensor | QuantizedTensor,
    ) -> None:
        """Set one expert's weights; experts of other ranks are ignored, so every rank can run the same loop.

        Args:
            expert: global id.
            gate, up: ``[intermediate, hidden]``: floating, or quantized in the layer's weight format.
            down: ``[hidden, intermediate]``, likewise.

        Raises:
            CheckpointError: an expert that the model does not have, a wrong format, shape or dtype.
        """
        if not 0 <= expert < self.cfg.n_routed_experts:
            raise CheckpointError(f"expert {expert} does not exist: the layer has {self.cfg.n_routed_experts}")
        if self.placement.rank_of[expert] != self.ep.ep_rank:
            return
        local, experts = self.placement.local_of[expert], self.routed_experts
        for stack, part, name, weight in (
            (experts.gate_up, 0, "gate", gate),
            (experts.gate_up, 1, "up", up),
            (experts.down, 0, "down", down),
        ):
            load = stack.load_expert if isinstance(weight, QuantizedTensor) else stack.quantize_expert
            load(local, part, weight, name=f"expert {expert} {name}")  # type: ignore[arg-type]

    def set_static_scales(self, input: torch.Tensor, fc1_output: torch.Tensor) -> None:
        """Use NVFP4's static activation scales (:attr:`input_global_scale`, :attr:`fc1_output_global_scale`).

        Raises:
            ConfigError: the activations have no second-level scale.
            FormatError: a scale that is not finite and positive.
            CheckpointError: a wrong shape or dtype.
        """
        if not self._format.two_level:
            raise ConfigError(f"{self._format.name} activations have no static scale")
        for name, scale, shape in (
            ("input_global_scale", input, []),
            ("fc1_output_global_scale", fc1_output, [len(self.local_experts)]),
        ):
            if list(scale.shape) != shape or scale.dtype != torch.float32:
                raise CheckpointError(f"{name} is {list(scale.shape)} {scale.dtype}, expected {shape} torch.float32")
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise FormatError(f"{name} must be finite and positive, got {scale.flatten().tolist()}")
            setattr(self, name, scale.to(self.device))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, but what is missing, extra or mis-shaped is a ``CheckpointError``."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise CheckpointError(str(error)) from None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("input_global_scale", "fc1_output_global_scale"):
            saved = state_dict.get(prefix + name)
            setattr(self, name, None if saved is None else torch.empty_like(saved, device=self.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MoELayer:
        """``to(dtype)``, ``half()`` and the like leave the layer as it is: its formats are its checkpoint's."""
        place = fn(torch.zeros(1, device=self.device)).device
        if place != self.device:
            raise ConfigError(f"layer {self.layer} is on {self.device} and cannot be moved to {place}; load it there")
        return self

    # ---- compute ----

    @_exact
    def forward(
        self,
        x: torch.Tensor,
        tokens_per_rank: int | None = None,
        input_ids: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The whole block: router, routed experts, shared experts.

        Args:
            x: ``[T, hidden_size]`` or ``[B, S, hidden_size]`` BF16, FP16 or FP32. T may differ from rank to rank and
                may be 0, but every rank of the group must call.
            tokens_per_rank: T̂, the largest T of any rank in this step, the same on every rank; None: the group's
                ``max_tokens_per_rank`` (T itself in a group of one).
            input_ids: token ids, shaped as ``x`` without its last dimension; hash layers need them.
            image_mask: bool, shaped likewise: which tokens are image tokens (DeepSeek-V4.1).

        Returns:
            The same shape and dtype.

        Raises:
            TensorError: a wrong dtype, shape or device.
            CapacityError: T > T̂, or T̂ > ``max_tokens_per_rank``.
            CheckpointError: experts whose weights were never loaded.
            CommunicationError: a peer failed, disagrees, or did not come in time.
        """
        with self._peers_told():
            rows = self._rows("x", x, self.cfg.hidden_size)
            if self.shared_experts is not None and not self.shared_experts.is_loaded:
                raise CheckpointError(f"layer {self.layer}: the shared experts have no weights yet")
            self.gate.check_loaded()
            input_ids, image_mask = (None if t is None else t.reshape(-1) for t in (input_ids, image_mask))
            with self._stage("route"):
                ids, weights = self.gate(rows, input_ids, image_mask)
            with self._stage("quantize"):
                z = rows if self.latent is None else self.latent.enter(rows)
        y = self._route_through(z, ids, weights, tokens_per_rank)
        with self._stage("shared"):
            if self.latent is not None:
                y = self.latent.leave(y)
            if self.shared_experts is not None:
                y = y + self.shared_experts(rows)
        return y.to(x.dtype).view(x.shape)

    @_exact
    def experts(
        self,
        z: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: int | None = None,
    ) -> torch.Tensor:
        """The routed experts alone, for callers with a router of their own.

        Args:
            z: ``[T, routed width]`` (Kimi-K3: the latent width, before norm and up projection), BF16, FP16 or FP32.
            topk_ids: ``[T, k]`` int32 or int64 global ids, k ≤ 32. A repeated id counts each time; an id outside
                [0, n_routed_experts) adds nothing.
            topk_weights: ``[T, k]`` fp32, used as given.
            tokens_per_rank: as in :meth:`forward`.

        Returns:
            ``[T, routed width]`` in ``z``'s dtype.

        Raises:
            As :meth:`forward`.
        """
        with self._peers_told():
            rows = self._rows("z", z, self.cfg.routed_hidden_size)
            for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
                if not isinstance(tensor, torch.Tensor):
                    raise TensorError(f"{name} must be a tensor, got {type(tensor).__name__}")
            topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
        return self._route_through(rows, topk_ids, topk_weights, tokens_per_rank).to(z.dtype).view(z.shape)

    def _route_through(
        self, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tokens_per_rank: int | None
    ) -> torch.Tensor:
        """``[T, routed width]`` → the weighted sum of the experts' outputs, fp32."""
        experts = self.routed_experts
        if tokens_per_rank is None and self.ep.ep_size == 1:
            tokens_per_rank = z.shape[0]
        with self._peers_told():
            if missing := len(experts.gate_up.unloaded) + len(experts.down.unloaded):
                raise CheckpointError(f"layer {self.layer}: {missing} expert projections have no weights yet")
            rows, scales, encoder = z, None, self._wire.encoder(self.input_global_scale)
            fused = self.comm.fuses(encoder, z, tokens_per_rank)
            if not fused:
                with self._stage("quantize"):
                    rows, scales = encoder.quantize(z)
        with self._stage("dispatch"):
            received = self.comm.dispatch(
                rows,
                ids,
                weights,
                hidden_states_scale=scales,
                runtime_max_tokens_per_rank=tokens_per_rank,
                encoder=encoder if fused else None,
            )
        with self._peers_told():
            buffer = self._compute(received, z.shape[1])
        with self._stage("combine"):
            # fp32, so that the shared experts are added before the one rounding to the caller's dtype.
            return self.comm.combine(buffer, output=torch.empty(z.shape, dtype=torch.float32, device=z.device))

    def _compute(self, received: DispatchResult, width: int) -> torch.Tensor:
        """The experts' work on what was received; returns the combine input, ``[S, width]``."""
        fmt, experts, backend = self._format, self.routed_experts, self.backend
        with self._stage("index"):
            index = backend.build_index(
                received.topk_ids, self.first_expert, len(self.local_experts), local_table=self.local_table
            )
            # As many as uniform routing gives: kernels choose their tiles by it.
            share = len(self.local_experts) / self.cfg.n_routed_experts
            index = replace(index, expected_rows=math.ceil(received.topk_ids.numel() * share))
        with self._stage("quantize"):
            x = self._wire.receive(received, width, self.input_global_scale)
        with self._stage("fc1"):
            h = backend.fc1(
                x,
                experts.gate_up.weights(),
                index,
                self.activation,
                fmt.name,
                output_global_scale=self.fc1_output_global_scale,
            )
        with self._stage("fc2"):
            partial = backend.fc2(h, experts.down.weights(), index)
        with self._stage("finalize"):
            assert received.topk_weights is not None
            buffer = self.comm.get_combine_input_buffer(self.partial_dtype)
            backend.finalize(partial, index, received.topk_weights, buffer)
        return buffer

    @contextmanager
    def _peers_told(self) -> Iterator[None]:
        """Code outside dispatch and combine: if it fails, the peers, who wait in those, are told."""
        try:
            yield
        except BaseException as error:
            self.comm.give_up(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise

    def _rows(self, name: str, x: torch.Tensor, width: int) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TensorError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in ROW_DTYPES:
            raise TensorError(f"{name} has dtype {x.dtype}, expected torch.bfloat16, torch.float16 or torch.float32")
        if x.dim() not in (2, 3) or x.shape[-1] != width:
            raise TensorError(f"{name} has shape {list(x.shape)}, expected [T, {width}] or [B, S, {width}]")
        if x.device != self.device:
            raise TensorError(f"{name} is on {x.device}, but the layer is on {self.device}")
        return x.reshape(-1, width).contiguous()

    def _stage(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.profiler is None else self.profiler(name)

    def extra_repr(self) -> str:
        return (
            f"layer={self.layer}, experts={len(self.local_experts)}/{self.cfg.n_routed_experts}, "
            f"top_k={self.cfg.num_experts_per_tok}, weights={self.weight_format}, "
            f"activations={self.activation_format} at the {self.quantize_at}, backend={self.backend.name}, "
            f"protocol={self.comm.protocol}, ep_rank={self.ep.ep_rank}/{self.ep.ep_size}"
        )
