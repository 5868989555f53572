"""transformers' experts modules on this library's compute stages.

``experts_forward`` has the signature of transformers' experts registries. It reads the module's own parameters in place
(views, no copies) and what the module says about them: ``has_gate``, ``has_bias``, ``is_transposed``,
``is_concatenated``, block sizes. What it cannot run is an error, never a guess.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_layer.backend import select_backend
from moe_layer.errors import ConfigError, TensorError
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.layer import implied_activation_format
from moe_layer.quant import get_format

PLAIN = {torch.bfloat16: "bf16", torch.float32: "fp32"}
# (rows and columns of a block, E8M0 scales?) → registry name
FP8_BLOCKS = {
    ((128, 128), False): "fp8_128x128",
    ((128, 128), True): "fp8_128x128_ue8m0",
    ((32, 32), True): "fp8_32x32",
    ((1, 32), True): "mxfp8",
}
# Gates and ups of the probe reach this far beyond a clamp's limit, and to where exp saturates.
PROBE_REACH = 4.0
PROBE_POINTS = 512

_activations: WeakKeyDictionary[Any, Activation] = WeakKeyDictionary()


def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts of one block, on this process.

    Args:
        module: a transformers experts module: plain weights or ``FP8Experts`` (FP8 and FP4).
        hidden_states: ``[T, hidden]`` BF16 or FP32.
        top_k_index: ``[T, k]`` ids into the module's experts; an id outside (transformers marks other ranks' experts by
            ``num_experts``) adds nothing.
        top_k_weights: ``[T, k]``, any floating dtype.

    Returns:
        ``[T, hidden]`` in the dtype of ``hidden_states``.

    Raises:
        ConfigError: experts that this library does not run (biases, no gate, another activation or weight format), or
            a call that wants gradients.
        TensorError: hidden states of another dtype.
    """
    refuse_gradients(hidden_states)
    if hidden_states.dtype not in PLAIN:
        raise TensorError(f"hidden_states has dtype {hidden_states.dtype}, expected torch.bfloat16 or torch.float32")
    check_supported(module)
    gate_up, down = weights_of(module)
    activation_format = PLAIN[hidden_states.dtype]
    if gate_up.format not in PLAIN.values():
        activation_format = implied_activation_format(gate_up.format)
    backend = select_backend(hidden_states.device, gate_up.format, activation_format)
    with torch.no_grad():
        index = backend.build_index(top_k_index.int().contiguous(), 0, gate_up.num_local_experts)
        x = get_format(activation_format).quantize(hidden_states)
        h = backend.fc1(x, gate_up, index, activation_of(module), activation_format)
        rows = backend.fc2(h, down, index)
        # finalize leaves tokens without a local expert as they are.
        output = torch.zeros(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
        return backend.finalize(rows, index, top_k_weights.float().contiguous(), output)


def refuse_gradients(hidden_states: torch.Tensor) -> None:
    """Raise rather than return an output that gradients would silently not flow through."""
    if torch.is_grad_enabled() and hidden_states.requires_grad:
        raise ConfigError("moe_layer's experts are for inference: call the model under torch.no_grad()")


def check_supported(module: torch.nn.Module) -> None:
    """Raises ConfigError, naming the module's class, for experts with parts that the stages do not have."""
    name = type(module).__name__
    for attribute, unwanted, what in (
        ("has_gate", False, "have no gate projection"),
        ("has_bias", True, "have biases"),
        ("has_post_expert_norm", True, "are followed by a norm of their own"),
    ):
        if bool(getattr(module, attribute, not unwanted)) is unwanted:
            raise ConfigError(f"{name}: its experts {what}, which moe_layer does not run")
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"{name}: activation_scheme is {getattr(module, 'activation_scheme', None)!r}; moe_layer runs 'dynamic'"
        )


