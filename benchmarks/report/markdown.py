"""A report as Markdown: headings and tables; plots are the HTML page's."""

from __future__ import annotations

from collections.abc import Sequence

from moe_layer.benchmarks.report.pieces import Section, Table


def render(sections: Sequence[Section], level: int = 3) -> str:
    """All sections, with headings of ``level``."""
    parts = []
    for section in sections:
        parts += [f"{'#' * (level + section.level)} {section.title}", ""]
        for text in section.text:
            parts += [text, ""]
        for table in section.tables:
            parts += [render_table(table), ""]
    return "\n".join(parts)


def render_table(table: Table) -> str:
    """One table, its caption above and its note below."""
    marks = ["---" if i in table.left else "---:" for i in range(len(table.header))]
    rows = [table.header, marks, *table.rows]
    lines = [table.caption, ""] if table.caption else []
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines + (["", table.note] if table.note else []))


def replace_between(page: str, begin: str, end: str, text: str) -> str:
    """``page`` with ``text`` between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the page has no '{begin}' … '{end}'")
    return f"{before}{begin}\n\n{text}\n{end}{after}"
