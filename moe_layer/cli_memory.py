"""``moe-layer bench memory``."""

from __future__ import annotations

import argparse
from typing import Any

from moe_layer.cli_types import RAW, many, names, positive

MEMORY = """\
Bytes of one rank's workspaces, region by region, beside the paper's count and an expert-major layout. Computed; nothing
is allocated, so that any machine tells it of any number of ranks."""

MEMORY_EXAMPLES = """\
examples:
  moe-layer bench memory                                    two models, 2 to 72 ranks, up to 4096 tokens each
  moe-layer bench memory --model kimi_k3:bf16 --ranks 8,64 --tokens 512"""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    memory = commands.add_parser(
        "memory", help="bytes of the workspaces", description=MEMORY, epilog=MEMORY_EXAMPLES, formatter_class=RAW
    )
    memory.set_defaults(handler=_bench_memory)
    memory.add_argument(
        "--model",
        type=names,
        default=("deepseek_v41", "kimi_k3"),
        metavar="NAME[:FORMAT],…",
        help="(default: deepseek_v41,kimi_k3)",
    )
    memory.add_argument("--ranks", type=many(positive), default=(2, 4, 8, 16, 72), metavar="P,…")
    memory.add_argument("--tokens", type=many(positive), default=(4096,), metavar="T,…", help="most on a rank")
    memory.add_argument("--json", metavar="FILE", help="append a JSON line a case; - for stdout")


def _bench_memory(arguments: argparse.Namespace) -> int:
    from moe_layer.benchmarks import show
    from moe_layer.benchmarks.memory import Case, MemoryBench
    from moe_layer.benchmarks.report.resources import memory_sections
    from moe_layer.benchmarks.shapes import get_shape

    cases = [
        Case(get_shape(name), ranks, tokens)
        for name in arguments.model
        for ranks in arguments.ranks
        for tokens in arguments.tokens
    ]
    with MemoryBench(cases) as bench:
        return show.run(bench, memory_sections, json_file=arguments.json)[0]
