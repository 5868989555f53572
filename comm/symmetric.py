"""Memory that every rank of a group maps: one allocation per rank, of the same size and layout.

Real groups use torch's symmetric memory (POSIX file descriptors within a host, fabric handles where the driver offers
them); :class:`EmulatedMemory` puts all ranks of a test or a demo into one process, on one GPU or several.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_layer.errors import CommunicationError, UnsupportedDeviceError


class SymmetricMemory(ABC):
    """One rank's view.

    Attributes:
        local: this rank's bytes, a uint8 CUDA tensor.
        addresses: for each rank, the address at which this process sees that rank's bytes.
        peers: the same as an int64 CUDA tensor, read by kernels.
    """

    local: torch.Tensor
    addresses: list[int]

    def _finish(self, local: torch.Tensor, addresses: Sequence[int]) -> None:
        self.local = local
        self.addresses = list(addresses)
        self.peers = torch.tensor(self.addresses, dtype=torch.int64, device=local.device)


class TorchSymmetricMemory(SymmetricMemory):
    """An allocation shared over a torch.distributed group. Construction is collective.

    Raises:
        CommunicationError: ranks asked for different sizes, or the driver refused to share memory.
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        sizes: list[int | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(sizes, nbytes, group=group)
        if any(size != nbytes for size in sizes):
            raise CommunicationError(
                f"rank {dist.get_rank(group)}: symmetric allocation sizes differ over the ranks: {sizes}; every rank "
                "must create the same layers in the same order"
            )
        try:
            local = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
            self._handle = symm_mem.rendezvous(local, group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {dist.get_rank(group)}: GPUs of this group cannot share memory ({error}); "
                "protocol='collective' does not need it. In a container, allow passing of file descriptors "
                "(--ipc=host or a shared /dev/shm) or a driver with fabric handles"
            ) from error
        self._finish(local, self._handle.buffer_ptrs)


class EmulatedMemory(SymmetricMemory):
    """One rank of a group that lives in this process; see :func:`emulated_memories`."""

    def __init__(self, buffers: Sequence[torch.Tensor], rank: int) -> None:
        self._buffers = list(buffers)
        self._finish(buffers[rank], [b.data_ptr() for b in buffers])


def emulated_memories(nbytes: int, devices: Sequence[torch.device]) -> list[EmulatedMemory]:
    """Memories of ``len(devices)`` ranks in this process, rank r on ``devices[r]`` (devices may repeat).

    Raises:
        UnsupportedDeviceError: two of the GPUs cannot access each other's memory.
    """
    for a in set(devices):
        for b in set(devices):
            if a != b:
                if not torch.cuda.can_device_access_peer(a, b):
                    raise UnsupportedDeviceError(f"{a} cannot access the memory of {b}")
                # A copy makes torch enable peer access for every later allocation of the pair.
                torch.ones(1, device=a).to(b)
    buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for device in devices]
    return [EmulatedMemory(buffers, rank) for rank in range(len(devices))]
