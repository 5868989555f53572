"""Ranks meet over symmetric memory whatever their processes did before; if they do not, all learn who was missing.

torch's allocator and rendezvous are replaced by ones that do on the CPU what torch does with the store: see
:class:`FakeSymmetricMemory`. The real ones run in ``tests/multi_gpu``.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed_harness import Ranks

from moe_layer.comm.rendezvous import RendezvousStore, rendezvous
from moe_layer.comm.symmetric import TorchSymmetricMemory
from moe_layer.errors import CommunicationError, CommunicationTimeoutError

CPU = torch.device("cpu")


class FakeSymmetricMemory:
    """torch's exchange of handles: an all-gather, a barrier and another all-gather, under keys that hold a count.

    Args:
        exchanges: the exchanges that this process has made so far.
        old: the calls of PyTorch 2.9 to 2.12 on the store, instead of those of 2.13.
    """

    def __init__(self, exchanges: int = 0, old: bool = False) -> None:
        self.count = exchanges
        self.old = old
        self.infos: dict[str, Any] = {}
        self.failures: list[str] = []

    def set_group_info(self, name: str, rank: int, size: int, store: dist.Store) -> None:
        self.infos[name] = (rank, size, store)

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.failures:
            raise RuntimeError(self.failures.pop(0))
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def rendezvous(self, local: torch.Tensor, name: str) -> Any:
        group = dist.distributed_c10d._resolve_process_group(name)
        # A PrefixStore calls the store from C++, as torch's rendezvous does.
        store = dist.PrefixStore("torch", group.get_group_store())
        rank, size = group.rank(), group.size()
        addresses = self._all_gather(store, rank, size, local.data_ptr())
        if self.old:
            self._all_gather(store, rank, size, 0)
        else:
            store.barrier(f"CUDASymmetricMemory/{self.count}", size)
            self.count += 1
        assert self._all_gather(store, rank, size, 100 + rank) == [100 + r for r in range(size)]
        return SimpleNamespace(buffer_ptrs=addresses)

    def _all_gather(self, store: dist.Store, rank: int, size: int, value: int) -> list[int]:
        keys = [f"CUDASymmetricMemory/{self.count}/{r}" for r in range(size)]
        self.count += 1
        store.set(keys[rank], struct.pack("<q", value))
        if not self.old:
            return [struct.unpack("<q", got)[0] for got in store.multi_get(keys)]
        gathered = []
        for key in keys:
            store.wait([key])
            gathered.append(struct.unpack("<q", store.get(key))[0])
        return gathered


@contextmanager
def fake_torch(exchanges: int = 0, *, old: bool = False) -> Iterator[FakeSymmetricMemory]:
    fake = FakeSymmetricMemory(exchanges, old)
    with mock.patch("torch._C._distributed_c10d._SymmetricMemory", fake):
        yield fake


def share(group: Any) -> None:
    memory = TorchSymmetricMemory(1 << 20, group, CPU, 20)
    addresses: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(addresses, memory.local.data_ptr(), group=group)
    assert memory.addresses == memory.peers.tolist() == addresses


@pytest.mark.parametrize("old", [False, True])
def test_processes_that_did_other_things_before(run_ranks: Any, old: bool) -> None:
    run_ranks(meet_after_other_things, 4, old)


def meet_after_other_things(ranks: Ranks, old: bool) -> None:
    with fake_torch(exchanges=7 * ranks.rank, old=old) as fake:
        share(ranks.group)
        share(ranks.group)
        pair = ranks.new_group((0, 2))
        if ranks.rank in (0, 2):
            share(pair)
        share(ranks.group)
        assert fake.count == 7 * ranks.rank + 3 * (4 if ranks.rank in (0, 2) else 3)


def test_without_a_store_of_its_own_they_miss_each_other(run_ranks: Any) -> None:
    """That the fake is as torch is before pytorch#196082 was fixed; else the test above shows nothing."""
    run_ranks(meet_as_torch_does, 4)  # all processes of the pool must make a new group


