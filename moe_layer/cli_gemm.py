"""``moe-layer bench gemm``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_layer.cli_types import RAW, many, names, positive

GEMM = """\
Times the grouped products of a model's experts on one rank: FC1 with gather, activation and requantization, FC2.
Weights are cold. Beside each time stands its floor from rates measured in the same run (the weights' bytes over the
read rate, or the operations over the rate of a large product), and PyTorch's grouped product where there is one."""

GEMM_EXAMPLES = """\
examples:
  moe-layer bench gemm                                      DeepSeek-V4.1-Flash and V3, BF16 and FP8, 8 ranks
  moe-layer bench gemm --model kimi_k3 --operands bf16 --tokens 1,64,512
  moe-layer bench gemm --model kimi_k3 --operands mxfp4,nvfp4,int4 --tokens 1,16,64,256
  moe-layer bench gemm --tokens 1 --active 6 --l2-flush     few experts with work
  moe-layer bench gemm --tokens 512 --routing even,skew     one expert with 90 % of the rows
  moe-layer bench gemm --tile 64,128 --tokens 48,64,80 --routing poisson    other tiles than gemm/tiles.json has
  moe-layer bench gemm --operands mxfp4 --tune gemm/tiles.json              try every tile, keep the fastest"""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    gemm = commands.add_parser(
        "gemm",
        help="the experts' grouped products",
        description=GEMM,
        epilog=GEMM_EXAMPLES,
        formatter_class=RAW,
    )
    gemm.set_defaults(handler=_bench_gemm)
    gemm.add_argument(
        "--model",
        type=names,
        default=(),
        metavar="NAME,…",
        help="(default: deepseek_v41,deepseek_v3; CPU: kimi_linear)",
    )
    gemm.add_argument("--ranks", type=positive, metavar="P", help="that the experts are spread over (default: 8)")
    gemm.add_argument("--stage", type=names, default=("fc1", "fc2"), metavar="NAME,…", help="fc1, fc2 (default: both)")
    gemm.add_argument(
        "--operands",
        type=names,
        default=("bf16", "fp8"),
        metavar="TYPE,…",
        help="bf16, fp8, mxfp4, nvfp4, int4, mxfp8 (default: bf16,fp8)",
    )
    gemm.add_argument(
        "--tokens", type=many(positive), default=(), metavar="M,…", help="rows an expert gets in the mean"
    )
    gemm.add_argument("--active", type=positive, metavar="N", help="experts that get rows (default: all)")
    gemm.add_argument(
        "--routing", type=names, default=(), metavar="KIND,…", help="even, poisson, skew (90 %% to one expert)"
    )
    gemm.add_argument(
        "--tile", type=many(positive), default=(), metavar="TOKENS,…", help="tiles to try instead of the table's choice"
    )
    gemm.add_argument(
        "--tune",
        metavar="FILE",
        help="try every tile, write the fastest for each mean number of rows into a table (gemm/tiles.json)",
    )
    gemm.add_argument(
        "--peer", type=names, default=("torch",), metavar="NAME,…", help="torch, deepgemm or all (default: torch)"
    )
    gemm.add_argument("--no-peer", action="store_true", help="without any")
    gemm.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)")
    gemm.add_argument("--repeats", type=positive, default=7, metavar="N", help="timed replays (default: 7)")
    gemm.add_argument("--l2-flush", action="store_true", help="flush the L2 cache before each step")
    gemm.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured; - for stdout")


def _bench_gemm(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import gemm, gemm_tune, show
    from moe_layer.benchmarks.peers import chosen
    from moe_layer.benchmarks.report.gemm import sections
    from moe_layer.benchmarks.shapes import get_shape
    from moe_layer.gemm.tile_choice import Tile

    gpu = (arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    models = arguments.model or (("deepseek_v41", "deepseek_v3") if gpu else ("kimi_linear",))
    cases = [
        case
        for name in models
        for case in gemm.cases_of(
            get_shape(name),
            arguments.ranks or (8 if gpu else 64),
            arguments.stage,
            arguments.operands,
            arguments.tokens or (gemm_tune.TOKENS if arguments.tune else gemm.TOKENS if gpu else (1, 8)),
            arguments.routing or (("even", "poisson") if arguments.tune else ("even",)),
            arguments.active,
        )
    ]
    common: dict[str, Any] = {"repeats": arguments.repeats, "l2_flush": arguments.l2_flush}
    if arguments.tune is not None:
        with gemm.GemmBench(cases, arguments.device, peers=(), **common) as bench:
            return gemm_tune.run(bench, Path(arguments.tune), json_file=arguments.json)
    peers = () if arguments.no_peer else chosen("gemm", arguments.peer)
    code = 0
    for tokens in arguments.tile or (None,):
        tile = None if tokens is None else Tile(tokens, 1)
        with gemm.GemmBench(cases, arguments.device, peers=peers, tile=tile, **common) as bench:
            code |= show.run(bench, sections, json_file=arguments.json)[0]
    return code