def weights_of(module: Any) -> tuple[ExpertWeights, ExpertWeights]:
    """(gate and up, down) of an experts module, as views of its parameters.

    Raises:
        ConfigError: a dtype, block size or layout that no format has.
    """
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if gate_up.dtype in PLAIN:
        if getattr(module, "is_transposed", False):
            gate_up, down = gate_up.mT, down.mT
        inner = gate_up.shape[1] // 2
        if getattr(module, "is_concatenated", True):
            parts = gate_up.unflatten(1, (2, inner))
        else:
            parts = gate_up.unflatten(1, (inner, 2)).transpose(1, 2)
        fmt = PLAIN[gate_up.dtype]
        return (
            ExpertWeights(fmt, parts, None, None, gate_up.shape[2]),
            ExpertWeights(fmt, down.unsqueeze(1), None, None, down.shape[2]),
        )
    fmt = _quantized_format(module, gate_up)
    stored = get_format(fmt)
    scales = [_raw_scale(s.detach()) for s in (module.gate_up_proj_scale_inv, module.down_proj_scale_inv)]
    data = [t.view(stored.data_dtype) for t in (gate_up, down)]
    columns = data[0].shape[2] * data[0].element_size() * 8 // stored.element_bits
    inner = data[0].shape[1] // 2
    assert stored.block is not None
    if inner % stored.block[0]:
        raise ConfigError(
            f"{type(module).__name__}: intermediate size {inner} is no multiple of the {stored.block[0]} rows of a "
            f"{fmt} block, so one block would hold gate and up rows; moe_layer does not run such fused weights"
        )
    return (
        ExpertWeights(fmt, data[0].unflatten(1, (2, inner)), scales[0].unflatten(1, (2, -1)), None, columns),
        ExpertWeights(fmt, data[1].unsqueeze(1), scales[1].unsqueeze(1), None, inner),
    )


def _quantized_format(module: Any, gate_up: torch.Tensor) -> str:
    scale = module.gate_up_proj_scale_inv
    e8m0 = scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
    block = tuple(getattr(module, "block_size", None) or ())
    if gate_up.dtype == torch.int8 and e8m0:
        return "mxfp4"
    fmt = FP8_BLOCKS.get((block, e8m0)) if gate_up.dtype == torch.float8_e4m3fn else None
    if fmt is None:
        raise ConfigError(
            f"{type(module).__name__}: {gate_up.dtype} weights with block_size {block or None} and {scale.dtype} "
            "scales; moe_layer runs bf16, fp32, FP4 with E8M0 scales, and FP8 with blocks of 128×128, 32×32 or 1×32"
        )
    return fmt


def _raw_scale(scale: torch.Tensor) -> torch.Tensor:
    # E8M0 scales are bytes to the formats; a cast would turn 2⁻⁷ into 0.
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def activation_of(module: Any) -> Activation:
    """The activation that equals the module's ``_apply_gate``, found by trying it on values beyond any clamp.

    Raises:
        ConfigError: none does.
    """
    if module not in _activations:
        _activations[module] = _probe(module)
    return _activations[module]


def _probe(module: Any) -> Activation:
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    reach = PROBE_REACH * max([30.0, *(float(v) for v in limits if v is not None)])
    # Cubes, so that points lie dense about zero: a small limit shows too.
    line = torch.linspace(-1, 1, PROBE_POINTS) ** 3 * reach
    gate, up = line[None], line.roll(PROBE_POINTS // 3)[None]
    if getattr(module, "is_concatenated", True):
        fused = torch.cat((gate, up), dim=-1)
    else:
        fused = torch.stack((gate, up), dim=-1).flatten(-2)
    with torch.no_grad():
        theirs = module._apply_gate(fused)
    for limit in dict.fromkeys([*limits, None]):
        candidate = Activation("swiglu", limit)
        if torch.allclose(candidate(gate, up), theirs.float(), rtol=1e-4, atol=1e-6):
            return candidate
    raise ConfigError(
        f"{type(module).__name__}: its activation is not silu(gate)·up, clamped or not; moe_layer has no other "
        "that transformers' models use"
    )
