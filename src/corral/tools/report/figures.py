"""Figures of a report as plain dicts, in the form that plotly.js draws."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from corral.tools.report.curves import X_TITLES, Column, Curve, curve_of, mean_curve, thinned
from corral.tools.report.groups import Group
from corral.tools.report.runs import RunFiles

Figure = dict[str, Any]
CurveOf = Callable[[RunFiles], Curve]

# Colours that readers with the common forms of colour blindness can tell apart (Okabe and Ito 2008), then others.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F", "#9467BD", "#BCBD22")
DASHES = ("solid", "dash", "dot", "dashdot")
FIGURE_WIDTH = 500
"""Width in pixels for which legends are made; the page may be wider."""

LINE_CHARS = 42
"""Characters per line of titles and names in legends, which fit a page of 400 pixels."""

MAX_POINTS = 600
"""Number of points above which a curve is thinned."""


def group_color(index: int) -> str:
    """Return the colour of a group, by its place."""
    return COLORS[index % len(COLORS)]


def group_dash(index: int) -> str:
    """Return the kind of line of a group, by its place: groups of the same colour have different lines."""
    return DASHES[index // len(COLORS) % len(DASHES)]


def line_figure(
    groups: Sequence[Group], curve: CurveOf, x_axis: str, title: str, *, show_runs: bool = False
) -> Figure | None:
    """Return a figure with a line for each group: the curve of its run, or the mean of its runs with the interval.

    Args:
        groups: The groups.
        curve: Returns the curve of a run.
        x_axis: `"steps"` or `"time"`.
        title: Title.
        show_runs: Whether each run of a group is a thin line, too.

    Returns:
        The figure; `None` if no run has a point.
    """
    traces: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        curves = [(run.name, found) for run in group.runs if (found := curve(run)).x.size]
        if len(curves) == 1:
            traces += _single_traces(group.label, index, *curves[0])
        elif curves:
            traces += _mean_traces(group.label, index, [found for _, found in curves])
            traces += _run_traces(group.label, index, curves) if show_runs else []
    return _figure(traces, title, x_axis) if traces else None


def _single_traces(label: str, index: int, run_name: str, curve: Curve) -> list[dict[str, Any]]:
    shown = thinned(curve, MAX_POINTS)
    mode = "lines" if len(shown.x) > 1 else "markers"
    trace = _trace(label, index, shown.x, shown.y, mode=mode, showlegend=True)
    return [trace | {"hovertemplate": f"%{{y:.5g}} at %{{x:,}}<extra>{plain_text(run_name)}</extra>"}]


def _mean_traces(label: str, index: int, curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return the mean with its interval; where it is the mean of a part of the curves, its line is dotted."""
    found = mean_curve(curves)
    traces = []
    if not np.isnan(found.low).all():
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        x = found.x
        traces += [
            _trace(label, index, x, found.low, **edge),
            _trace(label, index, x, found.high, **edge, fill="tonexty", fillcolor=_faint(group_color(index))),
        ]
    hover = "%{y:.5g} at %{x:,}<br>95%: %{customdata[0]:.5g} .. %{customdata[1]:.5g}<br>mean of %{customdata[2]} runs"
    details = [[*numbers(pair), int(n)] for *pair, n in zip(found.low, found.high, found.num_curves, strict=True)]
    hover_text = {"customdata": details, "hovertemplate": f"{hover}<extra>{plain_text(label)}</extra>"}
    is_whole = found.num_curves == len(curves)
    whole = np.where(is_whole, found.mean, np.nan)
    mode = "lines" if is_whole.sum() > 1 else "lines+markers"
    traces.append(_trace(label, index, found.x, whole, mode=mode, showlegend=True, **hover_text))
    # A point of the whole mean belongs to the dotted line too where the line leaves it.
    is_next = np.append(is_whole[1:], True) & np.insert(is_whole[:-1], 0, True)
    partial = np.where(is_whole & is_next, np.nan, found.mean)
    if not is_whole.all():
        dotted = {"color": group_color(index), "width": 1.5, "dash": "dot"}
        traces.append(_trace(label, index, found.x, partial, mode="lines", line=dotted, showlegend=False, **hover_text))
    return traces


