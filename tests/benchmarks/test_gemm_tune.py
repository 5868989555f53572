"""bench gemm --tune: which tiles are tried, which is chosen, and the table that is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_layer.benchmarks import gemm, gemm_tune
from moe_layer.benchmarks.gemm_case import Case
from moe_layer.cli import main
from moe_layer.gemm import tile_choice
from moe_layer.gemm.sm90_spec import GroupedSpec, token_tiles
from moe_layer.gemm.tile_choice import Tile, candidates

PROVENANCE = {"date": "2026-12-01T10:00:00", "commit": "abc", "machine": {"device": "cpu", "cpus": 2, "processor": "x"}}


def line(us: float, tokens: int, tile: int, *, cluster: int = 1, stage: str = "fc1", **changes: Any) -> dict[str, Any]:
    parameters = {
        "model": "m", "stage": stage, "operands": "mxfp4", "experts": 48, "n": 1, "k": 1, "active": 48,
        "routing": "even", "tokens": tokens, "tile": tile, "cluster": cluster, **changes,
    }  # fmt: skip
    return {"kind": "gemm", "parameters": parameters, "results": {"us": us}}


def test_candidates_are_what_a_kernel_can_have() -> None:
    for operands in ("bf16", "fp8", "mxfp4", "nvfp4", "mxfp8", "int4"):
        low_bit = operands not in ("bf16", "fp8")
        for tile in candidates(operands):
            dtype = "bf16" if low_bit else operands
            weights = operands if low_bit else ""
            spec = GroupedSpec(8, 1, 256, 256, dtype, "bf16", tile.tokens, False, cluster=tile.cluster, weights=weights)
            assert spec.tokens == tile.tokens and spec.stages >= 2
    assert Tile(128, 2) in candidates("fp8") and Tile(152, 1) in candidates("mxfp4")
    assert max(t.tokens for t in candidates("int4")) == 96
    with pytest.raises(AssertionError):
        GroupedSpec(8, 1, 256, 256, "bf16", "bf16", 128, False, weights="int4")


@pytest.mark.parametrize(
    ("tokens", "tried"),
    [(1, (8,)), (16, (8, 16, 32)), (64, (32, 48, 64, 80, 96, 112, 128)), (512, (96, 112, 128, 144, 152))],
)
def test_tiles_that_cannot_win_are_not_tried(tokens: int, tried: tuple[int, ...]) -> None:
    assert tuple(t for t in token_tiles("mxfp4") if gemm_tune.worth_trying(Tile(t, 1), tokens)) == tried


def test_the_fastest_over_all_cases() -> None:
    """At 64, one projection gains a third with the larger tile and the other loses a tenth: the larger one."""
    lines = [
        line(10, 8, 8), line(12, 8, 16),
        line(300, 64, 64), line(200, 64, 128), line(100, 64, 64, stage="fc2"), line(110, 64, 128, stage="fc2"),
        line(400, 128, 128), line(390, 128, 152), line(900, 512, 128), line(800, 512, 152),
    ]  # fmt: skip
    lines.append({"kind": "gemm", "parameters": {}, "error": "a failed one is left out"})
    assert gemm_tune.choose(lines) == {
        "mxfp4": [
            {"up_to": 36.0, "tokens": 8, "cluster": 1},
            {"up_to": 96.0, "tokens": 128, "cluster": 1},
            {"up_to": None, "tokens": 152, "cluster": 1},
        ]
    }


def test_a_tile_must_have_been_timed_everywhere() -> None:
    lines = [line(300, 64, 64), line(250, 64, 96), line(100, 64, 64, stage="fc2")]
    assert gemm_tune.choose(lines)["mxfp4"] == [{"up_to": None, "tokens": 64, "cluster": 1}]


def test_table_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other operands keep their entries, and the choice follows the new ones."""
    file = tmp_path / "tiles.json"
    shutil.copy(tile_choice.TABLE, file)
    before = json.loads(file.read_text())
    entries = [{"up_to": 10.5, "tokens": 16, "cluster": 1}, {"up_to": None, "tokens": 152, "cluster": 1}]
    gemm_tune.write(file, "sm_90a", {"mxfp4": entries}, PROVENANCE)
    after = json.loads(file.read_text())
    assert after["sm_90a"].pop("mxfp4") == entries and "abc" in after.pop("measured")["mxfp4"]
    del before["sm_90a"]["mxfp4"]
    assert after == before and file.read_text().count("\n") > 25
    monkeypatch.setattr(tile_choice, "TABLE", file)
    tile_choice._table.cache_clear()
    try:
        assert [tile_choice.choose_tile("sm_90a", "mxfp4", m * 4, 4).tokens for m in (1, 10, 11, 500)] == [
            16,
            16,
            152,
            152,
        ]
    finally:
        tile_choice._table.cache_clear()


def test_every_tile_is_forced_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = gemm.GemmBench([Case("m", "fc1", "mxfp4", 4, 64, 128, 16, 4)], "cpu", peers=())
    seen: list[Tile] = []

    def results(self: gemm.GemmBench, case: Case) -> dict[str, Any]:
        with tile_choice.forced_tile(self.tile):
            seen.append(tile_choice.choose_tile("sm_90a", "mxfp4", 64, 4))
        return {"us": 1.0}

    monkeypatch.setattr(gemm.GemmBench, "results", results)
    lines = list(gemm_tune.records(bench))
    assert [t.tokens for t in seen] == [8, 16, 32] == [n["parameters"]["tile"] for n in lines] and bench.tile is None


def test_not_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", "--device", "cpu", "--tune", str(tmp_path / "t.json")]) == 2
    assert "there is no GPU here" in capsys.readouterr().err and not (tmp_path / "t.json").exists()
