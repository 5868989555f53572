"""The backend for packed weights: what it launches, what becomes of the result, when it falls back.

The kernel is stood in for by fp64 products of what it would make of the packed bytes, bit operation by bit operation.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from layer_oracle import decode, rounded
from packed_weights import products

from moe_layer import backend as backends
from moe_layer.errors import TensorError
from moe_layer.gemm import low_bit_backend, reference
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.index import ExpertIndex
from moe_layer.gemm.low_bit_backend import LowBitBackend
from moe_layer.gemm.register_tiles import BLOCK_FORMATS, PACKED_FORMATS, RegisterTiles
from moe_layer.gemm.sm90_spec import GroupedSpec
from moe_layer.gemm.weights import ExpertWeights, pack
from moe_layer.gemm.widened import WidenedBackend
from moe_layer.quant import QuantizedTensor, get_format

EXPERTS, TOP_K, TOKENS, N, K = 3, 2, 8, 96, 160
ACTIVATION = Activation()


def draw(fmt: str, parts: int, n: int = N, k: int = K) -> ExpertWeights:
    """Random weights as the format stores them."""
    library = get_format(fmt)
    scale = {"global_scale": torch.tensor(0.01)} if fmt == "nvfp4" else {}
    qs = [[library.quantize(torch.randn(n, k) * k**-0.5, **scale) for _ in range(parts)] for _ in range(EXPERTS)]
    factors = torch.full((EXPERTS, parts), 0.01) if fmt == "nvfp4" else None
    data, scales = (torch.stack([torch.stack([getattr(q, what) for q in e]) for e in qs]) for what in ("data", "scale"))
    return ExpertWeights(fmt, data, scales, factors, k)


def packed(weights: ExpertWeights) -> ExpertWeights:
    return pack(weights, RegisterTiles(weights.format, weights.parts, weights.rows, weights.columns))


def values(weights: ExpertWeights, e: int, part: int) -> np.ndarray:
    """fp64 ``[N, K]`` of plain weights, by the tests' own decoder."""
    factor = None if weights.global_scale is None else weights.global_scale[e, part]
    return decode(weights.format, weights.data[e, part], weights.scale[e, part], factor, weights.columns)


class Kernel:
    """Stands in for ``grouped_gemm``; remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, spec: GroupedSpec, x: QuantizedTensor, weights: ExpertWeights, index: ExpertIndex, out: torch.Tensor,
        out_scale: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.calls.append({"spec": spec, "x": x, "weights": weights, "out": out.dtype})
        assert x.format == "bf16" and x.data.dtype == torch.bfloat16 and out_scale is None
        assert spec.weights == weights.format and spec.dtype == "bf16" and spec.parts == weights.parts
        assert (spec.experts, spec.n, spec.k) == (weights.num_local_experts, weights.rows, weights.columns)
        assert spec.token_factors == (x.global_scale is not None)
        assert weights.packed is not None and weights.packed.is_contiguous() and weights.factor is not None
        out.fill_(torch.nan)
        offsets = index.offsets.tolist()
        for e in range(weights.num_local_experts):
            w = products(weights.format, weights.parts, weights.rows, weights.columns, weights.packed[e].numpy())
            w = torch.from_numpy(w * weights.factor[e].double().numpy()[:, None, None])
            for row in range(offsets[e], offsets[e + 1]):
                at = int(index.slots[row]) if spec.gather else row
                token = x.data[at].double()
                if x.global_scale is not None:
                    token = token * x.global_scale[at].double()
                sums = [w[part] @ token for part in range(weights.parts)]
                y = sums[0] if spec.activation is None else spec.activation(*sums)
                if spec.out == "mxfp8":
                    y = torch.from_numpy(rounded("mxfp8", y.numpy()))
                out[row] = y.to(out.dtype)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The backend without a GPU: that kernel, and no look at devices."""
    kernel = Kernel()
    monkeypatch.setattr("moe_layer.gemm.sm90_backend.grouped_gemm", kernel)
    monkeypatch.setattr(low_bit_backend, "check_operands", reference.check_operands)
    return kernel


def operands(activation_format: str) -> tuple[QuantizedTensor, ExpertIndex]:
    x = get_format(activation_format).quantize(torch.randn(TOKENS, K).bfloat16())
    ids = torch.stack([torch.randperm(EXPERTS + 1)[:TOP_K] for _ in range(TOKENS)]).int()  # one id is elsewhere
    return x, reference.ReferenceBackend().build_index(ids, 0, EXPERTS)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("weight_format", PACKED_FORMATS)
