"""``moe-layer bench load``."""

from __future__ import annotations

import argparse
from typing import Any

from moe_layer.cli_types import RAW, names, positive

LOAD = """\
Loads one rank's share of a layer from a random checkpoint in a release layout, with the model's own expert shapes, and
sets time and memory beside copying the same tensors out of the files. Fresh processes, warm page cache. On a GPU 4-bit
weights are packed as the kernels read them. Exit code 1 if a limit is exceeded (see the module's docstring)."""

LOAD_EXAMPLES = """\
examples:
  moe-layer bench load                                      deepseek_v3, deepseek_v41, kimi_k3
  moe-layer bench load --release kimi_k25 --gib 4 --ranks 4 --device cuda --json load.json"""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    load = commands.add_parser(
        "load", help="loading a checkpoint", description=LOAD, epilog=LOAD_EXAMPLES, formatter_class=RAW
    )
    load.set_defaults(handler=_bench_load)
    load.add_argument("--release", type=names, default=(), metavar="NAME,…", help="layouts (default: three of them)")
    load.add_argument("--gib", type=float, default=1.5, metavar="X", help="size of all experts (default: 1.5)")
    load.add_argument("--ranks", type=positive, default=2, metavar="P", help="the last one loads (default: 2)")
    load.add_argument("--shards", type=positive, default=4, metavar="N", help="files (default: 4)")
    load.add_argument("--repeats", type=positive, default=9, metavar="N", help="runs of each (default: 9)")
    load.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to (default: cpu)")
    load.add_argument("--json", metavar="FILE", help="append a JSON line a case as it is measured; - for stdout")


def _bench_load(arguments: argparse.Namespace) -> int:
    from moe_layer.backend import resolve_device
    from moe_layer.benchmarks import show
    from moe_layer.benchmarks.load import DEFAULT_RELEASES, RELEASES, Case, LoadBench
    from moe_layer.benchmarks.report.resources import load_sections
    from moe_layer.errors import ConfigError

    kind = resolve_device(arguments.device).type
    for name in arguments.release:
        if name not in RELEASES:
            raise ConfigError(f"unknown release {name!r}; known: {', '.join(RELEASES)}")
    cases = [
        Case(name, arguments.gib, arguments.ranks, arguments.shards, kind, arguments.repeats)
        for name in arguments.release or DEFAULT_RELEASES
    ]
    with LoadBench(cases, kind) as bench:
        code, lines = show.run(bench, load_sections, json_file=arguments.json)
    return code or int(not all(line["results"]["within_limits"] for line in lines))
