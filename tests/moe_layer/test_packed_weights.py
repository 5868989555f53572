"""Experts held as a kernel reads them: loaded and saved as the checkpoint has them, bit by bit, and held once."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
from typing import Any

import pytest
import torch
from layers import CONFIGS, config, fill
from packing_backend import PackingBackend, live_bytes

from moe_layer import CheckpointError, FormatError, MoELayer
from moe_layer.gemm.register_tiles import PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.weights import ExpertWeights, pack
from moe_layer.packed_weights import PackedExpertStack
from moe_layer.quant import QuantizedTensor, get_format
from moe_layer.weights import ExpertStack, held_bytes

EXPERTS, ROWS, COLUMNS = 3, 136, 160  # two column tiles of gate and up, two K steps


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def stacks(fmt: str, parts: int = 2) -> tuple[ExpertStack, PackedExpertStack]:
    """The same random weights, plain and (still empty) packed."""
    plain = ExpertStack(EXPERTS, parts, ROWS, COLUMNS, fmt)
    for e in range(EXPERTS):
        for p in range(parts):
            plain.quantize_expert(e, p, torch.randn(ROWS, COLUMNS) * 10.0 ** (e - 4))
    return plain, PackedExpertStack(EXPERTS, RegisterTiles(fmt, parts, ROWS, COLUMNS))


def part_of(stack: ExpertStack, e: int, p: int) -> QuantizedTensor:
    return stack.weights().expert(e, p)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for key in a:
        assert a[key].shape == b[key].shape and a[key].dtype == b[key].dtype, key
        assert torch.equal(bits(a[key]), bits(b[key])), key


def filled(fmt: str, parts: int = 2) -> tuple[ExpertStack, PackedExpertStack]:
    plain, packed = stacks(fmt, parts)
    packed.load_state_dict(plain.state_dict())
    return plain, packed


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@pytest.mark.parametrize("parts", [1, 2])
def test_expert_by_expert(fmt: str, parts: int) -> None:
    """Parts arrive in any order; what is then held are the packed bytes, once."""
    plain, packed = stacks(fmt, parts)
    order = [(e, p) for e in range(EXPERTS) for p in range(parts)][::-1]
    for e, p in order:
        assert (e, p) in packed.unloaded
        packed.load_expert(e, p, part_of(plain, e, p))
        assert (e, p) not in packed.unloaded
    tiles = packed.tiles
    assert not packed.unloaded and not packed._staged and packed.data is None and packed.scale is None
    for e in range(EXPERTS):
        expected, shift = tiles.pack(plain.data[e], plain.scale[e])
        assert torch.equal(packed.packed[e], expected) and torch.equal(packed.shift[e], shift)
    second_level = 4 * EXPERTS * parts * (plain.global_scale is not None)
    assert held_bytes(packed) == packed.packed.nbytes + 8 * EXPERTS * parts + second_level
    weights = packed.weights()
    assert weights.packed is packed.packed and weights.factor is packed.factor and weights.storage is packed.packed
    assert weights.nbytes == held_bytes(packed)
    assert (weights.num_local_experts, weights.parts, weights.rows, weights.columns) == (EXPERTS, parts, ROWS, COLUMNS)
    assert_same(packed.state_dict(), plain.state_dict())


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_factors(fmt: str) -> None:
    plain, packed = filled(fmt)
    expected = torch.ones(EXPERTS, 2) if fmt != "nvfp4" else plain.global_scale * 256
    assert torch.equal(packed.factor, expected) and packed.factor.dtype == torch.float32
    if fmt == "mxfp4":
        loud = ExpertStack(EXPERTS, 2, ROWS, COLUMNS, fmt)
        loud.load_state_dict(plain.state_dict())
        loud.scale[1, 1] = 140
        packed.load_state_dict(loud.state_dict())
        assert packed.factor.tolist() == [[1, 1], [1, 2.0**12], [1, 1]]
        assert_same(packed.state_dict(), loud.state_dict())


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_one_copy_while_loading(fmt: str) -> None:
    """Tensors of an expert's size or more, whenever an expert has been loaded: the packed stack and one expert."""
    plain, packed = stacks(fmt)
    one = plain.data[0].nbytes + plain.scale[0].nbytes
    before = live_bytes(least=one // 4) - packed.packed.nbytes
    for e in range(EXPERTS):
        for p in range(2):
            packed.load_expert(e, p, part_of(plain, e, p))
            held = live_bytes(least=one // 4) - before
            assert held <= packed.packed.nbytes + (one if p == 0 else 0)
    assert live_bytes(least=one // 4) - before == packed.packed.nbytes


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_state_dict_goes_both_ways(fmt: str) -> None:
    plain, packed = filled(fmt)
    buffer = io.BytesIO()
    torch.save(packed.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert_same(saved, plain.state_dict())
    again = ExpertStack(EXPERTS, 2, ROWS, COLUMNS, fmt)
    again.load_state_dict(saved)
    assert_same(again.state_dict(), plain.state_dict())
    for assign in (False, True):
        other = PackedExpertStack(EXPERTS, packed.tiles)
        result = other.load_state_dict(saved, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys and not other.unloaded
        assert torch.equal(other.packed, packed.packed) and torch.equal(other.factor, packed.factor)


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_loading_again_is_in_place(fmt: str) -> None:
    """Addresses that a CUDA graph may have captured stay, and all of the old weights goes."""
    _, packed = filled(fmt)
    addresses = [t.data_ptr() for t in packed.buffers()]
    other, expected = filled(fmt)
    packed.load_state_dict(other.state_dict())
    assert [t.data_ptr() for t in packed.buffers()] == addresses
    for name, tensor in packed.named_buffers():
        assert torch.equal(tensor, getattr(expected, name)), name


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_replacing_one_part(fmt: str) -> None:
    plain, packed = filled(fmt)
    for stack in (plain, packed):
        torch.manual_seed(1)
        stack.quantize_expert(1, 0, torch.randn(ROWS, COLUMNS), name="gate")
    assert not packed._staged
    assert_same(packed.state_dict(), plain.state_dict())


def test_state_dict_of_what_is_there_so_far() -> None:
    plain, packed = stacks("mxfp4")
    packed.load_expert(2, 1, part_of(plain, 2, 1))
    packed.load_expert(0, 0, part_of(plain, 0, 0))
    packed.load_expert(0, 1, part_of(plain, 0, 1))
    saved = packed.state_dict()
    for e, p in ((2, 1), (0, 0), (0, 1)):
        assert torch.equal(saved["data"][e, p], plain.data[e, p])
        assert torch.equal(saved["scale"][e, p], plain.scale[e, p])
    assert packed.unloaded == {(1, 0), (1, 1), (2, 0)}


def saved_and_loaded(module: torch.nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_copies_and_moves(fmt: str) -> None:
    plain, packed = filled(fmt)
    expected = plain.state_dict()
    others = [copy.deepcopy(packed), saved_and_loaded(packed), packed.to("cpu")]
    if fmt == "mxfp4":  # plain pickle cannot read torch's float8 tensors back
        others.append(pickle.loads(pickle.dumps(packed)))
    for other in others:
        assert_same(other.state_dict(), expected)
        assert other.weights().tiles == packed.tiles
    copied = copy.deepcopy(packed)
    copied.quantize_expert(0, 0, torch.ones(ROWS, COLUMNS))
    assert_same(packed.state_dict(), expected)
    half = PackedExpertStack(EXPERTS, packed.tiles)
    half.load_expert(0, 0, part_of(plain, 0, 0))
    for other in (copy.deepcopy(half), saved_and_loaded(half), half.to("cpu")):
        other.load_expert(0, 1, part_of(plain, 0, 1))
        assert torch.equal(other.packed[0], packed.packed[0])


def test_moved_to_another_device() -> None:
    """The meta device stands in for another one: everything goes, what is staged too."""
    plain, packed = stacks("mxfp4")
    packed.load_expert(0, 0, part_of(plain, 0, 0))
    packed.to("meta")
    assert all(buffer.is_meta for buffer in packed.buffers()) and packed.device.type == "meta"
    assert all(t.is_meta for pair in packed._staged.values() for t in pair)


# ---- what cannot be packed ----


def test_unrepresentable_weights_stay_plain(caplog: pytest.LogCaptureFixture) -> None:
    plain, packed = stacks("mxfp4")
    plain.scale[1, 0, 5, 0], plain.scale[1, 0, 5, 1] = 0, 200
    with caplog.at_level(logging.WARNING, logger="moe_layer"):
        for e in range(EXPERTS):
            for p in range(2):
                packed.load_expert(e, p, part_of(plain, e, p), name=f"expert {e}")
    assert "expert 1: mxfp4: scales of part 0 reach from 2**-127 to 2**73" in caplog.text
    assert "these mxfp4 experts are not packed for the kernel" in caplog.text
    assert packed.packed is packed.shift is packed.factor is None and not packed.unloaded and not packed._staged
    weights = packed.weights()
    assert weights.packed is None and weights.storage is packed.data and held_bytes(packed) == held_bytes(plain)
    assert_same(packed.state_dict(), plain.state_dict())
    assert_same(copy.deepcopy(packed).state_dict(), plain.state_dict())
    # Plain weights can be replaced, and a state dict that can be packed is.
    plain.quantize_expert(2, 1, torch.ones(ROWS, COLUMNS))
    packed.load_expert(2, 1, part_of(plain, 2, 1))
    assert_same(packed.state_dict(), plain.state_dict())
    good, expected = filled("mxfp4")
    packed.load_state_dict(good.state_dict())
    assert packed.data is None and torch.equal(packed.packed, expected.packed)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_unrepresentable_state_dicts(bad: int) -> None:
    plain, packed = stacks("mxfp8")
    plain.data[bad].view(torch.uint8)[1, 7, 9] = 0x7F
    packed.load_state_dict(plain.state_dict())
    assert packed.packed is None and not packed.unloaded
    assert_same(packed.state_dict(), plain.state_dict())


def test_a_global_scale_that_overflows_the_factor() -> None:
    plain, packed = stacks("nvfp4")
    plain.global_scale[2, 1] = 2.0**121
    packed.load_state_dict(plain.state_dict())
    assert packed.packed is None
    assert_same(packed.state_dict(), plain.state_dict())


def test_nan_scales() -> None:
    plain, packed = filled("mxfp4")
    plain.scale[1, 1, 3, 2] = 255
    with pytest.raises(FormatError, match=re.escape("up of 1: mxfp4: scale of part 1 at [3, 2] is NaN")):
        packed.load_expert(1, 1, part_of(plain, 1, 1), name="up of 1")
    assert packed.unloaded == {(1, 0), (1, 1)} and not packed._staged
    with pytest.raises(FormatError, match="local expert 1: mxfp4: scale of part 1 at"):
        packed.load_state_dict(plain.state_dict())
    assert packed.unloaded == {(e, p) for e in (1, 2) for p in range(2)}
    plain.scale[1, 1, 3, 2] = 100
    packed.load_state_dict(plain.state_dict())
    assert not packed.unloaded
    assert_same(packed.state_dict(), plain.state_dict())


@pytest.mark.parametrize(("damage", "message"), [
    (lambda s: s.pop("data"), 'Missing key(s) in state_dict: "data"'),
    (lambda s: s.pop("scale"), 'Missing key(s) in state_dict: "scale"'),
    (lambda s: s.update(packed=torch.zeros(1)), 'Unexpected key(s) in state_dict: "packed"'),
    (lambda s: s.update(data=s["data"][:, :, :-1]), "size mismatch for data"),
    (lambda s: s.update(scale=s["scale"][:-1]), "size mismatch for scale"),
])  # fmt: skip
def test_damaged_state_dicts(damage: Any, message: str) -> None:
    plain, packed = filled("mxfp4")
    state, before = plain.state_dict(), packed.packed.clone()
    plain.data.bitwise_xor_(1)
    damage(state)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        packed.load_state_dict(state)
    if "Unexpected" not in message:
        assert torch.equal(packed.packed, before)


def test_other_dtypes_in_state_dicts() -> None:
    plain, packed = filled("mxfp4")
    state = plain.state_dict()
    state["data"] = state["data"].float()
    with pytest.raises(CheckpointError, match=re.escape("data is torch.float32, expected torch.uint8 (mxfp4)")):
        packed.load_state_dict(state)


def test_load_errors() -> None:
    plain, packed = stacks("mxfp4")
    q = part_of(plain, 0, 0)
    for bad, message in (
        (QuantizedTensor("nvfp4", q.data, q.scale, None, COLUMNS), "x: format is nvfp4, but these experts are stored"),
        (QuantizedTensor("mxfp4", q.data[1:], q.scale, None, COLUMNS), "x: data is [135, 80] torch.uint8, expected"),
        (QuantizedTensor("mxfp4", q.data, None, None, COLUMNS), "x: scale is missing in mxfp4"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            packed.load_expert(0, 0, bad, name="x")
    assert not packed._staged and (0, 0) in packed.unloaded


# ---- adopting ----


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_adopt(fmt: str) -> None:
    plain, packed = filled(fmt)
    empty = PackedExpertStack(EXPERTS, packed.tiles, "meta")
    empty.adopt(packed.weights())
    assert empty.packed is packed.packed and not empty.unloaded and empty.device.type == "cpu"
    assert_same(empty.state_dict(), plain.state_dict())
    # Plain weights are packed, packed ones unpacked where nothing reads them.
    empty = PackedExpertStack(EXPERTS, packed.tiles, "meta")
    empty.adopt(plain.weights())
    assert torch.equal(empty.packed, packed.packed) and torch.equal(empty.factor, packed.factor)
    assert empty.data is None
    other = ExpertStack(EXPERTS, 2, ROWS, COLUMNS, fmt, "meta")
    other.adopt(packed.weights())
    assert_same(other.state_dict(), plain.state_dict())
    with pytest.raises(CheckpointError, match=r"gate: data is \[3, 2, 136, \d+\] torch\.\w+, expected \[2, 2, 136"):
        PackedExpertStack(2, packed.tiles).adopt(plain.weights(), name="gate")


def test_adopt_of_what_cannot_be_packed() -> None:
    plain, packed = stacks("mxfp4")
    plain.scale[1, 0, 5, 0], plain.scale[1, 0, 5, 1] = 0, 200
    packed.adopt(plain.weights())
    assert packed.packed is None and packed.data is plain.data and packed.scale is plain.scale and not packed.unloaded


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_packed_weights_of_whole_stacks(fmt: str) -> None:
    plain, packed = filled(fmt)
    weights = pack(plain.weights(), packed.tiles)
    for name in ("packed", "shift", "factor"):
        assert torch.equal(getattr(weights, name), getattr(packed, name))
    assert weights.data.is_meta and weights.scale.is_meta
    back = weights.unpacked()
    assert torch.equal(bits(back.data), bits(plain.data)) and torch.equal(bits(back.scale), bits(plain.scale))
    assert plain.weights().unpacked().data is plain.data
    library = get_format(fmt)
    for e, p in ((0, 1), (2, 0)):
        assert torch.equal(library.dequantize(weights.expert(e, p)), library.dequantize(part_of(plain, e, p)))
    assert isinstance(weights, ExpertWeights) and weights.nbytes == held_bytes(packed)


# ---- layers ----


@pytest.mark.parametrize("weight_format", PACKED_FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers(name: str, weight_format: str) -> None:
    """A layer with packed experts computes, saves and loads what one with plain experts does."""
    plain = fill(MoELayer(config(name), device="cpu", weight_format=weight_format), 1)
    layer = fill(MoELayer(config(name), device="cpu", weight_format=weight_format, backend=PackingBackend()), 1)
    for group in (layer.routed_experts.gate_up, layer.routed_experts.down):
        assert isinstance(group, PackedExpertStack) and group.packed is not None and group.data is None
    x = torch.randn(9, layer.cfg.hidden_size)
    assert torch.equal(layer(x), plain(x))
    assert_same(layer.state_dict(), plain.state_dict())
    for source in (plain, layer):
        fresh = MoELayer(config(name), device="cpu", weight_format=weight_format, backend=PackingBackend())
        fresh.load_state_dict(source.state_dict())
        assert torch.equal(fresh(x), plain(x))


def test_formats_without_a_layout_stay_plain() -> None:
    layer = fill(MoELayer(config("mixtral"), device="cpu", weight_format="bf16", backend=PackingBackend()), 1)
    assert type(layer.routed_experts.gate_up) is ExpertStack


def test_shared_experts_are_packed_by_their_own_backend() -> None:
    layer = MoELayer(
        config("deepseek_v3"), device="cpu", weight_format="mxfp4", shared_weight_format="mxfp8",
        backend=PackingBackend(),
    )  # fmt: skip
    assert type(layer.shared_experts.gate_up) is ExpertStack
    assert isinstance(layer.routed_experts.down, PackedExpertStack)
