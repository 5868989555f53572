"""The grouped GEMMs that `moe-layer compile` lists are those that layers ask the kernel cache for.

Layers run their stages on the meta device, as if here were a Hopper GPU: all of them but the launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_layer import kernel_cache
from moe_layer.backend import backend_of
from moe_layer.benchmarks.routers import ROUTERS
from moe_layer.benchmarks.shapes import SHAPES, get_shape
from moe_layer.comm import DispatchResult, ExpertPlacement
from moe_layer.gated_mlp import GatedMLP
from moe_layer.gemm import index_launch, low_bit_backend, reference, sm90_backend
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.tile_choice import choose_tile, telling_rows
from moe_layer.layer import MoELayer
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.models.synthetic_releases import RELEASES
from moe_layer.precompile import Family
from moe_layer.precompile_gemm import SHARED, Experts, experts_of, gemm_families
from moe_layer.quant import get_format
from moe_layer.shared_experts import SharedExperts
from moe_layer.wire import Wire

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")

Request = tuple[str, str, Any, str, str]  # launch function, spec, signature, architecture: what a cached kernel is of
META = torch.device("meta")
# Powers of two and thrice those: between any two limits of a tile there is one.
TOKENS = sorted({n << i for i in range(13) for n in (1, 3) if n << i <= 4096})
# What is not the release's own: other activations on the same weights.
OTHERS = ["deepseek_v41:nvfp4", "deepseek_v41:bf16", "kimi_k3:mxfp4", "deepseek_v3:bf16", "kimi_linear:mxfp8"]
RANKS = [("deepseek_v41", 1, 0), ("deepseek_v3", 2, 1), ("kimi_k3", 5, 0), ("kimi_k3", 5, 4), ("kimi_k2", 72, 71)]


class Hopper:
    """Stands in for the GPU: notes the kernels that are asked for, launches nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._requests: set[Request] = set()
        for module in (sm90_backend, index_launch):
            monkeypatch.setattr(module, "get_kernel", self._get_kernel)
        monkeypatch.setattr(sm90_backend, "grouped_kernel", sm90_backend.grouped_kernel.__wrapped__)  # keeps none
        monkeypatch.setattr(sm90_backend, "_multiprocessors", lambda device: 132)
        for backend in (sm90_backend, low_bit_backend):  # all of the checks but those of devices
            monkeypatch.setattr(backend, "check_operands", reference.check_operands)
        monkeypatch.setattr(index_launch, "build_index", self._build_index)
        monkeypatch.setattr(sm90_backend.Sm90Backend, "finalize", lambda *arguments: None)

    def _get_kernel(self, launch: Any, spec: Any, signature: str, arch: str) -> Any:
        self._requests.add((launch.__module__, launch.__name__, spec, signature, arch))
        return lambda anchor, *scalars: None

    def _build_index(self, ids: torch.Tensor, first: int, count: int, *, local_table: None) -> ExpertIndex:
        selections = ids.numel()
        index_launch.index_kernel(index_launch.choose(count, ids.shape[1], 0, selections), "sm_90a")
        offsets, slots = (torch.empty(n, dtype=torch.int32, device=META) for n in (count + 1, selections))
        return ExpertIndex(offsets, slots, torch.empty_like(ids))

    def asked(self, *functions: str) -> set[Request]:
        """For kernels of these launch functions, since the last call."""
        found = {request for request in self._requests if request[1] in functions}
        self._requests.clear()
        return found

    def compiled(self, work: Iterable[Family], *functions: str) -> set[Request]:
        """By `moe-layer compile`."""
        for family in work:
            family.build()
        return self.asked(*functions)

    def routed(self, model: str, ep_size: int, rank: int, tokens: int) -> set[Request]:
        """By a step of ``tokens`` tokens on each rank."""
        shape, local = get_shape(model), ExpertPlacement.contiguous(get_shape(model).num_experts, ep_size)
        weight_format = "fp8_128x128" if shape.weight_format == "fp8" else shape.weight_format
        fmt, backend = get_format(shape.activation_format), backend_of("sm_90a", weight_format, shape.activation_format)
        experts = local.local_experts(rank)
        layer: Any = SimpleNamespace(
            _format=fmt, _wire=Wire(fmt, in_kernel=False), backend=backend, activation=shape.activation,
            cfg=SimpleNamespace(n_routed_experts=shape.num_experts), local_experts=experts, first_expert=experts[0],
            routed_experts=GatedMLP(
                len(experts), shape.hidden_size, shape.intermediate_size, weight_format, META, backend
            ),
            local_table=None, input_global_scale=None, fc1_output_global_scale=None, partial_dtype=torch.bfloat16,
            comm=SimpleNamespace(get_combine_input_buffer=lambda dtype: None), profiler=None,
        )  # fmt: skip
        layer._stage = lambda name: MoELayer._stage(layer, name)
        slots = ep_size * tokens
        rows, scales = (
            None if one is None else torch.empty(slots, one.shape[1], dtype=one.dtype, device=META)
            for one in fmt.quantize_to_wire(torch.ones(1, shape.hidden_size).bfloat16())
        )
        assert rows is not None
        ids = torch.empty(slots, shape.top_k, dtype=torch.int32, device=META)
        MoELayer._compute(layer, DispatchResult(rows, ids, ids.float(), tokens, scales), shape.hidden_size)
        return self.asked("grouped_gemm")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    return Hopper(monkeypatch)


