"""The all-to-all benchmark on the CPU: its checks catch wrong outputs, its lines say all, its errors are words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_layer import cli
from moe_layer.benchmarks import a2a_work
from moe_layer.benchmarks.a2a import crossover_row_bytes, time_case
from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.a2a_crossover import find_crossover, write_crossover
from moe_layer.benchmarks.a2a_work import OneRank
from moe_layer.benchmarks.ceilings import Ceilings
from moe_layer.benchmarks.harness import Options
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.report.pieces import number
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.session import SessionError
from moe_layer.benchmarks.shapes import get_shape
from moe_layer.comm import DispatchResult
from moe_layer.errors import CommunicationError

ONE = Ranks.in_one_process([torch.device("cpu")])
QUICK = Options(warmup=1, steps=2, repeats=2)


def loopback(model: str = "deepseek_v41", routing: str = "perfect") -> Case:
    return Case(get_shape(model), 5, "loopback", 1, Routing.parse(routing), seed=7)


# ---- the checks of outputs ----


@pytest.mark.parametrize("model", ["deepseek_v41", "deepseek_v41:nvfp4", "deepseek_v3:bf16", "deepseek_v3", "kimi_k3"])
def test_a_right_transport_passes(model: str) -> None:
    assert time_case(ONE, loopback(model), QUICK).step_us > 0


@pytest.mark.parametrize("quantize", ["before", "fused", "target"])
@pytest.mark.parametrize("model", ["deepseek_v41", "deepseek_v41:nvfp4", "deepseek_v3", "kimi_k3:mxfp4"])
def test_steps_that_quantize(model: str, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values drawn anew for every step; a bit that a quantizer inside dispatch gets wrong is found."""
    case = replace(loopback(model), quantize=quantize)
    assert time_case(ONE, case, QUICK).step_us > 0
    right = OneRank.dispatch
    for field in ("hidden_states", "hidden_states_scale"):

        def wrong(self: OneRank, field: str = field) -> DispatchResult:
            result = right(self)
            damage(field)(result)
            return result

        monkeypatch.setattr(OneRank, "dispatch", wrong)
        with pytest.raises(CommunicationError, match="1 of 5 combined rows differ from the reference"):
            time_case(ONE, case, QUICK)


def damage(field: str, bit: int = 1) -> Callable[[DispatchResult], None]:
    def change(result: DispatchResult) -> None:
        tensor = getattr(result, field)
        if field == "topk_ids":
            tensor[3, 2] = -1
        else:  # one bit of a float as of a byte
            tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.uint8)[3, 2] ^= bit

    return change


@pytest.mark.parametrize("bit", [1, 16, 128])
@pytest.mark.parametrize("field", ["hidden_states", "hidden_states_scale", "topk_weights", "topk_ids"])
def test_damage_in_dispatch_is_found(field: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = OneRank.dispatch

    def wrong(self: OneRank) -> DispatchResult:
        result = right(self)
        damage(field, bit)(result)
        return result

    monkeypatch.setattr(OneRank, "dispatch", wrong)
    with pytest.raises(CommunicationError, match=r"rank 0: 1 of 5 combined rows differ from the reference.* row 3"):
        time_case(ONE, loopback(), QUICK)


def test_damage_in_the_timed_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager steps are right; the timed combines of one repeat leave a row as it was, which is poison."""
    right, calls = OneRank.combine, []

    def wrong(self: OneRank) -> None:
        poison = self.output[2].clone()
        right(self)
        calls.append(1)
        if 8 <= len(calls) <= 10:
            self.output[2] = poison

    monkeypatch.setattr(OneRank, "combine", wrong)
    with pytest.raises(CommunicationError, match="1 of 5 combined rows differ from the reference, the first is row 2"):
        time_case(ONE, loopback(), QUICK)


def test_a_transport_that_breaks_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the eager step after the replays shows payload damage: the timed steps combine rows that are given."""
    right, calls = OneRank.dispatch, []
    eager_and_timed = 1 + 3 + 3 * (QUICK.repeats + 1)

    def wrong(self: OneRank) -> DispatchResult:
        result = right(self)
        calls.append(1)
        if len(calls) > eager_and_timed:
            damage("hidden_states")(result)
        return result

    monkeypatch.setattr(OneRank, "dispatch", wrong)
    with pytest.raises(CommunicationError, match="1 of 5 combined rows differ"):
        time_case(ONE, loopback(), QUICK)
    assert len(calls) == eager_and_timed + 1


def test_inputs_are_fresh() -> None:
    seen = []

    class Watched(OneRank):
        def dispatch(self) -> DispatchResult:
            seen.append(self.x.clone())
            return super().dispatch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2a_work, "OneRank", Watched)
        time_case(ONE, loopback(), QUICK)
    # First and last eager step, three to warm up, three repeats.
    assert len({x.numpy().tobytes() for x in seen}) == 2 + 3 + QUICK.repeats + 1


# ---- floors ----


