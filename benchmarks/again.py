"""The cases of result lines, to be measured again: each kind's bench, made from the lines' own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from moe_layer.benchmarks import a2a, gemm, layer, load, quant
from moe_layer.benchmarks.a2a_case import Case as A2ACase
from moe_layer.benchmarks.bench import Bench
from moe_layer.benchmarks.gemm_case import Case as GemmCase
from moe_layer.benchmarks.harness import Options
from moe_layer.benchmarks.layer_case import Case as LayerCase
from moe_layer.benchmarks.layer_work import ALONE
from moe_layer.benchmarks.records import Line
from moe_layer.benchmarks.report import a2a as a2a_report
from moe_layer.benchmarks.report import gemm as gemm_report
from moe_layer.benchmarks.report import layer as layer_report
from moe_layer.benchmarks.report import pieces, resources
from moe_layer.benchmarks.report import quant as quant_report
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import SHAPES, Shape
from moe_layer.gemm.tile_choice import Tile

Maker = Callable[[Sequence[Line]], "tuple[Bench, Callable[[Sequence[Line]], list[pieces.Section]]]"]


def procedure_of(line: Line) -> tuple[Any, ...]:
    """What lines must have in common to be measured in one run."""
    p = line["parameters"]
    names = ("ep_size", "launch", "warmup", "steps", "repeats", "l2_flush", "seed", "device_type", "tile", "cluster")
    alone = p.get("protocol") == ALONE
    return (*(p.get(name) for name in names), alone, line["machine"]["device"])


def device_of(lines: Sequence[Line]) -> str:
    device: str = lines[0]["machine"]["device"]
    return device


def options_of(line: Line) -> Options:
    p = line["parameters"]
    return Options(p["warmup"], p["steps"], p["repeats"], p["l2_flush"])


def shape_of(line: Line) -> Shape:
    """The shape that a line's parameters spell out; a model that is not known any more has plain SwiGLU."""
    p = line["parameters"]
    known = SHAPES.get(p["model"]) or Shape(p["model"], 0, 0, 0, 0, "bf16", "bf16", p["model"])
    names = ("hidden_size", "intermediate_size", "num_experts", "top_k", "activation_format", "weight_format")
    return replace(known, **{name: p[name] for name in names if name in p})


def same(case_type: type[Any], line: Line) -> Any:
    """A case whose fields a line has by name."""
    return case_type(**{f.name: line["parameters"][f.name] for f in fields(case_type) if f.name in line["parameters"]})


def layer_again(lines: Sequence[Line]) -> tuple[Bench, Callable[[Sequence[Line]], list[pieces.Section]]]:
    cases = [
        LayerCase(
            shape_of(line), p["tokens_per_rank"], p["protocol"], p["ep_size"], Routing.parse(p["routing"]), p["seed"],
            p["quantize_at"], p["route"],
        )
        for line in lines
        for p in (line["parameters"],)
    ]  # fmt: skip
    first = lines[0]["parameters"]
    plan = layer.Plan(
        shapes=(), tokens=(), protocols=(first["protocol"],), ranks=first["ep_size"], launch=first["launch"],
        device_type=device_of(lines), options=options_of(lines[0]), stages=False,
    )  # fmt: skip
    bench = layer.LayerBench(plan)
    bench.cases = cases
    return bench, layer_report.sections


def quant_again(lines: Sequence[Line]) -> tuple[Bench, Callable[[Sequence[Line]], list[pieces.Section]]]:
    p = lines[0]["parameters"]
    options = Options(warmup=10 if device_of(lines) == "cuda" else 1, steps=p["steps"], repeats=p["repeats"])
    return quant.QuantBench(
        [same(quant.Case, line) for line in lines], device_of(lines), options
    ), quant_report.sections


def load_again(lines: Sequence[Line]) -> tuple[Bench, Callable[[Sequence[Line]], list[pieces.Section]]]:
    cases = [same(load.Case, line) for line in lines]
    return load.LoadBench(cases, lines[0]["parameters"]["device_type"]), resources.load_sections


def a2a_again(lines: Sequence[Line]) -> tuple[Bench, Callable[[Sequence[Line]], list[pieces.Section]]]:
    cases = [
        A2ACase(
            shape_of(line), p["tokens_per_rank"], p["protocol"], p["ep_size"], Routing.parse(p["routing"]), p["seed"],
            p["quantize"],
        )
        for line in lines
        for p in (line["parameters"],)
    ]  # fmt: skip
    first = lines[0]["parameters"]
    plan = a2a.Plan(
        shapes=(), tokens=(), protocols=(), ranks=first["ep_size"], launch=first["launch"],
        device_type=device_of(lines), options=options_of(lines[0]), phases=False,
    )  # fmt: skip
    bench = a2a.A2ABench(plan)
    bench.cases = cases
    return bench, a2a_report.sections


def gemm_again(lines: Sequence[Line]) -> tuple[Bench, Callable[[Sequence[Line]], list[pieces.Section]]]:
    p = lines[0]["parameters"]
    cases = [same(GemmCase, line) for line in lines]
    tile = Tile(p["tile"], p["cluster"]) if "tile" in p else None
    bench = gemm.GemmBench(cases, device_of(lines), peers=(), repeats=p["repeats"], l2_flush=p["l2_flush"], tile=tile)
    return bench, gemm_report.sections


MAKERS: dict[str, Maker] = {
    "a2a": a2a_again, "layer": layer_again, "gemm": gemm_again, "quant": quant_again, "load": load_again,
}  # fmt: skip
