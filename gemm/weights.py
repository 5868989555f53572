"""One projection of all experts of a rank, in a registered format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_layer.gemm.register_tiles import RegisterTiles
from moe_layer.quant import QuantizedTensor


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one projection group: gate and up (``parts`` = 2, gate first) or down (``parts`` = 1).

    The parts are kept apart, not concatenated, because a block-scaled part may end inside a block.

    Weights are held as the format stores them, or packed as a kernel reads them. Of packed weights ``data`` and
    ``scale`` are on the meta device: they have the stored shape and dtype, but no bytes; :meth:`expert` and
    :meth:`unpacked` give those.

    Attributes:
        format: registry name in :mod:`moe_layer.quant`.
        data: ``[num_local_experts, parts, N, data_columns(K)]``.
        scale: ``[num_local_experts, parts, ⌈N/rows⌉, ⌈K/columns⌉]`` or None.
        global_scale: ``[num_local_experts, parts]`` fp32 (NVFP4: the factor that multiplies the values) or None.
        columns: K, the logical length of a weight row.
        tiles: how they are packed, or None.
        packed: uint8 ``tiles.shape(num_local_experts)``, contiguous, or None.
        shift: int32 ``[num_local_experts, parts]`` of :meth:`RegisterTiles.pack`, or None.
        factor: fp32 ``[num_local_experts, parts]``, what sums of products with packed weights are multiplied by
            (:meth:`RegisterTiles.epilogue_factor`), or None.
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    columns: int
    tiles: RegisterTiles | None = None
    packed: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    @property
    def num_local_experts(self) -> int:
        return self.data.shape[0]

    @property
    def parts(self) -> int:
        return self.data.shape[1]

    @property
    def rows(self) -> int:
        """N, output features of one part."""
        return self.data.shape[2]

    @property
    def storage(self) -> torch.Tensor:
        """The tensor that holds the bytes: ``packed``, else ``data``."""
        return self.data if self.packed is None else self.packed

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, packed or not."""
        tensors = (self.data, self.scale, self.global_scale, self.packed, self.shift, self.factor)
        return sum(t.nbytes for t in tensors if t is not None and not t.is_meta)

    def expert(self, e: int, part: int) -> QuantizedTensor:
        """Part ``part`` of local expert ``e`` as an ``[N, K]`` quantized tensor; of packed weights a copy."""
        data, scale = self.stored(e)
        return QuantizedTensor(
            self.format,
            data[part],
            None if scale is None else scale[part],
            None if self.global_scale is None else self.global_scale[e, part],
            self.columns,
        )

    def stored(self, e: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(data, scale) of all parts of local expert ``e`` as the format stores them; of packed weights a copy."""
        if self.packed is None:
            return self.data[e], None if self.scale is None else self.scale[e]
        assert self.tiles is not None and self.shift is not None
        return self.tiles.unpack(self.packed[e], self.shift[e])

    def unpacked(self) -> ExpertWeights:
        """The same weights as the format stores them, bit by bit; of packed weights a copy."""
        if self.packed is None:
            return self
        data = torch.empty_like(self.data, device=self.packed.device)
        scale = None if self.scale is None else torch.empty_like(self.scale, device=self.packed.device)
        for e in range(self.num_local_experts):
            expert_data, expert_scale = self.stored(e)
            data[e] = expert_data
            if scale is not None and expert_scale is not None:
                scale[e] = expert_scale
        return ExpertWeights(self.format, data, scale, self.global_scale, self.columns)


def pack(weights: ExpertWeights, tiles: RegisterTiles) -> ExpertWeights:
    """Packed weights, an expert at a time, beside the given ones.

    Raises:
        FormatError, UnrepresentableError: as :meth:`RegisterTiles.pack`.
    """
    assert weights.scale is not None
    experts, device = weights.num_local_experts, weights.data.device
    packed = torch.empty(tiles.shape(experts), dtype=torch.uint8, device=device)
    shift = torch.empty(experts, tiles.parts, dtype=torch.int32, device=device)
    for e in range(experts):
        _, shift[e] = tiles.pack(weights.data[e], weights.scale[e], out=packed[e])
    return ExpertWeights(
        weights.format,
        torch.empty_like(weights.data, device="meta"),
        torch.empty_like(weights.scale, device="meta"),
        weights.global_scale,
        weights.columns,
        tiles,
        packed,
        shift,
        tiles.epilogue_factor(shift, weights.global_scale),
    )
