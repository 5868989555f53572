"""Dispatch that quantizes BF16 rows itself, between emulated ranks: the bits of the references, then dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_ranks import Group, missing_gpu, specs_of
from kernel_pool import KernelPool, tasks_of
from one_sided_check import Batch, Inputs, Layer, check_received, make_inputs

from moe_layer.comm.encoder import Encoder
from moe_layer.quant import get_format
from moe_layer.wire import Wire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.timeout(180),
]

PROTOCOLS = ("fence", "sentinel")
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4", "nvfp4, one scale")
WIDTHS = (128, 320, 3584, 5120, 7168)
COMMON_SCALE = 0.0021
MAX_TOKENS = 66


def common_scale(name: str) -> torch.Tensor | None:
    return torch.tensor(COMMON_SCALE) if name.endswith("one scale") else None


def layer_of(name: str, columns: int, **changes: Any) -> Layer:
    """What travels, in bytes but where dtypes are torch's own."""
    fmt = get_format(name.split(",")[0])
    rows, scale = fmt.to_wire(fmt.quantize(torch.zeros(1, columns), global_scale=common_scale(name)))
    assert scale is not None
    return Layer(
        12, 3, (rows.shape[1],), str(rows.dtype).removeprefix("torch."), (scale.shape[1],),
        str(scale.dtype).removeprefix("torch."), **changes,
    )  # fmt: skip


def values(tokens: int, columns: int, payload: str, generator: torch.Generator) -> torch.Tensor:
    """``[tokens, columns]`` BF16 on the CPU: normal values of rows of several sizes, or rows that break others.

    Special rows: any bits; all alike and negative, which makes 4-bit words equal to Sentinel's; NaN in every block;
    zeros of both signs; the smallest and the largest numbers.
    """
    x = torch.randn(tokens, columns, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (tokens, 1), generator=generator).float()
    )
    x = x.bfloat16()
    if payload == "special":
        bits = x.view(torch.int16)
        for row in range(tokens):
            kind = row % 6
            if kind == 0:
                bits[row] = torch.randint(-(2**15), 2**15, (columns,), generator=generator).to(torch.int16)
            elif kind == 1:
                x[row] = -6.0
            elif kind == 2:
                x[row, ::16] = torch.nan
            elif kind == 3:
                x[row] = torch.where(torch.rand(columns, generator=generator) < 0.5, 0.0, -0.0)
            elif kind == 4:
                x[row] = torch.where(torch.rand(columns, generator=generator) < 0.5, 3e38, 1e-40)
    return x


class QuantizingGroup(Group):
    """Ranks whose dispatch gets BF16 values; ``columns`` of each layer, and its format, by its name."""

    def __init__(self, ep_size: int, protocol: str, chosen: dict[str, tuple[str, int]], **options: Any) -> None:
        self.chosen = chosen
        layers = {key: layer_of(name, columns) for key, (name, columns) in chosen.items()}
        self.encoders: dict[tuple[str, torch.device], Encoder] = {}
        super().__init__(ep_size, protocol, layers, max_tokens_per_rank=MAX_TOKENS, timeout_s=5.0, **options)

    def encoder(self, key: str, device: torch.device) -> Encoder:
        name, _ = self.chosen[key]
        if (key, device) not in self.encoders:
            scale = common_scale(name)
            self.encoders[key, device] = Wire(get_format(name.split(",")[0]), in_kernel=True).encoder(
                None if scale is None else scale.to(device)
            )
        return self.encoders[key, device]

    def compile(self, pool: KernelPool, *, fp8: bool) -> None:
        from moe_layer.kernel_cache import device_arch

        arch = device_arch(self.devices[0])
        tasks = []
        for key, layer in self.layers.items():
            dispatch, combine = specs_of(layer, self.ep_size, fp8)
            kernel = self.encoder(key, self.devices[0]).kernel
            tasks += tasks_of([replace(spec, encoder=kernel) for spec in dispatch], combine, arch)
        pool.compile(tasks)

    def given(self, name: str, batch: Batch, seed: int) -> tuple[list[Inputs], list[dict[str, Any]]]:
        fmt_name, columns = self.chosen[name]
        fmt = get_format(fmt_name.split(",")[0])
        generator = torch.Generator().manual_seed(seed)
        for device in self.devices:  # what tells dtypes and shapes must not load a kernel while a rank waits
            self.encoder(name, device).quantize(torch.empty(0, columns, dtype=torch.bfloat16, device=device))
        inputs, arguments = [], []
        for rank, (made, device) in enumerate(zip(make_inputs(self.layers[name], batch, seed), self.devices)):
            x = values(batch.tokens[rank], columns, batch.payload, generator)
            rows, scale = fmt.to_wire(fmt.quantize(x, global_scale=common_scale(fmt_name)))
            given = replace(made, rows=rows, scale=scale)
            inputs.append(given)
            arguments.append(
                {
                    **given.arguments(self.layers[name], device),
                    "hidden_states": x.to(device),
                    "hidden_states_scale": None,
                    "encoder": self.encoder(name, device),
                }
            )
        return inputs, arguments


