"""Time and memory of loading one rank's share of an MoE layer, beside reading the same bytes with ``safe_open`` alone.

    python -m moe_layer.benchmarks.load_checkpoint
    python -m moe_layer.benchmarks.load_checkpoint --release kimi_k3 --gib 1.5 --ep 2 --json

Writes a random checkpoint in a release layout with the model's own expert shapes, and loads one rank of it with a warm
page cache. The baseline copies every tensor that the loader reads out of the mapped file, and does nothing else. Every
run has a fresh process, and runs of both alternate, in both orders; the table shows medians, and the ratio of the
medians and of the fastest runs, which other work on the machine disturbs least. Memory is the growth of a process's
anonymous pages, sampled; the page cache is not counted, as it is given back when needed.

Limits: time at most 1.3 × the baseline (fastest runs), memory at most the loaded bytes + one expert.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.models.checkpoint import Checkpoint
from moe_layer.models.config import read_config
from moe_layer.models.loader import LayerTensors, load_layer
from moe_layer.models.plan import LayerPlan, plan_layer
from moe_layer.models.synthetic import write_checkpoint

TIME_LIMIT = 1.3
SAMPLE_S = 0.002

# release → (the model whose shapes it has, bits of a weight)
RELEASES = {
    "deepseek_v3": ("deepseek_v3", 8),
    "deepseek_v41": ("deepseek_v41", 4),
    "kimi_k3": ("kimi_k3", 4),
    "kimi_k25": ("kimi_k2", 4),
    "kimi_linear": ("kimi_linear", 16),
    "deepseek_v3_modelopt": ("deepseek_v3", 4),
    "deepseek_v3_fused": ("deepseek_v3", 16),
}
HIDDEN_SIZE = {"kimi_k3": 7168}  # where the experts' width is another, the latent one


@dataclass
class Result:
    """One release. Bytes are of one rank."""

    release: str
    experts: int
    tensors: int
    nbytes: int
    expert_bytes: int
    peak_bytes: int
    baseline_s: list[float]
    load_s: list[float]

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.load_s) / statistics.median(self.baseline_s)

    @property
    def best_ratio(self) -> float:
        return min(self.load_s) / min(self.baseline_s)

    @property
    def ok(self) -> bool:
        return self.best_ratio <= TIME_LIMIT and self.peak_bytes <= self.nbytes + self.expert_bytes


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this benchmark reads /proc/self/status")


@dataclass(frozen=True)
class Share:
    """What is loaded: one rank's part of a layer, and the tensors that this means, by file."""

    folder: Path
    layer: int
    placement: ExpertPlacement
    rank: int
    files: dict[str, list[str]]

    def load(self) -> LayerTensors:
        return load_layer(self.folder, self.layer, placement=self.placement, rank=self.rank, progress=False)

    def read_alone(self) -> list[torch.Tensor]:
        """The same bytes through ``safe_open``; of stacked experts, the same part."""
        experts = self.placement.local_experts(self.rank)
        out = []
        for file, names in self.files.items():
            with safe_open(str(self.folder / file), framework="pt", device="cpu") as handle:
                for name in names:
                    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                        out.append(handle.get_slice(name)[experts[0] : experts[-1] + 1].clone())
                    else:
                        out.append(handle.get_tensor(name).clone())
        return out

    def seconds(self, which: str) -> float:
        run = self.load if which == "load" else self.read_alone
        start = time.perf_counter()
        held = run()
        elapsed = time.perf_counter() - start
        del held
        return elapsed

    def peak_growth(self) -> int:
        """Most bytes by which anonymous memory exceeds its level before a load, the result held to the end."""
        start, peak, done = anonymous_bytes(), 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(SAMPLE_S):
                peak = max(peak, anonymous_bytes() - start)

        thread = threading.Thread(target=sample)
        thread.start()
        held = self.load()
        peak = max(peak, anonymous_bytes() - start)
        done.set()
        thread.join()
        return peak if held.nbytes else 0


def _answer(there: Connection, share: Share, method: str, arguments: tuple[Any, ...]) -> None:
    there.send(getattr(share, method)(*arguments))


