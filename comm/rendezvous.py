"""How the ranks of a group find each other's symmetric memory, whatever else their processes did before.

torch's rendezvous exchanges handles through the store of the process group, under keys that hold the number of
exchanges the *process* has made so far, in any group (pytorch#196082, in the versions before its fix). A process that
shared memory in another group before looks for its peers under other keys than they use, and all wait until the store
gives up. Here each rendezvous has a store of its own, :class:`RendezvousStore`, which counts from zero on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from moe_layer.errors import CommunicationTimeoutError

# From here on torch finds a group's store by the group's name in the registry of process groups; before, in a table of
# its own, which had to be filled.
STORE_OF_PROCESS_GROUP = (2, 11)


class RendezvousStore(dist.Store):
    """A store whose keys say which exchange of this rendezvous they belong to, not which of the process.

    A key is ``…/N/…``, N being the process's count. The first N that comes by is replaced by 0, the next by 1: ranks
    make the exchanges of one rendezvous in the same order, so they agree on these numbers even where N differs.

    Args:
        store: keeps the values; nobody else may use the same keys in it.
        rank: this process's rank, for messages.
        timeout_s: how long to wait for the other ranks.
    """

    def __init__(self, store: dist.Store, rank: int, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._numbers: dict[str, dict[str, int]] = {}  # by what stands before N

    def _own(self, key: str) -> str:
        parts = key.split("/")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            return key
        numbers = self._numbers.setdefault("/".join(parts[:at]), {})
        parts[at] = str(numbers.setdefault(parts[at], len(numbers)))
        return "/".join(parts)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._own(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._store.get(self._own(key)) for key in keys]

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._own(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for ``keys``; ``timeout`` is torch's, and not ours to keep.

        Raises:
            CommunicationTimeoutError: names the ranks that did not come.
        """
        own = [self._own(key) for key in keys]
        try:
            self._store.wait(own, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = [key.rsplit("/", 1)[-1] for key in own if not self._store.check([key])]
            if not missing:
                raise
            # The last part of a key is the rank that sets it, except where all wait for the last to arrive.
            ranks = [name for name in missing if name.isdigit()]
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else "a rank"
            raise CommunicationTimeoutError(
                f"rank {self._rank}: {who} did not come to exchange memory handles within {self._timeout_s:g} s"
            ) from error


def rendezvous(local: torch.Tensor, group: dist.ProcessGroup, name: str, timeout_s: float) -> Any:
    """torch's handle of an allocation that each rank of ``group`` made. Collective.

    Args:
        local: this rank's allocation, from torch's symmetric memory, of the same size on every rank.
        group: the ranks.
        name: unique to this rendezvous among all of the group's processes, the same on every rank.
        timeout_s: how long to wait for the other ranks.

    Raises:
        CommunicationTimeoutError: names the ranks that did not come.
        RuntimeError: torch's own, where memory cannot be shared.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    of_group = dist.distributed_c10d._get_process_group_store(group)
    store = RendezvousStore(dist.PrefixStore(name, of_group), rank, timeout_s)
    key: Any = name  # newer versions have a type of their own for it
    # torch takes the store from a process group that it finds by name: one of the same ranks with another store. It
    # asks the group's backend for an option, so there must be one: the group's, which is told the twin's device, and
    # would be told its name if that came later.
    twin = dist.ProcessGroup(store, rank, size)
    twin._set_group_name(key)
    twin.bound_device_id = group.bound_device_id
    custom = dist.ProcessGroup.BackendType.CUSTOM
    twin._register_backend(local.device, custom, group._get_backend(local.device))
    twin._set_default_backend(custom)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < STORE_OF_PROCESS_GROUP:
        _SymmetricMemory.set_group_info(name, rank, size, store)
    _register_process_group(key, twin)
    try:
        return _SymmetricMemory.rendezvous(local, name)
    finally:
        _unregister_process_group(key)


def gather_objects(own: Any, group: dist.ProcessGroup, device: torch.device | None) -> list[Any]:
    """What each rank passed, on every rank. Collective.

    Args:
        own: anything that can be pickled.
        group: the ranks.
        device: this rank's GPU, through which NCCL sends; None, or one that is not there, for the current one.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    is_there = device is not None and device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    with torch.cuda.device(device) if is_there else nullcontext():
        dist.all_gather_object(gathered, own, group=group)
    return gathered
