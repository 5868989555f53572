"""Expert weights as buffers of a module: allocated once, filled expert by expert, saved and loaded by state_dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_layer.errors import CheckpointError
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor, get_format


class ExpertStack(nn.Module):
    """One projection group of a rank's experts in one format (see :class:`~moe_layer.gemm.weights.ExpertWeights`).

    Args:
        num_experts: local experts.
        parts: 2 for gate and up (in this order), 1 for down.
        rows, columns: N and K of one part.
        weight_format: registry name.
        device: where the buffers lie.

    Attributes:
        data, scale, global_scale: the buffers; scale and global_scale are None where the format has none.
        unloaded: (local expert, part) pairs that hold no weights yet.
    """

    data: torch.Tensor | None
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        parts: int,
        rows: int,
        columns: int,
        weight_format: str,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        fmt = get_format(weight_format)
        self.weight_format = weight_format
        self.rows, self.columns = rows, columns
        lead = (num_experts, parts)
        shape = (*lead, rows, fmt.data_columns(columns))
        self.register_buffer("data", torch.empty(shape, dtype=fmt.data_dtype, device=device))
        scales = fmt.scale_shape(rows, columns)
        scale = None if scales is None else torch.empty((*lead, *scales), dtype=fmt.scale_dtype, device=device)
        self.register_buffer("scale", scale)
        self.register_buffer("global_scale", torch.empty(lead, device=device) if fmt.two_level else None)
        self.unloaded = {(e, p) for e in range(num_experts) for p in range(parts)}

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.weights().storage.device

    def weights(self) -> ExpertWeights:
        """The buffers as the compute stages take them."""
        assert self.data is not None
        return ExpertWeights(self.weight_format, self.data, self.scale, self.global_scale, self.columns)

    def adopt(self, weights: ExpertWeights, *, name: str = "experts") -> None:
        """Take ``weights`` of all experts as they are, without a copy (unless they are packed).

        Raises:
            CheckpointError: another format, shape or dtype than this stack's.
        """
        self._check_all(weights, name)
        weights = weights.unpacked()
        self.data, self.scale, self.global_scale = weights.data, weights.scale, weights.global_scale
        self.unloaded.clear()

    def _check_all(self, weights: ExpertWeights, name: str) -> None:
        """Raise CheckpointError unless ``weights`` are what this stack could hold."""
        if weights.format != self.weight_format or weights.columns != self.columns:
            raise CheckpointError(
                f"{name}: {weights.format} rows of {weights.columns} values, "
                f"expected {self.weight_format} rows of {self.columns}"
            )
        own = self.weights()
        for what in ("data", "scale", "global_scale"):
            _check_like(f"{name}: {what}", getattr(own, what), getattr(weights, what))

    def load_expert(self, expert: int, part: int, q: QuantizedTensor, *, name: str = "weight") -> None:
        """Copy the ``[rows, columns]`` weights of one local expert's part into place.

        Args:
            expert: local index.
            part: 0 gate or down, 1 up.
            q: the weights, in this stack's format; buffers on any device.
            name: what the tensor is called in messages.

        Raises:
            CheckpointError: another format, shape or dtype; a missing scale.
        """
        own = self.weights()
        for buffer, source in self._matched(own, q, name):
            buffer[expert, part].copy_(source)
        self.unloaded.discard((expert, part))

    def _matched(self, own: ExpertWeights, q: QuantizedTensor, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(buffer of all experts in ``own``, one part's source in ``q``) of data, scale and global scale.

        Raises:
            CheckpointError: as :meth:`load_expert`.
        """
        if q.format != self.weight_format:
            raise CheckpointError(f"{name}: format is {q.format}, but these experts are stored as {self.weight_format}")
        if q.columns != self.columns:
            raise CheckpointError(f"{name}: rows have {q.columns} columns, expected {self.columns}")
        pairs = []
        for what in ("data", "scale", "global_scale"):
            buffer: torch.Tensor | None = getattr(own, what)
            source: torch.Tensor | None = getattr(q, what)
            if (buffer is None) != (source is None):
                raise CheckpointError(
                    f"{name}: {what} is {'missing' if source is None else 'not expected'} in {q.format}"
                )
            if buffer is None or source is None:
                continue
            if what == "global_scale":
                source = source.reshape(()) if source.numel() == 1 else source
            if source.shape != buffer.shape[2:] or source.dtype != buffer.dtype:
                raise CheckpointError(
                    f"{name}: {what} is {list(source.shape)} {source.dtype}, "
                    f"expected {list(buffer.shape[2:])} {buffer.dtype}"
                )
            pairs.append((buffer, source))
        return pairs

    def quantize_expert(self, expert: int, part: int, weight: torch.Tensor, *, name: str = "weight") -> None:
        """Quantize ``[rows, columns]`` floating weights into place.

        Raises:
            CheckpointError: another shape, or not floating.
        """
        if weight.shape != (self.rows, self.columns) or not weight.is_floating_point():
            raise CheckpointError(
                f"{name} is {list(weight.shape)} {weight.dtype}, expected [{self.rows}, {self.columns}] floating"
            )
        fmt = get_format(self.weight_format)
        # A weight has one second-level scale; left to itself, quantize would give each row its own.
        scale = None
        weight = weight.to(self.device)
        if fmt.two_level:
            largest = fmt.quantize(weight.abs().amax().float().reshape(1, 1)).global_scale
            assert largest is not None
            scale = largest.reshape(())
        self.load_expert(expert, part, fmt.quantize(weight, global_scale=scale), name=name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Module.load_state_dict would cast silently; bytes of another format are not these weights.
        for key, buffer in self.named_buffers():
            source = state_dict.get(prefix + key)
            if source is not None and source.dtype != buffer.dtype:
                raise CheckpointError(
                    f"{prefix}{key} is {source.dtype}, expected {buffer.dtype} ({self.weight_format})"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "data" in state_dict:
            self.unloaded.clear()


def _check_like(name: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
    if expected is None and found is None:
        return
    if expected is None or found is None:
        raise CheckpointError(f"{name} is {'missing' if found is None else 'not expected'}")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise CheckpointError(
            f"{name} is {list(found.shape)} {found.dtype}, expected {list(expected.shape)} {expected.dtype}"
        )


def held_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers as they lie in memory."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
