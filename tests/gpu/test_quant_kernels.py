"""The quantizers' kernels on a GPU: every byte that of the CPU's PyTorch, and of ml_dtypes where it has the format.

Destinations are poisoned and lie between guard bytes; inputs are fresh, and hard on quantizers (tests/helpers).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")
pytest.importorskip("ml_dtypes")

import ml_dtypes
from quant_kernels import KINDS, Decoding, Encoding, at_midpoints, decoders_of, encoders_of, values

from moe_layer.errors import MoELayerError
from moe_layer.kernel_cache import device_arch
from moe_layer.quant import QuantizedTensor, get_format, launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")
COLUMNS = (128, 320, 2048, 2304, 3584, 4096, 5120, 7168, 16384)
FP32_COLUMNS = (320, 7168)  # other widths differ in constants only, which BF16 sees
ENCODED = [(name, BF16, columns) for name in FORMATS for columns in COLUMNS]
ENCODED += [(name, FP32, columns) for name in FORMATS for columns in FP32_COLUMNS]
DECODED = [(name, BF16, columns) for name in FORMATS for columns in (320, 7168)]
DECODED += [(name, FP32, columns) for name in FORMATS for columns in (320, 5120)]
GIVEN_COLUMNS = (320, 7168)


def encoder_specs(name: str, dtype: torch.dtype, columns: int, given: bool) -> list[launch.EncodeSpec]:
    return list(encoders_of(get_format(name), dtype, columns, given=given).values())


def all_specs() -> list[launch.EncodeSpec | launch.DecodeSpec]:
    found: list[launch.EncodeSpec | launch.DecodeSpec] = []
    for name, dtype, columns in ENCODED:
        found += encoder_specs(name, dtype, columns, False)
        if name == "nvfp4" and columns in GIVEN_COLUMNS:
            found += encoder_specs(name, dtype, columns, True)
    for name, dtype, columns in DECODED:
        found += decoders_of(get_format(name), dtype, columns).values()
    return found


@pytest.fixture(scope="module")
def arch(kernel_pool) -> str:
    name = device_arch(torch.device("cuda"))
    tasks = []
    for spec in all_specs():
        function, signature = launch.source(spec)
        tasks.append((function.__module__, function.__name__, spec, signature, name))
    kernel_pool.compile(tasks)
    return name


def check(encoding: Encoding, expected: QuantizedTensor) -> None:
    encoding.poison()
    encoding()
    torch.cuda.synchronize()
    assert not (found := encoding.difference(expected)), (encoding.spec, found)


@pytest.mark.parametrize(("name", "dtype", "columns"), ENCODED)
def test_quantizing(name, dtype, columns, arch):
    fmt = get_format(name)
    rows = max(3, 30000 // columns) | 1
    for seed, kind in enumerate(KINDS):
        x = values(kind, rows, columns, dtype, 100 * columns + seed)
        expected = fmt.quantize_reference(x)
        for spec in encoder_specs(name, dtype, columns, False):
            check(Encoding(fmt, spec, x.cuda(), None, arch), expected)


@pytest.mark.parametrize("scales", ["one", "one a row"])
@pytest.mark.parametrize("columns", GIVEN_COLUMNS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_given_global_scales(dtype, columns, scales, arch):
    """Too small ones saturate, too large ones leave zeros."""
    fmt, rows = get_format("nvfp4"), 67
    rng = np.random.default_rng(columns)
    for kind in KINDS:
        x = values(kind, rows, columns, dtype, columns)
        shape = (rows, 1) if scales == "one a row" else ()
        given = np.ldexp(rng.uniform(1, 2, shape), rng.integers(-117, 117, shape) if kind == "exponents" else -7)
        given = torch.from_numpy(np.asarray(given, np.float32))
        expected = fmt.quantize_reference(x, global_scale=given)
        for spec in encoder_specs("nvfp4", dtype, columns, True):
            check(Encoding(fmt, spec, x.cuda(), given.cuda(), arch), expected)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_quotients_at_midpoints(name, arch):
    """An ulp of the quotient decides."""
    fmt = get_format(name)
    x, given = at_midpoints(name, 65, 7168, 2)
    expected = fmt.quantize_reference(x, global_scale=given)
    for spec in encoder_specs(name, FP32, 7168, given is not None):
        check(Encoding(fmt, spec, x.cuda(), None if given is None else given.cuda(), arch), expected)


@pytest.mark.parametrize(("name", "dtype", "columns"), DECODED)
def test_dequantizing(name, dtype, columns, arch):
    """What quantizers give, and any bytes at all."""
    fmt = get_format(name)
    rows = max(3, 30000 // columns) | 1
    generator = torch.Generator().manual_seed(columns)
    for seed, kind in enumerate((*KINDS, "any bytes")):
        q = fmt.quantize_reference(values("normal" if kind == "any bytes" else kind, rows, columns, BF16, seed))
        assert q.scale is not None
        if kind == "any bytes":
            data, scale = (
                torch.randint(0, 256, t.view(torch.uint8).shape, dtype=torch.uint8, generator=generator).view(t.dtype)
                for t in (q.data, q.scale)
            )
            q = QuantizedTensor(name, data, scale, q.global_scale, columns)
        here = QuantizedTensor(
            name, q.data.cuda(), q.scale.cuda(), None if q.global_scale is None else q.global_scale.cuda(), columns
        )
        for spec in decoders_of(fmt, dtype, columns).values():
            decoding = Decoding(spec, here, arch)
            decoding()
            torch.cuda.synchronize()
            assert not (found := decoding.difference(fmt.dequantize_reference(q, dtype))), (spec, found)


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; also where it is empty and its strides are 0, which no view of bytes takes."""
    return t.flatten().view(torch.uint8)


