"""The whole path on this machine (``moe-layer demo``): released layouts in, outputs against an fp64 oracle out.

A process a rank, over gloo on the loopback interface (NCCL where every rank has a GPU of its own). The ranks only load
and run; the oracle works in the parent process, from the same files, with none of the layer's code.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from moe_layer.backend import resolve_device
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.config import MoEConfig
from moe_layer.errors import ConfigError
from moe_layer.oracle import OracleLayer, relative_l2
from moe_layer.run import ERROR_LIMIT
from moe_layer.stages import STAGES
from moe_layer.weights import held_bytes

TIMED_RUNS = 3
# Small enough for two cores; blocks of 128 and of 32 fit several times, experts spread over V3's eight groups.
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"hidden": 1024, "inter": 512, "experts": 32, "top_k": 8},
    "deepseek_v41": {"hidden": 768, "inter": 384, "experts": 48, "top_k": 6},
    "kimi_k3": {"hidden": 1024, "inter": 512, "experts": 64, "top_k": 16},
}
MODELS = tuple(SIZES)
TITLES = {"deepseek_v3": "DeepSeek-V3", "deepseek_v41": "DeepSeek-V4.1", "kimi_k3": "Kimi-K3"}


@dataclass(frozen=True)
class Job:
    """One model of the demo, as its ranks see it: a checkpoint, a layer, and the tokens of each rank."""

    name: str
    checkpoint: str
    layer: int
    inputs: str
    tokens_per_rank: tuple[int, ...]


def run_demo(
    *,
    models: Sequence[str] = MODELS,
    ep_size: int = 4,
    tokens: int = 48,
    hidden_size: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the checkpoints, run the ranks, compare with the oracle.

    Args:
        models: of :data:`MODELS`.
        ep_size: ranks, a process each.
        tokens: of rank 0; the others have fewer, the last of several has none.
        hidden_size: a multiple of 256; experts are half as wide. None: :data:`SIZES`.
        seed: of weights and tokens.
        device: ``"cpu"`` or ``"cuda"``; None: CUDA where there is a GPU.
        progress: say on stderr what is being done.

    Returns:
        A report that ``json.dumps`` takes; ``ok`` is False if an error exceeds ``error_limit``.

    Raises:
        ConfigError: an unknown model, or a size that the layouts do not allow.
        UnsupportedDeviceError: no such device.
    """
    for name in models:
        if name not in SIZES:
            raise ConfigError(f"unknown model {name!r}; the demo has {', '.join(MODELS)}")
    if hidden_size is not None and hidden_size % 256:
        raise ConfigError(f"--hidden must be a multiple of 256, so that scale blocks are whole, got {hidden_size}")
    kind = resolve_device(device).type
    begin = time.perf_counter()

    def say(what: str) -> None:
        if progress:
            print(f"[{time.perf_counter() - begin:5.1f} s] {what}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="moe-layer-demo-") as folder:
        jobs = []
        for name in models:
            say(f"writing a checkpoint in the layout of {TITLES[name]}")
            jobs.append(_prepare(Path(folder), name, ep_size, tokens, hidden_size, seed))
        say(f"starting {ep_size} ranks ({kind}); they load and run each layer")
        mp.start_processes(_rank, args=(ep_size, jobs, folder, kind), nprocs=ep_size, start_method="spawn")
        results = []
        for job in jobs:
            say(f"{TITLES[job.name]}: the same layer in fp64, on one process")
            results.append(_judge(job, Path(folder), ep_size))
        say("done")
    return {
        "ok": all(r["relative_l2_error"] <= ERROR_LIMIT for r in results),
        "error_limit": ERROR_LIMIT,
        "ep_size": ep_size,
        "device": kind,
        "seconds": time.perf_counter() - begin,
        "models": results,
    }


def token_counts(tokens: int, ep_size: int) -> tuple[int, ...]:
    """Different for every rank as far as possible: ``tokens`` on rank 0, fewer on the next ones, none on the last."""
    if ep_size == 1:
        return (tokens,)
    return tuple(max(1, tokens * (ep_size - 1 - r) // (ep_size - 1)) for r in range(ep_size - 1)) + (0,)


def _prepare(folder: Path, name: str, ep_size: int, tokens: int, hidden: int | None, seed: int) -> Job:
    from moe_layer.models.synthetic import write_checkpoint

    sizes = SIZES[name] if hidden is None else {**SIZES[name], "hidden": hidden, "inter": hidden // 2}
    checkpoint = write_checkpoint(folder / name, name, **sizes, seed=seed, shards=3, values=False)
    counts = token_counts(tokens, ep_size)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), sizes["hidden"], generator=generator).bfloat16()
    inputs = folder / f"{name}-inputs.safetensors"
    save_file({str(r): part.contiguous() for r, part in enumerate(x.split(counts))}, inputs)
    return Job(name, str(checkpoint.path), checkpoint.moe_layers[-1], str(inputs), counts)


def _rank(rank: int, ep_size: int, jobs: Sequence[Job], folder: str, kind: str) -> None:
    """One rank's whole life; leaves its outputs and a report of each job in ``folder``."""
    from moe_layer.layer import MoELayer
    from moe_layer.parallel import ExpertParallel
    from moe_layer.stages import StageTimer

    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ep_size))
    # All ranks are here: the loopback interface needs no name service and no open port.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/rendezvous", ep_size)
    # Ranks that share a GPU cannot use NCCL; gloo then goes through host memory.
    nccl = gpus >= ep_size
    dist.init_process_group(
        "nccl" if nccl else "gloo", store=store, rank=rank, world_size=ep_size, device_id=device if nccl else None
    )
    group = dist.group.WORLD if ep_size > 1 else None
    with ExpertParallel(group, max_tokens_per_rank=max(max(job.tokens_per_rank) for job in jobs), device=device) as ep:
        for job in jobs:
            most = max(job.tokens_per_rank)
            start = time.perf_counter()
            layer = MoELayer.from_pretrained(job.checkpoint, job.layer, ep=ep, device=device)
            load_seconds = time.perf_counter() - start
            x = load_file(job.inputs)[str(rank)].to(device)
            y = layer(x, tokens_per_rank=most)
            layer.profiler = timer = StageTimer(device)
            for _ in range(TIMED_RUNS):
                again = layer(x, tokens_per_rank=most)
            report = {
                "y": y.cpu(),
                "repeat": torch.tensor(torch.equal(y, again)),
                "bytes": torch.tensor(held_bytes(layer)),
                "load_seconds": torch.tensor(load_seconds, dtype=torch.float64),
            }
            for stage, seconds in timer.seconds().items():
                report[f"stage.{stage}"] = torch.tensor(seconds / TIMED_RUNS, dtype=torch.float64)
            save_file(report, f"{folder}/{job.name}-{rank}.safetensors")
            if rank == 0:
                names = {"weights": layer.weight_format, "activations": layer.activation_format}
                names |= {"backend": layer.backend.name, "protocol": layer.comm.protocol}
                save_file({"none": torch.empty(0)}, f"{folder}/{job.name}.safetensors", metadata=names)
    dist.destroy_process_group()


