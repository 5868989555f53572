"""Which protocol serves a step: the measured table, its neighbours, and the override."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moe_layer.comm
from moe_layer.comm import auto

TABLE = Path(moe_layer.comm.__file__).parent / "crossover.json"


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_LAYER_SENTINEL_LIMIT", raising=False)


def test_table_is_data_with_its_measurement() -> None:
    data = json.loads(TABLE.read_text())
    assert data["measured"].strip()
    assert data["rows"]
    keys = set()
    for row in data["rows"]:
        assert set(row) == {"ep_size", "row_bytes", "top_k", "sentinel_limit"}
        assert all(isinstance(value, int) for value in row.values())
        assert row["ep_size"] >= 2
        assert row["row_bytes"] >= 16
        assert 1 <= row["top_k"] <= 32
        assert row["sentinel_limit"] >= 0
        keys.add((row["ep_size"], row["row_bytes"], row["top_k"]))
    assert len(keys) == len(data["rows"]), "the same case twice"


def test_measured_cases_are_taken_as_measured() -> None:
    for row in json.loads(TABLE.read_text())["rows"]:
        assert auto.sentinel_limit(row["ep_size"], row["row_bytes"], row["top_k"]) == row["sentinel_limit"]


def test_nearest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks first, then by the ratio of bytes, then by top_k."""
    names = ("ep_size", "row_bytes", "top_k", "sentinel_limit")
    rows = [(2, 1000, 4, 11), (2, 8000, 4, 12), (2, 8000, 16, 13), (8, 1000, 4, 14), (8, 64000, 8, 15)]
    monkeypatch.setattr(auto, "_table", lambda: [dict(zip(names, row)) for row in rows])
    assert auto.sentinel_limit(2, 1000, 4) == 11
    assert auto.sentinel_limit(2, 2800, 4) == 11  # 2.8 times the one, 1 / 2.86 of the other
    assert auto.sentinel_limit(2, 2900, 4) == 12
    assert auto.sentinel_limit(2, 16, 32) == 11
    assert auto.sentinel_limit(2, 8000, 11) == 13
    assert auto.sentinel_limit(3, 9000, 4) == 12  # nearer two ranks than eight
    assert auto.sentinel_limit(6, 1000, 32) == 14
    assert auto.sentinel_limit(8, 9000, 4) == 15  # not the two ranks' row of nearly as many bytes
    assert auto.sentinel_limit(72, 10**6, 8) == 15


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4, 6, 8, 72])
@pytest.mark.parametrize("row_bytes", [32, 10864, 15520, 28672, 131072])
def test_there_is_always_an_answer(ep_size: int, row_bytes: int) -> None:
    for top_k in (1, 6, 32):
        assert auto.sentinel_limit(ep_size, row_bytes, top_k) >= 0


def test_override(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "7", "100000"):
        monkeypatch.setenv("MOE_LAYER_SENTINEL_LIMIT", value)
        assert auto.sentinel_limit(2, 15520, 6) == int(value)
