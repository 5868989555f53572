"""One-sided channels without a GPU: the host side as it is, on CPU memory; kernels only note their arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_layer.comm import launch, launchers
from moe_layer.comm.channel import Channel
from moe_layer.comm.layout import WorkspaceLayout
from moe_layer.comm.onesided import OneSidedChannel
from moe_layer.comm.status import RECORD_WORDS

Call = tuple[str, Any, tuple[Any, ...]]  # launch function, spec, scalars


class HostOnlyChannel(OneSidedChannel):
    """Rank 0 of ``ep_size``."""

    def __init__(self, ep_size: int, protocol: str, max_tokens_per_rank: int = 4096, num_sms: int = 132) -> None:
        Channel.__init__(self, None, max_tokens_per_rank=max_tokens_per_rank, timeout_s=1.0)
        self.ep_rank, self.ep_size, self.protocol, self.num_sms = 0, ep_size, protocol, num_sms
        self.device, self.arch, self.fp8_combine, self.max_blocks = torch.device("cpu"), "sm_90a", False, None
        self._emulation, self._sentinel_tokens = None, None
        self.comms, self.capacity, self.layout, self.memory = [], None, None, None
        self._record_words = memoryview(torch.zeros(RECORD_WORDS, dtype=torch.int32).numpy())

    def prepare(self) -> None:
        assert self.capacity is not None
        if self.layout is None or not self.layout.capacity.covers(self.capacity):
            self.layout = WorkspaceLayout(self.capacity)
            local = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
            self.memory = SimpleNamespace(local=local, peers=torch.zeros(self.ep_size, dtype=torch.int64))  # type: ignore[assignment]
            for comm in self.comms:
                comm.forget_views()


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Replace every one-sided kernel; returns the list to which each call is added."""
    calls: list[Call] = []

    def get_kernel(function: Any, spec: Any, signature: str, arch: str) -> Any:
        def kernel(anchor: torch.Tensor, *scalars: Any) -> None:
            assert len(scalars) == len(signature)
            calls.append((function.__name__, spec, scalars))

        return kernel

    monkeypatch.setattr(launch, "get_kernel", get_kernel)
    monkeypatch.setattr(launchers, "load_kernels", lambda *arguments: None)
    return calls
