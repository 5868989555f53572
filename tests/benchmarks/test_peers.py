"""Other libraries beside ours: absent ones are lines, cases that one does not do are said, and what adapters call.

No peer but PyTorch's own is installed where these tests run, so that adapters meet stand-ins that record their calls
and compute what the peer should: it is the adapters' bookkeeping that is tested, not the peers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_layer.benchmarks import gemm, peers
from moe_layer.benchmarks.a2a_case import Case as A2ACase
from moe_layer.benchmarks.gemm_case import Case as GemmCase
from moe_layer.benchmarks.layer_case import Case as LayerCase
from moe_layer.benchmarks.layer_truth import LayerError
from moe_layer.benchmarks.peers.known_rows import KnownRows
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.cli import main
from moe_layer.errors import CommunicationError, ConfigError
from moe_layer.quant import get_format

CPU = torch.device("cpu")
ONE = Ranks.in_one_process([CPU])
INSTALLED = [p.name for p in peers.PEERS if not p.package or importlib.util.find_spec(p.package)]


def a2a(model: str, **changes: Any) -> A2ACase:
    return replace(A2ACase(SHAPES[model], 8, "deepep", 2, Routing()), **changes)


@pytest.mark.parametrize("name", [peer.name for peer in peers.PEERS])
def test_every_peer_has_an_adapter_and_is_absent_here(name: str) -> None:
    adapter = peers.adapter(name)  # imports without the peer
    assert callable(adapter.cannot) and callable(adapter.call if peers.get_peer(name).kind == "gemm" else adapter.works)
    why = peers.missing(name, "cpu")
    assert why is not None and "\n" not in why
    assert why == ("runs on GPUs, and there is none here" if name in INSTALLED
                   else f"{peers.get_peer(name).package} is not installed")  # fmt: skip


def test_a_broken_package_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text("raise OSError('libcudart.so.99:\\ncannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert peers.missing("deepgemm", "cuda") == "deep_gemm does not import: OSError: libcudart.so.99: cannot open"


def test_names() -> None:
    assert peers.chosen("a2a", ("all",)) == peers.names("a2a") and peers.chosen("gemm", ()) == ()
    with pytest.raises(ConfigError, match="unknown peer 'torch'; known: nccl, flashinfer"):
        peers.chosen("a2a", ("torch",))
    with pytest.raises(ConfigError, match="unknown peer 'mpi'"):
        peers.get_peer("mpi")


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("flashinfer", a2a("deepseek_v41"), None),
        ("flashinfer", a2a("deepseek_v41", shape=replace(SHAPES["deepseek_v41"], top_k=7)), "not 7"),
        ("deepep", a2a("deepseek_v3"), None),
        ("deepep", a2a("deepseek_v3", ep_size=3), "not 3"),
        ("deepep-ll", a2a("deepseek_v41"), None),
        ("deepep-ll", a2a("kimi_k3"), "not 3584"),
        ("deepep-ll", a2a("deepseek_v3", tokens=257), "at most 256 tokens"),
        ("deepep-ll", a2a("deepseek_v3", shape=replace(SHAPES["deepseek_v3"], top_k=12)), "at most 11"),
        ("torch", GemmCase("m", "fc1", "fp8", 2, 128, 128, 1, 2), "BF16, not fp8"),
        ("deepgemm", GemmCase("m", "fc1", "mxfp4", 2, 128, 128, 1, 2), "not mxfp4"),
        ("deepgemm", GemmCase("m", "fc1", "fp8", 2, 192, 128, 1, 2), "192 × 128"),
        ("deepgemm", GemmCase("m", "fc1", "fp8", 2, 256, 128, 1, 2), None),
        ("megamoe", LayerCase(SHAPES["deepseek_v41"], 1, "megamoe", 8, Routing()), None),
        ("megamoe", LayerCase(SHAPES["kimi_k3"], 1, "megamoe", 8, Routing()), "not situ"),
        ("megamoe", LayerCase(SHAPES["deepseek_v3"], 1, "megamoe", 8, Routing()), "not fp8_128x128 × fp8"),
        ("vllm", LayerCase(SHAPES["kimi_linear"], 1, "vllm", 1, Routing()), None),
        ("vllm", LayerCase(SHAPES["kimi_linear"], 1, "vllm", 2, Routing()), "there are 2"),
        ("sglang", LayerCase(SHAPES["deepseek_v41"], 1, "sglang", 1, Routing()), "not mxfp4 × mxfp8"),
    ],
)
def test_what_a_peer_does_not_do(name: str, case: Any, words: str | None) -> None:
    why = peers.adapter(name).cannot(case)
    assert why is None if words is None else why is not None and words in why


def test_absent_peers_are_lines_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.json"
    quick = f"--device cpu --warmup 0 --steps 1 --repeats 1 --peer all --json {file}".split()
    assert main(["bench", "a2a", "--model", "kimi_linear", "--tokens", "1", "--ranks", "2", *quick]) == 0
    assert main(["bench", "layer", "--tokens", "1", "--ranks", "1", *quick]) == 0
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    absent = {line["parameters"]["protocol"]: line["absent"] for line in lines if "absent" in line}
    assert set(absent) == {*peers.names("a2a"), *peers.names("layer")} and len(lines) == len(absent) + 2
    out = capsys.readouterr().out
    assert "nccl: absent: runs on GPUs, and there is none here" in out and "collective: " in out
    assert main(["report", str(file)]) == 0
    report = capsys.readouterr().out
    assert "Peer flashinfer: absent: flashinfer is not installed." in report and "| loopback |" in report


def test_absent_peers_of_a_product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.json"
    argv = "bench gemm --model kimi_linear --ranks 128 --tokens 1 --stage fc2 --operands bf16 --repeats 1 --device cpu"
    assert main([*argv.split(), "--peer", "all", "--json", str(file)]) == 0
    (line,) = (json.loads(text) for text in file.read_text().splitlines())
    assert set(line["results"]["peers_absent"]) == {"torch", "deepgemm"} and line["results"]["peers_us"] == {}
    assert main(["report", str(file)]) == 0
    assert "Peer deepgemm: absent: deep_gemm is not installed." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nccl", "flashinfer", "deepep", "deepep-ll", "megamoe"])
def test_one_process_for_all_ranks_is_refused(name: str) -> None:
    kind = peers.get_peer(name).kind
    case: Any = a2a("deepseek_v3") if kind == "a2a" else LayerCase(SHAPES["deepseek_v41"], 1, name, 2, Routing())
    with pytest.raises(ConfigError, match="needs a process a rank"), peers.adapter(name).works(ONE, case):
        pass


# ---- what combine must give ----


def test_known_rows_by_hand() -> None:
    """Two ranks of two experts; a token that selects both experts of a rank gets its row once, or weighted twice."""
    shape = replace(SHAPES["deepseek_v3"], hidden_size=256, num_experts=4, top_k=2)
    known = KnownRows(LocalRank(0, CPU), a2a("deepseek_v3", shape=shape, tokens=3))
    known.ids = torch.tensor([[0, 1], [2, 0], [3, 2]], dtype=torch.int32)
    known.repeat = 1
    a, b = known.row(0).float(), known.row(1).float()
    assert torch.equal(known.sum_over_ranks(), torch.stack([a, a + b, b]))
    w = known.weights
    want = torch.stack([(w[0, 0] + w[0, 1]) * a, w[1, 0] * b + w[1, 1] * a, (w[2, 0] + w[2, 1]) * b])
    torch.testing.assert_close(known.weighted_sum(), want)
    known.compare(want.bfloat16(), want)
    for wrong in (want.roll(1, 0), want + want.abs().max() / 20, want * float("nan")):
        with pytest.raises(CommunicationError, match="of the largest value off"):
            known.compare(wrong.bfloat16(), want)
    known.repeat = 2
    assert not torch.equal(known.row(0).float(), a)


# ---- adapters, with stand-ins for the peers ----


class StandInBuffer:
    """``deep_ep.Buffer`` for one rank: everything stays, and combine adds what dispatch counted."""

    made: list[StandInBuffer]

    def __init__(self, group: Any, *sizes: int, **options: Any) -> None:
        self.sizes, self.options, self.calls = sizes, options, []
        type(self).made.append(self)

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, ranks: row_bytes * ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    def get_dispatch_layout(self, ids: torch.Tensor, experts: int) -> tuple[Any, ...]:
        return torch.tensor([len(ids)]), None, ids.flatten().bincount(minlength=experts), ids[:, :1] >= 0, None

    def dispatch(self, x: Any, **options: Any) -> tuple[Any, ...]:
        self.calls.append((x, options))
        return x, None, None, [], len(options["topk_idx"]), None

    def combine(self, partials: torch.Tensor, handle: int) -> tuple[Any, ...]:
        return partials[:handle].clone(), None, None

    def low_latency_dispatch(self, x: torch.Tensor, ids: torch.Tensor, *sizes: int, **options: Any) -> tuple[Any, ...]:
        self.calls.append((x, sizes, options))
        return None, None, "handle", None, None

    def low_latency_combine(
        self, partials: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: str, out: torch.Tensor
    ) -> None:
        out.copy_((weights[..., None] * partials[ids, 0].float()).sum(1))

    def destroy(self) -> None:
        self.calls.append("destroyed")


@pytest.fixture
def alone() -> Ranks:
    """One rank that passes for a process of a group."""
    return replace(ONE, group=object())  # type: ignore[arg-type]


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[StandInBuffer]:
    StandInBuffer.made = []
    module = types.SimpleNamespace(Buffer=StandInBuffer, topk_idx_t=torch.int64)
    monkeypatch.setitem(sys.modules, "deep_ep", module)  # type: ignore[arg-type]
    return StandInBuffer.made


@pytest.mark.parametrize("name", ["deepep", "deepep-ll"])
@pytest.mark.parametrize("activation", ["fp8", "bf16"])
def test_deepep(name: str, activation: str, alone: Ranks, buffers: list[StandInBuffer]) -> None:
    shape = replace(SHAPES["deepseek_v3"], hidden_size=2048, num_experts=8, top_k=2, activation_format=activation)
    case = a2a("deepseek_v3", shape=shape, ep_size=1, tokens=4)
    with peers.adapter(name).works(alone, case) as (work,):
        for repeat in range(2):
            work.refresh(repeat)
            work.step()
            work.check()
        work.refresh(2)  # other rows: what the last step left is not what combine must give
        with pytest.raises(CommunicationError):
            work.check()
    (buffer,) = buffers
    assert buffer.calls[-1] == "destroyed"
    if name == "deepep":
        x, options = buffer.calls[0]
        assert options["num_worst_tokens"] == 4 and options["topk_idx"].dtype == torch.int64
        if activation == "fp8":
            assert x[0].dtype == torch.float8_e4m3fn and x[1].shape == (4, 16) and x[1].dtype == torch.float32
        else:
            assert x.dtype == torch.bfloat16
    else:
        x, sizes, options = buffer.calls[0]
        assert x.dtype == torch.bfloat16 and sizes == (4, 8)
        assert options == {"use_fp8": activation == "fp8", "round_scale": False}
        assert buffer.options["low_latency_mode"] and buffer.options["num_qps_per_rank"] == 8


def test_flashinfer(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class StandIn:
        def __init__(self, mapping: Any, **options: Any) -> None:
            self.options, self.input = options, torch.zeros(1, 4, 256, dtype=torch.bfloat16)
            made.append(self)

        def dispatch(self, ids: torch.Tensor, payloads: list[torch.Tensor], tokens: int, **options: Any) -> None:
            self.payloads, self.sanitized = payloads, payloads[options["expert_id_payload_index"]]

        def get_combine_payload_tensor_in_workspace(self, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
            return self.input

        def combine(self, payload: torch.Tensor, tokens: int, *, payload_in_workspace: bool) -> torch.Tensor:
            return payload[0].clone()

    comm = types.SimpleNamespace(Mapping=lambda **options: options, MoeAlltoAll=StandIn)
    mnnvl = types.SimpleNamespace(MnnvlConfig=lambda **options: options, TorchDistBackend=lambda group: group)
    for name, module in (("flashinfer", comm), ("flashinfer.comm", comm), ("flashinfer.comm.mnnvl", mnnvl)):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    shape = replace(SHAPES["deepseek_v41"], hidden_size=256, num_experts=8, top_k=2)
    with peers.adapter("flashinfer").works(alone, a2a("deepseek_v41", shape=shape, ep_size=1, tokens=4)) as (work,):
        for repeat in range(3):
            work.refresh(repeat)
            work.step()
            work.check()
        made[0].input.zero_()
        work.step()
        with pytest.raises(CommunicationError):
            work.check()
    rows, scales, ids, weights = made[0].payloads
    assert rows.nbytes == 4 * 256 and scales.shape == (4, 8) and made[0].sanitized is ids and weights.shape == (4, 2)


@pytest.mark.parametrize("operands", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_deepgemm(operands: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of each expert are multiplied with its own weights: few in masked form, many padded to the alignment."""
    product: dict[str, Any] = {}

    def dequantized(x: Any, block: tuple[int, int]) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x.float()
        data, scale = x
        spread = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        return data.float() * spread[..., : data.shape[-2], : data.shape[-1]]

    def masked(a: Any, b: Any, out: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
        product["rows"], product["expected"] = counts.tolist(), expected
        out.copy_(torch.einsum("emk,enk->emn", dequantized(a, (1, 128)), dequantized(b, (128, 128))))

    def contiguous(a: Any, b: Any, out: torch.Tensor, layout: torch.Tensor) -> None:
        product["rows"] = [int((layout == e).sum()) for e in range(len(b[0] if isinstance(b, tuple) else b))]
        assert len(layout) % 128 == 0 and (layout.view(-1, 128)[:, 0] >= 0).all()
        out.copy_(torch.einsum("mk,mnk->mn", dequantized(a, (1, 128)), dequantized(b, (128, 128))[layout.long()]))

    kind = f"m_grouped_{operands}_gemm_nt_"
    module = types.SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 128)
    setattr(module, kind + "masked", masked)
    setattr(module, kind + "contiguous", contiguous)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)  # type: ignore[arg-type]
    case = GemmCase("m", "fc1", operands, 3, 128, 256, tokens, 2)
    problem = gemm.Problem(case, CPU, None)
    peers.adapter("deepgemm").call(case, problem.weights, problem.index)()
    assert product["rows"] == [tokens, tokens, 0] and product.get("expected", tokens) == tokens


