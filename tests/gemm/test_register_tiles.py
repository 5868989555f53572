"""Packed low-bit weights: every byte by the description of the layout, the way back, what a kernel makes of them."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from layer_oracle import BLOCK, decode
from packed_weights import BITS, pack_slowly, products

from moe_layer.errors import FormatError, TensorError, UnrepresentableError
from moe_layer.gemm import register_tiles
from moe_layer.gemm.register_scales import NVFP4_EXPONENT
from moe_layer.gemm.register_tiles import PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.sm90_spec import GroupedSpec
from moe_layer.quant import get_format

# Whole tiles, and N and K that end anywhere: inside a tile, a block, a byte.
SHAPES = [(2, 128, 128), (1, 256, 256), (2, 150, 168), (1, 272, 72), (2, 9, 33), (1, 1, 1)]
E8M0 = ("mxfp4", "mxfp8")
OFFSET = {"mxfp4": 126, "mxfp8": 120}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def store(fmt: str, codes: np.ndarray) -> torch.Tensor:
    """Codes ``[parts, N, K]`` → stored data."""
    if BITS[fmt] == 8:
        return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    if codes.shape[2] % 2:
        codes = np.pad(codes, ((0, 0), (0, 0), (0, 1)))
    return torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8))


def draw(fmt: str, parts: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes of every kind that is allowed, and random scales that need no shift."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << BITS[fmt], (parts, n, k))
    shape = (parts, n, -(-k // BLOCK[fmt][1]))
    if fmt == "int4":
        return store(fmt, codes), torch.from_numpy(random.lognormal(-3, 4, shape)).bfloat16()
    if fmt == "nvfp4":
        return store(fmt, codes), torch.from_numpy(random.integers(1, 127, shape, dtype=np.uint8)).view(
            torch.float8_e4m3fn
        )
    codes[codes & 0x7F == 0x7F] = 0x7E  # of E4M3, NaN
    low, high = {"mxfp4": (0, 129), "mxfp8": (3, 135)}[fmt]
    return store(fmt, codes), torch.from_numpy(random.integers(low, high, shape, dtype=np.uint8))


def values(fmt: str, data: torch.Tensor, scale: torch.Tensor, k: int) -> np.ndarray:
    """fp64 ``[parts, N, K]``, without a second-level scale."""
    factor = torch.ones(()) if fmt == "nvfp4" else None
    return np.stack([decode(fmt, d, s, factor, k) for d, s in zip(data, scale)])


def check(fmt: str, parts: int, n: int, k: int, data: torch.Tensor, scale: torch.Tensor) -> list[int]:
    """The way back, and the kernel's products: exactly the format's values. Returns the shifts."""
    tiles = RegisterTiles(fmt, parts, n, k)
    packed, shift = tiles.pack(data, scale)
    again = tiles.unpack(packed, shift)
    assert torch.equal(bits(again[0]), bits(data)) and torch.equal(bits(again[1]), bits(scale))
    assert again[0].dtype == data.dtype and again[1].dtype == scale.dtype
    factor = tiles.epilogue_factor(shift, torch.ones(parts) if fmt == "nvfp4" else None).double().numpy()
    got = products(fmt, parts, n, k, packed.numpy()) * factor[:, None, None]
    expected = values(fmt, data, scale, k)
    assert np.array_equal(got, expected)
    assert np.array_equal(np.signbit(got), np.signbit(expected))  # −0, too
    return shift.tolist()


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@pytest.mark.parametrize(("parts", "n", "k"), SHAPES)
def test_every_byte(fmt: str, parts: int, n: int, k: int) -> None:
    data, scale = draw(fmt, parts, n, k)
    tiles = RegisterTiles(fmt, parts, n, k)
    packed, shift = tiles.pack(data, scale)
    assert shift.tolist() == [0] * parts and shift.dtype == torch.int32
    expected = pack_slowly(fmt, parts, n, k, data, scale, [0] * parts)
    assert packed.shape == tiles.shape(3)[1:] == expected.shape
    assert np.array_equal(packed.numpy(), expected)


def test_stage_sizes() -> None:
    sizes = {fmt: RegisterTiles(fmt, 2, 128, 128).stage_bytes for fmt in PACKED_FORMATS}
    kib = 1024
    assert sizes == {"mxfp4": 17 * kib, "nvfp4": 18 * kib, "int4": 18 * kib, "mxfp8": 33 * kib}
    assert RegisterTiles("mxfp4", 2, 129, 257).shape(7) == (7, 2, 3, 17 * kib)
    assert RegisterTiles("mxfp4", 1, 256, 128).shape(1) == (1, 1, 1, 17 * kib)
    assert RegisterTiles("mxfp4", 1, 257, 129).shape(1) == (1, 2, 2, 17 * kib)


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@pytest.mark.parametrize(("parts", "n", "k"), SHAPES)
def test_what_the_kernel_expects(fmt: str, parts: int, n: int, k: int) -> None:
    tiles = RegisterTiles(fmt, parts, n, k)
    for tokens in (16, 96):  # stages of two packed tiles, and of one
        spec = GroupedSpec(7, parts, n, k, "bf16", "bf16", tokens, False, weights=fmt)
        assert spec.low_bit is not None
        assert (tiles.word_bytes, tiles.stage_bytes) == (spec.low_bit.word_bytes, spec.low_bit.stage_bytes)
        together = spec.weight_stage_bytes // tiles.stage_bytes
        assert spec.weight_stage_bytes == together * tiles.stage_bytes
        assert tiles.column_tiles == spec.column_tiles and -(-tiles.k_steps // together) == spec.k_steps


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@pytest.mark.parametrize(("parts", "n", "k"), SHAPES)
def test_way_back_and_products(fmt: str, parts: int, n: int, k: int) -> None:
    check(fmt, parts, n, k, *draw(fmt, parts, n, k, seed=1))


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_chunks(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many column tiles, rearranged two at a time, into memory of the caller's."""
    n, k = 5 * 128 + 3, 136
    data, scale = draw(fmt, 2, n, k, seed=2)
    tiles = RegisterTiles(fmt, 2, n, k)
    whole, _ = tiles.pack(data, scale)
    monkeypatch.setattr(register_tiles, "CHUNK_BYTES", 2 * tiles.word_bytes * tiles.k_steps)
    assert len(list(tiles._chunks())) == 3
    stack = torch.full(tiles.shape(2), 0xA5, dtype=torch.uint8)
    packed, shift = tiles.pack(data, scale, out=stack[1])
    assert packed.data_ptr() == stack[1].data_ptr() and torch.equal(packed, whole) and (stack[0] == 0xA5).all()
    again = tiles.unpack(packed, shift)
    assert torch.equal(bits(again[0]), bits(data)) and torch.equal(bits(again[1]), bits(scale))


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_noncontiguous_operands(fmt: str) -> None:
    """Parts of a larger tensor, as a checkpoint that fuses them has it."""
    data, scale = draw(fmt, 1, 64, 96, seed=3)
    apart = data[0].unflatten(0, (32, 2)).transpose(0, 1), scale[0].unflatten(0, (32, 2)).transpose(0, 1)
    assert not apart[0].is_contiguous()
    tiles = RegisterTiles(fmt, 2, 32, 96)
    packed, _ = tiles.pack(*apart)
    assert torch.equal(packed, tiles.pack(apart[0].contiguous(), apart[1].contiguous())[0])


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_like_the_librarys_own_values(fmt: str) -> None:
    """With the library's quantizer and dequantizer in place of the oracle; NVFP4 with its second-level scale."""
    tiles, library = RegisterTiles(fmt, 1, 40, 200), get_format(fmt)
    scale = torch.tensor(0.0123) if fmt == "nvfp4" else None
    q = library.quantize(torch.randn(40, 200) * torch.logspace(-3, 1, 40)[:, None], global_scale=scale)
    packed, shift = tiles.pack(q.data[None], q.scale[None])
    factor = tiles.epilogue_factor(shift, None if scale is None else scale.view(1))
    got = torch.from_numpy(products(fmt, 1, 40, 200, packed.numpy())).float()[0] * factor
    assert torch.equal(got, library.dequantize(q))


