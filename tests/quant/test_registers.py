"""The formats' arithmetic on registers, instruction by instruction in NumPy, against the references, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
pytest.importorskip("ml_dtypes")

from emulated_registers import emulate, encode_rows, fused

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


@pytest.mark.parametrize("exponent", [-126, -117, -90, -61, -60, -30, 0, 40, 98, 101, 110])
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


# BF16 neighbours of an E2M1 midpoint times every mantissa of a divisor.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytest.mark.parametrize("part", range(4))
def test_sides_of_e2m1_midpoints(part: int) -> None:
    """``x / d`` corrected once lies on the same side of each midpoint as the correctly rounded quotient (registers.py).

    A sample of the 2**23 mantissas; all of them were run once.
    """
    m = ((np.arange(part, 1 << 23, 64, dtype=np.uint32)) | np.uint32(0x3F800000)).view(F32)
    m = np.append(m, np.array([0x3FFFFFFF], np.uint32).view(F32))  # Markstein's exception
    y = F32(1) / m
    for midpoint in MIDPOINTS:
        product = m.astype(np.float64) * midpoint
        step = np.exp2(np.floor(np.log2(product))) / 128
        for x in ((np.floor(product / step) * step).astype(F32), (np.ceil(product / step) * step).astype(F32)):
            q = x * y
            corrected = fused(-y, fused(m, q, -x), q)
            assert (np.sign(corrected - F32(midpoint)) == np.sign(x / m - F32(midpoint))).all()
