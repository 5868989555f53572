"""The all-to-all benchmark (``moe-layer bench a2a``): dispatch, combine and round trip over models, batches, protocols.

A case is timed by :mod:`moe_layer.benchmarks.harness`; its phases, from CUPTI records, in a second set of processes, so
that no timed step runs under a profiler. Every case is one JSON line with all it takes to read it alone: parameters,
results, the floors from the ceilings measured in the same run, machine, versions, commit and date. A case that fails
is a line with its error, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moe_layer.benchmarks import peers
from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.a2a_work import ONE_SIDED, PEERS, PORTABLE, QUANTIZE, prepared
from moe_layer.benchmarks.bench import RanksBench
from moe_layer.benchmarks.ceilings import Ceilings, measure_ceilings
from moe_layer.benchmarks.harness import Options, Timing, measure, measure_phases
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.routing import Routing, busiest_link, load_imbalance, traffic
from moe_layer.benchmarks.session import SessionError
from moe_layer.benchmarks.shapes import Shape
from moe_layer.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        shapes, tokens, protocols, routings, quantize: every combination is a case; peers are protocols of their own.
        ranks, launch, device_type: as in :func:`~moe_layer.benchmarks.session.open_session`.
        options: of the harness; None: 10 + 100 steps and 10 repeats on GPUs, fewer on the CPU.
        phases: whether to time dispatch and combine separately.
        seed: of ids and values.
    """

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    protocols: tuple[str, ...]
    routings: tuple[Routing, ...] = (Routing(),)
    ranks: int | None = None
    launch: str = "auto"
    device_type: str | None = None
    options: Options | None = None
    phases: bool = True
    seed: int = 0
    quantize: tuple[str, ...] = ("given",)

    def cases(self, ep_size: int) -> list[Case]:
        return [
            Case(shape, tokens, protocol, ep_size, routing, self.seed, quantize)
            for routing in self.routings
            for shape in self.shapes
            for tokens in self.tokens
            for protocol in self.protocols
            for quantize in self.quantize
        ]


def time_case(ranks: Ranks, case: Case, options: Options) -> Timing:
    """In every process: the case's step time."""
    with prepared(ranks, case) as works:
        return measure(ranks, works, options)


def time_phases(ranks: Ranks, case: Case, options: Options) -> dict[str, float]:
    """In every process: the case's phases from kernel records."""
    with prepared(ranks, case) as works:
        return measure_phases(ranks, works, options)


class A2ABench(RanksBench):
    """One run of a :class:`Plan`; its cases are checked before anything starts.

    Raises:
        ConfigError: a protocol that the device cannot run, routing that a shape does not allow.
        UnsupportedDeviceError: as :func:`~moe_layer.benchmarks.session.open_session`.
    """

    kind: ClassVar[str] = "a2a"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.ranks, plan.launch, plan.device_type, plan.options)
        self.plan = plan
        self.cases: list[Case] = plan.cases(self.size)
        check(self.cases, self.device_type, self.session.launch, self.options)

    def absent(self, case: Case) -> str | None:
        if case.protocol not in PEERS:
            return None
        if case.quantize != "given":
            return "peers move rows that are given"
        return peers.absence(case.protocol, case, self.device_type)

    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        if self.device_type == "cpu" or self.size == 1:
            return None, "one rank has no link" if self.size == 1 else "no link between CPU processes"
        return self.session.run(measure_ceilings)[0], None

    def results(self, case: Case) -> dict[str, Any]:
        timing: Timing = self.session.run(time_case, case, self.options)[0]
        results = timing.as_results()
        if timing.phases_us is None:
            phases, note = self._phases(case, timing)
            if phases is not None:
                results["phases_us"] = phases
            if note:
                results["phases_note"] = note
        return results | self._floors(case, timing)

    def _phases(self, case: Case, timing: Timing) -> tuple[dict[str, float] | None, str | None]:
        if not self.plan.phases:
            return None, None
        if timing.method != "graph" or case.protocol in PEERS:
            return None, "kernels of this protocol are not told apart"
        try:
            return self.phase_session.run(time_phases, case, self.options)[0], None
        except SessionError as error:
            return None, str(error)

    def parameters(self, case: Case) -> dict[str, Any]:
        shape = case.shape
        return {
            "model": shape.name,
            "activation_format": shape.activation_format,
            "hidden_size": shape.hidden_size,
            "top_k": shape.top_k,
            "num_experts": shape.num_experts,
            "dispatch_bytes": case.dispatch_bytes,
            "combine_bytes": case.combine_bytes,
            "tokens_per_rank": case.tokens,
            "protocol": case.protocol,
            "ep_size": case.ep_size,
            "routing": str(case.routing),
            "seed": case.seed,
            "quantize": case.quantize,
            **self.procedure(),
        }

    def _floors(self, case: Case, timing: Timing) -> dict[str, Any]:
        """What the traffic of the case is, and how its time compares with the link's."""
        ids = [case.ids(rank) for rank in range(case.ep_size)]
        matrix = traffic(ids, case.placement)
        found: dict[str, Any] = {
            "load_imbalance": load_imbalance(ids, case.placement),
            "copies_on_busiest_link": busiest_link(matrix),
        }
        if case.protocol == "auto":
            found["chosen"] = _auto_choice(case)
        if self.ceilings is not None:
            pulls = _auto_choice(case) == "fence" if case.protocol == "auto" else case.combine_pulls
            floor = Ceilings(**self.ceilings).floor_us(
                busiest_link(matrix), case.dispatch_bytes, case.combine_bytes, combine_pulls=pulls
            )
            found["floor"] = floor
            found["floor_us"] = floor["total_us"]
            found["ratio_to_bytes"] = timing.step_us / floor["bytes_us"] if floor["bytes_us"] else None
            found["ratio"] = timing.step_us / floor["total_us"]
        return found


