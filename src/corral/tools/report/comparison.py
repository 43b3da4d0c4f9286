"""Experiments next to each other: what their runs reach, how soon, and how surely one is better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from corral.core.comparisons import MIN_RUNS, Estimate, estimate_improvement, estimate_iqm
from corral.core.metrics.summary import show_number
from corral.tools.report.curves import curve_of
from corral.tools.report.groups import Group, env_of
from corral.tools.report.runs import RunFiles
from corral.tools.report.sections import EVALUATED, RETURN


@dataclass(frozen=True)
class Comparison:
    """A table of the experiments in one env.

    Attributes:
        title: Title.
        columns: Titles of the columns after the first one, which is the label of an experiment.
        rows: Label, colour and the texts of the columns of each experiment.
        note: Sentences on the numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    note: str


def compare_groups(
    groups: Sequence[Group], colors: Sequence[str], threshold: float | None = None
) -> tuple[Comparison, ...]:
    """Return a table for each env with several runs.

    Args:
        groups: The experiments.
        colors: Colour of each experiment.
        threshold: Return of which the table says when it was reached; `None` is the one that Gymnasium has for the env.
    """
    envs = dict.fromkeys(env_of(group.runs[0]) for group in groups)
    found = []
    for env in envs:
        pairs = [(group, color) for group, color in zip(groups, colors, strict=True) if env_of(group.runs[0]) == env]
        if sum(len(group.runs) for group, _ in pairs) > 1:
            title = f"Comparison, {env or 'unknown env'}" if len(envs) > 1 else "Comparison"
            found.append(_table(title, pairs, _threshold_of(env) if threshold is None else threshold))
    return tuple(found)


def _threshold_of(env: str) -> float | None:
    from gymnasium.envs.registration import registry

    spec = registry.get(env)
    return None if spec is None else spec.reward_threshold


def _table(title: str, pairs: Sequence[tuple[Group, str]], threshold: float | None) -> Comparison:
    groups = [group for group, _ in pairs]
    runs = [run for group in groups for run in group.runs]
    key = EVALUATED if all(curve_of(run, EVALUATED, "steps").y.size for run in runs) else RETURN
    last, best = ([[_value(run, key, index) for run in group.runs] for group in groups] for index in (-1, None))
    columns = ["runs", "last return", "best return"]
    if threshold is not None:
        columns += [f"env steps to {show_number(threshold)}", f"seconds to {show_number(threshold)}"]
    if len(groups) > 1:
        columns.append(f"better than {groups[0].label}")
    rows = []
    for index, (group, color) in enumerate(pairs):
        cells = [str(len(group.runs)), *(_mean_of(values[index]) for values in (last, best))]
        if threshold is not None:
            cells += [_reached(group.runs, key, threshold, x_axis) for x_axis in ("steps", "time")]
        if len(groups) > 1:
            chance = estimate_improvement([last[index]], [last[0]])
            cells.append(_with_interval(chance) if index else "-")
        rows.append((group.label, color, tuple(cells)))
    return Comparison(title, tuple(columns), tuple(rows), _note(key, threshold, groups))


def _note(key: str, threshold: float | None, groups: Sequence[Group]) -> str:
    what = "the rounds of evaluation" if key == EVALUATED else "training, which explores"
    note = (
        f"Mean returns of {what}: interquartile means over runs, with 95% bootstrap intervals from {MIN_RUNS} runs on"
        " (Agarwal et al. 2021). Compare experiments by runs of the same length."
    )
    if threshold is not None:
        note += " When a return was reached is the median over runs; in brackets are the runs that reached it."
    if len(groups) > 1:
        note += (
            " The last column is the probability that a run ends with a higher return than a run of that experiment;"
            " an interval that holds 0.5 shows no difference."
        )
    return note


def _value(run: RunFiles, key: str, index: int | None) -> float:
    """Return a point of a curve by its place, or the largest one for `None`; NaN of a run without points."""
    values = curve_of(run, key, "steps").y
    if not values.size:
        return math.nan
    return float(values.max() if index is None else values[index])


def _reached(runs: Sequence[RunFiles], key: str, threshold: float, x_axis: str) -> str:
    curves = [curve_of(run, key, x_axis) for run in runs]
    firsts = [curve.x[curve.y >= threshold][:1] for curve in curves]
    found = [float(first[0]) if first.size else math.inf for first in firsts]
    num_reached = sum(map(math.isfinite, found))
    middle = float(np.median(found))
    text = show_number(middle, num_digits=4) if math.isfinite(middle) else "-"
    return text if num_reached == len(runs) else f"{text} ({num_reached} of {len(runs)})"


def _mean_of(values: Sequence[float]) -> str:
    return _with_interval(estimate_iqm([values])) + show_share(values)


def show_share(values: Sequence[float]) -> str:
    """Return how many of the runs have a value, as the end of a text; empty where all or none of them have one."""
    num_there = sum(map(math.isfinite, values))
    return f" ({num_there} of {len(values)})" if 0 < num_there < len(values) else ""


def _with_interval(found: Estimate) -> str:
    value, low, high = (show_number(number, num_digits=4) if math.isfinite(number) else "-" for number in found)
    return f"{value} [{low}, {high}]" if math.isfinite(found.low) else value
