"""NVFP4's per-tensor scale from the largest magnitude seen so far, kept on the device.

    running = RunningAmax(device)
    layer.input_global_scale = running.scale         # the tensor itself: updates are seen without another assignment
    running.update(x); y = layer(x)                  # every step, or while calibrating only; may be captured in a graph

A scale that all rows share saves the four bytes that each row's own would travel with, and the pass over the row that
finds it. In exchange the ranks must agree: rows carry no scale, and the receiver multiplies by *its* one. Give the
process group, so that each update ends in an all-reduce; or update without one while calibrating, and make the scales
equal once (``agree``) before the first step that uses them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_layer.errors import ConfigError, TensorError
from moe_layer.quant import blocks, e2m1, e4m3
from moe_layer.quant.nvfp4 import MIN_GLOBAL_SCALE


class RunningAmax:
    """The largest finite magnitude of the tensors given so far, and NVFP4's global scale for it.

    Nothing waits for the device, and the state is updated in place, so that a captured update changes it at each
    replay. NaN and infinities are passed over, as the format does.

    Args:
        device: where the tensors lie.
        decay: what an update multiplies the old value by before it takes the larger one; 1 never forgets. The scale
            follows an outlier at once, and forgets half of it after ``log(1/2) / log(decay)`` updates.
        group: process group whose ranks all update together and share one value; None: this process alone.

    Attributes:
        amax: fp32 scalar.
        scale: fp32 scalar, ``amax / (6 · 448)`` and at least 2**−117: ``Format.quantize(x, global_scale=...)``. Before
            the first update it is that least value, with which everything saturates.

    Raises:
        ConfigError: a decay outside (0, 1].
    """

    def __init__(
        self, device: torch.device | str, *, decay: float = 1.0, group: dist.ProcessGroup | None = None
    ) -> None:
        if not 0.0 < decay <= 1.0:
            raise ConfigError(f"decay must lie in (0, 1], got {decay}")
        self.decay = decay
        self.group = group
        self.amax = torch.zeros((), dtype=torch.float32, device=device)
        self.scale = torch.full((), MIN_GLOBAL_SCALE, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, x: torch.Tensor) -> torch.Tensor:
        """Take the magnitudes of ``x`` (any shape, also empty; BF16, FP16 or FP32) into account; returns ``scale``.

        With a group: collective, every rank once a step, also ranks without tokens.

        Raises:
            TensorError: not floating point, or on another device.
        """
        if not x.is_floating_point():
            raise TensorError(f"cannot take the largest magnitude of {x.dtype}; expected a floating-point tensor")
        if x.device != self.amax.device:
            raise TensorError(f"the tensor is on {x.device}, but the running amax is on {self.amax.device}")
        self.amax.mul_(self.decay)
        if x.numel():
            largest = x.detach().abs().nan_to_num(nan=0.0, posinf=0.0).amax()
            torch.maximum(self.amax, largest.to(torch.float32), out=self.amax)
        return self.agree() if self.group is not None else self._derive()

    @torch.no_grad()
    def agree(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Take the largest value of all ranks of ``group`` (None: the object's own, else all processes). Collective.

        NCCL's all-reduce may be captured in a CUDA graph; gloo's may not.
        """
        dist.all_reduce(self.amax, dist.ReduceOp.MAX, group=group or self.group)
        return self._derive()

    def reset(self) -> None:
        """Forget everything seen."""
        self.amax.zero_()
        self._derive()

    def _derive(self) -> torch.Tensor:
        self.scale.copy_(blocks.divide(self.amax, e2m1.MAX * e4m3.MAX).clamp_(min=MIN_GLOBAL_SCALE))
        return self.scale
