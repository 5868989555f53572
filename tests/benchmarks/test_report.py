"""Result lines as Markdown and as one HTML page, and that docs/performance.md shows the committed ones."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moe_layer.benchmarks.records import read_lines
from moe_layer.benchmarks.report import html, markdown, page
from moe_layer.benchmarks.report.pieces import Plot, Section, Series, Table, number
from moe_layer.benchmarks.report.plots import svg
from moe_layer.cli import main

ROOT = Path(__file__).parents[2]
SHARED = {
    "date": "2026-12-01T10:00:00+00:00",
    "commit": "0123456789ab",
    "machine": {"device": "cuda", "gpu": "NVIDIA H200", "gpus": 2, "link": "NV18", "driver": "580.1"},
    "versions": {"torch": "2.11.0", "cuda": "13.0", "nvidia-cutlass-dsl": "4.8.1"},
}
LINK = {"push_gbps": 357.6, "pull_gbps": 326.4, "flag_us": 0.741, "launch_us": 0.7}


def timing(us: float, spread: float = 0.031) -> dict[str, Any]:
    return {"us": us, "min_us": us * 0.99, "max_us": us * 1.01, "spread": spread}


def a2a(tokens: int, protocol: str, us: float, **changes: Any) -> dict[str, Any]:
    parameters = {
        "model": "kimi_k3", "activation_format": "mxfp8", "hidden_size": 3584, "top_k": 16, "num_experts": 896,
        "dispatch_bytes": 3824, "combine_bytes": 7168, "tokens_per_rank": tokens, "protocol": protocol, "ep_size": 2,
        "routing": "perfect", "launch": "process", "l2_flush": False, "quantize": "given",
    }  # fmt: skip
    results = {
        **timing(us), "phases_us": {"dispatch": us * 0.4, "combine": us * 0.6}, "load_imbalance": 1.0,
        "floor_us": us / 2 + 1, "ratio": us / (us / 2 + 1),
    }  # fmt: skip
    return {"kind": "a2a", "parameters": parameters, "results": results, "ceilings": LINK, **SHARED, **changes}


def layer(tokens: int, protocol: str, us: float, routing: str = "perfect", **results: Any) -> dict[str, Any]:
    parameters = {
        "model": "deepseek_v41", "weight_format": "mxfp4", "activation_format": "mxfp8", "hidden_size": 5120,
        "intermediate_size": 2304, "num_experts": 384, "top_k": 6, "tokens_per_rank": tokens, "protocol": protocol,
        "ep_size": 8, "routing": routing, "quantize_at": "source", "route": False, "launch": "process",
        "l2_flush": False,
    }  # fmt: skip
    found = {
        **timing(us), "stages_us": {"dispatch": us * 0.2, "fc1": us * 0.5, "fc2": us * 0.3}, "error": 1.9e-3,
        "rows": 6 * tokens, "active_experts": 3, "local_experts": 48, "load_imbalance": 1.0,
        "floor": {"compute_us": us / 2, "bound": "weights", "all_to_all_us": 1.5}, "floor_us": us / 2 + 2,
        "ratio": us / (us / 2 + 2), **results,
    }  # fmt: skip
    return {"kind": "layer", "parameters": parameters, "results": found, "ceilings": LINK, **SHARED}


def gemm(operands: str, tokens: int, us: float, **peers: float) -> dict[str, Any]:
    parameters = {
        "model": "deepseek_v41", "stage": "fc1", "operands": operands, "experts": 48, "n": 2304, "k": 5120, "parts": 2,
        "tokens": tokens, "active": 48, "routing": "even", "l2_flush": False,
    }  # fmt: skip
    results = {
        **timing(us), "error": 1e-3, "backend": "sm90", "weights_tbps": 3.7, "tflops": 55.5, "floor_us": us / 1.25,
        "ratio": 1.25, "peers_us": peers,
    }  # fmt: skip
    ceilings = {"read_tbps": 4.44, "bf16_tflops": 790.4, "fp8_tflops": 1400.2}
    return {"kind": "gemm", "parameters": parameters, "results": results, "ceilings": ceilings, **SHARED}


def quant(way: str, tokens: int, us: float) -> dict[str, Any]:
    parameters = {"format": "nvfp4", "way": way, "columns": 7168, "tokens": tokens, "scale": "row", "nbytes": 1}
    results = {**timing(us), "gbps": 3600.0, "of_copy": 0.89, "floor_us": us * 0.8, "ratio": 1.25}
    return {"kind": "quant", "parameters": parameters, "results": results, "ceilings": {"copy_gbps": 4045.0}, **SHARED}


def memory() -> dict[str, Any]:
    parameters = {"model": "deepseek_v41", "activation_format": "mxfp8", "ep_size": 8, "max_tokens_per_rank": 4096}
    results = {
        "region_bytes": {"dispatch: hidden states": 160 << 20, "combine: partial results": 320 << 20},
        "total_bytes": 500 << 20, "paper_bytes": 486 << 20, "expert_major_bytes": 2919 << 20,
    }  # fmt: skip
    return {"kind": "memory", "parameters": parameters, "results": results, **SHARED}


def load() -> dict[str, Any]:
    results = {
        **timing(65e3), "floor_us": 50e3, "ratio": 1.3, "best_ratio": 1.21, "experts": 6, "nbytes": 141 << 20,
        "expert_bytes": 20 << 20, "peak_bytes": 151 << 20,
    }  # fmt: skip
    return {"kind": "load", "parameters": {"release": "kimi_k3", "device_type": "cpu"}, "results": results, **SHARED}


def failed(line: dict[str, Any], error: str) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k != "results"} | {"error": error, "details": ""}


def render(*lines: dict[str, Any]) -> str:
    return markdown.render(page.sections_of(lines))


def tables(text: str) -> list[dict[str, list[str]]]:
    """Each table's rows by their first cell."""
    found: list[dict[str, list[str]]] = [{}]
    for line in text.splitlines():
        if not line.startswith("|"):
            found += [{}] if found[-1] else []
        elif "---" not in line:
            first, *rest = line.strip("| ").split(" | ")
            found[-1][first] = rest
    return [table for table in found if table]


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


