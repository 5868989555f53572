"""Grouped GEMMs of the models' experts, each beside its floor and PyTorch's own (``moe-layer bench gemm``).

A case is one projection of a model's experts on one rank, with so many tokens an expert. FC1 gathers its rows, applies
the activation and quantizes where the format has scales; its time contains all of that. Weights are cold: those of all
experts are many times the L2 cache. Floors come from the same run: the weights' bytes over the rate at which the device
reads memory, or the operations over the rate of an 8192³ product, whichever is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch

from moe_layer.backend import select_backend
from moe_layer.benchmarks import peers as peers_of
from moe_layer.benchmarks.bench import LocalBench
from moe_layer.benchmarks.gemm_case import Case
from moe_layer.benchmarks.harness import Options, Timing, Work, measure
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.shapes import Shape
from moe_layer.errors import ConfigError, MoELayerError
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.tile_choice import Tile, forced_tile
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.packed_weights import make_stack
from moe_layer.quant import get_format

TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024)
# Operands → weight and activation format, as the released models pair them.
FORMATS = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8_128x128", "fp8"),
    "mxfp4": ("mxfp4", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "int4": ("int4", "bf16"),
    "mxfp8": ("mxfp8", "mxfp8"),
}
# Relative L2 error of sums, and of FC1's rows in their format: half a step of E4M3 or E2M1 for all values at worst.
PRODUCT_LIMIT = 5e-3
REQUANTIZED_LIMIT = {"bf16": 5e-3, "fp8": 5e-2, "mxfp8": 5e-2, "nvfp4": 0.2}
ROUTINGS = ("even", "poisson", "skew")
CUBE = 8192
READ_BYTES = 4 << 30
TARGET_US = 2e4  # of timed steps a replay


class GemmError(MoELayerError, RuntimeError):
    """A product was wrong."""


def cases_of(
    shape: Shape, ranks: int, stages: Sequence[str], operands: Sequence[str], tokens: Sequence[int],
    routings: Sequence[str], active: int | None = None,
) -> Iterator[Case]:  # fmt: skip
    """The cases of a model whose experts are spread over ``ranks`` ranks.

    Raises:
        ConfigError: an unknown stage, operand type or routing.
    """
    for names, known in ((stages, ("fc1", "fc2")), (operands, tuple(FORMATS)), (routings, ROUTINGS)):
        for name in names:
            if name not in known:
                raise ConfigError(f"{name!r} is none of {', '.join(known)}")
    experts = -(-shape.num_experts // ranks)
    for kind in operands:
        for stage in stages:
            n, k = shape.intermediate_size, shape.hidden_size
            if stage == "fc2":
                n, k = k, n
            for routing in routings:
                for count in tokens:
                    yield Case(shape.name, stage, kind, experts, n, k, count, min(active or experts, experts), routing)


class Problem:
    """A case's operands: weights that later cases of the same projection use again, rows made afresh."""

    def __init__(self, case: Case, device: torch.device, before: Problem | None) -> None:
        self.case = case
        weight_format, self.row_format = FORMATS[case.operands]
        self.backend = select_backend(device, weight_format, self.row_format)
        same = before is not None and replace(before.case, tokens=0, active=0, routing="") == replace(
            case, tokens=0, active=0, routing=""
        )
        self.weights: ExpertWeights = (
            before.weights if same and before is not None else self._draw(weight_format, device)
        )
        counts = case.counts()
        rows = sum(counts)
        offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
        slots = max(rows // 2, 1) if case.stage == "fc1" else max(rows, 1)
        order = torch.randint(0, slots, (max(rows, 1),), device=device, dtype=torch.int32)
        self.index = ExpertIndex(offsets, order, order.view(-1, 1), case.experts * case.tokens)
        self.x = get_format(self.row_format).quantize(torch.randn(slots, case.k, device=device).bfloat16())
        self.rows = rows
        self.activation = Activation()

    def _draw(self, weight_format: str, device: torch.device) -> ExpertWeights:
        """Random experts, packed where the kernels read them so."""
        case = self.case
        tiles = self.backend.weight_layout(weight_format, case.parts, case.n, case.k)
        stack = make_stack(case.experts, case.parts, case.n, case.k, weight_format, device, tiles)
        for expert in range(case.experts):
            for part in range(case.parts):
                stack.quantize_expert(expert, part, torch.randn(case.n, case.k, device=device) * case.k**-0.5)
        return stack.weights()

    def run(self, backend: ComputeBackend) -> Any:
        if self.case.stage == "fc1":
            return backend.fc1(self.x, self.weights, self.index, self.activation, self.row_format)
        return backend.fc2(self.x, self.weights, self.index)

    def truth_error(self, result: Any) -> float:
        """Relative L2 error of a sample of rows, against fp64."""
        w_fmt, offsets = get_format(self.weights.format), self.index.offsets.tolist()
        values = result if isinstance(result, torch.Tensor) else get_format(result.format).dequantize(result)
        rows = get_format(self.x.format).dequantize(self.x)
        got: list[torch.Tensor] = []
        want: list[torch.Tensor] = []
        for expert in range(self.case.experts):
            for row in {offsets[expert], offsets[expert + 1] - 1}:
                if not offsets[expert] <= row < offsets[expert + 1] or len(got) >= 8:
                    continue
                x = rows[int(self.index.slots[row]) if self.case.stage == "fc1" else row].double()
                parts = [w_fmt.dequantize(self.weights.expert(expert, p)).double() @ x for p in range(self.case.parts)]
                want.append(self.activation(*parts) if self.case.parts == 2 else parts[0])
                got.append(values[row].double())
        if not got:
            return 0.0
        truth = torch.stack(want)
        return float((torch.stack(got) - truth).norm() / truth.norm())


def timed(ranks: Ranks, call: Callable[[], Any], repeats: int, *, l2_flush: bool = False) -> Timing:
    """As many steps a replay as fill some 20 ms."""
    work = [Work({"step": call})]
    quick = Options(warmup=1, steps=2, repeats=1) if ranks.is_cuda else Options(warmup=0, steps=1, repeats=1)
    once = measure(ranks, work, quick).step_us
    steps = max(3, min(100, math.ceil(TARGET_US / once))) if ranks.is_cuda else 3
    return measure(ranks, work, Options(warmup=2, steps=steps, repeats=repeats, l2_flush=l2_flush))


def measure_rates(ranks: Ranks) -> dict[str, float] | None:
    """Of this GPU: TB/s that a reduction reads, TFLOP/s of BF16 and FP8 products; None on the CPU."""
    if not ranks.is_cuda:
        return None
    device = ranks.local[0].device
    a, b = (torch.randn(CUBE, CUBE, device=device).bfloat16() for _ in range(2))
    rates = {"bf16_tflops": 2 * CUBE**3 / timed(ranks, lambda: a @ b.t(), 3).step_us / 1e6}
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    product = timed(ranks, lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16), 3)
    rates["fp8_tflops"] = 2 * CUBE**3 / product.step_us / 1e6
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    rates["read_tbps"] = READ_BYTES / timed(ranks, data.sum, 3).step_us / 1e6
    return rates


