"""Our experts inside transformers' models: same tokens as eager, module attributes honoured, the rest refused."""

from __future__ import annotations

import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from layer_oracle import BLOCK, Oracle, decode, rel_l2
from tiny_models import CONFIGS, VOCAB, moe_blocks, tiny_model
from transformers.integrations import finegrained_fp8, moe

from moe_layer import ConfigError, TensorError
from moe_layer.models import transformers_adapter
from moe_layer.models.transformers_experts import activation_of, experts_forward
from moe_layer.quant import get_format

REGISTERED = transformers_adapter.register()


def test_register_reports_what_there_is() -> None:
    assert REGISTERED[:2] == ("experts", "fp8_experts")
    assert moe.ALL_EXPERTS_FUNCTIONS["moe_layer"] is experts_forward
    assert finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["moe_layer"] is experts_forward
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:
        assert REGISTERED == ("experts", "fp8_experts")
    else:
        assert issubclass(EPImplementationInterface()["moe_layer"], EPImplementation)
        assert REGISTERED[2:] == ("expert_parallel",)


def test_register_without_the_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older transformers, or none."""
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", SimpleNamespace())
    assert transformers_adapter.register("other") == ("experts", "fp8_experts")
    for module, _ in transformers_adapter.REGISTRIES.values():
        monkeypatch.setitem(sys.modules, module, None)
    assert transformers_adapter.register("other") == ()


def test_register_refuses_unknown_options() -> None:
    with pytest.raises(ConfigError, match=r"unknown options \['tokens'\]; known: max_tokens_per_rank"):
        transformers_adapter.register(tokens=3)


@pytest.mark.parametrize("name", CONFIGS)
def test_generates_the_same_tokens_as_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name, seed=1)
    prompt = torch.randint(3, VOCAB, (2, 9))
    results = {}
    calls = []
    monkeypatch.setitem(
        moe.ExpertsInterface._global_mapping, "moe_layer", lambda *a: calls.append(1) or experts_forward(*a)
    )
    for implementation in ("eager", "moe_layer"):
        model.set_experts_implementation(implementation)
        before = len(calls)
        out = model.generate(
            prompt, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        results[implementation] = out
        assert (len(calls) > before) == (implementation == "moe_layer")
    eager, ours = results["eager"], results["moe_layer"]
    assert torch.equal(ours.sequences, eager.sequences)
    assert rel_l2(torch.stack(ours.logits), torch.stack(eager.logits)) < 1e-4
    assert len(set(eager.sequences[:, 9:].flatten().tolist())) > 4, "else any experts would give the same tokens"


def test_bf16_model() -> None:
    model = tiny_model("deepseek_v3", seed=2).bfloat16()
    tokens = torch.randint(3, VOCAB, (2, 20))
    logits = {}
    with torch.no_grad():
        for implementation in ("eager", "moe_layer"):
            model.set_experts_implementation(implementation)
            logits[implementation] = model(tokens).logits
        model.set_experts_implementation("eager")
        truth = model.float()(tokens).logits
    assert logits["moe_layer"].dtype == torch.bfloat16
    assert rel_l2(logits["moe_layer"], truth) < 1.2 * rel_l2(logits["eager"], truth) < 0.1


def test_from_pretrained_by_name(tmp_path: Any) -> None:
    tiny_model("qwen3_moe", seed=3).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours, eager = load(tmp_path, experts_implementation="moe_layer"), load(tmp_path, experts_implementation="eager")
    tokens = torch.randint(3, VOCAB, (1, 12))
    with torch.no_grad():
        assert rel_l2(ours(tokens).logits, eager(tokens).logits) < 1e-5


# ---- single modules ----


def experts_module(name: str = "deepseek_v3") -> Any:
    return next(iter(moe_blocks(tiny_model(name, seed=4)).values())).experts


def call(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return experts_forward(module, x, ids, weights)


def plain_oracle(module: Any, **changes: Any) -> Oracle:
    gate_up, down = module.gate_up_proj.detach().double(), module.down_proj.detach().double()
    experts = [(*(p.numpy() for p in g.chunk(2)), d.numpy()) for g, d in zip(gate_up, down)]
    return Oracle(np.zeros((1, 1)), experts, 1, **changes)  # type: ignore[arg-type]


def truth_of(oracle: Oracle, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = [oracle.routed(r, i.tolist(), w.tolist()) for r, i, w in zip(x.double().numpy(), ids, weights.double())]
    return torch.from_numpy(np.stack(rows))


def selections(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]), torch.rand(tokens, top_k)


def test_ids_outside_the_module_add_nothing() -> None:
    """transformers' mark for experts of other ranks is num_experts."""
    module = experts_module()
    x = torch.randn(12, 64)
    ids, weights = selections(12, 4, 16)
    ids[::2, 1], ids[5] = 16, 16
    got = call(module, x, ids, weights)
    assert rel_l2(got, truth_of(plain_oracle(module), x, ids, weights)) < 2e-6
    assert torch.equal(got[5], torch.zeros(64))


