"""Figures of a search: its trials over time, their values by each setting, and what mattered."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from corral.metrics.summary import show_number
from corral.report.figures import COLORS, Figure, base_layout, legend_height, numbers, plain_text, wrapped
from corral.report.searches import MAX_TRIALS, SearchRecord
from corral.report.sections import FigureBlock, Section

SYMBOLS = {"complete": "circle", "pruned": "x-thin-open"}


def search_section(record: SearchRecord) -> Section:
    """Return the section of a search."""
    slices = tuple(_slice_figure(record, path) for path in record.parameters)
    wide = (_history_figure(record), *((_importance_figure(record),) if record.importances else ()))
    blocks = (FigureBlock("", wide), FigureBlock("Values by setting", slices))
    is_empty = not record.with_value(*SYMBOLS)
    return Section(f"Search in {record.path.name}", _note(record), () if is_empty else blocks)


def _note(record: SearchRecord) -> str:
    counts = Counter(trial["state"] for trial in record.trials)
    note = f"Trials: {', '.join(f'{count} {state}' for state, count in counts.items()) or 'none yet'}."
    if not (best := record.best()):
        return f"{note} No trial is complete."
    values = ", ".join(f"{path} {_shown(value)}" for path, value in best[0]["values"].items())
    note += f" The best is trial {best[0]['number']} with {record.metric} {_shown(best[0]['value'])}: {values}."
    if len(best) > MAX_TRIALS:
        note += f" The runs below belong to the {MAX_TRIALS} best trials."
    return note


def _history_figure(record: SearchRecord) -> Figure:
    traces = [_points(record, state, [trial["number"] for trial in record.with_value(state)]) for state in SYMBOLS]
    choose = max if record.mode == "max" else min
    complete = record.with_value("complete")
    values = [float(trial["value"]) for trial in complete]
    best = [choose(values[: place + 1]) for place in range(len(values))]
    line = {"type": "scatter", "mode": "lines", "name": "best so far", "line": {"color": COLORS[1], "shape": "hv"}}
    traces.append(line | {"x": [trial["number"] for trial in complete], "y": numbers(best), "showlegend": True})
    return _figure(traces, "Trials", "trial", record)


def _slice_figure(record: SearchRecord, path: str) -> Figure:
    [(kind, _)] = record.parameters[path].items()
    traces = []
    for state in SYMBOLS:
        found = [trial["values"].get(path) for trial in record.with_value(state)]
        traces.append(_points(record, state, [_shown(value) for value in found] if kind == "choice" else found))
    figure = _figure(traces, path, path, record)
    figure["layout"]["xaxis"]["type"] = "category" if kind == "choice" else "log" if "log" in kind else "linear"
    return figure


def _importance_figure(record: SearchRecord) -> Figure:
    shares = record.importances
    bar = {"type": "bar", "orientation": "h", "y": [plain_text(path) for path in shares], "showlegend": False}
    bar |= {"x": numbers(100 * share for share in shares.values()), "marker": {"color": COLORS[0]}}
    layout = base_layout("What makes trials good")
    layout["xaxis"] |= {"ticksuffix": "%", "range": [0, 100]}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    return {"data": [bar | {"hovertemplate": "%{y}: %{x:.0f}%<extra></extra>"}], "layout": layout}


def _points(record: SearchRecord, state: str, x: list[Any]) -> dict[str, Any]:
    """Return the trials in a state as points."""
    trials = record.with_value(state)
    texts = [f"trial {trial['number']}<br>{_settings_of(trial)}" for trial in trials]
    marker = {"symbol": SYMBOLS[state], "size": 8, "color": COLORS[0] if state == "complete" else COLORS[7]}
    trace = {"type": "scatter", "mode": "markers", "name": state, "marker": marker, "showlegend": bool(trials)}
    y = numbers(trial["value"] for trial in trials)
    return trace | {"x": x, "y": y, "text": texts, "hovertemplate": "%{y:.5g}, %{text}<extra></extra>"}


def _settings_of(trial: dict[str, Any]) -> str:
    return "<br>".join(plain_text(f"{path}: {_shown(value)}") for path, value in trial["values"].items())


def _figure(traces: list[dict[str, Any]], title: str, x_title: str, record: SearchRecord) -> Figure:
    layout = base_layout(title)
    layout["xaxis"] |= {"title": {"text": wrapped(x_title)}, "exponentformat": "power"}
    layout["yaxis"] |= {"title": {"text": wrapped(record.metric.rpartition("/")[2])}}
    layout["height"] += legend_height([trace["name"] for trace in traces if trace["showlegend"]])
    return {"data": traces, "layout": layout}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return show_number(value, num_digits=4)
    return value if isinstance(value, str) else json.dumps(value)
