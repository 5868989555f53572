"""The command `moe-layer`: help that teaches, errors in a line, JSON for programs, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_layer import MoEConfig, MoELayer, cli, doctor
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.comm import ExpertPlacement
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.oracle import OracleLayer, relative_l2
from moe_layer.quant import get_format

COMMANDS = ("demo", "run", "inspect", "doctor")


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail by a user's mistake; its one line on stderr."""
    try:
        code = cli.main(argv)
    except SystemExit as stop:  # argparse
        code = stop.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


def json_of(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert cli.main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("v3"), "deepseek_v3", hidden=256, inter=128, shards=2).path


# ---- help and usage ----


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and f"moe-layer {command}" in text.split("examples:")[1]
    assert "--json" in text and max(map(len, text.splitlines())) <= 130


def test_the_examples_of_the_help_parse(capsys: pytest.CaptureFixture[str]) -> None:
    parser, seen = cli.build_parser(), 0
    for examples in (cli.DEMO_EXAMPLES, cli.RUN_EXAMPLES, cli.INSPECT_EXAMPLES, cli.DOCTOR_EXAMPLES):
        for line in examples.splitlines():
            if line.startswith("  ") and "moe-layer " in line:
                command = line.split("moe-layer ", 1)[1].split("   ")[0].split("|")[0]
                assert parser.parse_args(command.split()).handler
                seen += 1
    assert seen >= 12


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS) and "start here" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train"], "invalid choice: 'train'"),
        (["run", "x"], "required: --layer"),
        (["run", "x", "--layer", "3"], "one of the arguments --input --random is required"),
        (["run", "x", "--layer", "three", "--random", "1"], "invalid int value: 'three'"),
        (["doctor", "--ep", "0"], "must be at least 1, got 0"),
        (["doctor", "--activation-format", "fp6"], "invalid choice: 'fp6'"),
    ],
)
def test_usage_errors(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(argv, capsys)
    assert words in error and "--help" in error


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(doctor, "diagnose", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(["doctor"])


def installed(*argv: str, cwd: Path, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    script = Path(sys.executable).with_name("moe-layer")
    return subprocess.run([str(script), *argv], cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


def test_installed_command(tmp_path: Path) -> None:
    assert installed("--version", cwd=tmp_path).stdout.startswith("moe-layer 0.")
    result = installed("inspect", "nowhere", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"{Path(sys.executable).with_name('moe-layer')} doctor --json | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.stdout == "0\n" and result.stderr == ""


# ---- doctor ----


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = json_of(["doctor"], capsys)
    assert report["versions"]["torch"] == torch.__version__
    assert len(report["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert len(report["peer_access"]) == len(report["gpus"])
    transports = {t["name"].split(" (")[0]: t for t in report["transports"]}
    assert transports["loopback"]["available"] and transports["collective over gloo"]["available"]
    for line in report["transports"] + report["backends"]:
        assert line["available"] == (line["reason"] == "") == (line["instead"] == "")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("This machine", "Transports", "Compute", "workspace", "reference"):
        assert word in text


def test_doctor_sizes_the_papers_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    """Paper §3.2: V4.1-Flash, eight ranks, 4096 tokens: 160 MiB, 320 MiB and a few MiB; Table 3: 5328 / 10240 bytes."""
    w = json_of(["doctor"], capsys)["workspace"]
    mib = {region: size / 2**20 for region, size in w["region_bytes"].items()}
    assert mib["dispatch: hidden states"] == 160 and mib["combine: partial results"] == 320
    one_sided = mib.pop(doctor.ONE_SIDED_REGION)
    assert 0 < sum(mib.values()) - 480 < 10 and one_sided > 0
    assert w["total_bytes"] == sum(w["region_bytes"].values())
    dispatch = sum(row for region, row in w["row_bytes"].items() if region.startswith("dispatch"))
    assert (dispatch, w["row_bytes"]["combine: partial results"]) == (5328, 10240)


@pytest.mark.parametrize(
    ("model", "activation", "dispatch", "combine"),
    [
        ("kimi_k3", "mxfp8", 3824, 7168),
        ("kimi_k3", "bf16", 7296, 7168),
        ("deepseek_v41", "bf16", 10288, 10240),
        # Ours: each row brings its own global scale, in one more vector of 16 bytes beside its block scales.
        ("deepseek_v41", "nvfp4", 2928 + 16, 10240),
        ("deepseek_v41", "fp8", 5328, 10240),
    ],
)
def test_payload_bytes_are_those_of_the_paper(model: str, activation: str, dispatch: int, combine: int) -> None:
    """Table A.5, bytes per token and target rank."""
    rows = doctor.workspace(model, ep_size=8, max_tokens_per_rank=1, activation_format=activation)["row_bytes"]
    assert rows.pop("combine: partial results") == combine
    assert sum(rows.values()) == dispatch


def test_doctor_reads_a_checkpoint(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = json_of(["doctor", "--model", str(v3), "--ep", "3", "--tokens", "5"], capsys)["workspace"]
    assert (w["hidden_size"], w["top_k"], w["activation_format"]) == (256, 2, "fp8")
    assert w["region_bytes"]["dispatch: hidden states"] == 3 * 5 * 256
    assert w["region_bytes"]["dispatch: scales"] == 3 * 5 * 16  # two fp32, rows 16-byte aligned
    assert w["region_bytes"]["dispatch: expert ids"] == 3 * 5 * 8


def gpu(index: int, arch: str = "sm_90a") -> dict[str, Any]:
    return {"index": index, "name": "a GPU", "arch": arch, "memory_bytes": 141 << 30}


@pytest.mark.parametrize(
    ("gpus", "peers", "dsl", "reason"),
    [
        ([gpu(0), gpu(1)], True, True, ""),
        ([gpu(0), gpu(1)], False, True, "GPU 0 cannot access the memory of GPU 1"),
        ([gpu(0), gpu(1)], True, False, "the CuTe DSL is not installed"),
        ([gpu(0)], True, True, "one GPU here, a group needs one a rank"),
        ([gpu(0), gpu(1, "sm_80")], True, True, "no kernels for a GPU (sm_80), only for sm_90a, sm_100a, sm_103a"),
    ],
)
def test_doctor_says_why_one_sided_does_not_run(
    gpus: list[dict[str, Any]],
    peers: bool,
    dsl: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "_peer_access", lambda n: [[i == j or peers for j in range(n)] for i in range(n)])
    monkeypatch.setattr(doctor, "dsl_available", lambda: dsl)
    report = json_of(["doctor"], capsys)
    lines = [t for t in report["transports"] if t["name"].startswith(("fence", "sentinel"))]
    assert len(lines) == 2
    for line in lines:
        assert line["reason"].startswith(reason) and line["available"] == (reason == "")
        assert line["instead"] == ("collective" if reason else "")
    assert cli.main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("runs the PyTorch reference" in out) == any(g["arch"] == "sm_80" for g in gpus)
    assert ("Peer access" in out) == (len(gpus) > 1)


def test_doctor_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(["doctor", "--model", "llama"], capsys)
    assert "unknown model 'llama'" in error and "deepseek_v41" in error


# ---- inspect ----


def test_inspect(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json_of(["inspect", str(v3), "--ep", "4"], capsys)
    assert report["ok"] and len(report["ranks"]) == 4
    assert cli.main(["inspect", str(v3)]) == 0
    assert "fp8_128x128" in capsys.readouterr().out


def test_inspect_finds_a_missing_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path, "deepseek_v3", hidden=256, inter=128).path
    tensors = load_file(path / "model.safetensors")
    gone = "model.layers.3.mlp.experts.2.up_proj.weight_scale_inv"
    del tensors[gone]
    save_file(tensors, path / "model.safetensors")
    report = json_of(["inspect", str(path)], capsys, code=1)
    assert not report["ok"] and any(gone in line for line in report["missing"] + report["problems"])


def test_inspect_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json" in error_of(["inspect", str(tmp_path)], capsys)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "unknown model_type 'llama'" in error_of(["inspect", str(tmp_path)], capsys)


# ---- run ----

RELEASES_WITH_SEPARATE_EXPERTS = (
    "deepseek_v2", "deepseek_v3", "deepseek_v3_modelopt", "deepseek_v3_nvfp4", "deepseek_v4", "deepseek_v4_base",
    "deepseek_v41", "kimi_k2_thinking", "kimi_linear", "kimi_k3", "qwen3_moe", "mixtral",
)  # fmt: skip


@pytest.mark.parametrize("release", RELEASES_WITH_SEPARATE_EXPERTS)
def test_run_is_within_the_limit_of_the_oracle(
    release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer and oracle share no code but the config: two readings of every release layout that must agree."""
    checkpoint = write_checkpoint(tmp_path, release, hidden=256, inter=128, seed=11, shards=2, values=False)
    layer = checkpoint.moe_layers[0]  # the hash-routed one where there are such
    report = json_of(
        ["run", str(checkpoint.path), "--layer", str(layer), "--random", "17", "--check", "--repeat", "1"], capsys
    )
    assert report["ok"] and report["relative_l2_error"] < report["error_limit"] == 5.7e-3
    assert report["tokens"] == 17 and set(report["stage_seconds"]) >= {"route", "dispatch", "fc1", "fc2", "combine"}


def test_run_with_files(v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save_file({"hidden_states": x}, source)
    argv = ["run", str(v3), "--layer", "3", "--input", str(source), "--output", str(target), "--device", "cpu"]
    assert cli.main(argv) == 0
    assert "deepseek_v3 layer 3" in capsys.readouterr().out
    expected = MoELayer.from_pretrained(v3, layer=3, device="cpu")(x)
    written = load_file(target)
    assert torch.equal(written["hidden_states"], expected)
    ids, weights = OracleLayer(v3, 3).route(x.double())
    assert written["topk_ids"].tolist() == ids
    torch.testing.assert_close(written["topk_weights"], torch.tensor(weights))
    routing = Routing.parse(f"trace:{target}")  # what the benchmarks can follow
    experts = MoEConfig.from_pretrained(v3).n_routed_experts
    assert routing.ids(9, 2, ExpertPlacement.contiguous(experts, 2), 0).tolist() == ids


def test_run_quantizes_at_the_target(v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same result file; an FP32 input travels in BF16 and is checked as such."""
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(6))
    files = {at: tmp_path / f"{at}.safetensors" for at in ("source", "target")}
    save_file({"hidden_states": x}, tmp_path / "x.safetensors")
    for at, file in files.items():
        argv = ["run", str(v3), "--layer", "3", "--output", str(file), "--device", "cpu", "--repeat", "1"]
        if at == "target":
            argv += ["--quantize-at", at, "--check"]
            assert cli.main([*argv, "--input", str(tmp_path / "x.safetensors")]) == 0
            assert "quantized at the target" in capsys.readouterr().out
        save_file({"hidden_states": x.bfloat16()}, tmp_path / "rounded.safetensors")
        report = json_of([*argv, "--input", str(tmp_path / "rounded.safetensors")], capsys)
        assert report["quantize_at"] == at and report["activation_format"] == "fp8"
    assert files["source"].read_bytes() == files["target"].read_bytes()


def test_run_reports_a_wrong_result(
    v3: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check can fail: one rounding rule changed (up and gate swapped) gives exit code 1."""
    from moe_layer.gemm.activation import Activation

    right = Activation.__call__
    monkeypatch.setattr(Activation, "__call__", lambda self, gate, up: right(self, up, gate))
    argv = ["run", str(v3), "--layer", "3", "--random", "8", "--check", "--repeat", "1", "--device", "cpu"]
    assert cli.main(argv) == 1
    assert "BEYOND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"hidden_states": torch.zeros(3, 128)}, "hidden_states is [3, 128], expected [T, 256]"),
        ({"x": torch.zeros(3, 256)}, "holds no hidden_states; it has x"),
        ({"hidden_states": torch.zeros(3, 256, dtype=torch.int32)}, "int32"),
    ],
)
def test_run_input_errors(
    tensors: dict[str, torch.Tensor], words: str, v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.safetensors"
    save_file(tensors, file)
    assert words in error_of(["run", str(v3), "--layer", "3", "--input", str(file)], capsys)


def test_run_errors(v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", str(v3), "--random", "2", "--layer"]
    assert "layer 0" in error_of([*run, "0"], capsys)  # dense
    assert "no such file" in error_of(["run", str(v3), "--layer", "3", "--input", "gone.safetensors"], capsys)
    damaged = tmp_path / "x.safetensors"
    damaged.write_bytes(b"\x00" * 7)
    assert "truncated or damaged" in error_of(["run", str(v3), "--layer", "3", "--input", str(damaged)], capsys)
    assert "unknown protocol 'pigeon'" in error_of([*run, "3", "--protocol", "pigeon"], capsys)
    if not torch.cuda.is_available():
        assert "device='cpu'" in error_of([*run, "3", "--device", "cuda"], capsys)


def test_run_under_torchrun(v3: Path, tmp_path: Path) -> None:
    """Three ranks, seven tokens: 2, 2 and 3; the output is whole and in order, as the oracle has it for three ranks."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(6)).bfloat16()
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save_file({"hidden_states": x}, source)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "-m",
        "moe_layer.cli",
    ]
    command += ["run", str(v3), "--layer", "3", "--input", str(source), "--output", str(target), "--check", "--json"]
    command += ["--repeat", "1", "--device", "cpu"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ranks"] == 3 and report["tokens"] == 7 and report["ok"]
    placement = ExpertPlacement.contiguous(8, 3)
    ranks = [placement.local_experts(r) for r in range(3)]
    expected = OracleLayer(v3, 3).forward(x, "fp8", ranks=ranks)
    assert relative_l2(load_file(target)["hidden_states"], expected) < 4e-3


def test_formats_of_the_options_exist() -> None:
    for name in cli.ACTIVATION_FORMATS:
        assert get_format(name).name == name
    for shape in SHAPES.values():
        assert shape.activation_format in cli.ACTIVATION_FORMATS
