"""Launching the quantizers' kernels: what they serve, what they are specialised for, how the work is divided.

What a kernel does not serve goes through PyTorch, to the same bits. Served are, on a GPU that has kernels and with the
CuTe DSL installed:

* quantizing BF16 or FP32, K a multiple of 16 (8-bit elements) or 32 (4-bit), rows contiguous, evenly apart and at
  16-byte addresses; a given global scale on the same GPU, one for all or one a row, between 2**−117 and 2**118 (that is
  the caller's to see to: others give infinities on the way, and elements that are not the reference's);
* dequantizing to BF16 (K a multiple of 8) or FP32 (of 4), rows of data and scales contiguous, evenly apart and aligned
  to what is loaded at once.

In a graph capture a kernel is used if it has been launched before, since loading one is not allowed there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moe_layer.errors import UnsupportedDeviceError
from moe_layer.kernel_cache import anchor, device_arch, get_kernel
from moe_layer.quant.base import Format, QuantizedTensor
from moe_layer.quant.checks import check_input, check_stored
from moe_layer.quant.codec import KernelDecoder, KernelEncoder

WARP = 32
VECTOR_BYTES = 16
DTYPES = (torch.bfloat16, torch.float32)
ROW_SCALE_BYTES = 4
MAX_UNITS = 2**30  # 32-bit arithmetic on units
MAX_ROW_THREADS = 512  # of a row that is held in registers: 128 a thread
MAX_HELD = 4  # vectors a thread holds of such a row, times bytes of a value: more of them are spilled
FEW_THREADS, MANY_THREADS = 128, 256
# Up to so many threads' units spread over more multiprocessors in small blocks: 132 · 2048 / 2.
FEW_UNITS = 1 << 17


@dataclass(frozen=True)
class EncodeSpec:
    """What an encode kernel is specialised for.

    Attributes:
        encoder: the format's arithmetic.
        source_bytes: of a value: 2 (BF16) or 4 (FP32).
        vectors: 16-byte vectors of a row's elements.
        threads: of a block.
        chunks: vectors a thread.
        warps_per_row: with a scale of the row's own: warps that hold a row; else 0.
        blocks_per_sm: blocks that must find room on a multiprocessor: bounds the registers.
    """

    encoder: KernelEncoder
    source_bytes: int
    vectors: int
    threads: int
    chunks: int
    warps_per_row: int
    blocks_per_sm: int

    @property
    def vector_bytes(self) -> int:
        """Of the values of a vector."""
        return self.encoder.vector_values * self.source_bytes

    @property
    def padded_vectors(self) -> int:
        """Of a row that is filled up to whole scale blocks."""
        return -(-self.vectors // self.encoder.vectors_per_scale) * self.encoder.vectors_per_scale

    @property
    def threads_per_row(self) -> int:
        return self.warps_per_row * WARP

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.threads // self.threads_per_row

    def grid(self, rows: int) -> int:
        if self.warps_per_row:
            return -(-rows // self.rows)
        return -(-rows * self.padded_vectors // (self.threads * self.chunks))


@dataclass(frozen=True)
class DecodeSpec:
    """What a decode kernel is specialised for.

    Attributes:
        decoder: the format's arithmetic.
        out_bytes: of a value: 2 (BF16) or 4 (FP32).
        units: of a row: 16 bytes of the output each.
        threads, chunks, blocks_per_sm: as for :class:`EncodeSpec`.
    """

    decoder: KernelDecoder
    out_bytes: int
    units: int
    threads: int
    chunks: int
    blocks_per_sm: int

    @property
    def values(self) -> int:
        """Of a unit."""
        return VECTOR_BYTES // self.out_bytes

    @property
    def unit_bytes(self) -> int:
        """Of a unit's elements."""
        return self.values * self.decoder.element_bits // 8

    def grid(self, rows: int) -> int:
        return -(-rows * self.units // (self.threads * self.chunks))


# Letters as in kernel_cache: addresses and strides, then (padding,) rows and blocks.
ENCODE_FLAT, ENCODE_ROWS, DECODE = "llllll" + "ii", "lllllll" + "iii", "lllllll" + "ii"


def encode_specs(encoder: KernelEncoder, source_bytes: int, columns: int) -> dict[str, EncodeSpec]:
    """The kernels for rows of ``columns`` values, by name: for few units and for many; of a row's own scale, one."""
    vectors = columns // encoder.vector_values
    if not encoder.row_scale:
        # Threads that find room with the registers that the arithmetic takes: up to 42, 64 or 80.
        wide = 1024 if source_bytes == 2 else 768
        per_sm = wide if encoder.vector_values == 32 else 1536
        return {
            "few": EncodeSpec(encoder, source_bytes, vectors, FEW_THREADS, 1, 0, per_sm // FEW_THREADS // 2),
            "many": EncodeSpec(encoder, source_bytes, vectors, MANY_THREADS, 1, 0, per_sm // MANY_THREADS),
        }
    warps = -(-vectors // WARP)
    chunks = -(-warps * WARP // MAX_ROW_THREADS)
    warps = -(-warps // chunks)
    rows = max(1, 4 // warps)
    threads = rows * warps * WARP
    resident = 512 if source_bytes == 4 else 1120 // chunks
    return {"row": EncodeSpec(encoder, source_bytes, vectors, threads, chunks, warps, max(1, resident // threads))}


def decode_specs(decoder: KernelDecoder, out_bytes: int, columns: int) -> dict[str, DecodeSpec]:
    """The kernels for rows of ``columns`` values, for few units and for many."""
    units = columns * out_bytes // VECTOR_BYTES
    return {
        "few": DecodeSpec(decoder, out_bytes, units, FEW_THREADS, 1, 8),
        "many": DecodeSpec(decoder, out_bytes, units, MANY_THREADS, 4, 5),
    }


def kernel(spec: EncodeSpec | DecodeSpec, arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, disk or the compiler."""
    launch, signature = source(spec)
    return get_kernel(launch, spec, signature, arch)


def source(spec: EncodeSpec | DecodeSpec) -> tuple[Any, str]:
    """(launch function, its signature) of a spec."""
    from moe_layer.quant import kernels

    if isinstance(spec, DecodeSpec):
        return kernels.decode, DECODE
    return (kernels.encode_rows, ENCODE_ROWS) if spec.warps_per_row else (kernels.encode_flat, ENCODE_FLAT)


@dataclass(frozen=True)
class _Encode:
    """What quantizing some operands launches: ``launch(anchor, x, x_stride, data, scale, …, rows, grid)``."""

    spec: EncodeSpec
    launch: Callable[..., None]
    rows: int
    x_stride: int
    given: tuple[int, int]


def quantize_by_kernel(fmt: Format, x: torch.Tensor, global_scale: torch.Tensor | None) -> QuantizedTensor | None:
    """As ``fmt.quantize``, or None where no kernel serves the operands.

    Raises:
        TensorError: as ``fmt.quantize``.
    """
    found = _encode(fmt, x, global_scale)
    if found is None:
        return None
    spec, (*lead, columns) = found.spec, x.shape
    assert fmt.block is not None and fmt.scale_dtype is not None
    data = torch.empty(*lead, fmt.data_columns(columns), dtype=fmt.data_dtype, device=x.device)
    scale = torch.empty(*lead, -(-columns // fmt.block[1]), dtype=fmt.scale_dtype, device=x.device)
    pointers: tuple[int, ...] = found.given
    if spec.encoder.row_scale:
        global_scale = torch.empty(*lead, 1, dtype=torch.float32, device=x.device)
        pointers = (scale.shape[-1] * scale.element_size(), global_scale.data_ptr(), 4, 0)
    _run(found, x, data, scale, *pointers)
    return QuantizedTensor(fmt.name, data, scale, global_scale, columns)


def quantize_to_wire_by_kernel(fmt: Format, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As ``fmt.quantize_to_wire`` of a format whose rows bring scales of their own, behind those of their blocks.

    None where no kernel serves the operands.

    Raises:
        TensorError: as ``fmt.quantize``.
    """
    found = _encode(fmt, x, None)
    if found is None or x.dim() != 2:
        return None
    rows, columns = x.shape
    of_blocks, length = fmt.scale_row_bytes(columns), fmt.scale_row_bytes(columns, per_row_global_scale=True)
    if of_blocks % ROW_SCALE_BYTES:
        return None
    data = torch.empty(rows, fmt.data_columns(columns), dtype=fmt.data_dtype, device=x.device)
    scale = torch.empty(rows, length, dtype=torch.uint8, device=x.device)
    padding = (length - of_blocks) // ROW_SCALE_BYTES - 1
    _run(found, x, data, scale, length, scale.data_ptr() + of_blocks, length, padding)
    return data, scale


def _encode(fmt: Format, x: torch.Tensor, global_scale: torch.Tensor | None) -> _Encode | None:
    check_input(fmt, x, global_scale)
    if x.dtype not in DTYPES:
        return None
    kinds = _encode_kinds(fmt, x.dtype, global_scale is None, x.shape[-1], x.device)
    rows = _rows(x, VECTOR_BYTES)
    if not kinds or rows is None or rows[0] * max(s.padded_vectors for s in kinds.values()) > MAX_UNITS:
        return None
    count, stride = rows
    given = (0, 0)
    if global_scale is not None:
        found = _scale_per_row(global_scale, count, x.device)
        if found is None:
            return None
        given = found
    spec = kinds.get("row") or kinds["few" if count * kinds["few"].vectors <= FEW_UNITS else "many"]
    launch = _launcher(spec, x.device)
    return None if launch is None else _Encode(spec, launch, count, stride, given)


def _run(found: _Encode, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, *others: int) -> None:
    if found.rows:
        found.launch(
            anchor(x.device), x.data_ptr(), found.x_stride, data.data_ptr(), scale.data_ptr(), *others, found.rows,
            found.spec.grid(found.rows),
        )  # fmt: skip


def dequantize_by_kernel(fmt: Format, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """As ``fmt.dequantize``, or None where no kernel serves the operands.

    Raises:
        FormatError, TensorError: as ``fmt.dequantize``.
    """
    check_stored(fmt, q)
    if dtype not in DTYPES:
        return None
    kinds = _decode_kinds(fmt, dtype, q.columns, q.data.device)
    if not kinds or q.scale is None or q.scale.device != q.data.device:
        return None
    some = kinds["few"]
    data, scale = _rows(q.data, some.unit_bytes), _rows(q.scale, some.decoder.scale_entry_bytes)
    if data is None or scale is None or data[0] * some.units > MAX_UNITS:
        return None
    over: tuple[int, int] | None = (0, 0)
    if some.decoder.global_scale:
        assert q.global_scale is not None
        over = _scale_per_row(q.global_scale, data[0], q.data.device)
    spec = kinds["few" if data[0] * some.units <= FEW_UNITS else "many"]
    launch = _launcher(spec, q.data.device)
    if over is None or launch is None:
        return None
    out = torch.empty(*q.data.shape[:-1], q.columns, dtype=dtype, device=q.data.device)
    if data[0]:
        launch(
            anchor(q.data.device), q.data.data_ptr(), data[1], q.scale.data_ptr(), scale[1], *over, out.data_ptr(),
            data[0], spec.grid(data[0]),
        )  # fmt: skip
    return out


def _rows(t: torch.Tensor, alignment: int) -> tuple[int, int] | None:
    """(rows, bytes from one to the next) of ``[..., K]``, or None if they lie unevenly, apart or misaligned."""
    if t.dim() == 1:
        count, stride = 1, t.shape[0]
    elif t.dim() == 2:
        count, stride = t.shape[0], t.stride(0) if t.shape[0] > 1 else t.shape[1]
    elif t.is_contiguous():
        count, stride = t.numel() // t.shape[-1], t.shape[-1]
    else:
        return None
    stride *= t.element_size()
    if (t.shape[-1] > 1 and t.stride(-1) != 1) or (t.data_ptr() % alignment or stride % alignment):
        return None
    return count, stride


def _scale_per_row(scale: torch.Tensor, rows: int, device: torch.device) -> tuple[int, int] | None:
    """(address, bytes from one row's to the next) of a global scale, or None if it is not laid out so."""
    if scale.device != device or scale.requires_grad:
        return None
    if scale.numel() == 1:
        return scale.data_ptr(), 0
    if scale.shape == (rows, 1):  # part of longer rows, perhaps: as they travel
        return scale.data_ptr(), 4 * scale.stride(0)
    return (scale.data_ptr(), 4) if scale.numel() == rows and scale.is_contiguous() else None


@cache
def _arch(device: torch.device) -> str | None:
    try:
        return device_arch(device)
    except UnsupportedDeviceError:
        return None


def served_encoders(
    fmt: Format, dtype: torch.dtype, columns: int, *, per_row_global_scale: bool = True
) -> dict[str, EncodeSpec]:
    """The kernels that quantize rows of ``columns`` values, by name; none where PyTorch does it."""
    encoder = fmt.kernel_encoder(dtype, per_row_global_scale=per_row_global_scale)
    if encoder is None or columns % encoder.vector_values:
        return {}
    kinds = encode_specs(encoder, dtype.itemsize, columns)
    return {} if any(spec.chunks * dtype.itemsize > MAX_HELD for spec in kinds.values()) else kinds


def served_decoders(fmt: Format, dtype: torch.dtype, columns: int) -> dict[str, DecodeSpec]:
    """The kernels that dequantize rows of ``columns`` values, by name; none where PyTorch does it."""
    decoder = fmt.kernel_decoder()
    if decoder is None or columns * dtype.itemsize % VECTOR_BYTES:
        return {}
    return decode_specs(decoder, dtype.itemsize, columns)


@cache
def _encode_kinds(
    fmt: Format, dtype: torch.dtype, per_row_global_scale: bool, columns: int, device: torch.device
) -> dict[str, EncodeSpec]:
    if _arch(device) is None:
        return {}
    return served_encoders(fmt, dtype, columns, per_row_global_scale=per_row_global_scale)


@cache
def _decode_kinds(fmt: Format, dtype: torch.dtype, columns: int, device: torch.device) -> dict[str, DecodeSpec]:
    return {} if _arch(device) is None else served_decoders(fmt, dtype, columns)


_launched: dict[tuple[EncodeSpec | DecodeSpec, torch.device], Callable[..., None]] = {}


def _launcher(spec: EncodeSpec | DecodeSpec, device: torch.device) -> Callable[..., None] | None:
    found = _launched.get((spec, device))
    if found is None and not torch.cuda.is_current_stream_capturing():
        arch = _arch(device)
        assert arch is not None
        found = _launched[spec, device] = kernel(spec, arch)
    return found
