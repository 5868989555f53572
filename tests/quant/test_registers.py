"""The formats' arithmetic on registers, instruction by instruction in NumPy, against the references, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
pytest.importorskip("ml_dtypes")

import ml_dtypes
from emulated_registers import emulate, encode_rows

from moe_layer.quant import get_format

F32 = np.float32
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4", "nvfp4, one scale")


def encoder_of(encoders: Any, name: str) -> Any:
    return {
        "fp8": encoders.Fp8Encoder,
        "mxfp8": encoders.MxFp8Encoder,
        "mxfp4": encoders.MxFp4Encoder,
        "nvfp4": lambda: encoders.NvFp4Encoder(True),
        "nvfp4, one scale": lambda: encoders.NvFp4Encoder(False),
    }[name]()


def check(encoder: Any, name: str, bits: np.ndarray, common_scale: float | None = None) -> None:
    fmt = get_format(name.split(",")[0])
    x = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    given = None if common_scale is None else torch.tensor(common_scale, dtype=torch.float32)
    data, scale = fmt.to_wire(fmt.quantize(x, global_scale=given))
    assert scale is not None
    with np.errstate(all="ignore"):
        got_data, got_scale = encode_rows(encoder, bits, None if common_scale is None else F32(common_scale))
    for what, got, wanted in (("scales", got_scale, scale), ("data", got_data, data)):
        expected = wanted.contiguous().view(torch.uint8).numpy()
        assert not expected[:, got.shape[1] :].any(), "zeros that fill up the row"
        expected = expected[:, : got.shape[1]]
        wrong = np.argwhere(got != expected)
        if len(wrong):
            row, byte = wrong[0]
            values = x[row].float()
            raise AssertionError(
                f"{name}: {len(wrong)} bytes of {what} differ, first row {row}, byte {byte}: {got[row, byte]:#x}, "
                f"not {expected[row, byte]:#x}; amax of the row {values.abs().max()}"
            )


def spread_exponents(rng: Any, rows: int, columns: int) -> np.ndarray:
    """Blocks of 16 whose largest exponent is anywhere, values up to 12 binades below; signs, zeros, subnormals."""
    top = rng.integers(0, 255, (rows, columns // 16, 1))
    exponent = np.clip(top - rng.integers(0, 13, (rows, columns // 16, 16)), 0, 254)
    mantissa = rng.integers(0, 128, exponent.shape)
    value = (rng.integers(0, 2, exponent.shape) << 15) | (exponent << 7) | mantissa
    value[rng.random(value.shape) < 0.05] &= 0x8000
    return value.reshape(rows, columns).astype(np.uint16)


def make(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "any bits":  # NaN and infinities among them, mostly spoiling their block
        return rng.integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
    if kind == "exponents":
        return spread_exponents(rng, rows, columns)
    if kind == "a bad value here and there":
        value = spread_exponents(rng, rows, columns)
        bad = rng.choice(np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81], np.uint16), value.shape)
        return np.where(rng.random(value.shape) < 0.01, bad, value)
    if kind == "zeros":
        return (rng.integers(0, 2, (rows, columns)) << 15).astype(np.uint16)
    if kind == "ties":  # few mantissa bits, so that quotients hit the elements' midpoints
        exponent = 127 + rng.integers(-6, 7, (rows, columns))
        return (
            (rng.integers(0, 2, exponent.shape) << 15) | (exponent << 7) | (rng.integers(0, 16, exponent.shape) << 3)
        ).astype(np.uint16)
    x = torch.from_numpy(rng.standard_normal((rows, columns), F32) * rng.lognormal(size=(rows, 1)).astype(F32))
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


KINDS = ("normal", "any bits", "exponents", "a bad value here and there", "zeros", "ties")


@pytest.mark.parametrize("has_e2m1", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_the_reference(name: str, kind: str, has_e2m1: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, columns in enumerate((32, 128, 320, 3584)):
        encoder = encoder_of(emulate(monkeypatch, has_e2m1=has_e2m1, seed=seed), name)
        rows = make(kind, max(2, 24000 // columns), columns, seed)
        if encoder.common_scale:
            for scale in (1.0, 0.0123, 3.3e-7):
                check(encoder, name, rows, scale)
        else:
            check(encoder, name, rows)


@pytest.mark.parametrize("exponent", [-126, -117, -101, -100, -61, -60, -30, 0, 40, 98, 99, 100, 110, 117])
def test_common_scales_of_any_size(exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small a scale saturates, too large a one leaves zeros."""
    rng = np.random.default_rng(exponent + 200)
    encoder = encoder_of(emulate(monkeypatch), "nvfp4, one scale")
    for kind in ("exponents", "any bits"):
        check(
            encoder,
            "nvfp4, one scale",
            make(kind, 40, 1024, exponent + 300),
            float(F32(2.0**exponent * rng.uniform(1, 2))),
        )


