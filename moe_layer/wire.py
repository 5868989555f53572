"""Activations on their way to the experts: how a format's arithmetic reaches dispatch, which knows no formats."""

from __future__ import annotations

from functools import partial

import torch

from moe_layer.comm.encoder import Encoder
from moe_layer.quant.base import Format


def quantize(
    fmt: Format, global_scale: torch.Tensor | None, z: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``z`` ``[T, K]`` as dispatch carries it: rows, and their scales or None."""
    return fmt.to_wire(fmt.quantize(z, global_scale=global_scale))


class Wire:
    """A layer's encoder, remade where the global scale has become another.

    Args:
        fmt: an activation format.
        in_kernel: also for the dispatch kernel, where the format has such a form (imports the CuTe DSL).
    """

    def __init__(self, fmt: Format, *, in_kernel: bool) -> None:
        self._fmt, self._in_kernel = fmt, in_kernel
        self._scale: torch.Tensor | None = None
        self._encoder = self._make()

    def encoder(self, global_scale: torch.Tensor | None) -> Encoder:
        """What dispatch needs to quantize.

        Args:
            global_scale: of two-level formats: a scalar fp32 that all rows share, or None: each has its own.
        """
        if global_scale is not self._scale:
            self._scale = global_scale
            self._encoder = self._make()
        return self._encoder

    def _make(self) -> Encoder:
        own = self._scale is None
        kernel = self._fmt.kernel_encoder(per_row_global_scale=own) if self._in_kernel else None
        return Encoder(
            partial(quantize, self._fmt, self._scale), kernel, None if self._scale is None else self._scale.view(1)
        )
