"""The router's kernels on the CPU: machine code, the split of FP32 weights, how sums are divided, when they serve."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sass import Machine, tool_folder

from moe_layer.config import MoEConfig
from moe_layer.errors import TensorError
from moe_layer.gemm import router_launch
from moe_layer.gemm.router_launch import CHOICE_SIGNATURE, LOGITS_SIGNATURE, split_weight
from moe_layer.gemm.router_spec import (
    SHARED_MEMORY,
    RouterModel,
    choice_spec,
    choose_logits,
    logits_specs,
    segments,
)
from moe_layer.router import Router, router_model

MODELS = {
    "V4.1": RouterModel(384, 5120, 6, 1, 1, "top2_sum", "sqrtsoftplus", True, 1.5, True),
    "K3": RouterModel(896, 7168, 16, 1, 1, "top2_sum", "sigmoid", True, 1.0, True),
    "V3": RouterModel(256, 7168, 8, 8, 4, "top2_sum", "sigmoid", True, 2.5, True),
    "V2": RouterModel(160, 5120, 6, 8, 3, "max", "softmax", False, 16.0, False),
    "largest": RouterModel(1024, 264, 32, 1, 1, "top2_sum", "softmax", True, 1.0, True),
    "odd": RouterModel(62, 200, 5, 1, 1, "top2_sum", "sigmoid", True, 1.0, True),
}
needs_tools = pytest.mark.skipif(tool_folder() is None, reason="needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")


def machine_of(launch: Any, spec: Any, signature: str, arch: str, folder: Path) -> Machine:
    from moe_layer.kernel_cache import compile_artifacts

    machine = Machine(compile_artifacts(launch, spec, signature, arch).artifacts.CUBIN, folder)
    assert machine.stack == machine.local == 0 and not machine.all(r"(LDL|STL)(\..*)?")
    assert machine.all("ACQBULK") and machine.all("PREEXIT"), "programmatic dependent launch"
    return machine


@needs_tools
@pytest.mark.parametrize(
    ("name", "terms", "tokens"),
    [("V4.1", 1, 8), ("V4.1", 1, 0), ("K3", 1, 16), ("K3", 1, 128), ("V3", 3, 64), ("V3", 3, 0), ("odd", 2, 8)],
)
def test_logits_machine_code(name: str, terms: int, tokens: int, tmp_path: Path) -> None:
    """Hopper alone has WGMMA; 0 is the kernel for many tokens."""
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
    from moe_layer.gemm.router_logits import router_logits

    spec = logits_specs(MODELS[name], terms)[tokens]
    machine = machine_of(router_logits, spec, LOGITS_SIGNATURE, "sm_90a", tmp_path)
    products = machine.all(rf"HGMMA\.64x{spec.tokens}x16\.F32\.BF16")
    assert products and len(products) % (4 * terms) == 0 and len(products) == len(machine.all(r"HGMMA\..*"))
    assert bool(machine.all(r"UTMALDG\.\dD\.MULTICAST")) == (spec.cluster > 1)
    # The first loads of weights come before the wait for the kernel ahead.
    assert machine.all(r"UTMALDG\..*")[0] < machine.all("ACQBULK")[0]


@needs_tools
@pytest.mark.parametrize("tokens", [8, 0])
@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, "sm_90a") for name in MODELS] + [(n, arch) for n in ("V3", "largest") for arch in ("sm_100a", "sm_103a")],
)
def test_choice_machine_code(name: str, tokens: int, arch: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
    from moe_layer.gemm.router_choice import router_choice

    spec = choice_spec(MODELS[name], logits_specs(MODELS[name], 1)[tokens], image_biased=name == "V4.1")
    machine = machine_of(router_choice, spec, CHOICE_SIGNATURE, arch, tmp_path)
    assert machine.all(r"C?REDUX(\..*)?") and machine.all(r"LDG\.E\.128(\..*)?")
    assert bool(machine.all(r"BAR\..*")) == (spec.warps > 1)


@pytest.mark.parametrize("kind", ["normal", "wide range", "extreme", "bf16", "two terms"])
def test_split_is_exact(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(64, 128, generator=generator)
    if kind == "wide range":  # every exponent down to that of the smallest number whose last bit BF16 holds
        w = torch.ldexp(1 + w.abs() % 1, torch.randint(-110, 128, w.shape, generator=generator)) * w.sign()
    if kind == "extreme":
        w = torch.tensor([[3.4028234663852886e38, -3.4028234663852886e38, 0.0, -0.0, 2.0**-110, 1 + 2.0**-23]])
    if kind == "bf16":
        w = w.bfloat16().float()
        w[0] = (torch.arange(128, dtype=torch.int32) << 16).view(torch.float32)  # BF16's subnormals
    if kind == "two terms":
        w = (w.view(torch.int32) & ~0xFF).view(torch.float32)
    terms = split_weight(w)
    assert terms.dtype == torch.bfloat16 and terms.shape[1:] == w.shape
    assert terms.shape[0] == {"bf16": 1, "two terms": 2}.get(kind, 3)
    # Three numbers of 8 bits at most, so that their sum is exact in fp64.
    assert np.array_equal(terms.double().sum(0).numpy(), w.double().numpy())


def test_split_of_subnormal_numbers() -> None:
    """Below 2⁻¹¹⁰ BF16 cannot hold the last bits; what is lost lies below 2⁻¹³³."""
    bits = torch.randint(0, 17 << 23, (50, 200), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    w = bits.view(torch.float32)
    lost = (w.double() - split_weight(w).double().sum(0)).abs()
    assert 0 < float(lost.max()) < 2.0**-133


def test_split_keeps_what_is_not_finite() -> None:
    w = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 0.0]])
    w.view(torch.int32)[0, 4] = 0x7F800001  # a NaN in the lowest bit
    total = split_weight(w).float().sum(0)
    assert torch.equal(total.nan_to_num(7.0), w.nan_to_num(7.0)) and total[0, [1, 4]].isnan().all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_division_of_the_sum(name: str, terms: int) -> None:
    """Every kernel of a model covers all of K once, in the same segments and groups, within shared memory."""
    model = MODELS[name]
    segment, span = segments(model.experts, model.hidden)
    steps = -(-model.hidden // 64)
    specs = logits_specs(model, terms)
    for tokens, spec in specs.items():
        assert spec.segment == segment and (spec.stages >= 2 or not spec.refills)
        assert (spec.parts - 1) * segment * spec.span < steps <= spec.parts * segment * spec.span
        assert spec.stages * spec.stage_bytes <= SHARED_MEMORY
        assert spec.row_tiles * spec.rows == spec.columns >= model.experts
        choice = choice_spec(model, spec, image_biased=False)
        assert choice.parts == spec.parts and choice.warps * choice.quads * 128 == spec.columns
        assert (spec.span, choice.span) == ((span, 1) if tokens == 0 else (1, span))
        assert choice.threads <= 256


def test_decoding_streams_over_all_multiprocessors() -> None:
    for name, blocks in {"V4.1": 120, "K3": 112, "V3": 112}.items():
        spec = logits_specs(MODELS[name], 1)[8]
        assert spec.row_tiles * spec.parts == blocks and not spec.refills, "all loads of a block at once"


def test_choice_by_tokens() -> None:
    model = MODELS["V4.1"]
    tiles = [(t, choose_logits(model, 1, t).tokens) for t in (1, 8, 9, 16, 17, 64, 65, 128, 256, 257, 4096)]
    assert [n for _, n in tiles] == [8, 8, 16, 16, 64, 64, 128, 128, 128, 128, 128]
    assert choose_logits(model, 1, 256).cluster == 1 and choose_logits(model, 1, 257).cluster == 2


# ---- which path a router takes ----

CFG = MoEConfig("test", 64, 32, 16, 3, scoring_func="sigmoid", use_correction_bias=True)


class Recorder:
    """In the place of :class:`RouterKernels`: notes what it is made from and called with."""

    made: ClassVar[list[Any]] = []

    def __init__(self, model: RouterModel, weight: torch.Tensor) -> None:
        self.weight = weight.clone()
        self.calls: list[Any] = []
        Recorder.made.append(self)

    def __call__(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((x, *rest))
        return torch.zeros(x.shape[0], 3, dtype=torch.int32), torch.zeros(x.shape[0], 3)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    import moe_layer.router as module

    monkeypatch.setattr(module, "usable", lambda device: True)
    monkeypatch.setattr(module, "RouterKernels", Recorder)
    Recorder.made = []
    return Recorder


def loaded(cfg: MoEConfig, image_bias: bool = False) -> Router:
    router = Router(cfg)
    experts = cfg.n_routed_experts
    bias = torch.randn(experts) if cfg.use_correction_bias else None
    router.load(torch.randn(experts, cfg.hidden_size), bias, torch.randn(experts) if image_bias else None)
    return router


def test_changed_weights_are_derived_anew(recorder: type[Recorder]) -> None:
    router = loaded(CFG)
    x = torch.randn(4, 64).bfloat16()
    router(x)
    router(x)
    assert len(recorder.made) == 1 and len(recorder.made[0].calls) == 2
    assert recorder.made[0].calls[0][1] is router.e_score_correction_bias
    with torch.no_grad():
        router.weight.mul_(2)
    router(x)
    router.load_state_dict({name: torch.ones_like(t) for name, t in router.state_dict().items()})
    router(x)
    router.weight = torch.nn.Parameter(torch.zeros_like(router.weight), requires_grad=False)
    router(x)
    assert len(recorder.made) == 4 and float(recorder.made[2].weight.mean()) == 1
    assert set(router.state_dict()) == {"weight", "e_score_correction_bias"}


def test_what_takes_the_kernels(recorder: type[Recorder]) -> None:
    x = torch.randn(4, 64).bfloat16()
    mask = torch.tensor([True, False, True, False])
    router = loaded(CFG, image_bias=True)
    router(x, image_mask=mask)
    assert recorder.made[0].calls[0][2] is router.bias_vl and torch.equal(recorder.made[0].calls[0][3], mask)
    router(x)
    assert len(recorder.made[0].calls[1]) == 2
    for wrong in (mask[:3], mask.int()):
        with pytest.raises(TensorError, match="image_mask must be"):
            router(x, image_mask=wrong)
    with pytest.raises(TensorError, match="router input"):
        router(x[:, :32])
    calls = len(recorder.made[0].calls)
    router(x.float())  # other dtypes
    assert len(recorder.made[0].calls) == calls
    for other in (replace(CFG, hidden_size=60), replace(CFG, n_routed_experts=1032)):  # TMA's rows; a warp's experts
        ids, _ = loaded(other)(torch.randn(2, other.hidden_size).bfloat16())
        assert len(set(ids[0].tolist())) == 3
    hashed = Router(replace(CFG, num_hash_layers=1, vocab_size=10))
    hashed.load(torch.randn(16, 64), tid2eid=torch.arange(30).view(10, 3) % 16)
    assert hashed(x, torch.tensor([0, 1, 2, 3]))[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert len(recorder.made) == 1


def test_copies_derive_their_own() -> None:
    router = loaded(CFG)
    router._kernels = router_launch.RouterKernels(router_model(CFG), router.weight)
    router._kernels._kernels[1, 1, False] = (x for x in ())  # type: ignore[assignment]  # neither copied nor pickled
    for other in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert other._kernels is None and torch.equal(other.weight, router.weight)
    assert router._kernels is not None


def test_weights_at_an_address_used_before(recorder: type[Recorder]) -> None:
    router = loaded(CFG)
    x = torch.randn(4, 64).bfloat16()
    for value in range(1, 20):
        router.weight = torch.nn.Parameter(torch.full((16, 64), float(value)), requires_grad=False)
        router(x)
        assert float(recorder.made[-1].weight.mean()) == value


def test_without_a_gpu_nothing_is_usable() -> None:
    assert not router_launch.usable(torch.device("cpu"))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, strides and sizes that the two launches get; long steps go in chunks."""
    calls: list[Any] = []

    def get_kernel(launch: str, spec: Any) -> Any:
        return lambda *arguments: calls.append((launch, spec, *arguments[1:]))

    monkeypatch.setattr(router_launch, "logits_kernel", lambda spec: get_kernel("logits", spec))
    monkeypatch.setattr(router_launch, "choice_kernel", lambda spec: get_kernel("choice", spec))
    monkeypatch.setattr(router_launch, "CHUNK", 300)
    model = router_model(CFG)
    kernels = router_launch.RouterKernels(model, torch.randn(16, 64).bfloat16().float())
    bias, image_bias = torch.randn(16), torch.randn(16)
    assert all(t.shape == (0, 3) for t in kernels(torch.empty(0, 64).bfloat16(), bias)) and not calls
    x = torch.randn(310, 72).bfloat16()[:, :64]
    mask = torch.zeros(310, dtype=torch.bool)
    ids, weights = kernels(x, bias, image_bias, mask)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32) and ids.shape == weights.shape == (310, 3)
    first, second = (SimpleNamespace(logits=calls[i], choice=calls[i + 1]) for i in (0, 2))
    assert len(calls) == 4 and first.logits[1].cluster == 2 and second.logits[1].tokens == 16
    terms = kernels.terms.data_ptr()
    assert first.logits[2:5] == (terms, x.data_ptr(), 9) and first.logits[6] == 300
    assert second.logits[2:5] == (terms, x.data_ptr() + 300 * 144, 9) and second.logits[6] == 10
    for part, start in ((first, 0), (second, 300)):
        assert part.choice[2] == part.logits[5], "partial sums"
        assert part.choice[3:6] == (bias.data_ptr(), image_bias.data_ptr(), mask.data_ptr() + start)
        assert part.choice[6:] == (ids.data_ptr() + 12 * start, weights.data_ptr() + 12 * start, part.logits[6])
    assert first.choice[1].image_biased and first.choice[1].warps == 1
    calls.clear()
    for odd in (torch.randn(5, 72).bfloat16()[:, 3:67], torch.randn(5, 67).bfloat16()[:, :64]):
        kernels(odd, bias)  # rows at addresses that TMA cannot load are copied
        assert calls[0][4] == 8 and calls[0][3] != odd.data_ptr() and calls[1][4:6] == (0, 0)
        calls.clear()
