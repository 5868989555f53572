"""One projection of all experts of a rank, in a registered format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_layer.quant import QuantizedTensor


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one projection group: gate and up (``parts`` = 2, gate first) or down (``parts`` = 1).

    The parts are kept apart, not concatenated, because a block-scaled part may end inside a block.

    Attributes:
        format: registry name in :mod:`moe_layer.quant`.
        data: ``[num_local_experts, parts, N, data_columns(K)]``.
        scale: ``[num_local_experts, parts, ⌈N/rows⌉, ⌈K/columns⌉]`` or None.
        global_scale: ``[num_local_experts, parts]`` fp32 (NVFP4: the factor that multiplies the values) or None.
        columns: K, the logical length of a weight row.
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    columns: int

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

    def expert(self, e: int, part: int) -> QuantizedTensor:
        """Part ``part`` of local expert ``e`` as an ``[N, K]`` quantized tensor."""
        return QuantizedTensor(
            self.format,
            self.data[e, part],
            None if self.scale is None else self.scale[e, part],
            None if self.global_scale is None else self.global_scale[e, part],
            self.columns,
        )
