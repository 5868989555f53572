"""Ranks that disagree, stay away, fail or misuse the channel: an error on every rank that says what it was, no hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from emulated_ranks import Group, compile_layers, missing_gpu
from kernel_pool import KernelPool
from one_sided_check import Batch, Layer, dtype_of, make_inputs

from moe_layer.errors import (
    CapacityError,
    CommunicationError,
    CommunicationTimeoutError,
    RankMismatchError,
    TensorError,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_gpu() is not None, reason=str(missing_gpu())),
    pytest.mark.timeout(60),
]

PROTOCOLS = ("fence", "sentinel")
NAMES = {"fence": "dispatch (fence)", "sentinel": "dispatch (sentinel)"}
COMBINES = {"fence": "combine (fence)", "sentinel": "combine (sentinel)"}
BASE = Layer(12, 3, (64,), "uint8", (16,), hidden_size=64)
TIMEOUT_S = 0.5
LONG_TIMEOUT_S = 5.0  # no error that a test expects may be a time-out in disguise
HALF_A_SECOND = 900_000_000  # cycles, about
ODD = 1  # the rank that does otherwise


def dispatch_all(
    group: Group, layers: list[str], batches: list[Batch], ranks: list[int] | None = None, asleep: int | None = None
) -> list[Any]:
    """Every rank's dispatch, rank r of its own layer and batch, without waiting; all inputs exist before the first.

    Rank ``asleep`` sleeps first.
    """
    arguments = []
    for rank in range(group.ep_size):
        layer = group.layers[layers[rank]]
        given = make_inputs(layer, replace(batches[rank], ids="random"), 7 + rank)[rank]
        arguments.append(given.arguments(layer, group.devices[rank]))
    group.synchronize()
    results = []
    for rank in range(group.ep_size) if ranks is None else ranks:
        with group.on(rank):
            if rank == asleep:
                torch.cuda._sleep(HALF_A_SECOND)
            comm = group.comms[layers[rank]][rank]
            results.append(comm.dispatch(**arguments[rank], runtime_max_tokens_per_rank=batches[rank].t_hat))
    return results


def error_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def full(group: Group, t_hat: int) -> Batch:
    return Batch((t_hat,) * group.ep_size, t_hat)


def step_number(group: Group) -> int:
    return group.channels[0].step


def check_dead(group: Group, rank: int, name: str, text: str) -> None:
    """Later calls raise at once, with the first failure's text, and the channel can still be destroyed."""
    start = time.monotonic()
    layer = group.layers[name]
    rows = torch.zeros(1, *layer.row, dtype=dtype_of(layer.row_dtype), device=group.devices[rank])
    ids = torch.zeros(1, layer.top_k, dtype=torch.int32, device=group.devices[rank])
    for _ in range(2):
        with pytest.raises(CommunicationError) as caught:
            group.comms[name][rank].dispatch(rows, ids)
        assert text in str(caught.value)
    group.channels[rank].destroy()
    group.channels[rank].destroy()
    assert time.monotonic() - start < 1.0


# --- ranks that disagree ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mismatch:
    """What the odd rank does otherwise, and what the message must say of it: name, usual value, odd value."""

    layer: Layer = BASE
    t_hat: int = 8
    name: str = ""
    usual: int = 0
    odd: int = 0


MISMATCHES = {
    "T̂": Mismatch(t_hat=9, name="runtime_max_tokens_per_rank", usual=8, odd=9),
    "payload width": Mismatch(replace(BASE, row=(80,)), name="hidden bytes", usual=64, odd=80),
    "scale width": Mismatch(replace(BASE, scale=(32,)), name="scale bytes", usual=16, odd=32),
    "no scales": Mismatch(replace(BASE, scale=None), name="scale bytes", usual=16, odd=0),
    "top_k": Mismatch(replace(BASE, top_k=4), name="top_k", usual=3, odd=4),
    "experts": Mismatch(replace(BASE, num_experts=15), name="num_experts", usual=12, odd=15),
    "placement": Mismatch(replace(BASE, rank_of=(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0)), name="placement"),
    "no weights": Mismatch(replace(BASE, weights=False)),
}
AMONG_THREE = ("T̂", "payload width", "top_k")


@pytest.fixture(scope="module", autouse=True)
def compiled(kernel_pool: KernelPool) -> None:
    """All layers at once, which takes all cores no longer than one after another takes each."""
    layers = [BASE, *(case.layer for case in MISMATCHES.values())]
    compile_layers(kernel_pool, 2, layers)
    compile_layers(kernel_pool, 3, [MISMATCHES[kind].layer for kind in AMONG_THREE])


