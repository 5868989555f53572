"""What all layers of a model share: the group, the buffers and the one dispatch/combine pair in flight."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moe_layer.comm.base import ExpertParallelComm
from moe_layer.errors import CapacityError, CommunicationError, ConfigError, UnsupportedDeviceError

if TYPE_CHECKING:
    from moe_layer.comm.placement import ExpertPlacement

logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 300.0
PROTOCOLS = ("auto", "loopback", "collective", "one-sided", "fence", "sentinel")


class Channel:
    """One EP group's communication state, shared by every layer.

    Args:
        group: the torch.distributed group, or None for this process alone.
        max_tokens_per_rank: the most tokens any rank dispatches in a step; sizes the workspaces.
        timeout_s: seconds after which a wait for a peer raises.

    Attributes:
        ep_rank, ep_size: this process's rank in the group and the group's size.
        in_flight: the communicator whose dispatch awaits its combine, or None.
        step: dispatches completed since creation.
        failure: why the channel can no longer be used, or None. Set where a collective call broke off half-way.
        device: where the tensors passed to it must be; None for anywhere.
    """

    device: torch.device | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        max_tokens_per_rank: int = 4096,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not isinstance(max_tokens_per_rank, int) or isinstance(max_tokens_per_rank, bool) or max_tokens_per_rank < 1:
            raise ConfigError(f"max_tokens_per_rank must be at least 1, got {max_tokens_per_rank}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        check_member(group)
        self.group = group
        self.ep_rank = dist.get_rank(group) if group is not None else 0
        self.ep_size = dist.get_world_size(group) if group is not None else 1
        self.max_tokens_per_rank = max_tokens_per_rank
        self.timeout_s = timeout_s
        self.in_flight: ExpertParallelComm | None = None
        self.step = 0
        self.failure: str | None = None
        self.destroyed = False

    def communicator(self, placement: ExpertPlacement, hidden_size: int) -> ExpertParallelComm:
        """A communicator for one layer: its expert placement and the width of its partial results.

        Raises:
            ConfigError: a placement over another number of ranks, or a width below 1.
        """
        raise NotImplementedError

    def check_layer(self, placement: ExpertPlacement, hidden_size: int) -> None:
        """Raise unless a layer so placed can use this channel."""
        if placement.ep_size != self.ep_size:
            raise ConfigError(
                f"the placement spreads experts over {placement.ep_size} ranks, but the group has {self.ep_size}"
            )
        if hidden_size < 1:
            raise ConfigError(f"hidden_size must be at least 1, got {hidden_size}")

    def tokens_per_rank(self, local_num_tokens: int, runtime_max_tokens_per_rank: int | None) -> int:
        """T̂ of a step, checked against T and the maximum."""
        limit = self.max_tokens_per_rank
        if not isinstance(runtime_max_tokens_per_rank, (int, type(None))) or isinstance(
            runtime_max_tokens_per_rank, bool
        ):
            raise CapacityError(
                f"rank {self.ep_rank}: runtime_max_tokens_per_rank must be an integer or None, got "
                f"{runtime_max_tokens_per_rank!r}"
            )
        t_hat = limit if runtime_max_tokens_per_rank is None else int(runtime_max_tokens_per_rank)
        if not 0 <= t_hat <= limit:
            raise CapacityError(
                f"rank {self.ep_rank}: runtime_max_tokens_per_rank is {t_hat}, "
                f"but this channel was sized for max_tokens_per_rank={limit}"
            )
        if local_num_tokens > t_hat:
            raise CapacityError(
                f"rank {self.ep_rank}: {local_num_tokens} tokens to dispatch, "
                f"but runtime_max_tokens_per_rank is {t_hat}"
            )
        return t_hat

    def begin(self, comm: ExpertParallelComm) -> None:
        """Claim the channel for ``comm``'s dispatch."""
        self.check_usable("dispatch")
        if self.in_flight is not None:
            raise CommunicationError(
                f"rank {self.ep_rank}: dispatch while the dispatch of step {self.step} awaits its combine; "
                "one dispatch/combine pair may be in flight"
            )
        self.in_flight = comm

    def check_in_flight(self, comm: ExpertParallelComm, what: str) -> None:
        """Raise unless ``comm``'s dispatch is the one in flight."""
        self.check_usable(what)
        if self.in_flight is not comm:
            raise CommunicationError(f"rank {self.ep_rank}: {what} without a dispatch of this communicator in flight")

    def check_usable(self, what: str) -> None:
        """Raise if the channel was destroyed or a call on it broke off half-way."""
        if self.destroyed:
            raise CommunicationError(f"rank {self.ep_rank}: {what} on a destroyed channel")
        if self.failure is not None:
            raise CommunicationError(
                f"rank {self.ep_rank}: {what} on a channel that failed earlier; make a new group and channel. "
                f"The failure was: {self.failure}"
            )

    def end(self) -> None:
        """Release the channel after a combine, or after a dispatch that raised."""
        self.in_flight = None

    def destroy(self) -> None:
        """Release what the channel holds. Collective, idempotent."""
        self.destroyed = True
        self.in_flight = None


