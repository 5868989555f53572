"""Checks of arguments that every transport shares, made before anything is sent or launched.

All raise :class:`~moe_layer.errors.TensorError` with the rank, the tensor's name, the value found and what was
expected.
"""

from __future__ import annotations

import torch

from moe_layer.comm.base import MAX_TOP_K
from moe_layer.errors import TensorError

ID_DTYPES = (torch.int32, torch.int64)
PARTIAL_DTYPES = (torch.bfloat16, torch.float32)  # of expert_output: what travels back
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dispatch(
    rank: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    hidden_states_scale: torch.Tensor | None = None,
    *,
    device: torch.device | None = None,
) -> None:
    """Check the tensors of a dispatch: types, dtypes, shapes, one device, contiguous rows.

    Args:
        rank: this process's rank in the group, for the messages.
        hidden_states: ``[T, *row]``, any dtype, at least one byte a row.
        topk_ids: ``[T, top_k]`` int32 or int64.
        topk_weights: ``[T, top_k]`` fp32, or None.
        hidden_states_scale: ``[T, *scale_row]``, any dtype, or None.
        device: where they must be, or None for anywhere.
    """
    _check_rows(rank, "hidden_states", hidden_states)
    if device is not None and hidden_states.device != device:
        raise _error(rank, "hidden_states", f"is on {hidden_states.device}", f"{device}, as the channel")
    num_tokens = hidden_states.shape[0]
    if hidden_states.shape[1:].numel() == 0:
        raise _error(rank, "hidden_states", f"has shape {_shape(hidden_states)}", "rows of at least one element")

    check_topk_ids(rank, topk_ids)
    _check_same_device(rank, "topk_ids", topk_ids, hidden_states.device)
    if topk_ids.shape[0] != num_tokens:
        expected = f"one row for each of the {num_tokens} rows of hidden_states"
        raise _error(rank, "topk_ids", f"has shape {_shape(topk_ids)}", expected)

    if topk_weights is not None:
        _check_tensor(rank, "topk_weights", topk_weights)
        if topk_weights.dtype != torch.float32:
            raise _error(rank, "topk_weights", f"has dtype {topk_weights.dtype}", "torch.float32")
        if topk_weights.shape != topk_ids.shape:
            expected = f"the shape of topk_ids, {_shape(topk_ids)}"
            raise _error(rank, "topk_weights", f"has shape {_shape(topk_weights)}", expected)
        _check_same_device(rank, "topk_weights", topk_weights, hidden_states.device)
        _check_contiguous(rank, "topk_weights", topk_weights)

    if hidden_states_scale is not None:
        _check_rows(rank, "hidden_states_scale", hidden_states_scale)
        _check_same_device(rank, "hidden_states_scale", hidden_states_scale, hidden_states.device)
        if hidden_states_scale.shape[0] != num_tokens:
            expected = f"one row for each of the {num_tokens} rows of hidden_states"
            raise _error(rank, "hidden_states_scale", f"has shape {_shape(hidden_states_scale)}", expected)


def check_topk_ids(rank: int, topk_ids: torch.Tensor) -> None:
    """Check ``topk_ids``: ``[T, top_k]`` int32 or int64, contiguous, top_k from 1 to 32."""
    _check_tensor(rank, "topk_ids", topk_ids)
    if topk_ids.dtype not in ID_DTYPES:
        raise _error(rank, "topk_ids", f"has dtype {topk_ids.dtype}", "torch.int32 or torch.int64")
    if topk_ids.ndim != 2:
        raise _error(rank, "topk_ids", f"has shape {_shape(topk_ids)}", "[tokens, top_k]")
    if not 1 <= topk_ids.shape[1] <= MAX_TOP_K:
        raise _error(rank, "topk_ids", f"has top_k={topk_ids.shape[1]}", f"1 to {MAX_TOP_K}")
    _check_contiguous(rank, "topk_ids", topk_ids)


def check_partial_dtype(rank: int, name: str, dtype: torch.dtype) -> None:
    """Check that partial results may have ``dtype``: BF16 or FP32."""
    if dtype not in PARTIAL_DTYPES:
        raise _error(rank, name, f"has dtype {dtype}", "torch.bfloat16 or torch.float32")


def check_combine(
    rank: int,
    expert_output: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    num_slots: int,
    num_tokens: int,
    hidden_size: int,
    device: torch.device,
) -> None:
    """Check the tensors of a combine against its dispatch.

    Args:
        rank: this process's rank in the group, for the messages.
        expert_output: ``[num_slots, hidden_size]`` BF16 or FP32, contiguous.
        output: ``[num_tokens, hidden_size]`` BF16, FP16 or FP32, any strides, or None.
        num_slots: ``ep_size * T̂`` of the dispatch.
        num_tokens: T of the dispatch.
        hidden_size: the communicator's width.
        device: where the dispatched tensors were.
    """
    _check_tensor(rank, "expert_output", expert_output)
    check_partial_dtype(rank, "expert_output", expert_output.dtype)
    if tuple(expert_output.shape) != (num_slots, hidden_size):
        expected = f"[ep_size*T̂, hidden_size] = [{num_slots}, {hidden_size}]"
        raise _error(rank, "expert_output", f"has shape {_shape(expert_output)}", expected)
    _check_same_device(rank, "expert_output", expert_output, device)
    _check_contiguous(rank, "expert_output", expert_output)
    if output is not None:
        check_output(rank, output, num_tokens=num_tokens, hidden_size=hidden_size, device=device)


def check_output(rank: int, output: torch.Tensor, *, num_tokens: int, hidden_size: int, device: torch.device) -> None:
    """Check a combine's output: ``[num_tokens, hidden_size]`` BF16, FP16 or FP32, any strides."""
    _check_tensor(rank, "output", output)
    if output.dtype not in OUTPUT_DTYPES:
        raise _error(rank, "output", f"has dtype {output.dtype}", "torch.bfloat16, torch.float16 or torch.float32")
    if tuple(output.shape) != (num_tokens, hidden_size):
        expected = f"[T, hidden_size] = [{num_tokens}, {hidden_size}]"
        raise _error(rank, "output", f"has shape {_shape(output)}", expected)
    _check_same_device(rank, "output", output, device)


def _check_rows(rank: int, name: str, tensor: torch.Tensor) -> None:
    _check_tensor(rank, name, tensor)
    if tensor.ndim < 1:
        raise _error(rank, name, "has no dimension", "[tokens, *row]")
    _check_contiguous(rank, name, tensor)


def _check_tensor(rank: int, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _error(rank, name, f"is a {type(tensor).__name__}", "a torch.Tensor")
    if tensor.layout != torch.strided:
        raise _error(rank, name, f"has layout {tensor.layout}", "a dense tensor (torch.strided)")


def _check_contiguous(rank: int, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        found = f"of shape {_shape(tensor)} has strides {tensor.stride()}"
        raise _error(rank, name, found, "contiguous rows (call .contiguous())")


def _check_same_device(rank: int, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise _error(rank, name, f"is on {tensor.device}", f"{device}, as hidden_states")


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _error(rank: int, name: str, found: str, expected: str) -> TensorError:
    return TensorError(f"rank {rank}: {name} {found}; expected {expected}")
