"""The expert-parallel group, as layers and their users see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_layer.comm import Channel, ExpertParallelComm, ExpertPlacement, create_channel
from moe_layer.comm.channel import DEFAULT_TIMEOUT_S
from moe_layer.errors import ConfigError


class ExpertParallel:
    """One group of ranks that hold the experts between them. All layers of a model share one.

    Creating it is collective over the group, and so is :meth:`destroy`. One layer at a time: a dispatch must be
    combined before the next, and all ranks must run the same layers in the same order.

    Args:
        group: a torch.distributed process group, a one-dimensional ``DeviceMesh``, or None for this process alone.
        protocol: ``"auto"``: loopback for one rank; one-sided (Sentinel, Fence) between GPUs of one host that reach
            each other's memory, if the CuTe DSL is installed; else collective. The same on every rank. See
            :func:`moe_layer.comm.create_channel`.
        max_tokens_per_rank: the most tokens that any rank passes to a layer at once; sizes the buffers.
        timeout_s: seconds after which a wait for a peer raises ``CommunicationTimeoutError``.
        device: where the layers run; None: the current GPU where there is one, else the CPU. One-sided transports serve
            that GPU alone.
        placement: the rank of each expert, for balanced placements (EPLB); one table for all layers, or a mapping from
            layer number to table (layers it leaves out have the default). None: contiguous blocks.

    Raises:
        ConfigError: an unknown protocol, a mesh of several dimensions, an impossible limit.
        RankMismatchError: ranks ask for different protocols.
        UnsupportedDeviceError: a protocol or device that this machine cannot run.

    Attributes:
        ep_rank, ep_size: this process's rank in the group, and the group's size.
        max_tokens_per_rank: as given.

    A context manager: leaving it destroys the group's resources (not the torch.distributed group).
    """

    channel: Channel

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        protocol: str = "auto",
        max_tokens_per_rank: int = 4096,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: torch.device | str | None = None,
        *,
        placement: Sequence[int] | Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ConfigError(
                    f"group must be a one-dimensional DeviceMesh, got {group.ndim} dimensions {group.mesh_dim_names}; "
                    "pass the expert-parallel dimension, e.g. mesh['ep']"
                )
            group = group.get_group()
        self.channel = create_channel(
            group, protocol=protocol, max_tokens_per_rank=max_tokens_per_rank, timeout_s=timeout_s, device=device
        )
        self._placement = placement

    @classmethod
    def over(
        cls, channel: Channel, *, placement: Sequence[int] | Mapping[int, Sequence[int]] | None = None
    ) -> ExpertParallel:
        """The group of a channel that exists: one of several ranks of this process, or a transport of one's own.

        Args:
            channel: which the group owns from now on; :meth:`destroy` destroys it.
            placement: as of :class:`ExpertParallel`.
        """
        self = cls.__new__(cls)
        self.channel = channel
        self._placement = placement
        return self

    @property
    def ep_rank(self) -> int:
        return self.channel.ep_rank

    @property
    def ep_size(self) -> int:
        return self.channel.ep_size

    @property
    def max_tokens_per_rank(self) -> int:
        return self.channel.max_tokens_per_rank

    def placement(self, layer: int, num_experts: int) -> ExpertPlacement:
        """Where the experts of decoder layer ``layer`` are.

        Raises:
            ConfigError: the table given has another number of experts, or ranks outside the group.
        """
        table = self._placement.get(layer) if isinstance(self._placement, Mapping) else self._placement
        if table is None:
            return ExpertPlacement.contiguous(num_experts, self.ep_size)
        if len(table) != num_experts:
            raise ConfigError(f"layer {layer}: placement places {len(table)} experts, but the layer has {num_experts}")
        return ExpertPlacement.from_table(table, self.ep_size)

    def check_device(self, device: torch.device) -> None:
        """Raise unless the group's transport serves tensors on ``device``.

        Raises:
            ConfigError: it is a one-sided one, on another device.
        """
        if self.channel.device not in (None, device):
            raise ConfigError(
                f"a layer on {device}, but the transport of its group serves {self.channel.device}; "
                f"give ExpertParallel device={str(device)!r} or protocol='collective'"
            )

    def communicator(self, placement: ExpertPlacement, hidden_size: int) -> ExpertParallelComm:
        """Dispatch and combine for one layer: its placement and the width of its partial results."""
        return self.channel.communicator(placement, hidden_size)

    def destroy(self) -> None:
        """Release the buffers. Collective, idempotent; layers that use this group cannot run afterwards."""
        self.channel.destroy()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()
