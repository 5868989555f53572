"""The router's kernels on a Hopper GPU against fp64: every rule, ties, NaN, rows alone, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_ranks import missing_gpu

from moe_layer.config import MoEConfig
from moe_layer.router import Router

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
V3 = MoEConfig(
    "V3", 7168, 64, 256, 8, scoring_func="sigmoid", use_correction_bias=True, n_group=8, topk_group=4,
    routed_scaling_factor=2.5,
)  # fmt: skip
CONFIGS = {
    "V4.1": MoEConfig(
        "V4.1", 5120, 64, 384, 6, scoring_func="sqrtsoftplus", use_correction_bias=True, routed_scaling_factor=1.5
    ),
    "K3": MoEConfig("K3", 7168, 64, 896, 16, scoring_func="sigmoid", use_correction_bias=True),
    "V3": V3,
    "V2": MoEConfig(
        "V2", 1024, 64, 160, 6, n_group=8, topk_group=3, group_score="max", norm_topk_prob=False,
        routed_scaling_factor=16.0,
    ),
    "softmax, largest": MoEConfig("largest", 264, 64, 1024, 32, use_correction_bias=True),
    "odd number": MoEConfig("odd", 200, 64, 62, 5, scoring_func="sigmoid", use_correction_bias=True),
    "groups of one": MoEConfig("one", 512, 64, 64, 5, scoring_func="sigmoid", n_group=64, topk_group=9),
    "one expert": MoEConfig("single", 64, 64, 1, 1),
}  # fmt: skip
SIZES = (4096, 1000, 257, 200, 128, 33, 16, 7, 1, 0)
MARGIN = 1e-5


def make(cfg: MoEConfig, *, fp32: bool = False, image_bias: bool = False, seed: int = 0) -> Router:
    torch.manual_seed(seed)
    router = Router(cfg, device="cuda")
    experts, hidden = cfg.n_routed_experts, cfg.hidden_size
    weight = torch.randn(experts, hidden, device="cuda") * (2 / hidden**0.5)
    bias = torch.randn(experts, device="cuda") * 0.2 if cfg.use_correction_bias else None
    router.load(
        weight if fp32 else weight.bfloat16(), bias, torch.randn(experts, device="cuda") if image_bias else None
    )
    return router


def rows(count: int, cfg: MoEConfig) -> torch.Tensor:
    return torch.randn(count, cfg.hidden_size, device="cuda").bfloat16()


def truth(
    router: Router, x: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 scores, choice (−∞ outside the kept groups), and which tokens' groups are too close to call."""
    cfg = router.cfg
    logits = x.double() @ router.weight.double().T
    if cfg.scoring_func == "softmax":
        scores = logits.softmax(1)
    elif cfg.scoring_func == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = torch.nn.functional.softplus(logits, threshold=1e9).sqrt()
    choice = scores
    if router.e_score_correction_bias is not None:
        bias = router.e_score_correction_bias.double().expand_as(scores)
        if mask is not None and router.bias_vl is not None:
            bias = torch.where(mask[:, None], router.bias_vl.double(), bias)
        choice = scores + bias
    close = torch.zeros(x.shape[0], dtype=torch.bool, device="cuda")
    if cfg.n_group > 1:
        size = cfg.n_routed_experts // cfg.n_group
        groups = choice.view(x.shape[0], cfg.n_group, size)
        of_group = groups.topk(1 if cfg.group_score == "max" else min(2, size)).values.sum(-1)
        best = of_group.sort(1, descending=True)
        last, first_out = best.values[:, cfg.topk_group - 1], best.values[:, cfg.topk_group]
        close = last - first_out < MARGIN * last.abs()
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best.indices[:, : cfg.topk_group], True)
        choice = groups.masked_fill(~kept[:, :, None], -torch.inf).reshape(choice.shape)
    return scores, choice, close