@pytest.mark.parametrize(
    ("kind", "ep_size"), [*((kind, 2) for kind in MISMATCHES), *((kind, 3) for kind in AMONG_THREE)]
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dispatch_mismatch(kernel_pool: KernelPool, kind: str, protocol: str, ep_size: int) -> None:
    case = MISMATCHES[kind]
    layers = {"usual": BASE, "odd": case.layer}
    group = Group(ep_size, protocol, layers, pool=kernel_pool, timeout_s=LONG_TIMEOUT_S)
    for name in layers:  # so that no rank compiles while another waits
        group.step(name, full(group, 8), 1)
    names = ["odd" if r == ODD else "usual" for r in range(ep_size)]
    batches = [full(group, case.t_hat if r == ODD else 8) for r in range(ep_size)]
    start = time.monotonic()
    dispatch_all(group, names, batches)
    texts = [error_of(channel.check, RankMismatchError) for channel in group.channels]
    assert time.monotonic() - start < 1.0
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}, step {step_number(group)}, {NAMES[protocol]}: "), text
        peers = [r for r in range(ep_size) if (r == ODD) != (rank == ODD)]
        (peer,) = [r for r in peers if f"ranks {rank} and {r} disagree: " in text]
        if case.name and kind != "placement":
            values = {r: case.odd if r == ODD else case.usual for r in (rank, peer)}
            assert f"{case.name} is {values[rank]} on rank {rank} and {values[peer]} on rank {peer}" in text
        elif case.name:
            assert f"{case.name} is " in text
            assert f" on rank {rank} and " in text
        else:
            assert "protocol, hidden_size, router weights or fused quantization differ" in text
        check_dead(group, rank, "usual", text)


@pytest.mark.parametrize("small_on", [0, 1])
def test_ranks_on_both_sides_of_the_crossover(kernel_pool: KernelPool, small_on: int) -> None:
    """T̂ that differ so far that one rank takes Sentinel and the other Fence (sglang#27945)."""
    group = Group(2, "auto", {"usual": BASE}, pool=kernel_pool, timeout_s=LONG_TIMEOUT_S, sentinel_tokens_per_rank=16)
    for t_hat in (8, 24):
        group.step("usual", full(group, t_hat), 1)
    start = time.monotonic()
    dispatch_all(group, ["usual"] * 2, [full(group, 8 if r == small_on else 24) for r in range(2)])
    texts = [error_of(channel.check, RankMismatchError) for channel in group.channels]
    assert time.monotonic() - start < 1.0
    for rank, text in enumerate(texts):
        mine, theirs = (8, 24) if rank == small_on else (24, 8)
        assert f"runtime_max_tokens_per_rank is {mine} on rank {rank} and {theirs} on rank {1 - rank}" in text


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("wide_on", [0, 1])
@pytest.mark.parametrize("kind", ["dtype", "width"])
def test_combine_mismatch(kernel_pool: KernelPool, kind: str, wide_on: int, protocol: str) -> None:
    """Partial results in FP32 on one rank and BF16 on the other, or layers of different hidden_size."""
    odd = replace(BASE, hidden_size=128) if kind == "width" else replace(BASE, partial_dtype="float32")
    layers = {"usual": BASE, "odd": odd}
    group = Group(2, protocol, layers, pool=kernel_pool, timeout_s=LONG_TIMEOUT_S)
    for name in layers:
        group.step(name, full(group, 8), 1)
    names = ["odd" if r == wide_on else "usual" for r in range(2)]
    start = time.monotonic()
    dispatch_all(group, names, [full(group, 8)] * 2)
    group.synchronize()
    texts: dict[int, str] = {}
    collect(group, texts)
    if not texts:
        combine_all(group, names)
        collect(group, texts)
    # Where the data told a rank nothing, its next dispatch must.
    for rank in range(2):
        if rank not in texts:
            dispatch_all(group, names, [full(group, 8)] * 2, [rank])
            texts[rank] = error_of(group.channels[rank].check, RankMismatchError)
    assert time.monotonic() - start < 2.0
    for rank, text in texts.items():
        assert text.startswith(f"rank {rank}, step ")
        assert f"rank {1 - rank}" in text or f"ranks {rank} and {1 - rank}" in text
        assert "combine" in text or "hidden" in text, text


