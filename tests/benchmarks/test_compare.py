"""Result lines read back, and results beside earlier ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_layer.benchmarks import compare, records
from moe_layer.benchmarks.again import MAKERS
from moe_layer.cli import main

MACHINE = {"device": "cpu", "processor": "x86_64", "cpus": 2}


def line(
    us: float, *, noise: float = 0.01, tokens: int = 4, date: str = "2026-12-01", **changes: Any
) -> dict[str, Any]:
    parameters = {"format": "fp8", "way": "quantize", "columns": 320, "tokens": tokens, "scale": "", "nbytes": 1}
    results = {"us": us, "min_us": us * (1 - noise), "max_us": us * (1 + noise), "spread": 2 * noise}
    return {
        "kind": "quant", "parameters": {**parameters, "steps": 3, "repeats": 2}, "results": results,
        "date": date, "commit": "abc", "machine": MACHINE, **changes,
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(entry) for entry in lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (line(10.0), line(12.0), "slower"),
        (line(12.0), line(10.0), "faster"),
        (line(10.0), line(10.2, noise=0.001), ""),  # less than the threshold
        (line(10.0, noise=0.2), line(12.0), ""),  # the old run's repeats reach as far
        (line(10.0), line(12.0, noise=0.2), ""),
    ],
)
def test_verdict(old: dict[str, Any], new: dict[str, Any], verdict: str) -> None:
    assert compare.Comparison(old, new, 0.03).verdict == verdict


def test_only_equal_cases_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**MACHINE, "cpus": 64}
    old = write(tmp_path / "old.json", line(10.0), line(20.0, tokens=8), line(5.0, tokens=16), line(1.0, machine=other))
    again = {**line(12.0)["parameters"], "repeats": 9}  # another procedure, the same case
    new = write(tmp_path / "new.json", line(12.0, parameters=again), line(20.1, tokens=8), line(7.0, tokens=32))
    assert main(["bench", "--compare", old, "--with", new]) == 1
    out, err = capsys.readouterr()
    assert "2 cases compared, 1 slower" in out and "1.200" in out and "1.005" in out
    assert err.count("not compared") == 2 and "T=16" in err and "64 × x86_64" in err
    assert main(["bench", "--compare", old, "--with", new, "--threshold", "0.25"]) == 0


@pytest.mark.parametrize("us", [0.0, float("nan")])
def test_times_that_are_none(us: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.json", line(us), line(10.0, tokens=8))
    new = write(tmp_path / "new.json", line(5.0), line(10.0, tokens=8))
    assert main(["bench", "--compare", old, "--with", new]) == 0
    assert "1 cases compared, 0 slower" in capsys.readouterr().out


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write(tmp_path / "old.json", line(10.0)), write(tmp_path / "new.json", line(10.0, tokens=5))
    assert main(["bench", "--compare", old, "--with", new]) == 2
    assert "no timed case in common" in capsys.readouterr().err


def test_cases_are_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real lines of a small run, then the same cases again from the lines alone."""
    file = tmp_path / "old.json"
    argv = ["bench", "quant", "--device", "cpu", "--tokens", "2", "--repeats", "2", "--format", "nvfp4"]
    assert main([*argv, "--way", "quantize", "--json", str(file)]) == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    for entry in lines:  # so slow that what is measured now must be faster
        entry["results"] |= dict.fromkeys(("us", "min_us", "max_us"), 1000000000000.0)
    capsys.readouterr()
    assert main(["bench", "--compare", write(file, *lines)]) == 0
    out = capsys.readouterr().out
    assert "2 cases compared, 0 slower" in out and out.count("faster") == 2


def test_a_case_that_got_slower_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.json"
    assert main(["bench", "layer", "--device", "cpu", "--ranks", "1", "--tokens", "1", "--steps", "1", "--repeats", "1",
                 "--json", str(file)]) == 0  # fmt: skip
    entry = json.loads(file.read_text())
    entry["results"] |= dict.fromkeys(("us", "min_us", "max_us"), 0.001)
    assert main(["bench", "--compare", write(file, entry)]) == 1
    assert "slower" in capsys.readouterr().out


def test_every_timed_kind_can_be_measured_again() -> None:
    assert set(records.KINDS) - set(MAKERS) <= {"memory"}


def test_latest_line_of_a_case() -> None:
    first, second = line(10.0, date="2026-12-01"), line(11.0, date="2026-12-02")
    assert records.latest([second, first]) == [second] and records.latest([first, second]) == [second]
    assert len(records.latest([first, line(10.0, tokens=5)])) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 2"),
        ("[]", "line 2: not a result"),
        ('{"kind": "quant"}', "not a result"),
        ('{"kind": "quant", "parameters": {}, "machine": {}, "date": ""}', "not a result"),
        ('{"kind": "tea", "parameters": {}, "machine": {}, "date": ""}', "not a result"),
    ],
)
def test_what_is_no_result(tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(line(1.0)) + "\n" + text + "\n")
    with pytest.raises(ValueError, match=words):
        records.read_lines([file])
    assert main(["report", str(file)]) == 2 and main(["bench", "--compare", str(file)]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
