"""moe-layer bench layer: cases, the check against fp64, work and floors by hand, one rank without its peers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_layer.benchmarks import layer
from moe_layer.benchmarks.harness import Options
from moe_layer.benchmarks.layer_case import Case
from moe_layer.benchmarks.layer_truth import LayerError
from moe_layer.benchmarks.layer_work import ALONE, OneLayer, prepared
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import SHAPES, Shape
from moe_layer.cli import main
from moe_layer.comm import ExpertPlacement
from moe_layer.errors import ConfigError

ONE = Ranks.in_one_process([torch.device("cpu")])
TINY = replace(SHAPES["deepseek_v41"], hidden_size=256, intermediate_size=128, num_experts=16, top_k=4)
FORMATS = (("mxfp4", "mxfp8"), ("fp8", "fp8"), ("nvfp4", "nvfp4"), ("int4", "bf16"), ("bf16", "bf16"))


def shape(weights: str, activations: str, base: Shape = TINY) -> Shape:
    return replace(base, weight_format=weights, activation_format=activations)


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
@pytest.mark.parametrize(("protocol", "ep_size"), [(ALONE, 4), ("loopback", 1)])
def test_layers_are_right(weights: str, activations: str, protocol: str, ep_size: int) -> None:
    """The step passes its own check, and what the check compares is computed from the weights, not by the layer."""
    case = Case(shape(weights, activations), 6, protocol, ep_size, Routing(0.5))
    with prepared(ONE, case) as (one,):
        work = one.work()
        for repeat in range(2):
            work.refresh(repeat)
            work.step()
            work.check()
        assert one.error < 5.7e-3


@pytest.mark.parametrize("model", ["kimi_k3", "deepseek_v41"])
def test_models_keep_their_activation(model: str) -> None:
    """Without SiTU, or without the clamp, the check fails."""
    own = replace(TINY, activation=SHAPES[model].activation)
    case = Case(own, 4, "loopback", 1, Routing())
    with prepared(ONE, case) as (one,):
        one.work().step()
        one.work().check()
        one.layer.activation = replace(one.layer.activation, kind="swiglu", limit=0.1)
        one.work().step()
        with pytest.raises(LayerError, match="relative L2 error"):
            one.work().check()


@pytest.mark.parametrize("protocol", [ALONE, "loopback"])
@pytest.mark.parametrize("fault", ["nothing", "nan", "value"])
def test_a_wrong_output_is_noticed(protocol: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(ONE, Case(TINY, 4, protocol, 1 if protocol == "loopback" else 2, Routing())) as (one,):
        one.work().step()
        one.work().check()
        one.refresh(1)
        if fault != "nothing":  # what the step before left was poisoned
            one.work().step()
            output = output_of(one)
            output[0, 3] = float("nan") if fault == "nan" else output[0, 3] + output.abs().max()
        with pytest.raises(LayerError, match="relative L2 error"):
            one.work().check()


def output_of(one: OneLayer) -> torch.Tensor:
    output = getattr(one.channel, "partials", None)
    output = one.output if output is None else output
    assert output is not None
    return output


def test_one_rank_gets_what_all_ranks_send() -> None:
    """Rank 0's slots are the tokens of all ranks that select one of its experts; the others hold −1."""
    case = Case(TINY, 3, ALONE, 4, Routing(0.0), seed=5)
    with prepared(ONE, case) as (one,):
        received = one.channel.received  # type: ignore[attr-defined]
        assert received.topk_ids.shape == (12, 4) and received.tokens_per_rank == 3
        for source in range(4):
            for token, ids in enumerate(case.ids(source).tolist()):
                slot = received.topk_ids[source * 3 + token].tolist()
                assert slot == (ids if any(e < 4 for e in ids) else [-1] * 4)
        assert one.layer.local_experts == [0, 1, 2, 3]


def test_experts_are_drawn_once_a_model() -> None:
    with prepared(ONE, Case(TINY, 3, "loopback", 1, Routing())) as (a,):
        pass
    with prepared(ONE, Case(TINY, 5, "loopback", 1, Routing(1.0))) as (b,):
        assert a.layer.routed_experts is b.layer.routed_experts
    with prepared(ONE, Case(TINY, 5, "loopback", 1, Routing(1.0), seed=1)) as (c,):
        assert c.layer.routed_experts is not b.layer.routed_experts


