"""Grouped GEMMs of the models' experts, each beside its floor and PyTorch's own (``moe-layer bench gemm``).

A case is one projection of a model's experts on one rank, with so many tokens an expert. FC1 gathers its rows, applies
the activation and, with FP8, quantizes; its time contains all of that. Weights are cold: those of all experts are many
times the L2 cache. Floors come from the same run: the weights' bytes over the rate at which the device reads memory, or
the operations over the rate of an 8192³ product, whichever is longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moe_layer.backend import select_backend
from moe_layer.benchmarks.harness import Options, Work, measure
from moe_layer.benchmarks.machine import provenance
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.shapes import Shape
from moe_layer.errors import ConfigError
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import get_format

TOKENS = (1, 8, 16, 64, 128, 256, 512, 1024)
FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8_128x128", "fp8")}  # operands → weight and activation format
ROUTINGS = ("even", "poisson", "skew")
CUBE = 8192
READ_BYTES = 4 << 30
TARGET_US = 2e4  # of timed steps a replay


@dataclass(frozen=True)
class Case:
    """One projection of a rank's experts.

    Attributes:
        model: name of the shape.
        stage: ``"fc1"`` or ``"fc2"``.
        operands: ``"bf16"`` or ``"fp8"``.
        experts, n, k: local experts, output features of a part, their length.
        tokens: rows an expert gets in the mean.
        active: experts that get any.
        routing: ``"even"``: all active experts alike; ``"poisson"``: independently random; ``"skew"``: 90 % of the rows
            go to one expert.
    """

    model: str
    stage: str
    operands: str
    experts: int
    n: int
    k: int
    tokens: int
    active: int
    routing: str = "even"

    @property
    def parts(self) -> int:
        return 2 if self.stage == "fc1" else 1

    def counts(self) -> list[int]:
        """Rows of each expert."""
        if self.routing == "skew":
            few = self.experts * self.tokens // 10 // max(self.experts - 1, 1)
            return [self.experts * self.tokens - few * (self.experts - 1)] + [few] * (self.experts - 1)
        counts = [self.tokens] * self.active + [0] * (self.experts - self.active)
        if self.routing == "poisson":
            generator = torch.Generator().manual_seed(self.tokens)
            counts = torch.poisson(torch.tensor(counts, dtype=torch.float32), generator=generator).int().tolist()
        return counts


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
        case, fmt = self.case, get_format(weight_format)
        data = torch.empty(case.experts, case.parts, case.n, case.k, dtype=fmt.data_dtype, device=device)
        scales = fmt.scale_shape(case.n, case.k)
        scale = None if scales is None else torch.empty(case.experts, case.parts, *scales, device=device)
        for expert in range(case.experts):
            for part in range(case.parts):
                q = fmt.quantize(torch.randn(case.n, case.k, device=device) * case.k**-0.5)
                data[expert, part] = q.data
                if scale is not None and q.scale is not None:
                    scale[expert, part] = q.scale
        return ExpertWeights(weight_format, data, scale, None, case.k)

    def run(self, backend: ComputeBackend) -> Any:
        if self.case.stage == "fc1":
            return backend.fc1(self.x, self.weights, self.index, self.activation, self.row_format)
        return backend.fc2(self.x, self.weights, self.index)

    def torch_grouped_mm(self) -> Callable[[], Any] | None:
        """PyTorch's grouped product of rows already in order, without gather and activation; None where it has none."""
        if self.case.operands != "bf16" or not hasattr(torch, "_grouped_mm") or not self.x.data.is_cuda:
            return None
        x = torch.randn(self.rows, self.case.k, device=self.x.data.device).bfloat16()
        weights = self.weights.data.flatten(1, 2).transpose(1, 2)
        return lambda: torch._grouped_mm(x, weights, offs=self.index.offsets[1:])

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


def time_us(ranks: Ranks, call: Callable[[], Any], repeats: int, *, l2_flush: bool = False) -> float:
    """Median µs a step; as many steps as fill some 20 ms."""
    work = [Work({"step": call})]
    quick = Options(warmup=1, steps=2, repeats=1) if ranks.is_cuda else Options(warmup=0, steps=1, repeats=1)
    once = measure(ranks, work, quick).step_us
    steps = max(3, min(100, math.ceil(TARGET_US / once))) if ranks.is_cuda else 3
    return measure(ranks, work, Options(warmup=2, steps=steps, repeats=repeats, l2_flush=l2_flush)).step_us