def check(router: Router, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None) -> None:
    cfg, k = router.cfg, router.cfg.num_experts_per_tok
    assert ids.shape == weights.shape == (x.shape[0], k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    if not x.shape[0]:
        return
    assert int(ids.min()) >= 0 and int(ids.max()) < cfg.n_routed_experts
    scores, choice, close = truth(router, x, mask)
    index = ids.long()
    assert not bool((index.sort(1).values.diff(dim=1) == 0).any()), "an expert twice"
    # Place by place: a lower choice than the true one is right only within the margin.
    best, got = choice.sort(1, descending=True).values[:, :k], choice.gather(1, index)
    wrong = ((best - got).abs() > MARGIN * best.abs().clamp(min=1e-3)).any(1) & ~close
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {len(wrong)} tokens"
    assert float(close.double().mean()) < 0.01
    expected = scores.gather(1, index)
    if cfg.norm_topk_prob:
        expected = expected / expected.sum(1, keepdim=True)
    expected = expected * cfg.routed_scaling_factor
    assert float(((weights.double() - expected) / expected).abs().max()) < 1e-5


def poisoned() -> None:
    """NaN in memory that the next outputs and partial sums take."""
    held = [torch.full((64 << 20,), torch.nan, device="cuda")]
    held += [torch.full((1 << n,), torch.nan, device="cuda") for n in range(4, 24)]
    del held


@pytest.mark.parametrize(("fp32", "images"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", CONFIGS)
def test_against_fp64_and_rows_alone(name: str, fp32: bool, images: bool) -> None:
    """In steps of any size a token gets the same bits."""
    cfg = CONFIGS[name]
    if images and not cfg.use_correction_bias:
        pytest.skip("no bias")
    router = make(cfg, fp32=fp32, image_bias=images, seed=1)
    x = rows(max(SIZES), cfg)
    mask = torch.rand(max(SIZES), device="cuda") < 0.5 if images else None
    first = None
    for tokens in SIZES:
        poisoned()
        part = None if mask is None else mask[:tokens]
        ids, weights = router(x[:tokens], image_mask=part)
        check(router, x[:tokens], ids, weights, part)
        first = first or (ids, weights)
        assert torch.equal(ids, first[0][:tokens]) and torch.equal(weights, first[1][:tokens]), tokens
    assert router._kernels is not None and router._kernels.terms.shape[0] == (3 if fp32 else 1)
    assert first is not None
    ids, weights = router(x[1000:1003], image_mask=None if mask is None else mask[1000:1003])
    assert torch.equal(ids, first[0][1000:1003]) and torch.equal(weights, first[1][1000:1003])


@pytest.mark.parametrize("tokens", [5, 500])
@pytest.mark.parametrize("name", ["V4.1", "K3", "softmax, largest"])
def test_ties_go_to_the_lower_id(name: str, tokens: int) -> None:
    cfg = CONFIGS[name]
    router = make(cfg, seed=2)
    kinds = 7
    same = torch.arange(cfg.n_routed_experts, device="cuda").flip(0) * 5 % kinds
    assert router.e_score_correction_bias is not None
    with torch.no_grad():
        router.weight.copy_(router.weight[same])
        router.e_score_correction_bias.copy_(router.e_score_correction_bias[same])
    x = rows(tokens, cfg)
    ids, _ = router(x)
    _, choice, _ = truth(router, x, None)
    of_kind = torch.stack([choice[:, same == kind][:, 0] for kind in range(kinds)], 1)
    expected = of_kind[:, same].sort(dim=1, descending=True, stable=True).indices[:, : cfg.num_experts_per_tok]
    gaps = of_kind.sort(1).values.diff(dim=1).amin(1) > 1e-4
    assert int(gaps.sum()) > tokens // 2
    assert torch.equal(ids[gaps].long(), expected[gaps])


def test_tied_groups() -> None:
    """All experts equal: the first groups, the first experts."""
    router = make(V3, seed=3)
    assert router.e_score_correction_bias is not None
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand_as(router.weight))
        router.e_score_correction_bias.fill_(-0.0)
    for tokens in (3, 300):
        ids, weights = router(rows(tokens, V3))
        assert torch.equal(ids, torch.arange(8, dtype=torch.int32, device="cuda").expand(tokens, 8))
        assert float((weights - 2.5 / 8).abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["V4.1", "K3", "V3", "V2"])
def test_nan(name: str) -> None:
    """A NaN token gets the first experts and NaN weights, its neighbours what they had; a NaN expert is chosen last."""
    cfg, k = CONFIGS[name], CONFIGS[name].num_experts_per_tok
    router = make(cfg, seed=4)
    x = rows(300, cfg)
    ids, weights = router(x)
    spoiled = x.clone()
    spoiled[7] = torch.nan
    others = torch.arange(300, device="cuda") != 7
    for tokens in (300, 9):
        got_ids, got_weights = router(spoiled[:tokens])
        assert got_ids[7].tolist() == list(range(k)) and bool(got_weights[7].isnan().all())
        here = others[:tokens]
        assert torch.equal(got_ids[here], ids[:tokens][here]) and torch.equal(got_weights[here], weights[:tokens][here])
    if cfg.scoring_func != "softmax":
        with torch.no_grad():
            router.weight[3] = torch.nan
        for tokens in (300, 9):
            assert not bool((router(x[:tokens])[0] == 3).any())


def test_infinite_and_extreme_logits() -> None:
    """Scores at the ends of their range, as PyTorch has them."""
    for scoring in ("sigmoid", "sqrtsoftplus", "softmax"):
        cfg = MoEConfig("extreme", 64, 64, 8, 8, scoring_func=scoring, norm_topk_prob=False)
        router = Router(cfg, device="cuda")
        logits = torch.tensor([0.0, 1e-3, -20.0, 30.0, -80.0, 80.0, 200.0, -200.0], device="cuda")
        weight = torch.zeros(8, 64, device="cuda")
        weight[:, 5] = logits
        router.load(weight)
        for tokens in (1, 300):
            x = torch.zeros(tokens, 64, device="cuda").bfloat16()
            x[:, 5] = 1
            ids, weights = router(x)
            scores, _, _ = truth(router, x, None)
            expected = scores.gather(1, ids.long())
            assert float(((weights.double() - expected).abs() / (expected + 1e-30)).max()) < 1e-5
            if scoring == "sqrtsoftplus":
                assert ids[0].tolist() == [6, 5, 3, 1, 0, 2, 4, 7]


@pytest.mark.parametrize("tokens", [1, 16, 700])
def test_graph(tokens: int) -> None:
    router = make(V3, seed=5)
    x = rows(tokens, V3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        router(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            ids, weights = router(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        ids.fill_(-1)
        weights.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(router, x, ids, weights, None)
        again = router(x)
        assert torch.equal(ids, again[0]) and torch.equal(weights, again[1])


def test_nothing_waits_for_the_device() -> None:
    router = make(V3, seed=6)
    x = rows(20, V3)
    router(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        router(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_changed_weights() -> None:
    router = make(V3, seed=7)
    x = rows(40, V3)
    router(x)
    with torch.no_grad():
        router.weight.copy_(router.weight.flip(0))
    ids, weights = router(x)
    check(router, x, ids, weights, None)


def test_strided_rows() -> None:
    """Rows apart, and rows that do not begin at multiples of 16 bytes."""
    cfg = CONFIGS["V4.1"]
    router = make(cfg, seed=8)
    wide = torch.randn(40, cfg.hidden_size + 64, device="cuda").bfloat16()
    for start in (8, 9):
        x = wide[:, start : start + cfg.hidden_size]
        ids, weights = router(x)
        check(router, x, ids, weights, None)


def test_long_steps_in_chunks() -> None:
    cfg = replace(CONFIGS["odd number"], routed_scaling_factor=3.0)
    router = make(cfg, seed=9)
    x = rows(40_000, cfg)
    ids, weights = router(x)
    check(router, x, ids, weights, None)
