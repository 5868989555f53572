"""moe_layer: a Mixture-of-Experts layer for inference with one-sided expert parallelism over NVLink.

The public names are imported when first used, so that ``import moe_layer`` costs little more than torch and needs
neither a GPU nor the CuTe DSL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_layer.config import MoEConfig
    from moe_layer.errors import (
        CapacityError,
        CheckpointError,
        CommunicationError,
        CommunicationTimeoutError,
        ConfigError,
        FormatError,
        MoELayerError,
        RankMismatchError,
        TensorError,
        UnsupportedDeviceError,
    )
    from moe_layer.layer import MoELayer
    from moe_layer.parallel import ExpertParallel
    from moe_layer.router import Router

__version__ = "0.1.0"

_HOME = {
    "MoEConfig": "config",
    "MoELayer": "layer",
    "ExpertParallel": "parallel",
    "Router": "router",
    **dict.fromkeys(
        (
            "MoELayerError", "ConfigError", "CheckpointError", "FormatError", "TensorError", "CapacityError",
            "CommunicationError", "RankMismatchError", "CommunicationTimeoutError", "UnsupportedDeviceError",
        ),
        "errors",
    ),
}  # fmt: skip

__all__ = [
    "CapacityError",
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "ConfigError",
    "ExpertParallel",
    "FormatError",
    "MoEConfig",
    "MoELayer",
    "MoELayerError",
    "RankMismatchError",
    "Router",
    "TensorError",
    "UnsupportedDeviceError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_layer' has no attribute {name!r}")
    value = getattr(import_module(f"moe_layer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
