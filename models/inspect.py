"""What a checkpoint holds and what a rank will load of it, from its config and file headers alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_layer.comm.placement import ExpertPlacement
from moe_layer.config import MoEConfig
from moe_layer.models.checkpoint import Checkpoint
from moe_layer.models.config import read_config
from moe_layer.models.plan import FACTOR_BYTES, LayerPlan, MatrixGroup, Problems, check_layer, moe_layers, plan_layer

SHOWN_PROBLEMS = 20  # lines of each list that print_report shows; the report itself holds all


def inspect_checkpoint(path: str | os.PathLike[str], *, layer: int | None = None, ep_size: int = 8) -> dict[str, Any]:
    """Check every tensor of the MoE layers, of all experts, without reading tensor data.

    Args:
        path: a checkpoint folder or file.
        layer: this decoder layer only; None for all.
        ep_size: ranks that the experts are split over, in contiguous blocks.

    Returns:
        A report that ``json.dumps`` takes: ``path``; ``ok``; ``config`` (the fields of
        :class:`~moe_layer.config.MoEConfig`); ``announced_format``, which the config promises; ``files``, ``tensors``
        and ``file_bytes`` of the checkpoint; ``missing_files``; ``moe_layers``; ``formats``, tensor group → format →
        number of layers; ``layers``, with the formats and bytes of each; ``ranks``, with the experts and bytes that
        each rank holds of all of these layers; ``missing`` and ``unexpected`` tensor names; ``problems``, one sentence
        each.

    Raises:
        ConfigError: the config is not understood, or ``layer`` is not MoE.
        CheckpointError: there is no checkpoint, or its index is damaged.
    """
    config = read_config(path)
    if layer is not None:
        check_layer(config, layer)
    problems = Problems(collect=True)
    with Checkpoint(path) as checkpoint:
        sizes = {f: _size(checkpoint, f) for f in checkpoint.files}
        layers = [layer] if layer is not None else moe_layers(config)
        plans = [p for i in layers if (p := _plan(checkpoint, config, i, problems)) is not None]
        report: dict[str, Any] = {
            "path": str(checkpoint.path),
            "ok": not problems.messages,
            "config": {k: v for k, v in asdict(config).items() if k != "extra"},
            "announced_format": config.quantization.expert_format if config.quantization else None,
            "files": len(sizes),
            "tensors": len(checkpoint),
            "file_bytes": sum(size or 0 for size in sizes.values()),
            "missing_files": [f for f, size in sizes.items() if size is None],
        }
    described = [_describe(p) for p in plans]
    report.update(
        moe_layers=layers,
        formats=_count_formats(d["formats"] for d in described),
        layers=described,
        ranks=_ranks(config, plans, ep_size),
        missing=problems.missing,
        unexpected=problems.unexpected,
        problems=problems.messages,
    )
    return report


def print_report(report: dict[str, Any]) -> None:
    """Show a report of :func:`inspect_checkpoint` on the terminal."""
    console = Console()
    config = report["config"]
    facts = Table(show_header=False, box=None, pad_edge=False)
    layers = report["moe_layers"]
    latent = config["routed_expert_hidden_size"]
    for name, value in (
        ("checkpoint", report["path"]),
        ("model", config["model_type"]),
        ("on disk", f"{report['files']} files, {report['tensors']} tensors, {_human(report['file_bytes'])}"),
        ("MoE layers", f"{len(layers)} of {config['num_hidden_layers']}" + (f" (from {layers[0]})" if layers else "")),
        ("experts", f"{config['n_routed_experts']} routed, top-{config['num_experts_per_tok']}, "
                    f"{config['n_shared_experts']} shared"),
        ("widths", f"hidden {config['hidden_size']}, expert {config['moe_intermediate_size']}"
                   + (f", latent {latent}" if latent else "")),
        ("router", f"{config['scoring_func']}, scale {config['routed_scaling_factor']:g}"),
        ("config says", report["announced_format"] or "not quantized"),
    ):  # fmt: skip
        facts.add_row(name, str(value))
    console.print(facts)

    formats = Table("tensors", "stored as", "layers")
    for group, found in report["formats"].items():
        for fmt, count in found.items():
            formats.add_row(group, fmt, str(count))
    console.print(formats)

    ranks = Table("rank", "experts", "routed", "shared", "router and latent", "total")
    for first, last, row in _runs(report["ranks"]):
        name = str(first) if first == last else f"{first}–{last}"
        sizes = (row[k] for k in ("routed_bytes", "shared_bytes", "router_bytes", "total_bytes"))
        ranks.add_row(name, str(row["experts"]), *map(_human, sizes))
    console.print(ranks)

    for title in ("missing_files", "missing", "unexpected", "problems"):
        lines = report[title]
        if lines:
            console.print(f"[bold]{title.replace('_', ' ')}[/bold] ({len(lines)})")
            for line in lines[:SHOWN_PROBLEMS]:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
            if len(lines) > SHOWN_PROBLEMS:
                console.print(f"  … and {len(lines) - SHOWN_PROBLEMS} more (--json shows all)")
    if report["ok"]:
        console.print("nothing missing, nothing unexpected")


def _plan(checkpoint: Checkpoint, config: MoEConfig, layer: int, problems: Problems) -> LayerPlan | None:
    with problems.guard():
        return plan_layer(checkpoint, config, layer, range(config.n_routed_experts), problems)
    return None


def _size(checkpoint: Checkpoint, file: str) -> int | None:
    try:
        return (checkpoint.folder / file).stat().st_size
    except OSError:
        return None


def _describe(plan: LayerPlan) -> dict[str, Any]:
    formats = {"routed gate_up": plan.gate_up.format, "routed down": plan.down.format}
    if plan.shared_gate_up is not None and plan.shared_down is not None:
        formats |= {"shared gate_up": plan.shared_gate_up.format, "shared down": plan.shared_down.format}
    for name, info in (("router", plan.router), ("latent", plan.latent_down)):
        if info is not None:
            formats[name] = info.dtype.lower()
    return {
        "layer": plan.layer,
        "module": plan.names.block,
        "formats": {k: v for k, v in formats.items() if v is not None},
        "expert_bytes": _expert_bytes(plan),
        "shared_bytes": _shared_bytes(plan),
        "router_bytes": _router_bytes(plan),
    }


def _expert_bytes(plan: LayerPlan) -> int:
    """Of one routed expert. Only these keep the scale of their inputs, one a group."""
    groups = (plan.gate_up, plan.down)
    return sum(g.expert_nbytes() + (FACTOR_BYTES if g.has_input_scale else 0) for g in groups)


def _shared_bytes(plan: LayerPlan) -> int:
    groups: tuple[MatrixGroup | None, ...] = (plan.shared_gate_up, plan.shared_down)
    return sum(g.expert_nbytes() for g in groups if g is not None)


def _router_bytes(plan: LayerPlan) -> int:
    return sum(t.nbytes for t in plan.singles)


def _count_formats(layers: Iterable[dict[str, str]]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for formats in layers:
        for group, fmt in formats.items():
            counts.setdefault(group, Counter())[fmt] += 1
    return {group: dict(found) for group, found in counts.items()}


def _ranks(config: MoEConfig, plans: list[LayerPlan], ep_size: int) -> list[dict[str, int]]:
    placement = ExpertPlacement.contiguous(config.n_routed_experts, ep_size)
    held = Counter(placement.rank_of)
    expert, shared, router = (sum(f(p) for p in plans) for f in (_expert_bytes, _shared_bytes, _router_bytes))
    return [
        {
            "rank": rank,
            "experts": held[rank],
            "routed_bytes": held[rank] * expert,
            "shared_bytes": shared,
            "router_bytes": router,
            "total_bytes": held[rank] * expert + shared + router,
        }
        for rank in range(ep_size)
    ]


def _runs(ranks: list[dict[str, int]]) -> list[tuple[int, int, dict[str, int]]]:
    """(first rank, last rank, entry) of neighbours that hold the same number of experts."""
    runs: list[tuple[int, int, dict[str, int]]] = []
    for entry in ranks:
        if runs and runs[-1][2]["experts"] == entry["experts"]:
            runs[-1] = (runs[-1][0], entry["rank"], runs[-1][2])
        else:
            runs.append((entry["rank"], entry["rank"], entry))
    return runs


def _human(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
