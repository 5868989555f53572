"""`moe-layer compile`: exactly the kernels that layers ask for, found again afterwards, and errors in words."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_layer import cli, kernel_cache, precompile, precompile_gemm
from moe_layer.benchmarks.shapes import get_shape
from moe_layer.errors import ConfigError
from moe_layer.quant import get_format


@pytest.mark.parametrize("fp8_combine", [False, True])
@pytest.mark.parametrize("model", ["deepseek_v41", "deepseek_v3:bf16"])
def test_families_are_what_a_layer_compiles(model: str, fp8_combine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernels that a communicator asks for at its first dispatch, whose own code says which."""
    pytest.importorskip("cutlass")
    from moe_layer.comm import launch, launchers
    from moe_layer.comm.layout import align

    asked: set[tuple[str, Any, str]] = set()

    def get_kernel(launched: Any, spec: Any, signature: str, arch: str) -> Any:
        asked.add((launched.__name__, spec, arch))
        return lambda *arguments: None

    monkeypatch.setattr(launch, "get_kernel", get_kernel)
    monkeypatch.setattr(launchers, "load_kernels", lambda *arguments: None)
    shape = get_shape(model)
    row = (align(shape.data_bytes), align(shape.scale_bytes))
    capacity = SimpleNamespace(
        hidden_bytes=row[0], scale_bytes=row[1], top_k=shape.top_k, sentinel_tokens_per_rank=64,
        combine_bytes=shape.combine_bytes,
    )  # fmt: skip
    channel = SimpleNamespace(
        layout=SimpleNamespace(capacity=capacity), memory=object(), arch="sm_90a", protocol="auto", device=None,
        fp8_combine=fp8_combine,
    )  # fmt: skip
    comm: Any = SimpleNamespace(
        channel=channel, ep_size=4, ep_rank=0, placement=SimpleNamespace(num_experts=shape.num_experts),
        _contiguous=True, hidden_size=shape.hidden_size,
    )  # fmt: skip
    for encoder in {None, get_format(shape.activation_format).kernel_encoder()}:
        launchers.DispatchLauncher(comm, (*row, shape.top_k, True, 4, encoder))
    wanted, asked = asked, set()

    for family in precompile.families([shape], [4], ["sm_90a"], ["int32"], fp8_combine=fp8_combine):
        family.build()
    assert asked == wanted and len(wanted) > 10


def test_each_family_once() -> None:
    pytest.importorskip("cutlass")
    shapes = [get_shape(name) for name in ("deepseek_v3", "deepseek_v3", "kimi_k2")]  # the same rows, other experts
    work = precompile.families(shapes, [2, 4], ["sm_90a", "sm_100a"], ["int32", "int64"], fp8_combine=False)
    names = [(family.arch, family.name) for family in work]
    # Dispatches: two numbers of experts, two kinds of ids, rows given or quantized inside.
    assert len(names) == len(set(names)) == 2 * 2 * (2 * 2 * 2 + 4 + 2)


