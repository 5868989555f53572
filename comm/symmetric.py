"""Memory that every rank of a group maps: one allocation per rank, of the same size and layout.

Real groups use torch's symmetric memory (POSIX file descriptors within a host, fabric handles where the driver offers
them); :class:`EmulatedMemory` puts all ranks of a test or a demo into one process, on one GPU or several.
"""

from __future__ import annotations

import secrets
from abc import ABC
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_layer.comm.channel import DEFAULT_TIMEOUT_S
from moe_layer.comm.rendezvous import gather_objects, rendezvous
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

    Args:
        nbytes: of each rank's part.
        group: the ranks.
        device: this rank's GPU.
        timeout_s: how long to wait for the other ranks once all have begun.

    Raises:
        CommunicationError: ranks asked for different sizes, one of them has not enough memory, or the driver refused to
            share it; on every rank.
        CommunicationTimeoutError: names the ranks that did not come.
    """

    def __init__(
        self, nbytes: int, group: dist.ProcessGroup, device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        rank = dist.get_rank(group)
        local, failure = None, None
        try:
            local = _allocate(nbytes, device)
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
        sizes, failures, names = zip(*gather_objects((nbytes, failure, secrets.token_hex(8)), group, device))
        if any(size != nbytes for size in sizes):
            raise CommunicationError(
                f"rank {rank}: symmetric allocation sizes differ over the ranks: {list(sizes)}; every rank "
                "must create the same layers in the same order"
            )
        failed = [f"rank {peer}: {text}" for peer, text in enumerate(failures) if text is not None]
        if failed or local is None:
            raise CommunicationError(
                f"rank {rank}: {nbytes} bytes of symmetric memory could not be allocated on {'; '.join(failed)}"
            )
        try:
            self._handle = rendezvous(local, group, f"moe_layer/{names[0]}", timeout_s)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank}: GPUs of this group cannot share memory ({error}); "
                "protocol='collective' does not need it. In a container, allow passing of file descriptors "
                "(--ipc=host or a shared /dev/shm) or a driver with fabric handles"
            ) from error
        addresses = list(self._handle.buffer_ptrs)
        assert addresses[rank] == local.data_ptr(), "peers would see another part of the block"
        self._finish(local, addresses)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """``[nbytes]`` uint8 in a block of its own.

    ``symm_mem.empty`` would take it from a pool, where several allocations may lie in one block, while peers learn only
    where a block begins.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    try:
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    except RuntimeError:
        torch.cuda.empty_cache()  # what torch keeps for later tensors is of no use to the driver
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


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
