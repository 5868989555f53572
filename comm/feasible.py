"""Whether a group's GPUs can run the one-sided protocols, and if not, why."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations

import torch
import torch.distributed as dist

from moe_layer.comm.rendezvous import gather_objects
from moe_layer.errors import RankMismatchError
from moe_layer.kernel_cache import device_arch

# torch refuses symmetric memory to ranks that share a GPU, or that call different GPUs by one number, unless this is 1.
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class RankFacts:
    """What the choice of a transport depends on, of one rank.

    Attributes:
        request: what the caller asked for, in words; the same on every rank.
        host: its name.
        obstacle: why this rank cannot run the kernels, whatever the others are; or None.
        gpu: which GPU it is, by a name that all processes share.
        index: the number that this process calls it by.
        reaches: whether it can access the memory of each GPU that this process sees.
        may_overlap: whether :data:`OVERLAPPING` is set.
    """

    request: str
    host: str
    obstacle: str | None
    gpu: str = ""
    index: int = -1
    reaches: Mapping[str, bool] = field(default_factory=dict)
    may_overlap: bool = False


def one_sided_obstacle(group: dist.ProcessGroup, device: torch.device | None, request: str = "") -> str | None:
    """Why this group cannot use Fence and Sentinel, or None if it can. Collective; all ranks get the same answer.

    Args:
        group: the ranks.
        device: this rank's GPU, or None where it has none.
        request: the caller's options, in words, which must be the same on every rank.

    Raises:
        RankMismatchError: they are not; on every rank.
    """
    facts: list[RankFacts] = gather_objects(own_facts(device, request), group, device)
    for rank, fact in enumerate(facts):
        if fact.request != facts[0].request:
            raise RankMismatchError(
                f"rank {dist.get_rank(group)}: ranks disagree about the transport: "
                f"rank 0 asks for {facts[0].request}, rank {rank} for {fact.request}"
            )
    return obstacle_between(facts)


def own_facts(device: torch.device | None, request: str = "") -> RankFacts:
    """This rank's facts. Compiles nothing, imports no DSL and allocates nothing; raises nothing either, since the other
    ranks wait for the answer."""
    host = socket.gethostname()
    if device is None or device.type != "cuda":
        return RankFacts(request, host, f"runs on {device or 'the CPU'}, not on a GPU")
    try:
        device_arch(device)
        backend = _symmetric_memory_backend(device)
        if backend != "CUDA":
            instead = f"set to {backend}" if backend else "missing"
            return RankFacts(request, host, f"torch's symmetric memory is {instead}; the kernels need its CUDA backend")
        names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        reaches = {
            name: peer == device.index or torch.cuda.can_device_access_peer(device, peer)
            for peer, name in enumerate(names)
        }
        overlap = os.environ.get(OVERLAPPING) == "1"
        return RankFacts(request, host, None, names[device.index], device.index, reaches, overlap)
    except (RuntimeError, AssertionError) as error:  # UnsupportedDeviceError too; torch asserts that the GPU exists
        return RankFacts(request, host, str(error))


def _symmetric_memory_backend(device: torch.device) -> str | None:
    from torch._C._distributed_c10d import _SymmetricMemory

    backend: str | None = _SymmetricMemory.get_backend(device)
    return backend


def obstacle_between(facts: Sequence[RankFacts]) -> str | None:
    """Why ranks of these facts, in rank order, cannot use the one-sided protocols together, or None if they can."""
    for rank, fact in enumerate(facts):
        if fact.obstacle is not None:
            return f"rank {rank}: {fact.obstacle}"
    hosts = sorted({fact.host for fact in facts})
    if len(hosts) > 1:
        return f"the group spans hosts {', '.join(hosts)}; one-sided communication is for one host's NVLink domain"
    for a, b in permutations(range(len(facts)), 2):
        reached = facts[a].reaches.get(facts[b].gpu)
        if reached is None:
            return f"rank {a} does not see the GPU of rank {b}; let CUDA_VISIBLE_DEVICES name all GPUs in every process"
        if not reached:
            return f"the GPU of rank {a} cannot access the memory of the GPU of rank {b}"
    if all(fact.may_overlap for fact in facts):
        return None
    for a, b in combinations(range(len(facts)), 2):
        if facts[a].gpu == facts[b].gpu:
            return f"ranks {a} and {b} share a GPU ({OVERLAPPING}=1 on every rank allows it, slowly)"
        if facts[a].index == facts[b].index:
            return (
                f"ranks {a} and {b} call different GPUs cuda:{facts[a].index}; let CUDA_VISIBLE_DEVICES name all GPUs, "
                "in one order, in every process"
            )
    return None