@pytest.mark.parametrize("rows", [0, 1, 33, 4096, 32768])
@pytest.mark.parametrize("name", FORMATS)
def test_public_path(name, rows, arch):
    """Rows that lie apart; large ones against PyTorch on the GPU, whose bits are the CPU's (test_quant.py)."""
    fmt = get_format(name)
    wide = torch.randn(rows, 7168 + 32, device="cuda") * torch.randn(rows, 1, device="cuda").exp()
    x = wide.bfloat16()[:, :7168]
    q, expected = fmt.quantize(x), fmt.quantize_reference(x)
    if rows == 33:
        expected_there = fmt.quantize_reference(x.cpu())
        assert torch.equal(q.data.cpu().view(torch.uint8), expected_there.data.view(torch.uint8))
    for got, wanted in ((q.data, expected.data), (q.scale, expected.scale), (q.global_scale, expected.global_scale)):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
            assert torch.equal(raw(got), raw(wanted))
    y = fmt.dequantize(q, BF16)
    assert torch.equal(y.view(torch.int16), fmt.dequantize_reference(expected, BF16).view(torch.int16))
    if fmt.is_activation_format and rows:
        again = fmt.dequantize(fmt.from_wire(*fmt.to_wire(q), 7168), BF16)
        assert torch.equal(again.view(torch.int16), y.view(torch.int16))
    assert launch.quantize_by_kernel(fmt, x, None) is not None, "a kernel, not PyTorch"
    assert launch.dequantize_by_kernel(fmt, q, BF16) is not None, "a kernel, not PyTorch"


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("columns", [320, 7168])
@pytest.mark.parametrize("rows", [0, 1, 33, 4096])
def test_rows_that_travel(rows, columns, dtype, arch):
    """One kernel writes NVFP4's block scales, each row's own and the zeros behind it; and reads them where they lie."""
    fmt = get_format("nvfp4")
    x = values("bad values", max(rows, 1), columns, dtype, rows + columns)[:rows]
    q = fmt.quantize_reference(x)
    expected = fmt.to_wire(q)
    poison = [torch.full(t.shape, 0xA5, dtype=torch.uint8, device="cuda") for t in expected]
    del poison  # likely what the next tensors of these sizes are made of
    found = launch.quantize_to_wire_by_kernel(fmt, x.cuda())
    assert found is not None
    for got, wanted in zip(found, expected):
        assert got.shape == wanted.shape and torch.equal(got.cpu(), wanted)
    y = launch.dequantize_by_kernel(fmt, fmt.from_wire(*found, columns), BF16)
    assert y is not None
    back = fmt.dequantize_reference(q, BF16)
    assert torch.equal(y.cpu().isnan(), back.isnan()) and torch.equal(y.cpu().nan_to_num(), back.nan_to_num())


