"""A few small one-sided steps, checked, for NVIDIA's compute-sanitizer::

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitizer_cases.py

Options: protocols to run (default ``fence sentinel``); ``--ranks`` (default 2). Every allocation is one of the driver's
own, so that an access past a tensor's end is seen; the workspace of a rank is one allocation, within which it is not.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # before torch makes a context
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.append(str(Path(__file__).parent.parent / "helpers"))

import torch
from emulated_ranks import Group
from one_sided_check import Batch, Layer

# Rows and outputs at multiples of 16 bytes: no temporary tensor is made, hence freed, while a rank waits for the next.
LAYERS = {
    "two parts of a row": Layer(9, 3, (528,), "uint8", (16,), hidden_size=264, output_dtype="bfloat16"),
    "fp32, table, 64-bit ids": Layer(
        8, 5, (64,), "float32", None, "uint8", False, "int64", 24, "float32", "float32", (1, 0, 0, 1, 1, 1, 0, 1)
    ),
}
BATCHES = (Batch((3, 1), 3, "invalid"), Batch((0, 4), 4, "duplicates", "special"), Batch((9, 7), 9), Batch((0, 0), 0))
# A sanitized kernel takes milliseconds, and one that is instrumented at its first launch far longer.
TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("protocols", nargs="*", default=["fence", "sentinel"])
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    options = parser.parse_args()
    layers = {name: layer for name, layer in LAYERS.items() if options.ranks == 2 or layer.rank_of is None}
    for protocol in options.protocols:
        group = Group(options.ranks, protocol, layers, max_tokens_per_rank=9, timeout_s=TIMEOUT_S, max_blocks=4)
        for name in layers:
            for number, batch in enumerate(BATCHES):
                step = replace(batch, tokens=batch.tokens[: options.ranks])
                group.step(name, step, 2 * number + 1)  # odd: the caller writes into the channel's buffer
                print(f"{protocol}, {options.ranks} ranks, {name}, {step}: as the oracle has it", flush=True)
        group.close()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
