"""Markdown tables from results, and that docs/performance.md shows the committed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_layer.benchmarks import report_a2a

ROOT = Path(__file__).parents[2]


def line(tokens: int, protocol: str, us: float, **changes: Any) -> dict[str, Any]:
    """A result as `bench a2a` writes it, with what the report reads."""
    parameters = {
        "model": "kimi_k3", "activation_format": "mxfp8", "hidden_size": 3584, "top_k": 16, "num_experts": 896,
        "dispatch_bytes": 3824, "combine_bytes": 7168, "tokens_per_rank": tokens, "protocol": protocol, "ep_size": 2,
        "routing": "perfect", "launch": "process", "l2_flush": False,
    }  # fmt: skip
    results = {
        "round_trip_us": us,
        "spread": 0.031,
        "phases_us": {"dispatch": us * 0.4, "combine": us * 0.6},
        "load_imbalance": 1.0,
        "floor": {"bytes_us": us / 2, "latency_us": 1.0, "total_us": us / 2 + 1.0},
        "ratio": us / (us / 2 + 1.0),
    }
    return {
        "kind": "a2a",
        "parameters": parameters,
        "results": results,
        "ceilings": {"push_gbps": 357.6, "pull_gbps": 326.4, "flag_us": 0.741, "launch_us": 0.7},
        "date": "2026-12-01T10:00:00+00:00",
        "commit": "0123456789ab",
        "machine": {"device": "cuda", "gpu": "NVIDIA H200", "gpus": 2, "link": "NV18", "driver": "580.1"},
        "versions": {"torch": "2.11.0", "cuda": "13.0", "nvidia-cutlass-dsl": "4.8.1"},
        **changes,
    }


def cells(markdown: str) -> dict[str, list[str]]:
    """Rows of the only table, by their first cell."""
    rows = [row.strip("| ").split(" | ") for row in markdown.splitlines() if row.startswith("|")]
    return {row[0]: row[1:] for row in rows}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def test_table(tmp_path: Path) -> None:
    nccl = line(1, "nccl", 3.0)
    nccl["results"]["phases_us"] = None
    failed = {k: v for k, v in line(16, "fence", 0).items() if k != "results"} | {"error": "boom", "details": ""}
    file = write(
        tmp_path / "a.json", line(1, "fence", 8.0), line(1, "sentinel", 5.0), nccl, failed, line(16, "sentinel", 6.0)
    )
    text = report_a2a.render(report_a2a.read_lines([file]))
    table = cells(text)
    assert table["T"] == ["sentinel", "fence", "nccl", "floor: bytes", "with latency", "best / floor"]
    assert table["1"] == ["**5.00** (2.00 + 3.00)", "8.00 (3.20 + 4.80)", "3.00", "2.50", "3.50", "1.43"]
    assert table["16"] == ["6.00 (2.40 + 3.60)", "failed", "–", "3.00", "4.00", "1.50"]
    assert "Kimi-K3, mxfp8** (3824 / 7168 B, k 16, 896 experts)" in text
    assert "### 2 × NVIDIA H200, NV18: 2 ranks, a process a rank, perfect routing" in text
    assert "push 358 GB/s, pull 326 GB/s" in text and "flag 0.74 µs" in text
    assert "commit 0123456789ab; torch 2.11.0, CUDA 13.0, driver 580.1, CuTe DSL 4.8.1" in text
    assert "Largest spread of a figure over its repeats: 3.1 %." in text and "imbalance" not in text


def test_the_latest_of_a_case_counts_and_cases_stay_apart(tmp_path: Path) -> None:
    newer = line(1, "fence", 7.0, date="2026-12-02T10:00:00+00:00", commit="fedcba987654")
    first = write(tmp_path / "a.json", newer)
    second = write(tmp_path / "b.json", line(1, "fence", 8.0), {"kind": "gemm"})
    lines = report_a2a.read_lines([first, second])
    assert [entry["results"]["round_trip_us"] for entry in lines] == [7.0]
    flushed = line(1, "fence", 9.0)
    flushed["parameters"]["l2_flush"] = True
    zipf = line(1, "fence", 10.0)
    zipf["parameters"]["routing"] = "zipf:1"
    zipf["results"]["load_imbalance"] = 1.69
    text = report_a2a.render(report_a2a.read_lines([first, second, write(tmp_path / "c.json", flushed, zipf)]))
    assert text.count("### ") == 3 and "perfect routing, L2 flushed" in text and "zipf:1 routing" in text
    assert "Load imbalance 1.69–1.69." in text


def test_results_of_a_cpu_are_marked() -> None:
    entry = line(1, "collective", 9.0, note="measured on a CPU; the numbers mean nothing for GPUs")
    entry["machine"] = {"device": "cpu", "processor": "x86_64", "cpus": 2}
    entry["versions"] = {"torch": "2.13.0", "cuda": None, "nvidia-cutlass-dsl": None}
    del entry["ceilings"], entry["results"]["floor"], entry["results"]["ratio"]
    text = report_a2a.render([entry])
    assert "**measured on a CPU; the numbers mean nothing for GPUs**" in text
    assert cells(text)["T"] == ["collective"] and "Ceilings" not in text and "CUDA" not in text


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# before\n{report_a2a.BEGIN}\nold\n{report_a2a.END}\nafter\n")
    results = str(write(tmp_path / "a.json", line(1, "fence", 8.0)))
    assert report_a2a.main([results, "--check", str(page)]) == 1
    assert report_a2a.main([results, "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# before\n") and text.endswith("\nafter\n") and "8.00" in text and "old" not in text
    assert report_a2a.main([results, "--check", str(page)]) == 0
    page.write_text("no markers")
    assert report_a2a.main([results, "--write", str(page)]) == 2 and page.read_text() == "no markers"
    broken = tmp_path / "b.json"
    broken.write_text('{"kind": "a2a"\n')
    assert report_a2a.main([str(broken)]) == 2
    assert f"error: {broken}, line 1" in capsys.readouterr().err


def test_the_documentation_shows_the_committed_results() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    tables = report_a2a.render(report_a2a.read_lines(sorted((ROOT / "benchmarks" / "results").glob("*.json"))))
    assert page == report_a2a.replace_between_markers(page, tables), "run benchmarks/report_a2a.py --write"
