"""Whether a group's GPUs can run the one-sided protocols, and if not, why."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from moe_layer.errors import UnsupportedDeviceError
from moe_layer.kernel_cache import device_arch


def one_sided_obstacle(group: dist.ProcessGroup | None, device: torch.device | None) -> str | None:
    """Why this group cannot use Fence and Sentinel, or None if it can. Collective; all ranks get the same answer.

    Args:
        group: the ranks.
        device: this rank's GPU, or None where it has none.
    """
    own = _local_obstacle(device)
    identity = "" if device is None or own else str(torch.cuda.get_device_properties(device).uuid)
    facts: list[tuple[str | None, str, str]] = [(own, socket.gethostname(), identity)]
    if group is not None:
        gathered: list[tuple[str | None, str, str] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, facts[0], group=group)
        facts = [fact for fact in gathered if fact is not None]
    for rank, (obstacle, _, _) in enumerate(facts):
        if obstacle is not None:
            return f"rank {rank}: {obstacle}"
    hosts = sorted({host for _, host, _ in facts})
    if len(hosts) > 1:
        return f"the group spans hosts {', '.join(hosts)}; one-sided communication is for one host's NVLink domain"
    shared = len({uuid for _, _, uuid in facts}) < len(facts)
    if shared and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        return "several ranks share a GPU (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows it, slowly)"
    return None


def _local_obstacle(device: torch.device | None) -> str | None:
    if device is None or device.type != "cuda":
        return f"runs on {device or 'the CPU'}, not on a GPU"
    try:
        device_arch(device)
    except UnsupportedDeviceError as error:
        return str(error)
    for peer in range(torch.cuda.device_count()):
        if peer != device.index and not torch.cuda.can_device_access_peer(device, peer):
            return f"{device} cannot access the memory of cuda:{peer}"
    return None
