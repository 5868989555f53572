"""Bytes of one rank's workspaces (``moe-layer bench memory``), beside the paper's count (§3.2); computed only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from moe_layer import doctor
from moe_layer.benchmarks.bench import LocalBench
from moe_layer.benchmarks.shapes import Shape
from moe_layer.comm.placement import ExpertPlacement


@dataclass(frozen=True)
class Case:
    """One group of ranks, sized for ``max_tokens_per_rank`` tokens of a model on each."""

    shape: Shape
    ep_size: int
    max_tokens_per_rank: int


def measure(case: Case) -> dict[str, Any]:
    """Regions as :func:`moe_layer.doctor.workspace` has them, and two counts of the paper.

    ``paper_bytes``: ranks · T̂ slots of the bytes that travel. ``expert_major_bytes``: min(k, E_ℓ) times as many slots,
    as a layout needs that keeps a row for each selection.
    """
    shape = case.shape
    found = doctor.workspace(
        shape.name,
        ep_size=case.ep_size,
        max_tokens_per_rank=case.max_tokens_per_rank,
        activation_format=shape.activation_format,
    )
    slots = case.ep_size * case.max_tokens_per_rank
    local = len(ExpertPlacement.contiguous(shape.num_experts, case.ep_size).local_experts(0))
    paper = slots * (shape.dispatch_bytes + shape.combine_bytes)
    return {
        "region_bytes": found["region_bytes"],
        "total_bytes": found["total_bytes"],
        "paper_bytes": paper,
        "expert_major_bytes": min(shape.top_k, local) * paper,
    }


class MemoryBench(LocalBench):
    """One run."""

    kind: ClassVar[str] = "memory"

    def __init__(self, cases: list[Case]) -> None:
        super().__init__(None)
        self.cases = cases

    def find_provenance(self) -> dict[str, Any]:
        found = super().find_provenance()
        found.pop("note", None)  # what is computed holds for any machine
        return found

    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        return None, None

    def parameters(self, case: Case) -> dict[str, Any]:
        return {
            "model": case.shape.name, "activation_format": case.shape.activation_format, "ep_size": case.ep_size,
            "max_tokens_per_rank": case.max_tokens_per_rank,
        }  # fmt: skip

    def results(self, case: Case) -> dict[str, Any]:
        return measure(case)
