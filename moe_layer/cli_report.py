"""``moe-layer report``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_layer.cli_types import RAW

REPORT = """\
Turns results of `moe-layer bench … --json FILE` into tables and plots: Markdown on the screen or in a file, or one HTML
page that needs nothing beside itself. Of several lines for one case the latest counts."""

REPORT_EXAMPLES = """\
examples:
  moe-layer report results.json                          Markdown tables on the screen
  moe-layer report results.json --html report.html       a page with plots (needs matplotlib: extra "bench")
  moe-layer report folder more.json --markdown report.md
  moe-layer report folder --write docs/performance.md    replace the part between the page's markers"""


def add(commands: Any) -> None:
    """Add the command to a group of subparsers. Imports neither torch nor what the command needs."""
    report = commands.add_parser(
        "report", help="results as a page", description=REPORT, epilog=REPORT_EXAMPLES, formatter_class=RAW
    )
    report.set_defaults(handler=_report)
    report.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="files of JSON lines, or their folders"
    )
    report.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    report.add_argument("--markdown", type=Path, metavar="FILE", help="write Markdown")
    report.add_argument("--write", type=Path, metavar="PAGE", help="replace the part of a page between its markers")
    report.add_argument("--check", type=Path, metavar="PAGE", help="exit code 1 if --write would change the page")


def _report(arguments: argparse.Namespace) -> int:
    from moe_layer.benchmarks.report import page

    return page.run(
        arguments.results,
        html_file=arguments.html,
        markdown_file=arguments.markdown,
        write=arguments.write,
        check=arguments.check,
    )
