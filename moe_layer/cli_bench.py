"""The commands ``moe-layer bench`` and ``moe-layer compile``: arguments in; the work is done in the modules called."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
USER_ERROR = 2

BENCH = """\
Measures this machine. Every result is a JSON line with the machine, versions and commit that it belongs to."""

BENCH_EXAMPLES = """\
examples:
  moe-layer bench a2a --help     the all-to-all: dispatch, combine, round trip
  moe-layer bench gemm --help    the experts' grouped products
  moe-layer bench quant --help   the quantizers"""

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

GEMM = """\
Times the grouped products of a model's experts on one rank: FC1 with gather, activation and requantization, FC2.
Weights are cold. Beside each time stands its floor from rates measured in the same run (the weights' bytes over the
read rate, or the operations over the rate of a large product), and PyTorch's grouped product where there is one."""

GEMM_EXAMPLES = """\
examples:
  moe-layer bench gemm                                      DeepSeek-V4.1-Flash and V3, BF16 and FP8, 8 ranks
  moe-layer bench gemm --model kimi_k3 --operands bf16 --tokens 1,64,512
  moe-layer bench gemm --tokens 1 --active 6 --l2-flush     few experts with work
  moe-layer bench gemm --tokens 512 --routing even,skew     one expert with 90 % of the rows
  moe-layer bench gemm --tile 64,128 --tokens 48,64,80 --routing poisson    other tiles than gemm/tiles.json has"""

QUANT = """\
Times quantizing of BF16 tokens and back, for each format and a model's width, beside a copy of as many bytes measured
in the same run. Steps take turns over tensors that together exceed the L2 cache. Bits are compared with the PyTorch
reference before and after. What quantizing costs around dispatch: bench a2a --quantize before,fused,target."""

QUANT_EXAMPLES = """\
examples:
  moe-layer bench quant                                     all formats, V4.1-Flash, V3 and K3, T = 1 … 32768
  moe-layer bench quant --model kimi_k3 --format mxfp8,nvfp4 --tokens 1,128,4096
  moe-layer bench quant --format nvfp4 --scale given --way quantize --json nvfp4.json"""

COMPILE = """\
Compiles the kernels that a model's layers need and stores them in the kernel cache ($MOE_LAYER_CACHE, else
~/.cache/moe_layer/kernels), so that no first step waits for a compiler. Needs the CuTe DSL but no GPU: fill the cache
on a build machine and copy the folder. Only what is missing is compiled."""

COMPILE_EXAMPLES = """\
examples:
  moe-layer compile deepseek_v41 kimi_k3                    for this machine's GPUs, eight ranks
  moe-layer compile deepseek_v3:bf16 --ranks 2,4,8 --arch sm_90a,sm_100a
  moe-layer compile path/to/checkpoint --ranks 16 --json

A model is a name, a name with an activation format, or a checkpoint. Kernels depend on the number of ranks, the row
widths, top_k and the number of experts, on this library's source and on the DSL's version."""


