"""``MoELayer.from_pretrained`` for every release layout, against two fp64 oracles that share no code with the loader.

The plain one below takes the values that the synthetic writer says it wrote; :class:`moe_layer.oracle.OracleLayer`
reads the files by itself and rounds activations where the layer does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_harness import Ranks

from moe_layer import CheckpointError, ConfigError, ExpertParallel, FormatError, MoEConfig, MoELayer
from moe_layer.models.synthetic import LayerValues, write_checkpoint
from moe_layer.models.synthetic_releases import RELEASES
from moe_layer.oracle import OracleLayer

LIMIT = 5.7e-3  # relative L2 error of a layer
SIZES: dict[str, Any] = {"hidden": 320, "inter": 192, "experts": 8, "top_k": 2, "vocab": 50}


def plain_oracle(cfg: MoEConfig, v: LayerValues, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """The layer in fp64, a token and an expert at a time, from the model's published equations."""
    x = x.double()
    clamp = cfg.swiglu_limit

    def mlp(row: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        g, u = gate.double() @ row, up.double() @ row
        if cfg.hidden_act == "situ":
            h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
        else:
            if clamp is not None:
                g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
            h = g / (1 + torch.exp(-g)) * u
        return down.double() @ h

    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        logits = v.router.double() @ row
        if cfg.scoring_func == "softmax":
            scores = logits.softmax(0)
        elif cfg.scoring_func == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = torch.log1p(torch.exp(logits)).sqrt()
        choice = scores if v.router_bias is None else scores + v.router_bias.double()
        if cfg.n_group > 1:
            groups = choice.view(cfg.n_group, -1)
            rank = groups.amax(1) if cfg.group_score == "max" else groups.sort(descending=True).values[:, :2].sum(1)
            kept = rank.sort(descending=True).indices[: cfg.topk_group]
            masked = torch.full_like(groups, -torch.inf)
            masked[kept] = groups[kept]
            choice = masked.flatten()
        if v.tid2eid is not None:
            chosen = v.tid2eid[ids[t]].tolist()
        else:
            chosen = choice.sort(descending=True).indices[: cfg.num_experts_per_tok].tolist()
        weights = scores[chosen]
        if cfg.norm_topk_prob:
            weights = weights / weights.sum()
        z = row if v.latent_down is None else v.latent_down.double() @ row
        y = sum(w * mlp(z, v.gate[e], v.up[e], v.down[e]) for w, e in zip(weights * cfg.routed_scaling_factor, chosen))
        if v.latent_up is not None:
            y = y / (y.square().mean() + cfg.rms_norm_eps).sqrt() * v.latent_norm.double()
            y = v.latent_up.double() @ y
        if v.shared_gate is not None:
            y = y + mlp(row, v.shared_gate, v.shared_up, v.shared_down)
        out[t] = y
    return out


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def tokens(count: int = 24, scale: float = 1.0, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, SIZES["hidden"], generator=generator) * scale
    return x.bfloat16(), torch.randint(0, SIZES["vocab"], (count,), generator=generator)


@pytest.mark.parametrize("release", RELEASES)
def test_bf16_activations_against_the_written_values(release: str, tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, release, shards=2, seed=3, **SIZES)
    cfg = MoEConfig.from_pretrained(tmp_path)
    x, ids = tokens()
    for number in ckpt.moe_layers:
        layer = MoELayer.from_pretrained(tmp_path, number, activation_format="bf16", device="cpu")
        expected = plain_oracle(cfg, ckpt.values[number], x, ids)
        assert error(layer(x, input_ids=ids), expected) < LIMIT, number


@pytest.mark.parametrize("release", sorted(set(RELEASES) - {"deepseek_v3_fused"}))
def test_implied_activations_against_the_file_reading_oracle(release: str, tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, release, shards=2, seed=4, values=False, **SIZES)
    x, ids = tokens()
    for number in ckpt.moe_layers:
        layer = MoELayer.from_pretrained(tmp_path, number, device="cpu")
        implied = {"b": "bf16", "i": "bf16", "f": "fp8", "m": "mxfp8", "n": "nvfp4"}[layer.weight_format[0]]
        assert layer.activation_format == implied
        oracle = OracleLayer(tmp_path, number)
        expected = oracle.forward(x, layer.activation_format, ranks=[range(8)], input_ids=ids)
        assert error(layer(x, input_ids=ids), expected) < LIMIT, number


@pytest.mark.parametrize("release", ["deepseek_v4", "deepseek_v4_base", "deepseek_v41"])
def test_the_clamp_reaches_routed_and_shared_experts(release: str, tmp_path: Path) -> None:
    """Left out of the shared expert (sglang#23752, transformers#46018) or the routed ones (vllm-ascend#14363)."""
    ckpt = write_checkpoint(tmp_path, release, seed=6, config={"swiglu_limit": 1.5}, **SIZES)
    number = ckpt.moe_layers[-1]
    cfg = MoEConfig.from_pretrained(tmp_path)
    x, ids = tokens(scale=4.0)
    layer = MoELayer.from_pretrained(tmp_path, number, activation_format="bf16", device="cpu")
    got = layer(x, input_ids=ids)
    values = ckpt.values[number]
    assert error(got, plain_oracle(cfg, values, x, ids)) < LIMIT

    def unclamped(routed: bool) -> torch.Tensor:
        """The same with one of the two left out of the clamp."""
        names = ("gate", "up", "down") if routed else ("shared_gate", "shared_up", "shared_down")
        nothing = {n: torch.zeros_like(getattr(values, n)) for n in names}
        free = MoEConfig(**{**vars(cfg), "swiglu_limit": None})
        others = LayerValues(**{**vars(values), **nothing})
        whole = plain_oracle(free, values, x, ids) - plain_oracle(free, others, x, ids)
        return whole + plain_oracle(cfg, others, x, ids)

    assert error(got, unclamped(routed=True)) > 0.1
    assert error(got, unclamped(routed=False)) > 0.1


def test_the_latent_norm_follows_the_complete_sum(tmp_path: Path) -> None:
    """Kimi-K3: normalising before the shared experts and after the last routed one."""
    ckpt = write_checkpoint(tmp_path, "kimi_k3", seed=8, latent=96, **SIZES)
    cfg = MoEConfig.from_pretrained(tmp_path)
    assert cfg.routed_hidden_size == 96
    x, _ = tokens()
    layer = MoELayer.from_pretrained(tmp_path, 1, activation_format="bf16", device="cpu")
    assert error(layer(x), plain_oracle(cfg, ckpt.values[1], x)) < LIMIT
    without = MoEConfig(**{**vars(cfg), "rms_norm_eps": 10.0})
    assert error(layer(x), plain_oracle(without, ckpt.values[1], x)) > 0.1


def load_and_run(ranks: Ranks, folder: str, number: int, counts: list[int]) -> tuple[torch.Tensor, list[int], int]:
    """One rank's share: its rows of the output, its experts, and the bytes of their gate and up weights."""
    x, ids = tokens(sum(counts))
    mine = slice(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
    with ExpertParallel(ranks.group, max_tokens_per_rank=max(counts), device="cpu") as ep:
        layer = MoELayer.from_pretrained(folder, number, ep=ep, device="cpu", activation_format="bf16")
        y = layer(x[mine], input_ids=ids[mine])
        return y, layer.local_experts, layer.routed_experts.gate_up.data.nbytes


@pytest.mark.parametrize("release", ["deepseek_v3", "deepseek_v41", "kimi_k3", "deepseek_v4"])
def test_ranks_load_their_share(release: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> None:
    """Three ranks with 7, 0 and 12 tokens hold 3, 3 and 2 of the eight experts."""
    ckpt = write_checkpoint(tmp_path, release, seed=9, shards=3, **SIZES)
    number, counts = ckpt.moe_layers[0], [7, 0, 12]
    results = run_ranks(load_and_run, 3, str(tmp_path), number, counts)
    assert [experts for _, experts, _ in results] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [size for _, _, size in results] == [3 * results[2][2] // 2] * 2 + [results[2][2]]
    assert [y.shape[0] for y, _, _ in results] == counts
    x, ids = tokens(sum(counts))
    expected = plain_oracle(MoEConfig.from_pretrained(tmp_path), ckpt.values[number], x, ids)
    assert error(torch.cat([y for y, _, _ in results]), expected) < LIMIT


def test_errors_come_through(tmp_path: Path) -> None:
    ckpt = write_checkpoint(tmp_path, "deepseek_v3", hidden=64, inter=32, shards=2)
    with pytest.raises(ConfigError, match="layer 0 is not an MoE layer of this deepseek_v3"):
        MoELayer.from_pretrained(tmp_path, 0)
    with pytest.raises(FormatError, match="unknown format 'fp7'"):
        MoELayer.from_pretrained(tmp_path, 3, activation_format="fp7")
    (tmp_path / ckpt.tensors["model.layers.3.mlp.experts.0.up_proj.weight"]).unlink()
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-00002.safetensors: missing shard"):
        MoELayer.from_pretrained(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        MoELayer.from_pretrained(tmp_path / "elsewhere", 3)
