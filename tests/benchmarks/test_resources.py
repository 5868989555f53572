"""moe-layer bench memory and bench load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_layer.benchmarks import load, memory
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.cli import main
from moe_layer.errors import ConfigError

MIB = 1 << 20


def test_memory_is_the_papers() -> None:
    """§3.2: 160 MiB of hidden states in dispatch, 320 MiB in combine, a few MiB besides; expert-major: k = 6 times."""
    r = memory.measure(memory.Case(SHAPES["deepseek_v41"], 8, 4096))
    assert r["region_bytes"]["dispatch: hidden states"] == 160 * MIB
    assert r["region_bytes"]["combine: partial results"] == 320 * MIB
    assert r["paper_bytes"] == 8 * 4096 * (5328 + 10240)
    assert r["paper_bytes"] < r["total_bytes"] < 1.2 * r["paper_bytes"]
    assert r["expert_major_bytes"] == 6 * r["paper_bytes"]


def test_expert_major_is_limited_by_local_experts() -> None:
    """Kimi-K3 has 14 experts a rank on 64, fewer than its k of 16."""
    r = memory.measure(memory.Case(SHAPES["kimi_k3"], 64, 128))
    assert r["expert_major_bytes"] == 14 * r["paper_bytes"]


def test_memory_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.json"
    assert main(["bench", "memory", "--ranks", "2,8", "--model", "kimi_k3:bf16", "--json", str(file)]) == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [n["parameters"]["ep_size"] for n in lines] == [2, 8]
    assert [n["results"]["paper_bytes"] for n in lines] == [p * 4096 * (7296 + 7168) for p in (2, 8)]
    assert "expert-major" in capsys.readouterr().out


def test_load(tmp_path: Path) -> None:
    """Both runs of one release: bytes are those of the rank's share, and times and memory are there."""
    r = load.measure(load.Case("deepseek_v41", gib=0.02, ep_size=2, shards=2, repeats=1))
    expert = 3 * (5120 * 2304 // 2 + 5120 * 2304 // 32)
    assert r["expert_bytes"] == expert and not r["packed"]
    assert r["experts"] * expert <= r["nbytes"] < r["experts"] * expert + 200 * MIB
    assert r["us"] == r["min_us"] == r["max_us"] > 0 and r["ratio"] == pytest.approx(r["us"] / r["floor_us"])
    assert r["peak_bytes"] > 0.5 * r["nbytes"]


def test_unknown_release(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="unknown release 'gpt'"):
        load.measure(load.Case("gpt"))
    assert main(["bench", "load", "--release", "gpt"]) == 2
    assert "unknown release 'gpt'" in capsys.readouterr().err
