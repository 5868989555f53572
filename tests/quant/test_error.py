"""The measured round-trip error of docs/numerics.md against its theory, which shares no code with the quantizers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from moe_layer.benchmarks import quant_error
from moe_layer.quant import available_formats


@pytest.mark.parametrize("name", available_formats())
def test_measured_error_is_the_expected_one(monkeypatch, name):
    monkeypatch.setattr(quant_error, "QUANTILES", 400)
    monkeypatch.setattr(quant_error, "POINTS", 1000)
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(11))
    result = quant_error.measure(name, x)
    # 2 %: the sampling error of 32 blocks of 128 × 128, and of 400 quantiles where a scale jumps by powers of two.
    assert math.isclose(result["measured"], result["theory"], rel_tol=0.02)


def test_command(capsys, monkeypatch):
    monkeypatch.setattr(quant_error, "QUANTILES", 100)
    monkeypatch.setattr(quant_error, "POINTS", 200)
    arguments = ["--rows", "128", "--columns", "128"]
    assert quant_error.main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["format"] for r in rows] == available_formats()
    assert quant_error.main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rows)
    assert all(line.count("|") == 7 for line in table)
    for row, line in zip(rows, table[2:]):
        assert f"| {row['format']} | {row['bits']:.3f} | {row['measured']:.4e} |" in line
    with pytest.raises(SystemExit):
        quant_error.main(["--rows", "100"])
    assert "must be multiples of 128, got 100 and 7168" in capsys.readouterr().err
