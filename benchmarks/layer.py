"""The MoE layer benchmark (``moe-layer bench layer``): the paper's Tables A.3, A.4 and A.6 on this machine.

A case is timed by :mod:`moe_layer.benchmarks.harness` as one CUDA graph of layers back to back; its stages, from CUPTI
records, in a second set of processes (:mod:`moe_layer.benchmarks.stage_times`). Beside each time stands a floor from
rates measured in the same run:

    compute = the longer of the active experts' bytes over the read rate and the operations over the matrix rate,
              on the rank for which that is the longest
    all-to-all = bytes of the busiest link over the push and pull rates, as in the all-to-all benchmark
    latency = an empty kernel for each kernel of a layer, and a flag each for dispatch and combine
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from moe_layer.benchmarks import peers
from moe_layer.benchmarks.bench import RanksBench
from moe_layer.benchmarks.ceilings import Ceilings, measure_ceilings
from moe_layer.benchmarks.gemm import measure_rates
from moe_layer.benchmarks.harness import Options, Timing, measure
from moe_layer.benchmarks.layer_case import EXPERT_FORMAT, Case
from moe_layer.benchmarks.layer_work import ALONE, ONE_SIDED, TRANSPORTS, OneLayer, prepared
from moe_layer.benchmarks.quant import measure_machine
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.routing import Routing, busiest_link, copies, load_imbalance, traffic
from moe_layer.benchmarks.session import SessionError
from moe_layer.benchmarks.shapes import Shape
from moe_layer.benchmarks.stage_times import measure_stages
from moe_layer.errors import ConfigError, UnsupportedDeviceError
from moe_layer.quant import get_format
from moe_layer.stages import StageTimer

PEERS = peers.names("layer")
MODELS = ("deepseek_v41", "kimi_k3")
TOKENS = (1, 16, 128, 1024, 4096)
CPU_OPTIONS = Options(warmup=1, steps=3, repeats=3)
CPU_HIDDEN, CPU_INTERMEDIATE = 512, 256
KERNELS = 4  # of MoE compute at least: index, FC1, FC2, finalize


def reduced(shape: Shape) -> Shape:
    """A model's formats and top_k with few small experts, for CPUs."""
    experts = min(shape.num_experts, max(16, 2 * shape.top_k))
    hidden, inter = min(shape.hidden_size, CPU_HIDDEN), min(shape.intermediate_size, CPU_INTERMEDIATE)
    return replace(shape, hidden_size=hidden, intermediate_size=inter, num_experts=experts)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        shapes, tokens, protocols, routings: every combination is a case; with the protocol ``"none"`` alone, one rank
            of ``ranks`` is measured without its peers.
        ranks, launch, device_type: as of :func:`~moe_layer.benchmarks.session.open_session`.
        options: of the harness; None: its defaults.
        stages: whether to time the stages apart.
        seed, quantize_at, route: of :class:`~moe_layer.benchmarks.layer_work.Case`.
    """

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    protocols: tuple[str, ...]
    routings: tuple[Routing, ...] = (Routing(),)
    ranks: int | None = None
    launch: str = "auto"
    device_type: str | None = None
    options: Options | None = None
    stages: bool = True
    seed: int = 0
    quantize_at: str = "source"
    route: bool = False

    @property
    def alone(self) -> bool:
        return self.protocols == (ALONE,)

    def cases(self, ep_size: int) -> list[Case]:
        return [
            Case(shape, tokens, protocol, ep_size, routing, self.seed, self.quantize_at, self.route)
            for routing in self.routings
            for shape in self.shapes
            for tokens in self.tokens
            for protocol in self.protocols
        ]


def time_case(ranks: Ranks, case: Case, options: Options) -> tuple[Timing, dict[str, Any]]:
    """In every process: the case's step time, and what else there is to say of it."""
    if case.protocol in PEERS:
        with peers.adapter(case.protocol).works(ranks, case) as works:
            return measure(ranks, works, options), {"transport": case.protocol}
    with prepared(ranks, case) as layers:
        timing = measure(ranks, [layer.work() for layer in layers], options)
        errors = [layer.error for layer in layers]
        first = layers[0].layer
        found: dict[str, Any] = {
            "error": max(e for process in ranks.gather(errors) for e in process),
            "backend": first.backend.name,
            "transport": first.comm.protocol,
        }
        if timing.method == "host":
            found["stages_us"] = _stages_by_clock(ranks, layers, options)
        return timing, found


