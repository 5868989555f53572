"""An MoE layer in fp64, straight from the checkpoint files: what ``demo`` and ``run --check`` compare with.

It shares no code with the layer it judges (no quantizer, loader, router, stage or transport), runs on one process,
expert by expert, and is as slow as that sounds. Of the library it uses only the parsed config. Like the layer it rounds
where a value is stored: activations at the source, FC1's output before FC2, each rank's partial result on the wire;
everything else is fp64.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError

# E2M1's eight magnitudes (OCP MX v1.0, §5.3.3); the code's top bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class OracleLayer:
    """One decoder layer's MoE block, read from a checkpoint folder tensor by tensor.

    Args:
        path: the folder: ``config.json`` and safetensors files.
        layer: number of the decoder layer.

    Raises:
        CheckpointError: no experts for that layer, or a tensor that is not there.
    """

    def __init__(self, path: str | os.PathLike[str], layer: int) -> None:
        self.path = Path(path)
        self.layer = layer
        self.cfg = MoEConfig.from_pretrained(path)
        with open(self.path / "config.json", encoding="utf-8") as file:
            raw = json.load(file)
        settings = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config") or {}
        self.weight_block = tuple(settings.get("weight_block_size") or (128, 128))
        self._file_of: dict[str, Path] = {}
        for file_path in sorted(self.path.glob("*.safetensors")):
            with safe_open(str(file_path), framework="pt") as handle:
                self._file_of.update(dict.fromkeys(handle.keys(), file_path))
        pattern = re.compile(rf"(.*\blayers\.{layer}\.\w+\.)experts\.0\.")
        prefixes = {m[1] for name in self._file_of if (m := pattern.match(name))}
        if len(prefixes) != 1:
            raise CheckpointError(f"{self.path}: expected the experts of one layer {layer}, found {sorted(prefixes)}")
        self.prefix = prefixes.pop()

    # ---- tensors ----

    def find(self, *names: str) -> torch.Tensor | None:
        """The first of the tensors that the layer has, as stored."""
        for name in names:
            if (file := self._file_of.get(self.prefix + name)) is not None:
                with safe_open(str(file), framework="pt") as handle:
                    return handle.get_tensor(self.prefix + name)
        return None

    def get(self, *names: str) -> torch.Tensor:
        tensor = self.find(*names)
        if tensor is None:
            raise CheckpointError(f"{self.path}: no tensor {self.prefix}{names[0]}")
        return tensor

    def matrix(self, *modules: str) -> torch.Tensor:
        """fp64 ``[N, K]`` of the first linear module that exists, dequantized by its tensors' names and dtypes."""
        for module in modules:
            packed = self.find(module + ".weight_packed")
            if packed is not None:
                return self._compressed_tensors(module, packed)
            weight = self.find(module + ".weight")
            if weight is not None:
                return self._plain(module, weight)
        raise CheckpointError(f"{self.path}: no tensor {self.prefix}{modules[0]}.weight")

    def _plain(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        second = self.find(module + ".weight_scale_2")
        if second is not None:  # ModelOpt NVFP4
            return decode_e2m1(weight) * spread(self.get(module + ".weight_scale").double(), 1, 16) * second.double()
        scale = self.find(module + ".weight_scale_inv", module + ".scale")
        if scale is None:
            return weight.double()
        if weight.dtype in (torch.int8, torch.uint8):  # two E2M1 codes a byte
            return decode_e2m1(weight) * spread(decode_e8m0(scale), 1, 32)
        values = decode_e8m0(scale) if scale.dtype not in (torch.float32, torch.bfloat16) else scale.double()
        n, k = weight.shape
        return weight.double() * spread(values, *self.weight_block)[:n, :k]

    def _compressed_tensors(self, module: str, packed: torch.Tensor) -> torch.Tensor:
        scale = self.get(module + ".weight_scale")
        if packed.dtype == torch.int32:  # int4 plus 8, eight a word, the first in the lowest bits
            codes = torch.stack([(packed >> shift) & 0xF for shift in range(0, 32, 4)], dim=-1).flatten(-2)
            return (codes.double() - 8) * spread(scale.double(), 1, 32)
        whole = self.find(module + ".weight_global_scale")
        if whole is not None:  # NVFP4; the stored global scale is the reciprocal of the factor
            return decode_e2m1(packed) * spread(scale.double(), 1, 16) / whole.double()
        return decode_e2m1(packed) * spread(decode_e8m0(scale), 1, 32)

    # ---- the layer ----

    def route(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Experts and weights of each token; ``x`` fp64 ``[T, hidden]``."""
        cfg = self.cfg
        logits = x @ self.get("gate.weight").double().T
        bias = self.find("gate.e_score_correction_bias", "gate.bias")
        table = self.get("gate.tid2eid") if cfg.is_hash_layer(self.layer) else None
        ids, weights = [], []
        for token, row in enumerate(logits.tolist()):
            scores = score(row, cfg.scoring_func)
            if table is not None:
                assert input_ids is not None
                chosen = [int(e) for e in table[int(input_ids[token])]]
            else:
                choice = scores if bias is None else [s + b for s, b in zip(scores, bias.double().tolist())]
                chosen = choose(choice, cfg)
            w = [scores[e] for e in chosen]
            if cfg.norm_topk_prob:
                total = sum(w) + 1e-20
                w = [v / total for v in w]
            ids.append(chosen)
            weights.append([v * cfg.routed_scaling_factor for v in w])
        return ids, weights

    def gated(self, rows: torch.Tensor, expert: str, activation_format: str) -> torch.Tensor:
        """One gated MLP: fp64 ``[n, K]`` → ``[n, hidden]``; its inner rows are rounded to ``activation_format``."""
        cfg = self.cfg
        gate = rows @ self.matrix(f"{expert}.gate_proj", f"{expert}.w1").T
        up = rows @ self.matrix(f"{expert}.up_proj", f"{expert}.w3").T
        if cfg.hidden_act == "situ":
            beta, linear_beta = cfg.situ_beta, cfg.situ_linear_beta
            h = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
        else:
            if cfg.swiglu_limit is not None:
                gate, up = gate.clamp(max=cfg.swiglu_limit), up.clamp(-cfg.swiglu_limit, cfg.swiglu_limit)
            h = gate * torch.sigmoid(gate) * up
        return round_to(h, activation_format) @ self.matrix(f"{expert}.down_proj", f"{expert}.w2").T

    def forward(
        self,
        x: torch.Tensor,
        activation_format: str,
        *,
        ranks: Sequence[Sequence[int]],
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            x: ``[T, hidden]`` tokens, as given to the layer.
            activation_format: what the layer quantizes routed activations to.
            ranks: the experts of each rank; each rank's partial result is rounded to BF16 (not with fp32 activations).
            input_ids: ``[T]`` token ids, for hash layers.

        Returns:
            fp64 ``[T, hidden]``.
        """
        cfg, x64 = self.cfg, x.double()
        ids, weights = self.route(x64, input_ids)
        latent = cfg.routed_expert_hidden_size is not None
        z = x64 @ self.matrix("routed_expert_down_proj").T if latent else x64
        z = round_to(z, activation_format)
        plain = "fp32" if activation_format == "fp32" else "bf16"

        total = torch.zeros_like(z)
        for experts in ranks:
            partial = torch.zeros_like(z)
            for expert in experts:
                pairs = [
                    (t, w[j]) for t, (e, w) in enumerate(zip(ids, weights)) for j in range(len(e)) if e[j] == expert
                ]
                if pairs:
                    tokens = torch.tensor([t for t, _ in pairs])
                    y = self.gated(z[tokens], f"experts.{expert}", activation_format)
                    partial.index_add_(0, tokens, y * torch.tensor([w for _, w in pairs], dtype=torch.float64)[:, None])
            total += round_to(partial, plain)

        if latent:
            if cfg.latent_moe_use_norm:
                variance = total.square().mean(-1, keepdim=True)
                total = total / torch.sqrt(variance + cfg.rms_norm_eps) * self.get("routed_expert_norm.weight").double()
            total = total @ self.matrix("routed_expert_up_proj").T
        if cfg.n_shared_experts:
            total = total + self.gated(round_to(x64, plain), "shared_experts", plain)
        return total


def score(logits: Sequence[float], kind: str) -> list[float]:
    """Router scores of one token."""
    if kind == "softmax":
        top = max(logits)
        exps = [math.exp(v - top) for v in logits]
        return [e / sum(exps) for e in exps]
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v)) for v in logits]
    return [math.sqrt(math.log1p(math.exp(-abs(v))) + max(v, 0.0)) for v in logits]