def meet_as_torch_does(ranks: Ranks) -> None:
    group = ranks.new_group((0, 1))
    if ranks.rank > 1:
        return
    store = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout
    local = torch.empty(8, dtype=torch.uint8)
    try:
        store.set_timeout(timedelta(seconds=10))
        with fake_torch(exchanges=10) as fake:
            assert fake.rendezvous(local, group.group_name).buffer_ptrs[ranks.rank] == local.data_ptr()
        store.set_timeout(timedelta(seconds=0.5))
        with fake_torch(exchanges=20 + 7 * ranks.rank) as fake, pytest.raises(RuntimeError, match=r"[Tt]ime"):
            fake.rendezvous(local, group.group_name)
    finally:
        store.set_timeout(before)


def test_absent_rank(run_ranks: Any) -> None:
    run_ranks(wait_for_absent_rank, 3)


def wait_for_absent_rank(ranks: Ranks) -> None:
    if ranks.rank != 1:
        with fake_torch():
            start = time.monotonic()
            expected = f"^rank {ranks.rank}: rank 1 did not come to exchange memory handles within 0.5 s$"
            with pytest.raises(CommunicationTimeoutError, match=expected):
                rendezvous(torch.empty(8, dtype=torch.uint8), ranks.group, "absent", 0.5)
            assert 0.4 < time.monotonic() - start < 3
            with pytest.raises(RuntimeError, match="Could not resolve the process group"):
                dist.distributed_c10d._resolve_process_group("absent")
    dist.barrier(ranks.group)


def test_memory_that_one_rank_has_not(run_ranks: Any) -> None:
    run_ranks(run_out_of_memory, 3)


def run_out_of_memory(ranks: Ranks) -> None:
    with fake_torch(exchanges=ranks.rank) as fake:
        fake.failures = ["CUDA driver error: out of memory\nwith a trace"] * (2 if ranks.rank == 2 else 1)
        expected = (
            f"^rank {ranks.rank}: 64 bytes of symmetric memory could not be allocated on rank 2: "
            "CUDA driver error: out of memory$"
        )
        with pytest.raises(CommunicationError, match=expected):
            TorchSymmetricMemory(64, ranks.group, CPU)
        # One failure is mended by giving back what torch keeps; and after an error all can go on.
        fake.failures = ["CUDA driver error: out of memory"] if ranks.rank == 0 else []
        share(ranks.group)


def test_sizes_that_differ(run_ranks: Any) -> None:
    run_ranks(ask_for_different_sizes, 2)


def ask_for_different_sizes(ranks: Ranks) -> None:
    with fake_torch(), pytest.raises(CommunicationError, match=r"sizes differ over the ranks: \[64, 65\]"):
        TorchSymmetricMemory(64 + ranks.rank, ranks.group, CPU)


def test_refusal_by_torch(run_ranks: Any) -> None:
    run_ranks(be_refused, 2)


def be_refused(ranks: Ranks) -> None:
    with fake_torch() as fake, mock.patch.object(fake, "_all_gather", side_effect=RuntimeError("no such handle")):
        expected = rf"rank {ranks.rank}: GPUs of this group cannot share memory \(no such handle\)"
        with pytest.raises(CommunicationError, match=expected) as caught:
            TorchSymmetricMemory(64, ranks.group, CPU)
        assert not isinstance(caught.value, CommunicationTimeoutError)


@pytest.mark.parametrize(("version", "told"), [("2.9.1+cu128", True), ("2.10.0", True), ("2.11.0", False)])
def test_older_torch_is_told_of_the_store(run_ranks: Any, version: str, told: bool) -> None:
    run_ranks(meet_with_version, 2, version, told)


def meet_with_version(ranks: Ranks, version: str, told: bool) -> None:
    with mock.patch.object(torch, "__version__", version), fake_torch(old=True) as fake:
        share(ranks.group)
        assert len(fake.infos) == told
        for name, (rank, size, store) in fake.infos.items():
            assert name.startswith("moe_layer/")
            assert (rank, size) == (ranks.rank, 2)
            assert isinstance(store, RendezvousStore)


def test_keys() -> None:
    store = RendezvousStore(dist.HashStore(), 0, 1.0)
    renumbered = [("a/41/0", "a/0/0"), ("a/41/1", "a/0/1"), ("a/43", "a/1"), ("b/43/x", "b/0/x"), ("a/42/0", "a/2/0")]
    for key, own in [*renumbered, ("text", "text"), ("a/41/2", "a/0/2"), ("a/b/7/7", "a/b/0/7")]:
        assert store._own(key) == own
