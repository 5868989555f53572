"""moe-layer bench quant: the bytes it counts, the bits it checks, the lines it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_layer.benchmarks import quant
from moe_layer.benchmarks.harness import Options
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.benchmarks.stages import Machine
from moe_layer.cli import main
from moe_layer.errors import ConfigError
from moe_layer.quant import QuantizedTensor
from moe_layer.quant.base import Format

ONE = Ranks.in_one_process([torch.device("cpu")])
QUICK = Options(warmup=1, steps=3, repeats=2)
MACHINE = Machine(copy_gbps=1000.0, launch_us=0.5)


def test_bytes() -> None:
    """V3's rows by hand: BF16 values, elements, scales, and with NVFP4 the row's own scale."""
    by_hand = {
        ("fp8", ""): 14336 + 7168 + 56 * 4,
        ("mxfp8", ""): 14336 + 7168 + 224,
        ("mxfp4", ""): 14336 + 3584 + 224,
        ("nvfp4", "row"): 14336 + 3584 + 448 + 4,
        ("nvfp4", "given"): 14336 + 3584 + 448,
    }
    for (name, scale), nbytes in by_hand.items():
        for way in quant.WAYS:
            assert quant.Case(name, way, 7168, 3, scale).nbytes == 3 * nbytes


def test_cases_are_every_combination_once() -> None:
    shapes = [SHAPES["deepseek_v3"], SHAPES["kimi_k2"], SHAPES["kimi_k3"]]  # two widths
    cases = list(quant.cases_of(shapes, ("mxfp8", "nvfp4"), quant.WAYS, (1, 16), quant.SCALES))
    assert len(cases) == len(set(cases)) == 2 * (1 + 2) * 2 * 2
    assert {case.columns for case in cases} == {7168, 3584}
    assert {case.scale for case in cases if case.format == "mxfp8"} == {""}


@pytest.mark.parametrize(
    ("formats", "ways", "scales", "words"),
    [
        (("bf16",), quant.WAYS, quant.SCALES, "format 'bf16' is none that rows are quantized to"),
        (("fp8_128x128",), quant.WAYS, quant.SCALES, "format 'fp8_128x128' is none"),
        (("fp8",), ("both",), quant.SCALES, "'both' is none of quantize, dequantize"),
        (("fp8",), quant.WAYS, ("tensor",), "'tensor' is none of row, given"),
    ],
)
def test_wrong_names(formats: Any, ways: Any, scales: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        list(quant.cases_of([SHAPES["kimi_k3"]], formats, ways, (1,), scales))


CASES = [
    quant.Case(name, way, 320, tokens, scale)
    for name, scale in (("fp8", ""), ("mxfp8", ""), ("mxfp4", ""), ("nvfp4", "row"), ("nvfp4", "given"), ("int4", ""))
    for way in quant.WAYS
    for tokens in (1, 70)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case(case: quant.Case) -> None:
    r = quant.run_case(ONE, case, MACHINE, QUICK)
    assert json.dumps(r) and r["min_us"] <= r["us"] <= r["max_us"]
    assert r["us"] > 0 and r["gbps"] == pytest.approx(case.nbytes / r["us"] / 1e3)
    assert r["of_copy"] == pytest.approx(r["gbps"] / 1000) and r["floor_us"] == pytest.approx(0.5 + case.nbytes / 1e6)


@pytest.mark.parametrize("case", [case for case in CASES if case.tokens == 70], ids=str)
@pytest.mark.parametrize("part", ["data", "scale"])
def test_a_wrong_bit_is_noticed(case: quant.Case, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last row, in elements or scales; and a step that writes nothing leaves the poison."""
    problem = quant.Problem(case, torch.device("cpu"))
    kind = type(problem.fmt)
    if case.way == "quantize":
        right: Any = kind.quantize

        def wrong(self: Format, x: torch.Tensor, **options: Any) -> QuantizedTensor:
            q = right(self, x, **options)
            getattr(q, part).view(torch.uint8)[-1, -1] ^= 1
            return q

        monkeypatch.setattr(kind, "quantize", wrong)
    else:
        right = kind.dequantize

        def wrong_values(self: Format, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
            values = right(self, q, dtype)
            values.view(torch.int16)[-1, -1] ^= 1
            return values

        monkeypatch.setattr(kind, "dequantize", wrong_values)
    with pytest.raises(quant.QuantizerError, match="not those of the PyTorch reference"):
        problem.step()
        problem.check()
    monkeypatch.undo()
    problem.step()
    problem.check()
    problem.refresh(1)
    with pytest.raises(quant.QuantizerError):
        problem.check()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.json"
    argv = ["bench", "quant", "--device", "cpu", "--format", "mxfp8,nvfp4", "--tokens", "2", "--repeats", "1"]
    assert main([*argv, "--way", "quantize", "--json", str(file)]) == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [(n["parameters"]["format"], n["parameters"]["scale"]) for n in lines] == [
        ("mxfp8", ""), ("nvfp4", "row"), ("nvfp4", "given"),
    ]  # fmt: skip
    assert all(n["kind"] == "quant" and n["note"] and n["ceilings"]["copy_gbps"] > 0 for n in lines)
    out = capsys.readouterr().out
    assert "easured on a CPU; the numbers mean nothing for GPUs" in out and "share of the" in out


def test_failures_give_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(self: quant.Problem) -> None:
        raise quant.QuantizerError("broken")

    monkeypatch.setattr(quant.Problem, "check", broken)
    assert main(["bench", "quant", "--device", "cpu", "--format", "fp8", "--tokens", "1", "--repeats", "1"]) == 1
    assert "broken" in capsys.readouterr().err
