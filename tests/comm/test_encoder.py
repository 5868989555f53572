"""Quantizing inside dispatch, without a GPU: transports that quantize first, and what a kernel that encodes is told."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_harness import Ranks
from toy_encoder import ToyEncoder

import moe_layer.comm
from moe_layer.comm import ExpertPlacement, auto, create_channel
from moe_layer.comm.encoder import Encoder
from moe_layer.comm.layout import MAX_PARTS
from moe_layer.comm.spec import DispatchSpec
from moe_layer.errors import TensorError

HIDDEN = 1024
# As the formats of moe_layer.quant have them: values a vector, vectors a scale entry, bytes of it, scale a row.
SHAPES = {
    "fp8": ToyEncoder(16, 8, 4),
    "mxfp8": ToyEncoder(16, 2, 1),
    "mxfp4": ToyEncoder(32, 1, 1),
    "nvfp4": ToyEncoder(32, 1, 2, row_scale=True),
    "nvfp4, one scale": ToyEncoder(32, 1, 2, common_scale=True),
}


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_LAYER_FUSED_LIMIT", raising=False)


def halve(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A format of the test's own: each value's two top bytes apart, one as the row and one as its scales."""
    high = x.to(torch.bfloat16).view(torch.uint8).view(*x.shape, 2)
    return high[..., 1].contiguous(), high[..., 0].contiguous().view(torch.int8)


def dispatched(ranks: Ranks, protocol: str, seed: int) -> None:
    channel = create_channel(ranks.group, protocol=protocol, max_tokens_per_rank=8, timeout_s=20)
    comm = channel.communicator(ExpertPlacement.contiguous(6, ranks.ep_size), 16)
    generator = torch.Generator().manual_seed(seed + ranks.rank)
    encoder = Encoder(halve, ToyEncoder())
    for tokens in (5, 0):
        x = torch.randn(tokens, 16, generator=generator).bfloat16()
        ids = torch.randint(0, 6, (tokens, 2), generator=generator, dtype=torch.int32)
        weights = torch.rand(tokens, 2, generator=generator)
        assert not comm.fuses(encoder, x, 5)
        results = []
        for arguments in (
            {"hidden_states": x, "encoder": encoder},
            {"hidden_states": halve(x)[0], "hidden_states_scale": halve(x)[1]},
        ):
            got = comm.dispatch(**arguments, topk_ids=ids, topk_weights=weights, runtime_max_tokens_per_rank=5)
            taken = (got.topk_ids >= 0).any(1)
            assert got.hidden_states_scale is not None
            results.append((got.topk_ids.clone(), got.hidden_states[taken], got.hidden_states_scale[taken]))
            comm.combine(comm.get_combine_input_buffer())
        assert len(results[0][1]) or not tokens
        for a, b in zip(*results):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_loopback_quantizes_first() -> None:
    dispatched(Ranks(0, 1, None), "loopback", 3)


def test_collective_quantizes_first(run_ranks: Any) -> None:
    run_ranks(dispatched, 3, "collective", 4)


def test_scales_and_encoder() -> None:
    comm = create_channel(None, max_tokens_per_rank=8).communicator(ExpertPlacement.contiguous(2, 1), 16)
    x, ids = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(TensorError, match="hidden_states_scale was given with an encoder"):
        comm.dispatch(x, ids, hidden_states_scale=torch.zeros(1, 4), encoder=Encoder(halve))
    comm.dispatch(x, ids, encoder=Encoder(halve))  # nothing is left in flight


# ---- the one-sided transport ----


