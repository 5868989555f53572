"""Every block-scaled format, bit for bit, against a block-by-block NumPy oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_layer.quant import dequantize, get_format, quantize

BLOCK_FORMATS = ["fp8", "fp8_128x128", "fp8_128x128_ue8m0", "fp8_32x32", "mxfp8", "mxfp4", "nvfp4", "int4"]
E4M3_FORMATS = BLOCK_FORMATS[:5]
NAN_BLOCK_FORMATS = BLOCK_FORMATS[5:]


def check(oracle, name: str, x: torch.Tensor, q, reference=None) -> None:
    """``q``'s bytes, scales and values are those of the oracle for ``x`` ``[N, K]``."""
    n, k = x.shape
    reference = reference or oracle.quantize(name, x.float().numpy())
    assert q.format == name and q.columns == k
    assert q.data.is_contiguous() and q.scale.is_contiguous()
    np.testing.assert_array_equal(oracle.scale(q.scale), reference.scale)
    if reference.global_scale is not None:
        np.testing.assert_array_equal(q.global_scale.expand(n, 1).numpy(), reference.global_scale)
    np.testing.assert_array_equal(oracle.codes(name, q.data, k), reference.codes)
    with np.errstate(over="ignore"):
        values = reference.values.astype(np.float32)
    got = dequantize(q)
    assert got.shape == x.shape and got.is_contiguous()
    np.testing.assert_array_equal(got.numpy(), values)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(np.signbit(got.numpy())[finite], np.signbit(values)[finite])