@pytest.mark.parametrize("activation_format", ["bf16", "mxfp8", "mxfp4", "nvfp4"])
def test_fc1(kernel: Kernel, weight_format: str, activation_format: str) -> None:
    weights, (x, index) = draw(weight_format, 2), operands(activation_format)
    got = LowBitBackend().fc1(x, packed(weights), index, ACTIVATION, activation_format)
    (call,) = kernel.calls
    assert call["spec"].gather and call["spec"].activation == ACTIVATION
    if activation_format == "nvfp4":
        # BF16 holds the elements times their block scales exactly; the row's scale goes beside them.
        exact = get_format("nvfp4").dequantize_reference(replace(x, global_scale=torch.ones(1)))
        assert torch.equal(call["x"].data.float(), exact) and torch.equal(call["x"].global_scale, x.global_scale)
    else:
        assert torch.equal(call["x"].data, get_format(activation_format).dequantize(x, torch.bfloat16))
    in_kernel = activation_format in ("bf16", "mxfp8")
    assert call["out"] == (torch.bfloat16 if in_kernel else torch.float32)
    assert call["spec"].out == (activation_format if in_kernel else "fp32")
    assert got.format == ("bf16" if in_kernel else activation_format)
    rows = get_format(activation_format).dequantize_reference(x).double()
    for e in range(EXPERTS):
        gate, up = (torch.from_numpy(values(weights, e, p)) for p in range(2))
        for row in range(int(index.offsets[e]), int(index.offsets[e + 1])):
            token = rows[int(index.slots[row])]
            full = ACTIVATION(gate @ token, up @ token).numpy()
            expected = torch.from_numpy(rounded(activation_format, full))
            scales = (None if s is None else s[row : row + 1] for s in (got.scale, got.global_scale))
            q = QuantizedTensor(got.format, got.data[row : row + 1], *scales, N)
            # FP32 between the product and the rounding may send a value to the neighbouring code.
            limit = 4e-3 if activation_format in ("bf16", "mxfp8") else 5e-2
            assert relative_error(get_format(got.format).dequantize(q)[0], expected) < limit


@pytest.mark.parametrize("weight_format", PACKED_FORMATS)
@pytest.mark.parametrize("row_format", ["bf16", "mxfp4", "nvfp4"])
def test_fc2(kernel: Kernel, weight_format: str, row_format: str) -> None:
    """The rows of FC1: BF16 (of MXFP8 values, too), or in a format that is widened first."""
    weights, (_, index) = draw(weight_format, 1), operands("bf16")
    h = get_format(row_format).quantize(torch.randn(TOKENS * TOP_K, K).bfloat16())
    got = LowBitBackend().fc2(h, packed(weights), index)
    (call,) = kernel.calls
    assert not call["spec"].gather and call["spec"].out == "bf16" and got.dtype == torch.bfloat16
    rows = get_format(row_format).dequantize(h).double()
    for e in range(EXPERTS):
        w = torch.from_numpy(values(weights, e, 0))
        for row in range(int(index.offsets[e]), int(index.offsets[e + 1])):
            assert relative_error(got[row], w @ rows[row]) < 4e-3


def test_second_level_scales_of_fc1s_output(kernel: Kernel) -> None:
    weights, (x, index) = draw("mxfp4", 2), operands("bf16")
    scales = torch.tensor([1e-3, 2e-3, 4e-3])
    got = LowBitBackend().fc1(x, packed(weights), index, ACTIVATION, "nvfp4", output_global_scale=scales)
    for e in range(EXPERTS):
        rows = slice(int(index.offsets[e]), int(index.offsets[e + 1]))
        assert torch.equal(got.global_scale[rows, 0], scales[e].expand(rows.stop - rows.start))


@pytest.mark.parametrize("output_format", ["bf16", "mxfp8", "fp8"])
def test_weights_that_are_not_packed_are_widened(
    kernel: Kernel, output_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights, (x, index) = draw("mxfp4", 2), operands("bf16")
    backend, widened = LowBitBackend(), WidenedBackend()
    backend._kernels = widened._kernels = reference.ReferenceBackend()
    with caplog.at_level(logging.WARNING, logger="moe_layer"):
        got = backend.fc1(x, weights, index, ACTIVATION, output_format)
        again = backend.fc1(x, weights, index, ACTIVATION, output_format)
    assert not kernel.calls and caplog.text.count("widened to BF16") == 1
    expected = widened.fc1(x, weights, index, ACTIVATION, output_format)
    assert got.format == expected.format == output_format
    used = int(index.offsets[-1])
    for what in ("data", "scale"):
        a, b, c = getattr(got, what), getattr(expected, what), getattr(again, what)
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a[:used].view(torch.uint8), b[:used].view(torch.uint8))
            assert torch.equal(a[:used].view(torch.uint8), c[:used].view(torch.uint8))
    down = draw("mxfp4", 1)
    h = get_format("bf16").quantize(torch.randn(TOKENS * TOP_K, K).bfloat16())
    assert torch.equal(backend.fc2(h, down, index)[:used], widened.fc2(h, down, index)[:used])


