"""The models' MoE shapes, in one place, for benchmarks, `moe-layer compile`, `moe-layer doctor` and tests.

What the all-to-all and the grouped GEMMs see of a model: the routed width (Kimi-K3: the latent one), the experts, and
the formats that its release implies. Bytes are per token and target rank, as the paper's Table 3 counts them: the data
row, its scales, and 4 bytes an expert id and a router weight.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from moe_layer.config import MoEConfig
from moe_layer.errors import ConfigError
from moe_layer.gemm.activation import Activation
from moe_layer.quant import get_format

ROUTING_BYTES = 8  # of a selection: its expert id (int32) and its router weight (fp32)
PLAIN, CLAMPED = Activation(), Activation(limit=10.0)


@dataclass(frozen=True)
class Shape:
    """One model's routed experts.

    Attributes:
        name: as on the command line.
        hidden_size: routed width, the K of FC1.
        intermediate_size: of an expert.
        num_experts, top_k: the paper's E and k.
        activation_format, weight_format: names of :mod:`moe_layer.quant`.
        title: as in print.
        activation: between FC1 and FC2.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation_format: str
    weight_format: str
    title: str
    activation: Activation = PLAIN

    @property
    def label(self) -> str:
        """The text that :func:`get_shape` takes for this shape."""
        return f"{self.name}:{self.activation_format}"

    @property
    def data_bytes(self) -> int:
        """Bytes of a token's values as dispatched."""
        return get_format(self.activation_format).row_bytes(self.hidden_size)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales; 0 for formats without."""
        fmt = get_format(self.activation_format)
        return fmt.scale_row_bytes(self.hidden_size, per_row_global_scale=fmt.two_level)

    @property
    def dispatch_bytes(self) -> int:
        """Bytes that dispatch sends for a token to each of its ranks."""
        return self.data_bytes + self.scale_bytes + ROUTING_BYTES * self.top_k

    @property
    def combine_bytes(self) -> int:
        """Bytes of a token's BF16 partial result from each of its ranks."""
        return 2 * self.hidden_size


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deepseek_v3", 7168, 2048, 256, 8, "fp8", "fp8", "DeepSeek-V3"),
        Shape("deepseek_v4", 4096, 2048, 256, 6, "mxfp8", "mxfp4", "DeepSeek-V4", CLAMPED),
        Shape("deepseek_v4_pro", 7168, 3072, 384, 6, "mxfp8", "mxfp4", "DeepSeek-V4-Pro", CLAMPED),
        Shape("deepseek_v41", 5120, 2304, 384, 6, "mxfp8", "mxfp4", "DeepSeek-V4.1-Flash", CLAMPED),
        Shape("kimi_k2", 7168, 2048, 384, 8, "fp8", "fp8", "Kimi-K2"),
        Shape("kimi_k2_thinking", 7168, 2048, 384, 8, "bf16", "int4", "Kimi-K2-Thinking"),
        Shape("kimi_linear", 2304, 1024, 256, 8, "bf16", "bf16", "Kimi-Linear"),
        Shape("kimi_k3", 3584, 3072, 896, 16, "mxfp8", "mxfp4", "Kimi-K3", Activation("situ")),
    )
}
# The three payloads of the all-to-all tables: the paper's two models, and BF16 rows as the widest.
ALL_TO_ALL = ("deepseek_v41:mxfp8", "kimi_k3:mxfp8", "deepseek_v3:bf16")


def get_shape(text: str) -> Shape:
    """The shape of ``NAME``, or a checkpoint's; ``:ACTIVATIONS`` and ``:WEIGHTS`` behind it set other formats.

    Raises:
        ConfigError: neither a known model nor a checkpoint, or a format that cannot carry activations.
        FormatError: no such format.
    """
    name, activation, weights = text, "", ""
    if not os.path.exists(text):
        name, _, formats = text.partition(":")
        activation, _, weights = formats.partition(":")
    if name in SHAPES:
        shape = SHAPES[name]
    elif os.path.exists(name):
        shape = shape_of(MoEConfig.from_pretrained(name))
    else:
        raise ConfigError(f"unknown model {name!r}: neither a checkpoint here nor one of {', '.join(SHAPES)}")
    if activation:
        if not get_format(activation).is_activation_format:
            raise ConfigError(f"{text}: format {activation!r} cannot carry activations")
        shape = replace(shape, activation_format=activation)
    if weights:
        shape = replace(shape, weight_format=get_format(weights).name)
    return shape


def shape_of(cfg: MoEConfig) -> Shape:
    """The shape that a checkpoint's config implies."""
    from moe_layer.gated_mlp import activation_of
    from moe_layer.wire import implied_activation_format

    weights = cfg.quantization.expert_format if cfg.quantization else "bf16"
    return Shape(
        cfg.model_type, cfg.routed_hidden_size, cfg.moe_intermediate_size, cfg.n_routed_experts,
        cfg.num_experts_per_tok, implied_activation_format(weights), weights, cfg.model_type, activation_of(cfg),
    )  # fmt: skip