def measure_rates(ranks: Ranks) -> dict[str, float] | None:
    """Of this GPU: TB/s that a reduction reads, TFLOP/s of BF16 and FP8 products; None on the CPU."""
    if not ranks.is_cuda:
        return None
    device = ranks.local[0].device
    a, b = (torch.randn(CUBE, CUBE, device=device).bfloat16() for _ in range(2))
    rates = {"bf16_tflops": 2 * CUBE**3 / time_us(ranks, lambda: a @ b.t(), 3) / 1e6}
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    product = time_us(ranks, lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16), 3)
    rates["fp8_tflops"] = 2 * CUBE**3 / product / 1e6
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    rates["read_tbps"] = READ_BYTES / time_us(ranks, data.sum, 3) / 1e6
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
    """Check a case's output, time it, and set it beside its floor and peers."""
    case = problem.case
    backend = select_backend(ranks.local[0].device, problem.weights.format, problem.row_format)
    limit = 5e-2 if case.operands == "fp8" and case.stage == "fc1" else 5e-3
    error = problem.truth_error(problem.run(backend))
    if not error < limit:
        raise ConfigError(f"{case}: relative error {error:.1e}, more than {limit:.0e}")
    us = time_us(ranks, lambda: problem.run(backend), repeats, l2_flush=l2_flush)
    used = sum(count > 0 for count in case.counts())
    size = 1 if case.operands == "fp8" else 2
    weight_bytes = used * case.parts * case.n * case.k * size
    operations = 2 * problem.rows * case.parts * case.n * case.k
    result: dict[str, Any] = {
        "us": us,
        "error": error,
        "backend": backend.name,
        "weights_tbps": weight_bytes / us / 1e6,
        "tflops": operations / us / 1e6,
    }
    if rates is not None:
        floor = max(weight_bytes / rates["read_tbps"], operations / rates[f"{case.operands}_tflops"]) / 1e6
        result["floor_us"] = floor
    for peer in peers:
        call = problem.torch_grouped_mm() if peer == "torch" else None
        result[f"{peer}_us"] = None if call is None else time_us(ranks, call, repeats, l2_flush=l2_flush)
    return {"kind": "gemm", "parameters": {**asdict(case), "l2_flush": l2_flush}, "result": result, "rates": rates}


def run(
    cases: Sequence[Case], *, peers: Sequence[str] = ("torch",), repeats: int = 7, l2_flush: bool = False,
    device_type: str | None = None, json_file: str | None = None,
) -> int:  # fmt: skip
    """Measure, print a table, write JSON lines. Returns the exit code: 1 if a case failed."""
    from rich.console import Console
    from rich.progress import track

    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    ranks = Ranks.in_one_process([device])
    console = Console(stderr=True)
    record = provenance(kind)
    with ranks.local[0].active():
        rates = measure_rates(ranks)
        lines, failed, problem = [], 0, None
        for case in track(cases, "cases", console=console, transient=True, disable=not console.is_terminal):
            try:
                problem = Problem(case, device, problem)
                lines.append({**run_case(ranks, problem, rates, peers, repeats=repeats, l2_flush=l2_flush), **record})
            except (ConfigError, RuntimeError) as error:
                failed += 1
                problem = None
                console.print(f"{case}: {error}", markup=False)
                continue
            if json_file:
                with open(json_file, "a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    print_table(lines, rates)
    return 1 if failed else 0


def print_table(lines: Sequence[dict[str, Any]], rates: dict[str, float] | None) -> None:
    """One row a case."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    columns = (
        "model",
        "",
        "operands",
        "experts",
        "N × K",
        "tokens",
        "routing",
        "µs",
        "floor",
        "TB/s",
        "TFLOP/s",
        "torch",
    )
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("model", "", "operands", "routing") else "right", no_wrap=True
        )
    for line in lines:
        p, r = line["parameters"], line["result"]
        floor, peer = r.get("floor_us"), r.get("torch_us")
        table.add_row(
            p["model"], p["stage"], p["operands"], f"{p['active']}/{p['experts']}", f"{p['n']} × {p['k']}",
            str(p["tokens"]), p["routing"], f"{r['us']:.1f}", "" if floor is None else f"{floor:.1f}",
            f"{r['weights_tbps']:.3g}", f"{r['tflops']:.3g}", "" if peer is None else f"{peer:.1f}",
        )  # fmt: skip
    console.print(table)
    if rates is None:
        console.print("Measured on a CPU; the numbers mean nothing for GPUs.")
    else:
        console.print(
            f"This GPU: reads {rates['read_tbps']:.2f} TB/s, BF16 {rates['bf16_tflops']:.0f}, "
            f"FP8 {rates['fp8_tflops']:.0f} TFLOP/s ({CUBE}³)."
        )