def run_case(
    ranks: Ranks,
    problem: Problem,
    rates: dict[str, float] | None,
    peers: Sequence[str],
    *,
    repeats: int,
    l2_flush: bool,
) -> dict[str, Any]:
    """Check a case's output, time it, and set it beside its floor and peers; its results.

    Raises:
        GemmError: too far from fp64.
    """
    case, backend = problem.case, problem.backend
    weights, rows = FORMATS[case.operands]
    # FC1's output is requantized: what that costs is no fault of the product.
    limit = REQUANTIZED_LIMIT[rows] if case.stage == "fc1" else PRODUCT_LIMIT
    error = problem.truth_error(problem.run(backend))
    if not error < limit:
        raise GemmError(f"{case}: relative error {error:.1e}, more than {limit:.0e}")
    timing = timed(ranks, lambda: problem.run(backend), repeats, l2_flush=l2_flush)
    us = timing.step_us
    used = sum(count > 0 for count in case.counts())
    weight_bytes = used * case.parts * get_format(weights).nbytes((case.n, case.k))
    operations = 2 * problem.rows * case.parts * case.n * case.k
    results: dict[str, Any] = {
        **timing.as_results(),
        "error": error,
        "backend": backend.name,
        "weight_bytes": weight_bytes,
        "weights_tbps": weight_bytes / us / 1e6,
        "tflops": operations / us / 1e6,
    }
    if rates is not None:
        unit = "fp8_tflops" if rows == "fp8" else "bf16_tflops"
        results["floor_us"] = floor = max(weight_bytes / rates["read_tbps"], operations / rates[unit]) / 1e6
        results["ratio"] = us / floor
    results["peers_us"] = {}
    for peer in peers:
        absence = peers_of.absence(peer, case, ranks.local[0].device.type)
        if absence is not None:
            results.setdefault("peers_absent", {})[peer] = absence
            continue
        call = peers_of.adapter(peer).call(case, problem.weights, problem.index)
        results["peers_us"][peer] = timed(ranks, call, repeats, l2_flush=l2_flush).step_us
    return results


class GemmBench(LocalBench):
    """One run, with the table's tiles or all with ``tile``, which may be set between cases."""

    kind: ClassVar[str] = "gemm"

    def __init__(
        self,
        cases: Sequence[Case],
        device_type: str | None,
        *,
        peers: Sequence[str] = ("torch",),
        repeats: int = 7,
        l2_flush: bool = False,
        tile: Tile | None = None,
    ) -> None:
        super().__init__(device_type)
        self.tile = tile
        self.cases, self.peers, self.repeats, self.l2_flush = list(cases), tuple(peers), repeats, l2_flush
        self._problem: Problem | None = None  # whose weights the next case may use again

    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        with self.active():
            rates = measure_rates(self.ranks)
        return rates, None if rates else "no ceilings on a CPU"

    def parameters(self, case: Case) -> dict[str, Any]:
        forced = {} if self.tile is None else {"tile": self.tile.tokens, "cluster": self.tile.cluster}
        return {**asdict(case), "parts": case.parts, **forced, "l2_flush": self.l2_flush, "repeats": self.repeats}

    def results(self, case: Case) -> dict[str, Any]:
        with self.active(), forced_tile(self.tile):
            before, self._problem = self._problem, None
            self._problem = Problem(case, self.device, before)
            return run_case(
                self.ranks, self._problem, self.ceilings, self.peers, repeats=self.repeats, l2_flush=self.l2_flush
            )