@pytest.mark.parametrize("model", [*SHAPES, *OTHERS])
def test_routed_experts_on_eight_ranks(model: str, hopper: Hopper) -> None:
    """Neither a kernel too few nor, but for the shared experts, one too many."""
    compiled = hopper.compiled(gemm_families([model], [8], ["sm_90a"]), "grouped_gemm")
    wanted: set[Request] = set()
    for tokens in TOKENS:
        step = hopper.routed(model, 8, 0, tokens)
        assert len(step) == 2 and step <= compiled, tokens
        wanted |= step
    assert wanted == {request for request in compiled if request[2].experts > 1}
    # Two stages of routed and of shared experts, four to six tiles each.
    assert 8 <= len(wanted) <= 12 and len(compiled) <= 24


@pytest.mark.parametrize(("model", "ep_size", "rank"), RANKS)
def test_routed_experts_of_any_rank(model: str, ep_size: int, rank: int, hopper: Hopper) -> None:
    compiled = hopper.compiled(gemm_families([model], [ep_size], ["sm_90a"]), "grouped_gemm")
    for tokens in (*TOKENS, 777):
        step = hopper.routed(model, ep_size, rank, tokens)
        assert len(step) == 2 and step <= compiled, tokens


@pytest.mark.parametrize("model", [*SHAPES, "deepseek_v3:bf16"])
def test_shared_experts(model: str, hopper: Hopper, caplog: pytest.LogCaptureFixture) -> None:
    functions = ("grouped_gemm", "build_index_kernels")
    compiled = hopper.compiled(gemm_families([model], [8], ["sm_90a"]), *functions)
    shape, (width, weight_format) = get_shape(model), SHARED[get_shape(model).name]
    hidden, backend = ROUTERS[shape.name].hidden, backend_of("sm_90a", weight_format, "bf16")
    shared = SharedExperts(hidden, width, shape.activation, weight_format, "bf16", backend, META)
    wanted: set[Request] = set()
    for tokens in TOKENS:
        shared(torch.empty(tokens, hidden, dtype=torch.bfloat16, device=META))
        step = hopper.asked(*functions)
        assert len(step) == 3 and step <= compiled, tokens
        wanted |= step
    assert {request for request in wanted if request[1] == "grouped_gemm"} == {
        request for request in compiled if request[1] == "grouped_gemm" and request[2].experts == 1
    }


