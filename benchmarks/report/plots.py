"""Plots of a report as SVG text, by matplotlib (extra ``bench``)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from moe_layer.benchmarks.report.pieces import Plot, Series
from moe_layer.errors import ConfigError

# Okabe and Ito's colours, which colour-blind readers tell apart, without yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b5b5b", "#8c564b")
MARKERS = "osD^v<>P"
SIZE = (6.4, 3.9)  # inches


def svg(plot: Plot, name: str) -> str:
    """An ``<svg>`` element.

    Args:
        plot: what to draw.
        name: of this plot in its page; ids inside the element start with it, so that several share a page.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'moe-layer[bench]', or leave --html away") from None
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        {"lines": _lines, "speedup": _speedup, "stack": _stack}[plot.kind](axes, plot)
        figure.suptitle(plot.title, fontsize=10)
        axes.set_ylabel(plot.y_label)
        axes.set_xlabel(plot.x_label)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Ids of several figures must not meet; matplotlib numbers each from one.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def _ticks(axes: Any, series: Sequence[Series]) -> None:
    """The measured values, and no others; every second where they are many."""
    values = sorted({x for one in series for x in one.x})
    shown = values if len(values) <= 9 else values[:: -(-len(values) // 9)]
    axes.set_xticks(shown, [f"{x:g}" for x in shown])
    axes.minorticks_off()


def _draw(axes: Any, series: Sequence[Series]) -> None:
    solid = [one for one in series if not one.floor]
    for i, one in enumerate(solid):
        axes.plot(one.x, one.y, color=COLOURS[i % 8], marker=MARKERS[i % 8], ms=4, lw=1.5, label=one.label)
    dashed = [one for one in series if one.floor]
    for i, one in enumerate(dashed):
        colour = COLOURS[i % 8] if len(dashed) == len(solid) else "#404040"
        axes.plot(one.x, one.y, color=colour, ls="--", lw=1.2, label=one.label)
    axes.grid(True, which="major", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)


def _lines(axes: Any, plot: Plot) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _draw(axes, plot.series)
    _ticks(axes, plot.series)
    axes.yaxis.set_major_formatter("{x:g}")
    values = [y for one in plot.series for y in one.y]
    if values and max(values) < 20 * min(values):  # decades alone would leave one label or none
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)


def _speedup(axes: Any, plot: Plot) -> None:
    axes.set_xscale("log", base=2)
    _draw(axes, plot.series)
    axes.axhline(1.0, color="#404040", lw=0.8)
    axes.set_ylim(bottom=0)
    _ticks(axes, plot.series)


def _stack(axes: Any, plot: Plot) -> None:
    labels = [f"{x:g}" for x in plot.series[0].x]
    total = [sum(one.y[i] for one in plot.series) or 1.0 for i in range(len(labels))]
    left = [0.0] * len(labels)
    for i, one in enumerate(plot.series):
        part = [100 * y / whole for y, whole in zip(one.y, total)]
        axes.barh(labels, part, left=left, color=COLOURS[i % 8], label=one.label, hatch="//" if i >= 8 else None)
        left = [a + b for a, b in zip(left, part)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
