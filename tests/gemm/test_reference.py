"""FC1, FC2 and finalize of the reference, stage by stage, against fp64 over independently decoded operands."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from layer_oracle import BLOCK, Oracle, decode, rel_l2, rounded

from moe_layer.errors import TensorError
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.reference import ReferenceBackend
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor, get_format

BACKEND = ReferenceBackend()
WEIGHTS = ["bf16", "fp32", *BLOCK]
ACTIVATIONS = ["bf16", "fp32", "fp8", "mxfp8", "mxfp4", "nvfp4"]


def make_weights(fmt: str, experts: int, parts: int, n: int, k: int) -> ExpertWeights:
    scale = torch.rand(experts, parts, 1, 1) + 0.5
    values = torch.randn(experts, parts, n, k) / math.sqrt(k) * scale
    two_level = torch.rand(()) * 1e-3 + 1e-4 if get_format(fmt).two_level else None
    parts_ = [
        [get_format(fmt).quantize(values[e, p], global_scale=two_level) for p in range(parts)] for e in range(experts)
    ]

    def stack(field: str) -> torch.Tensor | None:
        tensors = [[getattr(q, field) for q in row] for row in parts_]
        if tensors[0][0] is None:
            return None
        return torch.stack(
            [torch.stack([t.reshape(()) if field == "global_scale" else t for t in row]) for row in tensors]
        )

    data = stack("data")
    assert data is not None
    return ExpertWeights(fmt, data, stack("scale"), stack("global_scale"), k)


def decoded(weights: ExpertWeights, expert: int, part: int) -> np.ndarray:
    q = weights.expert(expert, part)
    return decode(q.format, q.data, q.scale, q.global_scale, q.columns)


def values(q: QuantizedTensor) -> np.ndarray:
    """Rows of activations in fp64, each decoded by the oracle."""
    rows = []
    for i in range(q.data.shape[0]):
        scale = None if q.scale is None else q.scale[i : i + 1]
        whole = q.global_scale if q.global_scale is None or q.global_scale.dim() < 2 else q.global_scale[i]
        rows.append(decode(q.format, q.data[i : i + 1], scale, whole, q.columns)[0])
    return np.array(rows)


def ids_of(slots: int, top_k: int, experts: int) -> torch.Tensor:
    """Distinct experts a slot, some of them elsewhere, every fifth slot empty."""
    ids = torch.stack([torch.randperm(experts + 2)[:top_k] for _ in range(slots)]).int()
    ids[::5] = -1
    return ids


@pytest.mark.parametrize("weight_format", WEIGHTS)
@pytest.mark.parametrize("activation_format", ACTIVATIONS)
def test_every_pair_of_formats(weight_format: str, activation_format: str) -> None:
    """K 136 and N 72 are multiples of 8 only: every block format has a short last block."""
    experts, k, n, slots = 5, 136, 72, 20
    w1, w2 = make_weights(weight_format, experts, 2, n, k), make_weights(weight_format, experts, 1, k, n)
    x = get_format(activation_format).quantize(torch.randn(slots, k))
    index = BACKEND.build_index(ids_of(slots, 3, experts), 0, experts)
    h = BACKEND.fc1(x, w1, index, Activation(limit=2.0), activation_format)
    out = BACKEND.fc2(h, w2, index)
    oracle = Oracle(np.zeros((1, 1)), [], 1, limit=2.0, activations=activation_format)
    offsets, rows = index.offsets.tolist(), values(x)
    total = offsets[-1]
    assert h.data.shape[0] == out.shape[0] == total and out.dtype == torch.float32
    h_true, out_true, h_got = np.empty((total, n)), np.empty((total, k)), values(h)
    for e in range(experts):
        for r in range(offsets[e], offsets[e + 1]):
            z = rows[index.slots[r]]
            h_true[r] = rounded(activation_format, oracle.activate(decoded(w1, e, 0) @ z, decoded(w1, e, 1) @ z))
            out_true[r] = decoded(w2, e, 0) @ h_got[r]
    if activation_format == "fp32":
        assert rel_l2(torch.from_numpy(h_got), torch.from_numpy(h_true)) < 1e-6
    else:
        # What lies within fp32's error of a rounding boundary may fall to its other side; a scale takes its block too.
        # fp8's own scale is fp32, as inexact as the sum that it was taken from.
        exact = np.isclose(h_got, h_true, rtol=1e-5, atol=0)
        assert exact.mean() > 0.97
        assert rel_l2(torch.from_numpy(h_got), torch.from_numpy(h_true)) < 3e-2
    assert rel_l2(out, torch.from_numpy(out_true)) < 2e-6


@pytest.mark.parametrize("n", [1, 127, 129, 192, 257, 448, 1407])
@pytest.mark.parametrize("weight_format", ["bf16", "fp8_128x128", "mxfp4"])
def test_awkward_widths(n: int, weight_format: str) -> None:
    """Widths that no tile or block divides: nothing may be read or written beyond them (vllm#48173)."""
    experts, k = 2, 64
    w1, w2 = make_weights(weight_format, experts, 2, n, k), make_weights(weight_format, experts, 1, k, n)
    x = torch.randn(9, k)
    index = BACKEND.build_index(torch.randint(0, experts, (9, 1), dtype=torch.int32), 0, experts)
    h = BACKEND.fc1(get_format("fp32").quantize(x), w1, index, Activation(), "fp32")
    out = BACKEND.fc2(h, w2, index)
    oracle = Oracle(np.zeros((1, 1)), [], 1)
    offsets, truth = index.offsets.tolist(), np.empty(out.shape)
    for e in range(experts):
        weights = decoded(w1, e, 0), decoded(w1, e, 1), decoded(w2, e, 0)
        for r in range(offsets[e], offsets[e + 1]):
            truth[r] = oracle.mlp(weights, x[index.slots[r]].double().numpy(), "fp32")
    assert rel_l2(out, torch.from_numpy(truth)) < 2e-6


def test_only_slots_of_the_index_are_read() -> None:
    """Unused slots hold anything, NaN too (vllm#41249)."""
    experts, k, n = 4, 96, 40
    w1 = make_weights("mxfp4", experts, 2, n, k)
    ids = ids_of(30, 2, experts)
    x = get_format("mxfp8").quantize(torch.randn(30, k))
    index = BACKEND.build_index(ids, 0, experts)
    clean = BACKEND.fc1(x, w1, index, Activation(), "mxfp8")
    unused = ~((ids >= 0) & (ids < experts)).any(1)
    assert unused.any()
    data, scale = x.data.view(torch.uint8).clone(), x.scale.clone()
    data[unused], scale[unused] = 0xFF, 0xFF
    poisoned = QuantizedTensor(x.format, data.view(torch.float8_e4m3fn), scale, None, k)
    dirty = BACKEND.fc1(poisoned, w1, index, Activation(), "mxfp8")
    assert torch.equal(dirty.data.view(torch.uint8), clean.data.view(torch.uint8))
    assert torch.equal(dirty.scale, clean.scale)


def test_static_scales_of_each_expert() -> None:
    experts, k, n = 3, 64, 64
    w1 = make_weights("bf16", experts, 2, n, k)
    x = torch.randn(12, k)
    index = BACKEND.build_index(torch.randint(0, experts, (12, 2), dtype=torch.int32), 0, experts)
    static = torch.tensor([1e-3, 5e-4, 2e-3])
    h = BACKEND.fc1(
        get_format("fp32").quantize(x), w1, index, Activation(), "nvfp4", output_global_scale=static
    )  # fmt: skip
    oracle = Oracle(np.zeros((1, 1)), [], 1)
    offsets = index.offsets.tolist()
    for e in range(experts):
        for r in range(offsets[e], offsets[e + 1]):
            z = x[index.slots[r]].double().numpy()
            truth = rounded("nvfp4", oracle.activate(decoded(w1, e, 0) @ z, decoded(w1, e, 1) @ z), float(static[e]))
            got = QuantizedTensor(h.format, h.data[r : r + 1], h.scale[r : r + 1], h.global_scale[r : r + 1], n)
            assert rel_l2(torch.from_numpy(values(got)[0]), torch.from_numpy(truth)) < 2e-2
            assert float(h.global_scale[r]) == float(static[e])


@pytest.mark.parametrize("ids", [torch.full((6, 3), -1), torch.zeros(0, 3)], ids=["all empty", "no slots"])
@pytest.mark.parametrize("activation_format", ACTIVATIONS)
def test_no_rows_at_all(ids: torch.Tensor, activation_format: str) -> None:
    """Rows of −1 (DeepGEMM#34) and T = 0 (flashinfer#2247)."""
    w1, w2 = make_weights("bf16", 2, 2, 32, 64), make_weights("bf16", 2, 1, 64, 32)
    x = get_format(activation_format).quantize(torch.randn(ids.shape[0], 64))
    index = BACKEND.build_index(ids.int(), 0, 2)
    h = BACKEND.fc1(x, w1, index, Activation(), activation_format)
    out = BACKEND.fc2(h, w2, index)
    assert h.data.shape[0] == 0 and out.shape == (0, 64)
    buffer = torch.full((ids.shape[0], 64), torch.nan)
    BACKEND.finalize(out, index, torch.rand(ids.shape), buffer)
    assert buffer.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 6, 32])
