"""The routers of the models of :mod:`moe_layer.benchmarks.shapes`, for `moe-layer compile` and benchmarks."""

from __future__ import annotations

import os

from moe_layer.config import MoEConfig
from moe_layer.errors import ConfigError
from moe_layer.gemm.router_spec import RouterModel
from moe_layer.router import router_model


def _plain(experts: int, hidden: int, top_k: int, scoring: str, scale: float) -> RouterModel:
    return RouterModel(experts, hidden, top_k, 1, 1, "top2_sum", scoring, True, scale, True)


ROUTERS = {
    "deepseek_v3": RouterModel(256, 7168, 8, 8, 4, "top2_sum", "sigmoid", True, 2.5, True),
    "deepseek_v4": _plain(256, 4096, 6, "sqrtsoftplus", 1.5),
    "deepseek_v4_pro": _plain(384, 7168, 6, "sqrtsoftplus", 2.5),
    "deepseek_v41": _plain(384, 5120, 6, "sqrtsoftplus", 1.5),
    "kimi_k2": _plain(384, 7168, 8, "sigmoid", 2.827),
    "kimi_k2_thinking": _plain(384, 7168, 8, "sigmoid", 2.827),
    "kimi_linear": _plain(256, 2304, 8, "sigmoid", 2.446),
    "kimi_k3": _plain(896, 7168, 16, "sigmoid", 1.0),
}
# Their image tokens choose with a bias of their own.
WITH_IMAGE_BIAS = ("deepseek_v41",)


def get_router(text: str) -> tuple[RouterModel, bool]:
    """The router of ``NAME``, ``NAME:ACTIVATION_FORMAT`` or a checkpoint's path, and whether it has an image bias.

    Raises:
        ConfigError: neither a known model nor a checkpoint.
    """
    name = text if os.path.exists(text) else text.partition(":")[0]
    if name in ROUTERS:
        return ROUTERS[name], name in WITH_IMAGE_BIAS
    if os.path.exists(name):
        cfg = MoEConfig.from_pretrained(name)
        return router_model(cfg), cfg.model_type in WITH_IMAGE_BIAS
    raise ConfigError(f"unknown model {name!r}: neither a checkpoint here nor one of {', '.join(ROUTERS)}")