def many(item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argparse type: values separated by commas."""

    def parse(text: str) -> tuple[T, ...]:
        return tuple(item(part) for part in text.split(",") if part)

    parse.__name__ = getattr(item, "__name__", "list")
    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def add_commands(commands: Any) -> None:
    """Add both commands to the subparsers of ``moe-layer``. Imports neither torch nor what the commands need."""
    raw = argparse.RawDescriptionHelpFormatter
    bench = commands.add_parser(
        "bench", help="measure this machine", description=BENCH, epilog=BENCH_EXAMPLES, formatter_class=raw
    )
    bench.set_defaults(handler=lambda arguments: bench.print_help() or USER_ERROR)
    kinds = bench.add_subparsers(metavar="WHAT", parser_class=type(bench))
    a2a = kinds.add_parser(
        "a2a", help="the all-to-all between ranks", description=A2A, epilog=A2A_EXAMPLES, formatter_class=raw
    )
    a2a.set_defaults(handler=_bench_a2a)
    positive, names = at_least(1), many(str)
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
    a2a.add_argument("--peer", type=names, default=(), metavar="NAME,…", help="others to time beside them: nccl")
    a2a.add_argument("--ranks", type=positive, metavar="P", help="(default: as many as GPUs; on the CPU 2)")
    a2a.add_argument(
        "--routing", type=names, default=("perfect",), metavar="KIND,…", help="perfect, uniform, zipf:ALPHA"
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
    a2a.add_argument("--json", metavar="FILE", help="write a JSON line a case as it is measured; - for stdout")
    a2a.add_argument(
        "--crossover",
        metavar="FILE",
        help="search the crossover of each model instead, and write it in the format of comm/crossover.json",
    )

    gemm = kinds.add_parser(
        "gemm", help="the experts' grouped products", description=GEMM, epilog=GEMM_EXAMPLES, formatter_class=raw
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
        "--operands", type=names, default=("bf16", "fp8"), metavar="TYPE,…", help="bf16, fp8 (default: both)"
    )
    gemm.add_argument(
        "--tokens", type=many(positive), default=(), metavar="M,…", help="rows an expert gets in the mean"
    )
    gemm.add_argument("--active", type=positive, metavar="N", help="experts that get rows (default: all)")
    gemm.add_argument(
        "--routing", type=names, default=("even",), metavar="KIND,…", help="even, poisson, skew (90 %% to one expert)"
    )
    gemm.add_argument(
        "--tile", type=many(positive), default=(), metavar="TOKENS,…", help="tiles to try instead of the table's choice"
    )
    gemm.add_argument("--no-peer", action="store_true", help="without PyTorch's own grouped product")
    gemm.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)")
    gemm.add_argument("--repeats", type=positive, default=7, metavar="N", help="timed replays (default: 7)")
    gemm.add_argument("--l2-flush", action="store_true", help="flush the L2 cache before each step")
    gemm.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured")

    quant = kinds.add_parser(
        "quant", help="the quantizers", description=QUANT, epilog=QUANT_EXAMPLES, formatter_class=raw
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
    quant.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured")

    compile_ = commands.add_parser(
        "compile",
        help="fill the kernel cache ahead of time",
        description=COMPILE,
        epilog=COMPILE_EXAMPLES,
        formatter_class=raw,
    )
    compile_.set_defaults(handler=_compile)
    compile_.add_argument("models", nargs="+", metavar="MODEL", help="NAME, NAME:FORMAT or a checkpoint folder")
    compile_.add_argument("--ranks", type=many(positive), default=(8,), metavar="P,…", help="group sizes (default: 8)")
    compile_.add_argument(
        "--arch",
        type=names,
        default=(),
        metavar="ARCH,…",
        help="sm_90a, sm_100a, sm_103a (default: this machine's GPUs; without one, all)",
    )
    compile_.add_argument(
        "--ids",
        type=names,
        default=("int32",),
        metavar="DTYPE,…",
        help="of the expert ids: int32 (the layers' own router) or int64 (callers with theirs)",
    )
    compile_.add_argument("--fp8-combine", action="store_true", help="also the kernels of the fp8_combine option")
    compile_.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _bench_a2a(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import a2a_show
    from moe_layer.benchmarks.a2a import CPU_OPTIONS, Plan, check_names
    from moe_layer.benchmarks.harness import Options
    from moe_layer.benchmarks.routing import Routing
    from moe_layer.benchmarks.shapes import ALL_TO_ALL, get_shape

    check_names(arguments.protocol, arguments.peer)
    gpu = (arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    one = arguments.ranks == 1
    default = Options() if gpu else CPU_OPTIONS

    def given(value: int | None, otherwise: int) -> int:
        return otherwise if value is None else value

    protocols = arguments.protocol or (("loopback",) if one else ("sentinel", "fence") if gpu else ("collective",))
    plan = Plan(
        shapes=tuple(get_shape(name) for name in arguments.model or ALL_TO_ALL),
        tokens=arguments.tokens or ((1, 16, 64, 128, 256, 512, 1024, 4096) if gpu else (1, 16, 64)),
        protocols=(*protocols, *arguments.peer),
        routings=tuple(Routing.parse(kind) for kind in arguments.routing),
        ranks=arguments.ranks,
        launch=arguments.launch,
        device_type=arguments.device,
        options=Options(
            given(arguments.warmup, default.warmup),
            given(arguments.steps, default.steps),
            given(arguments.repeats, default.repeats),
            arguments.l2_flush,
        ),
        phases=not arguments.no_phases and arguments.crossover is None,
        seed=arguments.seed,
        quantize=arguments.quantize,
    )
    fence = next((name for name in protocols if name.startswith("fence")), "fence")
    return a2a_show.run(plan, json_file=arguments.json, crossover=arguments.crossover, fence=fence)


def _bench_gemm(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import gemm
    from moe_layer.benchmarks.shapes import get_shape
    from moe_layer.gemm.tile_choice import forced_tile

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
            arguments.tokens or (gemm.TOKENS if gpu else (1, 8)),
            arguments.routing,
            arguments.active,
        )
    ]
    code = 0
    for tokens in arguments.tile or (None,):
        with forced_tile(tokens):
            code |= gemm.run(
                cases,
                peers=() if arguments.no_peer else ("torch",),
                repeats=arguments.repeats,
                l2_flush=arguments.l2_flush,
                device_type=arguments.device,
                json_file=arguments.json,
            )
    return code


def _bench_quant(arguments: argparse.Namespace) -> int:
    import torch

    from moe_layer.benchmarks import quant
    from moe_layer.benchmarks.harness import Options
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
    return quant.run(list(cases), options=options, device_type=arguments.device, json_file=arguments.json)


def _compile(arguments: argparse.Namespace) -> int:
    from moe_layer import precompile
    from moe_layer.benchmarks.shapes import get_shape
    from moe_layer.cli import OK, print_json
    from moe_layer.errors import ConfigError

    for name in arguments.ids:
        if name not in precompile.ID_BYTES:
            raise ConfigError(f"unknown id dtype {name!r}; known: {', '.join(precompile.ID_BYTES)}")
    shapes = [get_shape(name) for name in arguments.models]
    archs = precompile.architectures(arguments.arch)
    work = precompile.families(shapes, arguments.ranks, archs, arguments.ids, fp8_combine=arguments.fp8_combine)
    work += precompile.stage_families(shapes, arguments.ranks, archs)
    work += precompile.quantizer_families(shapes, archs)
    work += precompile.router_families(arguments.models, archs)
    report = precompile.run(work, progress=not arguments.json)
    if arguments.json:
        print_json(report)
    else:
        precompile.print_report(report)
    return OK
