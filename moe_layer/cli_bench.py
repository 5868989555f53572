"""``moe-layer bench``: its kinds are in files of their own."""

from __future__ import annotations

import argparse
from typing import Any

from moe_layer import cli_a2a, cli_gemm, cli_layer, cli_load, cli_memory, cli_quant
from moe_layer.cli_types import RAW, USER_ERROR

BENCH = """\
Measures this machine. Every result is a JSON line with the machine, versions and commit that it belongs to;
`moe-layer report` turns them into a page. With --compare, the cases of earlier results are measured again, or another
file's are taken, and set beside them."""

BENCH_EXAMPLES = """\
examples:
  moe-layer bench a2a --help       the all-to-all: dispatch, combine, round trip
  moe-layer bench layer --help     whole layers, and the work of one rank alone
  moe-layer bench gemm --help      the experts' grouped products
  moe-layer bench quant --help     the quantizers
  moe-layer bench memory --help    bytes of the workspaces
  moe-layer bench load --help      loading a checkpoint
  moe-layer bench --compare old.json                   measure its cases again: ratios, and which are slower
  moe-layer bench --compare old.json --with new.json   compare two files, measure nothing"""


def add(commands: Any) -> None:
    """Add the command and its kinds to the subparsers of ``moe-layer``. Imports neither torch nor what they need."""
    bench = commands.add_parser(
        "bench", help="measure this machine", description=BENCH, epilog=BENCH_EXAMPLES, formatter_class=RAW
    )
    bench.add_argument("--compare", metavar="OLD.json", help="earlier results to measure again, or to compare with")
    bench.add_argument("--with", dest="new", metavar="NEW.json", help="results to compare, instead of measuring")
    bench.add_argument(
        "--threshold",
        type=float,
        default=0.03,
        metavar="X",
        help="a case is slower if all its repeats are, and its median by more than X (default: 0.03)",
    )
    bench.set_defaults(handler=lambda arguments: _compare(arguments) if arguments.compare else _help(bench))
    kinds = bench.add_subparsers(metavar="WHAT", parser_class=type(bench))
    for module in (cli_a2a, cli_layer, cli_gemm, cli_quant, cli_memory, cli_load):
        module.add(kinds)


def _help(bench: argparse.ArgumentParser) -> int:
    bench.print_help()
    return USER_ERROR


def _compare(arguments: argparse.Namespace) -> int:
    from moe_layer.benchmarks import compare

    return compare.run(arguments.compare, arguments.new, threshold=arguments.threshold)
