"""Layers over several ranks (real processes, gloo): agreement with one rank and with fp64, and bits that do not depend
on how the tokens are spread."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from layer_oracle import oracle_of, rel_l2
from layers import config, make

from moe_layer import CapacityError, CommunicationError, ConfigError, ExpertParallel

Split = list[list[int]]
FP32 = {"dtype": torch.float32}


def forward(
    ranks: Any, name: str, seed: int, x: torch.Tensor, splits: list[Split], options: dict[str, Any]
) -> list[Any]:
    """On each rank: the outputs of its share of ``x``, for one split after another."""
    options = dict(options)
    placement = options.pop("placement", None)
    t_hat = options.pop("t_hat", None)
    ep = ExpertParallel(ranks.group, max_tokens_per_rank=len(x) + 3, placement=placement, device="cpu")
    layer = make(name, ep, seed=seed, **options)
    return [layer(x[split[ranks.rank]], tokens_per_rank=t_hat) for split in splits]


def gather(results: list[Any], splits: list[Split], x: torch.Tensor) -> list[torch.Tensor]:
    """The rows of each split, back in the order of ``x``."""
    outputs = []
    for i, split in enumerate(splits):
        out = torch.full_like(x, torch.nan)
        for rank, rows in enumerate(split):
            out[rows] = results[rank][i]
        outputs.append(out)
    return outputs


def random_splits(tokens: int, ranks: int) -> list[Split]:
    """All on one rank, one rank with none, contiguous, shuffled and of very different lengths."""
    everything = list(range(tokens))
    splits = [[everything if r == ranks - 1 else [] for r in range(ranks)]]
    splits.append([everything[r::ranks] for r in range(ranks)])
    for _ in range(3):
        order = torch.randperm(tokens).tolist()
        cuts = sorted(torch.randint(0, tokens + 1, (ranks - 1,)).tolist())
        splits.append([order[a:b] for a, b in zip([0, *cuts], [*cuts, tokens])])
    return splits


FORMATS: dict[str, dict[str, Any]] = {
    "fp32": FP32,
    "bf16": {},
    "fp8": {"weight_format": "fp8_128x128"},
    "mxfp8 × mxfp4": {"weight_format": "mxfp4"},
    "mxfp8 × mxfp4, at the target": {"weight_format": "mxfp4", "quantize_at": "target"},
    "nvfp4": {"weight_format": "nvfp4"},
    "int4": {"weight_format": "int4"},
}


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_rows_do_not_depend_on_the_split(run_ranks: Any, ep_size: int, options: dict[str, Any]) -> None:
    """The acceptance: for a given ep_size, any split and every repeat give bitwise the same rows."""
    x = torch.randn(50, 96)
    splits = random_splits(50, ep_size)
    results = run_ranks(forward, ep_size, "deepseek_v3", 1, x, [*splits, splits[-1]], options)
    first, *others = gather(results, [*splits, splits[-1]], x)
    assert first.isfinite().all()
    for other in others:
        assert torch.equal(other.view(torch.int32), first.view(torch.int32))


@pytest.mark.parametrize("ep_size", [1, 3])
def test_latent_rows_do_not_depend_on_the_split(run_ranks: Any, ep_size: int) -> None:
    x = torch.randn(40, 128).bfloat16()
    splits = random_splits(40, ep_size)
    first, *others = gather(run_ranks(forward, ep_size, "kimi_k3", 2, x, splits, {"weight_format": "mxfp4"}), splits, x)
    for other in others:
        assert torch.equal(other.view(torch.int16), first.view(torch.int16))


def test_other_tokens_do_not_change_a_row(run_ranks: Any) -> None:
    """The same rows with other neighbours (vllm#45683), some of them NaN."""
    x = torch.randn(30, 96)
    split = [[list(range(0, 15)), list(range(15, 30))]]
    reference = gather(run_ranks(forward, 2, "deepseek_v3", 3, x, split, FP32), split, x)[0]
    other = torch.randn(30, 96) * 100
    other[::5] = torch.nan
    kept = [3, 9, 17, 28]
    other[kept] = x[kept]
    got = gather(run_ranks(forward, 2, "deepseek_v3", 3, other, split, FP32), split, other)[0]
    assert torch.equal(got[kept], reference[kept])


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v4", "kimi_k3", "top_k 10"])
@pytest.mark.parametrize("options", [FP32, {}], ids=["fp32", "bf16"])
def test_group_sizes_agree(run_ranks: Any, name: str, options: dict[str, Any]) -> None:
    """1, 2, 3 and 4 ranks; the experts are a multiple of neither 3 nor 4 in most of these."""
    x = torch.randn(36, config(name).hidden_size)
    outputs = {}
    for ep_size in (1, 2, 3, 4):
        split = [[list(range(36))[r::ep_size] for r in range(ep_size)]]
        outputs[ep_size] = gather(run_ranks(forward, ep_size, name, 4, x, split, options), split, x)[0]
        layer = make(name, seed=4, **options)
        ranks = [r.tolist() for r in torch.arange(layer.cfg.n_routed_experts).tensor_split(ep_size)]
        truth = oracle_of(layer, ranks=ranks)(x)
        assert rel_l2(outputs[ep_size], truth) < (2e-6 if options else 4e-3)
    limit = 1e-6 if options else 4e-3
    for ep_size in (2, 3, 4):
        assert rel_l2(outputs[ep_size], outputs[1]) < limit


@pytest.mark.parametrize("options", list(FORMATS.values())[2:], ids=list(FORMATS)[2:])
def test_quantized_group_sizes_agree(run_ranks: Any, options: dict[str, Any]) -> None:
    x = torch.randn(36, 96)
    outputs = []
    for ep_size in (1, 4):
        split = [[list(range(36))[r::ep_size] for r in range(ep_size)]]
        outputs.append(gather(run_ranks(forward, ep_size, "deepseek_v3", 5, x, split, options), split, x)[0])
    assert rel_l2(outputs[1], outputs[0]) < 4e-3


@pytest.mark.parametrize("t_hat", [25, 30, 53])
def test_the_runtime_maximum_changes_nothing(run_ranks: Any, t_hat: int) -> None:
    x = torch.randn(50, 96)
    split = [[list(range(25)), list(range(25, 50))]]
    results = [
        gather(run_ranks(forward, 2, "deepseek_v3", 6, x, split, {**FP32, "t_hat": t}), split, x)[0]
        for t in (None, t_hat)
    ]
    assert torch.equal(results[0], results[1])


def test_fewer_experts_than_ranks(run_ranks: Any) -> None:
    options = {**FP32, "changes": {"n_routed_experts": 3, "num_experts_per_tok": 2}}
    x = torch.randn(12, 64)
    split = [[list(range(12))[r::4] for r in range(4)]]
    got = gather(run_ranks(forward, 4, "mixtral", 7, x, split, options), split, x)[0]
    assert rel_l2(got, oracle_of(make("mixtral", seed=7, **options))(x)) < 2e-6


@pytest.mark.parametrize("how", ["table", "mapping", "mapping without this layer"])
def test_placement_tables(run_ranks: Any, how: str) -> None:
    """A balancer's placement: any expert anywhere, ranks with different numbers of them."""
    table = torch.randint(0, 3, (16,)).tolist()
    placement = {"table": table, "mapping": {5: table}, "mapping without this layer": {4: table}}[how]
    x = torch.randn(30, 96)
    splits = random_splits(30, 3)
    options = {**FP32, "placement": placement, "layer": 5}
    first, *others = gather(run_ranks(forward, 3, "deepseek_v3", 8, x, splits, options), splits, x)
    assert rel_l2(first, oracle_of(make("deepseek_v3", seed=8, **FP32))(x)) < 2e-6
    for other in others:
        assert torch.equal(other, first)


def loop(ranks: Any, steps: int) -> bool:
    """Steps of changing sizes; each rank checks its rows against the layer on its own (all experts)."""
    ep = ExpertParallel(ranks.group, max_tokens_per_rank=40, device="cpu")
    layer, alone = make("mixtral", ep, seed=9, **FP32), make("mixtral", seed=9, **FP32)
    g = torch.Generator().manual_seed(ranks.rank)
    for step in range(steps):
        tokens = int(torch.randint(0, 40, (), generator=g)) * (step % 3 != ranks.rank)
        x = torch.randn(tokens, 64, generator=g)
        got = layer(x)
        assert tokens == 0 or rel_l2(got, alone(x)) < 1e-6
    return True


def test_many_steps_of_changing_sizes(run_ranks: Any) -> None:
    """Two experts a token of eight, looped (DeepEP#548); T = 0 comes round on every rank."""
    assert run_ranks(loop, 3, 60) == [True] * 3


def two_layers(ranks: Any, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ep = ExpertParallel(ranks.group, max_tokens_per_rank=20, device="cpu")
    # The second is wider, so a workspace sized for the first would overrun (vllm#42976).
    small, large = make("mixtral", ep, seed=10, **FP32), make("kimi_k3", ep, seed=11, **FP32)
    mine = slice(ranks.rank, None, ranks.ep_size)
    return small(x[mine]), large(z[mine]), small(x[mine])


def test_two_layers_share_a_group(run_ranks: Any) -> None:
    """sglang#6733."""
    x, z = torch.randn(20, 64), torch.randn(20, 128)
    results = run_ranks(two_layers, 2, x, z)
    small, large = oracle_of(make("mixtral", seed=10, **FP32))(x), oracle_of(make("kimi_k3", seed=11, **FP32))(z)
    for rank, (first, wide, again) in enumerate(results):
        assert rel_l2(first, small[rank::2]) < 2e-6 and rel_l2(wide, large[rank::2]) < 2e-6
        assert torch.equal(first, again)


def failures(ranks: Any) -> list[str]:
    """Rank 1 makes one mistake after another; every rank reports what it got, and that the next step is right."""
    ep = ExpertParallel(ranks.group, max_tokens_per_rank=8, timeout_s=30, device="cpu")
    layer = make("deepseek_v3", ep, seed=12, **FP32)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(ranks.rank))
    reference = layer(x)
    mistakes = [
        lambda: layer(x[:, :95]),
        lambda: layer(x.double()),
        lambda: layer(x.repeat(3, 1)),
        lambda: layer.experts(x, torch.zeros(4, 2).float(), torch.ones(4, 2)),
        lambda: layer.experts(x, torch.zeros(4, 2, dtype=torch.int32), None),  # type: ignore[arg-type]
        lambda: layer(x, tokens_per_rank=5),
    ]
    heard = []
    for mistake in mistakes:
        try:
            mistake() if ranks.rank == 1 else layer(x)
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
        else:
            heard.append("nothing")
        assert torch.equal(layer(x), reference)
    return heard


def test_a_mistake_on_one_rank_is_an_error_on_all(run_ranks: Any) -> None:
    innocent, guilty, other = run_ranks(failures, 3)
    assert [re.sub(r"Error: rank \d", "Error: rank", h) for h in innocent] == [
        re.sub(r"Error: rank \d", "Error: rank", h) for h in other
    ]
    for theirs, ours, pattern in zip(
        innocent,
        guilty,
        [
            r"TensorError: x has shape \[4, 95\], expected \[T, 96\]",
            r"TensorError: x has dtype torch.float64, expected",
            r"CapacityError: rank 1: 12 tokens to dispatch, but .* is 8",
            r"TensorError: rank 1: topk_ids has dtype torch.float32",
            r"TensorError: topk_weights must be a tensor, got NoneType",
            r"RankMismatchError: .*runtime_max_tokens_per_rank: rank 0 has 8, rank 1 has 5",
        ],
    ):
        assert re.search(pattern, ours), ours
        if ours.startswith("RankMismatchError"):
            assert theirs == ours
        else:
            assert theirs.startswith("CommunicationError: ") and "rank 1 failed: " in theirs, theirs
            assert ours.split(": ", 1)[1][:60] in theirs


def failure_in_compute(ranks: Any) -> str:
    ep = ExpertParallel(ranks.group, max_tokens_per_rank=8, timeout_s=30, device="cpu")
    layer = make("deepseek_v3", ep, seed=13, **FP32)
    x = torch.randn(4, 96)
    layer(x)
    healthy = layer.backend.fc1
    if ranks.rank == 0:

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no room for FC1")

        layer.backend.fc1 = broken
    try:
        layer(x)
        heard = "nothing"
    except Exception as error:
        heard = f"{type(error).__name__}: {error}"
    layer.backend.fc1 = healthy
    layer(x)
    return heard


def test_a_failure_between_dispatch_and_combine(run_ranks: Any) -> None:
    failed, peer = run_ranks(failure_in_compute, 2)
    assert failed == "MemoryError: no room for FC1"
    assert peer.startswith("CommunicationError: ") and "rank 0 failed: no room for FC1" in peer


# ---- the facade ----


def mesh_forward(ranks: Any, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "ep"))
    try:
        ExpertParallel(mesh)
        message = ""
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    ep = ExpertParallel(mesh["ep"], max_tokens_per_rank=20, device="cpu")
    assert ep.ep_size == 2 and ep.ep_rank == ranks.rank % 2
    return make("mixtral", ep, seed=14, **FP32)(x[ranks.rank :: 4]), message