@pytest.mark.parametrize("release", sorted(set(RELEASES) - {"deepseek_v3_fused"}))  # whose config says other formats
def test_experts_of_a_checkpoint(release: str, tmp_path: Path) -> None:
    """Against the layer that loads it; and the released shared experts of the models that have names."""
    number = write_checkpoint(tmp_path, release, values=False).moe_layers[-1]
    layer = MoELayer.from_pretrained(tmp_path, number, device="cpu")
    mlps: list[tuple[GatedMLP, str]] = [(layer.routed_experts, layer.activation_format)]
    if layer.shared_experts is not None:
        mlps.append((layer.shared_experts, layer.shared_experts.activation_format))
    found = experts_of(str(tmp_path), [1])
    assert [experts.rows for experts in found] == [4096 * layer.cfg.num_experts_per_tok, 4096][: len(mlps)]
    for experts, (mlp, activation_format) in zip(found, mlps, strict=True):
        weights = mlp.gate_up.weights()
        shape = (weights.num_local_experts, weights.columns, weights.rows)
        assert (experts.count, experts.hidden_size, experts.intermediate_size) == shape
        assert (experts.weight_format, experts.activation_format) == (weights.format, activation_format)
        # The very text: it is part of a kernel's key.
        assert repr(experts.activation) == repr(layer.activation)
    if release in SHARED:
        assert SHARED[release][1] == found[1].weight_format
        assert repr(get_shape(release).activation) == repr(layer.activation)
    with_format = experts_of(f"{tmp_path}:bf16", [1])
    assert [experts.activation_format for experts in with_format] == ["bf16"] * len(mlps)


def test_shared_experts_of_every_named_model() -> None:
    assert SHARED.keys() == SHAPES.keys()
    for name, (width, _) in SHARED.items():
        assert width == SHAPES[name].intermediate_size * (2 if name == "kimi_k3" else 1)


@pytest.mark.parametrize("experts", [1, 7, 48])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "mxfp4", "int4"])
def test_telling_rows(dtype: str, experts: int) -> None:
    for most in (1, 2, 3, 9, 10, 11, 24 * experts, 24 * experts + 1, 65 * experts, 300 * experts):
        told = telling_rows("sm_90a", most, experts)
        assert len(told) < 10 and max(told) == most
        every = {choose_tile("sm_90a", dtype, rows, experts) for rows in range(most + 1)}
        assert {choose_tile("sm_90a", dtype, rows, experts) for rows in told} == every


def test_several_models_and_ranks_share_kernels() -> None:
    work = gemm_families(["deepseek_v3", "kimi_k2", "deepseek_v3:fp8"], [4, 8, 8], ["sm_90a"])
    names = [family.name for family in work]
    # Routed: V3's 64 and 32 experts, K2's 96 and 48; shared ones alike; one more for indexing.
    assert len(names) == len(set(names)) == 2 * 4 + 2 + 1


def test_nothing_without_kernels() -> None:
    """Other GPUs; formats that run through PyTorch; rows that are no whole vectors."""
    assert gemm_families(["deepseek_v41", "deepseek_v3"], [8], ["sm_100a", "sm_103a"]) == []
    swiglu = Activation()
    assert Experts(4, 256, 128, "mxfp4", "fp8", swiglu, 99).specs("sm_90a") == []
    for weights, activations, vector in (("mxfp4", "mxfp8", 8), ("fp8_128x128", "fp8", 16), ("bf16", "bf16", 8)):
        for hidden, inter in ((256, 4), (4, 256)):
            assert (
                Experts(4, hidden * vector // 8, inter * vector // 8, weights, activations, swiglu, 99).specs("sm_90a")
                == []
            )
        assert len(Experts(4, 256, vector, weights, activations, swiglu, 1).specs("sm_90a")) == 2


def test_a_compiled_kernel_is_found_by_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through files, as another process finds it, and without the compiler."""
    monkeypatch.setenv("MOE_LAYER_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "_memory", {})
    monkeypatch.setattr(sm90_backend, "grouped_kernel", sm90_backend.grouped_kernel.__wrapped__)
    experts = Experts(2, 128, 64, "bf16", "bf16", Activation(), 1)
    down = experts.specs("sm_90a")[1]
    sm90_backend.grouped_kernel(down)
    assert [path.name for path in tmp_path.iterdir()] == kernel_cache.stored_files()[-1:]
    monkeypatch.setattr(kernel_cache, "_memory", {})
    monkeypatch.setattr(kernel_cache, "_compile", None)
    mlp = GatedMLP(2, 128, 64, "bf16", META, backend_of("sm_90a", "bf16", "bf16"))
    found = sm90_backend.grouped_kernel(sm90_backend.fc2_spec(mlp.down.weights(), 1))
    with pytest.raises(ValueError, match="grouped_gemm"):  # it names itself and refuses a tensor of the CPU
        found(torch.zeros(1, dtype=torch.uint8), *range(13))