def in_fresh_process(share: Share, method: str, *arguments: Any) -> Any:
    """``share.method(*arguments)`` in a process that has freed no memory before, which it could take again for free."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moe_layer.models.loader", "moe_layer.models.synthetic"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, share, method, arguments))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def tensor_names(plan: LayerPlan) -> list[str]:
    """Every tensor that the loader reads for a plan."""
    names = [t.name for t in plan.singles]
    for group in (plan.gate_up, plan.down, plan.shared_gate_up, plan.shared_down):
        for m in group.matrices.values() if group else ():
            names += [t.name for t in (m.data, m.scale, m.global_scale, m.input_scale, m.shape) if t is not None]
    return list(dict.fromkeys(names))


def measure(release: str, gib: float, ep_size: int, repeat: int, shards: int) -> Result:
    model, bits = RELEASES[release]
    width, inter = SHAPES[model].hidden_size, SHAPES[model].intermediate_size
    hidden = HIDDEN_SIZE.get(release, width)
    latent = width if hidden != width else None
    per_expert = 3 * width * inter * bits / 8
    experts = max(ep_size, round(gib * 2**30 / per_expert))
    rank = ep_size - 1
    with tempfile.TemporaryDirectory(prefix="moe-layer-load-") as name:
        folder = Path(name)
        written = write_checkpoint(
            folder, release, hidden=hidden, inter=inter, latent=latent, experts=experts, shards=shards, values=False
        )
        layer, placement = written.moe_layers[-1], ExpertPlacement.contiguous(experts, ep_size)
        local = placement.local_experts(rank)
        with Checkpoint(folder) as checkpoint:
            names = checkpoint.storage_order(tensor_names(plan_layer(checkpoint, read_config(folder), layer, local)))
            files: dict[str, list[str]] = {}
            for tensor in names:
                files.setdefault(checkpoint.file_of(tensor), []).append(tensor)

        share = Share(folder, layer, placement, rank, files)
        loaded = share.load()  # the files are in the page cache from here on
        nbytes = loaded.nbytes
        one = sum(t[0].nbytes for w in (loaded.gate_up, loaded.down) for t in (w.data, w.scale) if t is not None)
        del loaded
        times: dict[str, list[float]] = {"safe_open": [], "load": []}
        for i in range(repeat):
            for which in sorted(times, reverse=bool(i % 2)):
                times[which].append(in_fresh_process(share, "seconds", which))
        return Result(
            release=release,
            experts=len(local),
            tensors=len(names),
            nbytes=nbytes,
            expert_bytes=one,
            peak_bytes=in_fresh_process(share, "peak_growth"),
            baseline_s=times["safe_open"],
            load_s=times["load"],
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=sorted(RELEASES), help="default: three of them")
    parser.add_argument("--gib", type=float, default=1.5, help="size of the checkpoint's experts (default: 1.5)")
    parser.add_argument("--ep", type=int, default=2, help="ranks; the last one's share is loaded (default: 2)")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each (default: 9)")
    parser.add_argument("--shards", type=int, default=4, help="files of the checkpoint (default: 4)")
    parser.add_argument("--json", action="store_true", help="print the numbers for a program")
    options = parser.parse_args(arguments)
    releases = options.release or ["deepseek_v3", "deepseek_v41", "kimi_k3"]
    results = [measure(r, options.gib, options.ep, options.repeat, options.shards) for r in releases]
    if options.json:
        rows: list[dict[str, Any]] = [
            {**asdict(r), "median_ratio": r.median_ratio, "best_ratio": r.best_ratio, "ok": r.ok} for r in results
        ]
        print(json.dumps(rows, indent=2))
    else:
        table = Table("release", "experts", "MiB", "safe_open", "load", "ratio", "best", "peak − loaded")
        for r in results:
            baseline, load = statistics.median(r.baseline_s), statistics.median(r.load_s)
            extra = (r.peak_bytes - r.nbytes) / r.expert_bytes
            table.add_row(
                r.release, str(r.experts), f"{r.nbytes / 2**20:.0f}", f"{baseline:.3f} s", f"{load:.3f} s",
                f"{r.median_ratio:.2f}", f"{r.best_ratio:.2f}", f"{extra:+.2f} experts",
            )  # fmt: skip
        Console(width=100).print(table)
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
