"""One layer of a checkpoint on the tokens of a file (``moe-layer run``), on one process or under torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_layer.backend import resolve_device
from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError, ConfigError, TensorError
from moe_layer.layer import MoELayer
from moe_layer.oracle import OracleLayer, relative_l2
from moe_layer.parallel import ExpertParallel
from moe_layer.quant import get_format
from moe_layer.stages import StageTimer
from moe_layer.weights import held_bytes

# The paper's bound on a layer's relative L2 error against fp64 (its Appendix B).
ERROR_LIMIT = 5.7e-3


def run_layer(
    checkpoint: str | os.PathLike[str],
    layer: int,
    *,
    input_file: str | None = None,
    random_tokens: int | None = None,
    output_file: str | None = None,
    check: bool = False,
    repeat: int = 3,
    activation_format: str | None = None,
    quantize_at: str = "source",
    protocol: str = "auto",
    device: str | None = None,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Load a layer, run it and report; collective under torchrun.

    Args:
        checkpoint: a checkpoint folder.
        layer: number of the decoder layer.
        input_file: safetensors file with ``hidden_states`` ``[T, hidden]`` and, for hash layers, ``input_ids`` ``[T]``.
        random_tokens: T tokens drawn from a normal distribution instead, from ``seed``.
        output_file: where rank 0 writes ``hidden_states`` ``[T, hidden]``, and the router's ``topk_ids`` and
            ``topk_weights`` ``[T, k]`` (a trace for ``bench … --routing trace:FILE``).
        check: compare with the fp64 oracle on rank 0.
        repeat: timed runs, after one that warms up.
        activation_format, quantize_at, protocol, device: as of :class:`MoELayer` and :class:`ExpertParallel`.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        MoELayerError: a checkpoint, file or option that does not fit.
    """
    cfg = MoEConfig.from_pretrained(checkpoint)
    if output_file is not None and (Path(output_file).is_dir() or not Path(output_file).absolute().parent.is_dir()):
        raise ConfigError(f"--output {output_file}: not a file in a folder that exists")
    with _group(device) as (group, where):
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        x, input_ids = _tokens(cfg, input_file, random_tokens, seed)
        cuts = [r * len(x) // size for r in range(size + 1)]
        most = max(b - a for a, b in pairwise(cuts))
        mine = slice(cuts[rank], cuts[rank + 1])
        ep = ExpertParallel(group, protocol, max_tokens_per_rank=max(1, most), device=where)
        start = time.perf_counter()
        module = MoELayer.from_pretrained(
            checkpoint, layer, ep=ep, activation_format=activation_format, device=where, quantize_at=quantize_at
        )
        load_seconds = time.perf_counter() - start

        own = x[mine].to(where)
        own_ids = None if input_ids is None else input_ids[mine].to(where)
        y = module(own, tokens_per_rank=most, input_ids=own_ids)  # warms up
        timer = StageTimer(where)
        module.profiler = timer
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            y = module(own, tokens_per_rank=most, input_ids=own_ids)
            if where.type == "cuda":
                torch.cuda.synchronize(where)
            seconds.append(time.perf_counter() - start)
        stages = {stage: spent / repeat for stage, spent in timer.seconds().items()}
        ranks = [module.placement.local_experts(r) for r in range(size)]
        y = _gather(y, group, cuts)
        report: dict[str, Any] | None = None
        if rank == 0:
            error = None
            if check:
                oracle = OracleLayer(checkpoint, layer)
                # What travels unquantized has been rounded to the layer's dtype.
                sent = x if quantize_at == "source" else x.to(get_format(module.dispatch_format).data_dtype)
                expected = oracle.forward(sent, module.activation_format, ranks=ranks, input_ids=input_ids)
                error = relative_l2(y, expected)
            if output_file is not None:
                save_file({"hidden_states": y, **_routing(module, x, input_ids)}, output_file)
            report = {
                "ok": error is None or error <= ERROR_LIMIT,
                "model_type": cfg.model_type,
                "layer": layer,
                "tokens": len(x),
                "ranks": size,
                "device": str(where),
                "protocol": module.comm.protocol,
                "backend": module.backend.name,
                "weight_format": module.weight_format,
                "activation_format": module.activation_format,
                "quantize_at": module.quantize_at,
                "experts_on_rank_0": len(module.local_experts),
                "bytes_on_rank_0": held_bytes(module),
                "load_seconds": load_seconds,
                "seconds": seconds,
                "stage_seconds": stages,
                "relative_l2_error": error,
                "error_limit": ERROR_LIMIT,
                "output": output_file,
            }
        ep.destroy()
    return report


@contextmanager
def _group(device: str | None) -> Iterator[tuple[dist.ProcessGroup | None, torch.device]]:
    """The group that torchrun set up, if any, and this process's device."""
    size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if device in (None, "cuda") and torch.cuda.is_available():
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
    where = resolve_device(device)
    if size == 1:
        yield None, where
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    # Processes that share a GPU cannot use NCCL.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nccl = where.type == "cuda" and dist.is_nccl_available() and local <= torch.cuda.device_count()
    dist.init_process_group("nccl" if nccl else "gloo", device_id=where if nccl else None)
    try:
        yield dist.group.WORLD, where
    finally:
        dist.destroy_process_group()


def _tokens(
    cfg: MoEConfig, file: str | None, random_tokens: int | None, seed: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states ``[T, hidden]`` and token ids ``[T]``, on the CPU, the same on every rank."""
    if file is None:
        if not random_tokens:
            raise ConfigError("give an input file or a number of random tokens")
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(random_tokens, cfg.hidden_size, generator=generator).bfloat16()
        ids = torch.randint(cfg.vocab_size, (random_tokens,), generator=generator) if cfg.vocab_size else None
        return x, ids
    if not Path(file).is_file():
        raise CheckpointError(f"{file}: no such file")
    try:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
            tensors = {n: handle.get_tensor(n) for n in ("hidden_states", "input_ids") if n in names}
    except SafetensorError as error:
        raise CheckpointError(f"{file}: truncated or damaged, no complete safetensors file: {error}") from None
    if "hidden_states" not in tensors:
        raise TensorError(f"{file} holds no hidden_states; it has {', '.join(names) or 'no tensors'}")
    x, ids = tensors["hidden_states"], tensors.get("input_ids")
    if x.dim() != 2 or x.shape[1] != cfg.hidden_size:
        raise TensorError(
            f"{file}: hidden_states is {list(x.shape)}, expected [T, {cfg.hidden_size}] ({cfg.model_type})"
        )
    return x, ids


@torch.no_grad()
def _routing(module: MoELayer, x: torch.Tensor, input_ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Which experts the router gives all tokens, and with which weights, on the CPU."""
    where = module.device
    ids, weights = module.gate(x.to(where), None if input_ids is None else input_ids.to(where))
    return {"topk_ids": ids.cpu(), "topk_weights": weights.cpu()}


def _gather(y: torch.Tensor, group: dist.ProcessGroup | None, cuts: list[int]) -> torch.Tensor:
    """Every rank's rows on the CPU of every rank, in order."""
    if group is None:
        return y.cpu()
    most = max(b - a for a, b in pairwise(cuts))
    padded = y.new_zeros(most, y.shape[1])
    padded[: len(y)] = y
    if dist.get_backend(group) == "gloo":
        padded = padded.cpu()
    parts = [torch.empty_like(padded) for _ in range(len(cuts) - 1)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: b - a] for part, (a, b) in zip(parts, pairwise(cuts))]).cpu()


