"""What a number format is: how values become bytes and scales, and back.

A format is one small file that defines one or more :class:`Format` objects and registers them. Everything else in the
library (activations on the wire, expert weights, checkpoints) speaks of formats by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from moe_layer.errors import FormatError

if TYPE_CHECKING:
    from moe_layer.quant.codec import KernelDecoder, KernelEncoder


@dataclass(frozen=True)
class QuantizedTensor:
    """Quantized values of a logical tensor ``[..., N, K]`` (activations: ``[T, K]``).

    Attributes:
        format: registry name.
        data: stored elements, ``[..., N, data_columns(K)]`` in the format's ``data_dtype``; two 4-bit values a byte,
            the low nibble the even column.
        scale: ``[..., scale_rows(N), scale_columns(K)]`` in the format's ``scale_dtype``, or None.
        global_scale: fp32 second-level scale (NVFP4): a scalar or ``[..., 1]`` tensor that broadcasts against the
            logical tensor's leading dimensions (``[T, 1]`` for a scale per token), or None.
        columns: K, the logical length of a row (4-bit rows of odd K have half a byte of padding).
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    columns: int

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return sum(t.nbytes for t in (self.data, self.scale, self.global_scale) if t is not None)


class Format(ABC):
    """A number format. Stateless; instances are registered under ``name``.

    Attributes:
        name: registry name, e.g. ``"mxfp8"``.
        element_bits: bits of one stored element.
        data_dtype: dtype of the stored elements; ``torch.uint8`` for packed 4-bit formats.
        scale_dtype: dtype of the block scales, or None. E8M0 scales are kept as their raw bytes (``torch.uint8``):
            value 2**(byte − 127), 255 is NaN.
        block: (rows, columns) that share a scale; None without scales. The last block of a row or column may be short:
            scales have ⌈N/rows⌉ × ⌈K/columns⌉ entries.
        two_level: True where values also carry a global scale (NVFP4).
    """

    name: str
    element_bits: int
    data_dtype: torch.dtype
    scale_dtype: torch.dtype | None = None
    block: tuple[int, int] | None = None
    two_level: ClassVar[bool] = False

    def quantize(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        """Quantize ``x`` ``[..., N, K]`` (any floating dtype; arithmetic in fp32).

        On a GPU by the format's kernel, where there is one and it serves the operands (:mod:`moe_layer.quant.launch`),
        else by :meth:`quantize_reference`; the bits are the same.

        No host sync and no data-dependent control flow, so it may be captured in a CUDA graph. Results are contiguous;
        rounding is to nearest even; a row's result depends on no other row, except through the blocks of formats whose
        blocks span rows.

        Args:
            x: with one-row blocks also ``[K]``. Each format says what becomes of NaN and infinities.
            global_scale: of two-level formats: fp32, a scalar or ``[..., N, 1]``, used as given; None: one per row
                (``[..., N, 1]``) from its largest magnitude.

        Raises:
            TensorError: ``x`` not floating point, with too few dimensions or empty rows; ``global_scale`` of another
                dtype or shape, or for a format without one.
        """
        if isinstance(x, torch.Tensor) and x.is_cuda:
            from moe_layer.quant.launch import quantize_by_kernel

            found = quantize_by_kernel(self, x, global_scale)
            if found is not None:
                return found
        return self.quantize_reference(x, global_scale=global_scale)

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of ``q``, ``[..., N, K]``, in ``dtype``; by a kernel or not, as :meth:`quantize`.

        Computed in fp32: exact with power-of-two and BF16 scales; with fp32 scales the product is rounded once.

        Raises:
            FormatError: ``q`` is of another format, or lacks a scale.
            TensorError: data or scales of another dtype or shape than the format stores.
        """
        if q.data.is_cuda:
            from moe_layer.quant.launch import dequantize_by_kernel

            found = dequantize_by_kernel(self, q, dtype)
            if found is not None:
                return found
        return self.dequantize_reference(q, dtype)

    @abstractmethod
    def quantize_reference(self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None) -> QuantizedTensor:
        """:meth:`quantize` as PyTorch operations, on any device: what defines the format's bits."""

    @abstractmethod
    def dequantize_reference(self, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """:meth:`dequantize` as PyTorch operations, on any device."""

    def kernel_decoder(self) -> KernelDecoder | None:
        """The arithmetic of :meth:`dequantize` on registers, or None without one or without the CuTe DSL."""
        return None

    def data_columns(self, k: int) -> int:
        """Stored elements of ``data_dtype`` in a row of K values."""
        return -(-k * self.element_bits // (8 * self.data_dtype.itemsize))

    def scale_shape(self, n: int, k: int) -> tuple[int, int] | None:
        """Shape of the scales of an ``[N, K]`` tensor."""
        if self.block is None:
            return None
        return -(-n // self.block[0]), -(-k // self.block[1])

    @property
    def is_activation_format(self) -> bool:
        """Whether tokens can be sent in this format: rows stand alone, no scale spans them (and it is meant for it)."""
        return self.block is None or self.block[0] == 1

    def row_bytes(self, k: int) -> int:
        """Bytes of one row's data on the wire."""
        return self.data_columns(k) * self.data_dtype.itemsize

    def scale_row_bytes(self, k: int, *, per_row_global_scale: bool = False) -> int:
        """Bytes of one row's scales on the wire (activation formats, whose blocks are one row high)."""
        shape = self.scale_shape(1, k)
        n = 0 if shape is None or self.scale_dtype is None else shape[1] * self.scale_dtype.itemsize
        return n + (4 if per_row_global_scale else 0)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of data and block scales of a tensor of logical ``shape`` ``[..., N, K]``."""
        *lead, n, k = shape
        count = 1
        for d in lead:
            count *= d
        scales = self.scale_shape(n, k)
        scale_bytes = (
            0 if scales is None or self.scale_dtype is None else scales[0] * scales[1] * self.scale_dtype.itemsize
        )
        return count * (n * self.row_bytes(k) + scale_bytes)

    def kernel_encoder(
        self, dtype: torch.dtype = torch.bfloat16, *, per_row_global_scale: bool = True
    ) -> KernelEncoder | None:
        """The arithmetic of :meth:`quantize` on registers (:mod:`moe_layer.quant.codec`), or None without one.

        Rows become what :meth:`to_wire` of :meth:`quantize` gives, to the bit. None without the CuTe DSL.

        Args:
            dtype: of the values: BF16 or FP32.
            per_row_global_scale: of two-level formats: each row has its own global scale; False: a given one is read.
        """
        return None

    def to_wire(self, q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(hidden_states, hidden_states_scale)`` of ``[T, K]`` activations, as dispatch carries them.

        Raises:
            FormatError: not an activation format.
        """
        if not self.is_activation_format:
            raise FormatError(f"{self.name} cannot carry activations (blocks of {self.block})")
        return q.data, q.scale

    def quantize_to_wire(
        self, x: torch.Tensor, *, global_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """:meth:`to_wire` of :meth:`quantize`, of ``x`` ``[T, K]``; in one kernel where there is one.

        Raises:
            FormatError, TensorError: as those.
        """
        return self.to_wire(self.quantize(x, global_scale=global_scale))

    def from_wire(
        self, data: torch.Tensor, scale: torch.Tensor | None, columns: int, global_scale: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """The inverse of :meth:`to_wire`; ``global_scale`` is the per-tensor scale that both sides know, if any."""
        return QuantizedTensor(self.name, data, scale, global_scale, columns)


_REGISTRY: dict[str, Format] = {}


def register_format(fmt: Format) -> Format:
    """Add ``fmt`` to the registry; a second format of the same name is an error."""
    if fmt.name in _REGISTRY:
        raise FormatError(f"format {fmt.name!r} is already registered")
    _REGISTRY[fmt.name] = fmt
    return fmt


def get_format(name: str) -> Format:
    """The registered format called ``name``.

    Raises:
        FormatError: no such format; the message lists those there are.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise FormatError(f"unknown format {name!r}; known: {', '.join(sorted(_REGISTRY))}") from None


def available_formats() -> list[str]:
    """Names of all registered formats."""
    return sorted(_REGISTRY)
