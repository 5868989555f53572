"""``moe-layer bench quant``."""

from __future__ import annotations

import argparse
from typing import Any

from moe_layer.cli_types import RAW, many, names, positive

QUANT = """\
Times quantizing of BF16 tokens and back, for each format and a model's width, beside a copy of as many bytes measured
in the same run. Steps take turns over tensors that together exceed the L2 cache. Bits are compared with the PyTorch
reference before and after. What quantizing costs around dispatch: bench a2a --quantize before,fused,target."""

QUANT_EXAMPLES = """\
examples:
  moe-layer bench quant                                     all formats, V4.1-Flash, V3 and K3, T = 1 … 32768
  moe-layer bench quant --model kimi_k3 --format mxfp8,nvfp4 --tokens 1,128,4096
  moe-layer bench quant --format nvfp4 --scale given --way quantize --json nvfp4.json"""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    quant = commands.add_parser(
        "quant",
        help="the quantizers",
        description=QUANT,
        epilog=QUANT_EXAMPLES,
        formatter_class=RAW,
    )
    quant.set_defaults(handler=_bench_quant)
    quant.add_argument(
        "--model",
        type=names,
        default=(),
        metavar="NAME,…",
        help="whose routed width (default: deepseek_v41,deepseek_v3,kimi_k3; CPU: kimi_linear)",
    )
    quant.add_argument(
        "--format",
        type=names,
        default=("fp8", "mxfp8", "mxfp4", "nvfp4"),
        metavar="NAME,…",
        help="fp8, mxfp8, mxfp4, nvfp4 or another activation format with scales (default: those four)",
    )
    quant.add_argument(
        "--way",
        type=names,
        default=("quantize", "dequantize"),
        metavar="NAME,…",
        help="quantize, dequantize (default: both)",
    )
    quant.add_argument(
        "--scale",
        type=names,
        default=("row", "given"),
        metavar="KIND,…",
        help="of NVFP4's second level: row, each row's own; given, one for all (default: both)",
    )
    quant.add_argument(
        "--tokens", type=many(positive), default=(), metavar="T,…", help="(default: 1 … 32768; CPU: 1,16)"
    )
    quant.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)")
    quant.add_argument("--steps", type=positive, metavar="N", help="timed steps of a graph (default: 100; CPU: 3)")
    quant.add_argument("--repeats", type=positive, default=5, metavar="N", help="timed replays (default: 5)")
    quant.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured; - for stdout")


def _bench_quant(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import quant, show
    from moe_layer.benchmarks.harness import Options
    from moe_layer.benchmarks.report.quant import sections
    from moe_layer.benchmarks.shapes import get_shape

    gpu = (arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    models = arguments.model or (("deepseek_v41", "deepseek_v3", "kimi_k3") if gpu else ("kimi_linear",))
    cases = quant.cases_of(
        [get_shape(name) for name in models],
        arguments.format,
        arguments.way,
        arguments.tokens or (quant.TOKENS if gpu else quant.CPU_TOKENS),
        arguments.scale,
    )
    steps = arguments.steps or (100 if gpu else 3)
    options = Options(warmup=10 if gpu else 1, steps=steps, repeats=arguments.repeats)
    with quant.QuantBench(list(cases), arguments.device, options) as bench:
        return show.run(bench, sections, json_file=arguments.json)[0]
