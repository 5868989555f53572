"""One rank's MoE layer as the harness times it, with random experts, and a check against fp64.

A step is :meth:`MoELayer.experts`: quantize, dispatch, index, FC1, FC2, finalize, combine, for given ids and weights;
with ``route`` the router's two kernels before it, whose choice nobody follows. Shared experts are not part of it (the
paper's layer is the routed one). With the transport ``"none"`` the step is one rank's MoE compute, on what dispatch
would have left there (:mod:`moe_layer.benchmarks.stand_in`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.layer_case import Case
from moe_layer.benchmarks.layer_truth import check_rows, chosen, compare, partial_truth
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.benchmarks.routers import ROUTERS
from moe_layer.benchmarks.routing import copies
from moe_layer.benchmarks.stand_in import StandInChannel
from moe_layer.comm import Channel, DispatchResult
from moe_layer.config import MoEConfig
from moe_layer.errors import ConfigError
from moe_layer.layer import MoELayer
from moe_layer.parallel import ExpertParallel
from moe_layer.quant import get_format
from moe_layer.router import Router

TIMEOUT_S = 30.0  # of a wait between ranks: far beyond any step, short enough for a benchmark
ALONE = "none"  # the transport of one rank without its peers
ONE_SIDED = ("auto", "one-sided", "sentinel", "fence")
PORTABLE = ("collective", "loopback")
TRANSPORTS = (*ONE_SIDED, *PORTABLE, ALONE)
ERROR_LIMIT = 5.7e-3  # relative L2, the paper's (Appendix B)
FP8_CORES_LIMIT = 1e-2  # of FP8 products on tensor cores, which keep 14 bits of a sum (docs/numerics.md)


@contextmanager
def prepared(ranks: Ranks, case: Case) -> Iterator[list[OneLayer]]:
    """The layers of the local ranks. Collective.

    Raises:
        ConfigError: a transport that these processes cannot run.
        LayerError: an output that is further from fp64 than :data:`ERROR_LIMIT`, or :data:`FP8_CORES_LIMIT`.
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
        fp8_cores = device.type == "cuda" and case.weight_format.startswith("fp8") and shape.activation_format == "fp8"
        self.limit = FP8_CORES_LIMIT if fp8_cores else ERROR_LIMIT
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
                ExpertParallel.over(StandInChannel(case.ep_size, max_tokens_per_rank=1, ep_rank=self.rank.rank)),
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
            self.z.copy_(self.case.z(self.rank.rank, repeat, self.rank.device))
        if self.output is not None:
            self.output.fill_(float("nan"))

    def _arrive(self, channel: StandInChannel, repeat: int) -> None:
        """What all ranks' dispatches leave on this one: a region of T̂ slots each, as Sentinel fills them."""
        case, device = self.case, self.rank.device
        z = torch.cat([case.z(rank, repeat, device) for rank in range(case.ep_size)])
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
            LayerError: further away than ``limit``.
        """
        report = getattr(self.channel, "raise_reported", None)  # one-sided channels: what a kernel gave up on
        if report is not None:
            report()
        if isinstance(self.channel, StandInChannel):
            error = compare(self.rank.rank, *self._partial_results(self.channel), self.limit)
        else:
            assert self.output is not None
            error = check_rows(self.case, self.rank.rank, self.z, self.output, self.limit)
        self.error = max(self.error, error)

    def _partial_results(self, channel: StandInChannel) -> tuple[torch.Tensor, torch.Tensor]:
        assert channel.received is not None and channel.partials is not None
        ids, weights = channel.received.topk_ids.cpu(), channel.received.topk_weights
        assert weights is not None
        used = (ids >= 0).any(1).nonzero().flatten().tolist()
        slots = [used[i] for i in chosen(len(used))] if used else []
        got = channel.partials[slots].double()
        if not slots:
            return got, got
        want = []
        for slot in slots:
            source, token = divmod(slot, self.case.tokens)
            z = self.case.z(source, self.repeat, self.rank.device)[token]
            want.append(partial_truth(self.case, z, ids[slot], weights[slot].cpu(), self.rank.rank))
        return got, torch.stack(want)