def test_torch_product_is_that_of_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def grouped(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        seen.update(x=x, weights=weights, offs=offs)
        return x

    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    case = GemmCase("m", "fc2", "bf16", 3, 32, 64, 5, 2)
    problem = gemm.Problem(case, CPU, None)
    peers.adapter("torch").call(case, problem.weights, problem.index)()
    assert seen["x"].shape == (10, 64) and seen["weights"].shape == (3, 64, 32) and seen["offs"].tolist() == [5, 10, 10]
    assert torch.equal(seen["weights"][1].T, problem.weights.data[1, 0])


@pytest.mark.parametrize(
    ("name", "module"),
    [("vllm", "vllm.model_executor.layers.fused_moe"),
     ("sglang", "sglang.srt.layers.moe.fused_moe_triton.fused_moe")],
)  # fmt: skip
def test_fused_experts(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right implementation passes the check against fp64; one that leaves the weights out does not."""

    def experts(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros(x.shape)
        for t, row in enumerate(ids.tolist()):
            for j, e in enumerate(row):
                gate, up = (w1[e].float() @ x[t].float()).chunk(2)
                h = (torch.nn.functional.silu(gate) * up).bfloat16().float()
                out[t] += (weights[t, j] if weighted else 1.0) * (w2[e].float() @ h)
        return out.bfloat16()

    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    sys.modules[module].fused_experts = experts  # type: ignore[attr-defined]
    shape = replace(SHAPES["kimi_linear"], hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
    with peers.adapter(name).works(ONE, LayerCase(shape, 3, name, 1, Routing(0.0))) as (work,):
        for weighted in (True, False):
            work.refresh(1)
            work.step()
            if weighted:
                work.check()
            else:
                with pytest.raises(LayerError):
                    work.check()


def test_formats_of_the_shapes_are_known() -> None:
    for shape in SHAPES.values():
        assert get_format(LayerCase(shape, 1, "none", 8, Routing()).weight_format)
