"""Fence and Sentinel between emulated ranks: what arrives and what comes back, bitwise, against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from emulated_ranks import Group, missing_gpu
from kernel_pool import KernelPool
from one_sided_check import (
    Batch,
    Layer,
    byte_rows,
    check_received,
    check_same_bits,
    clean_ids,
    destinations,
    make_inputs,
    partial_results,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.timeout(120),
]

PROTOCOLS = ("fence", "sentinel", "auto")
MAX_TOKENS = 40
AUTO_LIMIT = 16  # with "auto", the largest T̂ of a Sentinel step

NARROW = Layer()
LAYERS: dict[int, dict[str, Layer]] = {
    1: {"narrow": NARROW, "odd bytes": Layer(9, 3, (130,), "uint8", (5,), hidden_size=65, output_dtype="float16")},
    2: {
        "narrow": NARROW,
        "top_k 1": Layer(9, 1),
        "top_k 5": Layer(13, 5, id_dtype="int64"),
        "top_k 7": Layer(10, 7),
        "top_k 9": Layer(18, 9),
        "top_k 22": Layer(61, 22, scale=(4,), scale_dtype="float32"),
        "top_k 32": Layer(40, 32, id_dtype="int64"),
        "more selections than experts": Layer(3, 7, weights=False),
        "V4.1-Flash": Layer(384, 6, (5120,), "float8_e4m3fn", (160,), "float8_e8m0fnu", hidden_size=5120),
        "odd bytes": Layer(9, 3, (130,), "uint8", (5,), hidden_size=65, output_dtype="float16"),
        "one byte": Layer(8, 2, (), "uint8", weights=False, id_dtype="int64"),
        "empty scales": Layer(scale=(0,), scale_dtype="float32"),
        "two dimensions": Layer(row=(3, 5), row_dtype="int16", scale=(2, 2), scale_dtype="float32"),
        "widest": Layer(
            64, 3, (16384,), "float32", hidden_size=16384, partial_dtype="float32", output_dtype="bfloat16"
        ),
        "fp32 partial results": Layer(16, 4, (48,), "float32", partial_dtype="float32"),
        "fp32 output": Layer(16, 4, output_dtype="float32"),
        "bf16 output": Layer(16, 4, output_dtype="bfloat16"),
        "table": Layer(8, 3, rank_of=(1, 0, 0, 1, 1, 1, 0, 1)),
        "one rank holds all": Layer(8, 2, rank_of=(1,) * 8),
    },
    3: {"experts not divisible": Layer(10, 5), "table": Layer(8, 3, rank_of=(2, 0, 1, 0, 2, 2, 1, 0))},
    4: {
        "fewer experts than ranks": Layer(3, 2),
        "fp32 partial results": Layer(33, 9, (100,), "uint8", partial_dtype="float32", output_dtype="bfloat16"),
    },
    6: {"experts not divisible": Layer(61, 7, id_dtype="int64")},
    8: {"V3": Layer(256, 8, (2048,), "float8_e4m3fn", (16,), "float32", hidden_size=1024)},
}
# T of the ranks is the first entries; T̂ on both sides of AUTO_LIMIT.
RAGGED = (20, 13, 0, 7, 1, 20, 3, 16)
FEW = (0, 3, 1, 2, 3, 0, 3, 1)
FULL = (MAX_TOKENS,) * 8
BATCHES = {
    "ragged": Batch(RAGGED, 20),
    "full, ids out of range, special payloads": Batch(FULL, MAX_TOKENS, "invalid", "special"),
    "few, duplicate ids, special payloads": Batch(FEW, 3, "duplicates", "special"),
}
# On narrow rows, whatever else can differ.
MORE_BATCHES = {
    "one token each": Batch((1,) * 8, 1),
    "one token in all": Batch((0, 1, 0, 0, 0, 0, 0, 0), 1),
    "no token on the last rank": Batch((5, 0, 5, 5, 5, 5, 5, 0), 5),
    "no token anywhere": Batch((0,) * 8, 8),
    "T̂ = 0": Batch((0,) * 8, 0),
    "T̂ above T": Batch((3, 5, 1, 0, 2, 2, 2, 2), MAX_TOKENS),
    "at the crossover": Batch((16, 16, 9, 16, 0, 16, 16, 16), AUTO_LIMIT, payload="special"),
    "past the crossover": Batch((17, 16, 9, 17, 0, 16, 16, 16), AUTO_LIMIT + 1, payload="special"),
    "all tokens alike": Batch(RAGGED, 20, "same"),
    "all tokens to one rank": Batch(FULL, MAX_TOKENS, "one rank"),
    "few to one rank": Batch(FEW, 3, "one rank", "special"),
    "no destination": Batch(RAGGED, 20, "none"),
    "few without destination": Batch(FEW, 3, "none"),
    "ids out of range": Batch(FEW, 3, "invalid"),
}
NARROW_OF = {1: "narrow", 2: "narrow", 3: "experts not divisible", 6: "experts not divisible", 8: "V3"}
CASES = [(ep_size, name) for ep_size, layers in LAYERS.items() for name in layers]


def for_ranks(batch: Batch, ep_size: int) -> Batch:
    return replace(batch, tokens=batch.tokens[:ep_size])


@pytest.fixture(scope="module")
def group(kernel_pool: KernelPool) -> Iterator[Callable[[int, str], Group]]:
    """``group(ep_size, protocol)``: all layers of LAYERS[ep_size] on one set of channels; new ones after a failure."""
    groups: dict[tuple[int, str], Group] = {}

    def take(ep_size: int, protocol: str) -> Group:
        found = groups.get((ep_size, protocol))
        if found is None or not found.usable:
            options = {"sentinel_tokens_per_rank": AUTO_LIMIT} if protocol == "auto" else {}
            found = Group(
                ep_size, protocol, LAYERS[ep_size], pool=kernel_pool, max_tokens_per_rank=MAX_TOKENS, **options
            )
            groups[ep_size, protocol] = found
        return found

    yield take
    for each in groups.values():
        each.close()


def run(ranks: Group, protocol: str, name: str, batch: Batch, seed: int) -> None:
    ranks.step(name, batch, seed)
    fence = protocol == "fence" or (protocol == "auto" and batch.t_hat > AUTO_LIMIT)
    assert ranks.served_by_fence() == [fence] * ranks.ep_size, "the other protocol served the step"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("ep_size", "name"), CASES)
def test_cases(group: Callable[[int, str], Group], ep_size: int, name: str, protocol: str) -> None:
    """Every layer, at several T̂ one after the other on one workspace."""
    ranks = group(ep_size, protocol)
    for batch in BATCHES.values():
        run(ranks, protocol, name, for_ranks(batch, ep_size), int(torch.randint(2**31, ())))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ep_size", NARROW_OF)
@pytest.mark.parametrize("batch", MORE_BATCHES)
def test_routing(group: Callable[[int, str], Group], ep_size: int, batch: str, protocol: str) -> None:
    """Every kind of routing and every T, on narrow rows."""
    ranks = group(ep_size, protocol)
    step = for_ranks(MORE_BATCHES[batch], ep_size)
    run(ranks, protocol, NARROW_OF[ep_size], step, int(torch.randint(2**31, ())))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ep_size", [2, 3, 8])
def test_layers_and_batches_in_any_order(group: Callable[[int, str], Group], ep_size: int, protocol: str) -> None:
    """Layers of all widths share the channel; T̂, widths and protocol change from step to step."""
    ranks = group(ep_size, protocol)
    names = list(LAYERS[ep_size])
    batches = [*BATCHES.values(), *(b for b in MORE_BATCHES.values() if b.ids != "one rank")]
    for _ in range(25):
        name = names[int(torch.randint(len(names), ()))]
        batch = for_ranks(batches[int(torch.randint(len(batches), ()))], ep_size)
        run(ranks, protocol, name, batch, int(torch.randint(2**31, ())))


@pytest.mark.parametrize("ep_size", [2, 3])
def test_protocols_agree(group: Callable[[int, str], Group], ep_size: int) -> None:
    """The same bits from every protocol, NaN included."""
    for name in LAYERS[ep_size]:
        for number, batch in enumerate(BATCHES.values()):
            outputs = [group(ep_size, p).step(name, for_ranks(batch, ep_size), number) for p in PROTOCOLS]
            for other in outputs[1:]:
                for a, b in zip(outputs[0], other):
                    assert torch.equal(byte_rows(a, len(a)), byte_rows(b, len(b))), f"{name}, {batch}"


@pytest.mark.parametrize("protocol", ["fence", "sentinel"])
def test_many_tokens(kernel_pool: KernelPool, protocol: str) -> None:
    """More tokens than blocks: each block serves several, in turn."""
    layers = {name: LAYERS[2][name] for name in ("narrow", "V4.1-Flash")}
    ranks = Group(2, protocol, layers, pool=kernel_pool, max_tokens_per_rank=700)
    for name in layers:
        for batch in (Batch((700, 430), 700), Batch((0, 650), 650, "invalid", "special"), Batch((9, 700), 700, "same")):
            ranks.step(name, batch, int(torch.randint(2**31, ())))
    ranks.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_few_blocks(kernel_pool: KernelPool, protocol: str, blocks: int) -> None:
    """Fewer blocks than parts of a token, or than ranks."""
    options = {"sentinel_tokens_per_rank": AUTO_LIMIT} if protocol == "auto" else {}
    layers = {name: LAYERS[2][name] for name in ("narrow", "V4.1-Flash")}
    ranks = Group(2, protocol, layers, pool=kernel_pool, max_blocks=blocks, **options)
    for name in layers:
        for batch in BATCHES.values():
            run(ranks, protocol, name, for_ranks(batch, 2), int(torch.randint(2**31, ())))
    ranks.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_workspace_grows_for_a_later_layer(kernel_pool: KernelPool, protocol: str) -> None:
    """A first layer that reserved nothing, a larger one, the first again with the T̂ that it had (vllm#42976)."""
    layers = {name: LAYERS[2][name] for name in ("narrow", "V4.1-Flash")}
    options = {"sentinel_tokens_per_rank": AUTO_LIMIT} if protocol == "auto" else {}
    ranks = Group(2, protocol, layers, pool=kernel_pool, reserve=False, **options)
    for name in ("narrow", "V4.1-Flash", "narrow", "V4.1-Flash"):
        for batch in BATCHES.values():
            ranks.step(name, for_ranks(batch, 2), int(torch.randint(2**31, ())))
    ranks.close()


def test_override_of_the_crossover(kernel_pool: KernelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LAYER_SENTINEL_LIMIT", "5")
    ranks = Group(2, "auto", {"narrow": NARROW}, pool=kernel_pool)
    for t_hat in (5, 6, 1, 40, 4, 0):
        ranks.step("narrow", Batch((t_hat, t_hat // 2), t_hat, payload="special"), t_hat)
        assert ranks.served_by_fence() == [t_hat > 5] * 2
    ranks.close()


@pytest.mark.parametrize("name", ["narrow", "odd bytes"])
def test_fp8_combine(kernel_pool: KernelPool, name: str) -> None:
    """Fence's option: partial results as E4M3, saturated, on the wire; sums in FP32 as ever."""
    layer = LAYERS[2][name]
    ranks = Group(2, "fence", {name: layer}, pool=kernel_pool, fp8_combine=True)
    for seed in range(4):
        batch = Batch((20, 13), 20, "invalid", ("random", "special")[seed % 2])
        inputs = make_inputs(layer, batch, seed)
        special = batch.payload == "special"
        arguments = [i.arguments(layer, device) for i, device in zip(inputs, ranks.devices)]
        for rank in range(2):
            ranks.warm(layer, batch, rank, arguments[rank])
        ranks.synchronize()
        results = []
        for rank, comm in enumerate(ranks.comms[name]):
            with ranks.on(rank):
                results.append(comm.dispatch(**arguments[rank], runtime_max_tokens_per_rank=20))
        ranks.check()
        for rank, comm in enumerate(ranks.comms[name]):
            check_received(layer, batch, inputs, results[rank], rank, 2, f"rank {rank}")
            buffer = comm.get_combine_input_buffer()
            buffer.fill_(torch.nan)
            taken = (results[rank].topk_ids != -1).any(1)
            ids, weights = results[rank].topk_ids[taken], results[rank].topk_weights[taken]
            rows = byte_rows(results[rank].hidden_states, len(taken))[taken]
            buffer[taken] = partial_results(layer, rank, special, ids, rows, weights)
        ranks.synchronize()
        kind = torch.bfloat16 if layer.output_dtype is None else torch.float16
        outputs = [
            torch.full((t, layer.hidden_size), torch.nan, dtype=kind, device=device)
            for t, device in zip(batch.tokens, ranks.devices)
        ]
        for rank, comm in enumerate(ranks.comms[name]):
            with ranks.on(rank):
                comm.combine(comm.get_combine_input_buffer(), output=outputs[rank])
        ranks.check()
        for source, given in enumerate(inputs):
            total = torch.zeros(batch.tokens[source], layer.hidden_size)
            sent = destinations(layer, given.ids, 2)
            for rank in range(2):
                ids, rows = clean_ids(layer, given.ids), byte_rows(given.rows, len(given.ids))
                part = partial_results(layer, rank, special, ids, rows, given.weights).float()
                part = part.clamp(-448, 448).to(torch.float8_e4m3fn).float()
                total = torch.where(sent[:, rank, None], total + part, total)
            check_same_bits(outputs[source], total.to(kind), f"{name}, seed {seed}, rank {source}")
    ranks.close()
