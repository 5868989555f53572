"""Whole tiny models under transformers' own expert parallelism, through our dispatch and combine (real ranks, gloo)."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from distributed_harness import RanksFailed
from layer_oracle import rel_l2
from tiny_models import VOCAB, tiny_model

pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers has no EP interface")

WORLD = 4  # transformers' mesh spans every process there is
PATIENCE_S = 200  # four processes import transformers on the first call


def multiplying_experts(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts that rely on what transformers promises of other ranks' experts: id num_experts and weight 0."""
    out = torch.zeros_like(x)
    for j in range(ids.shape[1]):
        gate, up = torch.einsum(
            "th,tnh->tn", x, module.gate_up_proj[ids[:, j].clamp(max=module.num_experts - 1)]
        ).chunk(2, 1)
        h = torch.nn.functional.silu(gate) * up
        y = torch.einsum("tn,thn->th", h, module.down_proj[ids[:, j].clamp(max=module.num_experts - 1)])
        out += y * weights[:, j, None]
    return out


def parallel_logits(
    ranks: Any, path: str, tokens: torch.Tensor, mesh: dict[str, int], experts: str, options: dict
) -> Any:
    """This rank's batch (and, where ranks share one, the same as its neighbour's) through the sharded model."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.integrations.moe import ExpertsInterface

    from moe_layer.models import transformers_adapter

    transformers_adapter.register(**options)
    ExpertsInterface.register("multiplying", multiplying_experts)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation=experts,
        distributed_config=DistributedConfig(**mesh, ep_implementation="moe_layer"),
    ).eval()
    experts_modules = [m for n, m in model.named_modules() if n.endswith(".experts")]
    implementations = [m.forward.__closure__ for m in experts_modules]
    communicators = [c.cell_contents for closure in implementations for c in closure or ()]
    batches = tokens.chunk(mesh["fsdp_size"])
    batch = batches[ranks.rank // mesh.get("tp_size", 1)]
    with torch.no_grad():
        logits = model(batch).logits
        again = model(batch[:, :3]).logits
    channels = {id(c.ep.channel) for c in communicators if hasattr(c, "ep")}
    logits, again = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (logits, again))
    local = {m.gate_up_proj.to_local().shape[0] for m in experts_modules}
    del model, experts_modules, implementations, communicators
    gc.collect()
    return logits, again, len(channels), local


@pytest.mark.parametrize("experts", ["eager", "moe_layer", "grouped_mm", "multiplying"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_each_rank_has_its_own_batch(run_ranks: Any, tmp_path: Any, name: str, experts: str) -> None:
    model = tiny_model(name, seed=5)
    model.set_experts_implementation("eager")
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, VOCAB, (WORLD, 11))
    mesh = {"fsdp_size": WORLD, "ep_size": WORLD}
    results = run_ranks(parallel_logits, WORLD, str(tmp_path), tokens, mesh, experts, {}, timeout_s=PATIENCE_S)
    with torch.no_grad():
        truth = model(tokens).logits
        short = model(tokens[:, :3]).logits
    for rank, (logits, again, channels, local) in enumerate(results):
        assert rel_l2(logits, truth[rank : rank + 1]) < 1e-5
        assert rel_l2(again, short[rank : rank + 1]) < 1e-5
        assert channels == 1, "all layers must share one channel"
        assert local == {16 // WORLD}


@pytest.mark.parametrize("mesh", [
    {"fsdp_size": 4, "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    {"fsdp_size": 1, "tp_size": 4, "ep_size": 4},
], ids=str)  # fmt: skip
def test_other_meshes(run_ranks: Any, tmp_path: Any, mesh: dict[str, int]) -> None:
    """Two copies of each expert; ranks of a TP group that share a batch (11 tokens, no multiple of their number)."""
    model = tiny_model("qwen3_moe", seed=6)
    model.set_experts_implementation("eager")
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, VOCAB, (mesh["fsdp_size"], 11))
    results = run_ranks(parallel_logits, WORLD, str(tmp_path), tokens, mesh, "moe_layer", {}, timeout_s=PATIENCE_S)
    with torch.no_grad():
        truth = model(tokens).logits
    for rank, (logits, *_) in enumerate(results):
        row = rank // mesh.get("tp_size", 1)
        assert rel_l2(logits, truth[row : row + 1]) < 1e-5


def test_too_many_tokens(run_ranks: Any, tmp_path: Any) -> None:
    model = tiny_model("qwen3_moe", seed=7)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, VOCAB, (WORLD, 11))
    mesh = {"fsdp_size": WORLD, "ep_size": WORLD}
    with pytest.raises(RanksFailed) as error:
        run_ranks(
            parallel_logits,
            WORLD,
            str(tmp_path),
            tokens,
            mesh,
            "moe_layer",
            {"max_tokens_per_rank": 10},
            timeout_s=PATIENCE_S,
        )
    assert re.search(
        r"CapacityError: rank \d: 11 tokens to dispatch, but runtime_max_tokens_per_rank is 10", str(error.value)
    )