def test_every_magnitude_as_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales by constants, 448 and 2688: all BF16 magnitudes."""
    rows = np.zeros((0x7F80, 128), np.uint16)
    rows[:, 5] = np.arange(0x7F80)
    rows[:, 40] = 0x8000 | (np.arange(0x7F80) // 2)
    for name in FORMATS[:4]:
        check(encoder_of(emulate(monkeypatch), name), name, rows)


def test_all_quotients_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mantissa of the block's largest value, every mantissa of another, in the binades that E4M3 tells apart."""
    encoder = encoder_of(emulate(monkeypatch, seed=1), "fp8")
    others = np.arange(128, dtype=np.uint16)
    for one in (127, 12):  # of 1, or of a block whose scale is near the smallest normal number
        for binade in range(0, 19, 3):
            rows = np.zeros((128, 256), np.uint16)
            rows[:, :127] = (max(one + 8 - binade, 1) << 7) | others[1:]
            rows[:, 128:255] = (0x8000 | (max(one + 7 - binade, 1) << 7)) | others[1:]
            rows[:, 127] = rows[:, 255] = ((one + 9) << 7) | others
            check(encoder, "fp8", rows)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_sides_of_midpoints(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``x / d`` of BF16's ``x`` lies on the same side of each midpoint of E2M1 and E4M3 as the rounded quotient.

    Midpoints have up to five bits: odd multiples of a power of two. The hardware's reciprocal may be an ulp off. A
    sample of the 2**23 mantissas; all of them were run once.
    """
    emulate(monkeypatch)
    from moe_layer.quant import registers as reg

    sample = np.arange(11, 1 << 23, 97, dtype=np.uint32)
    d = (np.append(sample, np.arange((1 << 23) - 64, 1 << 23, dtype=np.uint32)) | np.uint32(0x3F800000)).view(F32)
    monkeypatch.setattr(reg, "rough_reciprocal", lambda a: ((F32(1) / a).view(np.int32) + np.int32(off)).view(F32))
    high, low = reg.split_reciprocal(d)
    assert (high > 0).all() and (low > 0).all()
    for odd in range(1, 33, 2):
        product = d.astype(np.float64) * odd
        step = np.exp2(np.floor(np.log2(product))) / 128
        for x in ((np.floor(product / step) * step).astype(F32), (np.ceil(product / step) * step).astype(F32)):
            side = np.sign(reg.split_quotient(x, high, low) - F32(odd))
            np.testing.assert_array_equal(side, np.sign(x / d - F32(odd)), f"{odd}")


@pytest.mark.parametrize("has_e2m1", [False, True])
def test_e2m1_of_any_number(has_e2m1: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Midpoints, their neighbours, numbers of all sizes and infinities, against ml_dtypes; signs of both kinds."""
    emulate(monkeypatch, has_e2m1=has_e2m1)
    from moe_layer.quant import registers as reg

    rng = np.random.default_rng(3)
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32).view(np.int32)
    near = (rng.choice(midpoints, (8, 4000)) + rng.integers(-2, 3, (8, 4000), dtype=np.int32)).view(F32)
    sizes = np.ldexp(rng.uniform(1, 2, (8, 4000)), rng.integers(-149, 128, (8, 4000))).astype(F32)
    values = np.concatenate((near, rng.uniform(0, 8, (8, 4000)).astype(F32), sizes), axis=1)
    values[:, :8] = np.where(np.eye(8) > 0, F32(np.inf), F32(0))
    signed = values * rng.choice(np.array([-1, 1], F32), values.shape)
    halves = (signed.view(np.uint32) >> 16).astype(np.uint32)
    pairs = [halves[j] | (halves[j + 1] << 16) for j in range(0, 8, 2)]
    for factor in (F32(1), F32(2.0**-64), F32(2.0**64)):
        with np.errstate(all="ignore"):
            given = (signed if has_e2m1 else values) / factor
            seen = np.clip(signed / factor * factor, -6, 6)  # what fp32 leaves of it
            codes = seen.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).astype(np.uint32) & 15
            expected = np.bitwise_or.reduce(codes << (4 * np.arange(8, dtype=np.uint32))[:, None], axis=0)
            for words in (pairs, list(signed.view(np.uint32))):
                np.testing.assert_array_equal(reg.e2m1_word(list(given), factor, factor / 2, words), expected)
