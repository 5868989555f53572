"""Ranks that live in this process, each on a stream of its own: one-sided steps on one GPU or several.

A :class:`Group` drives all ranks from one thread and checks every step against :mod:`one_sided_check`. Before a
step, workspaces are filled with patterns that look like data; after it, every word must be at rest that has to be.
"""

from __future__ import annotations

from typing import Any

import torch
from kernel_pool import KernelPool, tasks_of
from one_sided_check import (
    Batch,
    Inputs,
    Layer,
    byte_rows,
    check_received,
    check_same_bits,
    dtype_of,
    expected_output,
    make_inputs,
    partial_results,
)

from moe_layer.comm import ExpertPlacement
from moe_layer.comm.rows import aligned_rows


def missing_gpu(gpus: int = 1) -> str | None:
    """Why this machine cannot run one-sided kernels, or None."""
    from moe_layer.kernel_cache import dsl_available

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if torch.cuda.device_count() < gpus:
        return f"needs {gpus} CUDA GPUs"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs a GPU of compute capability 9.0 or newer"
    if not dsl_available():
        return "needs the CuTe DSL (pip install 'moe-layer[cuda]')"
    return None


_streams: dict[tuple[torch.device, int], Any] = {}


def stream_of(device: torch.device, rank: int) -> Any:
    """The stream of rank ``rank``, one for the whole session: few enough that none share a hardware queue."""
    if (device, rank) not in _streams:
        _streams[device, rank] = torch.cuda.Stream(device)
    return _streams[device, rank]


