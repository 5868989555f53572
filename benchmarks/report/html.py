"""A report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from moe_layer.benchmarks.report.pieces import MISSING, Section, Table
from moe_layer.benchmarks.report.plots import svg

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --wash: #f6f8fa; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 0; }
main { max-width: 82rem; margin: 0 auto; padding: 1.5rem; }
h1 { margin: 0 0 .25rem; font-size: 1.7rem; }
h2 { margin: 2.5rem 0 .5rem; padding-top: 1rem; font-size: 1.25rem; border-top: 1px solid var(--line); }
h3 { margin: 1.75rem 0 .5rem; font-size: 1.05rem; }
p { max-width: 75ch; margin: .4rem 0; }
.lead, .note, figcaption, caption { color: var(--soft); }
nav ul { margin: .5rem 0; padding: 0; list-style: none; columns: 30rem; }
nav .level1 { padding-left: 1.25rem; font-size: .93rem; }
nav a { color: #0757a0; text-decoration: none; }
nav a:hover { text-decoration: underline; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr));
  gap: 1rem; margin: 1rem 0; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; padding: .3rem 0; caption-side: top; white-space: nowrap; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { background: var(--wash); border-bottom: 2px solid var(--line); vertical-align: bottom; }
tbody tr:hover { background: var(--wash); }
.words { text-align: left; }
td.none { color: var(--soft); }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        title: its heading.
        lead: one paragraph below it.
        sections: in order.

    Raises:
        ConfigError: there are plots, and matplotlib is not installed.
    """
    contents = "\n".join(
        f'<li class="level{s.level}"><a href="#s{i}">{_inline(s.title)}</a></li>' for i, s in enumerate(sections)
    )
    body = "\n".join(_section(i, section) for i, section in enumerate(sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
<p class="lead">{_inline(lead)}</p>
<nav aria-label="Contents"><ul>
{contents}
</ul></nav>
{body}
</main>
</body>
</html>
"""


def _section(number: int, section: Section) -> str:
    parts = [f'<section id="s{number}">', f"<h{section.level + 2}>{_inline(section.title)}</h{section.level + 2}>"]
    parts += [f"<p>{_inline(text)}</p>" for text in section.text]
    if section.plots:
        figures = "\n".join(
            f'<figure role="img" aria-label="{html.escape(plot.title)}">{svg(plot, f"p{number}-{i}")}</figure>'
            for i, plot in enumerate(section.plots)
        )
        parts.append(f'<div class="plots">\n{figures}\n</div>')
    parts += [_table(table) for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        kinds = (["words"] if i in table.left else []) + (["none"] if text == MISSING else [])
        attribute = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{tag}{attribute}>{_inline(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(table.header))
    rows = "\n".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in table.rows)
    caption = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    note = f'<p class="note">{_inline(table.note)}</p>' if table.note else ""
    whole = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    return f'<div class="scroll">{whole}</div>{note}'


def _inline(text: str) -> str:
    """Escaped text, with ``**bold**`` and `` `code` ``."""
    text = html.escape(text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
