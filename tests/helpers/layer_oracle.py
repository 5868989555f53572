"""The MoE layer in fp64, one token and one expert at a time: what the tests of gemm/ and moe_layer/ compare with.

It shares nothing with the library. Formats are decoded and rounded with ml_dtypes (E4M3, BF16) and by nearest of the
sixteen values (E2M1). Values are rounded exactly where the layer stores them: activations at the source, FC1's output
before FC2, each rank's partial result on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = {
    "fp8": (1, 128), "fp8_128x128": (128, 128), "fp8_128x128_ue8m0": (128, 128), "fp8_32x32": (32, 32),
    "mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16), "int4": (1, 32),
}  # fmt: skip


# ---- formats ----


def decode(fmt: str, data: torch.Tensor, scale: torch.Tensor | None, global_scale: torch.Tensor | None, columns: int):
    """Stored ``[N, …]`` → fp64 ``[N, columns]``."""
    if fmt in ("bf16", "fp32"):
        return data.double().numpy()
    if fmt in ("mxfp4", "nvfp4", "int4"):
        raw = data.numpy()
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], -1)[:, :columns].astype(int)
        values = codes - 8.0 if fmt == "int4" else np.where(codes < 8, 1, -1) * E2M1[codes % 8]
    else:
        values = data.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert scale is not None
    if fmt == "nvfp4":
        scales = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif scale.dtype == torch.uint8:
        scales = np.exp2(scale.numpy().astype(np.float64) - 127)
    else:
        scales = scale.double().numpy()
    rows, cols = BLOCK[fmt]
    spread = scales.repeat(rows, 0)[: values.shape[0]].repeat(cols, 1)[:, :columns]
    return values * spread * (1.0 if global_scale is None else float(global_scale))


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """Nearest of the E2M1 values, ties to the even code; saturating."""
    distance = np.abs(np.abs(x)[..., None] - E2M1)
    best = distance.min(-1, keepdims=True)
    candidates = np.where(distance == best, np.arange(8), 99)
    low = candidates.min(-1)
    high = np.where(candidates == 99, -1, candidates).max(-1)
    code = np.where((low != high) & (low % 2 == 1), high, low)
    return np.where(np.signbit(x), -1, 1) * E2M1[code]


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded(fmt: str, row: np.ndarray, static: float | None = None) -> np.ndarray:
    """A finite row as activation format ``fmt`` keeps it. fp64 in, fp64 out; scales in fp32 as they are stored."""
    f32 = np.float32
    if fmt == "fp32":
        return row.astype(f32).astype(np.float64)
    if fmt == "bf16":
        return row.astype(f32).astype(ml_dtypes.bfloat16).astype(np.float64)
    out = np.empty_like(row)
    whole = f32(1)
    if fmt == "nvfp4":
        whole = f32(np.abs(row).max() / (6 * 448)) if static is None else f32(static)
        whole = max(whole, f32(2.0**-117))
    size = BLOCK[fmt][1]
    for start in range(0, row.size, size):
        block = row[start : start + size].astype(f32)
        amax = np.abs(block).max()
        if fmt == "fp8":
            scale = max(f32(amax / f32(448)), f32(2.0**-126))
            out[start : start + size] = nearest_e4m3(block / scale) * float(scale)
        elif fmt in ("mxfp8", "mxfp4"):
            exponent = math.floor(math.log2(amax)) - (8 if fmt == "mxfp8" else 2) if amax > 0 else 0
            scale = 2.0**exponent
            nearest = nearest_e4m3 if fmt == "mxfp8" else nearest_e2m1
            out[start : start + size] = nearest(block.astype(np.float64) / scale) * scale
        else:
            ratio = np.clip(amax / (f32(6) * whole), f32(2.0**-9), f32(448))
            scale = 1.0 if amax == 0 else float(nearest_e4m3(np.float64(ratio)))
            step = f32(scale) * whole
            out[start : start + size] = nearest_e2m1(block / step) * (scale * float(whole))
    return out


# ---- the layer ----


@dataclass
class Oracle:
    """One MoE block.

    Attributes:
        gate: ``[E, H]`` router weights.
        experts: (gate, up, down) of each routed expert, fp64.
        k, scoring, bias, groups, kept_groups, group_score, norm, factor: the router's rule.
        act: ``"silu"`` or ``"situ"``; limit, beta, linear_beta its parameters.
        shared: (gate, up, down) or None.
        latent: (down, norm or None, up) or None; eps of the norm.
        activations: format of routed activations.
        static_input, static_fc1: NVFP4's static scales, the second one an expert, or None.
    """

    gate: np.ndarray
    experts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    k: int
    scoring: str = "softmax"
    bias: np.ndarray | None = None
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "top2_sum"
    norm: bool = True
    factor: float = 1.0
    act: str = "silu"
    limit: float | None = None
    beta: float = 4.0
    linear_beta: float = 25.0
    shared: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    latent: tuple[np.ndarray, np.ndarray | None, np.ndarray] | None = None
    eps: float = 1e-6
    activations: str = "fp32"
    static_input: float | None = None
    static_fc1: Sequence[float] | None = None
    ranks: Sequence[Sequence[int]] | None = field(default=None)

    @property
    def plain(self) -> str:
        return "fp32" if self.activations == "fp32" else "bf16"

    def scores(self, x: np.ndarray) -> np.ndarray:
        logits = self.gate @ x
        if self.scoring == "softmax":
            e = np.exp(logits - logits.max())
            return e / e.sum()
        if self.scoring == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        return np.sqrt(np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0))

    def choose(self, x: np.ndarray, bias: np.ndarray | None = None) -> tuple[list[int], list[float]]:
        """Experts of a token, best first, and their weights."""
        scores = self.scores(x)
        bias = self.bias if bias is None else bias
        choice = scores if bias is None else scores + bias
        size = len(choice) // self.groups
        allowed = []
        worth = []
        for g in range(self.groups):
            best = sorted(choice[g * size : (g + 1) * size], reverse=True)
            worth.append(best[0] if self.group_score == "max" else sum(best[:2]))
        for g in sorted(range(self.groups), key=lambda g: -worth[g])[: self.kept_groups]:
            allowed += range(g * size, (g + 1) * size)
        ids = sorted(sorted(allowed), key=lambda e: -choice[e])[: self.k]
        return ids, self.weigh(scores, ids)

    def weigh(self, scores: np.ndarray, ids: Sequence[int]) -> list[float]:
        weights = [float(scores[e]) for e in ids]
        if self.norm:
            total = sum(weights) + 1e-20
            weights = [w / total for w in weights]
        return [w * self.factor for w in weights]

    def activate(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        if self.act == "situ":
            a = self.beta * np.tanh(gate / self.beta) / (1 + np.exp(-gate))
            return a * self.linear_beta * np.tanh(up / self.linear_beta)
        if self.limit is not None:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        return gate / (1 + np.exp(-gate)) * up

    def mlp(self, weights: tuple[np.ndarray, np.ndarray, np.ndarray], x: np.ndarray, fmt: str, static=None):
        gate, up, down = weights
        return down @ rounded(fmt, self.activate(gate @ x, up @ x), static)

    def routed(self, z: np.ndarray, ids: Sequence[int], weights: Sequence[float]) -> np.ndarray:
        """One token's weighted experts: partial results of the ranks, summed."""
        z = rounded(self.activations, z, self.static_input)
        total = np.zeros(self.experts[0][2].shape[0])
        for owned in self.ranks or [range(len(self.experts))]:
            partial = np.zeros_like(total)
            for e, w in zip(ids, weights):
                if e in owned:
                    static = None if self.static_fc1 is None else self.static_fc1[e]
                    partial += w * self.mlp(self.experts[e], z, self.activations, static)
            total += rounded(self.plain, partial)
        return total

    def token(self, x: np.ndarray, ids: Sequence[int] | None = None, bias: np.ndarray | None = None) -> np.ndarray:
        """One token through the block; ``ids`` overrides the choice (hash layers)."""
        if ids is None:
            ids, weights = self.choose(x, bias)
        else:
            weights = self.weigh(self.scores(x), ids)
        if self.latent is None:
            y = self.routed(x, ids, weights)
        else:
            down, norm, up = self.latent
            y = self.routed(down @ x, ids, weights)
            if norm is not None:
                y = y / np.sqrt((y * y).mean() + self.eps) * norm
            y = up @ y
        if self.shared is not None:
            y = y + self.mlp(self.shared, rounded(self.plain, x), self.plain)
        return y

    def __call__(self, x: torch.Tensor, ids: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """``[T, H]`` → fp64 ``[T, H]``."""
        rows = x.double().numpy()
        out = [self.token(row, None if ids is None else ids[t]) for t, row in enumerate(rows)]
        return torch.from_numpy(np.stack(out)) if out else torch.zeros(0, x.shape[1], dtype=torch.float64)


def oracle_of(layer, **overrides) -> Oracle:
    """The oracle with the stored weights of a ``MoELayer`` that holds all experts."""
    cfg = layer.cfg

    def matrices(mlp, e):
        def one(stack, part):
            q = stack.weights().expert(e, part)
            return decode(q.format, q.data.cpu(), _cpu(q.scale), _cpu(q.global_scale), q.columns)

        return one(mlp.gate_up, 0), one(mlp.gate_up, 1), one(mlp.down, 0)

    def numpy(t):
        return None if t is None else t.detach().double().cpu().numpy()

    latent = layer.latent
    fields = {
        "gate": numpy(layer.gate.weight),
        "experts": [matrices(layer.routed_experts, e) for e in range(cfg.n_routed_experts)],
        "k": cfg.num_experts_per_tok,
        "scoring": cfg.scoring_func,
        "bias": numpy(layer.gate.e_score_correction_bias),
        "groups": cfg.n_group,
        "kept_groups": cfg.topk_group,
        "group_score": cfg.group_score,
        "norm": cfg.norm_topk_prob,
        "factor": cfg.routed_scaling_factor,
        "act": cfg.hidden_act,
        "limit": cfg.swiglu_limit,
        "beta": cfg.situ_beta,
        "linear_beta": cfg.situ_linear_beta,
        "shared": None if layer.shared_experts is None else matrices(layer.shared_experts, 0),
        "latent": None if latent is None else (numpy(latent.down), numpy(latent.norm), numpy(latent.up)),
        "eps": cfg.rms_norm_eps,
        "activations": layer.activation_format,
    }
    return Oracle(**{**fields, **overrides})


def _cpu(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.cpu()


def rel_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    """‖got − expected‖ / ‖expected‖; infinite where ``got`` is not finite."""
    difference = got.double().cpu() - expected.double().cpu()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.norm() / expected.double().norm())