# ---- what the tables say ----


def test_all_to_all() -> None:
    nccl = a2a(1, "nccl", 3.0)
    del nccl["results"]["phases_us"]
    absent = {k: v for k, v in a2a(1, "deepep", 0).items() if k != "results"} | {"absent": "deep_ep is not installed"}
    lines = [
        a2a(1, "sentinel", 5.0), a2a(1, "fence", 8.0), nccl, absent, failed(a2a(16, "fence", 0), "boom"),
        a2a(16, "sentinel", 6.0),
    ]  # fmt: skip
    text = render(*lines)
    (table,) = tables(text)
    assert table["T"] == ["sentinel", "fence", "nccl", "floor", "best / floor"]
    assert table["1"] == ["**5.00** (2.00 + 3.00)", "8.00 (3.20 + 4.80)", "3.00", "3.50", "1.43"]
    assert table["16"] == ["6.00 (2.40 + 3.60)", "failed", "–", "4.00", "1.50"]
    assert "### All-to-all: 2 × NVIDIA H200, NV18, 2 ranks, a process a rank, perfect routing" in text
    assert "#### Kimi-K3, mxfp8" in text and "3824 / 7168 B a token and rank, k 16, 896 experts" in text
    assert "push 358 GB/s a GPU and direction, pull 326 GB/s, one-way flag 0.74 µs, empty kernel 0.70 µs" in text
    assert "commit 0123456789ab; torch 2.11.0, CUDA 13.0, driver 580.1, CuTe DSL 4.8.1" in text
    assert "Largest spread of a figure over its repeats: 3.1 %." in text and "imbalance" not in text
    assert "fence, T = 16: failed: boom" in text and "Peer deepep: absent: deep_ep is not installed" in text


def test_the_latest_of_a_case_counts_and_cases_stay_apart() -> None:
    newer = a2a(1, "fence", 7.0, date="2026-12-02T10:00:00+00:00", commit="fedcba987654")
    flushed, zipf, before = a2a(1, "fence", 9.0), a2a(1, "fence", 10.0), a2a(1, "fence", 11.0)
    flushed["parameters"]["l2_flush"] = True
    zipf["parameters"]["routing"] = "zipf:1"
    zipf["results"]["load_imbalance"] = 1.69
    before["parameters"]["quantize"] = "before"
    text = render(newer, a2a(1, "fence", 8.0), flushed, zipf, before)
    assert text.count("### All") == 3 and "perfect routing, L2 flushed" in text and "zipf:1 routing" in text
    assert "8.00" not in text and "Load imbalance 1.69–1.69." in text
    assert tables(text)[0]["T"][:2] == ["fence", "fence (before)"]