def check_member(group: dist.ProcessGroup | None) -> None:
    """Raise unless this process belongs to ``group``."""
    if group is not None and dist.get_rank(group) < 0:
        raise ConfigError("this process is not a member of the group given for expert parallelism")


def create_channel(
    group: dist.ProcessGroup | None = None,
    *,
    protocol: str = "auto",
    max_tokens_per_rank: int = 4096,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
    fp8_combine: bool = False,
) -> Channel:
    """The channel for ``protocol``. Collective over the group.

    Args:
        group: the ranks, or None for this process alone.
        protocol: ``auto``: loopback for one rank; ``one-sided`` where every rank has a GPU of its own on one host, with
            kernels for it, that reaches the others' memory; else collective. ``one-sided``: Sentinel up to the measured
            crossover in T̂ and Fence beyond it. Or ``loopback``, ``collective``, ``fence``, ``sentinel`` by name. The
            same on every rank. What ``auto`` takes, and why not ``one-sided``, is logged at level INFO.
        max_tokens_per_rank, timeout_s: see :class:`Channel`.
        device: where the layers run; None: the current GPU where there is one.
        fp8_combine: Fence returns partial results as E4M3 (see ``OneSidedChannel``). The same on every rank.

    Raises:
        ConfigError: an unknown protocol, or one that the group's size or another option rules out.
        RankMismatchError: ranks ask for different protocols, unless for ``collective`` or ``loopback``.
        UnsupportedDeviceError: a protocol that this group cannot run; says what would run instead.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"unknown protocol {protocol!r}; known: {', '.join(PROTOCOLS)}")
    ep_size = dist.get_world_size(group) if group is not None else 1
    if protocol == "loopback" and ep_size != 1:
        raise ConfigError(f"protocol 'loopback' serves one rank, but the group has {ep_size}")
    if protocol == "loopback" or (protocol == "auto" and ep_size == 1):
        from moe_layer.comm.loopback import LoopbackChannel

        return LoopbackChannel(max_tokens_per_rank=max_tokens_per_rank, timeout_s=timeout_s)
    reason = ""
    if protocol != "collective":
        from moe_layer.comm.feasible import one_sided_obstacle

        if group is None:
            raise ConfigError(f"protocol {protocol!r} needs a group; one process alone runs 'loopback'")
        check_member(group)
        place = torch.device(device) if device is not None else None
        if torch.cuda.is_available() and (place is None or (place.type == "cuda" and place.index is None)):
            place = torch.device("cuda", torch.cuda.current_device())
        # Ranks may differ in all that this depends on, so that every one asks the others, on a CPU too.
        obstacle = one_sided_obstacle(group, place, f"protocol={protocol!r} and fp8_combine={fp8_combine}")
        if obstacle is None:
            from moe_layer.comm.onesided import OneSidedChannel

            if protocol == "auto":
                logger.info("protocol='auto' takes one-sided over %d ranks, %s here", ep_size, place)
            return OneSidedChannel(
                group,
                protocol="auto" if protocol == "one-sided" else protocol,
                max_tokens_per_rank=max_tokens_per_rank,
                timeout_s=timeout_s,
                device=place,
                fp8_combine=fp8_combine,
            )
        if protocol != "auto":
            raise UnsupportedDeviceError(
                f"protocol {protocol!r} cannot run: {obstacle}; protocol='collective' works there"
            )
        logger.info("protocol='auto' takes collective over %d ranks: %s", ep_size, obstacle)
        reason = f": {obstacle}"
    if fp8_combine:
        raise ConfigError(
            f"fp8_combine is for the one-sided protocols, but protocol {protocol!r} takes another{reason}"
        )
    from moe_layer.comm.collective import CollectiveChannel

    return CollectiveChannel(group, max_tokens_per_rank=max_tokens_per_rank, timeout_s=timeout_s)
