"""The layer's error, and what quantizing its activations costs: ``python -m moe_layer.benchmarks.layer_error``.

Small random checkpoints in release layouts, 128 tokens from N(0, 1). Two kinds of numbers, both relative L2: the layer
against fp64 with the same quantization points (what the library adds), and fp64 with the points of each activation
format against fp64 with none (what the format costs, whoever computes it).
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from moe_layer.layer import MoELayer
from moe_layer.models.synthetic import write_checkpoint
from moe_layer.oracle import OracleLayer, relative_l2

RELEASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"hidden": 1024, "inter": 512, "experts": 32, "top_k": 8},
    "deepseek_v41": {"hidden": 1024, "inter": 512, "experts": 48, "top_k": 6},
    "kimi_k3": {"hidden": 1024, "inter": 512, "experts": 64, "top_k": 16},
    "deepseek_v3_nvfp4": {"hidden": 1024, "inter": 512, "experts": 32, "top_k": 8},
}
FORMATS = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
TOKENS = 128


def main() -> None:
    print(f"| release | weights → activations | BF16 output | FP32 output | {' | '.join(FORMATS)} |")
    print(f"|---|---|{'---|' * (2 + len(FORMATS))}")
    for release, sizes in RELEASES.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(folder, release, **sizes, values=False, seed=1)
            number = checkpoint.moe_layers[-1]
            layer, oracle = MoELayer.from_pretrained(folder, number, device="cpu"), OracleLayer(folder, number)
            x = torch.randn(TOKENS, sizes["hidden"], generator=torch.Generator().manual_seed(0)).bfloat16()
            ranks = [list(range(sizes["experts"]))]
            same = oracle.forward(x, layer.activation_format, ranks=ranks)
            exact = oracle.forward(x, "fp32", ranks=ranks)
            added = [relative_l2(layer(x), same), relative_l2(layer(x.float()), same)]
            costs = [relative_l2(oracle.forward(x, name, ranks=ranks), exact) for name in FORMATS]
            numbers = " | ".join(f"{value:.2e}" for value in added + costs)
            print(f"| {release} | {layer.weight_format} → {layer.activation_format} | {numbers} |")


if __name__ == "__main__":
    main()
