"""Checks of tensors before they are quantized, dequantized or loaded."""

from __future__ import annotations

import torch

from moe_layer.errors import FormatError, TensorError
from moe_layer.quant import e8m0
from moe_layer.quant.base import Format, QuantizedTensor, get_format


def check_input(fmt: Format, x: torch.Tensor, global_scale: torch.Tensor | None) -> None:
    """Check the arguments of ``fmt.quantize``. Looks at dtypes and shapes only, never at values (no host sync).

    Raises:
        TensorError: ``x`` is not floating point, has too few dimensions or empty rows; ``global_scale`` is not fp32 or
            does not broadcast; or the format has none.
    """
    if not x.is_floating_point():
        raise TensorError(f"{fmt.name}: cannot quantize dtype {x.dtype}; expected a floating-point tensor")
    least = 2 if fmt.block is not None and fmt.block[0] > 1 else 1
    if x.dim() < least or x.shape[-1] == 0:
        raise TensorError(
            f"{fmt.name}: cannot quantize shape {tuple(x.shape)}; expected at least {least} dimension(s) "
            "and rows of at least one value"
        )
    if global_scale is not None:
        if not fmt.two_level:
            raise TensorError(f"{fmt.name} has no global scale, but one was given")
        _check_global_scale(fmt, global_scale, x.shape)


def check_stored(fmt: Format, q: QuantizedTensor) -> None:
    """Check that ``q`` is what ``fmt`` stores. Looks at dtypes and shapes only, never at values (no host sync).

    Raises:
        FormatError: ``q`` is of another format, or lacks a scale.
        TensorError: a wrong dtype or shape.
    """
    if q.format != fmt.name:
        raise FormatError(f"{fmt.name}: cannot dequantize a tensor of format {q.format!r}")
    if q.data.dtype != fmt.data_dtype:
        raise TensorError(f"{fmt.name}: data has dtype {q.data.dtype}, expected {fmt.data_dtype}")
    if q.data.dim() == 0 or q.columns < 1 or q.data.shape[-1] != fmt.data_columns(q.columns):
        raise TensorError(
            f"{fmt.name}: data has shape {tuple(q.data.shape)}, expected [..., {fmt.data_columns(q.columns)}] "
            f"for rows of {q.columns} values"
        )
    if fmt.block is not None:
        _check_scale(fmt, q)
    if fmt.two_level:
        if q.global_scale is None:
            raise FormatError(f"{fmt.name}: the global scale is missing")
        _check_global_scale(fmt, q.global_scale, q.data.shape)


def _check_scale(fmt: Format, q: QuantizedTensor) -> None:
    assert fmt.block is not None
    if q.scale is None:
        raise FormatError(f"{fmt.name}: the scales are missing")
    if q.scale.dtype != fmt.scale_dtype:
        hint = (
            "; E8M0 scales are bytes: view them as torch.uint8, do not cast" if fmt.scale_dtype == torch.uint8 else ""
        )
        raise TensorError(f"{fmt.name}: scales have dtype {q.scale.dtype}, expected {fmt.scale_dtype}{hint}")
    rows, columns = fmt.block
    expected = [*q.data.shape[:-1], -(-q.columns // columns)]
    if rows > 1:
        if q.data.dim() < 2:
            raise TensorError(f"{fmt.name}: data has shape {tuple(q.data.shape)}, expected [..., N, columns]")
        expected[-2] = -(-q.data.shape[-2] // rows)
    if list(q.scale.shape) != expected:
        raise TensorError(
            f"{fmt.name}: scales have shape {tuple(q.scale.shape)}, expected {tuple(expected)} "
            f"for data {tuple(q.data.shape)} with blocks of {rows} × {columns}"
        )


def _check_global_scale(fmt: Format, global_scale: torch.Tensor, shape: torch.Size) -> None:
    if global_scale.dtype != torch.float32:
        raise TensorError(f"{fmt.name}: global scale has dtype {global_scale.dtype}, expected torch.float32")
    if global_scale.numel() == 1 and global_scale.dim() <= len(shape):
        return
    rows = (*shape[:-1], 1)
    if global_scale.dim() != len(rows) or any(g not in (1, n) for g, n in zip(global_scale.shape, rows)):
        raise TensorError(
            f"{fmt.name}: global scale has shape {tuple(global_scale.shape)}, "
            f"expected a scalar or a shape that broadcasts to {rows}"
        )


def validate_scales(q: QuantizedTensor, name: str) -> None:
    """Refuse scales that give no value. For loaders: it reads every scale and waits for the device.

    NaN (E8M0 byte 255, too), infinite and negative scales are errors, and zero ones as well, with one exception: an
    E4M3 block scale of NVFP4 may be zero, because released quantizers let small blocks underflow to it; that all of
    them are zero is still an error.

    Args:
        name: what the message calls the tensor, e.g. its name in the checkpoint.

    Raises:
        FormatError: names ``name``, the position and the value of the first bad scale, or the scale that is missing.
    """
    fmt = get_format(q.format)
    if fmt.block is not None:
        if q.scale is None:
            raise FormatError(f"{name}: {fmt.name} needs scales, but there are none")
        if q.scale.dtype != fmt.scale_dtype:
            raise FormatError(f"{name}: scales have dtype {q.scale.dtype}, expected {fmt.scale_dtype}")
        _refuse_bad(q.scale, name, "scale", zero_allowed=fmt.two_level)
        if fmt.two_level and q.scale.numel() and not (q.scale.view(torch.uint8) & 0x7F).any():
            raise FormatError(f"{name}: every scale is zero; the scales were never written")
    if fmt.two_level:
        if q.global_scale is None:
            raise FormatError(f"{name}: {fmt.name} needs a global scale, but there is none")
        _refuse_bad(q.global_scale, name, "global scale", zero_allowed=False)


def _refuse_bad(scale: torch.Tensor, name: str, what: str, *, zero_allowed: bool) -> None:
    if scale.dtype == torch.uint8:
        bad = scale == e8m0.NAN
    else:
        value = scale.to(torch.float32)
        bad = ~((value >= 0 if zero_allowed else value > 0) & value.isfinite())
    if not bad.any():
        return
    position = tuple(bad.nonzero()[0].tolist())
    found = scale[position]
    shown = "NaN (E8M0 byte 255)" if scale.dtype == torch.uint8 else f"{found.item():g}"
    expected = "finite and not negative" if zero_allowed else "finite and positive"
    raise FormatError(
        f"{name}: {what} at {list(position)} is {shown}, expected {expected} "
        f"({int(bad.sum())} of {scale.numel()} are not)"
    )
