"""Time and memory of loading a rank's share of an MoE layer (``moe-layer bench load``), beside reading its bytes alone.

Writes a random checkpoint in a release layout with the model's own expert shapes, and loads one rank of it with a warm
page cache. The baseline copies every tensor that the loader reads out of the mapped file (and to the GPU), and does
nothing else. Every run has a fresh process, and runs of both alternate, in both orders; medians, and the ratio of the
medians and of the fastest runs, which other work on the machine disturbs least. Memory is the growth of a process's
anonymous pages, sampled (the page cache is not counted, as it is given back when needed), or a GPU's peak.

On a GPU weights are packed as its kernels read them. Limits: 1.3 times the baseline, with packing 1.5 times (fastest
runs); memory at most the loaded bytes and one expert, with packing two.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open

from moe_layer.backend import select_layout
from moe_layer.benchmarks.bench import LocalBench
from moe_layer.benchmarks.shapes import SHAPES
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.errors import ConfigError
from moe_layer.models.checkpoint import Checkpoint
from moe_layer.models.config import read_config
from moe_layer.models.loader import LayerTensors, load_layer
from moe_layer.models.plan import LayerPlan, plan_layer
from moe_layer.models.synthetic import write_checkpoint

TIME_LIMIT, PACKED_TIME_LIMIT = 1.3, 1.5
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
DEFAULT_RELEASES = ("deepseek_v3", "deepseek_v41", "kimi_k3")


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        release: a key of :data:`RELEASES`.
        gib: size of the checkpoint's experts.
        ep_size: ranks; the last one's share is loaded.
        shards: files of the checkpoint.
        device_type: where to.
        repeats: runs of each, loading and reading.
    """

    release: str
    gib: float = 1.5
    ep_size: int = 2
    shards: int = 4
    device_type: str = "cpu"
    repeats: int = 9


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
    device_type: str = "cpu"

    def load(self) -> LayerTensors:
        return load_layer(
            self.folder, self.layer, placement=self.placement, rank=self.rank, progress=False, device=self.device_type,
            layout=partial(select_layout, self.device_type, None),
        )  # fmt: skip

    def read_alone(self) -> list[torch.Tensor]:
        """The same bytes through ``safe_open``; of stacked experts, the same part."""
        experts = self.placement.local_experts(self.rank)
        out = []
        for file, names in self.files.items():
            with safe_open(str(self.folder / file), framework="pt", device="cpu") as handle:
                for name in names:
                    if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                        tensor = handle.get_slice(name)[experts[0] : experts[-1] + 1]
                    else:
                        tensor = handle.get_tensor(name)
                    out.append(tensor.clone() if self.device_type == "cpu" else tensor.to(self.device_type))
        return out

    def seconds(self, which: str) -> float:
        run = self.load if which == "load" else self.read_alone
        self._synchronize()  # makes the context, which is no part of loading
        start = time.perf_counter()
        held = run()
        self._synchronize()
        elapsed = time.perf_counter() - start
        del held
        return elapsed

    def _synchronize(self) -> None:
        if self.device_type == "cuda":
            torch.empty(1, device="cuda")
            torch.cuda.synchronize()

    def peak_growth(self) -> int:
        """Most bytes by which memory exceeds its level before a load, the result held to the end."""
        if self.device_type == "cuda":
            held = self.load()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() if held.nbytes else 0
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
    # Not a fork server with preloaded modules, though it starts faster: it imports from the current folder first, and
    # in the source tree the folder moe_layer/ would hide the installed package.
    context = multiprocessing.get_context("spawn")
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


def measure(case: Case) -> dict[str, Any]:
    """The case's results.

    Raises:
        ConfigError: an unknown release.
    """
    if case.release not in RELEASES:
        raise ConfigError(f"unknown release {case.release!r}; known: {', '.join(RELEASES)}")
    model, bits = RELEASES[case.release]
    width, inter = SHAPES[model].hidden_size, SHAPES[model].intermediate_size
    hidden = HIDDEN_SIZE.get(case.release, width)
    latent = width if hidden != width else None
    per_expert = 3 * width * inter * bits / 8
    experts = max(case.ep_size, round(case.gib * 2**30 / per_expert))
    rank = case.ep_size - 1
    with tempfile.TemporaryDirectory(prefix="moe-layer-load-") as name:
        folder = Path(name)
        written = write_checkpoint(
            folder, case.release, hidden=hidden, inter=inter, latent=latent, experts=experts, shards=case.shards,
            values=False,
        )  # fmt: skip
        layer, placement = written.moe_layers[-1], ExpertPlacement.contiguous(experts, case.ep_size)
        local = placement.local_experts(rank)
        with Checkpoint(folder) as checkpoint:
            names = checkpoint.storage_order(tensor_names(plan_layer(checkpoint, read_config(folder), layer, local)))
            files: dict[str, list[str]] = {}
            for tensor in names:
                files.setdefault(checkpoint.file_of(tensor), []).append(tensor)

        share = Share(folder, layer, placement, rank, files, case.device_type)
        loaded = share.load()  # the files are in the page cache from here on
        packed, nbytes = loaded.gate_up.packed is not None, loaded.nbytes
        one = sum(
            t[0].nbytes for w in (loaded.gate_up, loaded.down) for t in (w.data, w.scale) if t is not None
        )  # also of packed weights, whose stored tensors have sizes but no bytes
        del loaded
        times: dict[str, list[float]] = {"safe_open": [], "load": []}
        for i in range(case.repeats):
            for which in sorted(times, reverse=bool(i % 2)):
                times[which].append(1e6 * in_fresh_process(share, "seconds", which))
        peak = in_fresh_process(share, "peak_growth")
    load, baseline = statistics.median(times["load"]), statistics.median(times["safe_open"])
    best = min(times["load"]) / min(times["safe_open"])
    within = best <= (PACKED_TIME_LIMIT if packed else TIME_LIMIT) and peak <= nbytes + one * (2 if packed else 1)
    return {
        "us": load,
        "min_us": min(times["load"]),
        "max_us": max(times["load"]),
        "spread": (max(times["load"]) - min(times["load"])) / load,
        "floor_us": baseline,
        "ratio": load / baseline,
        "best_ratio": best,
        "experts": len(local),
        "tensors": len(names),
        "packed": packed,
        "nbytes": nbytes,
        "expert_bytes": one,
        "peak_bytes": peak,
        "within_limits": within,
    }


class LoadBench(LocalBench):
    """One run."""

    kind: ClassVar[str] = "load"

    def __init__(self, cases: list[Case], device_type: str) -> None:
        super().__init__(device_type)
        self.cases = cases

    def measure_ceilings(self) -> tuple[dict[str, Any] | None, str | None]:
        return None, None

    def parameters(self, case: Case) -> dict[str, Any]:
        return {
            "release": case.release, "gib": case.gib, "ep_size": case.ep_size, "shards": case.shards,
            "device_type": case.device_type, "repeats": case.repeats,
        }  # fmt: skip

    def results(self, case: Case) -> dict[str, Any]:
        return measure(case)
