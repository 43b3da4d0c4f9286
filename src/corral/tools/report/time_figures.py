"""Figures of where the time of runs went: the parts of their iterations, and the bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from corral.core.metrics.timers import PARTS
from corral.tools.report.curves import X_AXES, X_TITLES, Column, curve_of, mean_curve
from corral.tools.report.figures import Figure, base_layout, legend_height, numbers, plain_text
from corral.tools.report.groups import Group
from corral.tools.report.runs import RunFiles

ALL_PARTS = (*PARTS, "other")
PART_COLORS = dict(
    zip(
        ALL_PARTS,
        (
            *("#56B4E9", "#0072B2", "#8C564B", "#BCBD22", "#9467BD", "#E69F00"),
            *("#CC79A7", "#D55E00", "#17BECF", "#F0E442", "#009E73", "#999999"),
        ),
        strict=True,
    )
)
BINS = 200
"""Number of points at which the bottleneck is shown."""


def part_seconds(run: RunFiles) -> dict[str, float]:
    """Return the seconds that went into each part of the iterations of a run, of the parts that took time.

    Each share counts with the wall-clock seconds of its iteration.
    """
    iteration_s = run.numbers.get("timers/iteration_s", np.zeros(0))
    found = {}
    for part in ALL_PARTS:
        shares = run.numbers.get(f"timers/{part}_share", np.zeros(0))
        if len(shares) == len(iteration_s):
            found[part] = float(np.nansum(shares * iteration_s))
    return {part: seconds for part, seconds in found.items() if seconds > 0}


def totals_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Return a bar for each run: the share of each part in its time."""
    seconds = {run.name: found for run in runs if (found := part_seconds(run))}
    if not seconds:
        return None
    names = [*seconds]
    shown = [plain_text(name) for name in names]
    traces = []
    for part in ALL_PARTS:
        parts_s = [seconds[name].get(part, 0.0) for name in names]
        shares = [100 * part_s / sum(seconds[name].values()) for part_s, name in zip(parts_s, names, strict=True)]
        if any(parts_s):
            hover = f"{part}: %{{x:.1f}}% (%{{customdata:,.1f}} s)<extra>%{{y}}</extra>"
            bar = {"type": "bar", "orientation": "h", "name": part, "x": numbers(shares), "y": shown}
            color = {"color": PART_COLORS[part]}
            traces.append(bar | {"customdata": numbers(parts_s), "hovertemplate": hover, "marker": color})
    layout = base_layout("Share of each part in the time of the run")
    layout["xaxis"] |= {"ticksuffix": "%", "range": [0, 100]}
    # Names are categories, also if they are numbers; the first run is at the top.
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return {"data": traces, "layout": layout | {"barmode": "stack", **_height(len(names), traces)}}


def shares_figure(group: Group, x_axis: str) -> Figure | None:
    """Return the shares of the parts over training as stacked areas; of several runs, the mean shares."""
    traces: list[dict[str, Any]] = []
    for part in ALL_PARTS:
        found = mean_curve([curve_of(run, f"timers/{part}_share", x_axis) for run in group.runs])
        if found.x.size and np.nanmax(found.mean) > 0:
            trace: dict[str, Any] = {"type": "scatter", "mode": "lines", "name": part, "stackgroup": "parts"}
            trace["line"] = {"width": 0}
            # The only iteration began at 0: a single point has no area.
            x, y = (found.x, found.mean) if found.x.size > 1 else ([0.0, *found.x], [*found.mean, *found.mean])
            points = {"x": numbers(x), "y": numbers(100 * np.array(y)), "fillcolor": PART_COLORS[part]}
            traces.append(trace | points | {"hovertemplate": f"{part}: %{{y:.1f}}%<extra></extra>"})
    if not traces:
        return None
    layout = base_layout(group.label) | {"hovermode": "x unified"}
    layout["xaxis"] |= {"title": {"text": X_TITLES[x_axis]}}
    layout["yaxis"] |= {"ticksuffix": "%", "range": [0, 100]}
    layout["height"] += legend_height([trace["name"] for trace in traces])
    return {"data": traces, "layout": layout}


def bottleneck_figure(runs: Sequence[RunFiles], x_axis: str) -> Figure | None:
    """Return a row for each run, coloured by the part that took the most time at each point of training."""
    found = {run.name: _bottlenecks(run, x_axis) for run in runs}
    found = {name: pair for name, pair in found.items() if pair[0].size}
    if not found:
        return None
    grid = np.linspace(0.0, max(float(x[-1]) for x, _ in found.values()), BINS)
    rows = [_parts_at(grid, *pair) for pair in found.values()]
    codes = [[None if part is None else ALL_PARTS.index(part) for part in row] for row in rows]
    heat = {
        "type": "heatmap",
        "x": numbers(grid),
        "y": [plain_text(name) for name in found],
        "z": codes,
        "text": rows,
        "ygap": 2,
    }
    heat |= {"zmin": -0.5, "zmax": len(ALL_PARTS) - 0.5, "colorscale": _steps(), "showscale": False}
    heat |= {"hovertemplate": "%{text} at %{x:,}<extra>%{y}</extra>", "hoverongaps": False}
    occurring = [part for part in ALL_PARTS if any(part in row for row in rows)]
    # A heat map has no legend of its own.
    keys = [
        {"type": "scatter", "mode": "markers", "name": part, "x": [None], "y": [None], "showlegend": True}
        | {"marker": {"symbol": "square", "size": 12, "color": PART_COLORS[part]}}
        for part in occurring
    ]
    layout = base_layout("Part that takes the most time")
    layout["xaxis"] |= {"title": {"text": X_TITLES[x_axis]}}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return {"data": [heat, *keys], "layout": layout | _height(len(found), keys)}


def _bottlenecks(run: RunFiles, x_axis: str) -> tuple[Column, list[str]]:
    """Return the points of a run at which the bottleneck is known, by ascending x, and its part at each of them."""
    parts = run.texts.get("bottleneck/part", [])
    x = run.numbers.get(X_AXES[x_axis], np.full(len(parts), np.nan))
    known = [
        (float(point), part) for point, part in zip(x, parts, strict=False) if part in ALL_PARTS and not np.isnan(point)
    ]
    known.sort(key=lambda pair: pair[0])
    return np.array([point for point, _ in known]), [part for _, part in known]


def _parts_at(grid: Column, x: Column, parts: Sequence[str]) -> list[str | None]:
    """Return the bottleneck of the iteration in which each point is; `None` beyond the last iteration."""
    iterations = np.searchsorted(x, grid)
    return [parts[index] if index < len(parts) else None for index in iterations]


def _steps() -> list[list[Any]]:
    """Return a colour scale with one colour for each part."""
    width = 1 / len(ALL_PARTS)
    return [
        [round(edge, 6), PART_COLORS[part]]
        for place, part in enumerate(ALL_PARTS)
        for edge in (place * width, (place + 1) * width)
    ]


def _height(num_rows: int, traces: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {"height": 130 + 24 * num_rows + legend_height([trace["name"] for trace in traces])}