def test_work_by_hand() -> None:
    """Two ranks of two experts, MXFP4: rank 1 gets five of eight pairs, all to one expert."""
    own = replace(TINY, num_experts=4, top_k=2, hidden_size=64, intermediate_size=32)
    file_ids = torch.tensor([[0, 2], [1, 2], [2, 2], [0, 2]])  # rows of rank 0: first two, of rank 1: the others
    case = FixedCase(own, 2, "fence", 2, Routing(), ids_=file_ids)
    found = layer.work_of(case)
    expert = 3 * (64 * 32 // 2 + 64 * 32 // 32)
    assert found["rows"] == 5 and found["operations"] == 6 * 5 * 64 * 32
    assert found["active_experts"] == 2 and found["weight_bytes"] == 2 * expert  # rank 0's two, rank 1 has one
    assert found["load_imbalance"] == pytest.approx(5 / 4) and found["copies_on_busiest_link"] == 2


class FixedCase(Case):
    """Routing given by hand."""

    def __init__(self, *args: Any, ids_: torch.Tensor) -> None:
        super().__init__(*args)
        object.__setattr__(self, "ids_", ids_)

    def ids(self, rank: int) -> torch.Tensor:
        return self.ids_[rank * self.tokens : (rank + 1) * self.tokens].int()  # type: ignore[attr-defined]


CEILINGS = {
    "read_tbps": 4.0, "bf16_tflops": 800.0, "fp8_tflops": 1400.0, "launch_us": 0.5,
    "push_gbps": 360.0, "pull_gbps": 330.0, "flag_us": 0.75,
}  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "activations", "operations", "compute", "bound"),
    [
        ("mxfp4", "mxfp8", 0, 100.0, "weights"),
        ("mxfp4", "mxfp8", 8 * 10**11, 1000.0, "operations"),
        ("fp8", "fp8", 14 * 10**11, 1000.0, "operations"),
    ],
)
def test_floor_by_hand(weights: str, activations: str, operations: int, compute: float, bound: str) -> None:
    case = Case(shape(weights, activations, SHAPES["deepseek_v41"]), 1, "fence", 2, Routing())
    work = {"weight_bytes": 4 * 10**8, "operations": operations, "copies_on_busiest_link": 100}
    floor = layer.floor_us(case, work, CEILINGS)
    assert floor["compute_us"] == pytest.approx(compute) and floor["bound"] == bound
    sent = 5120 + 4 * 40 + 48 if activations == "fp8" else 5328
    assert floor["all_to_all_us"] == pytest.approx(100 * (sent / 360e3 + 10240 / 330e3))
    assert floor["latency_us"] == pytest.approx(4 * 0.5 + 2 * (0.5 + 0.75))
    alone = layer.floor_us(replace(case, protocol=ALONE), work, CEILINGS)
    assert alone["all_to_all_us"] == 0 and alone["total_us"] == pytest.approx(compute + 2.0)


@pytest.mark.parametrize(
    ("protocols", "ranks", "words"),
    [
        (("sentinel",), 2, "runs between GPUs and there is none here"),
        (("none", "collective"), 2, "cannot share a run"),
        (("loopback",), 2, "serves one rank"),
        (("collective",), 1, "one rank runs 'loopback'"),
        (("warp",), 2, "unknown protocol 'warp'"),
    ],
)
def test_impossible_plans(protocols: tuple[str, ...], ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layer.LayerBench(layer.Plan((TINY,), (1,), protocols, ranks=ranks, device_type="cpu"))


def test_between_processes(tmp_path: Path) -> None:
    """Two ranks over gloo: a line with stages, work and error; and a case that fails is a line too."""
    plan = layer.Plan((TINY,), (4,), ("collective",), ranks=2, options=Options(1, 2, 2), device_type="cpu")
    with layer.LayerBench(plan) as bench:
        bench.start()
        good = bench.record(bench.cases[0])
        bad = bench.record(replace(bench.cases[0], route=True, shape=replace(TINY, name="nobody")))
    r = good["results"]
    assert good["kind"] == "layer" and good["note"] and good["parameters"]["ep_size"] == 2 and json.dumps(good)
    assert 0 < r["error"] < 5.7e-3 and r["transport"] == "collective" and r["min_us"] <= r["us"] <= r["max_us"]
    assert {"quantize", "dispatch", "index", "fc1", "fc2", "finalize", "combine"} == set(r["stages_us"])
    assert r["rows"] == 16 and r["active_experts"] == 8
    assert "no router is known for 'nobody'" in bad["error"] and "results" not in bad


def test_experts_that_do_not_divide_by_ranks() -> None:
    """Sixteen experts on three ranks: each rank has its own, six or five."""
    plan = layer.Plan((TINY,), (5,), ("collective",), (Routing(0.0),), 3, device_type="cpu", options=Options(0, 1, 1))
    with layer.LayerBench(plan) as bench:
        bench.start()
        line = bench.record(bench.cases[0])
    assert "error" not in line, line
    assert line["results"]["local_experts"] == 6


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank of four with recorded routing, and the router in each step."""
    ids = torch.stack([torch.randperm(16)[:6] for _ in range(50)])
    save_file({"topk_ids": ids.int()}, str(tmp_path / "ids.safetensors"))
    file = tmp_path / "out" / "lines.json"
    argv = ["bench", "layer", "--device", "cpu", "--protocol", "none", "--ranks", "4", "--tokens", "2", "--steps", "1"]
    argv += ["--repeats", "1", "--routing", f"trace:{tmp_path / 'ids.safetensors'}", "--json", str(file)]
    assert main(argv) == 0
    (line,) = (json.loads(text) for text in file.read_text().splitlines())
    p, r = line["parameters"], line["results"]
    assert p["routing"] == "trace:ids.safetensors" and p["protocol"] == "none" and p["ep_size"] == 4
    mine = sum(int(e) < 4 for e in ids[:8].flatten())
    assert r["rows"] == mine
    out = capsys.readouterr().out
    assert "one rank of 4, without the all-to-all" in out and "the numbers mean nothing for GPUs" in out


def test_placement_of_peers_weights() -> None:
    case = Case(TINY, 1, "megamoe", 4, Routing())
    gate_up, down = case.bf16_experts(1, torch.device("cpu"))
    assert case.placement == ExpertPlacement.contiguous(16, 4)
    assert gate_up.shape == (4, 256, 256) and down.shape == (4, 256, 128)
    gate, up, own_down = case.projections(4, torch.device("cpu"))
    assert torch.equal(gate_up[0], torch.cat([gate, up])) and torch.equal(down[0], own_down)
