"""The kernels' arithmetic on FP32 values, and of dequantizing: in NumPy, against the references, bit for bit.

That of BF16 values is in test_registers.py. Memory accesses are not emulated: tests/gpu/test_quant_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
pytest.importorskip("ml_dtypes")

import ml_dtypes
from emulated_registers import F32, U32, as_type, choose_all, emulate
from quant_kernels import at_midpoints

from moe_layer.quant import QuantizedTensor, get_format

FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")


def emulate_all(monkeypatch: pytest.MonkeyPatch, *, has_e2m1: bool = False) -> Any:
    """``moe_layer.quant.fp32_encoders`` and ``decoders`` on arrays."""
    from moe_layer.quant import decoders, device, fp32_encoders

    emulate(monkeypatch, has_e2m1=has_e2m1)
    for module in (fp32_encoders, decoders, device):
        for name, kind in (("Uint32", U32), ("Int32", np.int32), ("Float32", F32)):
            monkeypatch.setattr(module, name, as_type(kind), raising=False)

    def finite_magnitude(words: Any) -> Any:
        top = fp32_encoders.largest_magnitude(words)
        marked, finite = fp32_encoders.mark_bad(words)
        bad = top >= fp32_encoders.INFINITY
        return choose_all(bad, marked, words), np.where(bad, finite, top)

    def bf16_products(a: Any, b: Any) -> Any:
        def as_values(word: Any) -> list[Any]:
            return [(word >> U32(16 * j)).astype(np.uint16).view(ml_dtypes.bfloat16) for j in range(2)]

        low, high = [
            (x.astype(F32) * y.astype(F32)).astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32)
            for x, y in zip(as_values(np.asarray(a, U32)), as_values(np.asarray(b, U32)))
        ]
        return low | (high << U32(16))

    monkeypatch.setattr(fp32_encoders, "finite_magnitude", finite_magnitude)
    monkeypatch.setattr(device, "bf16_products", bf16_products)


def encode_rows(encoder: Any, x: np.ndarray, given: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``[T, K]`` → bytes of data, of block scales, and bits of the rows' scales, as lanes of warps make them."""
    tokens, columns = x.shape
    vectors = columns // encoder.vector_values
    lanes = -(-vectors // 32) * 32
    padded = np.zeros((tokens, lanes * encoder.vector_values), F32)
    padded[:, :columns] = x
    by_lane = padded.view(U32).reshape(tokens, lanes, encoder.vector_values)
    words = [by_lane[..., j].copy() for j in range(encoder.vector_values)]
    scale: Any = U32(0) if given is None else given.view(U32)
    if encoder.row_scale:
        scale = encoder.scale_of_row(encoder.magnitude(words).max(-1, keepdims=True))
    wire, entry = encoder.encode(words, scale)
    data = np.stack([np.broadcast_to(w, (tokens, lanes)) for w in wire], -1).astype(U32)[:, :vectors]
    entries = np.asarray(entry, U32)[:, : vectors : encoder.vectors_per_scale]
    scales = np.ascontiguousarray(entries[..., None]).view(np.uint8)[..., : encoder.scale_entry_bytes]
    return np.ascontiguousarray(data).view(np.uint8).reshape(tokens, -1), scales.reshape(tokens, -1), np.asarray(scale)


def raw(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy()


def check_encoder(name: str, x: np.ndarray, given: Any = None) -> None:
    fmt = get_format(name)
    scale = None if given is None else torch.as_tensor(given, dtype=torch.float32)
    expected = fmt.quantize_reference(torch.from_numpy(x), global_scale=scale)
    with np.errstate(all="ignore"):
        encoder = fmt.kernel_encoder(torch.float32, per_row_global_scale=given is None)
        data, scales, row = encode_rows(encoder, x, None if given is None else np.asarray(given, F32))
    assert expected.scale is not None
    np.testing.assert_array_equal(scales, raw(expected.scale))
    np.testing.assert_array_equal(data, raw(expected.data))
    if given is None and expected.global_scale is not None:
        np.testing.assert_array_equal(row, expected.global_scale.numpy().view(U32))


def values_of(kind: str, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    if kind == "any bits":
        return rng.integers(0, 1 << 32, (rows, columns), dtype=np.uint32).view(F32)
    if kind == "normal":
        return (rng.standard_normal((rows, columns)) * rng.lognormal(size=(rows, 1))).astype(F32)
    if kind == "zeros":
        return np.where(rng.random((rows, columns)) < 0.5, F32(-0.0), F32(0))
    if kind == "ties":  # and their neighbours
        x = np.ldexp(rng.integers(-63, 64, (rows, columns)) / 8.0, rng.integers(-3, 4, (rows, 1))).astype(F32)
        return (x.view(np.int32) + np.where(x != 0, rng.integers(-1, 2, x.shape), 0).astype(np.int32)).view(F32)
    exponent = rng.integers(-149, 128, (rows, 1)) - rng.integers(0, 14, (rows, columns))
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(rng.uniform(1, 2, (rows, columns)), exponent) * rng.choice([-1, 1], (rows, columns))
        x = x.astype(F32)
    if kind == "a bad value here and there":
        x = np.where(rng.random(x.shape) < 0.01, rng.choice([np.inf, -np.inf, np.nan], x.shape).astype(F32), x)
    return x


KINDS = ("normal", "any bits", "exponents", "a bad value here and there", "zeros", "ties")


@pytest.mark.parametrize("has_e2m1", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_encoders_of_fp32(name, kind, has_e2m1, rng, monkeypatch):
    emulate_all(monkeypatch, has_e2m1=has_e2m1)
    for columns in (32, 320, 3584):
        check_encoder(name, values_of(kind, rng, max(2, 30000 // columns), columns))


@pytest.mark.parametrize("exponent", [-117, -60, -30, 0, 40, 110])
def test_given_scales_of_any_size(exponent, rng, monkeypatch):
    """Too small a scale saturates, too large a one leaves zeros."""
    emulate_all(monkeypatch)
    for kind in ("exponents", "any bits"):
        check_encoder("nvfp4", values_of(kind, rng, 40, 1024), float(F32(2.0**exponent * rng.uniform(1, 2))))


@pytest.mark.parametrize("has_e2m1", [False, True])
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_quotients_at_midpoints(name, has_e2m1, monkeypatch):
    """An ulp of the quotient decides: multiplying with the scale's reciprocal does not do."""
    emulate_all(monkeypatch, has_e2m1=has_e2m1)
    x, given = at_midpoints(name, 300, 512, 1)
    check_encoder(name, x.numpy(), None if given is None else given.numpy())


def decoded(name: str, q: QuantizedTensor, count: int) -> np.ndarray:
    """FP32 values, ``count`` at a time."""
    decoder = get_format(name).kernel_decoder()
    assert decoder is not None and q.scale is not None
    data = raw(q.data).reshape(q.data.shape[0], -1, count * decoder.element_bits // 8)
    padded = np.zeros((*data.shape[:2], max(4, data.shape[2])), np.uint8)
    padded[..., : data.shape[2]] = data
    words = padded.view(U32)
    entries = np.zeros((*q.scale.shape, 4), np.uint8)
    entries[..., : decoder.scale_entry_bytes] = raw(q.scale).reshape(*q.scale.shape, -1)
    block = np.arange(data.shape[1]) * count // decoder.block
    entry = entries.view(U32)[..., 0][:, block]
    over: Any = U32(0)
    if q.global_scale is not None:
        over = np.broadcast_to(q.global_scale.numpy().view(U32).reshape(-1, 1), entry.shape)
    with np.errstate(all="ignore"):
        values = decoder.decode([words[..., j] for j in range(words.shape[-1])], count, entry, over)
    return np.stack(values, -1).reshape(q.data.shape[0], -1)


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("name", FORMATS)
def test_decoders(name, count, rng, monkeypatch):
    """Any bytes of data and scales."""
    emulate_all(monkeypatch)
    fmt, rows, columns = get_format(name), 300, 320
    data = torch.from_numpy(rng.integers(0, 256, (rows, fmt.row_bytes(columns)), dtype=np.uint8)).view(fmt.data_dtype)
    shape = (rows, -(-columns // fmt.block[1]))
    if name == "fp8":
        scale = torch.from_numpy(values_of("any bits", rng, *shape))
    else:
        scale = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).view(fmt.scale_dtype)
    over = torch.from_numpy(values_of("exponents", rng, rows, 1)) if fmt.two_level else None
    q = QuantizedTensor(name, data, scale, over, columns)
    got, expected = decoded(name, q, count), fmt.dequantize_reference(q).numpy()
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(np.where(nan, F32(0), got).view(U32), np.where(nan, F32(0), expected).view(U32))