def test_layers() -> None:
    lines = [layer(1, "sentinel", 40.0), layer(1, "fence", 44.0), layer(128, "sentinel", 300.0)]
    lines.append(layer(128, "sentinel", 420.0, "zipf:1", load_imbalance=1.6))
    text = render(*lines)
    times, stages, *_, skew = tables(text)
    assert times["T"] == ["sentinel", "fence", "floor", "best / floor"]
    assert times["1"] == ["**40.0**", "44.0", "22.0", "1.82"] and times["128"] == ["300", "–", "152", "1.97"]
    assert stages["T"][:5] == ["dispatch", "fc1", "fc2", "layer", "experts active"]
    assert stages["1"] == ["8.00", "20.0", "12.0", "40.0", "3 of 48", "6", "20.0 (weights)", "1.50"]
    assert skew["T"] == ["perfect", "zipf:1"] and skew["128"] == ["300 (× 1.00)", "420 (× 1.60)"]
    assert skew["1"] == ["40.0 (× 1.00)", "–"]
    assert "fp64: 0.0019." in text and "DeepSeek-V4.1-Flash, mxfp4 weights, mxfp8 activations" in text


def test_by_number_of_ranks() -> None:
    """The fastest of ours in each place; flushed, skewed, quantizing and peers' lines stay out."""
    lines = [a2a(1, "sentinel", 5.0), a2a(1, "fence", 8.0), a2a(16, "fence", 9.0), a2a(1, "nccl", 2.0)]
    more = [a2a(1, "sentinel", 7.0), a2a(1, "fence", 6.0), a2a(1, "fence", 1.0), a2a(1, "fence", 1.5)]
    more[2]["parameters"]["l2_flush"], more[3]["parameters"]["quantize"] = True, "before"
    for line in more:
        line["parameters"]["ep_size"] = 4
        line["machine"] = {**line["machine"], "gpus": 4}
    text = render(*lines, *more, layer(1, "none", 40.0), layer(1, "fence", 41.0))
    assert "### All-to-all by number of ranks" in text and "Layer by number of ranks" not in text
    table = tables(text)[-1]
    assert table == {"T": ["2 ranks", "4 ranks"], "1": ["5.00", "6.00 †"], "16": ["9.00 †", "–"]}


def test_one_rank_alone_is_said() -> None:
    text = render(layer(1, "none", 40.0))
    assert "one rank of 8, without the all-to-all" in text and "the link's rates" not in text


def test_gemm_quant_and_resources() -> None:
    text = render(gemm("mxfp4", 1, 163.0), gemm("bf16", 1, 540.0, torch=700.0), quant("quantize", 16, 1.5),
                  quant("dequantize", 16, 1.1), memory(), load())  # fmt: skip
    mxfp4, bf16, quantizers, bytes_, loading = tables(text)
    assert mxfp4["1"] == ["even", "48 of 48", "163", "3.70", "55.5", "130", "1.25", "1e-03"]
    assert bf16["m"][-2:] == ["torch µs", "error"] and bf16["1"][-2:] == ["700", "1e-03"]
    assert quantizers["BF16 → nvfp4, a scale a row"] == ["1.50 (89%)"] and quantizers["nvfp4 → BF16"] == ["1.10 (89%)"]
    assert bytes_["deepseek_v41:mxfp8"] == ["8", "4096", "160", "320", "500", "486", "2919"]
    assert loading["kimi_k3"] == ["6", "141", "50.0", "65.0", "1.30", "1.21", "+0.50"]
    assert "read 4.44 TB/s, BF16 product 790 TFLOP/s, FP8 product 1400 TFLOP/s" in text


def test_results_of_a_cpu_are_marked() -> None:
    entry = a2a(1, "collective", 9.0, note="measured on a CPU; the numbers mean nothing for GPUs")
    entry["machine"] = {"device": "cpu", "processor": "x86_64", "cpus": 2}
    entry["versions"] = {"torch": "2.13.0", "cuda": None, "nvidia-cutlass-dsl": None}
    del entry["ceilings"], entry["results"]["floor_us"], entry["results"]["ratio"]
    text = render(entry)
    assert "**Measured on a CPU; the numbers mean nothing for GPUs.**" in text
    assert tables(text)[0]["T"] == ["collective"] and "Ceilings" not in text and "CUDA" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.00"), (0.4321, "0.43"), (5.678, "5.68"), (56.78, "56.8"), (567.8, "568"), (5678.4, "5678")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_cells_with_bars() -> None:
    assert r"| a\|b |" in markdown.render_table(Table("", ["x"], [["a|b"]]))


