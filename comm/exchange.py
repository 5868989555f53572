"""Moving bytes between the ranks of a torch.distributed group, every wait with a time limit.

:class:`PeerExchange` sends messages between pairs of CPU processes (gloo): each wait is for one named peer, so a
time-out or a lost connection says who is missing; a ring all-gather could only blame its neighbour.
:class:`StreamExchange` issues NCCL collectives in stream order, so that compute can be enqueued behind them.
Ranks are ranks of the group throughout, never global ones.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_layer.errors import CommunicationTimeoutError

# Message tags keep the kinds of messages apart from each other and from a user's own traffic (tag 0 by default).
_HEADER_TAG = 0x4D4F01
_PAYLOAD_TAG = 0x4D4F02

# gloo cuts time limits to whole milliseconds, so its wait may end this much early.
_GLOO_TICK_S = 2e-3

# While waiting for a GPU event: spin for the usual latency of a step, then give the core away.
_SPIN_S = 2e-3
_SLEEP_S = 50e-6


class Exchange(ABC):
    """The two collectives that a step needs."""

    def __init__(self, group: dist.ProcessGroup | None, ep_rank: int, ep_size: int, timeout_s: float) -> None:
        self.group = group
        self.ep_rank = ep_rank
        self.ep_size = ep_size
        self.timeout_s = timeout_s

    @abstractmethod
    def gather_headers(self, header: torch.Tensor, what: str) -> torch.Tensor:
        """All ranks' headers ``[ep_size, words]``, from this rank's ``[words]`` int64; both on the CPU.

        Raises:
            CommunicationTimeoutError: a header did not come within ``timeout_s``, or its sender is gone.
        """

    @abstractmethod
    def all_to_all(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], what: str) -> None:
        """Send ``send[r]`` to rank r and fill ``receive[r]`` from it. Contiguous uint8; both ends know the sizes.

        Raises:
            CommunicationTimeoutError: as above; with NCCL a later call reports it.
        """

    def settle(self, what: str) -> None:  # noqa: B027 - nothing is outstanding where all_to_all waits for its rows
        """Wait, with the time limit, for rows still under way: before a host synchronisation, which has no limit."""


class PeerExchange(Exchange):
    """Messages between pairs of processes over gloo. CUDA tensors go through host memory."""

    def gather_headers(self, header: torch.Tensor, what: str) -> torch.Tensor:
        headers = torch.empty(self.ep_size, header.shape[0], dtype=header.dtype)
        self._swap([header] * self.ep_size, list(headers), _HEADER_TAG, what)
        return headers

    def all_to_all(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], what: str) -> None:
        if not receive[self.ep_rank].is_cuda:
            self._swap(send, receive, _PAYLOAD_TAG, what)
            return
        landing = [torch.empty(r.shape, dtype=r.dtype) for r in receive]
        self._swap([s.cpu() for s in send], landing, _PAYLOAD_TAG, what)
        for target, source in zip(receive, landing):
            target.copy_(source)

    def _swap(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], tag: int, what: str) -> None:
        receive[self.ep_rank].copy_(send[self.ep_rank])
        deadline = time.monotonic() + self.timeout_s
        # Each rank starts with its right neighbour, so that they do not all queue up at rank 0.
        peers = [(self.ep_rank + i) % self.ep_size for i in range(1, self.ep_size)]
        waits: list[tuple[int, dist.Work | None]] = []
        current = self.ep_rank  # the peer that a failure is about
        try:
            for current in peers:
                if receive[current].numel():
                    waits.append((current, dist.irecv(receive[current], group=self.group, group_src=current, tag=tag)))
            for current in peers:
                if send[current].numel():
                    waits.append((current, dist.isend(send[current], group=self.group, group_dst=current, tag=tag)))
            for peer, work in waits:
                current = peer
                if work is not None:  # torch's type for a process outside the group, which this one is not
                    # gloo takes a timeout of 0 for "none".
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        except RuntimeError as error:
            if time.monotonic() >= deadline - _GLOO_TICK_S:
                message = f"no answer from rank {current} within {self.timeout_s:g} s"
            else:
                message = f"lost the connection to rank {current} ({str(error).splitlines()[0]})"
            raise CommunicationTimeoutError(f"rank {self.ep_rank}: {what}: {message}") from error


class StreamExchange(Exchange):
    """NCCL collectives on one CUDA device.

    The host waits for headers only; rows follow in stream order. Headers travel on a stream of their own: NCCL orders
    them behind earlier collectives but not behind compute, so combine's header does not wait for the experts.
    """

    def __init__(
        self, group: dist.ProcessGroup, ep_rank: int, ep_size: int, timeout_s: float, device: torch.device
    ) -> None:
        super().__init__(group, ep_rank, ep_size, timeout_s)
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._payloads: list[tuple[str, torch.cuda.Event]] = []  # enqueued, not yet known to be complete

    def gather_headers(self, header: torch.Tensor, what: str) -> torch.Tensor:
        host = torch.empty(self.ep_size, header.shape[0], dtype=header.dtype, pin_memory=True)
        arrived = torch.cuda.Event()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            local = header.to(self.device)
            gathered = torch.empty(host.shape, dtype=header.dtype, device=self.device)
            work = dist.all_gather(list(gathered), local, group=self.group, async_op=True)
            assert work is not None  # None only outside the group
            work.wait()
            host.copy_(gathered, non_blocking=True)
            arrived.record()
        if not self._reached(arrived):
            self._raise_if_rows_are_missing(what)
            message = f"not every rank's header arrived within {self.timeout_s:g} s"
            raise CommunicationTimeoutError(f"rank {self.ep_rank}: {what}: {message}")
        return host

    def all_to_all(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], what: str) -> None:
        with torch.cuda.device(self.device):
            work = dist.all_to_all(list(receive), list(send), group=self.group, async_op=True)
            assert work is not None  # None only outside the group
            work.wait()
            done = torch.cuda.Event()
            done.record()
        self._payloads.append((what, done))

    def settle(self, what: str) -> None:
        if self._payloads and not self._reached(self._payloads[-1][1]):
            self._raise_if_rows_are_missing(what)
        self._payloads.clear()

    def _reached(self, event: torch.cuda.Event) -> bool:
        """Wait for ``event``; False if the time limit came first."""
        deadline = time.monotonic() + self.timeout_s
        spin_until = time.monotonic() + _SPIN_S
        while not event.query():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= spin_until:
                time.sleep(_SLEEP_S)
        return True

    def _raise_if_rows_are_missing(self, what: str) -> None:
        """After a time-out: name the first call whose rows did not all arrive."""
        for earlier, done in self._payloads:
            if not done.query():
                message = f"not every rank's rows arrived; noticed in {what} after {self.timeout_s:g} s"
                raise CommunicationTimeoutError(f"rank {self.ep_rank}: {earlier}: {message}")