def _auto_choice(case: Case) -> str:
    return "sentinel" if case.tokens <= sentinel_limit_of(case) else "fence"


def sentinel_limit_of(case: Case) -> int:
    """The crossover that ``auto`` takes for a case."""
    from moe_layer.comm.auto import sentinel_limit

    return sentinel_limit(case.ep_size, crossover_row_bytes(case.shape), case.shape.top_k)


def crossover_row_bytes(shape: Shape) -> int:
    """``row_bytes`` of comm/crossover.json: data, scales and partial result, 16-byte aligned; no ids, no weights."""
    from moe_layer.comm.layout import align

    return align(shape.data_bytes) + align(shape.scale_bytes) + align(shape.combine_bytes)


def check(cases: list[Case], device_type: str, launch: str, options: Options) -> None:
    """Raise before anything is started if a case cannot run.

    Raises:
        ConfigError: names the protocol or the routing and what would work.
    """
    if options.l2_flush and device_type == "cpu":
        raise ConfigError("--l2-flush flushes a GPU's cache; on the CPU there is nothing to flush")
    for case in cases:
        if case.protocol in PEERS:
            continue  # what is not there becomes a line
        if device_type == "cpu" and case.protocol in ONE_SIDED:
            raise ConfigError(
                f"protocol {case.protocol!r} runs between GPUs and there is none here; 'collective' runs on CPUs, "
                "'loopback' on one rank"
            )
        if case.ep_size == 1 and case.protocol != "loopback":
            raise ConfigError(f"protocol {case.protocol!r} needs two ranks; one rank runs 'loopback'")
        if case.ep_size > 1 and case.protocol == "loopback":
            raise ConfigError(f"protocol 'loopback' serves one rank, but there are {case.ep_size}")
        if launch == "single" and case.protocol not in ONE_SIDED and case.ep_size > 1:
            raise ConfigError(f"protocol {case.protocol!r} needs a process a rank, but one process drives all ranks")
        if case.quantize not in QUANTIZE:
            raise ConfigError(f"unknown way to quantize {case.quantize!r}; known: {', '.join(QUANTIZE)}")
        if case.quantize != "given" and case.shape.activation_format == "bf16":
            raise ConfigError(f"{case.shape.label} has nothing to quantize; name a format (NAME:FORMAT)")
        case.ids(0)  # routing that the shape does not allow


def check_names(protocols: Sequence[str]) -> None:
    """Raise unless all are known.

    Raises:
        ConfigError: names the unknown one and those there are.
    """
    for name in protocols:
        if name not in ONE_SIDED and name not in PORTABLE:
            raise ConfigError(f"unknown protocol {name!r}; known: {', '.join((*ONE_SIDED, *PORTABLE))}")