# ---- the HTML page ----

ALL = [
    a2a(1, "sentinel", 5.0), a2a(16, "sentinel", 6.0), a2a(1, "nccl", 30.0), a2a(16, "nccl", 31.0),
    layer(1, "sentinel", 40.0), layer(128, "sentinel", 300.0), gemm("bf16", 1, 540.0), gemm("bf16", 64, 560.0),
    quant("quantize", 16, 1.5), memory(), load(),
]  # fmt: skip


class Reader(HTMLParser):
    """What a page refers to, its ids, and that elements close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href") and value:
                self.references.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"


def test_page_is_whole(tmp_path: Path) -> None:
    """One file: everything that it refers to is in it, ids are its own, elements close, plots and floors are there."""
    file = tmp_path / "report.html"
    assert main(["report", str(write(tmp_path / "a.json", *ALL)), "--html", str(file)]) == 0
    text = file.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and len(set(reader.ids)) == len(reader.ids)
    assert all(r.startswith("#") and r[1:] in reader.ids for r in reader.references), reader.references
    assert not re.search(r"url\((?!#)|<script|@import", text)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(reader.ids)
    # Round trip and speed-up; layers and their stages; one product; one width.
    assert reader.counts["svg"] == 2 + 2 + 1 + 1
    assert text.count("stroke-dasharray") >= 3 and "sentinel over nccl" in text and "finalize" not in text
    assert '<td class="none">–</td>' not in text and "<strong>" in text


def test_text_is_escaped() -> None:
    nasty = "<b>&**x**`y`"
    text = html.render(nasty, nasty, [Section(nasty, [nasty], [Table(nasty, [nasty], [[nasty]], note=nasty)])])
    assert "<b>" not in text and text.count("&lt;b&gt;&amp;<strong>x</strong><code>y</code>") == 8


def test_the_same_lines_give_the_same_page(tmp_path: Path) -> None:
    sections = page.sections_of(ALL)
    assert html.render("t", "l", sections) == html.render("t", "l", sections)


def test_plots_show_what_they_are_given() -> None:
    plot = Plot(
        "Title & more", "tokens", "µs", [Series("ours", [1, 16], [5.0, 6.0]), Series("floor", [1, 16], [2, 3], True)]
    )
    text = svg(plot, "p1")
    assert text.startswith("<svg") and "Title &amp; more" in text and text.count("stroke-dasharray") >= 1
    for word in ("ours", "floor", ">1<", ">16<", "tokens", "µs"):
        assert word in text
    stack = svg(Plot("s", "%", "T", [Series("fc1", [1, 2], [3, 1]), Series("fc2", [1, 2], [1, 1])], "stack"), "p2")
    assert "fc1" in stack and "fc2" in stack
    assert "once" in svg(Plot("s", "T", "times as fast", [Series("once", [1, 2], [3, 1])], "speedup"), "p3")


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    results = str(write(tmp_path / "a.json", *ALL))
    assert main(["report", results, "--html", str(tmp_path / "r.html")]) == 2
    assert "pip install 'moe-layer[bench]'" in capsys.readouterr().err and not (tmp_path / "r.html").exists()
    assert main(["report", results, "--markdown", str(tmp_path / "r.md")]) == 0
    assert "All-to-all" in (tmp_path / "r.md").read_text()


# ---- the command, and the committed page ----


def test_page_between_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    write(tmp_path / "a.json", a2a(1, "fence", 8.0))
    results = str(tmp_path)  # a folder
    assert main(["report", results, "--check", str(file)]) == 1
    assert main(["report", results, "--write", str(file)]) == 0
    text = file.read_text()
    assert text.startswith("# before\n") and text.endswith("\nafter\n") and "8.00" in text and "old" not in text
    assert main(["report", results, "--check", str(file)]) == 0
    file.write_text("no markers")
    assert main(["report", results, "--write", str(file)]) == 2 and file.read_text() == "no markers"
    capsys.readouterr()
    assert main(["report", results]) == 0 and "| 1 | 8.00" in capsys.readouterr().out


def test_the_documentation_shows_the_committed_results() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    sections = page.sections_of(read_lines(page.files_of([ROOT / "docs" / "results"])))
    shown = markdown.render(sections) if sections else page.NOTHING
    assert text == markdown.replace_between(text, page.BEGIN, page.END, shown), "run moe-layer report --write"