@pytest.mark.parametrize(("model", "published"), [("deepseek_v41", 185), ("kimi_k3", 131), ("deepseek_v3:bf16", 337)])
def test_floor_of_bytes(model: str, published: float) -> None:
    """4096 tokens between two H200, worked out by hand from measured rates when the project began."""
    shape = get_shape(model)
    ceilings = Ceilings(push_gbps=362, pull_gbps=335, flag_us=0.74, launch_us=0.70)
    floor = ceilings.floor_us(4096, shape.dispatch_bytes, shape.combine_bytes, combine_pulls=True)
    assert floor["bytes_us"] == pytest.approx(published, rel=0.005)
    assert floor["total_us"] - floor["bytes_us"] == pytest.approx(2.88)
    pushed = ceilings.floor_us(4096, shape.dispatch_bytes, shape.combine_bytes, combine_pulls=False)
    assert floor["combine_us"] / pushed["combine_us"] == pytest.approx(362 / 335)


# ---- the command ----


def test_bench_a2a_between_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.json"
    code = cli.main(
        "bench a2a --device cpu --ranks 2 --model kimi_linear,deepseek_v41:nvfp4 --tokens 1,3 --routing perfect,zipf:1"
        f" --steps 2 --warmup 1 --repeats 3 --json {file}".split()
    )
    out = capsys.readouterr().out
    assert code == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    cases = [
        tuple(line["parameters"][name] for name in ("routing", "model", "activation_format", "tokens_per_rank"))
        for line in lines
    ]
    models = [("kimi_linear", "bf16"), ("deepseek_v41", "nvfp4")]
    assert cases == [(r, *m, t) for r in ("perfect", "zipf:1") for m in models for t in (1, 3)]
    for line in lines:
        assert set(line) >= {"kind", "parameters", "results", "date", "commit", "machine", "versions", "note"}
        assert line["kind"] == "a2a" and "nothing for GPUs" in line["note"]
        p, r = line["parameters"], line["results"]
        assert (p["protocol"], p["ep_size"], p["launch"]) == ("collective", 2, "process")
        assert (p["warmup"], p["steps"], p["repeats"], p["l2_flush"]) == (1, 2, 3, False)
        assert len(r["repeats_us"]) == 3 and r["min_us"] <= r["us"] <= r["max_us"]
        assert set(r["phases_us"]) == {"dispatch", "combine"} and min(r["phases_us"].values()) > 0
        assert r["load_imbalance"] == 1.0 or p["routing"] != "perfect"
        # Perfect routing of eight or six selections reaches both ranks, so each token travels to the other one.
        assert r["copies_on_busiest_link"] == p["tokens_per_rank"] or p["routing"] != "perfect"
        assert f"T={p['tokens_per_rank']} collective: {number(r['us'], 4)} µs" in out
    assert lines[2]["parameters"]["dispatch_bytes"] == 2560 + 336 + 48
    assert "mean nothing for GPUs" in out and "All-to-all: CPU" in out


def test_a_failing_case_is_a_line_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's process is enough: the token count at which the case breaks is out of reach of the checks."""
    from moe_layer.benchmarks import a2a

    real = a2a.A2ABench.record

    def record(self: a2a.A2ABench, case: Case) -> dict[str, Any]:
        if case.tokens == 2:
            object.__setattr__(case, "protocol", "fence")  # which a CPU cannot run
        return real(self, case)

    monkeypatch.setattr(a2a.A2ABench, "record", record)
    file = tmp_path / "lines.json"
    argv = "bench a2a --device cpu --ranks 1 --model kimi_linear --tokens 2,1 --steps 1 --warmup 0 --repeats 1 --json"
    assert cli.main([*argv.split(), str(file)]) == 1
    failed, good = (json.loads(line) for line in file.read_text().splitlines())
    assert "results" not in failed and failed["error"]
    assert failed["commit"] == good["commit"] and good["results"]["us"] > 0
    out, err = capsys.readouterr()
    assert "T=2 fence: FAILED: " in out and "Traceback" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--protocol fance", "unknown protocol 'fance'; known: sentinel, fence, fence+fp8"),
        ("--peer mpi", "unknown peer 'mpi'; known: nccl"),
        ("--model gpt", "unknown model 'gpt'"),
        ("--routing even", "unknown routing 'even'; known: perfect, uniform, zipf:ALPHA"),
        ("--device cpu --protocol fence", "'fence' runs between GPUs and there is none here; 'collective' runs"),
        ("--device cpu --l2-flush", "--l2-flush flushes a GPU's cache"),
        ("--device cpu --ranks 1 --protocol collective", "needs two ranks; one rank runs 'loopback'"),
        ("--device cpu --ranks 2 --protocol loopback", "'loopback' serves one rank, but there are 2"),
        ("--device cpu --ranks 2 --launch single", "on the CPU several ranks need a process each"),
        ("--device cpu --ranks 300", "perfect routing sends up to 1 selections of a token to rank"),
        ("--device cpu --crossover x.json", "the crossover is between Sentinel and Fence, which run between GPUs"),
        ("--device cpu --quantize later", "unknown way to quantize 'later'; known: given, before, fused, target"),
        ("--device cpu --model kimi_linear --quantize fused", "kimi_linear:bf16 has nothing to quantize"),
        ("--tokens 0", "must be at least 1, got 0"),
        ("--tokens 1,x", "invalid"),
        ("--launch mpirun", "invalid choice: 'mpirun'"),
    ],
)
def test_errors_before_anything_starts(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["bench", "a2a", *argv.split()])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def test_help_teaches_and_its_examples_parse(capsys: pytest.CaptureFixture[str]) -> None:
    from moe_layer import (
        cli_a2a,
        cli_bench,
        cli_compile,
        cli_gemm,
        cli_layer,
        cli_load,
        cli_memory,
        cli_quant,
        cli_report,
    )

    assert cli.main(["bench"]) == 2
    assert "bench a2a --help" in capsys.readouterr().out
    parser, seen = cli.build_parser(), 0
    modules = (cli_a2a, cli_bench, cli_compile, cli_gemm, cli_layer, cli_load, cli_memory, cli_quant, cli_report)
    for examples in (text for module in modules for name, text in vars(module).items() if name.endswith("_EXAMPLES")):
        for line in examples.splitlines():
            if line.startswith("  moe-layer ") and "--help" not in line:
                assert parser.parse_args(line.split("moe-layer ", 1)[1].split("   ")[0].split()).handler
                seen += 1
    assert seen >= 25


