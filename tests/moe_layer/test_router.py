"""The router against fp64, and against transformers' routers; ties, NaN, hash layers, image tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from layer_oracle import Oracle

from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError, ConfigError, TensorError
from moe_layer.router import Router

BASE = MoEConfig("test", 96, 32, 32, 5)
RULES = {
    "softmax": {},
    "softmax, not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 16.0},
    "softmax, groups by max": {"n_group": 8, "topk_group": 3, "group_score": "max", "norm_topk_prob": False},
    "sigmoid with bias": {"scoring_func": "sigmoid", "use_correction_bias": True, "routed_scaling_factor": 2.5},
    "V3": {"scoring_func": "sigmoid", "use_correction_bias": True, "n_group": 8, "topk_group": 4},
    "V4": {"scoring_func": "sqrtsoftplus", "use_correction_bias": True, "routed_scaling_factor": 1.5},
    "groups of one": {"n_group": 32, "topk_group": 9, "scoring_func": "sigmoid"},
    "E = 896, k = 16": {"n_routed_experts": 896, "num_experts_per_tok": 16, "scoring_func": "sigmoid",
                        "use_correction_bias": True},
}  # fmt: skip


def make(**changes: object) -> Router:
    router = Router(dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]
    router.weight.normal_(std=0.3)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.normal_(std=0.2)
    return router


def oracle_of(router: Router) -> Oracle:
    cfg, bias = router.cfg, router.e_score_correction_bias
    return Oracle(
        router.weight.double().numpy(),
        [],
        cfg.num_experts_per_tok,
        scoring=cfg.scoring_func,
        bias=None if bias is None else bias.double().numpy(),
        groups=cfg.n_group,
        kept_groups=cfg.topk_group,
        group_score=cfg.group_score,
        norm=cfg.norm_topk_prob,
        factor=cfg.routed_scaling_factor,
    )


def check(ids: torch.Tensor, weights: torch.Tensor, expected: list[tuple[list[int], list[float]]]) -> None:
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    # fp32 may swap two experts whose scores differ by less than its error; sets and weights by id are compared.
    wrong = 0
    for row, w, (true_ids, true_w) in zip(ids.tolist(), weights.tolist(), expected):
        if set(row) != set(true_ids):
            wrong += 1
            continue
        got = dict(zip(row, w))
        np.testing.assert_allclose([got[e] for e in true_ids], true_w, rtol=2e-5, atol=1e-9)
    assert wrong <= len(expected) // 100


@pytest.mark.parametrize("rule", RULES)
def test_against_fp64(rule: str) -> None:
    router = make(**RULES[rule])
    x = torch.randn(200, 96)
    oracle = oracle_of(router)
    check(*router(x), [oracle.choose(row) for row in x.double().numpy()])


@pytest.mark.parametrize("rule", RULES)
def test_a_token_does_not_see_its_neighbours(rule: str) -> None:
    router = make(**RULES[rule])
    x = torch.randn(131, 96)
    ids, weights = router(x)
    order = torch.randperm(131)
    for part in (order, order[:1], order[5:40], order[-33:]):
        got_ids, got_weights = router(x[part])
        assert torch.equal(got_ids, ids[part])
        assert torch.equal(got_weights.view(torch.int32), weights[part].view(torch.int32))


def test_logits_are_fp32_also_for_bf16_tokens() -> None:
    router = make(scoring_func="sqrtsoftplus")
    x = torch.randn(300, 96).bfloat16()
    oracle = oracle_of(router)
    check(*router(x), [oracle.choose(row) for row in x.double().numpy()])


def test_bias_takes_part_in_the_choice_only() -> None:
    router = make(scoring_func="sigmoid", use_correction_bias=True, norm_topk_prob=False)
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[7] = 100.0
    x = torch.randn(50, 96)
    ids, weights = router(x)
    assert (ids[:, 0] == 7).all()
    scores = torch.sigmoid(x.double() @ router.weight.double().t())
    torch.testing.assert_close(weights[:, 0].double(), scores[:, 7], rtol=1e-5, atol=1e-8)


def test_ties_go_to_the_lowest_id() -> None:
    router = make(scoring_func="sigmoid", num_experts_per_tok=4)
    router.weight.zero_()
    ids, weights = router(torch.randn(9, 96))
    assert (ids == torch.arange(4)).all() and torch.equal(weights, torch.full((9, 4), 0.25))
    router.weight[[30, 11, 19]] = 1.0
    ids, _ = router(torch.ones(3, 96))
    assert (ids == torch.tensor([11, 19, 30, 0])).all()


def test_ties_between_groups_go_to_the_lowest() -> None:
    router = make(scoring_func="sigmoid", n_group=8, topk_group=2, num_experts_per_tok=8)
    router.weight.zero_()
    ids, _ = router(torch.randn(3, 96))
    assert (ids == torch.arange(8)).all()


@pytest.mark.parametrize("rule", RULES)
def test_nan_and_inf_spoil_their_own_token_only(rule: str) -> None:
    router = make(**RULES[rule])
    x = torch.randn(40, 96)
    ids, weights = router(x)
    bad = x.clone()
    bad[3], bad[17, 5], bad[30] = torch.nan, torch.inf, -torch.inf
    got_ids, got_weights = router(bad)
    assert ((got_ids >= 0) & (got_ids < router.weight.shape[0])).all()
    for row in got_ids.tolist():
        assert len(set(row)) == len(row)
    assert got_weights[3].isnan().all()
    good = [i for i in range(40) if i not in (3, 17, 30)]
    assert torch.equal(got_ids[good], ids[good]) and torch.equal(got_weights[good], weights[good])


def test_a_nan_expert_is_not_preferred() -> None:
    router = make(scoring_func="sigmoid")
    x = torch.randn(40, 96)
    best = router(x)[0][:, 0]
    router.weight[int(best[0])] = torch.nan
    ids, weights = router(x)
    assert not (ids == best[0]).any() and weights.isfinite().all()


def test_hash_layers() -> None:
    cfg = dataclasses.replace(
        BASE, scoring_func="sqrtsoftplus", use_correction_bias=True, num_hash_layers=3, vocab_size=100
    )
    router = Router(cfg, layer=2)
    assert router.is_hash and not Router(cfg, layer=3).is_hash
    table = torch.stack([torch.randperm(32)[:5] for _ in range(100)])
    router.load(torch.randn(32, 96) * 0.3, tid2eid=table)
    x, tokens = torch.randn(60, 96), torch.randint(0, 100, (60,))
    ids, weights = router(x, tokens)
    assert torch.equal(ids, table[tokens].int())
    oracle = oracle_of(router)
    for row, chosen, got in zip(x.double().numpy(), ids.tolist(), weights.tolist()):
        np.testing.assert_allclose(got, oracle.weigh(oracle.scores(row), chosen), rtol=1e-5)

    with pytest.raises(TensorError, match=r"hash routing\): pass input_ids"):
        router(x)
    with pytest.raises(TensorError, match=r"input_ids must be \[60\] int32 or int64, got \[59\] torch.int64"):
        router(x, tokens[:59])
    with pytest.raises(TensorError, match=r"got \[60\] torch.float32"):
        router(x, tokens.float())
    for wrong in (100, -1):
        tokens[7] = wrong
        with pytest.raises(TensorError, match=f"input_ids holds {wrong}, outside the vocabulary of 100"):
            router(x, tokens)


def test_image_tokens_choose_with_their_own_bias() -> None:
    router = Router(dataclasses.replace(BASE, scoring_func="sqrtsoftplus", use_correction_bias=True))
    text, image = torch.randn(32), torch.randn(32)
    router.load(torch.randn(32, 96) * 0.3, text, image)
    x, mask = torch.randn(80, 96), torch.rand(80) < 0.5
    oracle = oracle_of(router)
    expected = [
        oracle.choose(row, (image if is_image else text).double().numpy())
        for row, is_image in zip(x.double().numpy(), mask)
    ]
    check(*router(x, image_mask=mask), expected)
    check(*router(x), [oracle.choose(row) for row in x.double().numpy()])
    with pytest.raises(TensorError, match=r"image_mask must be \[80\] bool, got \[79\] torch.bool"):
        router(x, image_mask=mask[:79])


def test_errors() -> None:
    router = make()
    with pytest.raises(TensorError, match=r"router input must be \[T, 96\] floating, got \[3, 95\] torch.float32"):
        router(torch.randn(3, 95))
    with pytest.raises(TensorError, match=r"got \[3, 96\] torch.int64"):
        router(torch.zeros(3, 96, dtype=torch.int64))
    with pytest.raises(
        ConfigError, match="topk_group=1 of n_group=8 groups hold 4 experts, fewer than num_experts_per_tok=5"
    ):
        make(n_group=8, topk_group=1)
    with pytest.raises(ConfigError, match="layer 0 is a hash layer, but vocab_size is 0"):
        make(num_hash_layers=1)


def test_load_errors() -> None:
    router = make(use_correction_bias=True)
    weight = torch.randn(32, 96)
    with pytest.raises(CheckpointError, match=r"gate.weight is \[32, 95\], expected \[32, 96\]"):
        router.load(weight[:, :95], torch.zeros(32))
    with pytest.raises(CheckpointError, match=r"gate\.e_score_correction_bias is missing"):
        router.load(weight)
    with pytest.raises(CheckpointError, match=r"gate\.tid2eid is not expected"):
        router.load(weight, torch.zeros(32), tid2eid=torch.zeros(4, 5))


def test_forgotten_weights_are_nan_not_garbage() -> None:
    _, weights = Router(BASE)(torch.randn(3, 96))
    assert weights.isnan().all()


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2", "deepseek_v2 groups", "deepseek_v4", "mixtral"])
def test_against_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    from transformers.models import deepseek_v2, deepseek_v3, deepseek_v4, mixtral

    if kind == "deepseek_v3":
        config = deepseek_v3.DeepseekV3Config(
            hidden_size=96,
            n_routed_experts=32,
            num_experts_per_tok=5,
            n_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
        )
        theirs = deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
        ours = make(
            scoring_func="sigmoid", use_correction_bias=True, n_group=8, topk_group=4, routed_scaling_factor=2.5
        )
    elif kind.startswith("deepseek_v2"):
        groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3} if "groups" in kind else {}
        config = deepseek_v2.DeepseekV2Config(
            hidden_size=96, n_routed_experts=32, num_experts_per_tok=5, routed_scaling_factor=16.0, **groups
        )
        theirs = deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter(config)
        ours = make(
            norm_topk_prob=False,
            routed_scaling_factor=16.0,
            group_score="max",
            **{k: v for k, v in groups.items() if k != "topk_method"},
        )
    elif kind == "deepseek_v4":
        config = deepseek_v4.DeepseekV4Config(
            hidden_size=96, n_routed_experts=32, num_experts_per_tok=5, routed_scaling_factor=1.5
        )
        theirs = deepseek_v4.modeling_deepseek_v4.DeepseekV4TopKRouter(config)
        ours = make(scoring_func="sqrtsoftplus", use_correction_bias=True, routed_scaling_factor=1.5)
    else:
        config = mixtral.MixtralConfig(hidden_size=96, num_local_experts=32, num_experts_per_tok=5)
        theirs = mixtral.modeling_mixtral.MixtralTopKRouter(config)
        ours = make()
    theirs.weight.data.copy_(ours.weight)
    if ours.e_score_correction_bias is not None:
        theirs.e_score_correction_bias.copy_(ours.e_score_correction_bias)
    x = torch.randn(300, 96)
    with torch.no_grad():
        _, weights, ids = theirs(x)
    check(*ours(x), list(zip(ids.tolist(), weights.tolist())))
