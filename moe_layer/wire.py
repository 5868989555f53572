"""Activations on their way to the experts: what they travel in, and who quantizes them.

At the source, each rank quantizes its tokens and dispatch carries elements and scales (paper §5.2), or dispatch itself
quantizes (its encoder, which brings the format's arithmetic to a package that knows no formats). At the target, tokens
travel unquantized, in the layer's own dtype, and are quantized on arrival: once for every rank that a token goes to,
and with more bytes on the link, but without a kernel before dispatch (the last rows of the paper's Table A.5).
"""

from __future__ import annotations

from functools import partial

import torch

from moe_layer.comm import DispatchResult
from moe_layer.comm.encoder import Encoder
from moe_layer.errors import ConfigError
from moe_layer.quant.base import Format, QuantizedTensor, get_format

QUANTIZE_AT = ("source", "target")
# What a checkpoint's weights imply for the activations; every fp8 weight format means "fp8".
ACTIVATION_OF = {"bf16": "bf16", "fp32": "fp32", "int4": "bf16", "mxfp4": "mxfp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def implied_activation_format(weight_format: str) -> str:
    """What activations travel and are multiplied in, unless the caller says otherwise.

    Raises:
        FormatError: an unknown format name.
    """
    get_format(weight_format)
    return "fp8" if weight_format.startswith("fp8") else ACTIVATION_OF[weight_format]


def shared_activation_format(activation_format: str | None) -> str:
    """What the shared experts multiply where the routed ones have ``activation_format`` (None: the implied one)."""
    return "fp32" if activation_format == "fp32" else "bf16"


def quantize(
    fmt: Format, global_scale: torch.Tensor | None, z: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``z`` ``[T, K]`` as dispatch carries it: rows, and their scales or None."""
    return fmt.quantize_to_wire(z, global_scale=global_scale)


class Wire:
    """A layer's encoder, remade where the global scale has become another, and its counterpart on arrival.

    Args:
        fmt: an activation format: what the experts multiply.
        in_kernel: also for the dispatch kernel, where the format has such a form (imports the CuTe DSL).
        quantize_at: ``"source"`` or ``"target"``.
        plain: the format without quantization that rows travel in with ``"target"``: ``"bf16"`` or ``"fp32"``.

    Attributes:
        travelling: the format on the wire.

    Raises:
        ConfigError: another ``quantize_at``.
    """

    def __init__(self, fmt: Format, *, in_kernel: bool, quantize_at: str = "source", plain: str = "bf16") -> None:
        if quantize_at not in QUANTIZE_AT:
            raise ConfigError(f"quantize_at must be one of {', '.join(QUANTIZE_AT)}, got {quantize_at!r}")
        at_source = quantize_at == "source" or fmt.block is None  # formats without scales are plain themselves
        self.travelling = fmt if at_source else get_format(plain)
        self._fmt, self._in_kernel = fmt, in_kernel
        self._scale: torch.Tensor | None = None
        self._encoder = self._make()

    def encoder(self, global_scale: torch.Tensor | None) -> Encoder:
        """What dispatch needs to quantize.

        Args:
            global_scale: of two-level formats: a scalar fp32 that all rows share, or None: each has its own.
        """
        if self.travelling is not self._fmt:
            return self._encoder
        if global_scale is not self._scale:
            self._scale = global_scale
            self._encoder = self._make()
        return self._encoder

    def receive(self, received: DispatchResult, columns: int, global_scale: torch.Tensor | None) -> QuantizedTensor:
        """The rows that arrived, ``[S, columns]``, quantized. Slots without a token hold anything, as they came.

        Args:
            global_scale: as of :meth:`encoder`.
        """
        rows = received.hidden_states
        if self.travelling is self._fmt:
            return self._fmt.from_wire(rows, received.hidden_states_scale, columns, global_scale)
        return self._fmt.quantize(rows, global_scale=global_scale)

    def _make(self) -> Encoder:
        own = self._scale is None
        kernel = self.travelling.kernel_encoder(per_row_global_scale=own) if self._in_kernel else None
        return Encoder(
            partial(quantize, self.travelling, self._scale),
            kernel,
            None if self._scale is None else self._scale.view(1),
        )