def _judge(job: Job, folder: Path, ep_size: int) -> dict[str, Any]:
    """The ranks' outputs against the oracle, as one row of the table."""
    from safetensors import safe_open

    ranks = [load_file(folder / f"{job.name}-{r}.safetensors") for r in range(ep_size)]
    with safe_open(str(folder / f"{job.name}.safetensors"), framework="pt") as handle:
        names = handle.metadata()
    cfg = MoEConfig.from_pretrained(job.checkpoint)
    placement = ExpertPlacement.contiguous(cfg.n_routed_experts, ep_size)
    inputs = load_file(job.inputs)
    expected = OracleLayer(job.checkpoint, job.layer).forward(
        torch.cat([inputs[str(r)] for r in range(ep_size)]),
        names["activations"],
        ranks=[placement.local_experts(r) for r in range(ep_size)],
    )
    return {
        "model": job.name,
        "model_type": cfg.model_type,
        "layer": job.layer,
        "hidden_size": cfg.hidden_size,
        "n_routed_experts": cfg.n_routed_experts,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "weight_format": names["weights"],
        "activation_format": names["activations"],
        "backend": names["backend"],
        "protocol": names["protocol"],
        "tokens_per_rank": list(job.tokens_per_rank),
        "relative_l2_error": relative_l2(torch.cat([r["y"] for r in ranks]), expected),
        "same_bits_when_repeated": all(bool(r["repeat"]) for r in ranks),
        "bytes_per_rank": [int(r["bytes"]) for r in ranks],
        "load_seconds": max(float(r["load_seconds"]) for r in ranks),
        # The slowest rank's time: dispatch and combine include waiting for the others.
        "stage_seconds": {
            stage: max(float(r[f"stage.{stage}"]) for r in ranks) for stage in STAGES if f"stage.{stage}" in ranks[0]
        },
    }


def print_report(report: dict[str, Any]) -> None:
    """The report as two tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    rows = report["models"]

    def table(*columns: str, left: Sequence[str]) -> Table:
        result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for column in columns:
            result.add_column(column, justify="left" if column in left else "right")
        return result

    main = table("model", "E, k", "format", "tokens/rank", "L2 error", "MiB/rank", left=("model", "format"))
    for row in rows:
        color = "green" if row["relative_l2_error"] <= report["error_limit"] else "red"
        main.add_row(
            TITLES[row["model"]],
            f"{row['n_routed_experts']}, {row['num_experts_per_tok']}",
            f"{row['weight_format']} → {row['activation_format']}",
            " ".join(map(str, row["tokens_per_rank"])),
            f"[{color}]{row['relative_l2_error']:.2e}[/]",
            f"{max(row['bytes_per_rank']) / 2**20:.1f}",
        )
    console.print(main)
    times = table(
        "ms a stage, slowest rank", *(TITLES[row["model"]] for row in rows), left=("ms a stage, slowest rank",)
    )
    for stage in STAGES:
        times.add_row(stage, *(f"{row['stage_seconds'].get(stage, 0.0) * 1e3:.1f}" for row in rows))
    console.print(times)
    first = rows[0]
    verdict = "within" if report["ok"] else "[red]BEYOND[/]"
    console.print(
        f"{report['ep_size']} ranks on {report['device']}, {first['backend']} compute, {first['protocol']} transport; "
        f"errors against fp64 {verdict} the limit of {report['error_limit']:.1e}; {report['seconds']:.1f} s in all"
    )
