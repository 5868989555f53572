"""moe-layer bench gemm: what is timed is what the table says, and is checked first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_layer.benchmarks import gemm
from moe_layer.benchmarks.gemm_case import Case
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.cli import main
from moe_layer.errors import ConfigError
from moe_layer.gemm.reference import ReferenceBackend
from moe_layer.gemm.tile_choice import Tile, choose_tile, forced_tile
from moe_layer.quant import get_format

SMALL = Case("small", "fc1", "bf16", 6, 32, 64, 10, 4)


def test_counts() -> None:
    assert SMALL.counts() == [10, 10, 10, 10, 0, 0]
    skew = Case("small", "fc1", "bf16", 48, 32, 64, 512, 48, "skew").counts()
    assert sum(skew) == 48 * 512 and 0.89 < skew[0] / sum(skew) < 0.92 and len(set(skew[1:])) == 1
    poisson = Case("small", "fc1", "bf16", 48, 32, 64, 64, 48, "poisson").counts()
    assert len(set(poisson)) > 5 and 0.8 < sum(poisson) / (48 * 64) < 1.2


def test_cases_of_a_model() -> None:
    cases = list(gemm.cases_of(SHAPES["deepseek_v41"], 8, ("fc1", "fc2"), ("fp8",), (1, 64), ("even",), 6))
    assert [(c.stage, c.n, c.k, c.experts, c.active, c.tokens) for c in cases] == [
        ("fc1", 2304, 5120, 48, 6, 1), ("fc1", 2304, 5120, 48, 6, 64),
        ("fc2", 5120, 2304, 48, 6, 1), ("fc2", 5120, 2304, 48, 6, 64),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'fc3' is none of fc1, fc2"):
        list(gemm.cases_of(SHAPES["deepseek_v3"], 8, ("fc3",), ("fp8",), (1,), ("even",)))


@pytest.mark.parametrize("operands", list(gemm.FORMATS))
@pytest.mark.parametrize("stage", ["fc1", "fc2"])
def test_a_wrong_product_is_noticed(stage: str, operands: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("small", stage, operands, 3, 128, 256, 5, 3)
    problem = gemm.Problem(case, torch.device("cpu"), None)
    assert problem.truth_error(problem.run(ReferenceBackend())) < 0.15
    ranks = Ranks.in_one_process([torch.device("cpu")])
    right = gemm.run_case(ranks, problem, None, (), repeats=1, l2_flush=False)
    fmt = get_format(gemm.FORMATS[operands][0])
    parts = 2 if stage == "fc1" else 1
    assert right["weight_bytes"] == 3 * parts * fmt.nbytes((128, 256)) and right["min_us"] <= right["us"]
    assert right["weights_tbps"] == pytest.approx(right["weight_bytes"] / right["us"] / 1e6)
    original = ReferenceBackend.fc1 if stage == "fc1" else ReferenceBackend.fc2

    def off_by_one(self: ReferenceBackend, x: object, weights: object, index: object, *rest: object) -> object:
        problem.index.slots.add_(1).remainder_(7)
        problem.x.data.copy_(problem.x.data.roll(1, 0))
        return original(self, x, weights, index, *rest)  # type: ignore[arg-type, operator]

    monkeypatch.setattr(ReferenceBackend, stage, off_by_one)
    shuffled = problem.run(ReferenceBackend())
    monkeypatch.undo()
    problem = gemm.Problem(case, torch.device("cpu"), problem)
    monkeypatch.setattr(gemm.Problem, "run", lambda *_: shuffled)
    with pytest.raises(gemm.GemmError, match="relative error"):
        gemm.run_case(ranks, problem, None, (), repeats=1, l2_flush=False)


def test_weights_are_shared_between_cases_of_a_projection() -> None:
    first = gemm.Problem(SMALL, torch.device("cpu"), None)
    again = gemm.Problem(gemm.replace(SMALL, tokens=3, active=6), torch.device("cpu"), first)
    other = gemm.Problem(gemm.replace(SMALL, n=48), torch.device("cpu"), first)
    assert again.weights is first.weights and other.weights is not first.weights
    assert again.index.offsets.tolist() == [0, 3, 6, 9, 12, 15, 18] and again.index.expected_rows == 18


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.json"
    arguments = ["bench", "gemm", "--model", "kimi_linear", "--ranks", "128", "--tokens", "2", "--stage", "fc2"]
    code = main([*arguments, "--operands", "bf16", "--repeats", "1", "--device", "cpu", "--json", str(file)])
    assert code == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert len(lines) == 1 and lines[0]["kind"] == "gemm" and lines[0]["results"]["backend"] == "reference"
    assert "mean nothing for GPUs" in capsys.readouterr().out and lines[0]["note"]


def test_forced_tile() -> None:
    before = choose_tile("sm_90a", "fp8", 480, 48)
    with forced_tile(Tile(64, 1)):
        assert choose_tile("sm_90a", "fp8", 480, 48).tokens == 64
    assert choose_tile("sm_90a", "fp8", 480, 48) == before
