"""``moe-layer report``: result files in, Markdown or one HTML page out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moe_layer.benchmarks.machine import describe
from moe_layer.benchmarks.records import Line, latest, read_lines
from moe_layer.benchmarks.report import a2a, gemm, html, layer, markdown, quant, resources
from moe_layer.benchmarks.report.pieces import Section

BEGIN, END = "<!-- begin: moe-layer report --write -->", "<!-- end -->"
NOTHING = "No results yet: `moe-layer bench … --json FILE` measures them.\n"
TITLE = "moe_layer: measurements"
OK, DIFFERS, USER_ERROR = 0, 1, 2
BUILDERS = {
    "layer": layer.sections,
    "a2a": a2a.sections,
    "gemm": gemm.sections,
    "quant": quant.sections,
    "memory": resources.memory_sections,
    "load": resources.load_sections,
}


def sections_of(lines: Sequence[Line]) -> list[Section]:
    """All sections, layers first."""
    current = latest(lines)
    return [
        section
        for kind, build in BUILDERS.items()
        for section in build([line for line in current if line["kind"] == kind])
    ]


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths``, and of folders the result files in them."""
    return [file for path in paths for file in (sorted(path.glob("*.json*")) if path.is_dir() else [path])]


def run(
    paths: Sequence[Path],
    *,
    html_file: Path | None = None,
    markdown_file: Path | None = None,
    write: Path | None = None,
    check: Path | None = None,
) -> int:
    """Render results.

    Args:
        paths: files of JSON lines, or folders of them.
        html_file, markdown_file: where to put a page of each kind.
        write: a page whose part between the markers is replaced.
        check: a page that must hold what ``write`` would put there.

    Returns:
        an exit code: 1 if a checked page differs, 2 if files cannot be read.
    """
    try:
        lines = read_lines(files_of(paths))
        sections = sections_of(lines)
        text = markdown.render(sections) if sections else NOTHING
        if html_file is not None:
            machines = ", ".join(dict.fromkeys(describe(line) for line in lines)) or "nothing measured yet"
            html_file.write_text(html.render(TITLE, machines, sections))
        if markdown_file is not None:
            markdown_file.write_text(text)
        for page in (write, check):
            if page is None:
                continue
            old = page.read_text()
            new = markdown.replace_between(old, BEGIN, END, text)
            if page == check and new != old:
                print(f"{page} is not what the results say; run moe-layer report --write {page}", file=sys.stderr)
                return DIFFERS
            if page == write:
                page.write_text(new)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except (KeyError, TypeError, AttributeError) as error:
        print(f"error: a result lacks something, or holds another type: {error!r}", file=sys.stderr)
        return USER_ERROR
    if html_file is None and markdown_file is None and write is None and check is None:
        print(text)
    return OK