def choose(choice: Sequence[float], cfg: MoEConfig) -> list[int]:
    """The ``num_experts_per_tok`` best experts of the ``topk_group`` best groups."""
    size = len(choice) // cfg.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(cfg.n_group)]

    def worth(group: range) -> float:
        best = sorted((choice[e] for e in group), reverse=True)
        return best[0] if cfg.group_score == "max" else sum(best[:2])

    kept = sorted(groups, key=worth, reverse=True)[: cfg.topk_group]
    return sorted((e for group in kept for e in group), key=lambda e: -choice[e])[: cfg.num_experts_per_tok]


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Every scale over its block of ``rows`` × ``columns`` values."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``[N, K/2]``, low nibble first → fp64 ``[N, K]``."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    data = packed.view(torch.uint8).long()
    return table[torch.stack((data % 16, data // 16), dim=-1).flatten(-2)]


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes → fp64; the bytes are exponents, not numbers."""
    return torch.exp2(scale.view(torch.uint8).double() - 127)


def grid(x: torch.Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> torch.Tensor:
    """fp64 rounded to a small float: nearest, ties to even, saturating."""
    exponent = torch.frexp(x)[1].double() - 1  # floor(log2 |x|)
    step = torch.exp2(exponent.clamp(min=min_exponent) - mantissa_bits)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return grid(x, 3, -6, 448.0)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    return grid(x, 1, 0, 6.0)


def fp32(x: torch.Tensor) -> torch.Tensor:
    """fp64 rounded to fp32's numbers."""
    return x.float().double()


def power_of_two(amax: torch.Tensor, exponent: int) -> torch.Tensor:
    """2^(floor(log2 amax) − exponent), the scale of OCP MX; 1 for a block of zeros."""
    return torch.where(amax > 0, torch.exp2(torch.frexp(amax)[1].double() - 1 - exponent), 1.0)


def round_to(x: torch.Tensor, activation_format: str) -> torch.Tensor:
    """fp64 ``[n, K]`` quantized to an activation format and back; ``"fp32"`` leaves it alone.

    Scales, and values over scales, are fp32 numbers by definition of the formats. A quotient of BF16 values is often a
    tie but for that rounding: in fp64, fp8 would round one value in 800 elsewhere, a relative L2 difference of 3.4e-3.
    """
    if activation_format == "fp32":
        return x
    if activation_format == "bf16":
        return x.bfloat16().double()
    size = {"fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}[activation_format]
    n, k = x.shape
    blocks = torch.nn.functional.pad(x, (0, -k % size)).view(n, -1, size)
    amax = blocks.abs().amax(-1, keepdim=True)
    if activation_format == "fp8":
        scale = fp32(amax / 448)
        scale = torch.where(scale > 0, scale, 1.0)
        out = e4m3(fp32(blocks / scale)) * scale
    elif activation_format == "nvfp4":
        whole = fp32(amax.amax(1, keepdim=True) / (448 * 6))
        whole = torch.where(whole > 0, whole, 1.0)
        scale = fp32(e4m3(fp32(amax / fp32(6 * whole)).clamp(min=2**-9)) * whole)  # never E4M3's zero
        out = e2m1(fp32(blocks / scale)) * scale
    elif activation_format == "mxfp8":
        scale = power_of_two(amax, 8)
        out = e4m3(blocks / scale) * scale
    else:
        scale = power_of_two(amax, 2)
        out = e2m1(blocks / scale) * scale
    return out.view(n, -1)[:, :k]


def relative_l2(got: torch.Tensor, expected: torch.Tensor) -> float:
    """``‖got − expected‖ / ‖expected‖`` in fp64; infinity where ``got`` holds anything not finite."""
    difference = got.double() - expected.double()
    if not bool(torch.isfinite(difference).all()):
        return math.inf
    norm = float(torch.linalg.vector_norm(expected.double()))
    error = float(torch.linalg.vector_norm(difference))
    return error / norm if norm else (0.0 if error == 0 else math.inf)