def test_combine_mismatch_that_nobody_waited_for(kernel_pool: KernelPool) -> None:
    """Sentinel ranks that sent each other nothing compare their combines in the next step."""
    layers = {"usual": BASE, "odd": replace(BASE, partial_dtype="float32")}
    group = Group(2, "sentinel", layers, pool=kernel_pool, timeout_s=LONG_TIMEOUT_S)
    for name in layers:
        group.step(name, full(group, 8), 1)
    names, nothing = ["usual", "odd"], [Batch((0, 0), 8)] * 2
    dispatch_all(group, names, nothing)
    group.check()
    combine_all(group, names)
    group.check()
    bad_step = step_number(group)
    start = time.monotonic()
    dispatch_all(group, names, nothing)
    texts: dict[int, str] = {}
    collect(group, texts)  # of a rank that had to wait long enough to look
    if not texts:
        combine_all(group, names)
        collect(group, texts)
    assert texts
    assert time.monotonic() - start < 1.0
    for rank, text in texts.items():
        size = 2 if rank == 1 else 4
        assert text == (
            f"rank {rank}, step {bad_step}, combine (sentinel): rank {1 - rank} combines rows of {64 * size} bytes of "
            f"{size}-byte elements, unlike rank {rank}"
        )


def collect(group: Group, texts: dict[int, str]) -> None:
    """Wait, and keep what each rank reported."""
    for rank, channel in enumerate(group.channels):
        try:
            channel.check()
        except RankMismatchError as error:
            texts[rank] = str(error)


def combine_all(group: Group, names: list[str]) -> None:
    """Every rank's combine of its own layer, without waiting."""
    buffers = []
    for rank, name in enumerate(names):
        buffers.append(group.comms[name][rank].get_combine_input_buffer(dtype_of(group.layers[name].partial_dtype)))
        buffers[-1].zero_()
    group.synchronize()
    for rank, name in enumerate(names):
        with group.on(rank):
            group.comms[name][rank].combine(buffers[rank])


# --- ranks that stay away ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ep_size", [2, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_absent_in_dispatch(kernel_pool: KernelPool, protocol: str, ep_size: int) -> None:
    group = Group(ep_size, protocol, {"usual": BASE}, pool=kernel_pool, timeout_s=TIMEOUT_S)
    for seed in range(3):
        group.step("usual", full(group, 8), seed)
    present = [r for r in range(ep_size) if r != ODD]
    start = time.monotonic()
    dispatch_all(group, ["usual"] * ep_size, [full(group, 8)] * ep_size, present)
    for rank in present:
        text = error_of(group.channels[rank].check, CommunicationTimeoutError)
        assert text.startswith(
            f"rank {rank}, step 4, {NAMES[protocol]}: rank {ODD} did not arrive within {TIMEOUT_S:g} s "
            "(last heard of in step 3)"
        )
        check_dead(group, rank, "usual", text)
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 2
    # The others' data lie ready, but they give up: their dispatch of the next step never comes.
    group.channels[ODD].check()


