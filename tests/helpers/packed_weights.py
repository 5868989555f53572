"""What packed low-bit weights are, element by element, and what a Hopper thread makes of them, bit operation by bit
operation. Written from the layout's description in gemm/register_tiles.py; shares no code with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from layer_oracle import BLOCK

BITS = {"mxfp4": 4, "nvfp4": 4, "int4": 4, "mxfp8": 8}
SCALE_BYTES = {"mxfp4": 1, "nvfp4": 1, "int4": 2, "mxfp8": 1}
TILE_K = 128


def codes_of(fmt: str, data: torch.Tensor, k: int) -> np.ndarray:
    """Stored ``[parts, N, …]`` → codes ``[parts, N, K]``."""
    raw = data.view(torch.uint8).numpy().astype(int)
    if BITS[fmt] == 8:
        return raw
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], -1)[:, :, :k]


def feature(parts: int, column: int, t: int) -> tuple[int, int]:
    """Tile row t of a column tile → (part, feature)."""
    if parts == 1:
        return 0, column * 256 + t
    g = t // 8
    return g % 2, column * 128 + (g // 2) * 8 + t % 8


def e2m1_half(codes: list[int]) -> int:
    """The half of a word that holds four E2M1 codes, by the contract's bit positions."""

    def bits(code: int) -> tuple[int, int, int, int]:
        return code >> 3, code >> 2 & 1, code >> 1 & 1, code & 1

    half = 0
    for code, places in zip(codes, ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (10, 14, 13, 11))):
        for bit, place in zip(bits(code), places):  # s, e1, e0, m
            half |= bit << place
    return half


def int4_half(codes: list[int]) -> int:
    return sum(code << 4 * p for p, code in enumerate(codes))


def e4m3_half(first: int, second: int) -> int:
    half = (first >> 7) << 15 | (first & 0x7F) << 4
    return half | (second >> 3 & 15) << 11 | (second & 7) << 1 | second >> 7


def scale_byte(fmt: str, byte: int, shift: int) -> int:
    """What is stored for an E8M0 or E4M3 scale byte."""
    if fmt == "mxfp4":
        return byte + 126 - shift
    if fmt == "mxfp8":
        return byte + 120 - shift
    value = float(np.uint8(byte).view(ml_dtypes.float8_e4m3fn))
    if value == 0:
        return 0
    mantissa, exponent = np.frexp(value)  # value = mantissa · 2^exponent, 0.5 ≤ mantissa < 1
    e, fraction = int(exponent) - 1 + 10, int((2 * mantissa - 1) * 8)
    assert 1 <= e <= 18 and (1 + fraction / 8) * 2.0 ** (e - 10) == value
    return e << 3 | fraction


