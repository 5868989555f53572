"""What whole layers ask the compiler for, so that all cores can compile it before processes run them.

In a worker of a :class:`~kernel_pool.KernelPool`, emulated ranks run the layers with kernels that do nothing. A worker
only compiles afterwards, so that what the library's modules keep of those kernels does no harm.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from kernel_pool import KernelPool, Task
from layers import config, fill

from moe_layer import ExpertParallel, MoELayer, kernel_cache
from moe_layer.comm.emulation import emulated_channels

LayerMade = tuple[str, dict[str, Any]]  # name of a config, options of MoELayer


def compile_whole_layers(
    pool: KernelPool, layers: Sequence[LayerMade], tokens: Sequence[int], tokens_per_rank: Sequence[int]
) -> str:
    """Compile what the layers need on ``len(tokens)`` ranks that share a channel, whatever its protocol.

    Args:
        tokens: T of each rank.
        tokens_per_rank: T̂ of each step.

    Returns:
        why something may be missing, which then costs the processes time; empty if nothing is.
    """
    tasks, problem = pool.call(tasks_of_layers, list(layers), tuple(tokens), tuple(tokens_per_rank))
    pool.compile(tasks)
    return str(problem)


def tasks_of_layers(
    made: list[LayerMade], tokens: tuple[int, ...], tokens_per_rank: tuple[int, ...]
) -> tuple[list[Task], str]:
    """(tasks, traceback or nothing); see :func:`compile_whole_layers`."""
    device = torch.device("cuda", torch.cuda.current_device())
    tasks: list[Task] = []

    def record(launch: Any, spec: Any, signature: str, arch: str) -> Any:
        tasks.append((launch.__module__, launch.__name__, spec, signature, arch))
        return lambda *arguments: None

    channels = emulated_channels([device] * len(tokens), protocol="auto", max_tokens_per_rank=max(tokens_per_rank))
    try:
        ranks = []
        for channel in channels:
            with mock.patch("moe_layer.parallel.create_channel", return_value=channel):
                ep = ExpertParallel(device=device)
            ranks.append([fill(MoELayer(config(name), ep, device=device, **options), 0) for name, options in made])
        with (
            mock.patch.object(kernel_cache, "_load_or_compile", record),
            mock.patch.object(kernel_cache, "_memory", {}),
        ):
            # Tokens are quantized in dispatch, or, as without a one-sided transport, by a kernel before it.
            for environment in ({}, {"MOE_LAYER_FUSED_LIMIT": "-1"}):
                with mock.patch.dict("os.environ", environment):
                    for number in range(len(made)):
                        for t_hat in tokens_per_rank:
                            for layers, count in zip(ranks, tokens):
                                step(layers[number], count, t_hat)
    except Exception:
        return tasks, traceback.format_exc()
    return tasks, ""


def step(layer: MoELayer, tokens: int, t_hat: int) -> None:
    dtype = torch.float32 if layer.partial_dtype == torch.float32 else torch.bfloat16
    layer(torch.randn(tokens, layer.cfg.hidden_size, device=layer.device).to(dtype), tokens_per_rank=t_hat)
