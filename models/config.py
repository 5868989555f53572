"""Reading ``config.json`` of a released checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_layer.config import MoEConfig, QuantizationConfig
from moe_layer.errors import ConfigError
from moe_layer.models.families import FLAT, NESTED
from moe_layer.models.fields import Fields
from moe_layer.models.quantization import parse_hf_quant_config, parse_quantization

CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"

# Families whose FP8 scales are fp32 tensors even under scale_fmt ue8m0.
_FP32_SCALES = {"deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"}


def known_model_types() -> list[str]:
    """Every ``model_type`` that :func:`read_config` understands."""
    return sorted(FLAT | NESTED)


def read_config(path: str | os.PathLike[str]) -> MoEConfig:
    """The MoE part of a checkpoint's config.

    Args:
        path: the checkpoint folder, its ``config.json``, or a ``.safetensors`` file beside one.

    Raises:
        ConfigError: no such file, not JSON, an unknown ``model_type`` or quantization (the message lists those known),
            a missing field (it names field and file), an impossible value.
    """
    path = Path(path)
    file = path if path.suffix == ".json" else (path.parent if path.is_file() else path) / CONFIG_NAME
    raw = _read_json(file)
    fallback = None
    hf_quant = file.with_name(HF_QUANT_CONFIG_NAME)
    if hf_quant.is_file():
        fallback = parse_hf_quant_config(_read_json(hf_quant), str(hf_quant))
    return config_from_dict(raw, source=str(file), quantization=fallback)


def config_from_dict(
    raw: Mapping[str, Any], *, source: str = "config", quantization: QuantizationConfig | None = None
) -> MoEConfig:
    """The same from a parsed config, such as transformers' ``config.to_dict()``.

    Args:
        raw: the whole object, ``text_config`` nested where the model has one.
        source: named in error messages.
        quantization: what to assume where ``raw`` holds no ``quantization_config``.

    Raises:
        ConfigError: as :func:`read_config`.
    """
    top = Fields(raw, source)
    model_type = top.text("model_type")
    if model_type in NESTED:
        text = top.inner("text_config")
        arguments = NESTED[model_type](text)
    elif model_type in FLAT:
        text = top
        arguments = FLAT[model_type](text)
    else:
        raise ConfigError(f"{source}: unknown model_type {model_type!r}; known: {', '.join(known_model_types())}")

    # Kimi-K3 keeps the object in text_config, V4.1 at the top.
    holder = next((f for f in (top, text) if "quantization_config" in f), None)
    if holder is not None:
        quantization = parse_quantization(
            holder.inner("quantization_config"),
            text.optional(str, "expert_dtype") or top.optional(str, "expert_dtype"),
            scales_are_fp32=model_type in _FP32_SCALES,
        )
    try:
        return MoEConfig(model_type=model_type, quantization=quantization, **arguments)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no {file.name} in {file.parent}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    return raw