def test_finalize(dtype: torch.dtype, top_k: int) -> None:
    """The exact fp32 sum: ascending selections from +0.0, a product and an addition at a time, one rounding."""
    slots, hidden, experts = 23, 48, 40
    ids = torch.stack([torch.randperm(experts + 9)[:top_k] for _ in range(slots)]).int()
    ids[::4] = -1
    index = BACKEND.build_index(ids, 0, experts)
    rows = torch.randn(int(index.offsets[-1]), hidden) * 10.0 ** torch.randint(-6, 6, (int(index.offsets[-1]), 1))
    weights = torch.rand(slots, top_k)
    weights[ids < 0] = torch.nan  # what an empty slot brings is undefined
    weights[ids >= experts] = torch.nan  # and another rank's selection adds nothing
    out = torch.full((slots, hidden), torch.nan, dtype=dtype)
    assert BACKEND.finalize(rows, index, weights, out) is out
    for slot in range(slots):
        total = np.zeros(hidden, dtype=np.float32)
        mine = [j for j in range(top_k) if index.rows[slot, j] >= 0]
        for j in mine:
            term = rows[index.rows[slot, j]].numpy() * np.float32(weights[slot, j])
            total = (total + term).astype(np.float32)
        if mine:
            assert torch.equal(out[slot], torch.from_numpy(total).to(dtype))
        else:
            assert out[slot].isnan().all(), "a slot without rows must be left as it is"