def test_device_mesh(run_ranks: Any) -> None:
    x = torch.randn(16, 64)
    results = run_ranks(mesh_forward, 4, x)
    truth = oracle_of(make("mixtral", seed=14, **FP32))(x)
    for rank, (got, message) in enumerate(results):
        assert rel_l2(got, truth[rank::4]) < 2e-6
        assert message.startswith("ConfigError: group must be a one-dimensional DeviceMesh, got 2 dimensions")


def test_alone() -> None:
    with ExpertParallel(max_tokens_per_rank=16, device="cpu") as ep:
        assert (ep.ep_rank, ep.ep_size, ep.max_tokens_per_rank) == (0, 1, 16)
        layer = make("mixtral", ep, **FP32)
        layer(torch.randn(16, 64))
        with pytest.raises(CapacityError, match="17"):
            layer(torch.randn(17, 64))
        layer(torch.randn(3, 64))
    with pytest.raises(CommunicationError, match="destroyed channel"):
        layer(torch.randn(3, 64))
    ep.destroy()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"protocol": "carrier pigeon"}, "unknown protocol 'carrier pigeon'; known: auto"),
    ({"max_tokens_per_rank": 0}, "max_tokens_per_rank must be at least 1, got 0"),
    ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
])  # fmt: skip
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        ExpertParallel(**arguments)


def test_bad_placements() -> None:
    with pytest.raises(Exception, match="layer 0: placement places 7 experts, but the layer has 8"):
        make("mixtral", ExpertParallel(placement=[0] * 7, device="cpu"))
    with pytest.raises(Exception, match="expert 2 is placed on rank 1, but the group has ranks"):
        make("mixtral", ExpertParallel(placement=[0, 0, 1, 0, 0, 0, 0, 0], device="cpu"))


def test_over_a_channel_that_exists() -> None:
    """The group is the channel's, its layers compute what others do, and destroying it destroys the channel."""
    from moe_layer.comm.loopback import LoopbackChannel

    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    channel = LoopbackChannel(max_tokens_per_rank=7)
    ep = ExpertParallel.over(channel, placement=[0] * 16)
    assert (ep.ep_rank, ep.ep_size, ep.max_tokens_per_rank) == (0, 1, 7)
    layer = make("deepseek_v3", ep, seed=2)
    assert torch.equal(layer(x), make("deepseek_v3", seed=2)(x))
    with pytest.raises(ConfigError, match="placement places 16 experts, but the layer has 12"):
        make("deepseek_v4", ep)
    ep.destroy()
    assert channel.destroyed