BATCHES = {
    "T = 0": Batch((0, 0, 0), 0),
    "no token on some ranks": Batch((0, 3, 0), 3),
    "T = 1": Batch((1, 1, 1), 1),
    "special, few": Batch((12, 12, 5), 12, payload="special"),
    "T = 33": Batch((33, 33, 33), 33),
    "ragged, special, duplicate ids": Batch((MAX_TOKENS, 7, 0), MAX_TOKENS, "duplicates", "special"),
    "ids out of range": Batch((20, 1, 9), 40, "invalid"),
}


def for_ranks(batch: Batch, ep_size: int) -> Batch:
    return replace(batch, tokens=batch.tokens[:ep_size])


@pytest.fixture(scope="module")
def group(kernel_pool: KernelPool) -> Iterator[Callable[..., QuantizingGroup]]:
    groups: dict[Any, QuantizingGroup] = {}

    def take(ep_size: int, protocol: str, columns: int, **options: Any) -> QuantizingGroup:
        key = (ep_size, protocol, columns, *options.items())
        found = groups.get(key)
        if found is None or not found.usable:
            chosen = {name: (name, columns) for name in FORMATS}
            found = groups[key] = QuantizingGroup(ep_size, protocol, chosen, pool=kernel_pool, **options)
        return found

    yield take
    for each in groups.values():
        each.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", FORMATS)
def test_bits(group: Callable[..., QuantizingGroup], name: str, columns: int, protocol: str) -> None:
    """Every format and width, at every kind of step, one after the other on one workspace."""
    ranks = group(2, protocol, columns)
    for batch in BATCHES.values():
        ranks.step(name, for_ranks(batch, 2), int(torch.randint(2**31, ())))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_three_ranks(group: Callable[..., QuantizingGroup], protocol: str) -> None:
    ranks = group(3, protocol, 3584)
    for name in FORMATS:
        for batch in BATCHES.values():
            ranks.step(name, batch, int(torch.randint(2**31, ())))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_few_blocks(group: Callable[..., QuantizingGroup], protocol: str, blocks: int) -> None:
    """Each block serves many tokens, in turn: the scales' shared memory is used again and again."""
    ranks = group(2, protocol, 5120, max_blocks=blocks)
    for name in FORMATS:
        for batch in BATCHES.values():
            ranks.step(name, for_ranks(batch, 2), int(torch.randint(2**31, ())))


@pytest.mark.parametrize("how", ["misaligned", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_need_more(
    group: Callable[..., QuantizingGroup], name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that start anywhere are copied first; FP32 values are quantized first: still the references' bits."""
    ranks = group(2, "fence", 320)
    original = ranks.given

    def given(key: str, batch: Batch, seed: int) -> tuple[list[Inputs], list[dict[str, Any]]]:
        inputs, arguments = original(key, batch, seed)
        for each in arguments:
            x = each["hidden_states"]
            if how == "misaligned":
                flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
                flat[1:] = x.flatten()
                each["hidden_states"] = flat[1:].view(x.shape)
            else:
                each["hidden_states"] = x.float()
                each["encoder"].quantize(each["hidden_states"])  # loads its kernels while no rank waits
        return inputs, arguments

    monkeypatch.setattr(ranks, "given", given)
    ranks.step(name, Batch((9, 4), 9), int(torch.randint(2**31, ())))


def test_graph(group: Callable[..., QuantizingGroup]) -> None:
    """A captured dispatch quantizes what lies in its input when it is replayed."""
    ranks = group(2, "sentinel", 5120)
    batch = Batch((9, 4), 9)
    for name in FORMATS:
        ranks.step(name, batch, 1)
        _, arguments = ranks.given(name, batch, 2)
        results, graphs = [], []
        for rank, comm in enumerate(ranks.comms[name]):
            ranks.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=ranks.streams[rank]):
                results.append(comm.dispatch(**arguments[rank], runtime_max_tokens_per_rank=batch.t_hat))
                comm.combine(comm.get_combine_input_buffer())
            graphs.append(graph)
        for seed in (3, 4):
            inputs, fresh = ranks.given(name, batch, seed)
            for old, new in zip(arguments, fresh):
                for key in ("hidden_states", "topk_ids", "topk_weights"):
                    old[key].copy_(new[key])
            ranks.poison(0x7F, 0x3F)
            ranks.synchronize()
            for rank, graph in enumerate(graphs):
                with ranks.on(rank):
                    graph.replay()
            ranks.check()
            for rank, result in enumerate(results):
                check_received(ranks.layers[name], batch, inputs, result, rank, 2, f"{name}, seed {seed}, rank {rank}")