def print_report(report: dict[str, Any]) -> None:
    """The report for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    r = report
    best = min(r["seconds"])
    table.add_row("layer", f"{r['model_type']} layer {r['layer']}, {r['weight_format']} weights")
    table.add_row("ranks", f"{r['ranks']} × {r['device']}, {r['backend']} compute, {r['protocol']} transport")
    table.add_row("rank 0", f"{r['experts_on_rank_0']} experts, {r['bytes_on_rank_0'] / 2**20:.1f} MiB")
    table.add_row("loaded in", f"{r['load_seconds']:.2f} s")
    at_target = ", quantized at the target" if r["quantize_at"] == "target" else ""
    table.add_row("tokens", f"{r['tokens']}, {r['activation_format']} activations{at_target}")
    table.add_row("time", f"{best * 1e3:.2f} ms (best of {len(r['seconds'])})")
    table.add_row("of which", ", ".join(f"{stage} {s * 1e3:.2f}" for stage, s in r["stage_seconds"].items()) + " ms")
    if r["relative_l2_error"] is not None:
        verdict = "within" if r["ok"] else "BEYOND"
        table.add_row(
            "error", f"{r['relative_l2_error']:.2e} relative L2, {verdict} the limit of {r['error_limit']:.1e}"
        )
    if r["output"]:
        table.add_row("output", r["output"])
    console.print(table)