# ---- the crossover ----


class FakeBench:
    """Times that cross between two token counts."""

    size, plan = 2, type("P", (), {"seed": 0})()

    def __init__(self, crossing: float, fail_at: int = 0) -> None:
        self.crossing, self.fail_at = crossing, fail_at
        self.measured: list[tuple[int, str]] = []

    def record(self, case: Case) -> dict[str, Any]:
        self.measured.append((case.tokens, case.protocol))
        if case.tokens == self.fail_at:
            return {"error": "TimeoutError: rank 1 is gone", "details": ""}
        sentinel = 5 + 0.05 * case.tokens
        fence = 5 + 0.05 * self.crossing + 0.01 * (case.tokens - self.crossing)
        return {"results": {"us": sentinel if case.protocol == "sentinel" else fence}}


def search(bench: FakeBench, fence: str = "fence") -> dict[str, int]:
    generator = find_crossover(bench, get_shape("kimi_k3"), fence)  # type: ignore[arg-type]
    try:
        while True:
            next(generator)
    except StopIteration as done:
        return done.value


@pytest.mark.parametrize("crossing", [5, 16, 100, 300, 1500, 4096])
def test_crossover_is_found(crossing: int) -> None:
    bench = FakeBench(crossing)
    row = search(bench)
    assert row["sentinel_limit"] <= crossing <= row["sentinel_limit"] + max(1, row["sentinel_limit"] / 16)
    # Rows travel with 3584 + 112 bytes and return with 7168.
    assert row == {"ep_size": 2, "row_bytes": 10864, "top_k": 16, "sentinel_limit": row["sentinel_limit"]}
    assert len(bench.measured) <= 2 * 14


def test_a_protocol_that_always_wins() -> None:
    assert search(FakeBench(1e9))["sentinel_limit"] == 4096
    assert search(FakeBench(-1e3))["sentinel_limit"] == 0
    bench = FakeBench(300)
    search(bench, "fence+fp8")
    assert {protocol for _, protocol in bench.measured} == {"sentinel", "fence+fp8"}


def test_a_crossover_that_cannot_be_measured() -> None:
    with pytest.raises(SessionError, match="kimi_k3:mxfp8, 64 tokens, sentinel: TimeoutError: rank 1 is gone"):
        search(FakeBench(300, fail_at=64))


def test_crossover_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces the rows of its number of ranks, keeps the others, and is what `auto` reads."""
    from moe_layer.comm import auto

    path = tmp_path / "crossover.json"
    old = [{"ep_size": p, "row_bytes": 15520, "top_k": 6, "sentinel_limit": 100 * p} for p in (2, 8)]
    path.write_text(json.dumps({"measured": "before", "rows": old}))
    provenance = {
        "date": "2026-12-01T10:00:00+00:00",
        "commit": "abc",
        "machine": {"device": "cuda", "gpu": "NVIDIA H200", "gpus": 2, "link": "NV18"},
    }
    row = {"ep_size": 2, "row_bytes": 10864, "top_k": 16, "sentinel_limit": 640}
    write_crossover(path, [row], provenance)
    data = json.loads(path.read_text())
    assert data["rows"] == [row, old[1]]
    assert data["measured"] == "before; 2026-12-01, 2 × NVIDIA H200, NV18, commit abc"
    monkeypatch.setattr(auto, "_table", lambda: data["rows"])
    monkeypatch.delenv("MOE_LAYER_SENTINEL_LIMIT", raising=False)
    assert (auto.sentinel_limit(2, 10864, 16), auto.sentinel_limit(8, 15520, 6)) == (640, 800)


def test_row_bytes_are_those_of_the_crossover_table() -> None:
    """The sizes that comm/crossover.json was measured at."""
    assert crossover_row_bytes(get_shape("deepseek_v41")) == 5120 + 160 + 10240
    assert crossover_row_bytes(get_shape("deepseek_v3:bf16")) == 14336 + 14336