@pytest.mark.parametrize("shape", [(1, 1), (1, 256), (7, 1), (2, 31), (33, 65), (130, 259)])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_wild_values_and_odd_sizes(oracle, wild, name, shape):
    x = torch.from_numpy(wild(*shape))
    check(oracle, name, x, quantize(x, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_input_dtypes(oracle, rng, name, dtype):
    x = torch.from_numpy(rng.standard_normal((9, 70)) * 3).to(dtype)
    check(oracle, name, x, quantize(x, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_strided_input(oracle, rng, name):
    base = torch.from_numpy(rng.standard_normal((80, 40, 2)).astype(np.float32))
    for x in (base[..., 0].t(), base[::2, ::3, 1], base[3:4, :, 0].expand(5, 40)):
        check(oracle, name, x, quantize(x, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_leading_dimensions(oracle, wild, name):
    x = torch.from_numpy(wild(2, 3, 35, 66))
    q = quantize(x, name)
    values = dequantize(q)
    assert q.data.shape[:-1] == (2, 3, 35)
    for i in range(2):
        for j in range(3):
            reference = oracle.quantize(name, x[i, j].numpy())
            np.testing.assert_array_equal(oracle.codes(name, q.data[i, j], 66), reference.codes)
            np.testing.assert_array_equal(oracle.scale(q.scale[i, j]), reference.scale)
            np.testing.assert_array_equal(values[i, j].numpy(), reference.values.astype(np.float32))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_no_rows(name):
    fmt = get_format(name)
    q = fmt.quantize(torch.empty(0, 300))
    assert q.data.shape == (0, fmt.data_columns(300)) and q.scale.shape == fmt.scale_shape(0, 300)
    assert fmt.dequantize(q).shape == (0, 300)


@pytest.mark.parametrize(
    "name", [n for n in BLOCK_FORMATS if n not in ("fp8_128x128", "fp8_128x128_ue8m0", "fp8_32x32")]
)
def test_a_row_alone(wild, name):
    """``[K]`` gives what the same row gives in a matrix of others: rows never depend on their neighbours."""
    x = torch.from_numpy(wild(6, 83))
    together = quantize(x, name)
    for i in range(6):
        alone = quantize(x[i], name)
        assert alone.data.shape == together.data.shape[1:]
        assert torch.equal(alone.data.view(torch.uint8), together.data[i].view(torch.uint8))
        assert torch.equal(dequantize(alone), dequantize(together)[i])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_amax_at_every_exponent(oracle, rng, name):
    """One block per exponent of fp32, its largest magnitude at either end and in the middle of the binade."""
    exponents = np.arange(-149, 128)
    mantissa = rng.choice([1.0, 1.0 + 2.0**-23, 1.5, 1.75, 1.75 + 2.0**-23, 1.875, 2 - 2.0**-23], exponents.size)
    amax = np.ldexp(mantissa, exponents).astype(np.float32)
    blocks = rng.uniform(-1, 1, (exponents.size, 16)) * amax[:, None]
    blocks[:, 3] = amax * rng.choice([-1, 1], exponents.size)
    blocks = blocks.astype(np.float32)
    for row in blocks if get_format(name).block[0] > 1 else [blocks]:
        x = torch.from_numpy(np.atleast_2d(row))
        check(oracle, name, x, quantize(x, name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_all_zero_blocks_come_back_as_zeros(oracle, rng, name):
    rows, columns = get_format(name).block
    x = rng.standard_normal((2 * rows, 3 * columns)).astype(np.float32)
    x[:rows, columns : 2 * columns] = 0
    x[rows:, columns:] = 0
    x[0, columns] = -0.0
    q = quantize(torch.from_numpy(x), name)
    check(oracle, name, torch.from_numpy(x), q)
    values = dequantize(q).numpy()
    assert (values[x == 0] == 0).all()
    assert np.signbit(values[0, columns]) == (name != "int4")  # offset-binary integers have no −0
    stored = oracle.scale(q.scale)
    assert np.isfinite(stored).all() and (stored != 255).all()
    if q.scale.is_floating_point():
        assert (stored > 0).all()
    zeros = quantize(torch.zeros(rows, columns), name)
    assert torch.equal(dequantize(zeros), torch.zeros(rows, columns))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", E4M3_FORMATS)
def test_non_finite_stays_at_its_element(oracle, rng, name, bad):
    rows, columns = get_format(name).block
    x = rng.standard_normal((rows + 1, 2 * columns)).astype(np.float32)
    x[0, 1] = bad
    got = quantize(torch.from_numpy(x), name)
    check(oracle, name, torch.from_numpy(x), got)
    without = x.copy()
    without[0, 1] = 0
    expected = dequantize(quantize(torch.from_numpy(without), name))
    values = dequantize(got)
    assert values[0, 1].isnan()
    values[0, 1] = expected[0, 1]
    assert torch.equal(values, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAN_BLOCK_FORMATS)
def test_non_finite_stays_in_its_block(oracle, rng, name, bad):
    columns = get_format(name).block[1]
    x = rng.standard_normal((3, 3 * columns)).astype(np.float32)
    x[1, columns + 2] = bad
    got = quantize(torch.from_numpy(x), name)
    check(oracle, name, torch.from_numpy(x), got)
    spoiled = np.zeros(x.shape, bool)
    spoiled[1, columns : 2 * columns] = True
    values = dequantize(got).numpy()
    np.testing.assert_array_equal(np.isnan(values), spoiled)
    without = np.where(spoiled, np.float32(0), x)
    expected = dequantize(quantize(torch.from_numpy(without), name)).numpy()
    np.testing.assert_array_equal(values[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_nothing_finite(oracle, name):
    x = torch.full((2, 40), float("inf"))
    x[1] = float("nan")
    q = quantize(x, name)
    check(oracle, name, x, q)
    assert dequantize(q).isnan().all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_each_value_is_the_nearest_representable(oracle, rng, name):
    """In fp64, without the oracle's arithmetic: given the scale, no other code is closer (up to fp32's rounding)."""
    x = rng.standard_normal((17, 128)).astype(np.float32)
    q = quantize(torch.from_numpy(x), name)
    ones = torch.ones(17, 128)
    step = quantize(ones, name)
    unit = oracle.codebook[oracle.specs[name].element]
    code_of_one = oracle.codes(name, step.data, 128).astype(int)
    scale = dequantize(type(q)(name, step.data, q.scale, q.global_scale, 128)).double().numpy() / unit[code_of_one]
    book = unit[np.isfinite(unit)]
    best = np.abs(x[..., None] - scale[..., None] * book).min(-1)
    error = np.abs(x - dequantize(q).double().numpy())
    assert (error <= best + 2.0**-22 * np.abs(x)).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "fp8_32x32", "fp8_128x128_ue8m0"])
def test_quantizing_again_changes_nothing(rng, name):
    """Values that are already in a power-of-two format keep their bytes, or at least their values."""
    x = torch.from_numpy(rng.standard_normal((64, 96)).astype(np.float32))
    once = dequantize(quantize(x, name))
    assert torch.equal(dequantize(quantize(once, name)), once)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_input_is_not_written_and_gradients_are_dropped(rng, name):
    x = torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32))
    x[0, 0] = float("nan")
    before = x.clone()
    q = quantize(x.requires_grad_(), name)
    assert not q.scale.requires_grad and not dequantize(q).requires_grad
    assert torch.equal(x.detach().view(torch.int32), before.view(torch.int32))


def test_mx_saturation_is_as_documented():
    """OCP's floor scale: amax lands in the top binade; what lands above the largest element is clamped to it."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 511.0, -460.0
    assert dequantize(quantize(x, "mxfp8"))[0, :2].tolist() == [448.0, -448.0]
    x[0, 0], x[0, 1] = 7.9, -6.5
    assert dequantize(quantize(x, "mxfp4"))[0, :2].tolist() == [6.0, -6.0]
    assert dequantize(quantize(torch.full((1, 1), 449.0), "fp8_32x32")).item() == 448.0  # scale 2: 224.5 → 224
