"""What the stages around the GEMMs cost on one rank: indexing and finalize, by the harness, beside their floors.

The rank is rank 0 of ``ep_size``; its slots are what the ranks' dispatches would leave there: a slot holds a token that
selects at least one expert of the rank, in every other slot all ids are −1. Both stages' outputs are checked with the
PyTorch reference after every repeat.

Floors. Indexing: an empty kernel, and its bytes (ids in, rows and slots out) at the rate of a copy. Finalize: an empty
kernel, and the rows it reads and the slots it writes at that rate. The rate is measured in the same run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_layer.benchmarks.ceilings import launch_us
from moe_layer.benchmarks.harness import Options, Timing, Work, measure
from moe_layer.benchmarks.ranks import Ranks
from moe_layer.benchmarks.routing import Routing, copies
from moe_layer.benchmarks.shapes import Shape
from moe_layer.comm.placement import ExpertPlacement
from moe_layer.errors import MoELayerError
from moe_layer.gemm.backend import ComputeBackend
from moe_layer.gemm.reference import ReferenceBackend

COPY_BYTES = 1 << 30  # read, and as many written: far more than the L2 cache
COPY = Options(warmup=1, steps=4, repeats=5)
FORGOTTEN = -77  # what outputs hold before a repeat


class StageError(MoELayerError, RuntimeError):
    """A stage's output was wrong."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        shape: the model.
        ep_size: ranks.
        tokens: of each rank in a step, the paper's T; there are ``ep_size * tokens`` slots.
        routing: how tokens choose experts.
    """

    shape: Shape
    ep_size: int
    tokens: int
    routing: Routing


@dataclass(frozen=True)
class Machine:
    """Rates of the device: GB/s of a copy, read and written bytes together, and µs of an empty kernel."""

    copy_gbps: float
    launch_us: float

    def floor_us(self, nbytes: int) -> float:
        """µs of a kernel that does nothing but move so many bytes."""
        return self.launch_us + nbytes / self.copy_gbps / 1e3


def measure_machine(ranks: Ranks) -> Machine:
    """The device of ``ranks``' one local rank."""
    device = ranks.local[0].device
    nbytes = COPY_BYTES if ranks.is_cuda else 1 << 24
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = measure(ranks, [Work({"copy": lambda: target.copy_(source)})], COPY)
    return Machine(2 * nbytes / copied.step_us / 1e3, launch_us(ranks) if ranks.is_cuda else 0.0)


def slots_of(case: Case, seed: int) -> torch.Tensor:
    """``[ep_size * tokens, top_k]`` int32 ids as rank 0 receives them, on the CPU."""
    placement = ExpertPlacement.contiguous(case.shape.num_experts, case.ep_size)
    received = []
    for rank in range(case.ep_size):
        ids = case.routing.ids(case.tokens, case.shape.top_k, placement, rank, seed)
        received.append(torch.where(copies(ids, placement)[:, :1], ids, -1))
    return torch.cat(received)


def time_case(ranks: Ranks, case: Case, backend: ComputeBackend, machine: Machine, options: Options) -> dict[str, Any]:
    """Both stages of a case on ``ranks``' one local rank.

    Returns:
        a JSON-ready record: slots, rows, and for each stage the timing, its floor in µs and, for finalize, GB/s.

    Raises:
        StageError: a wrong output.
    """
    device = ranks.local[0].device
    shape = case.shape
    local = len(ExpertPlacement.contiguous(shape.num_experts, case.ep_size).local_experts(0))
    drawn = slots_of(case, 0)
    slots, top_k = drawn.shape
    # Ids and weights lie side by side, as in a dispatch workspace.
    routing = torch.empty(slots, 2 * top_k, dtype=torch.int32, device=device)
    ids, weights = routing[:, :top_k], routing[:, top_k:].view(torch.float32)
    reference = ReferenceBackend()
    last: dict[str, Any] = {}

    def build() -> None:
        last["index"] = backend.build_index(ids, 0, local)

    def new_ids(repeat: int) -> None:
        ids.copy_(slots_of(case, repeat))
        if "index" in last:
            for tensor in (last["index"].offsets, last["index"].rows):
                tensor.fill_(FORGOTTEN)

    def check_index() -> None:
        expected, got = reference.build_index(ids, 0, local), last["index"]
        total = int(expected.offsets[-1])
        for name in ("offsets", "rows"):
            if not torch.equal(getattr(got, name), getattr(expected, name)):
                raise StageError(f"build_index: wrong {name}")
        if not torch.equal(got.slots[:total], expected.slots[:total]):
            raise StageError("build_index: wrong slots")

    indexed = measure(ranks, [Work({"index": build}, new_ids, check_index)], options)

    new_ids(0)
    index = reference.build_index(ids, 0, local)
    total, used = int(index.offsets[-1]), int((index.rows >= 0).any(1).sum())
    rows = torch.empty(max(1, total), shape.hidden_size, dtype=torch.bfloat16, device=device)
    output = torch.empty(slots, shape.hidden_size, dtype=torch.bfloat16, device=device)

    def new_rows(repeat: int) -> None:
        rows.normal_()
        weights.uniform_()
        output.fill_(torch.nan)

    def check_finalize() -> None:
        expected = torch.full_like(output, torch.nan)
        reference.finalize(rows, index, weights, expected)
        if not torch.equal(output.view(torch.int16), expected.view(torch.int16)):
            raise StageError("finalize: wrong sums")

    def finalize() -> None:
        backend.finalize(rows, index, weights, output)

    finalized = measure(ranks, [Work({"finalize": finalize}, new_rows, check_finalize)], options)
    moved = 2 * shape.hidden_size * (total + used)
    return {
        "shape": shape.label, "ep_size": case.ep_size, "tokens": case.tokens, "routing": str(case.routing),
        "slots": slots, "rows": total, "slots_used": used, **asdict(machine),
        "index": _record(indexed, machine.floor_us(4 * (2 * slots * top_k + total))),
        "finalize": _record(finalized, machine.floor_us(moved)) | {"gbps": moved / finalized.step_us / 1e3},
    }  # fmt: skip


def _record(timing: Timing, floor_us: float) -> dict[str, Any]:
    return {"us": timing.step_us, "spread": timing.spread, "method": timing.method, "floor_us": floor_us}
