"""`moe-layer demo` on tiny sizes: what it reports, and that a wrong result cannot pass."""

from __future__ import annotations

import json

import pytest

from moe_layer import cli, demo
from moe_layer.errors import ConfigError

TINY = ["demo", "--ep", "2", "--tokens", "5", "--hidden", "256", "--model", "kimi_k3", "--json", "--device", "cpu"]


def test_demo(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(TINY) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["ok"] and report["ep_size"] == 2
    (row,) = report["models"]
    assert row["tokens_per_rank"] == [5, 0]
    assert 0 < row["relative_l2_error"] <= report["error_limit"] == 5.7e-3
    assert (row["weight_format"], row["activation_format"], row["protocol"]) == ("mxfp4", "mxfp8", "collective")
    assert row["same_bits_when_repeated"]
    # 64 experts over two ranks, three projections of 128 × 128 values at 4 bits and a scale byte per 32.
    assert all(size > 32 * 3 * 128 * 128 * (4.25 / 8) for size in row["bytes_per_rank"])
    assert set(row["stage_seconds"]) == set(demo.STAGES)
    assert all(seconds > 0 for seconds in row["stage_seconds"].values())

    demo.print_report(report)
    text = capfd.readouterr().out
    assert "Kimi-K3" in text and "5 0" in text and "within the limit" in text


def test_an_error_beyond_the_limit_is_exit_code_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle reads other weights than the ranks: gate and up swapped."""
    right = demo.OracleLayer.matrix
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}

    def wrong(self: demo.OracleLayer, *modules: str):  # type: ignore[no-untyped-def]
        parts = [m.rpartition(".") for m in modules]
        return right(self, *(head + dot + swap.get(tail, tail) for head, dot, tail in parts))

    monkeypatch.setattr(demo.OracleLayer, "matrix", wrong)
    assert cli.main(TINY) == 1
    report = json.loads(capfd.readouterr().out)
    assert not report["ok"] and report["models"][0]["relative_l2_error"] > 0.1
    demo.print_report(report)
    assert "BEYOND" in capfd.readouterr().out


def test_token_counts() -> None:
    assert demo.token_counts(48, 4) == (48, 32, 16, 0)
    assert demo.token_counts(1, 3) == (1, 1, 0)
    assert demo.token_counts(7, 1) == (7,)


def test_errors() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt'; the demo has deepseek_v3, deepseek_v41, kimi_k3"):
        demo.run_demo(models=["gpt"])
    with pytest.raises(
        ConfigError, match="--hidden must be a multiple of 256, so that scale blocks are whole, got 100"
    ):
        demo.run_demo(hidden_size=100)