def test_finalize_of_negative_zeros_gives_positive_zero() -> None:
    index = BACKEND.build_index(torch.zeros(1, 1, dtype=torch.int32), 0, 1)
    out = torch.full((1, 4), torch.nan)
    BACKEND.finalize(torch.full((1, 4), -0.0), index, torch.ones(1, 1), out)
    assert not out.signbit().any()


def test_a_nan_row_reaches_its_slot_alone() -> None:
    index = BACKEND.build_index(torch.tensor([[0], [1], [0]], dtype=torch.int32), 0, 2)
    rows = torch.randn(3, 8)
    rows[index.rows[1, 0]] = torch.nan
    out = torch.zeros(3, 8)
    BACKEND.finalize(rows, index, torch.ones(3, 1), out)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_errors() -> None:
    w1, w2 = make_weights("bf16", 2, 2, 32, 64), make_weights("bf16", 2, 1, 64, 32)
    x = get_format("bf16").quantize(torch.randn(4, 64))
    index = BACKEND.build_index(torch.zeros(4, 2, dtype=torch.int32), 0, 2)
    with pytest.raises(TensorError, match=r"fc1: weights must have 2 part\(s\) an expert, got 1"):
        BACKEND.fc1(x, w2, index, Activation(), "bf16")
    narrow = get_format("bf16").quantize(torch.randn(4, 60))
    with pytest.raises(TensorError, match="fc1: rows have 60 columns, but the weights take 64"):
        BACKEND.fc1(narrow, w1, index, Activation(), "bf16")
    other = BACKEND.build_index(torch.zeros(4, 2, dtype=torch.int32), 0, 3)
    with pytest.raises(TensorError, match="fc1: the index counts 3 local experts, but there are weights of 2"):
        BACKEND.fc1(x, w1, other, Activation(), "bf16")
    out, rows = torch.zeros(4, 64), torch.zeros(8, 64)
    with pytest.raises(TensorError, match=r"topk_weights must be \[4, 2\] float32, got \[4, 2\] torch.bfloat16"):
        BACKEND.finalize(rows, index, torch.ones(4, 2).bfloat16(), out)
    with pytest.raises(TensorError, match=r"output must be \[4, 64\], got \[4, 63\]"):
        BACKEND.finalize(rows, index, torch.ones(4, 2), out[:, :63])