class Group:
    """Emulated ranks.

    Args:
        ep_size: ranks.
        protocol: as for a channel.
        layers: by name; they share the channels.
        pool: compiles what the layers need; None: compiled here, one after another.
        reserve: announce every layer's rows before the first step.
        devices: of the ranks; None: the GPUs in turn.
        options: of the channels.
    """

    def __init__(
        self,
        ep_size: int,
        protocol: str,
        layers: dict[str, Layer],
        *,
        pool: KernelPool | None = None,
        reserve: bool = True,
        max_tokens_per_rank: int = 40,
        timeout_s: float = 2.0,
        devices: list[torch.device] | None = None,
        **options: Any,
    ) -> None:
        from moe_layer.comm.emulation import emulated_channels

        self.ep_size = ep_size
        self.layers = layers
        self.devices = devices or [torch.device("cuda", r % torch.cuda.device_count()) for r in range(ep_size)]
        self.streams = [stream_of(device, r) for r, device in enumerate(self.devices)]
        self.channels = emulated_channels(
            self.devices,
            protocol=protocol,
            max_tokens_per_rank=max_tokens_per_rank,
            timeout_s=timeout_s,
            **options,
        )
        if pool is not None:
            self.compile(pool, fp8=bool(options.get("fp8_combine")))
        self.comms = {
            name: [channel.communicator(layer.placement(ep_size), layer.hidden_size) for channel in self.channels]
            for name, layer in layers.items()
        }
        if reserve:
            for name, layer in layers.items():
                for comm in self.comms[name]:
                    comm.reserve(layer.row_bytes, layer.scale_bytes, layer.top_k, layer.partial_bytes)

    def compile(self, pool: KernelPool, *, fp8: bool) -> None:
        compile_layers(pool, self.ep_size, list(self.layers.values()), fp8=fp8)

    @property
    def usable(self) -> bool:
        """Whether every step so far went well."""
        return all(channel.failure is None and channel.in_flight is None for channel in self.channels)

    def synchronize(self) -> None:
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def check(self) -> None:
        """Wait for all ranks and raise what any of them reported, of all of them in one."""
        errors = []
        for channel in self.channels:
            try:
                channel.check()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        if errors:
            raise AssertionError("; ".join(errors))

    def on(self, rank: int) -> Any:
        """A context in which work goes to the rank's stream."""
        return torch.cuda.stream(self.streams[rank])

    def poison(self, ids: int, data: int) -> None:
        """Fill the dispatch workspaces with bytes ``ids``, which look like ids, and the combine workspaces."""
        for channel in self.channels:
            if channel.memory is None:
                continue
            for name, value in (("dispatch", ids), ("combine", data)):
                start = channel.layout.offsets[name]
                channel.memory.local[start : start + channel.layout.sizes[name]].fill_(value)

    def check_at_rest(self) -> None:
        """Every word of the landing, meta, escape and combine slots holds the sentinel again."""
        self.synchronize()
        for rank, channel in enumerate(self.channels):
            if channel.memory is None:
                continue
            start, length = channel.layout.sentinel_region
            words = channel.memory.local[start : start + length].view(torch.int64)
            left = (words != -1).nonzero()[:, 0]
            if len(left):
                at = start + 8 * int(left[0])
                region = max((offset, name) for name, offset in channel.layout.offsets.items() if offset <= at)
                raise AssertionError(
                    f"rank {rank}: {len(left)} double words are not at rest, the first in {region[1]}, "
                    f"byte {at - region[0]}"
                )

    def served_by_fence(self) -> list[bool]:
        """For each rank, whether Fence served the last step: Sentinel does not touch the dispatch flags."""
        from moe_layer.comm.layout import SyncOffsets

        self.synchronize()
        answers = []
        for rank, channel in enumerate(self.channels):
            words = channel.memory.local[:16].view(torch.int32)
            at = SyncOffsets(self.ep_size).dispatch_flags + 8 * rank
            flag = channel.memory.local[at : at + 8].view(torch.int32)
            answers.append(int(flag[1]) == int(words[1]))
        return answers

    def given(self, name: str, batch: Batch, seed: int) -> tuple[list[Inputs], list[dict[str, Any]]]:
        """For each rank: what must travel, and the arguments of dispatch."""
        layer = self.layers[name]
        inputs = make_inputs(layer, batch, seed)
        return inputs, [i.arguments(layer, device) for i, device in zip(inputs, self.devices)]

    def step(self, name: str, batch: Batch, seed: int) -> list[torch.Tensor]:
        """One step of layer ``name`` on all ranks; AssertionError where anything differs from the oracle."""
        layer, comms = self.layers[name], self.comms[name]
        assert len(batch.tokens) == self.ep_size
        label = f"{self.ep_size} ranks, seed {seed}, {layer}, {batch}"
        inputs, arguments = self.given(name, batch, seed)
        for comm in comms:
            self.warm(layer, batch, comm.ep_rank, arguments[comm.ep_rank])
        self.poison(0x7F if seed % 2 else 0x00, 0xFF)
        self.synchronize()

        results = []
        for rank, comm in enumerate(comms):
            with self.on(rank):
                results.append(comm.dispatch(**arguments[rank], runtime_max_tokens_per_rank=batch.t_hat))
        self.check()
        for rank, result in enumerate(results):
            check_received(layer, batch, inputs, result, rank, self.ep_size, f"{label}: rank {rank}")

        special = batch.payload == "special"
        for rank, (comm, result) in enumerate(zip(comms, results)):
            buffer = comm.get_combine_input_buffer(dtype_of(layer.partial_dtype))
            assert tuple(buffer.shape) == (self.ep_size * batch.t_hat, layer.hidden_size), label
            taken = (result.topk_ids != -1).any(1)
            ids, rows = result.topk_ids[taken], byte_rows(result.hidden_states, len(taken))[taken]
            weights = None if result.topk_weights is None else result.topk_weights[taken]
            buffer[taken] = partial_results(layer, rank, special, ids, rows, weights)
        outputs = [self._output(layer, batch, seed, rank) for rank in range(self.ep_size)]
        # The caller may write into the channel's buffer or bring a tensor of its own.
        buffers = [comm.get_combine_input_buffer(dtype_of(layer.partial_dtype)) for comm in comms]
        given = (
            [buffer.clone(memory_format=torch.contiguous_format) for buffer in buffers] if seed % 3 == 0 else buffers
        )
        self.synchronize()
        combined = []
        for rank, comm in enumerate(comms):
            with self.on(rank):
                combined.append(comm.combine(given[rank], output=outputs[rank]))
        self.check()
        for rank in range(self.ep_size):
            assert outputs[rank] is None or combined[rank] is outputs[rank], label
            expected = expected_output(layer, inputs[rank], special, self.ep_size)
            check_same_bits(combined[rank], expected, f"{label}: combine on rank {rank}")
        self.check_at_rest()
        return combined

    def _output(self, layer: Layer, batch: Batch, seed: int, rank: int) -> torch.Tensor | None:
        """A poisoned output, every second time one whose rows do not follow one another."""
        if layer.output_dtype is None:
            return None
        spread = 1 + seed % 2
        shape = (batch.tokens[rank] * spread, layer.hidden_size)
        return torch.full(shape, torch.nan, dtype=dtype_of(layer.output_dtype), device=self.devices[rank])[::spread]

    def warm(self, layer: Layer, batch: Batch, rank: int, arguments: dict[str, Any]) -> None:
        """Run torch's part of a step on the rank's stream.

        One thread drives all ranks. CUDA may load a torch kernel, or the allocator ask for memory, only once the GPU is
        idle, and so for ever if that happens while a rank already waits for the next.
        """
        with self.on(rank):
            aligned_rows(arguments["hidden_states"])
            aligned_rows(arguments["hidden_states_scale"])
            partial, device = dtype_of(layer.partial_dtype), self.devices[rank]
            padded = -(-layer.hidden_size * partial.itemsize // 16) * 16 // partial.itemsize
            slots = self.ep_size * batch.t_hat
            own = torch.zeros(slots, layer.hidden_size, dtype=partial, device=device)
            torch.empty(slots, padded, dtype=partial, device=device)[:, : layer.hidden_size].copy_(own)
            for wire in (torch.bfloat16, torch.float32):
                wide = torch.zeros(batch.tokens[rank], padded, dtype=wire, device=device)
                for stride in (1, 2):
                    shape = (batch.tokens[rank] * stride, layer.hidden_size)
                    kind = dtype_of(layer.output_dtype) if layer.output_dtype else partial
                    torch.empty(shape, dtype=kind, device=device)[::stride].copy_(wide[:, : layer.hidden_size])

    def close(self) -> None:
        for channel in self.channels:
            channel.destroy()


def compile_layers(pool: KernelPool, ep_size: int, layers: list[Layer], *, fp8: bool = False) -> None:
    """Compile what the layers need on ``ep_size`` ranks, for the current GPU."""
    from moe_layer.kernel_cache import device_arch

    arch = device_arch(torch.device("cuda", torch.cuda.current_device()))
    pool.compile(task for layer in layers for task in tasks_of(*specs_of(layer, ep_size, fp8), arch))


def specs_of(layer: Layer, ep_size: int, fp8: bool = False) -> tuple[list[Any], list[Any]]:
    """The DispatchSpecs and CombineSpecs that a layer needs, for compiling ahead."""
    from moe_layer.comm.layout import align
    from moe_layer.comm.spec import CombineSpec, DispatchSpec

    placement = layer.placement(ep_size)
    contiguous = placement == ExpertPlacement.contiguous(layer.num_experts, ep_size)
    dispatch = DispatchSpec(
        ep_size, layer.top_k, layer.num_experts, contiguous, align(layer.row_bytes), align(layer.scale_bytes),
        layer.weights, dtype_of(layer.id_dtype).itemsize,
    )  # fmt: skip
    combine = [
        CombineSpec(ep_size, align(layer.hidden_size * max(2, element)), element, output)
        for element in ((1, 2, 4) if fp8 else (2, 4))
        for output in (2, 4)
    ]
    return [dispatch], combine