def test_rows_that_kernels_cannot_address(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    """BF16 rows that start anywhere: packed weights are widened, once."""
    weights, (_, index) = draw("mxfp4", 2), operands("bf16")
    x = torch.randn(TOKENS, K + 1).bfloat16()[:, 1:]
    rows = QuantizedTensor("bf16", x, None, None, K)
    backend, wide = LowBitBackend(), packed(weights)
    backend._kernels = reference.ReferenceBackend()
    with caplog.at_level(logging.WARNING, logger="moe_layer"):
        got = [backend.fc1(rows, packed_now, index, ACTIVATION, "bf16") for packed_now in (wide, wide)]
    assert not kernel.calls and caplog.text.count("widened to BF16") == 1
    expected = reference.ReferenceBackend().fc1(rows, weights, index, ACTIVATION, "bf16")
    used = int(index.offsets[-1])
    assert torch.equal(got[0].data[:used], expected.data[:used]) and torch.equal(got[1].data, got[0].data)


def test_layouts() -> None:
    backend = LowBitBackend()
    for fmt in (*PACKED_FORMATS, *BLOCK_FORMATS):
        assert backend.weight_layout(fmt, 2, 96, 160) == RegisterTiles(fmt, 2, 96, 160)
        assert backend.weight_layout(fmt, 1, 100, 160) is None  # rows of FC2's output are no whole vectors
        assert backend.weight_layout(fmt, 1, 96, 164) is None
    for fmt in ("bf16", "fp8_128x128"):
        assert backend.weight_layout(fmt, 2, 96, 160) is None
    assert WidenedBackend().weight_layout("mxfp4", 2, 96, 160) is None


def test_operands_are_checked() -> None:
    weights, (x, index) = draw("mxfp4", 2), operands("bf16")
    backend = LowBitBackend()
    with pytest.raises(TensorError, match="fc1: rows lie on cpu, rows on cpu; kernels need one GPU"):
        backend.fc1(x, packed(weights), index, ACTIVATION, "bf16")
    with pytest.raises(TensorError, match=r"fc2: weights must have 1 part\(s\) an expert, got 2"):
        backend.fc2(x, packed(weights), index)
    with pytest.raises(TensorError, match="fc1: rows have 160 columns, but the weights take 168"):
        backend.fc1(x, packed(draw("mxfp4", 2, k=168)), index, ACTIVATION, "bf16")


@pytest.mark.parametrize(("weights", "activations", "name"), [
    *[(w, a, "sm90-low-bit") for w in (*PACKED_FORMATS, *BLOCK_FORMATS) for a in ("bf16", "mxfp8", "mxfp4", "nvfp4")],
    ("bf16", "bf16", "sm90"), ("fp8_128x128", "fp8", "sm90"),
    ("fp8_128x128", "bf16", "sm90-widened"), ("bf16", "mxfp8", "sm90-widened"),
    ("mxfp4", "fp8", "reference"), ("fp8_32x32", "fp8", "reference"), ("bf16", "nvfp4", "reference"),
    ("mxfp4", "fp32", "reference"),
])  # fmt: skip
def test_choice_on_hopper(weights: str, activations: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "architecture", lambda device: "sm_90a")
    backend = backends.select_backend("cpu", weights, activations)
    assert backend.name == name
    tiles = backends.select_layout("cpu", activations, weights, 2, 96, 160)
    assert (tiles is not None) == (name == "sm90-low-bit")


def test_layout_of_what_the_weights_imply(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 weights imply MXFP8 rows, NVFP4 ones NVFP4 rows; FP8 rows are for FP8 weights."""
    monkeypatch.setattr(backends, "architecture", lambda device: "sm_90a")
    assert backends.select_layout("cpu", None, "mxfp4", 2, 96, 160) == RegisterTiles("mxfp4", 2, 96, 160)
    assert backends.select_layout("cpu", None, "nvfp4", 2, 96, 160) == RegisterTiles("nvfp4", 2, 96, 160)
    assert backends.select_layout("cpu", "fp8", "mxfp4", 2, 96, 160) is None
