"""The stages of MoE compute, as every backend offers them (paper §3.3).

dispatch workspace ─► build_index ─► fc1 (gather, gate/up, act, requantize) ─► fc2 ─► finalize ─► combine workspace
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from moe_layer.gemm.activation import Activation
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.register_tiles import RegisterTiles
from moe_layer.gemm.sm90_spec import GroupedSpec
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor


class ComputeBackend(ABC):
    """MoE compute over the rank-major layout. Stateless: workspaces belong to the caller or the allocator."""

    name: ClassVar[str]

    def weight_layout(self, weight_format: str, parts: int, rows: int, columns: int) -> RegisterTiles | None:
        """How weights of a projection group should be packed at load; None: as the format stores them.

        The stages take both, whatever this says.

        Args:
            weight_format: registry name.
            parts: 2 for gate and up, 1 for down.
            rows, columns: N and K of a part.
        """
        return None

    def grouped_specs(
        self, gate_up: ExpertWeights, down: ExpertWeights, rows: int, activation: Activation, activation_format: str
    ) -> list[GroupedSpec]:
        """The grouped GEMMs that :meth:`fc1` and :meth:`fc2` launch for these weights; none by default.

        What is compiled ahead of time: the stages themselves choose by the same functions.

        Args:
            gate_up, down: on any device, the meta device too.
            rows: as :attr:`ExpertIndex.expected_rows`.
            activation: between both.
            activation_format: of what FC1 takes and gives.
        """
        return []

    @abstractmethod
    def build_index(
        self,
        topk_ids: torch.Tensor,
        first_expert: int,
        num_local_experts: int,
        *,
        local_table: torch.Tensor | None = None,
    ) -> ExpertIndex:
        """Group the received selections by local expert.

        Args:
            topk_ids: ``[S, top_k]`` int32 global ids, S = ep_size·T̂; ids that are not local are skipped.
            first_expert, num_local_experts: the local experts are ``first_expert … first_expert+num_local_experts−1``.
            local_table: ``[num_experts]`` int32 local index of each global id or −1; overrides ``first_expert``.
        """

    @abstractmethod
    def fc1(
        self,
        x: QuantizedTensor,
        weights: ExpertWeights,
        index: ExpertIndex,
        activation: Activation,
        output_format: str,
        *,
        output_global_scale: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """``h[row] = quantize(act(gate·x[slot], up·x[slot]))`` for every row of every local expert.

        Args:
            x: received activations ``[S, K]``; rows are read through ``index.slots`` only.
            weights: gate and up, ``parts`` = 2.
            output_format: format of ``h``, the quantization point between FC1 and FC2.
            output_global_scale: ``[num_local_experts]`` fp32 for two-level formats, or None for one per row.

        Returns:
            ``[rows, N]`` grouped by expert.
        """

    @abstractmethod
    def fc2(self, h: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex) -> torch.Tensor:
        """``[rows, hidden]`` down projections, grouped by expert, in the dtype that :meth:`finalize` reads."""

    @abstractmethod
    def finalize(
        self, rows: torch.Tensor, index: ExpertIndex, topk_weights: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Weight and sum each slot's rows into ``output[slot]`` (fp32 sum in selection order, one rounding).

        Args:
            rows: what :meth:`fc2` returned.
            topk_weights: ``[S, top_k]`` fp32 as received.
            output: ``[S, hidden]``, the combine workspace; slots without a token are left as they are.
        """
