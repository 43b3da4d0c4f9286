"""Figures of a search: its trials over time, their values by each setting, and what mattered."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from corral.core.metrics.summary import show_number
from corral.tools.report.figures import COLORS, Figure, base_layout, legend_height, numbers, plain_text, wrapped
from corral.tools.report.searches import MAX_TRIALS, SearchFiles
from corral.tools.report.sections import FigureBlock, Section

SYMBOLS = {"complete": "circle", "pruned": "x-thin-open"}


def search_section(search: SearchFiles) -> Section:
    """Return the section of a search."""
    slices = tuple(_slice_figure(search, path) for path in search.parameters)
    wide = (_history_figure(search), *((_importance_figure(search),) if search.importances else ()))
    blocks = (FigureBlock("", wide), FigureBlock("Values by setting", slices))
    is_empty = not search.with_value(*SYMBOLS)
    return Section(f"Search in {search.path.name}", _note(search), () if is_empty else blocks)


def _note(search: SearchFiles) -> str:
    counts = Counter(trial["state"] for trial in search.trials)
    note = f"Trials: {', '.join(f'{count} {state}' for state, count in counts.items()) or 'none yet'}."
    if not (best := search.best()):
        return f"{note} No trial is complete."
    values = ", ".join(f"{path} {_shown(value)}" for path, value in best[0]["values"].items())
    note += f" The best is trial {best[0]['number']} with {search.metric} {_shown(best[0]['value'])}: {values}."
    if len(best) > MAX_TRIALS:
        note += f" The runs below belong to the {MAX_TRIALS} best trials."
    return note


def _history_figure(search: SearchFiles) -> Figure:
    traces = [_points(search, state, [trial["number"] for trial in search.with_value(state)]) for state in SYMBOLS]
    choose = max if search.mode == "max" else min
    complete = search.with_value("complete")
    values = [float(trial["value"]) for trial in complete]
    best = [choose(values[: place + 1]) for place in range(len(values))]
    line = {"type": "scatter", "mode": "lines", "name": "best so far", "line": {"color": COLORS[1], "shape": "hv"}}
    traces.append(line | {"x": [trial["number"] for trial in complete], "y": numbers(best), "showlegend": True})
    return _figure(traces, "Trials", "trial", search)


def _slice_figure(search: SearchFiles, path: str) -> Figure:
    [(kind, _)] = search.parameters[path].items()
    traces = []
    for state in SYMBOLS:
        found = [trial["values"].get(path) for trial in search.with_value(state)]
        traces.append(_points(search, state, [_shown(value) for value in found] if kind == "choice" else found))
    figure = _figure(traces, path, path, search)
    figure["layout"]["xaxis"]["type"] = "category" if kind == "choice" else "log" if "log" in kind else "linear"
    return figure


def _importance_figure(search: SearchFiles) -> Figure:
    shares = search.importances
    bar = {"type": "bar", "orientation": "h", "y": [plain_text(path) for path in shares], "showlegend": False}
    bar |= {"x": numbers(100 * share for share in shares.values()), "marker": {"color": COLORS[0]}}
    layout = base_layout("What makes trials good")
    layout["xaxis"] |= {"ticksuffix": "%", "range": [0, 100]}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return {"data": [bar | {"hovertemplate": "%{y}: %{x:.0f}%<extra></extra>"}], "layout": layout}


def _points(search: SearchFiles, state: str, x: list[Any]) -> dict[str, Any]:
    """Return the trials in a state as points."""
    trials = search.with_value(state)
    texts = [f"trial {trial['number']}<br>{_settings_of(trial)}" for trial in trials]
    marker = {"symbol": SYMBOLS[state], "size": 8, "color": COLORS[0] if state == "complete" else COLORS[7]}
    trace = {"type": "scatter", "mode": "markers", "name": state, "marker": marker, "showlegend": bool(trials)}
    y = numbers(trial["value"] for trial in trials)
    return trace | {"x": x, "y": y, "text": texts, "hovertemplate": "%{y:.5g}, %{text}<extra></extra>"}


def _settings_of(trial: dict[str, Any]) -> str:
    return "<br>".join(plain_text(f"{path}: {_shown(value)}") for path, value in trial["values"].items())


def _figure(traces: list[dict[str, Any]], title: str, x_title: str, search: SearchFiles) -> Figure:
    layout = base_layout(title)
    layout["xaxis"] |= {"title": {"text": wrapped(x_title)}, "exponentformat": "power"}
    layout["yaxis"] |= {"title": {"text": wrapped(search.metric.rpartition("/")[2])}}
    layout["height"] += legend_height([trace["name"] for trace in traces if trace["showlegend"]])
    return {"data": traces, "layout": layout}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return show_number(value, num_digits=4)
    return value if isinstance(value, str) else json.dumps(value)