def quantize_as(kernel: ToyEncoder) -> Encoder:
    """Rows and scales of the right lengths; what is in them plays no part here."""
    per_entry = kernel.vector_values * kernel.vectors_per_scale

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, columns = x.shape
        scale = -(-columns // per_entry) * kernel.scale_entry_bytes + 4 * kernel.row_scale
        return (
            torch.zeros(tokens, columns * 16 // kernel.vector_values, dtype=torch.uint8),
            torch.zeros(tokens, scale, dtype=torch.uint8),
        )

    return Encoder(quantize, kernel, torch.ones(1) if kernel.common_scale else None)


@pytest.fixture
def one_sided(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
    from host_only import HostOnlyChannel, note_calls

    def make(protocol: str = "auto") -> tuple[Any, Any]:
        comm = HostOnlyChannel(2, protocol).communicator(ExpertPlacement.contiguous(12, 2), HIDDEN)
        return comm, calls

    calls = note_calls(monkeypatch)
    return make


def step(comm: Any, x: torch.Tensor, t_hat: int, encoder: Encoder) -> Any:
    ids = torch.zeros(x.shape[0], 3, dtype=torch.int32)
    result = comm.dispatch(x, ids, torch.zeros(x.shape[0], 3), runtime_max_tokens_per_rank=t_hat, encoder=encoder)
    comm.combine(comm.get_combine_input_buffer())
    return result


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("t_hat", [8, 2048])
def test_kernel_gets_bf16_rows(one_sided: Any, name: str, t_hat: int) -> None:
    comm, calls = one_sided()
    encoder = quantize_as(SHAPES[name])
    x = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
    result = step(comm, x, t_hat, encoder)
    rows, scales = encoder.quantize(x)
    _, spec, given = calls[0]
    assert spec.encoder == SHAPES[name]
    assert (spec.hidden_bytes, spec.scale_bytes) == (rows.shape[1], -(-scales.shape[1] // 16) * 16)
    common = 0 if encoder.common_scale is None else encoder.common_scale.data_ptr()
    assert (given[3], given[4], given[7]) == (x.data_ptr(), common, 2 * HIDDEN)
    assert tuple(result.hidden_states.shape) == (2 * t_hat, rows.shape[1])
    assert tuple(result.hidden_states_scale.shape) == (2 * t_hat, scales.shape[1])


def test_rows_that_no_kernel_encodes(one_sided: Any) -> None:
    """FP32 values, or rows that end within a vector of the wire, are quantized first; no rows at all never matter."""
    comm, calls = one_sided()
    encoder = quantize_as(SHAPES["mxfp4"])
    for x, fused in (
        (torch.zeros(5, HIDDEN), False),
        (torch.zeros(0, HIDDEN), True),
        (torch.zeros(5, HIDDEN - 16, dtype=torch.bfloat16), False),
        (torch.zeros(5, HIDDEN, dtype=torch.bfloat16), True),
    ):
        calls.clear()
        assert encoder.fuses(x) == fused
        step(comm, x, 8, encoder)
        _, spec, given = calls[0]
        assert (spec.encoder is not None) == fused
        if len(x):
            assert given[7] == spec.hidden_bytes * (4 if fused else 1)
            assert (given[3] == x.data_ptr()) == fused


def test_limit(one_sided: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads((Path(moe_layer.comm.__file__).parent / "fusion.json").read_text())
    assert set(data) == {"measured", "fused_limit"} and data["measured"].strip()
    comm, _ = one_sided()
    encoder = quantize_as(SHAPES["fp8"])
    x = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
    limit = auto.fused_limit()
    assert limit == data["fused_limit"]
    assert comm.fuses(encoder, x, limit) and not comm.fuses(encoder, x, limit + 1)
    assert not comm.fuses(encoder, x.float(), limit)
    assert not comm.fuses(Encoder(encoder.quantize), x, limit)
    monkeypatch.setenv("MOE_LAYER_FUSED_LIMIT", "7")
    assert comm.fuses(encoder, x, 7) and not comm.fuses(encoder, x, 8)
    assert not comm.fuses(encoder, x, None)  # T̂ is the channel's largest


def test_both_kinds_of_kernel_are_ready(one_sided: Any) -> None:
    """Whichever comes first, the other is there too if the layer announced it: a graph may be captured next."""
    for first in (True, False):
        comm, _ = one_sided()
        encoder = quantize_as(SHAPES["mxfp8"])
        comm.reserve(HIDDEN, HIDDEN // 32, 3, encoder=encoder)
        x = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
        step(comm, x if first else x.float(), 8, encoder)
        known = dict(comm._known)
        step(comm, x.float() if first else x, 8, encoder)
        launchers = [key for key, value in comm._known.items() if type(value).__name__ == "DispatchLauncher"]
        assert len(launchers) == 2 and all(key in known for key in launchers)


def test_ranks_that_do_not_all_encode(one_sided: Any) -> None:
    """Where the parts of a row are others, the hash says so; elsewhere ranks may mix."""
    comm, calls = one_sided("sentinel")
    comm.reserve(4 * HIDDEN, HIDDEN // 8, 3)
    encoder = quantize_as(SHAPES["mxfp8"])
    x = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
    for t_hat, parts in ((8, 1), (8, MAX_PARTS), (64, 1)):
        hashes = []
        for rows in (x, x.float()):
            calls.clear()
            wide = rows if parts == 1 else rows.repeat(1, 4)
            step(comm, wide, t_hat, encoder)
            _, spec, given = calls[0]
            assert spec.parts == parts
            hashes.append(given[21])
        assert (hashes[0] == hashes[1]) == (parts == 1)


# ---- how a row's scales follow its values ----


def part_vectors(spec: DispatchSpec, part: int) -> tuple[list[int], list[int]]:
    """The vectors of a part as the kernel numbers them: of values, of scales."""
    values, scales = [], []
    for local in range(spec.payload_warps * 32 * spec.chunks):
        if local < spec.part_hidden_vectors:
            v = part * spec.part_hidden_vectors + local
            if v < spec.hidden_vectors:
                values.append(v)
        elif local < spec.part_vectors:
            v = spec.hidden_vectors + part * spec.part_scale_vectors + local - spec.part_hidden_vectors
            if v < spec.vectors:
                scales.append(v)
    return values, scales


@pytest.mark.parametrize("name", SHAPES)
def test_every_part_has_the_scales_of_its_values(name: str) -> None:
    kernel = SHAPES[name]
    for ep_size, columns in itertools.product((2, 8), (512, 1024, 2304, 3584, 4096, 5120, 7168, 16384)):
        hidden_vectors = columns // kernel.vector_values
        entries = -(-hidden_vectors // kernel.vectors_per_scale)
        end = entries * kernel.scale_entry_bytes + 4 * kernel.row_scale
        spec = DispatchSpec(ep_size, 8, 64, True, 16 * hidden_vectors, -(-end // 16) * 16, True, 4, MAX_PARTS, kernel)
        assert spec.hidden_vectors == hidden_vectors
        assert spec.threads <= 1024
        moved = []
        for part in range(MAX_PARTS):
            values, scales = part_vectors(spec, part)
            moved += values + scales
            made = {
                v // kernel.vectors_per_scale * kernel.scale_entry_bytes + byte
                for v in values
                for byte in range(kernel.scale_entry_bytes)
            }
            sent = {(v - hidden_vectors) * 16 + byte for v in scales for byte in range(16)}
            assert made == {byte for byte in sent if byte < entries * kernel.scale_entry_bytes}
            # All lanes of an entry lie in one warp.
            assert spec.part_hidden_vectors % kernel.vectors_per_scale == 0
        assert sorted(moved) == list(range(spec.vectors))
        whole = replace(spec, parts=1)
        assert whole.part_vectors == whole.vectors and not whole.splits_scales
