"""Epilogues of the Hopper grouped GEMM: activation, requantization, and rows out in 16-byte stores.

A consumer warpgroup holds FP32 sums in WGMMA's order (register (i, h, c) of lane l in warp w: row ``16w + l/4 + 8h``,
column ``8c + 2·(l mod 4) + i``) and stores rows of consecutive features.

* *wide*: rows are tokens, so a token's features lie in four lanes. The largest magnitude of 128 features takes two
  shuffles; each warp turns its 16 tokens through 2 KiB of shared memory of its own (16 rows of 128 bytes, 16-byte
  chunks exchanged by row mod 8: no bank conflicts) and stores whole 128-byte lines. No barrier beyond the warp, so that
  one warpgroup's epilogue runs while the other multiplies.
* *swapped*: rows are features, so a token's features are spread over both warpgroups. They meet in shared memory,
  ``[tokens][features]`` with rows padded by 16 bytes, between two barriers of the 256 consumers (named barrier 1); then
  warps take tokens in turn.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from moe_layer.gemm import sm90_device as dev
from moe_layer.gemm.activation import Activation
from moe_layer.gemm.sm90_spec import SCALE_BLOCK, STAGED_TOKENS, WARP, WARPGROUP, GroupedSpec
from moe_layer.quant import registers as reg

CONSUMER_BARRIER = 1  # barrier 0 is sync_threads'
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126  # as the FP8 quantizer has it (quant/fp8.py)


def activate(activation: Activation, gate: Float32, up: Float32) -> Float32:
    """``act(gate, up)`` in FP32 (gemm/activation.py)."""
    if activation.kind == "situ":
        a = tanh(gate * Float32(1 / activation.beta)) * sigmoid(gate) * Float32(activation.beta)
        return a * (tanh(up * Float32(1 / activation.linear_beta)) * Float32(activation.linear_beta))
    if activation.limit is not None:
        limit = Float32(activation.limit)
        gate = dev.minimum(gate, limit)
        up = dev.maximum(dev.minimum(up, limit), Float32(-activation.limit))
    return gate * sigmoid(gate) * up


def sigmoid(x: Float32) -> Float32:
    return dev.reciprocal(Float32(1.0) + dev.exponential(Float32(0.0) - x))


def tanh(x: Float32) -> Float32:
    """Relative error below 1e-6: a polynomial near zero, where ``1 − 2 / (1 + e^2x)`` would cancel."""
    far = Float32(1.0) - Float32(2.0) * dev.reciprocal(Float32(1.0) + dev.exponential(x + x))
    y = x * x
    near = x * (
        Float32(1.0) + y * (Float32(-1 / 3) + y * (Float32(2 / 15) + y * (Float32(-17 / 315) + y * Float32(62 / 2835))))
    )
    return dev.select_f32(dev.magnitude(x) < Float32(0.25), near, far)


def fp8_scale(amax: Float32) -> Float32:
    return dev.maximum(dev.divide(amax, Float32(E4M3_MAX)), Float32(MIN_SCALE))


def to_fp8(value: Float32, inverse: Float32) -> Float32:
    """What is rounded to E4M3; NaN where the value is not finite.

    By the scale's reciprocal, not by division, which costs ten times as much: a value within an FP32 rounding of the
    middle between two E4M3 neighbours may go to the other one.
    """
    return dev.finite_or_nan(value) * inverse


def mxfp8_rounded(values: Any) -> list[Uint32]:
    """Four values as two pairs of BF16, rounded to what MXFP8 keeps of a block of 32: eight lanes have four each.

    Scale ``2**(⌊log2 amax⌋ − 8)``, at least 2⁻¹²⁷, over finite values; elements rounded to E4M3 (quant/mxfp8.py).
    """
    amax = Float32(0.0)
    for value in values:
        amax = dev.larger_magnitude(amax, value)
    for distance in range(3):
        amax = dev.maximum(amax, cute.arch.shuffle_sync_bfly(amax, 1 << distance))
    exponent = Int32(dev.f32_to_bits(amax) >> Uint32(23)) - Int32(8)
    code = reg.select(exponent > Int32(0), exponent, Int32(0))
    factor = reg.power_of_two(Int32(254) - code)
    scale = dev.select_f32(code > Int32(0), reg.power_of_two(code), Float32(2.0**-127))
    pairs = []
    for i in range(0, 4, 2):
        element = reg.e4m3_pair(*[dev.finite_or_nan(v) * factor for v in values[i : i + 2]])
        pairs.append(dev.f32_pair_to_bf16(*[v * scale for v in reg.e4m3_values(element)]))
    return pairs


def wide_value(spec: GroupedSpec, sums: Any, group: int, h: int, i: int) -> Float32:
    """Feature ``8·group + 2·(l mod 4) + i`` of token ``l/4 + 8h``."""

    def accumulator(c: int) -> Float32:
        per_half = 32 // len(sums)
        return sums[c // per_half][i + 2 * h + 4 * (c % per_half)]

    if spec.parts == 1:
        return accumulator(group)
    assert spec.activation is not None
    return activate(spec.activation, accumulator(2 * group), accumulator(2 * group + 1))


@cute.jit
def store_wide(
    spec: cutlass.Constexpr, sums: cutlass.Constexpr, staging: Int32, tid: Int32, group: Int32,
    row: Int32, count: Int32, column: Int32, out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64,
):  # fmt: skip
    """Tokens in rows: see the module's docstring."""
    lane = tid % WARP
    warp = tid % WARPGROUP // WARP
    own = group * 64 + warp * 16  # the warp's first token within the tile
    mine = staging + (group * 4 + warp) * (16 * 128)
    groups = spec.tile_features // 8
    line = mine + (lane // 4) * 128  # rows lane/4 and lane/4 + 8 exchange chunks alike
    if const_expr(spec.out == "fp32"):
        for p in range_constexpr(groups // 4):
            for g in range_constexpr(4):
                chunk = 2 * g + lane % 4 // 2
                for h in range_constexpr(2):
                    at = line + h * 1024 + ((chunk ^ (lane // 4)) * 16) + (lane % 2) * 8
                    for i in range_constexpr(2):
                        dev.store_shared_u32(at + i * 4, dev.f32_to_bits(wide_value(spec, sums, 4 * p + g, h, i)))
            cute.arch.sync_warp()
            store_lines(spec, mine, lane, own, row, count, column * (spec.tile_features * 4) + p * 128, out, out_stride)
            cute.arch.sync_warp()
    elif const_expr(spec.out == "bf16"):
        for p in range_constexpr(groups // 8):
            for g in range_constexpr(8):
                for h in range_constexpr(2):
                    word = dev.f32_pair_to_bf16(
                        wide_value(spec, sums, 8 * p + g, h, 0), wide_value(spec, sums, 8 * p + g, h, 1)
                    )
                    dev.store_shared_u32(line + h * 1024 + ((g ^ (lane // 4)) * 16) + (lane % 4) * 4, word)
            cute.arch.sync_warp()
            store_lines(spec, mine, lane, own, row, count, column * (spec.tile_features * 2) + p * 128, out, out_stride)
            cute.arch.sync_warp()
    else:
        for h in range_constexpr(2):
            values = []
            amax = Float32(0.0)
            for g in range_constexpr(groups):
                for i in range_constexpr(2):
                    values.append(wide_value(spec, sums, g, h, i))
                    amax = dev.larger_magnitude(amax, values[-1])
            for distance in range_constexpr(2):
                amax = dev.maximum(amax, cute.arch.shuffle_sync_bfly(amax, 1 << distance))
            scale = fp8_scale(amax)
            inverse = dev.divide(Float32(1.0), scale)
            for g in range_constexpr(0, groups, 2):
                quotients = [to_fp8(values[2 * g + j], inverse) for j in range(4)]
                word = dev.f32_quad_to_e4m3(*quotients)
                at = line + h * 1024 + (((g // 2) ^ (lane // 4)) * 16) + (lane % 4) * 2
                dev.store_shared_u16(at, word)
                dev.store_shared_u16(at + 8, word >> Uint32(16))
            token = own + h * 8 + lane // 4
            if lane % 4 == Int32(0) and token < count:
                dev.store_f32(out_scale + Int64(row + token) * out_scale_stride + Int64(column) * 4, scale)
        cute.arch.sync_warp()
        store_lines(spec, mine, lane, own, row, count, column * SCALE_BLOCK, out, out_stride)
        cute.arch.sync_warp()


@cute.jit
def store_lines(
    spec: cutlass.Constexpr, mine: Int32, lane: Int32, own: Int32, row: Int32, count: Int32, first_byte: Int32,
    out: Int64, out_stride: Int64,
):  # fmt: skip
    """A warp's 16 rows of 128 bytes from shared to global memory, up to the row's end and the tile's last token."""
    chunk = lane % 8
    row_bytes = spec.n * spec.out_bytes
    to = out + Int64(row + own) * out_stride
    for q in range_constexpr(4):
        r = lane // 8 + 4 * q
        vector = dev.load_shared_v4(mine + r * 128 + ((chunk ^ (r % 8)) * 16))
        at = first_byte + chunk * 16
        if own + r < count and at < Int32(row_bytes):
            dev.store_v4(to + Int64(r) * out_stride + Int64(at), vector)


@cute.jit
def store_swapped(
    spec: cutlass.Constexpr, sums: cutlass.Constexpr, staging: Int32, tid: Int32, group: Int32,
    row: Int32, count: Int32, column: Int32, out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64,
):  # fmt: skip
    """Features in rows: see the module's docstring."""
    for first in range_constexpr(0, spec.tokens, STAGED_TOKENS):
        here = min(spec.tokens - first, STAGED_TOKENS)
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=spec.consumers)  # the rows before are out
        stage_rows(spec, sums, staging, tid, group, first)
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=spec.consumers)
        store_staged(
            spec, staging, tid, row + first, dev.smaller(count - first, Int32(here)), column,
            out, out_stride, out_scale, out_scale_stride,
        )  # fmt: skip


@cute.jit
def stage_rows(
    spec: cutlass.Constexpr, sums: cutlass.Constexpr, staging: Int32, tid: Int32, group: Int32, first: cutlass.Constexpr
):  # fmt: skip
    """A warpgroup's features of the tokens from ``first`` on, into shared memory."""
    lane = tid % WARP
    warp = tid // WARP
    here = min(spec.tokens - first, STAGED_TOKENS)
    for half in range_constexpr(len(sums)):
        block = (group * len(sums) + half) * 4 + warp % 4  # of 16 weight rows
        for c in range_constexpr(here // 8):
            for i in range_constexpr(2):
                to = staging + (c * 8 + (lane % 4) * 2 + i) * spec.staging_row_bytes
                pair = [sums[half][i + 2 * h + 4 * (first // 8 + c)] for h in range(2)]
                if const_expr(spec.parts == 2):
                    stage_value(spec, to, block * 8 + lane // 4, activate(spec.activation, *pair))
                else:
                    for h in range_constexpr(2):
                        stage_value(spec, to, block * 16 + h * 8 + lane // 4, pair[h])


@cute.jit
def store_staged(
    spec: cutlass.Constexpr, staging: Int32, tid: Int32, row: Int32, count: Int32, column: Int32,
    out: Int64, out_stride: Int64, out_scale: Int64, out_scale_stride: Int64,
):  # fmt: skip
    """The staged tokens' rows, by all consumers, 16 bytes a thread (BF16, FP32), 8 (MXFP8) or a token a warp (FP8)."""
    lane = tid % WARP
    if const_expr(spec.out == "mxfp8"):
        per_row = spec.tile_features // 4
        for v in range(tid, count * per_row, spec.consumers):
            token, chunk = v // per_row, v % per_row
            words = dev.load_shared_v4(staging + token * spec.staging_row_bytes + chunk * 16)
            low, high = mxfp8_rounded([dev.bits_to_f32(w) for w in words])
            feature = column * spec.tile_features + chunk * 4
            if feature < Int32(spec.n):
                dev.store_v2(out + Int64(row + token) * out_stride + Int64(feature) * 2, low, high)
    elif const_expr(spec.out != "fp8"):
        width = 16 // spec.out_bytes
        per_row = spec.tile_features // width
        for v in range(tid, count * per_row, spec.consumers):
            token, chunk = v // per_row, v % per_row
            vector = dev.load_shared_v4(staging + token * spec.staging_row_bytes + chunk * 16)
            feature = column * spec.tile_features + chunk * width
            if feature < Int32(spec.n):
                dev.store_v4(out + Int64(row + token) * out_stride + Int64(feature) * spec.out_bytes, vector)
    else:
        for token in range(tid // WARP, count, spec.consumers // WARP):
            words = dev.load_shared_v4(staging + token * spec.staging_row_bytes + lane * 16)
            values = [dev.bits_to_f32(w) for w in words]
            amax = Float32(0.0)
            for value in values:
                amax = dev.larger_magnitude(amax, value)
            for distance in range_constexpr(5):
                amax = dev.maximum(amax, cute.arch.shuffle_sync_bfly(amax, 1 << distance))
            scale = fp8_scale(amax)
            inverse = dev.divide(Float32(1.0), scale)
            word = dev.f32_quad_to_e4m3(*[to_fp8(value, inverse) for value in values])
            feature = column * spec.tile_features + lane * 4
            if feature < Int32(spec.n):
                dev.store_u32(out + Int64(row + token) * out_stride + Int64(feature), word)
            if lane == Int32(0):
                dev.store_f32(out_scale + Int64(row + token) * out_scale_stride + Int64(column) * 4, scale)


def stage_value(spec: GroupedSpec, row: Int32, feature: Int32, value: Any) -> None:
    if spec.out == "bf16":
        dev.store_shared_u16(row + feature * 2, dev.f32_pair_to_bf16(value, value))
    else:
        dev.store_shared_u32(row + feature * 4, dev.f32_to_bits(value))
