"""Routing against the formulas, written out as loops, and against the paper's published imbalance."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_layer.benchmarks.routing import (
    Routing,
    busiest_link,
    load_imbalance,
    perfect_ids,
    traffic,
    zipf_ids,
)
from moe_layer.comm import ExpertPlacement
from moe_layer.errors import ConfigError


def scattered(num_experts: int, ep_size: int) -> ExpertPlacement:
    """A placement in no order; every rank holds some."""
    table = [e % ep_size for e in range(num_experts)]
    random.Random(num_experts * ep_size).shuffle(table)
    return ExpertPlacement.from_table(table, ep_size)


@pytest.mark.parametrize(
    ("ep_size", "num_experts", "top_k", "tokens"),
    [(1, 8, 3, 5), (2, 384, 6, 40), (2, 896, 16, 9), (3, 64, 5, 70), (8, 256, 8, 33), (8, 50, 32, 20), (6, 100, 22, 1)],
)
@pytest.mark.parametrize("kind", ["contiguous", "scattered"])
def test_perfect_routing_is_the_formula(ep_size: int, num_experts: int, top_k: int, tokens: int, kind: str) -> None:
    make = ExpertPlacement.contiguous if kind == "contiguous" else scattered
    placement = make(num_experts, ep_size)
    ids = perfect_ids(tokens, top_k, placement)
    assert ids.dtype == torch.int32 and ids.shape == (tokens, top_k)
    held: list[list[int]] = [[] for _ in range(ep_size)]
    for expert, rank in enumerate(placement.rank_of):
        held[rank].append(expert)
    for i in range(tokens):
        for j in range(top_k):
            rank = (i * top_k + j) % ep_size
            local = ((i * top_k + j) // ep_size) % len(held[rank])
            assert ids[i, j] == held[rank][local]
        assert len(set(ids[i].tolist())) == top_k


def test_perfect_routing_is_the_same_on_every_rank_and_balanced() -> None:
    placement = ExpertPlacement.contiguous(384, 8)
    routing = Routing.parse("perfect")
    ids = [routing.ids(128, 6, placement, rank, seed=rank) for rank in range(8)]
    assert all(torch.equal(ids[0], other) for other in ids)
    assert load_imbalance(ids, placement) == 1.0


def test_perfect_routing_refuses_ranks_with_too_few_experts() -> None:
    with pytest.raises(ConfigError, match="up to 4 selections of a token to rank 0, which holds 2 of the 4 experts"):
        perfect_ids(1, 8, ExpertPlacement.contiguous(4, 2))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.25])
def test_zipf_draws_one_after_the_other_without_replacement(alpha: float) -> None:
    """First choices by their probabilities, second ones by theirs given the first: chi-square at about 5 sigma."""
    experts, tokens, seed = 6, 60_000, 11
    ids = zipf_ids(tokens, 3, experts, alpha, rank=0, seed=seed).long()
    assert all(len(set(row)) == 3 for row in ids[:500].tolist())
    # The order of popularity, seen from outside: how often each expert is the first choice.
    counts = torch.bincount(ids[:, 0], minlength=experts).double()
    weight = torch.arange(1, experts + 1, dtype=torch.float64) ** -alpha
    order = counts.argsort(descending=True)
    p = torch.empty(experts, dtype=torch.float64)
    p[order] = weight / weight.sum()
    assert ((counts - tokens * p) ** 2 / (tokens * p)).sum() < 35  # 5 degrees of freedom
    pairs = torch.bincount(ids[:, 0] * experts + ids[:, 1], minlength=experts**2).double().view(experts, experts)
    expected = tokens * p[:, None] * p[None, :] / (1 - p[:, None])
    off = ~torch.eye(experts, dtype=torch.bool)
    assert pairs.diag().sum() == 0
    assert ((pairs - expected)[off] ** 2 / expected[off]).sum() < 75  # 29 degrees of freedom


def test_ranks_share_the_order_of_popularity_but_not_the_tokens() -> None:
    a, b = (zipf_ids(20_000, 1, 8, 1.0, rank=rank, seed=3).flatten() for rank in (0, 1))
    assert not torch.equal(a, b)
    popular = [torch.bincount(x.long(), minlength=8).argsort(descending=True)[:3].tolist() for x in (a, b)]
    assert popular[0] == popular[1]
    again, other = (zipf_ids(20_000, 1, 8, 1.0, rank=0, seed=seed).flatten() for seed in (3, 4))
    assert torch.equal(a, again) and not torch.equal(a, other)


@pytest.mark.parametrize(("alpha", "published"), [(0.5, 1.29), (1.0, 1.69), (1.25, 1.91)])
def test_imbalance_of_the_papers_table_5(alpha: float, published: float) -> None:
    """DeepSeek-V4.1-Flash, eight ranks, 1024 tokens: the published draw lies among ours, which have other orders."""
    placement = ExpertPlacement.contiguous(384, 8)
    ours = [load_imbalance([zipf_ids(1024, 6, 384, alpha, rank=0, seed=seed)], placement) for seed in range(30)]
    assert min(ours) < published < max(ours)
    assert sorted(ours)[15] == pytest.approx(published, rel=0.15)


def test_imbalance_of_uniform_routing() -> None:
    placement = ExpertPlacement.contiguous(384, 8)
    ours = load_imbalance([zipf_ids(1024, 6, 384, 0.0, rank=r) for r in range(8)], placement)
    assert ours == pytest.approx(1.02, abs=0.01)  # paper, Table 5


@pytest.mark.parametrize("ep_size", [2, 3, 8])
def test_traffic_and_imbalance_against_loops(ep_size: int) -> None:
    placement = scattered(40, ep_size)
    generator = torch.Generator().manual_seed(ep_size)
    ids = [torch.randint(0, 40, (7 + r, 5), generator=generator, dtype=torch.int32) for r in range(ep_size)]
    sent = [[0] * ep_size for _ in range(ep_size)]
    pairs = [0] * ep_size
    for s in range(ep_size):
        for row in ids[s].tolist():
            ranks = [placement.rank_of[e] for e in row]
            for r in set(ranks):
                sent[s][r] += 1
            for r in ranks:
                pairs[r] += 1
    matrix = traffic(ids, placement)
    assert matrix.tolist() == sent
    leaving = [sum(sent[s][r] for r in range(ep_size) if r != s) for s in range(ep_size)]
    reaching = [sum(sent[s][r] for s in range(ep_size) if r != s) for r in range(ep_size)]
    assert busiest_link(matrix) == max(leaving + reaching)
    assert load_imbalance(ids, placement) == pytest.approx(max(pairs) / (sum(pairs) / ep_size))


@pytest.mark.parametrize(("text", "alpha"), [("perfect", None), ("uniform", 0.0), ("zipf:0.5", 0.5), ("zipf:0", 0.0)])
def test_names_of_routings(text: str, alpha: float | None) -> None:
    routing = Routing.parse(text)
    assert routing.alpha == alpha and Routing.parse(str(routing)) == routing


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:-1", "zipf:x", "even"])
def test_unknown_routings(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown routing .*zipf:ALPHA"):
        Routing.parse(text)


def trace(path: Path, **tensors: torch.Tensor) -> str:
    save_file(tensors, str(path))
    return str(path)


def test_a_trace_is_taken_in_turn(tmp_path: Path) -> None:
    """Rank r takes tokens r·T …, and after the last the first again."""
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [7, 0]])
    routing = Routing.parse("trace:" + trace(tmp_path / "t.safetensors", topk_ids=ids))
    assert str(routing) == "trace:t.safetensors"
    placement = ExpertPlacement.contiguous(8, 2)
    assert routing.ids(3, 2, placement, 0).tolist() == ids[:3].tolist()
    second = routing.ids(3, 2, placement, 1)
    assert second.tolist() == [[6, 7], [7, 0], [0, 1]] and second.dtype == torch.int32


@pytest.mark.parametrize(("top_k", "experts"), [(3, 8), (2, 7)])
def test_a_trace_of_another_model(tmp_path: Path, top_k: int, experts: int) -> None:
    routing = Routing.parse("trace:" + trace(tmp_path / "t.safetensors", topk_ids=torch.tensor([[0, 7]])))
    with pytest.raises(
        ConfigError, match=f"2 selections a token, ids 0 to 7, but the model selects {top_k} of {experts}"
    ):
        routing.ids(1, top_k, ExpertPlacement.contiguous(experts, 1), 0)


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Routing.parse(f"trace:{tmp_path / 'nowhere'}")
    (tmp_path / "text").write_text("hello, this is no safetensors file")
    with pytest.raises(ConfigError, match=r"trace .*text"):
        Routing.parse(f"trace:{tmp_path / 'text'}")
    wrong = trace(tmp_path / "w.safetensors", ids=torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"no topk_ids \[tokens, top_k\]"):
        Routing.parse(f"trace:{wrong}")
