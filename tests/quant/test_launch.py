"""What goes to a kernel and what to PyTorch, and with which addresses; the launch itself is recorded, not done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")

from toy_encoder import ToyEncoder

from moe_layer.errors import FormatError, TensorError
from moe_layer.kernel_cache import compile_artifacts
from moe_layer.quant import Format, QuantizedTensor, get_format, launch

BF16 = torch.bfloat16
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(spec, arguments) of each launch, as if this CPU were a GPU."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "_arch", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "_launcher", lambda spec, device: lambda *arguments: found.append((spec, *arguments)))
    yield found
    for function in (launch._encode_kinds, launch._decode_kinds):
        function.cache_clear()


@pytest.mark.parametrize("name", FORMATS)
def test_operands_of_a_launch(name, launches):
    fmt = get_format(name)
    x = torch.zeros(7, 5120 + 64, dtype=BF16)[:, :5120]
    q = launch.quantize_by_kernel(fmt, x, None)
    assert q is not None and q.scale is not None
    reference = fmt.quantize_reference(x)
    for got, wanted in ((q.data, reference.data), (q.scale, reference.scale), (q.global_scale, reference.global_scale)):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
    [(spec, anchor, *arguments)] = launches
    assert arguments[:4] == [x.data_ptr(), (5120 + 64) * 2, q.data.data_ptr(), q.scale.data_ptr()]
    own = [] if q.global_scale is None else [q.scale.shape[1], q.global_scale.data_ptr(), 4, 0]
    assert arguments[4:-2] == (own or [0, 0])
    assert arguments[-2:] == [7, spec.grid(7)] and anchor.dtype == torch.uint8 and anchor.dim() == 1

    launches.clear()
    y = launch.dequantize_by_kernel(fmt, q, BF16)
    assert y is not None and y.shape == x.shape and y.dtype == BF16
    [(spec, _, *arguments)] = launches
    over = [0, 0] if q.global_scale is None else [q.global_scale.data_ptr(), 4]
    rows = [q.data.data_ptr(), fmt.row_bytes(5120), q.scale.data_ptr(), q.scale.shape[1] * q.scale.element_size()]
    assert arguments == [*rows, *over, y.data_ptr(), 7, spec.grid(7)]


@pytest.mark.parametrize("shape", [(512,), (1, 512), (3, 512), (2, 3, 512), (0, 512)])
def test_shapes(shape, launches):
    q = launch.quantize_by_kernel(get_format("mxfp4"), torch.zeros(shape), None)
    assert q is not None and q.scale is not None
    assert q.data.shape == (*shape[:-1], 256) and q.scale.shape == (*shape[:-1], 16)
    y = launch.dequantize_by_kernel(get_format("mxfp4"), q, torch.float32)
    assert y is not None and y.shape == shape
    rows = torch.Size(shape[:-1]).numel()
    assert len(launches) == (2 if rows else 0), "nothing is launched for no rows"
    assert all(arguments[-2] == rows for arguments in launches)


def test_given_global_scales(launches):
    fmt, x = get_format("nvfp4"), torch.zeros(5, 64)
    apart = torch.full((10, 1), 0.5)[::2]
    for scale in (
        torch.tensor(0.5),
        torch.tensor([0.5]),
        torch.full((5, 1), 0.5),
        apart,
        torch.ones(1, 1).expand(5, 1),
    ):
        q = launch.quantize_by_kernel(fmt, x, scale)
        assert q is not None and q.global_scale is scale
        assert launches[-1][-4] == scale.data_ptr()
        assert launches[-1][-3] == (4 * scale.stride(0) if scale.numel() > 1 else 0)
    assert launch.quantize_by_kernel(fmt, x.view(5, 1, 64), torch.full((10, 1, 1), 0.5)[::2]) is None, "lies apart"
    with pytest.raises(TensorError, match="global scale has dtype"):
        launch.quantize_by_kernel(fmt, x, torch.tensor(0.5, dtype=BF16))
    with pytest.raises(TensorError, match="has no global scale"):
        launch.quantize_by_kernel(get_format("fp8"), x, torch.tensor(0.5))


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("columns", [128, 5120, 7168])
def test_one_launch_for_rows_that_travel(columns, rows, launches):
    """Block scales, the row's own behind them, zeros up to whole vectors: where the kernel is told to put them."""
    fmt, x = get_format("nvfp4"), torch.zeros(rows, columns, dtype=BF16)
    found = launch.quantize_to_wire_by_kernel(fmt, x)
    assert found is not None
    for got, wanted in zip(found, fmt.to_wire(fmt.quantize_reference(x))):
        assert wanted is not None and got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous()
    data, scale = found
    length = scale.shape[1]
    assert length % 16 == 0 and len(launches) == (1 if rows else 0)
    if rows:
        [(spec, _, *arguments)] = launches
        own = scale.data_ptr() + columns // 16
        padding = (length - columns // 16 - 4) // 4
        assert arguments[2:] == [data.data_ptr(), scale.data_ptr(), length, own, length, padding, rows, spec.grid(rows)]
        # Back: where they lie.
        q = fmt.from_wire(data, scale, columns)
        assert q.global_scale is not None and q.global_scale.data_ptr() == own
        launches.clear()
        assert launch.dequantize_by_kernel(fmt, q, BF16) is not None
        [(_, _, *arguments)] = launches
        # A single row has no next one.
        strides = (length, length) if rows > 1 else (columns // 16, 0)
        assert arguments[2:6] == [scale.data_ptr(), strides[0], own, strides[1]]


def test_rows_that_travel_left_to_pytorch(launches):
    fmt = get_format("nvfp4")
    for x in (torch.zeros(4, 96, dtype=BF16), torch.zeros(4, 128).half(), torch.zeros(2, 2, 128)):
        assert launch.quantize_to_wire_by_kernel(fmt, x) is None
    assert not launches


def unserved() -> dict[str, torch.Tensor]:
    base = torch.zeros(8, 640, dtype=BF16)
    return {
        "half a vector": base[:, :520],
        "misaligned": base[:, 1:513],
        "rows at odd distances": torch.zeros(8, 513, dtype=BF16)[:, :512],
        "columns apart": base[:, ::2],
        "transposed": torch.zeros(512, 8, dtype=BF16).t(),
        "unevenly apart": base[:, :512].view(2, 4, 512),
        "fp16": base.half(),
        "fp64": base.double(),
    }


@pytest.mark.parametrize("what", unserved())
@pytest.mark.parametrize("name", FORMATS)
def test_left_to_pytorch(name, what, launches):
    assert launch.quantize_by_kernel(get_format(name), unserved()[what], None) is None and not launches


def test_formats_without_kernels(launches):
    for name in ("bf16", "fp32", "int4", "fp8_128x128", "fp8_128x128_ue8m0", "fp8_32x32"):
        fmt, x = get_format(name), torch.zeros(256, 256, dtype=BF16)
        assert launch.quantize_by_kernel(fmt, x, None) is None
        assert launch.dequantize_by_kernel(fmt, fmt.quantize_reference(x), BF16) is None
    assert not launches


def test_wrong_operands(launches):
    fmt = get_format("mxfp8")
    for x in (torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 0), torch.tensor(1.0)):
        with pytest.raises(TensorError, match="mxfp8: cannot quantize"):
            launch.quantize_by_kernel(fmt, x, None)
    q = fmt.quantize_reference(torch.zeros(4, 64))
    with pytest.raises(FormatError, match="the scales are missing"):
        launch.dequantize_by_kernel(fmt, QuantizedTensor("mxfp8", q.data, None, None, 64), BF16)
    misaligned = torch.zeros(4 * 65, dtype=torch.uint8)[1:257].view(torch.float8_e4m3fn).view(4, 64)
    assert launch.dequantize_by_kernel(fmt, QuantizedTensor("mxfp8", misaligned, q.scale, None, 64), BF16) is None
    assert launch.dequantize_by_kernel(fmt, q, torch.float16) is None and not launches


def test_rows_too_many_for_32_bits(launches):
    x = torch.zeros(1, 32, dtype=BF16).expand(1 << 30, 32)
    assert launch.quantize_by_kernel(get_format("mxfp8"), x, None) is None


class Toy(Format):
    """A format of somebody else, all in one file, with a kernel for BF16 and none for the way back."""

    name, element_bits, data_dtype, scale_dtype, block = "toy", 8, torch.uint8, torch.uint8, (1, 32)

    def quantize_reference(self, x, *, global_scale=None):
        raise NotImplementedError

    def dequantize_reference(self, q, dtype=torch.float32):
        return q.data.to(dtype)

    def kernel_encoder(self, dtype=BF16, *, per_row_global_scale=True):
        return ToyEncoder() if dtype == BF16 else None


def test_a_format_of_the_users(launches):
    fmt = Toy()
    q = launch.quantize_by_kernel(fmt, torch.zeros(3, 320, dtype=BF16), None)
    assert q is not None and q.scale is not None and q.data.shape == (3, 320) and q.scale.shape == (3, 10)
    [(spec, *_)] = launches
    function, signature = launch.source(spec)
    assert compile_artifacts(function, spec, signature, "sm_90a").artifacts.CUBIN
    assert launch.quantize_by_kernel(fmt, torch.zeros(3, 320), None) is None
    assert torch.equal(fmt.dequantize(q), q.data.float())


@pytest.mark.parametrize("capturing", [False, True])
def test_no_kernel_is_loaded_during_a_capture(capturing, monkeypatch):
    """A kernel that was not launched before leaves the work to PyTorch while a graph is captured."""
    monkeypatch.setattr(launch, "_arch", lambda device: "sm_90a")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(launch, "_launched", {})
    monkeypatch.setattr(launch, "kernel", lambda spec, arch: lambda *arguments: None)
    fmt, x = get_format("fp8"), torch.zeros(3, 256, dtype=BF16)
    try:
        assert (launch.quantize_by_kernel(fmt, x, None) is None) == capturing
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert (launch.quantize_by_kernel(fmt, x, None) is None) == capturing
    finally:
        launch._encode_kinds.cache_clear()
