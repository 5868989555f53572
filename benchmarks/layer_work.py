"""One rank's MoE layer as the harness times it, with random experts, and a check against fp64.

A step is :meth:`MoELayer.experts`: quantize, dispatch, index, FC1, FC2, finalize, combine, for given ids and weights;
with ``route`` the router's two kernels before it, whose choice nobody follows. Shared experts are not part of it (the
paper's layer is the routed one). With the transport ``"none"`` the step is one rank's MoE compute, on what dispatch
would have left there (:mod:`moe_layer.benchmarks.stand_in`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.benchmarks.routers import ROUTERS
from moe_layer.benchmarks.routing import Routing, copies
from moe_layer.benchmarks.shapes import Shape
from moe_layer.benchmarks.stand_in import StandInChannel
from moe_layer.comm import Channel, DispatchResult, ExpertPlacement
from moe_layer.config import MoEConfig
from moe_layer.errors import ConfigError, MoELayerError
from moe_layer.layer import MoELayer
from moe_layer.parallel import ExpertParallel
from moe_layer.quant import get_format
from moe_layer.router import Router

TIMEOUT_S = 30.0  # of a wait between ranks: far beyond any step, short enough for a benchmark
ALONE = "none"  # the transport of one rank without its peers
ONE_SIDED = ("auto", "one-sided", "sentinel", "fence")
PORTABLE = ("collective", "loopback")
TRANSPORTS = (*ONE_SIDED, *PORTABLE, ALONE)
CHECKED_TOKENS = 2  # of a rank, in fp64
ERROR_LIMIT = 5.7e-3  # relative L2, the paper's (Appendix B)
EXPERT_FORMAT = {"fp8": "fp8_128x128"}  # weights whose scales span rows


class LayerError(MoELayerError, RuntimeError):
    """A layer's output was wrong."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        shape: the model; its formats are the layer's.
        tokens: T on every rank, and T̂.
        protocol: one of :data:`TRANSPORTS`, or the name of a peer.
        ep_size: ranks.
        routing: which experts the tokens select.
        seed: of ids, values and weights.
        quantize_at: as of :class:`~moe_layer.layer.MoELayer`.
        route: whether the router runs too.
    """

    shape: Shape
    tokens: int
    protocol: str
    ep_size: int
    routing: Routing
    seed: int = 0
    quantize_at: str = "source"
    route: bool = False

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement.contiguous(self.shape.num_experts, self.ep_size)

    @property
    def weight_format(self) -> str:
        return EXPERT_FORMAT.get(self.shape.weight_format, self.shape.weight_format)

    def config(self) -> MoEConfig:
        """The routed experts as a model of their own."""
        shape, act = self.shape, self.shape.activation
        return MoEConfig(
            "benchmark", shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k,
            hidden_act="situ" if act.kind == "situ" else "silu", swiglu_limit=act.limit,
            situ_beta=act.beta, situ_linear_beta=act.linear_beta,
        )  # fmt: skip

    def ids(self, rank: int) -> torch.Tensor:
        """``[T, top_k]`` int32, on the CPU, of source rank ``rank``."""
        return self.routing.ids(self.tokens, self.shape.top_k, self.placement, rank, self.seed)

    def weights(self, rank: int) -> torch.Tensor:
        """``[T, top_k]`` fp32 router weights, on the CPU, that sum to one."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        weights = torch.rand(self.tokens, self.shape.top_k, generator=generator) + 0.1
        return weights / weights.sum(1, keepdim=True)

    def z(self, rank: int, repeat: int = 0) -> torch.Tensor:
        """``[T, hidden]`` BF16 tokens of N(0, 1), on the CPU."""
        generator = torch.Generator().manual_seed((self.seed * 1000 + rank) * 1000 + repeat)
        return torch.randn(self.tokens, self.shape.hidden_size, generator=generator).bfloat16()

    def projections(self, expert: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up ``[inter, hidden]`` and down ``[hidden, inter]`` of a global expert, BF16.

        The same values on every device of a kind; variance one over the row length.
        """
        generator = torch.Generator(device).manual_seed(self.seed * 100_003 + expert)
        hidden, inter = self.shape.hidden_size, self.shape.intermediate_size
        shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
        drawn = [torch.randn(n, k, generator=generator, device=device) * k**-0.5 for n, k in shapes]
        gate, up, down = (w.bfloat16() for w in drawn)
        return gate, up, down

    def bf16_experts(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``[E_ℓ, 2·inter, hidden]`` and ``[E_ℓ, hidden, inter]`` BF16 weights of a rank, for peers."""
        gate_up, down = [], []
        for expert in self.placement.local_experts(rank):
            gate, up, d = self.projections(expert, device)
            gate_up.append(torch.cat([gate, up]))
            down.append(d)
        return torch.stack(gate_up), torch.stack(down)


@contextmanager
def prepared(ranks: Ranks, case: Case) -> Iterator[list[OneLayer]]:
    """The layers of the local ranks. Collective.

    Raises:
        ConfigError: a transport that these processes cannot run.
        LayerError: an output that is further from fp64 than :data:`ERROR_LIMIT`.
    """
    channels = _channels(ranks, case)
    layers = [OneLayer(channel, rank, case) for channel, rank in zip(channels, ranks.local)]
    yield layers
    for channel in channels:
        channel.destroy()


def _channels(ranks: Ranks, case: Case) -> list[Channel]:
    if case.protocol == ALONE:
        return [StandInChannel(case.ep_size, max_tokens_per_rank=case.tokens)]
    common: dict[str, Any] = {"protocol": case.protocol, "max_tokens_per_rank": case.tokens, "timeout_s": TIMEOUT_S}
    if ranks.group is not None or case.protocol in PORTABLE:
        from moe_layer.comm import create_channel

        if len(ranks.local) > 1:
            raise ConfigError(f"protocol {case.protocol!r} needs a process a rank (launch 'process')")
        return [create_channel(ranks.group, device=ranks.local[0].device, **common)]
    if ranks.share_devices:
        raise ConfigError(f"{ranks.size} layers need a GPU each; protocol {ALONE!r} times one rank's work on one GPU")
    from moe_layer.comm.emulation import emulated_channels

    protocol = "auto" if case.protocol == "one-sided" else case.protocol
    return list(emulated_channels([rank.device for rank in ranks.local], **{**common, "protocol": protocol}))


# The experts of the last case: cases of one model differ in tokens, routing and transport, and use them again.
_experts: dict[tuple[Any, ...], torch.nn.Module] = {}


class OneLayer:
    """One rank's layer, inputs and output."""

    def __init__(self, channel: Channel, rank: LocalRank, case: Case) -> None:
        self.case, self.rank, self.channel = case, rank, channel
        shape, device = case.shape, rank.device
        self.layer = MoELayer(
            case.config(),
            ExpertParallel.over(channel),
            weight_format=case.weight_format,
            activation_format=shape.activation_format,
            quantize_at=case.quantize_at,
            device=device,
            allocate=False,
        )
        self.layer.routed_experts = self._filled()
        self.ids = case.ids(rank.rank).to(device)
        self.weights = case.weights(rank.rank).to(device)
        self.z = torch.empty(case.tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self.output: torch.Tensor | None = None
        self.error = 0.0  # the largest that a check found
        self.router: Router | None = None
        self.x = self.z  # what the router reads, in the model's own width
        if case.route:
            self.router, self.x = self._router()
        self.refresh(0)

    def _filled(self) -> Any:
        """The rank's experts, quantized from :meth:`Case.projections`."""
        case, device = self.case, self.rank.device
        key = (replace(case.shape, title=""), case.ep_size, self.rank.rank, case.seed, device)
        if key not in _experts:
            if any(k[:2] != key[:2] or k[3:] != key[3:] for k in list(_experts) if k[2] == key[2]):
                _experts.clear()
            template = MoELayer(
                case.config(),
                ExpertParallel.over(StandInChannel(case.ep_size, max_tokens_per_rank=1)),
                weight_format=case.weight_format,
                activation_format=case.shape.activation_format,
                device=device,
            )
            experts = template.routed_experts
            for local, expert in enumerate(case.placement.local_experts(self.rank.rank)):
                gate, up, down = case.projections(expert, device)
                experts.gate_up.quantize_expert(local, 0, gate)
                experts.gate_up.quantize_expert(local, 1, up)
                experts.down.quantize_expert(local, 0, down)
            _experts[key] = experts
        return _experts[key]

    def _router(self) -> tuple[Router, torch.Tensor]:
        case, device = self.case, self.rank.device
        if case.shape.name not in ROUTERS:
            raise ConfigError(f"no router is known for {case.shape.name!r}; known: {', '.join(ROUTERS)}")
        model = ROUTERS[case.shape.name]
        cfg = MoEConfig(
            "benchmark", model.hidden, case.shape.intermediate_size, model.experts, model.top_k,
            scoring_func=model.scoring, use_correction_bias=model.biased, n_group=model.n_group,
            topk_group=model.topk_group, group_score=model.group_score, norm_topk_prob=model.normalized,
            routed_scaling_factor=model.scale,
        )  # fmt: skip
        router = Router(cfg, device=device)
        generator = torch.Generator().manual_seed(case.seed)
        bias = torch.randn(model.experts, generator=generator) * 0.01 if model.biased else None
        router.load(torch.randn(model.experts, model.hidden, generator=generator) * model.hidden**-0.5, bias)
        return router, torch.randn(case.tokens, model.hidden, generator=generator).bfloat16().to(device)

    # ---- what the harness calls ----

    def work(self) -> Work:
        capturable = self.rank.device.type == "cuda" and self.case.protocol not in PORTABLE[:1]
        return Work({"layer": self.step}, self.refresh, self.check, capturable)

    def step(self) -> None:
        if self.router is not None:
            with self.layer._stage("route"):
                self.router(self.x)
        self.output = self.layer.experts(self.z, self.ids, self.weights, tokens_per_rank=self.case.tokens)

    def refresh(self, repeat: int) -> None:
        """Fresh tokens and a poisoned output."""
        self.repeat = repeat
        if isinstance(self.channel, StandInChannel):
            self._arrive(self.channel, repeat)
        else:
            self.z.copy_(self.case.z(self.rank.rank, repeat))
        if self.output is not None:
            self.output.fill_(float("nan"))

    def _arrive(self, channel: StandInChannel, repeat: int) -> None:
        """What all ranks' dispatches leave on this one: a region of T̂ slots each, as Sentinel fills them."""
        case, device = self.case, self.rank.device
        z = torch.cat([case.z(rank, repeat) for rank in range(case.ep_size)]).to(device)
        fmt = get_format(case.shape.activation_format if case.quantize_at == "source" else "bf16")
        rows, scale = fmt.quantize_to_wire(z)
        if channel.received is None:
            ids = torch.cat([case.ids(rank) for rank in range(case.ep_size)])
            here = copies(ids, case.placement)[:, self.rank.rank : self.rank.rank + 1]
            weights = torch.cat([case.weights(rank) for rank in range(case.ep_size)])
            channel.received = DispatchResult(
                rows, torch.where(here, ids, -1).to(device), weights.to(device), case.tokens, scale
            )
            return
        channel.received.hidden_states.copy_(rows)
        if scale is not None and channel.received.hidden_states_scale is not None:
            channel.received.hidden_states_scale.copy_(scale)
        if channel.partials is not None:
            channel.partials.fill_(float("nan"))

    def check(self) -> None:
        """Some tokens of the last step, against fp64.

        Raises:
            LayerError: further away than :data:`ERROR_LIMIT`.
        """
        report = getattr(self.channel, "raise_reported", None)  # one-sided channels: what a kernel gave up on
        if report is not None:
            report()
        if isinstance(self.channel, StandInChannel):
            got, want = self._partial_results(self.channel)
        else:
            assert self.output is not None
            tokens = self._chosen(self.case.tokens)
            got = self.output[tokens].double()
            ids, weights, z = self.ids.cpu(), self.weights.cpu(), self.z
            want = torch.stack([
                sum(
                    (self.truth(z[t], ids[t], weights[t], rank) for rank in range(self.case.ep_size)),
                    start=torch.zeros(z.shape[1], dtype=torch.float64, device=z.device),
                )
                for t in tokens
            ])  # fmt: skip
        norm = float(want.norm())
        error = float((got - want).norm()) / norm if norm else float(got.norm())
        if not error <= ERROR_LIMIT:  # NaN too
            raise LayerError(f"rank {self.rank.rank}: relative L2 error {error:.1e}, more than {ERROR_LIMIT:.1e}")
        self.error = max(self.error, error)

    def _chosen(self, count: int) -> list[int]:
        """First, last, or fewer."""
        return sorted({round(i * (count - 1) / max(1, CHECKED_TOKENS - 1)) for i in range(min(CHECKED_TOKENS, count))})

    def _partial_results(self, channel: StandInChannel) -> tuple[torch.Tensor, torch.Tensor]:
        assert channel.received is not None and channel.partials is not None
        ids, weights = channel.received.topk_ids.cpu(), channel.received.topk_weights
        assert weights is not None
        used = (ids >= 0).any(1).nonzero().flatten().tolist()
        slots = [used[i] for i in self._chosen(len(used))] if used else []
        got = channel.partials[slots].double()
        if not slots:
            return got, got
        want = []
        for slot in slots:
            source, token = divmod(slot, self.case.tokens)
            z = self.case.z(source, self.repeat)[token].to(self.rank.device)
            want.append(self.truth(z, ids[slot], weights[slot].cpu(), self.rank.rank))
        return got, torch.stack(want)

    def truth(self, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rank: int) -> torch.Tensor:
        """fp64 ``[hidden]``: what rank ``rank`` adds to a token, with the layer's quantization points."""
        case = self.case
        rows = get_format(case.shape.activation_format)
        stored = get_format(case.weight_format)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            return rows.dequantize_reference(rows.quantize_reference(x.reshape(1, -1).float()))[0].double()

        def weight(w: torch.Tensor) -> torch.Tensor:
            scale = None
            if stored.two_level:  # one a projection, as in checkpoints
                largest = stored.quantize_reference(w.abs().amax().float().reshape(1, 1)).global_scale
                assert largest is not None
                scale = largest.reshape(())
            return stored.dequantize_reference(stored.quantize_reference(w, global_scale=scale)).double()

        total = torch.zeros_like(z, dtype=torch.float64)
        x = rounded(z)
        for expert, scale in zip(ids.tolist(), weights.tolist()):
            if not 0 <= expert < case.shape.num_experts or case.placement.rank_of[expert] != rank:
                continue
            gate, up, down = (weight(w) for w in case.projections(expert, z.device))
            total += scale * (down @ rounded(case.shape.activation(gate @ x, up @ x)))
        return total if case.shape.activation_format == "fp32" else total.bfloat16().double()