# ---- every code with every scale ----


def every_scale(fmt: str, scales: list[int], codes: list[int]) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """A part in which row r has scale ``scales[r]`` throughout and every code in ``codes``."""
    k = len(codes)
    data = store(fmt, np.array(codes)[None, None].repeat(len(scales), 1))
    scale = torch.tensor(scales, dtype=torch.uint8)[None, :, None].repeat(1, 1, -(-k // BLOCK[fmt][1]))
    return len(scales), k, data, scale


E4M3_CODES = [c for c in range(256) if c & 0x7F != 0x7F]


@pytest.mark.parametrize(("fmt", "scales", "shift"), [
    ("mxfp4", range(129), 0),  # 2**-127 … 2**1
    ("mxfp4", range(130), 1),
    ("mxfp4", range(134), 5),  # as far apart as products allow
    ("mxfp4", range(121, 255), 126),  # … 2**127
    ("mxfp8", range(3, 135), 0),
    ("mxfp8", range(135), None),
    ("mxfp8", range(132), -3),
    ("mxfp8", range(1, 133), -2),
    ("mxfp8", range(123, 255), 120),
])  # fmt: skip
def test_every_e8m0_scale_with_every_code(fmt: str, scales: range, shift: int | None) -> None:
    codes = list(range(16)) * 2 if fmt == "mxfp4" else E4M3_CODES
    n, k, data, scale = every_scale(fmt, list(scales), codes)
    if shift is None:
        with pytest.raises(UnrepresentableError, match=r"mxfp8: scales of part 0 reach from 2\*\*-127 to 2\*\*7"):
            RegisterTiles(fmt, 1, n, k).pack(data, scale)
    else:
        assert check(fmt, 1, n, k, data, scale) == [shift]


@pytest.mark.parametrize(("fmt", "span"), [("mxfp4", 134), ("mxfp8", 132)])
def test_scales_too_far_apart(fmt: str, span: int) -> None:
    """One binade more than what fits; the products would really be inexact."""
    codes = list(range(16)) * 2 if fmt == "mxfp4" else E4M3_CODES
    for least in (0, 60, 254 - span):
        n, k, data, scale = every_scale(fmt, [least, least + span], codes)
        with pytest.raises(UnrepresentableError, match=f"{fmt}: scales of part 0"):
            RegisterTiles(fmt, 1, n, k).pack(data, scale)
        check(fmt, 1, n, k, data, scale.clamp(max=least + span - 1))
        smallest = 2.0**-1 if fmt == "mxfp4" else 2.0**-9
        multiplier = 2.0 ** (254 - span - 127)  # of the smaller scale, where the larger one has the last exponent
        raw = ml_dtypes.bfloat16(smallest * 2.0 ** -OFFSET[fmt])
        assert float(raw * ml_dtypes.bfloat16(multiplier)) != float(raw) * multiplier


def test_shifts_are_of_a_part() -> None:
    data, scale = draw("mxfp4", 2, 20, 64)
    scale[0], scale[1] = 100, 200
    assert check("mxfp4", 2, 20, 64, data, scale) == [0, 72]
    scale[1, 3, 1] = 66
    with pytest.raises(UnrepresentableError, match="scales of part 1"):
        RegisterTiles("mxfp4", 2, 20, 64).pack(data, scale)


@pytest.mark.parametrize(("fmt", "far"), [("mxfp4", 1), ("mxfp8", 7)])
def test_blocks_of_zeros_keep_their_scale(fmt: str, far: int) -> None:
    """Zeros are exact under any multiplier, so only the exponent's range limits their scale."""
    codes = np.full((1, 3, 64), 0x0A)
    codes[0, 1, 32:] = 0
    codes[0, 1, 40] = 0x8 if fmt == "mxfp4" else 0x80  # −0
    data = store(fmt, codes)
    scale = torch.full((1, 3, 2), 254, dtype=torch.uint8)
    scale[0, 1, 1] = far
    assert check(fmt, 1, 3, 64, data, scale) == [254 + OFFSET[fmt] - 254]
    with pytest.raises(UnrepresentableError, match=f"{fmt}: scales of part 0 reach"):
        RegisterTiles(fmt, 1, 3, 64).pack(data, scale.clamp(max=253).fill_(254).index_fill(2, torch.tensor(1), 0))
    # The block is a short one at the end of a row.
    short = store(fmt, codes[:, :, :42] * (np.arange(42) < 32))
    scale = torch.tensor([[[254, far]]] * 3, dtype=torch.uint8).view(1, 3, 2)
    assert check(fmt, 1, 3, 42, short, scale) == [OFFSET[fmt]]


def test_all_zero_weights() -> None:
    """As the library's quantizer stores them: scale byte 0."""
    for fmt in PACKED_FORMATS:
        given = {"global_scale": torch.tensor(1.0)} if fmt == "nvfp4" else {}
        q = get_format(fmt).quantize(torch.zeros(5, 64), **given)
        assert check(fmt, 1, 5, 64, q.data[None], q.scale[None]) == [0]


def test_every_nvfp4_scale_with_every_code() -> None:
    n, k, data, scale = every_scale("nvfp4", list(range(1, 127)), list(range(16)))
    scale = scale.view(torch.float8_e4m3fn)
    check("nvfp4", 1, n, k, data, scale)
    packed, _ = RegisterTiles("nvfp4", 1, n, k).pack(data, scale)
    assert packed[0, 0, 16384:].view(256, 8)[0].tolist() == [1 << 3] + [10 << 3] * 7  # 2**-9, and padding of 1
    largest = np.array([packed[..., 16384:].max().item()], np.uint16)
    assert ((largest << 4) + (NVFP4_EXPONENT << 7)).view(ml_dtypes.bfloat16)[0] == 448 * 2.0**118


def test_nvfp4_scales_of_zero() -> None:
    data, scale = draw("nvfp4", 2, 16, 64)
    scale.view(torch.uint8)[1, 3, 2] = 0
    with pytest.raises(UnrepresentableError, match="nvfp4: a block scale is zero, but not all elements of its block"):
        RegisterTiles("nvfp4", 2, 16, 64).pack(data, scale)
    data[1, 3, 16:24] = 0x80  # 0 and −0
    check("nvfp4", 2, 16, 64, data, scale)


@pytest.mark.parametrize(("byte", "error", "message"), [
    (0x7F, FormatError, "nvfp4: block scale at [1, 3, 2] is NaN or negative, expected finite and not negative (1 are"),
    (0xFF, FormatError, "nvfp4: block scale at [1, 3, 2] is NaN or negative"),
    (0x81, FormatError, "nvfp4: block scale at [1, 3, 2] is NaN or negative"),
    (0xB8, FormatError, "nvfp4: block scale at [1, 3, 2] is NaN or negative"),
    (0x80, UnrepresentableError, "nvfp4: a block scale is −0"),
])  # fmt: skip
def test_bad_nvfp4_scales(byte: int, error: type[Exception], message: str) -> None:
    data, scale = draw("nvfp4", 2, 16, 64)
    scale.view(torch.uint8)[1, 3, 2] = byte
    with pytest.raises(error, match=re.escape(message)) as caught:
        RegisterTiles("nvfp4", 2, 16, 64).pack(data, scale)
    assert caught.type is error


@pytest.mark.parametrize("fmt", E8M0)
def test_nan_scales_are_an_error(fmt: str) -> None:
    """Not what callers may fall back from: no value could be given to the block elsewhere either."""
    data, scale = draw(fmt, 2, 16, 64)
    scale[1, 3, 1] = 255
    with pytest.raises(FormatError, match=re.escape(f"{fmt}: scale of part 1 at [3, 1] is NaN (E8M0 byte 255)")) as e:
        RegisterTiles(fmt, 2, 16, 64).pack(data, scale)
    assert e.type is FormatError


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_elements(code: int) -> None:
    """As a BF16 pattern they would be 480."""
    data, scale = draw("mxfp8", 1, 300, 64)
    data.view(torch.uint8)[0, 299, 63] = code
    with pytest.raises(UnrepresentableError, match="mxfp8: NaN elements"):
        RegisterTiles("mxfp8", 1, 300, 64).pack(data, scale)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4"])
def test_a_code_past_the_end_of_a_row(fmt: str) -> None:
    data, scale = draw(fmt, 1, 4, 33)
    check(fmt, 1, 4, 33, data, scale)
    data[0, 2, -1] |= 0x30
    with pytest.raises(UnrepresentableError, match=f"{fmt}: rows of 33 codes end in a byte with one more"):
        RegisterTiles(fmt, 1, 4, 33).pack(data, scale)


def test_any_int4_scale_is_kept() -> None:
    data, scale = draw("int4", 1, 4, 64)
    scale.view(torch.int16)[0, :, 0] = torch.tensor([0x7FC1, -0x8000, 0x0001, 0x7F80], dtype=torch.int16)
    tiles = RegisterTiles("int4", 1, 4, 64)
    assert torch.equal(bits(tiles.unpack(*tiles.pack(data, scale))[1]), bits(scale))


# ---- factors, errors ----


def test_factors() -> None:
    tiles = RegisterTiles("mxfp8", 2, 8, 32)
    shift = torch.tensor([[0, -3], [126, 1]], dtype=torch.int32)
    assert tiles.epilogue_factor(shift, None).tolist() == [[1.0, 0.125], [2.0**126, 2.0]]
    tiles = RegisterTiles("nvfp4", 2, 8, 32)
    scale = torch.tensor([[0.3, 1e-30], [1.0, 2.0**119]])
    factor = tiles.epilogue_factor(torch.zeros(2, 2, dtype=torch.int32), scale)
    assert factor.dtype == torch.float32 and factor.tolist() == [[256 * x for x in row] for row in scale.tolist()]
    with pytest.raises(UnrepresentableError, match=r"nvfp4: a global scale of more than 2\*\*120"):
        tiles.epilogue_factor(torch.zeros(2, 2, dtype=torch.int32), scale * 2)


@pytest.mark.parametrize(("change", "message"), [
    (lambda d, s: (d[:, :, :-1], s), "mxfp4 register tiles: data is [2, 20, 31] torch.uint8, expected [2, 20, 32]"),
    (lambda d, s: (d[:1], s), "data is [1, 20, 32] torch.uint8, expected [2, 20, 32] torch.uint8"),
    (lambda d, s: (d.view(torch.int8), s), "data is [2, 20, 32] torch.int8, expected [2, 20, 32] torch.uint8"),
    (lambda d, s: (d, s[:, :, :1]), "scale is [2, 20, 1] torch.uint8, expected [2, 20, 2] torch.uint8"),
    (lambda d, s: (d, s.float()), "scale is [2, 20, 2] torch.float32, expected [2, 20, 2] torch.uint8"),
])  # fmt: skip
def test_wrong_operands(change: Any, message: str) -> None:
    with pytest.raises(TensorError, match=re.escape(message)):
        RegisterTiles("mxfp4", 2, 20, 64).pack(*change(*draw("mxfp4", 2, 20, 64)))


def test_wrong_packed_operands() -> None:
    tiles = RegisterTiles("mxfp4", 2, 20, 64)
    data, scale = draw("mxfp4", 2, 20, 64)
    packed, shift = tiles.pack(data, scale)
    for call, message in (
        (lambda: tiles.pack(data, scale, out=packed[..., :-1]), "out is [1, 1, 17407] torch.uint8"),
        (lambda: tiles.unpack(packed[0], shift), "packed is [1, 17408] torch.uint8, expected [1, 1, 17408]"),
        (lambda: tiles.unpack(packed, shift[:1]), "shift is [1] torch.int32, expected [2] torch.int32"),
        (lambda: tiles.unpack(packed, shift.long()), "shift is [2] torch.int64, expected [2] torch.int32"),
        (lambda: RegisterTiles("mxfp4", 3, 20, 64), "register tiles of 3 parts of 20 × 64 weights"),
        (lambda: RegisterTiles("mxfp4", 2, 0, 64), "register tiles of 2 parts of 0 × 64 weights"),
    ):
        with pytest.raises(TensorError, match=re.escape(message)):
            call()
    with pytest.raises(FormatError, match="bf16 weights have no register tiles; int4, mxfp4, mxfp8, nvfp4, fp8_32x32,"):
        RegisterTiles("bf16", 2, 20, 64)


def test_oracle_sees_a_wrong_bit() -> None:
    """The emulation of the kernel depends on every bit of the stage."""
    data, scale = draw("mxfp4", 1, 256, 128)
    packed, _ = RegisterTiles("mxfp4", 1, 256, 128).pack(data, scale)
    right = products("mxfp4", 1, 256, 128, packed.numpy())
    for byte in (5, 9000, 16384, 17407):
        wrong = packed.numpy().copy()
        wrong[0, 0, byte] ^= 0x40
        assert not np.array_equal(products("mxfp4", 1, 256, 128, wrong), right)
