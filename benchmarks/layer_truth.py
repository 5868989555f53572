"""The routed experts in fp64 with a layer's quantization points: what the layer benchmark compares some tokens with."""

from __future__ import annotations

import torch

from moe_layer.benchmarks.layer_case import Case
from moe_layer.errors import MoELayerError
from moe_layer.quant import get_format

CHECKED_TOKENS = 2  # of a rank


class LayerError(MoELayerError, RuntimeError):
    """A layer's output was wrong."""


def chosen(count: int) -> list[int]:
    """The rows that are checked: the first and the last, or fewer."""
    return sorted({round(i * (count - 1) / max(1, CHECKED_TOKENS - 1)) for i in range(min(CHECKED_TOKENS, count))})


def partial_truth(case: Case, z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rank: int) -> torch.Tensor:
    """fp64 ``[hidden]``: what rank ``rank`` adds to one token.

    Args:
        z: ``[hidden]``, the token.
        ids, weights: ``[top_k]``, on the CPU.
    """
    rows = get_format(case.shape.activation_format)
    stored = get_format(case.weight_format)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return rows.dequantize_reference(rows.quantize_reference(x.reshape(1, -1).float()))[0].double()

    def weight(w: torch.Tensor) -> torch.Tensor:
        scale = None
        if stored.two_level:  # one a projection, as in checkpoints
            largest = stored.quantize_reference(w.abs().amax().float().reshape(1, 1)).global_scale
            assert largest is not None
            scale = largest.reshape(())
        return stored.dequantize_reference(stored.quantize_reference(w, global_scale=scale)).double()

    total = torch.zeros_like(z, dtype=torch.float64)
    x = rounded(z)
    for expert, scale in zip(ids.tolist(), weights.tolist()):
        if not 0 <= expert < case.shape.num_experts or case.placement.rank_of[expert] != rank:
            continue
        gate, up, down = (weight(w) for w in case.projections(expert, z.device))
        total += scale * (down @ rounded(case.shape.activation(gate @ x, up @ x)))
    return total if case.shape.activation_format == "fp32" else total.bfloat16().double()


def token_truth(case: Case, rank: int, token: int, z: torch.Tensor) -> torch.Tensor:
    """fp64 ``[hidden]``: the whole output of a token of source rank ``rank``."""
    ids, weights = case.ids(rank)[token], case.weights(rank)[token]
    total = torch.zeros_like(z, dtype=torch.float64)
    for target in range(case.ep_size):
        total += partial_truth(case, z, ids, weights, target)
    return total


def compare(rank: int, got: torch.Tensor, want: torch.Tensor, limit: float) -> float:
    """The relative L2 error of rows.

    Raises:
        LayerError: more than ``limit``.
    """
    norm = float(want.norm())
    error = float((got.double() - want).norm()) / norm if norm else float(got.norm())
    if not error <= limit:  # NaN too
        raise LayerError(f"rank {rank}: relative L2 error {error:.1e}, more than {limit:.1e}")
    return error


def check_rows(case: Case, rank: int, z: torch.Tensor, output: torch.Tensor, limit: float) -> float:
    """:func:`compare` of some tokens of rank ``rank``, ``z`` and ``output`` ``[T, hidden]``.

    Raises:
        LayerError: more than ``limit``.
    """
    tokens = chosen(case.tokens)
    want = torch.stack([token_truth(case, rank, token, z[token]) for token in tokens])
    return compare(rank, output[tokens], want, limit)