@pytest.mark.parametrize("ep_size", [2, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_absent_in_combine(kernel_pool: KernelPool, protocol: str, ep_size: int) -> None:
    group = Group(ep_size, protocol, {"usual": BASE}, pool=kernel_pool, timeout_s=TIMEOUT_S)
    group.step("usual", full(group, 8), 1)
    # With as many selections as there are experts, every token goes to every rank.
    everywhere = Group(ep_size, protocol, {"all": replace(BASE, top_k=12)}, pool=kernel_pool, timeout_s=TIMEOUT_S)
    everywhere.step("all", full(everywhere, 8), 1)
    dispatch_all(everywhere, ["all"] * ep_size, [full(everywhere, 8)] * ep_size)
    everywhere.check()
    present = [r for r in range(ep_size) if r != ODD]
    start = time.monotonic()
    for rank in present:
        with everywhere.on(rank):
            comm = everywhere.comms["all"][rank]
            comm.combine(comm.get_combine_input_buffer())
    for rank in present:
        text = error_of(everywhere.channels[rank].check, CommunicationTimeoutError)
        assert text.startswith(
            f"rank {rank}, step 2, {COMBINES[protocol]}: rank {ODD} did not arrive within {TIMEOUT_S:g} s"
        )
        check_dead(everywhere, rank, "all", text)
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 2
    # Another group on the same GPUs is not affected.
    group.step("usual", full(group, 8), 2)


def test_absent_in_a_combine_that_nobody_needed(kernel_pool: KernelPool) -> None:
    """After a Sentinel step Fence waits for every rank's combine, also for one that was sent nothing."""
    layer = replace(BASE, top_k=1)
    group = Group(2, "auto", {"usual": layer}, pool=kernel_pool, timeout_s=TIMEOUT_S, sentinel_tokens_per_rank=16)
    for t_hat in (8, 24):
        group.step("usual", full(group, t_hat), t_hat)
    # Every token stays on its own rank.
    arguments = []
    for rank, device in enumerate(group.devices):
        given = make_inputs(layer, full(group, 8), rank)[rank]
        stay = replace(given, ids=torch.full((8, 1), 6 * rank))
        arguments.append(stay.arguments(layer, device))
    group.synchronize()
    comms = group.comms["usual"]
    for rank in range(2):
        with group.on(rank):
            comms[rank].dispatch(**arguments[rank], runtime_max_tokens_per_rank=8)
    with group.on(0):
        comms[0].combine(comms[0].get_combine_input_buffer())
    group.check()  # rank 0 is through, although rank 1 never combined
    start = time.monotonic()
    with group.on(0):
        comms[0].dispatch(**arguments[0], runtime_max_tokens_per_rank=24)
    text = error_of(group.channels[0].check, CommunicationTimeoutError)
    assert text.startswith(
        f"rank 0, step 4, dispatch (fence, waiting for the step before): rank 1 did not arrive within {TIMEOUT_S:g} s"
    )
    assert time.monotonic() - start < TIMEOUT_S + 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_time_out_is_read_at_run_time(kernel_pool: KernelPool, protocol: str) -> None:
    group = Group(2, protocol, {"usual": BASE}, pool=kernel_pool, timeout_s=30.0)
    group.step("usual", full(group, 8), 1)
    for channel in group.channels:
        channel.set_timeout(0.3)
    start = time.monotonic()
    dispatch_all(group, ["usual"] * 2, [full(group, 8)] * 2, [0])
    text = error_of(group.channels[0].check, CommunicationTimeoutError)
    assert "rank 1 did not arrive within 0.3 s" in text
    assert 0.3 <= time.monotonic() - start < 2.3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_late_rank_is_waited_for(kernel_pool: KernelPool, protocol: str) -> None:
    """Time-outs are for absent ranks: one that is late by half of it is not."""
    group = Group(2, protocol, {"usual": BASE}, pool=kernel_pool, timeout_s=2.0)
    group.step("usual", full(group, 8), 1)
    for asleep in range(2):
        dispatch_all(group, ["usual"] * 2, [full(group, 8)] * 2, asleep=asleep)
        group.check()
        combine_all(group, ["usual"] * 2)
        group.check()
    group.step("usual", full(group, 8), 2)


# --- ranks that fail on the host, and misuse --------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_wrong_tensor_on_one_rank(kernel_pool: KernelPool, protocol: str) -> None:
    """The rank gets its own error, its peers one that names it, at once rather than after the time-out."""
    group = Group(2, protocol, {"usual": BASE}, pool=kernel_pool, timeout_s=LONG_TIMEOUT_S)
    group.step("usual", full(group, 8), 1)
    rows = torch.zeros(3, 64, dtype=torch.uint8, device=group.devices[ODD])
    ids = torch.zeros(3, 3, dtype=torch.int16, device=group.devices[ODD])
    start = time.monotonic()
    dispatch_all(group, ["usual"] * 2, [full(group, 8)] * 2, [0])
    with group.on(ODD), pytest.raises(TensorError, match=r"rank 1: topk_ids has dtype torch\.int16; expected"):
        group.comms["usual"][ODD].dispatch(rows, ids)
    text = error_of(group.channels[0].check, CommunicationError)
    assert text.startswith(f"rank 0, step 2, {NAMES[protocol]}: rank 1 failed before it could take part")
    assert time.monotonic() - start < 1.0
    for rank in range(2):
        with pytest.raises(CommunicationError, match=r"failed earlier|failed before it could take part"):
            group.comms["usual"][rank].dispatch(rows, ids)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_wrong_output_on_one_rank(kernel_pool: KernelPool, protocol: str) -> None:
    layer = replace(BASE, top_k=12)  # every token to every rank
    group = Group(2, protocol, {"all": layer}, pool=kernel_pool, timeout_s=LONG_TIMEOUT_S)
    group.step("all", full(group, 8), 1)
    dispatch_all(group, ["all"] * 2, [full(group, 8)] * 2)
    group.check()
    output = torch.empty(8, 64, dtype=torch.float64, device=group.devices[ODD])
    start = time.monotonic()
    comms = group.comms["all"]
    with group.on(0):
        comms[0].combine(comms[0].get_combine_input_buffer())
    with group.on(ODD), pytest.raises(TensorError, match=r"rank 1: output has dtype torch\.float64; expected"):
        comms[ODD].combine(comms[ODD].get_combine_input_buffer(), output=output)
    text = error_of(group.channels[0].check, CommunicationError)
    assert text.startswith(f"rank 0, step 2, {COMBINES[protocol]}: rank 1 failed before it could take part")
    assert time.monotonic() - start < 1.0


def test_misuse(kernel_pool: KernelPool) -> None:
    """Calls out of order, and T or T̂ over what the channel was made for."""
    group = Group(1, "fence", {"usual": BASE}, pool=kernel_pool, max_tokens_per_rank=8)
    (comm,), (channel,) = group.comms["usual"], group.channels
    with pytest.raises(CommunicationError, match="rank 0: combine without a dispatch of this communicator in flight"):
        comm.combine(torch.zeros(8, 64, dtype=torch.bfloat16, device=channel.device))
    with pytest.raises(CommunicationError, match="get_combine_input_buffer without a dispatch"):
        comm.get_combine_input_buffer()
    group.step("usual", full(group, 8), 1)
    dispatch_all(group, ["usual"], [full(group, 8)])
    with pytest.raises(CommunicationError, match="dispatch while the dispatch of step 2 awaits its combine"):
        dispatch_all(group, ["usual"], [full(group, 8)])
    comm.combine(comm.get_combine_input_buffer())
    group.step("usual", full(group, 8), 2)
    with pytest.raises(CapacityError, match="9, but this channel was sized for max_tokens_per_rank=8"):
        dispatch_all(group, ["usual"], [full(group, 9)])
    other = Group(1, "sentinel", {"usual": BASE}, pool=kernel_pool, max_tokens_per_rank=8, sentinel_tokens_per_rank=4)
    other.step("usual", full(other, 4), 1)
    with pytest.raises(CapacityError, match="runtime_max_tokens_per_rank is 5, but Sentinel's slots were sized for 4"):
        dispatch_all(other, ["usual"], [full(other, 5)])


def test_fp32_partial_results_that_were_not_reserved(kernel_pool: KernelPool) -> None:
    group = Group(1, "fence", {"usual": BASE}, pool=kernel_pool)
    group.step("usual", full(group, 8), 1)
    dispatch_all(group, ["usual"], [full(group, 8)])
    with pytest.raises(CapacityError, match=r"256 bytes a row, .* sized for 128; call reserve\(element_bytes=4\)"):
        group.comms["usual"][0].get_combine_input_buffer(torch.float32)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_waits_for_the_device_and_what_does_not(kernel_pool: KernelPool, protocol: str) -> None:
    """Dispatch, combine and raise_reported() return while the GPU is busy; check() waits."""
    group = Group(1, protocol, {"usual": BASE}, pool=kernel_pool)
    (comm,), (channel,) = group.comms["usual"], group.channels
    group.step("usual", full(group, 8), 1)
    arguments = make_inputs(BASE, full(group, 8), 3)[0].arguments(BASE, group.devices[0])
    output = torch.empty(8, 64, dtype=torch.bfloat16, device=group.devices[0])
    group.synchronize()
    with group.on(0):
        start = time.monotonic()
        torch.cuda._sleep(HALF_A_SECOND)
        torch.cuda.set_sync_debug_mode("error")
        try:
            comm.dispatch(**arguments, runtime_max_tokens_per_rank=8)
            comm.combine(comm.get_combine_input_buffer(), output=output)
            channel.raise_reported()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert time.monotonic() - start < 0.2
        channel.check()
        assert time.monotonic() - start > 0.3


def test_destroy(kernel_pool: KernelPool) -> None:
    group = Group(2, "auto", {"usual": BASE}, pool=kernel_pool)
    group.step("usual", full(group, 8), 1)
    group.close()
    group.close()
    with pytest.raises(CommunicationError, match="rank 1: dispatch on a destroyed channel"):
        dispatch_all(group, ["usual"] * 2, [full(group, 8)] * 2, [1])