def _stages_by_clock(ranks: Ranks, layers: Sequence[OneLayer], options: Options) -> dict[str, float]:
    """Mean µs of each stage on the CPU, by the clock; waits for other ranks are in dispatch and combine."""
    timers = []
    for layer in layers:
        layer.layer.profiler = timer = StageTimer(layer.rank.device)
        timers.append(timer)
        for _ in range(options.steps):
            layer.step()
        layer.layer.profiler = None
    spent = [timer.seconds() for process in ranks.gather(timers) for timer in process]
    return {stage: sum(s[stage] for s in spent) * 1e6 / len(spent) / options.steps for stage in spent[0]}


def time_stages(ranks: Ranks, case: Case, options: Options) -> dict[str, dict[str, float]]:
    """In every process: the case's stages from kernel records."""
    with prepared(ranks, case) as layers:

        def attach(layer: OneLayer) -> Any:
            return lambda profiler: setattr(layer.layer, "profiler", profiler)

        return measure_stages(ranks, [layer.work() for layer in layers], [attach(layer) for layer in layers], options)


def machine_ceilings(ranks: Ranks) -> tuple[dict[str, Any] | None, str | None]:
    """In every process: rates of the GPU, an empty kernel, and between several GPUs the link's."""
    if not ranks.is_cuda:
        return None, "no ceilings on a CPU"
    with ranks.local[0].active():
        one = Ranks(1, ranks.local[:1])
        found: dict[str, Any] = {**(measure_rates(one) or {}), **asdict(measure_machine(one))}
    ranks.synchronize()
    note = None
    try:
        found |= measure_ceilings(ranks) or {}
    except UnsupportedDeviceError as error:
        note = str(error)
    return found, note


class LayerBench(RanksBench):
    """One run of a :class:`Plan`; its cases are checked before anything starts.

    Raises:
        ConfigError: a transport that the device cannot run, routing that a shape does not allow.
        UnsupportedDeviceError: as :func:`~moe_layer.benchmarks.session.open_session`.
    """

    kind: ClassVar[str] = "layer"

    def __init__(self, plan: Plan) -> None:
        if ALONE in plan.protocols and not plan.alone:
            raise ConfigError(f"protocol {ALONE!r} is one rank without its peers; it cannot share a run with others")
        super().__init__(1 if plan.alone else plan.ranks, plan.launch, plan.device_type, plan.options)
        self.plan = plan
        self.cases: list[Case] = plan.cases((plan.ranks or 8) if plan.alone else self.size)
        check(self.cases, self.device_type, self.session.launch, self.options)

    def absent(self, case: Case) -> str | None:
        return peers.absence(case.protocol, case, self.device_type) if case.protocol in PEERS else None

    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        ceilings, note = self.session.run(machine_ceilings)[0]
        return ceilings, note

    def parameters(self, case: Case) -> dict[str, Any]:
        shape = case.shape
        return {
            "model": shape.name,
            "weight_format": case.weight_format,
            "activation_format": shape.activation_format,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_experts": shape.num_experts,
            "top_k": shape.top_k,
            "tokens_per_rank": case.tokens,
            "protocol": case.protocol,
            "ep_size": case.ep_size,
            "routing": str(case.routing),
            "quantize_at": case.quantize_at,
            "route": case.route,
            "seed": case.seed,
            **self.procedure(),
        }

    def results(self, case: Case) -> dict[str, Any]:
        timing, found = self.session.run(time_case, case, self.options)[0]
        results: dict[str, Any] = {**timing.as_results(), **found}
        results.pop("phases_us", None)  # of the whole step
        if self.plan.stages and timing.method == "graph" and case.protocol not in PEERS:
            try:
                results |= self.phase_session.run(time_stages, case, self.options)[0]
            except SessionError as error:
                results["stages_note"] = str(error)
        results |= work_of(case)
        if self.ceilings is not None:
            results["floor"] = floor = floor_us(case, results, self.ceilings)
            results["floor_us"] = floor["total_us"]
            results["ratio"] = timing.step_us / floor["total_us"]
        return results


