"""Round-trip error of every number format on Gaussian data: measured, and computed by quadrature.

    python -m moe_layer.benchmarks.quant_error [--rows 4096] [--columns 7168] [--seed 0] [--json]

Prints a table (the one in docs/numerics.md). *Measured* is ``‖dequantize(quantize(x)) − x‖ / ‖x‖`` for iid x ~ N(0, 1).
*Theory* shares no code with the quantizers: the error of rounding to the format's list of values is integrated over the
density of x, given the largest magnitude of its block, and that over the density of the largest of n magnitudes.
*Largest* is the largest measured error of one value relative to its block's largest magnitude.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moe_layer.quant import available_formats, dequantize, get_format, quantize

# Values of each element type, non-negative half; INT4 is the only one that is not symmetric.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
)
_INT4_NEGATIVE, _INT4_POSITIVE = np.arange(9.0), np.arange(8.0)

Scale = Callable[[np.ndarray], np.ndarray]

QUANTILES = 2000  # of a block's largest magnitude; with 200, MXFP8's steps in scale are 1 % off
POINTS = 4000  # of x between 0 and that


def _round_error(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Squared distance of each ``x`` ≥ 0 to the nearest of ``values`` (ascending)."""
    middle = (values[1:] + values[:-1]) / 2
    return (values[np.searchsorted(middle, x)] - x) ** 2


def _normal_cdf(a: np.ndarray) -> np.ndarray:
    """P(|x| < a) for x ~ N(0, 1)."""
    return np.vectorize(math.erf)(a / math.sqrt(2))


def _amax_quantiles(n: int, below: float = 12.0) -> np.ndarray:
    """Midpoint quantiles of the largest of n magnitudes, all of them < ``below``."""
    grid = np.linspace(0, below, 200_001)
    cdf = (_normal_cdf(grid[1:]) / _normal_cdf(np.array([below]))) ** n
    return np.interp((np.arange(QUANTILES) + 0.5) / QUANTILES, cdf, grid[1:])


def _block_error(amax: np.ndarray, scale: np.ndarray, n: int, element: str) -> float:
    """Mean squared error of a value in blocks of n with the given largest magnitudes and scales (equal weights)."""
    total = 0.0
    for a, s in zip(amax, scale):
        x = (np.arange(POINTS) + 0.5) * (a / POINTS)
        density = np.exp(-x * x / 2)
        density /= density.sum()
        for negative in (False, True) if element == "int4" else (False,):
            values = {"e4m3": _E4M3, "e2m1": _E2M1, "int4": _INT4_NEGATIVE if negative else _INT4_POSITIVE}[element] * s
            rest = (density * _round_error(x, values)).sum()
            largest = _round_error(np.array([a]), values)[0]
            total += (largest + (n - 1) * rest) / n / (2 if element == "int4" else 1)
    return total / len(amax)


def _floor(emax: int) -> Scale:
    """OCP MX: the power of two that puts the largest magnitude into the binade of ``2**emax``."""
    return lambda amax: 2.0 ** (np.floor(np.log2(amax)) - emax)


def _ceil(amax: np.ndarray) -> np.ndarray:
    """The least power of two that does not saturate E4M3."""
    return 2.0 ** np.ceil(np.log2(amax / 448))


# Values that share a scale, their type, and the scale for their largest magnitude.
_RULES: dict[str, tuple[int, str, Scale]] = {
    "fp8": (128, "e4m3", lambda amax: amax / 448),
    "fp8_128x128": (128 * 128, "e4m3", lambda amax: amax / 448),
    "fp8_128x128_ue8m0": (128 * 128, "e4m3", _ceil),
    "fp8_32x32": (32 * 32, "e4m3", _ceil),
    "mxfp8": (32, "e4m3", _floor(8)),
    "mxfp4": (32, "e2m1", _floor(2)),
    "int4": (32, "int4", lambda amax: amax / 7.5),
}


def _nvfp4(columns: int) -> float:
    """The row's largest magnitude sets the global scale, and bounds those of the blocks."""
    total = []
    for row_amax in _amax_quantiles(columns)[50::100]:
        amax = _amax_quantiles(16, float(row_amax))
        ratio = 448 * amax / row_amax
        step = 2.0 ** (np.maximum(np.floor(np.log2(ratio)), -6) - 3)
        scale = np.round(ratio / step) * step * row_amax / 2688
        total.append(_block_error(amax, scale, 16, "e2m1"))
    return math.sqrt(np.mean(total))


def _bf16() -> float:
    """Uniform rounding error within each binade: step 2**(e − 7)."""
    x = np.linspace(1e-4, 10, 2_000_001)
    density = np.exp(-x * x / 2)
    density /= density.sum()
    step = 2.0 ** (np.floor(np.log2(x)) - 7)
    return math.sqrt((density * step**2 / 12).sum())


def theory(name: str, columns: int) -> float:
    """Expected relative L2 error of format ``name`` on N(0, 1) rows of ``columns`` values (whole blocks)."""
    if name in ("fp32", "bf16"):
        return _bf16() if name == "bf16" else 0.0
    if name == "nvfp4":
        return _nvfp4(columns)
    n, element, scale = _RULES[name]
    amax = _amax_quantiles(n)
    return math.sqrt(_block_error(amax, scale(amax), n, element))


def _block_amax(t: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return t.abs().unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).amax((-3, -1))


def measure(name: str, x: torch.Tensor) -> dict[str, Any]:
    """Bits a value with its scales, relative L2 error and largest error of quantizing ``x`` ``[N, K]``."""
    fmt = get_format(name)
    n, k = x.shape
    q = quantize(x, name)
    error = dequantize(q) - x
    block = fmt.block or (1, 1)
    return {
        "format": name,
        "bits": 8 * q.nbytes / (n * k),
        "measured": (error.double().norm() / x.double().norm()).item(),
        "theory": theory(name, k),
        "largest": (_block_amax(error, block) / _block_amax(x, block)).max().item(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4096, help="multiple of 128 (default: 4096)")
    parser.add_argument("--columns", type=int, default=7168, help="multiple of 128 (default: 7168)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    args = parser.parse_args(argv)
    if min(args.rows, args.columns) < 128 or args.rows % 128 or args.columns % 128:
        parser.error(f"--rows and --columns must be multiples of 128, got {args.rows} and {args.columns}")
    x = torch.randn(args.rows, args.columns, generator=torch.Generator().manual_seed(args.seed))
    if not args.json:
        print("| format | bits a value | measured | theory | measured / theory | largest / amax |")
        print("|---|---|---|---|---|---|")
    for name in available_formats():
        r = measure(name, x)
        if args.json:
            print(json.dumps(r))
            continue
        ratio = f"{r['measured'] / r['theory']:.4f}" if r["theory"] else "–"
        print(
            f"| {name} | {r['bits']:.3f} | {r['measured']:.4e} | {r['theory']:.4e} | {ratio} | {r['largest']:.4e} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
