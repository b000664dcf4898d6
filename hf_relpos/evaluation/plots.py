"""Plots of a comparison as SVG; the same numbers give the same bytes."""

import io
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

# Text stays text, and nothing depends on the time.
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "hf_relpos", "font.family": "sans-serif", "font.size": 9}
COLOURS = [*matplotlib.colormaps["tab10"].colors]  # pyright: ignore[reportAttributeAccessIssue]
# Intervals of more lines than this would hide each other.
BANDS = 4
# Inches, so that text is still read where a phone shows a plot; and names beside each other in a legend.
WIDTH, COLUMNS = 5.2, 3
MARKERS, STYLES = "osD^vPX", ("-", "--", ":", "-.")

Interval = tuple[float, float | None, float | None]
Points = Sequence[tuple[float, float, float | None, float | None]]
"""Across, up, and the ends of the interval up, if there is one."""


def line_plot(lines: Mapping[str, Points], across: str, up: str, log: bool = True, order: Sequence[str] = ()) -> str:
    """Draw a line for each name, with its interval where lines are few.

    Args:
        lines: the points of each line.
        across, up: what the axes show, with the unit.
        log: whether the axis across is in powers of two.
        order: all names in their order; a name looks the same in every plot of the same order.
    """
    with matplotlib.rc_context(SETTINGS):
        figure, axes = _figure(len(lines))
        for (name, points), (colour, marker, style) in _looks(lines, order):
            x, y, low, high = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker=marker, linestyle=style, markersize=4, linewidth=1.2, label=_plain(name))
            if len(lines) <= BANDS and all(end is not None for end in (*low, *high)):
                axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        if log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(NullLocator())
        return _finish(figure, axes, across, up, len(lines))


def scatter_plot(points: Mapping[str, tuple[float, float]], across: str, up: str, order: Sequence[str] = ()) -> str:
    """Draw a named point for each name, which looks as in `line_plot`."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = _figure(len(points))
        for (name, (x, y)), (colour, marker, _) in _looks(points, order):
            axes.plot([x], [y], color=colour, marker=marker, linestyle="", label=_plain(name))
        return _finish(figure, axes, across, up, len(points))


def dot_plot(points: Mapping[str, Interval], across: str, lines: Mapping[str, float], order: Sequence[str] = ()) -> str:
    """Draw a row for each name, with its mean and its interval, the first on top.

    Args:
        points: mean and interval of each name.
        across: what the axis across shows, with the unit.
        lines: values of named vertical lines.
        order: all names in their order; a name has its colour of `line_plot`.
    """
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, 1.2 + 0.2 * len(points)), layout="constrained")
        axes = figure.add_subplot()
        looks = {name: look for (name, _), look in _looks(points, order)}
        for row, (name, (mean, low, high)) in enumerate(points.items()):
            colour, marker, _ = looks[name]
            axes.plot([mean], [row], color=colour, marker=marker, markersize=5)
            if low is not None and high is not None:
                axes.plot([low, high], [row, row], color=colour, linewidth=1.2)
        for (name, value), style in zip(lines.items(), STYLES[1:], strict=False):
            axes.axvline(value, color="black", linestyle=style, linewidth=1, label=_plain(name))
        axes.set_yticks(range(len(points)), [_plain(name) for name in points])
        axes.set_ylim(len(points) - 0.5, -0.5)  # the first on top
        return _finish(figure, axes, across, "", len(lines))


def _looks(drawn: Mapping[str, Any], order: Sequence[str]) -> list[tuple[tuple[str, Any], tuple[Any, str, str]]]:
    """Return what is drawn in its order, each with colour, marker and line style: seventy differ in colour and marker."""
    places = {name: place for place, name in enumerate(dict.fromkeys((*order, *drawn)))}
    return [
        (
            (name, drawn[name]),
            (COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)], STYLES[at // len(COLOURS) % len(STYLES)]),
        )
        for name, at in places.items()
        if name in drawn
    ]


def _plain(name: str) -> str:
    """Return a name whose dollar signs are no mathematics, and which is not hidden by a leading underscore."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _figure(names: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 3.1 + 0.18 * -(-names // COLUMNS)), layout="constrained")
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Axes, across: str, up: str, names: int) -> str:
    axes.set_xlabel(_plain(across))
    axes.set_ylabel(_plain(up))
    axes.grid(alpha=0.3)
    if names:
        figure.legend(loc="outside lower center", ncols=COLUMNS, fontsize=8, frameon=False)
    target = io.StringIO()
    undated: Any = {"Date": None}
    figure.savefig(target, format="svg", metadata=undated)
    text = target.getvalue()
    return text[text.index("<svg") :]
