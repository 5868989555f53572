"""``moe-layer compile``."""

from __future__ import annotations

import argparse
from typing import Any

from moe_layer.cli_types import RAW, many, names, positive

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


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    compile_ = commands.add_parser(
        "compile",
        help="fill the kernel cache ahead of time",
        description=COMPILE,
        epilog=COMPILE_EXAMPLES,
        formatter_class=RAW,
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


def _compile(arguments: argparse.Namespace) -> int:
    from moe_layer import precompile, precompile_gemm
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
    work += precompile_gemm.gemm_families(arguments.models, arguments.ranks, archs)
    report = precompile.run(work, progress=not arguments.json)
    if arguments.json:
        print_json(report)
    else:
        precompile.print_report(report)
    return OK
