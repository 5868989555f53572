"""Functions of rows whose bits depend on nothing but the row.

PyTorch's own are not so: a vectorised kernel takes another code path for the tail of a thread's share (sigmoid, silu,
softplus on CPUs differ in the last bit there), and a reduction on GPUs picks its split by the number of rows. Those
here are built from operations that are exact by IEEE 754 (+, ×, ÷, √, max) or take one path for all elements (exp,
tanh, log1p: shown by test), and sums run in a fixed tree.
"""

from __future__ import annotations

import torch


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """``[..., N]`` → ``[...]``: the sum over the last dimension, as a balanced tree of elementwise additions."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        low = x[..., :half].clone()
        low[..., : n - half] += x[..., half:]
        x = low
    return x[..., 0]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / row_sum(e).unsqueeze(-1)