def _run_traces(label: str, index: int, curves: Iterable[tuple[str, Curve]]) -> list[dict[str, Any]]:
    traces = []
    for name, curve in curves:
        shown = thinned(curve, MAX_POINTS // 2)
        line = {"color": group_color(index), "width": 0.7}
        trace = _trace(label, index, shown.x, shown.y, mode="lines", line=line, opacity=0.5, showlegend=False)
        traces.append(trace | {"hovertemplate": f"%{{y:.5g}} at %{{x:,}}<extra>{plain_text(name)}</extra>"})
    return traces


def evaluation_figure(group: Group, index: int, mean_key: str, ends: tuple[str, str], x_axis: str) -> Figure | None:
    """Return the evaluation returns of the runs of a group, each round with the interval that its result holds.

    Args:
        group: The group.
        index: Place of the group, for its colour.
        mean_key: Path of the mean in the result.
        ends: Paths of the lower and of the upper end of its interval.
        x_axis: `"steps"` or `"time"`.
    """
    traces = []
    for place, run in enumerate(group.runs):
        mean = curve_of(run, mean_key, x_axis)
        low, high = (_at(curve_of(run, key, x_axis), mean.x) for key in ends)
        bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
        bars |= {"array": numbers(high - mean.y), "arrayminus": numbers(mean.y - low)}
        if mean.x.size:
            color = group_color(index if len(group.runs) == 1 else place)
            line = {"color": color, "width": 1, "dash": group_dash(place)}
            trace = _trace(run.name, index, mean.x, mean.y, mode="lines+markers", line=line, showlegend=True)
            traces.append(trace | {"error_y": bars, "legendgroup": run.name, "marker": {"size": 5, "color": color}})
    return _figure(traces, group.label, x_axis) if traces else None


def _at(curve: Curve, x: Column) -> Column:
    """Return the values of a curve at some of its points; NaN at others."""
    found = dict(zip(curve.x.tolist(), curve.y.tolist(), strict=True))
    return np.array([found.get(point, math.nan) for point in x.tolist()], np.float64)


def _figure(traces: list[dict[str, Any]], title: str, x_axis: str) -> Figure:
    layout = base_layout(title)
    layout["xaxis"] |= {"title": {"text": X_TITLES[x_axis]}, "rangemode": "tozero"}
    layout["height"] += legend_height([trace["name"] for trace in traces if trace["showlegend"]])
    return {"data": traces, "layout": layout}


def legend_height(names: Sequence[str]) -> int:
    """Return the pixels that a legend below a figure takes, about; lines of names end with `<br>`."""
    lines = [name.split("<br>") for name in names]
    longest = max((len(line) for found in lines for line in found), default=0)
    per_row = max(1, FIGURE_WIDTH // (45 + 7 * longest))
    more_lines = sum(len(found) - 1 for found in lines)
    return 20 * math.ceil(len(names) / per_row) + 16 * more_lines


def base_layout(title: str) -> dict[str, Any]:
    """Return the layout that all figures share; the page adds the colours of its theme."""
    text = wrapped(title)
    more = 18 * text.count("<br>")
    return {
        "title": {"text": text, "font": {"size": 14}, "x": 0.01, "xanchor": "left"},
        "margin": {"l": 55, "r": 15, "t": 40 + more, "b": 45},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "xaxis": {"automargin": True},
        "yaxis": {"automargin": True},
        "hovermode": "closest",
        "height": 330 + more,
    }


def _trace(label: str, index: int, x: Column, y: Column, **settings: Any) -> dict[str, Any]:
    line = {"color": group_color(index), "width": 2, "dash": group_dash(index)}
    trace = {"type": "scatter", "name": wrapped(label), "legendgroup": label, "x": numbers(x), "y": numbers(y)}
    return trace | {"line": line, "marker": {"color": group_color(index)}} | settings


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def plain_text(text: str) -> str:
    """Return a text in which plotly.js sees no markup and no placeholder."""
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "% {")):
        text = text.replace(char, entity)
    return text


def wrapped(text: str) -> str:
    """Return a text as `plain_text` does, in lines that fit a narrow page."""
    return "<br>".join(map(plain_text, textwrap.wrap(text, LINE_CHARS))) or plain_text(text)


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers as JSON has them: `None` for NaN, and whole numbers or six significant digits."""
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
