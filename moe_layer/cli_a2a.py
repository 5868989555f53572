"""``moe-layer bench a2a``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_layer.cli_types import RAW, at_least, many, names, positive

A2A = """\
Times dispatch and combine between ranks: on GPUs a CUDA graph of 10 warm-up and 100 timed steps, replayed several
times; the time per step is the largest of the ranks', the median over replays. Dispatch and combine apart come from
CUPTI kernel records of replays in separate processes. Outputs are checked bit by bit against a reference before, in
and after the timed steps. Beside each time stands its floor: the bytes over the push and pull rates of the link, and
an empty kernel and a flag each way, all measured in the same run. On a machine without GPUs the collective transport
is timed by the clock, small sizes; those numbers mean nothing for GPUs."""

A2A_EXAMPLES = """\
examples:
  moe-layer bench a2a                                       three models, one batch after another
  moe-layer bench a2a --model kimi_k3 --tokens 1,128 --protocol sentinel,fence --json k3.json
  moe-layer bench a2a --model deepseek_v3:bf16 --routing perfect,zipf:1 --peer nccl
  moe-layer bench a2a --ranks 4 --launch single             one process drives all ranks, sharing GPUs if it must
  moe-layer bench a2a --crossover crossover.json            up to which batch Sentinel is the faster protocol

A model is a name, a name with an activation format, or a checkpoint. A case that fails prints its error, and the run
goes on; exit code 1 says so. Under torchrun its processes are the ranks, and the first prints."""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    a2a = commands.add_parser(
        "a2a",
        help="the all-to-all between ranks",
        description=A2A,
        epilog=A2A_EXAMPLES,
        formatter_class=RAW,
    )
    a2a.set_defaults(handler=_bench_a2a)
    a2a.add_argument(
        "--model",
        type=names,
        default=(),
        metavar="NAME[:FORMAT],…",
        help="whose rows to send (default: deepseek_v41:mxfp8,kimi_k3:mxfp8,deepseek_v3:bf16)",
    )
    a2a.add_argument(
        "--tokens",
        type=many(positive),
        default=(),
        metavar="T,…",
        help="tokens on each rank (default: 1,16,64,128,256,512,1024,4096; on the CPU 1,16,64)",
    )
    a2a.add_argument(
        "--protocol",
        type=names,
        default=(),
        metavar="NAME,…",
        help="sentinel, fence, fence+fp8 (E4M3 partial results), auto (sentinel up to the measured crossover, then "
        "fence), collective, loopback (default: sentinel,fence; on the CPU collective)",
    )
    a2a.add_argument(
        "--quantize",
        type=names,
        default=("given",),
        metavar="HOW,…",
        help="where rows become the format's: given (not timed), before (by its own kernels, then dispatch), fused "
        "(by dispatch itself), target (by its own kernels, after a dispatch in BF16) (default: given)",
    )
    a2a.add_argument(
        "--peer",
        type=names,
        default=(),
        metavar="NAME,…",
        help="nccl, flashinfer, deepep, deepep-ll, all",
    )
    a2a.add_argument("--ranks", type=positive, metavar="P", help="(default: as many as GPUs; on the CPU 2)")
    a2a.add_argument(
        "--routing", type=names, default=("perfect",), metavar="KIND,…", help="perfect, uniform, zipf:ALPHA, trace:FILE"
    )
    a2a.add_argument(
        "--launch",
        choices=("auto", "process", "single"),
        default="auto",
        help="a process a rank, or one process for all (default: auto, a process a rank where GPUs suffice)",
    )
    a2a.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)")
    a2a.add_argument("--warmup", type=at_least(0), metavar="N", help="untimed steps of a graph (default: 10; CPU: 2)")
    a2a.add_argument("--steps", type=positive, metavar="N", help="timed steps of a graph (default: 100; CPU: 10)")
    a2a.add_argument("--repeats", type=positive, metavar="N", help="timed replays (default: 10; CPU: 3)")
    a2a.add_argument(
        "--l2-flush", action="store_true", help="flush the L2 cache before each step, its own time taken out"
    )
    a2a.add_argument("--no-phases", action="store_true", help="the round trip only, no second set of processes")
    a2a.add_argument("--seed", type=at_least(0), default=0, help="of routing and values (default: 0)")
    a2a.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured; - for stdout")
    a2a.add_argument(
        "--crossover",
        metavar="FILE",
        help="search the crossover of each model instead, and write it in the format of comm/crossover.json",
    )


def _bench_a2a(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import a2a_crossover, show
    from moe_layer.benchmarks.a2a import A2ABench, Plan, check_names
    from moe_layer.benchmarks.bench import CPU_OPTIONS
    from moe_layer.benchmarks.harness import Options
    from moe_layer.benchmarks.peers import chosen
    from moe_layer.benchmarks.report.a2a import sections
    from moe_layer.benchmarks.routing import Routing
    from moe_layer.benchmarks.shapes import ALL_TO_ALL, get_shape

    check_names(arguments.protocol)
    gpu = (arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    one = arguments.ranks == 1
    default = Options() if gpu else CPU_OPTIONS

    protocols = arguments.protocol or (("loopback",) if one else ("sentinel", "fence") if gpu else ("collective",))
    plan = Plan(
        shapes=tuple(get_shape(name) for name in arguments.model or ALL_TO_ALL),
        tokens=arguments.tokens or ((1, 16, 64, 128, 256, 512, 1024, 4096) if gpu else (1, 16, 64)),
        protocols=(*protocols, *chosen("a2a", arguments.peer)),
        routings=tuple(Routing.parse(kind) for kind in arguments.routing),
        ranks=arguments.ranks,
        launch=arguments.launch,
        device_type=arguments.device,
        options=default.but(arguments.warmup, arguments.steps, arguments.repeats, l2_flush=arguments.l2_flush),
        phases=not arguments.no_phases and arguments.crossover is None,
        seed=arguments.seed,
        quantize=arguments.quantize,
    )
    fence = next((name for name in protocols if name.startswith("fence")), "fence")
    with A2ABench(plan) as bench:
        if arguments.crossover is not None:
            return a2a_crossover.run(bench, Path(arguments.crossover), fence=fence, json_file=arguments.json)
        return show.run(bench, sections, json_file=arguments.json)[0]