def test_bf16_router_weights() -> None:
    module = experts_module("qwen3_moe").bfloat16()
    x = torch.randn(12, 64).bfloat16()
    ids, weights = selections(12, 4, 16)
    got = call(module, x, ids, weights.bfloat16())
    truth = truth_of(plain_oracle(module, activations="bf16"), x, ids, weights.bfloat16())
    assert got.dtype == torch.bfloat16 and rel_l2(got, truth) < 4e-3


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
def test_weight_layouts(is_transposed: bool, is_concatenated: bool) -> None:
    module = experts_module()
    x = torch.randn(12, 64)
    ids, weights = selections(12, 4, 16)
    truth = truth_of(plain_oracle(module), x, ids, weights)
    gate_up, down = module.gate_up_proj.data, module.down_proj.data
    if not is_concatenated:
        gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)

        def apply_gate(fused: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(fused[..., ::2]) * fused[..., 1::2]

        module._apply_gate = apply_gate
    if is_transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    module.is_transposed, module.is_concatenated = is_transposed, is_concatenated
    assert rel_l2(call(module, x, ids, weights), truth) < 2e-6


@pytest.mark.parametrize("limit", [0.03, 0.5, 7.0, 10.0, 500.0])
def test_the_clamp_is_found(limit: float) -> None:
    module = experts_module("deepseek_v4")
    module.limit = limit
    assert activation_of(module).limit == limit
    x = torch.randn(12, 64) * 100
    ids, weights = selections(12, 3, 16)
    got = call(module, x, ids, weights)
    assert rel_l2(got, truth_of(plain_oracle(module, limit=limit), x, ids, weights)) < 1e-5


def test_a_limit_that_the_module_does_not_apply_is_not_applied() -> None:
    module = experts_module("deepseek_v3")
    module.limit = 1.0
    assert activation_of(module).limit is None


@pytest.mark.parametrize(("change", "message"), [
    ({"has_bias": True}, "DeepseekV3Experts: its experts have biases, which moe_layer does not run"),
    ({"has_gate": False}, "DeepseekV3Experts: its experts have no gate projection"),
    ({"has_post_expert_norm": True}, "DeepseekV3Experts: its experts are followed by a norm of their own"),
    ({"activation_scheme": "static"}, "activation_scheme is 'static'; moe_layer runs 'dynamic'"),
    ({"_apply_gate": lambda g: g.chunk(2, -1)[0].relu() * g.chunk(2, -1)[1]}, "activation is not silu(gate)·up"),
    ({"act_fn": torch.nn.GELU()}, "DeepseekV3Experts: its activation is not silu(gate)·up, clamped or not"),
])  # fmt: skip
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    module = experts_module()
    for name, value in change.items():
        setattr(module, name, value)
    ids, weights = selections(3, 2, 16)
    with pytest.raises(ConfigError, match=re.escape(message)):
        call(module, torch.randn(3, 64), ids, weights)


def test_gradients_are_refused() -> None:
    """An output without a graph would train everything but the experts, silently."""
    module = experts_module()
    ids, weights = selections(3, 2, 16)
    x = torch.randn(3, 64, requires_grad=True)
    with pytest.raises(ConfigError, match=r"for inference: call the model under torch.no_grad"):
        experts_forward(module, x, ids, weights)
    call(module, x, ids, weights)


def test_half_precision_is_refused() -> None:
    ids, weights = selections(3, 2, 16)
    with pytest.raises(TensorError, match=r"hidden_states has dtype torch.float16, expected torch.bfloat16"):
        call(experts_module(), torch.randn(3, 64).half(), ids, weights)


# ---- FP8 and FP4 ----

SIZES = {"num_experts": 5, "hidden_size": 256, "moe_intermediate_size": 128, "hidden_act": "silu"}


def fp8_experts(fmt: str, swiglu_limit: float | None = None, **sizes: int) -> Any:
    """transformers' FP8Experts with random weights in one of its storage formats."""
    block = {"mxfp4": None, "mxfp8": (1, 32)}.get(fmt, BLOCK[fmt])
    expert_dtype = "fp4" if fmt == "mxfp4" else "fp8"
    config = SimpleNamespace(**{**SIZES, **sizes}, swiglu_limit=swiglu_limit, expert_dtype=expert_dtype)
    # An argument in newer versions, in older ones a field of the config.
    takes_dtype = "expert_dtype" in inspect.signature(finegrained_fp8.FP8Experts).parameters
    module = finegrained_fp8.FP8Experts(
        config,
        block_size=block,
        scale_fmt="float" if fmt == "fp8_128x128" else "ue8m0",
        **({"expert_dtype": expert_dtype} if takes_dtype else {}),
    )
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(module, name), getattr(module, name + "_scale_inv")
        n, k = weight.shape[1], weight.shape[2] * (2 if fmt == "mxfp4" else 1)
        q = get_format(fmt).quantize(torch.randn(weight.shape[0], n, k) / k**0.5)
        weight.data.view(torch.uint8).copy_(q.data.view(torch.uint8))
        bits = torch.uint8 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
        scale.data.view(bits).copy_(q.scale)
    return module


def fp8_oracle(module: Any, fmt: str, activations: str) -> Oracle:
    def matrix(name: str, e: int) -> np.ndarray:
        data, scale = getattr(module, name).data[e], getattr(module, name + "_scale_inv").data[e]
        scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
        data = data.view(torch.uint8)
        columns = data.shape[1] * (2 if fmt == "mxfp4" else 1)
        return decode(fmt, data if fmt == "mxfp4" else data.view(torch.float8_e4m3fn), scale, None, columns)

    experts = []
    for e in range(module.num_experts):
        gate, up = np.split(matrix("gate_up_proj", e), 2)
        experts.append((gate, up, matrix("down_proj", e)))
    return Oracle(np.zeros((1, 1)), experts, 1, activations=activations, limit=module.limit)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(("fmt", "activations"), [
    ("fp8_128x128", "fp8"), ("fp8_128x128_ue8m0", "fp8"), ("fp8_32x32", "fp8"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8"),
])  # fmt: skip
def test_fp8_and_fp4_experts(fmt: str, activations: str, limit: float | None) -> None:
    """E8M0 scales are bytes: read as numbers they would be off by many powers of two (vllm#43416)."""
    module = fp8_experts(fmt, limit)
    x = torch.randn(40, 256).bfloat16()
    ids, weights = selections(40, 3, 5)
    truth = truth_of(fp8_oracle(module, fmt, activations), x, ids, weights)
    got = call(module, x, ids, weights)
    assert got.dtype == torch.bfloat16
    assert rel_l2(got, truth) < 5.7e-3


def test_fused_weights_whose_gate_ends_inside_a_block_are_refused() -> None:
    module = fp8_experts("fp8_128x128", moe_intermediate_size=192)
    ids, weights = selections(3, 2, 5)
    with pytest.raises(
        ConfigError, match="intermediate size 192 is no multiple of the 128 rows of a fp8_128x128 block"
    ):
        call(module, torch.randn(3, 256).bfloat16(), ids, weights)


def test_other_fp8_layouts_are_refused() -> None:
    module = fp8_experts("fp8_128x128")
    module.block_size = (64, 64)
    ids, weights = selections(3, 2, 5)
    with pytest.raises(ConfigError, match=r"block_size \(64, 64\) and torch.float32 scales; moe_layer runs bf16"):
        call(module, torch.randn(3, 256).bfloat16(), ids, weights)