def work_of(case: Case) -> dict[str, Any]:
    """What the busiest rank has to do: rows, experts with any, their bytes, operations; and the traffic."""
    placement, shape = case.placement, case.shape
    ids = [case.ids(rank) for rank in range(case.ep_size)]
    counts = torch.stack([torch.bincount(i.flatten().long(), minlength=shape.num_experts) for i in ids]).sum(0)
    weights = get_format(case.weight_format)
    hidden, inter = shape.hidden_size, shape.intermediate_size
    expert_bytes = 2 * weights.nbytes((inter, hidden)) + weights.nbytes((hidden, inter))
    ranks = [0] if case.protocol == ALONE else list(range(case.ep_size))
    of_rank = [counts[placement.local_experts(rank)] for rank in ranks]
    rows = max(int(c.sum()) for c in of_rank)
    active = max(int((c > 0).sum()) for c in of_rank)
    return {
        "rows": rows,
        "active_experts": active,
        "local_experts": max(len(c) for c in of_rank),
        "weight_bytes": active * expert_bytes,
        "operations": 6 * rows * hidden * inter,
        "load_imbalance": load_imbalance(ids, placement),
        "copies_on_busiest_link": busiest_link(traffic(ids, placement)),
        "slots_used": int(torch.cat([copies(i, placement) for i in ids])[:, ranks[0]].sum()),
    }


def floor_us(case: Case, work: dict[str, Any], ceilings: dict[str, Any]) -> dict[str, Any]:
    """The parts of a case's floor in µs, and which of them bounds compute."""
    shape = case.shape
    fp8 = case.weight_format.startswith("fp8") and shape.activation_format == "fp8"
    read = work["weight_bytes"] / ceilings["read_tbps"] / 1e6
    multiply = work["operations"] / ceilings["fp8_tflops" if fp8 else "bf16_tflops"] / 1e6
    floor: dict[str, Any] = {
        "compute_us": max(read, multiply),
        "bound": "weights" if read > multiply else "operations",
        "all_to_all_us": 0.0,
        "latency_us": KERNELS * ceilings["launch_us"],
    }
    if case.protocol != ALONE and "push_gbps" in ceilings:
        link = Ceilings(*(ceilings[name] for name in ("push_gbps", "pull_gbps", "flag_us", "launch_us")))
        found = link.floor_us(
            work["copies_on_busiest_link"],
            shape.dispatch_bytes,
            shape.combine_bytes,
            combine_pulls=case.protocol == "fence",
        )
        floor["all_to_all_us"] = found["bytes_us"]
        floor["latency_us"] += found["latency_us"]
    floor["total_us"] = floor["compute_us"] + floor["all_to_all_us"] + floor["latency_us"]
    return floor


def check(cases: list[Case], device_type: str, launch: str, options: Options) -> None:
    """Raise before anything is started if a case cannot run.

    Raises:
        ConfigError: names the transport or the routing and what would work.
    """
    if options.l2_flush and device_type == "cpu":
        raise ConfigError("--l2-flush flushes a GPU's cache; on the CPU there is nothing to flush")
    for case in cases:
        if case.protocol in PEERS:
            continue  # what is not there becomes a line
        if case.protocol not in TRANSPORTS:
            raise ConfigError(f"unknown protocol {case.protocol!r}; known: {', '.join((*TRANSPORTS, *PEERS))}")
        if device_type == "cpu" and case.protocol in ONE_SIDED[1:]:
            raise ConfigError(
                f"protocol {case.protocol!r} runs between GPUs and there is none here; 'collective' runs on CPUs, "
                "'loopback' on one rank"
            )
        if case.protocol == ALONE:
            pass
        elif case.ep_size == 1 and case.protocol != "loopback":
            raise ConfigError(f"protocol {case.protocol!r} needs two ranks; one rank runs 'loopback'")
        elif case.ep_size > 1 and case.protocol == "loopback":
            raise ConfigError(f"protocol 'loopback' serves one rank, but there are {case.ep_size}")
        elif launch == "single" and case.ep_size > 1 and case.protocol not in ONE_SIDED:
            raise ConfigError(f"protocol {case.protocol!r} needs a process a rank, but one process drives all ranks")
        if not get_format(case.shape.activation_format).is_activation_format:
            raise ConfigError(f"format {case.shape.activation_format!r} cannot carry activations")
        get_format(EXPERT_FORMAT.get(case.shape.weight_format, case.shape.weight_format))
        case.ids(0)  # routing that the shape does not allow
