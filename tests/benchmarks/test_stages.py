"""The benchmark of indexing and finalize, on the CPU with the PyTorch stages: what it counts, and that it checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_layer.benchmarks.harness import Options
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.routing import Routing
from moe_layer.benchmarks.shapes import Shape
from moe_layer.benchmarks.stages import Case, Machine, StageError, measure_machine, slots_of, time_case
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.reference import ReferenceBackend

SHAPE = Shape("small", 64, 32, 10, 3, "bf16", "bf16", "small")
CASE = Case(SHAPE, 4, 25, Routing(0.0))
RANKS = Ranks.in_one_process([torch.device("cpu")])
FEW = Options(warmup=1, steps=2, repeats=2)
MACHINE = Machine(copy_gbps=100.0, launch_us=1.0)


def test_slots_are_what_rank_0_receives() -> None:
    ids = slots_of(CASE, 0)
    assert ids.shape == (100, 3)
    for slot in ids.tolist():  # ten experts on four ranks: rank 0 has three
        assert slot == [-1, -1, -1] or (min(slot) >= 0 and min(slot) < 3)
    assert not torch.equal(ids, slots_of(CASE, 1))


def test_record() -> None:
    record = time_case(RANKS, CASE, ReferenceBackend(), MACHINE, FEW)
    ids = slots_of(CASE, 0)
    rows, used = int(((ids >= 0) & (ids < 3)).sum()), int((ids >= 0).any(1).sum())
    assert (record["slots"], record["rows"], record["slots_used"]) == (100, rows, used)
    assert record["index"]["floor_us"] == pytest.approx(1.0 + 4 * (600 + rows) / 1e5)
    assert record["finalize"]["floor_us"] == pytest.approx(1.0 + 128 * (rows + used) / 1e5)
    assert record["finalize"]["gbps"] == pytest.approx(128 * (rows + used) / record["finalize"]["us"] / 1e3)
    assert record["index"]["method"] == "host"


class Wrong(ReferenceBackend):
    """Takes one row for another, or rounds once too often."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def build_index(self, *arguments: object, **options: object) -> ExpertIndex:
        index = super().build_index(*arguments, **options)  # type: ignore[arg-type]
        if self.stage == "slots":
            return replace(index, slots=index.slots.flip(0))
        return replace(index, rows=index.rows.clamp(max=20)) if self.stage == "rows" else index

    def finalize(self, rows, index, topk_weights, output):  # type: ignore[no-untyped-def]
        super().finalize(rows, index, topk_weights, output)
        if self.stage == "finalize":
            output.mul_(0.999)
        return output


@pytest.mark.parametrize(
    ("stage", "message"), [("slots", "wrong slots"), ("rows", "wrong rows"), ("finalize", "wrong sums")]
)
def test_wrong_outputs_are_noticed(stage: str, message: str) -> None:
    with pytest.raises(StageError, match=message):
        time_case(RANKS, CASE, Wrong(stage), MACHINE, FEW)


def test_machine() -> None:
    machine = measure_machine(RANKS)
    assert machine.copy_gbps > 0 and machine.launch_us == 0.0
