"""Latent MoE (Kimi-K3): routed experts work in a narrower space than the model.

    z = down(x) ─► dispatch, experts, combine on z ─► RMSNorm ─► up

The norm is not linear, so the combine must be complete before it: no rank may apply it to its own partial result.
"""

from __future__ import annotations

import torch
from torch import nn

from moe_layer.errors import CheckpointError
from moe_layer.gemm.matmul import row_matmul
from moe_layer.gemm.rowwise import row_sum


class LatentProjection(nn.Module):
    """The way into the latent space and back, in fp32.

    Args:
        hidden_size: width of the model.
        latent_size: ``routed_expert_hidden_size``.
        use_norm: RMSNorm before the way back (``latent_moe_use_norm``).
        eps: its epsilon.
        dtype: of the projections' weights.
        device: where they lie.

    Attributes:
        down: ``[latent, hidden]`` (``routed_expert_down_proj``).
        up: ``[hidden, latent]`` (``routed_expert_up_proj``).
        norm: ``[latent]`` fp32 (``routed_expert_norm``), or None.
    """

    norm: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        latent_size: int,
        *,
        use_norm: bool,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        # NaN until loaded.
        down = torch.full((latent_size, hidden_size), torch.nan, dtype=dtype, device=device)
        up = torch.full((hidden_size, latent_size), torch.nan, dtype=dtype, device=device)
        self.down = nn.Parameter(down, requires_grad=False)
        self.up = nn.Parameter(up, requires_grad=False)
        norm = nn.Parameter(torch.ones(latent_size, device=device), requires_grad=False) if use_norm else None
        self.register_parameter("norm", norm)

    @torch.no_grad()
    def load(self, down: torch.Tensor, up: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        """Take a checkpoint's tensors, the projections in the dtype that they come in.

        Raises:
            CheckpointError: a wrong shape or dtype, a missing norm, or one that is not used.
        """
        for name, attribute, source in (
            ("routed_expert_down_proj", "down", down),
            ("routed_expert_up_proj", "up", up),
            ("routed_expert_norm", "norm", norm),
        ):
            target = getattr(self, attribute)
            if (target is None) != (source is None):
                raise CheckpointError(f"{name} is {'missing' if source is None else 'not expected'}")
            if target is None or source is None:
                continue
            if source.shape != target.shape or not source.is_floating_point():
                expected = f"{list(target.shape)} floating"
                raise CheckpointError(f"{name} is {list(source.shape)} {source.dtype}, expected {expected}")
            value = source.float() if attribute == "norm" else source
            setattr(self, attribute, nn.Parameter(value.to(target.device), requires_grad=False))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` → ``[T, latent]`` fp32."""
        return row_matmul(x.float(), self.down.float())

    def leave(self, z: torch.Tensor) -> torch.Tensor:
        """``[T, latent]``, combined over all ranks → ``[T, hidden]`` fp32."""
        z = z.float()
        if self.norm is not None:
            mean_square = row_sum(z * z).unsqueeze(1) / z.shape[1]
            z = z / (mean_square + self.eps).sqrt() * self.norm
        return row_matmul(z, self.up.float())