def test_stage_families_are_what_the_stages_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernels that the stages choose for steps of any size, on every rank of five."""
    pytest.importorskip("cutlass")
    from moe_layer.gemm import finalize_launch, index_launch

    asked: set[tuple[Any, str]] = set()

    def get_kernel(launched: Any, spec: Any, signature: str, arch: str) -> Any:
        asked.add((spec, arch))
        return lambda *arguments: None

    monkeypatch.setattr(index_launch, "get_kernel", get_kernel)
    monkeypatch.setattr(finalize_launch, "get_kernel", get_kernel)
    shape = get_shape("kimi_k3")  # 896 experts: 180 on the first rank, 179 on the others
    work = precompile.stage_families([shape, shape], [5], ["sm_90a"])
    assert len(work) == len({family.name for family in work}) == 4
    for family in work:
        family.build()
    wanted: set[Any] = set()
    for selections in (1, 2000, 20_000, 10**6):
        wanted |= {index_launch.choose(experts, shape.top_k, 0, selections) for experts in (179, 180)}
    for output_bytes in (2, 4):
        kinds = finalize_launch.variants(shape.hidden_size, shape.top_k, 2, output_bytes, True)
        wanted |= {finalize_launch.choose(kinds, slots, 132) for slots in (1, 4096)}
    assert asked == {(spec, "sm_90a") for spec in wanted} and len(wanted) == 12


def test_quantizer_families_are_what_steps_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernels that quantizing and dequantizing choose for few and for many rows, as if here were a GPU."""
    pytest.importorskip("cutlass")
    import torch

    from moe_layer.quant import launch

    asked: set[Any] = set()
    wanted: set[Any] = set()

    def get_kernel(launched: Any, spec: Any, signature: str, arch: str) -> Any:
        asked.add((spec, arch))
        return lambda *arguments: None

    def launcher(spec: Any, device: Any) -> Any:
        wanted.add((spec, "sm_90a"))
        return lambda *arguments: None

    monkeypatch.setattr(launch, "get_kernel", get_kernel)
    monkeypatch.setattr(launch, "_launcher", launcher)
    monkeypatch.setattr(launch, "_arch", lambda device: "sm_90a")
    shape = get_shape("kimi_k3:nvfp4")
    work = precompile.quantizer_families([shape, shape], ["sm_90a"])
    assert len(work) == len({family.name for family in work})
    for family in work:
        family.build()
    try:
        for rows in (1, 4096):
            h = torch.empty(rows, shape.intermediate_size)
            for x in (torch.empty(rows, shape.hidden_size, dtype=torch.bfloat16), h):
                q = launch.quantize_by_kernel(get_format("nvfp4"), x, None)
                assert q is not None
                launch.dequantize_by_kernel(get_format("nvfp4"), q, torch.bfloat16)
                weight = get_format(shape.weight_format).quantize_reference(x.zero_())
                launch.dequantize_by_kernel(get_format(shape.weight_format), weight, torch.bfloat16)
    finally:
        launch._encode_kinds.cache_clear()
        launch._decode_kinds.cache_clear()
    assert asked == wanted and len(wanted) == 2 + 2 * 2 * 2


