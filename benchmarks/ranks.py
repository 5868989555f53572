"""The ranks that a benchmark process drives, and how it meets the other processes on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class LocalRank:
    """One rank of this process; on a GPU with a stream of its own."""

    rank: int
    device: torch.device
    stream: torch.cuda.Stream | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work issued inside goes to this rank's device and stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield


@dataclass(frozen=True)
class Ranks:
    """A group of ``size`` ranks as one process sees it: one rank a process, or all of them in one process.

    Attributes:
        size: the paper's P.
        local: the ranks of this process.
        group: the ranks' group; None where one process drives them all.
        control: a gloo group of the same processes, for what the host exchanges beside the measurement.
    """

    size: int
    local: tuple[LocalRank, ...]
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None

    @classmethod
    def in_one_process(cls, devices: list[torch.device]) -> Ranks:
        """All ranks in this process, rank r on ``devices[r]``; devices may repeat."""
        local = [LocalRank(r, d, torch.cuda.Stream(d) if d.type == "cuda" else None) for r, d in enumerate(devices)]
        return cls(len(devices), tuple(local))

    @property
    def is_cuda(self) -> bool:
        return self.local[0].device.type == "cuda"

    @property
    def share_devices(self) -> bool:
        """Whether several ranks of this process live on one device, which they then compete for."""
        return len({rank.device for rank in self.local}) < len(self.local)

    def synchronize(self) -> None:
        """Wait for this process's devices, then for the other processes to have done so."""
        if self.is_cuda:
            for device in {rank.device for rank in self.local}:
                torch.cuda.synchronize(device)
        if self.control is not None:
            dist.barrier(self.control)

    def gather(self, value: Any) -> list[Any]:
        """Every process's ``value``, in order of rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.control)
        dist.all_gather_object(values, value, group=self.control)
        return values
