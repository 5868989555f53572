"""What a config says about the number format of the experts: every ``quantization_config`` of the served releases.

The config only announces; :mod:`moe_layer.models.storage` decides from the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from moe_layer.config import QuantizationConfig
from moe_layer.errors import ConfigError
from moe_layer.models.fields import Fields

KNOWN_QUANTIZATIONS = (
    "fp8 with weight_block_size [128, 128] (fp32 or ue8m0 scales), [32, 32] or [1, 32] (ue8m0), "
    "and expert_dtype fp4 or fp8; "
    "compressed-tensors mxfp4-pack-quantized, nvfp4-pack-quantized or pack-quantized (int4, group 32, symmetric); "
    "modelopt NVFP4"
)

# (rows and columns of a block, E8M0 scales?) → registry name
_FP8_BLOCKS = {
    ((128, 128), False): "fp8_128x128",
    ((128, 128), True): "fp8_128x128_ue8m0",
    ((32, 32), True): "fp8_32x32",
    ((1, 32), True): "mxfp8",
}


def parse_quantization(f: Fields, expert_dtype: str | None, *, scales_are_fp32: bool) -> QuantizationConfig:
    """A ``quantization_config`` object.

    Args:
        f: its fields.
        expert_dtype: the model config's own ``expert_dtype`` (DeepSeek-V4 keeps it beside the object), or None.
        scales_are_fp32: the family stores fp32 scales even where ``scale_fmt`` is ue8m0 (DeepSeek-V3.1, V3.2: powers of
            two in ``weight_scale_inv``).

    Raises:
        ConfigError: a method, block or format that is not known; the message lists those that are.
    """
    method = f.text("quant_method", default="modelopt" if "quant_algo" in f else None)
    if method == "fp8":
        experts = f.optional(str, "expert_dtype") or expert_dtype
        shared = _fp8(f, None, scales_are_fp32) if experts == "fp4" else None  # what is not a routed expert stays FP8
        return QuantizationConfig(method, _fp8(f, experts, scales_are_fp32), shared)
    if method == "compressed-tensors":
        return QuantizationConfig(method, _compressed_tensors(f))
    if method in ("modelopt", "modelopt_fp4"):
        return QuantizationConfig("modelopt", _modelopt(f), "nvfp4")
    _unknown(f, f"quant_method {method!r}")


def parse_hf_quant_config(raw: Mapping[str, Any], source: str) -> QuantizationConfig:
    """ModelOpt's ``hf_quant_config.json``: the same facts under ``quantization``."""
    return QuantizationConfig("modelopt", _modelopt(Fields(raw, source).inner("quantization")), "nvfp4")


def _fp8(f: Fields, expert_dtype: str | None, scales_are_fp32: bool) -> str:
    if expert_dtype == "fp4":
        return "mxfp4"
    if expert_dtype not in (None, "fp8"):
        _unknown(f, f"expert_dtype {expert_dtype!r}")
    block = f.optional(list, "weight_block_size")
    scale_fmt = f.optional(str, "scale_fmt")
    key = (tuple(block or ()), scale_fmt == "ue8m0" and not scales_are_fp32)
    if key not in _FP8_BLOCKS:
        _unknown(f, f"fp8 with weight_block_size {block} and scale_fmt {scale_fmt!r}")
    return _FP8_BLOCKS[key]


def _compressed_tensors(f: Fields) -> str:
    """The one format that all config groups share (a group may repeat the format, as Kimi-K3's does)."""
    groups = f.inner("config_groups")
    formats = set()
    for name in groups.values:
        group = groups.inner(name)
        fmt = group.optional(str, "format") or f.text("format")
        weights = group.inner("weights")
        width = (weights.text("type"), weights.integer("num_bits"), weights.optional(int, "group_size"))
        found = f"{fmt} with {width[1]}-bit {width[0]} weights in groups of {width[2]}"
        if fmt == "mxfp4-pack-quantized" and width == ("float", 4, 32):
            formats.add("mxfp4")
        elif fmt == "nvfp4-pack-quantized" and width == ("float", 4, 16):
            formats.add("nvfp4")
        elif fmt == "pack-quantized" and width == ("int", 4, 32) and weights.boolean("symmetric"):
            formats.add("int4")
        else:
            _unknown(f, f"compressed-tensors {found}")
    if len(formats) != 1:
        _unknown(f, f"compressed-tensors config_groups of {len(formats)} formats ({', '.join(sorted(formats))})")
    return formats.pop()


def _modelopt(f: Fields) -> str:
    algo = f.text("quant_algo")
    group = f.optional(int, "group_size")
    if algo != "NVFP4" or group not in (None, 16):
        _unknown(f, f"modelopt quant_algo {algo!r} with group_size {group}")
    return "nvfp4"


def _unknown(f: Fields, what: str) -> NoReturn:
    raise ConfigError(f"{f.source}: unknown quantization: {what}; known: {KNOWN_QUANTIZATIONS}")