def pack_slowly(
    fmt: str, parts: int, n: int, k: int, data: torch.Tensor, scale: torch.Tensor, shift: list[int]
) -> np.ndarray:
    """uint8 ``[column_tiles, k_steps, stage_bytes]`` of one expert, an element at a time."""
    codes, block = codes_of(fmt, data, k), BLOCK[fmt][1]
    zero = 8 if fmt == "int4" else 0
    one = {"mxfp4": 127, "mxfp8": 127, "nvfp4": 0x38}.get(fmt)
    raw_scale = scale.view(torch.uint8 if fmt != "int4" else torch.int16).numpy()

    def code(column: int, t: int, kk: int) -> int:
        part, row = feature(parts, column, t)
        return int(codes[part, row, kk]) if row < n and kk < k else zero

    stages = []
    features = 256 // parts
    columns, steps = -(-n // features), -(-k // TILE_K)
    for column in range(columns):
        for step in range(steps):
            words: list[int] = []

            def pair(b: int, i: int, half: int, j: int, p: int, step: int = step, column: int = column) -> list[int]:
                w, lane = divmod(i, 32)
                q = lane % 4
                row = 64 * b + 16 * w + lane // 4 + (8 if p % 2 else 0)
                kk = TILE_K * step + 64 * half + 16 * j + 2 * q + (8 if p >= 2 else 0)
                return [code(column, row, kk), code(column, row, kk + 1)]

            for half in range(2):
                for b in range(4):
                    if BITS[fmt] == 4:
                        for i in range(128):
                            for j in range(4):
                                pairs = [pair(b, i, half, j, p) for p in range(4)]
                                make = int4_half if fmt == "int4" else e2m1_half
                                low, high = (make([c[x] for c in pairs]) for x in range(2))
                                words.append(high << 16 | low)
                        continue
                    for vector in range(2):
                        for i in range(128):
                            for j in (2 * vector, 2 * vector + 1):
                                for z in range(2):
                                    first, second = (pair(b, i, half, j, 2 * z + h) for h in range(2))
                                    low, high = (e4m3_half(first[x], second[x]) for x in range(2))
                                    words.append(high << 16 | low)
            stage = np.array(words, dtype="<u4").tobytes()
            for t in scale_rows():
                part, row = feature(parts, column, t)
                for c in range(step * TILE_K // block, (step + 1) * TILE_K // block):
                    inside = row < n and c < raw_scale.shape[2]
                    if fmt == "int4":
                        bits = int(raw_scale[part, row, c]) & 0xFFFF if inside else 0x3F80
                        stage += bits.to_bytes(2, "little")
                    else:
                        byte = int(raw_scale[part, row, c]) if inside else one
                        assert byte is not None
                        stage += bytes([scale_byte(fmt, byte, shift[part])])
            stages.append(np.frombuffer(stage, dtype=np.uint8))
    return np.stack(stages).reshape(columns, steps, -1)


def scale_rows() -> Iterator[int]:
    """Tile rows in the order of the scales region."""
    for b in range(4):
        for w in range(4):
            for lane in range(8):
                for h in range(2):
                    yield 64 * b + 16 * w + lane + 8 * h


# ---- what a thread makes of it ----


def operand_registers(fmt: str, words: np.ndarray) -> list[np.ndarray]:
    """Words of one step (uint32 ``[…, 1 or 2]``) → the four pairs as BF16 bit patterns, uint32 ``[…]``."""
    u32 = np.uint32
    if fmt == "int4":
        integers = [(words[..., 0] >> u32(4 * p) & u32(0x000F000F)) | u32(0x43004300) for p in range(4)]
        return [_packed(*(half - ml_dtypes.bfloat16(136) for half in _halves(x))) for x in integers]
    if fmt == "mxfp8":
        pairs = []
        for z in range(2):
            w = words[..., z]
            other = (w >> u32(4) & u32(0x07800780)) | (w << u32(3) & u32(0x00700070)) | (w << u32(15) & u32(0x80008000))
            pairs += [w & u32(0x87F087F0), other]
        return pairs
    w, mask = words[..., 0], u32(0x81C081C0)
    last = (w >> u32(6) & u32(0x01800180)) | (w >> u32(5) & u32(0x00400040)) | (w << u32(5) & u32(0x80008000))
    return [w & mask, w << u32(3) & mask, w << u32(6) & mask, last]


def multiplier(fmt: str, stored: np.ndarray) -> np.ndarray:
    """Bytes of the scales region → BF16 multipliers (of INT4: of the sums)."""
    if fmt == "int4":
        return stored.copy().view(ml_dtypes.bfloat16)
    bits = stored.astype(np.uint16)
    bits = (bits << 4) + (235 << 7) if fmt == "nvfp4" else bits << 7
    return bits.view(ml_dtypes.bfloat16)


def products(fmt: str, parts: int, n: int, k: int, packed: np.ndarray) -> np.ndarray:
    """``packed`` of one expert → weight · multiplier as the kernel has it, fp64 ``[parts, N, K]``.

    A BF16 product is rounded to BF16; INT4's product with its scale is made in FP32.
    """
    columns, steps, _ = packed.shape
    vectors, block = BITS[fmt] // 4, BLOCK[fmt][1]
    word_bytes = 256 * TILE_K * BITS[fmt] // 8
    words = np.ascontiguousarray(packed[..., :word_bytes]).view("<u4")
    words = words.reshape(columns, steps, 2, 4, vectors, 128, 4)
    # [column, step, half, block, thread, k16 step of the half, word]
    words = words.transpose(0, 1, 2, 3, 5, 4, 6).reshape(columns, steps, 2, 4, 128, 4, vectors)
    stored = np.ascontiguousarray(packed[..., word_bytes:]).reshape(columns, steps, 256, -1)
    scales = multiplier(fmt, stored)  # [column, step, row in the region's order, block scale]
    by_row = np.empty_like(scales)
    by_row[:, :, list(scale_rows())] = scales
    features = 256 // parts
    full = np.full((parts, columns * features, steps * TILE_K), np.nan)
    thread = np.arange(128)
    w, lane = thread // 32, thread % 32
    for p, register in enumerate(operand_registers(fmt, words)):
        for x, values in enumerate(_halves(register)):  # [column, step, half, block, thread, j]
            for c, s, half, b, j in np.ndindex(columns, steps, 2, 4, 4):
                rows = 64 * b + 16 * w + lane // 4 + 8 * (p % 2)
                inner = 64 * half + 16 * j + 2 * (lane % 4) + 8 * (p // 2) + x
                element, scale = values[c, s, half, b, :, j], by_row[c, s, rows, inner // block]
                if fmt == "int4":
                    product = element.astype(np.float32) * scale.astype(np.float32)
                else:
                    product = element * scale
                    assert product.dtype == ml_dtypes.bfloat16
                where = [feature(parts, c, int(t)) for t in rows]
                full[[part for part, _ in where], [f for _, f in where], s * TILE_K + inner] = product
    assert not np.isnan(full).any()
    assert not full[:, n:].any() and not full[:, :, k:].any(), "padding is not zero"
    return full[:, :n, :k]


def _halves(register: np.ndarray) -> list[np.ndarray]:
    return [
        (register >> np.uint32(16 * x) & np.uint32(0xFFFF)).astype(np.uint16).view(ml_dtypes.bfloat16) for x in (0, 1)
    ]


def _packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)