def test_elements_of_ml_dtypes(arch):
    """MXFP8 and MXFP4 elements are ml_dtypes' roundings of the scaled values."""
    x = values("real", 65, 5120, BF16, 9)
    for name, kind, largest in (
        ("mxfp8", ml_dtypes.float8_e4m3fn, 448.0),
        ("mxfp4", ml_dtypes.float4_e2m1fn, 6.0),
    ):
        q = get_format(name).quantize(x.cuda())
        assert q.scale is not None
        scale = np.ldexp(1.0, q.scale.cpu().numpy().astype(np.int64) - 127).repeat(32, axis=1)
        scaled = np.clip(x.float().numpy().astype(np.float64) / scale, -largest, largest)
        expected = scaled.astype(np.float32).astype(kind).view(np.uint8)
        got = q.data.cpu().view(torch.uint8).numpy()
        if name == "mxfp4":
            got = np.stack((got & 15, got >> 4), -1).reshape(expected.shape)
            expected = expected & 15
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_replays_with_other_inputs(name, arch):
    fmt = get_format(name)
    static = torch.empty(65, 7168, dtype=BF16, device="cuda")
    fmt.dequantize(fmt.quantize(static.zero_()), BF16)  # loads the kernels
    loaded = dict(launch._launched)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        q = fmt.quantize(static)
        y = fmt.dequantize(q, BF16)
    assert loaded == launch._launched
    for seed in range(3):
        x = values("bad values", 65, 7168, BF16, seed)
        static.copy_(x)
        for t in (q.data, q.scale, q.global_scale):
            if t is not None:
                t.view(torch.uint8).fill_(0xA5)
        y.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        expected = fmt.quantize_reference(x)
        for got, wanted in (
            (q.data, expected.data),
            (q.scale, expected.scale),
            (q.global_scale, expected.global_scale),
        ):
            if got is not None and wanted is not None:
                assert torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8))
        back = fmt.dequantize_reference(expected, BF16)
        assert torch.equal(y.cpu().isnan(), back.isnan())
        assert torch.equal(y.cpu().nan_to_num(), back.nan_to_num())


@pytest.mark.parametrize("name", FORMATS)
def test_what_kernels_do_not_serve(name, arch):
    """Odd widths, misaligned and strided rows, other dtypes: PyTorch's bits, no error. Wrong dtypes: an error."""
    fmt = get_format(name)
    base = torch.randn(40, 7168 + 8, device="cuda")
    for x in (
        base[:, :333].bfloat16(),
        base.bfloat16()[:, 1:7169],
        base.bfloat16()[:, :7168:2],
        base[:, :7168].half(),
        base[:, :7168].double(),
        base.bfloat16()[:, :7168].view(2, 20, 7168),
    ):
        assert launch.quantize_by_kernel(fmt, x, None) is None
        q, expected = fmt.quantize(x), fmt.quantize_reference(x.cpu())
        assert torch.equal(q.data.cpu().view(torch.uint8), expected.data.view(torch.uint8))
    with pytest.raises(MoELayerError):
        fmt.quantize(torch.zeros(4, 128, dtype=torch.int32, device="cuda"))
    with pytest.raises(MoELayerError):
        fmt.quantize(torch.zeros(4, 0, device="cuda"))
