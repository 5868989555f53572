"""Several ranks of a group in one process, on one GPU or several: for tests, demos and machines with few GPUs."""

from __future__ import annotations

from typing import Any

import torch

from moe_layer.comm.onesided import OneSidedChannel
from moe_layer.comm.symmetric import EmulatedMemory, SymmetricMemory, emulated_memories


class Emulation:
    """All ranks of a group in this process, rank r on ``devices[r]``; devices may repeat."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices = devices
        self.channels: list[OneSidedChannel] = []
        self._memories: dict[int, list[EmulatedMemory]] = {}

    def memory(self, nbytes: int, rank: int) -> SymmetricMemory:
        """Rank ``rank``'s part of the one allocation of ``nbytes`` a rank."""
        if nbytes not in self._memories:
            self._memories = {nbytes: emulated_memories(nbytes, self.devices)}
        return self._memories[nbytes][rank]


def emulated_channels(
    devices: list[torch.device], *, max_blocks: int | None = None, **options: Any
) -> list[OneSidedChannel]:
    """Channels of ``len(devices)`` ranks in this process, for tests and demos; ``options`` as for a channel.

    Drive every rank on a stream of its own. Ranks that share a GPU must all be resident at once, so there
    ``max_blocks`` defaults to an equal share of one block a multiprocessor.
    """
    emulation = Emulation(devices)
    per_gpu = max(devices.count(d) for d in devices)
    if max_blocks is None and per_gpu > 1:
        max_blocks = max(1, torch.cuda.get_device_properties(devices[0]).multi_processor_count // per_gpu)
    for r, d in enumerate(devices):
        emulation.channels.append(
            OneSidedChannel(None, device=d, max_blocks=max_blocks, emulation=emulation, ep_rank=r, **options)
        )
    return emulation.channels
