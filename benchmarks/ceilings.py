"""What the machine allows, measured in the same run as what is compared with it.

    push, pull   GB/s that each GPU stores to, or loads from, its peers while all do the same (16-byte accesses)
    flag         µs from a store on one GPU until a kernel on another has seen it
    launch       µs of an empty kernel in a CUDA graph with programmatic dependent launch

A floor is what a step could not beat if it did nothing but move its bytes at the measured rates; the latency floor adds
an empty kernel and a flag for each of dispatch and combine.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_layer.benchmarks.harness import Options, Work, measure
from moe_layer.benchmarks.ranks import LocalRank, Ranks
from moe_layer.comm.symmetric import SymmetricMemory, TorchSymmetricMemory, emulated_memories
from moe_layer.errors import CommunicationError, UnsupportedDeviceError
from moe_layer.kernel_cache import device_arch, get_kernel

# 42 MB: the combine of 4096 tokens of DeepSeek-V4.1-Flash.
ROW_BYTES, ROWS = 10240, 4096
BLOCKS_PER_SM = 2  # with 640 threads a block, more change nothing (docs/performance.md)
RATE = Options(warmup=3, steps=20, repeats=5)
FLAG_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Rates in GB/s (10⁹ bytes) a GPU and direction, times in µs."""

    push_gbps: float
    pull_gbps: float
    flag_us: float
    launch_us: float

    def floor_us(self, copies: int, dispatch_bytes: int, combine_bytes: int, *, combine_pulls: bool) -> dict[str, Any]:
        """The floors of a step whose busiest link carries ``copies`` rows each way."""
        dispatch = copies * dispatch_bytes / self.push_gbps / 1e3
        combine = copies * combine_bytes / (self.pull_gbps if combine_pulls else self.push_gbps) / 1e3
        latency = 2 * (self.launch_us + self.flag_us)
        return {
            "dispatch_us": dispatch,
            "combine_us": combine,
            "bytes_us": dispatch + combine,
            "latency_us": latency,
            "total_us": dispatch + combine + latency,
        }


def measure_ceilings(ranks: Ranks) -> dict[str, Any] | None:
    """:class:`Ceilings` as a dict, or None for one rank. Collective.

    Raises:
        UnsupportedDeviceError: no GPU, no CuTe DSL, ranks that share a GPU, or GPUs that cannot reach each other.
        CommunicationError: rows arrived other than they were sent, or a flag did not arrive.
    """
    if ranks.size == 1:
        return None
    if not ranks.is_cuda or ranks.share_devices:
        raise UnsupportedDeviceError("the link is measured between GPUs, one for each rank")
    memories = _memories(ranks, 2 * ROW_BYTES * ROWS)
    push = _link_rate(ranks, memories, pull=False)
    pull = _link_rate(ranks, memories, pull=True)
    return asdict(Ceilings(push, pull, _flag_latency(ranks, memories), launch_us(ranks)))


def _memories(ranks: Ranks, nbytes: int) -> list[SymmetricMemory]:
    if ranks.group is None:
        return list(emulated_memories(nbytes, [rank.device for rank in ranks.local]))
    return [TorchSymmetricMemory(nbytes, ranks.group, ranks.local[0].device)]


def _source_rows(rank: int, device: torch.device) -> torch.Tensor:
    """``[ROWS, ROW_BYTES]`` uint8, different on every rank and known to all."""
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randint(0, 256, (ROWS, ROW_BYTES), dtype=torch.uint8, device=device, generator=generator)


def _link_rate(ranks: Ranks, memories: list[SymmetricMemory], *, pull: bool) -> float:
    """GB/s. The source rows lie in the first half of each allocation, the target rows in the second."""
    from moe_layer.benchmarks.ceiling_kernels import LinkSpec, link_rows

    spec = LinkSpec(ranks.size, ROW_BYTES, pull)

    def work_of(rank: LocalRank, memory: SymmetricMemory) -> Work:
        kernel = get_kernel(link_rows, spec, "lll" + "iii", device_arch(rank.device))
        blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(rank.device).multi_processor_count
        halves = memory.local.view(2, ROWS, ROW_BYTES)

        def move() -> None:
            kernel(memory.local, memory.peers.data_ptr(), 0, ROW_BYTES * ROWS, rank.rank, ROWS, blocks)

        def refresh(repeat: int) -> None:
            halves[0].copy_(_source_rows(rank.rank, rank.device))
            halves[1].zero_()

        def check() -> None:
            """Row i of a source meets the peer at distance 1 + i mod (P − 1); so every target row has one source."""
            for distance in range(1, ranks.size):
                source = (rank.rank + (distance if pull else -distance)) % ranks.size
                rows = slice(distance - 1, None, ranks.size - 1)
                if not torch.equal(halves[1][rows], _source_rows(source, rank.device)[rows]):
                    what = "pulled" if pull else "pushed"
                    raise CommunicationError(f"rank {rank.rank}: rows {what} from rank {source} arrived damaged")

        return Work({"move": move}, refresh, check)

    works = [work_of(rank, memory) for rank, memory in zip(ranks.local, memories)]
    return ROW_BYTES * ROWS / measure(ranks, works, RATE).step_us / 1e3


def _flag_latency(ranks: Ranks, memories: list[SymmetricMemory]) -> float:
    """One-way µs between ranks 0 and 1, the median of :data:`FLAG_REPEATS` plays."""
    from moe_layer.benchmarks.ceiling_kernels import FlagSpec, ping_pong

    spec = FlagSpec(rounds=1000, untimed=100, max_polls=1 << 22)
    kernels = [get_kernel(ping_pong, spec, "lll" + "i", device_arch(rank.device)) for rank in ranks.local]
    latencies = []
    for repeat in range(FLAG_REPEATS + 1):  # the first play loads the kernel
        for memory in memories:
            memory.local[:128].zero_()
        ranks.synchronize()
        for rank, memory, kernel in zip(ranks.local, memories, kernels):
            if rank.rank < 2:
                mine, theirs = memory.addresses[rank.rank], memory.addresses[1 - rank.rank]
                with rank.active():
                    kernel(memory.local, mine, theirs, mine + 64, 1 - rank.rank)
        ranks.synchronize()
        times = [int(m.local[64:72].view(torch.int64)) for rank, m in zip(ranks.local, memories) if rank.rank < 2]
        played = [t for process in ranks.gather(times) for t in process]
        if repeat == 0:
            continue
        if min(played) == 0:
            raise CommunicationError("a flag sent between ranks 0 and 1 did not arrive")
        latencies.append(statistics.fmean(played) / (2 * spec.rounds) / 1e3)
    return statistics.median(latencies)


def launch_us(ranks: Ranks) -> float:
    """µs of an empty kernel in a CUDA graph with programmatic dependent launch."""
    from moe_layer.benchmarks.ceiling_kernels import EmptySpec, empty

    def work_of(rank: LocalRank) -> Work:
        kernel = get_kernel(empty, EmptySpec(), "i", device_arch(rank.device))
        anchor = torch.zeros(16, dtype=torch.uint8, device=rank.device)
        return Work({"empty": lambda: kernel(anchor, 0)})

    works = [work_of(rank) for rank in ranks.local]
    return measure(ranks, works, Options(repeats=5)).step_us