def test_router_families_are_what_a_router_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the kernels that a router asks for in steps of any size, with and without image tokens."""
    import torch

    from moe_layer.benchmarks import routers, shapes
    from moe_layer.gemm import router_launch

    pytest.importorskip("cutlass")
    asked: set[Any] = set()

    def get_kernel(launched: Any, spec: Any, signature: str, arch: str) -> Any:
        assert arch == "sm_90a"
        asked.add(spec)
        return lambda *arguments: None

    monkeypatch.setattr(router_launch, "get_kernel", get_kernel)
    work = precompile.router_families(["deepseek_v41", "deepseek_v41:bf16"], ["sm_90a", "sm_100a"])
    assert len(work) == 1 and precompile.router_families(["deepseek_v41"], ["sm_100a"]) == []
    work[0].build()
    wanted, asked = asked, set()
    model, images = routers.get_router("deepseek_v41")
    assert images
    kernels = router_launch.RouterKernels(model, torch.randn(384, 5120).bfloat16().float())
    bias = torch.zeros(384)
    for tokens in (1, 9, 20, 100, 200, 300):
        x = torch.zeros(tokens, 5120, dtype=torch.bfloat16)
        kernels(x, bias)
        kernels(x, bias, bias, torch.zeros(tokens, dtype=torch.bool))
    assert asked == wanted and len(wanted) == 5 + 2 * 2
    assert routers.ROUTERS.keys() == shapes.SHAPES.keys()
    for name, shape in shapes.SHAPES.items():
        assert (routers.ROUTERS[name].experts, routers.ROUTERS[name].top_k) == (shape.num_experts, shape.top_k)


@pytest.mark.parametrize("workers", [None, 2])
def test_what_was_compiled_is_found_again(workers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this process, and by others that live as long as the work."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("MOE_LAYER_CACHE", str(tmp_path / "cache"))
    work = precompile.families([get_shape("kimi_linear")], [2], ["sm_90a"], ["int32"], fp8_combine=False)
    small = [family for family in work if family.name.startswith("giving up")]
    monkeypatch.setattr(kernel_cache, "_memory", {})
    first = precompile.run(small, progress=False, workers=workers)
    files = {path.name: path.stat().st_size for path in (tmp_path / "cache").iterdir()}
    assert first["compiled"] == len(files) == 2 and first["compiled_bytes"] == sum(files.values()) > 0
    assert sorted(name for entry in first["families"] for name in entry["compiled"]) == sorted(files)
    assert [entry["family"] for entry in first["families"]] == [family.name for family in small]
    assert [entry["bytes"] for entry in first["families"]] == [files[e["compiled"][0]] for e in first["families"]]
    assert (len(kernel_cache._memory) == 0) == (workers == 2)
    monkeypatch.setattr(kernel_cache, "_memory", {})  # as another process
    again = precompile.run(small, progress=False)
    assert again["compiled"] == 0 and again["cache_files"] == 2 and again["folder"] == str(tmp_path / "cache")


def test_other_processes_can_build_every_family() -> None:
    pytest.importorskip("cutlass")
    names, archs = ["deepseek_v41", "kimi_k3:nvfp4", "deepseek_v3"], ["sm_90a", "sm_100a"]
    shapes = [get_shape(name) for name in names]
    work = precompile.families(shapes, [8], archs, ["int32"], fp8_combine=True)
    work += precompile.stage_families(shapes, [8], archs) + precompile.quantizer_families(shapes, archs)
    work += precompile.router_families(names, archs) + precompile_gemm.gemm_families(names, [8], archs)
    for family in work:
        sent, got = family.build, pickle.loads(pickle.dumps(family)).build
        assert isinstance(sent, partial) and isinstance(got, partial)
        assert (got.func, got.args) == (sent.func, sent.args)


def test_errors_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "dsl_available", lambda: True)
    monkeypatch.setenv("MOE_LAYER_CACHE", str(tmp_path))
    work = [precompile.Family("sm_90a", "it", partial(get_shape, f"model {i}")) for i in range(2)]
    with pytest.raises(ConfigError, match=r"unknown model 'model [01]'"):
        precompile.run(work, progress=False, workers=2)


def test_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command's output, with a compiler that leaves a file a kernel."""
    monkeypatch.setenv("MOE_LAYER_CACHE", str(tmp_path))
    monkeypatch.setattr(precompile, "dsl_available", lambda: True)

    def families(*arguments: Any, **options: Any) -> list[precompile.Family]:
        assert [shape.label for shape in arguments[0]] == ["kimi_k3:mxfp8"] and arguments[1] == (2, 4)
        return [precompile.Family("sm_90a", f"family {i}", partial(build, f"{i}.o")) for i in range(2)]

    def build(name: str) -> None:
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(b"x" * 2048)
            kernel_cache._stored.append(name)

    monkeypatch.setattr(precompile, "families", families)
    monkeypatch.setattr(precompile, "stage_families", lambda *arguments: [])
    monkeypatch.setattr(precompile, "router_families", lambda *arguments: [])
    monkeypatch.setattr(precompile, "quantizer_families", lambda *arguments: [])
    asked: list[Any] = []
    monkeypatch.setattr(precompile_gemm, "gemm_families", lambda *arguments: asked.append(arguments) or [])
    monkeypatch.setattr(kernel_cache, "_stored", [])
    argv = ["compile", "kimi_k3", "--ranks", "2,4", "--arch", "sm_90a"]
    assert cli.main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["compiled"], report["compiled_bytes"], report["cache_files"]) == (2, 4096, 2)
    assert asked == [(["kimi_k3"], (2, 4), ["sm_90a"])]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "family 0" in out and "there" in out and "0 kernels compiled" in out and str(tmp_path) in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("gpt", "unknown model 'gpt'"),
        ("kimi_k3 --arch sm_80", "no kernels for architecture 'sm_80'; there are kernels for sm_90a, sm_100a, sm_103a"),
        ("kimi_k3 --ids int16", "unknown id dtype 'int16'; known: int32, int64"),
        ("kimi_k3 --ranks 0", "must be at least 1, got 0"),
        ("", "required: MODEL"),
    ],
)
def test_errors(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["compile", *argv.split()])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_a_cache_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(precompile, "dsl_available", lambda: True)
    monkeypatch.setenv("MOE_LAYER_CACHE", "off")
    with pytest.raises(ConfigError, match="MOE_LAYER_CACHE=off turns the kernel cache off"):
        list(precompile.compile_families([]))
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("MOE_LAYER_CACHE", str(blocker / "cache"))
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        list(precompile.compile_families([]))


def test_architectures_default_to_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert precompile.architectures(()) == ["sm_90a", "sm_100a", "sm_103a"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    assert precompile.architectures(()) == ["sm_100a"]
    assert precompile.architectures(("sm_90a", "sm_90a")) == ["sm_90a"]
