"""The bytes of dispatch and of combine through NCCL's ``all_to_all_single``, with row counts known beforehand.

What a collective needs beside them is left out (counts, packing, unpacking and the sum), so this is less than any
all-to-all built on it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moe_layer.benchmarks.a2a_case import Case
from moe_layer.benchmarks.harness import Work
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.benchmarks.routing import copies
from moe_layer.errors import CommunicationError, ConfigError


def cannot(case: Case) -> str | None:
    """Why it does not do a case: there is no such."""
    return None


@contextmanager
def works(ranks: Ranks, case: Case) -> Iterator[list[Work]]:
    """The local rank's work."""
    yield [NcclWork(ranks, rank, case).work() for rank in ranks.local]


class NcclWork:
    """One rank's buffers and calls."""

    def __init__(self, ranks: Ranks, rank: LocalRank, case: Case) -> None:
        if ranks.group is None or not ranks.is_cuda:
            raise ConfigError("peer 'nccl' needs a process a rank and a GPU for each (launch 'process')")
        self.case, self.rank, self.group = case, rank, ranks.group
        matrix = torch.stack([copies(case.ids(r), case.placement).sum(0) for r in range(ranks.size)])
        self.send, self.receive = matrix[rank.rank].tolist(), matrix[:, rank.rank].tolist()
        shape = case.shape

        def buffer(rows: int, nbytes: int) -> torch.Tensor:
            return torch.empty(rows, nbytes, dtype=torch.uint8, device=rank.device)

        self.sent, self.received = (buffer(sum(n), shape.dispatch_bytes) for n in (self.send, self.receive))
        self.partials, self.returned = (buffer(sum(n), shape.combine_bytes) for n in (self.receive, self.send))

    def work(self) -> Work:
        return Work({"dispatch": self.dispatch, "combine": self.combine}, self.refresh, self.check)

    def dispatch(self) -> None:
        dist.all_to_all_single(self.received, self.sent, self.receive, self.send, group=self.group)

    def combine(self) -> None:
        dist.all_to_all_single(self.returned, self.partials, self.send, self.receive, group=self.group)

    def refresh(self, repeat: int) -> None:
        self.repeat = repeat
        self.sent.copy_(self._row(self.rank.rank, self.sent.shape[1]).expand_as(self.sent))
        self.partials.copy_(self._row(self.rank.rank, self.partials.shape[1]).expand_as(self.partials))
        self.received.zero_()
        self.returned.zero_()

    def _row(self, rank: int, nbytes: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.case.seed * 1000 + rank) * 1000 + self.repeat)
        return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(self.rank.device)

    def check(self) -> None:
        for arrived, counts in ((self.received, self.receive), (self.returned, self.send)):
            for r, rows in enumerate(arrived.split(counts)):
                if not torch.equal(rows, self._row(r, arrived.shape[1]).expand_as(rows)):
                    raise CommunicationError(f"rank {self.rank.rank}: rows from rank {r} arrived damaged")
