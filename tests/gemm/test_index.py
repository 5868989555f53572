"""build_index against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from moe_layer.errors import TensorError
from moe_layer.gemm.reference import ReferenceBackend

build_index = ReferenceBackend().build_index


def by_loop(ids: torch.Tensor, local_of: dict[int, int], count: int):
    """(offsets, slots, rows) as plain lists, from the definition."""
    groups: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for slot, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            if expert in local_of:
                groups[local_of[expert]].append((slot, j))
    offsets, slots = [0], []
    rows = [[-1] * ids.shape[1] for _ in range(ids.shape[0])]
    for group in groups:
        for slot, j in group:
            rows[slot][j] = len(slots)
            slots.append(slot)
        offsets.append(len(slots))
    return offsets, slots, rows


def check(ids: torch.Tensor, local_of: dict[int, int], count: int, **how: object) -> None:
    first = how.pop("first", 0)
    index = build_index(ids, first, count, **how)  # type: ignore[arg-type]
    offsets, slots, rows = by_loop(ids, local_of, count)
    assert index.offsets.tolist() == offsets
    assert index.slots[: offsets[-1]].tolist() == slots
    assert index.rows.tolist() == rows
    assert {t.dtype for t in (index.offsets, index.slots, index.rows)} == {torch.int32}
    assert index.slots.shape == (ids.numel(),)


@pytest.mark.parametrize(("slots", "top_k", "experts", "first", "count"), [
    (1, 1, 1, 0, 1),
    (64, 6, 16, 4, 4),
    (37, 8, 256, 64, 32),
    (50, 16, 896, 560, 112),
    (300, 10, 896, 0, 896),
    (200, 32, 40, 39, 1),
])  # fmt: skip
def test_range(slots: int, top_k: int, experts: int, first: int, count: int) -> None:
    ids = torch.randint(-1, experts + 1, (slots, top_k), dtype=torch.int32)
    check(ids, {first + i: i for i in range(count)}, count, first=first)


@pytest.mark.parametrize("count", [1, 5])
def test_table(count: int) -> None:
    experts = torch.randperm(23)[:count].tolist()
    table = torch.full((23,), -1, dtype=torch.int32)
    for local, expert in enumerate(experts):
        table[expert] = local
    ids = torch.randint(-3, 30, (80, 4), dtype=torch.int32)
    check(ids, {e: i for i, e in enumerate(experts)}, count, local_table=table)


def test_ids_outside_any_range() -> None:
    """−1 must not wrap to the last expert, nor num_experts index past the table (vllm#42034, sglang#22525)."""
    ids = torch.tensor([[-1, 8, 2**31 - 1], [-(2**31), 7, 0]], dtype=torch.int32)
    check(ids, {e: e for e in range(8)}, 8)
    check(ids, {e: e for e in range(8)}, 8, local_table=torch.arange(8, dtype=torch.int32))
    check(ids, {5: 0, 6: 1, 7: 2}, 3, first=5)


def test_duplicates_each_get_a_row() -> None:
    check(torch.tensor([[3, 3, 1], [3, 1, 3]], dtype=torch.int32), {e: e for e in range(4)}, 4)


@pytest.mark.parametrize("ids", [torch.full((6, 3), -1), torch.zeros(0, 4), torch.full((5, 2), 3)],
                         ids=["all empty", "no slots", "one expert"])  # fmt: skip
def test_degenerate(ids: torch.Tensor) -> None:
    check(ids.int(), {e: e for e in range(4)}, 4)


def test_no_local_experts() -> None:
    check(torch.tensor([[0, 1]], dtype=torch.int32), {}, 0)


def test_errors() -> None:
    with pytest.raises(TensorError, match=r"topk_ids must be \[slots, top_k\] int32, got \[4, 2\] torch.int64"):
        build_index(torch.zeros(4, 2, dtype=torch.int64), 0, 4)
    with pytest.raises(TensorError, match=r"got \[4\] torch.int32"):
        build_index(torch.zeros(4, dtype=torch.int32), 0, 4)
