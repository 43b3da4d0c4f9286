"""The tables of a report: one row per experiment and run, faults, and settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import yaml

from corral.core.intervals import t_interval
from corral.core.metrics.summary import show_number
from corral.core.run_files import RESULTS_FILE
from corral.tools.report.comparison import show_share
from corral.tools.report.curves import X_AXES
from corral.tools.report.groups import SEED, Group, differing_settings
from corral.tools.report.result_columns import ITERATION
from corral.tools.report.run_log import NOT_ENDED
from corral.tools.report.runs import RunFiles
from corral.tools.report.sections import ENDS, EVALUATED, FAULTS, RETURN, count_of


@dataclass(frozen=True)
class SummaryRow:
    """A row of the first table.

    Attributes:
        label: Label of the group, or name of the run.
        color: Colour of the group's curves, for rows of groups; empty for runs of a group.
        cells: Texts of the other columns, in the order of `SUMMARY_COLUMNS`.
    """

    label: str
    color: str
    cells: tuple[str, ...]


SUMMARY_COLUMNS = ("seed", "iterations", "env steps", "seconds", "last return", "last evaluation", "state")


def summary_rows(groups: Sequence[Group], colors: Sequence[str]) -> list[SummaryRow]:
    """Return a row for each group, followed by a row for each run of groups with several runs.

    The returns of a group are the mean of the last returns of its runs, with the 95% interval over runs.

    Args:
        groups: The groups.
        colors: Colour of each group.
    """
    rows = []
    for group, color in zip(groups, colors, strict=True):
        if len(group.runs) == 1:
            run = group.runs[0]
            is_named = group.label == run.name or group.label.endswith(f" ({run.name})")
            label = group.label if is_named else f"{group.label} ({run.name})"
            rows.append(SummaryRow(label, color, _run_cells(run)))
            continue
        rows.append(SummaryRow(group.label, color, _group_cells(group)))
        rows += [SummaryRow(run.name, "", _run_cells(run)) for run in group.runs]
    return rows


def _run_cells(run: RunFiles) -> tuple[str, ...]:
    evaluated = run.last(EVALUATED)
    low, high = (run.last(key) for key in ENDS)
    interval = f" [{_number(low)}, {_number(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
    return (
        _text(run.setting(*SEED.split("."))),
        _number(_iterations(run)),
        *(_number(run.last(key)) for key in X_AXES.values()),
        _number(run.last(RETURN)),
        f"{_number(evaluated)}{interval}",
        state_of(run),
    )


def _group_cells(group: Group) -> tuple[str, ...]:
    means = []
    for key in (RETURN, EVALUATED):
        values = [run.last(key) for run in group.runs]
        low, high = (float(end) for end in t_interval(values))
        mean = float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
        interval = f" [{_number(low)}, {_number(high)}]" if math.isfinite(low) else ""
        means.append(f"{_number(mean)}{interval}{show_share(values)}")
    steps, seconds = ([run.last(key) for run in group.runs] for key in X_AXES.values())
    iterations = _range([_iterations(run) for run in group.runs])
    return (f"{len(group.runs)} runs", iterations, _range(steps), _range(seconds), *means, "")


def _iterations(run: RunFiles) -> float:
    """Return the iterations of a run with those before the checkpoint that it began with; if unknown, its results."""
    last = run.last(ITERATION)
    return last if math.isfinite(last) else run.num_results


def state_of(run: RunFiles) -> str:
    """Return how a run ended, where `run.log` says it; if it has not ended, when it last wrote a result."""
    if run.log.ending != NOT_ENDED:
        return run.log.ending or "unknown: there is no run.log"
    try:
        written = datetime.fromtimestamp((run.path / RESULTS_FILE).stat().st_mtime)
    except OSError:
        return NOT_ENDED
    return f"{NOT_ENDED}; last result at {written:%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True)
class FaultRow:
    """Faults of a run.

    Attributes:
        run_name: Name of the run.
        counters: Text with the counters that are not 0.
        log_counts: Text with the number of warnings and errors in `run.log`.
        entries: The latest warnings and errors: time, level and text.
        problems: Files that are missing or damaged.
    """

    run_name: str
    counters: str
    log_counts: str
    entries: tuple[tuple[str, str, str], ...]
    problems: tuple[str, ...]


def fault_rows(runs: Sequence[RunFiles]) -> list[FaultRow]:
    """Return the faults of the runs that had any.

    Args:
        runs: The runs.
    """
    rows = []
    for run in runs:
        counted = [(key, count) for key in FAULTS if (count := count_of(run, key)) > 0]
        counters = ", ".join(f"{key.removeprefix('fault_tolerance/')}: {_number(value)}" for key, value in counted)
        if run.log.num_continued:
            counters += f"{', ' if counters else ''}continued: {run.log.num_continued}"
        log_counts = ", ".join(f"{level.lower()}: {count}" for level, count in run.log.counts)
        entries = tuple((entry.time, entry.level, entry.text) for entry in run.log.entries)
        if counters or log_counts or run.problems:
            rows.append(FaultRow(run.name, counters, log_counts, entries, run.problems))
    return rows


@dataclass(frozen=True)
class Settings:
    """The settings of all groups.

    Attributes:
        labels: Label of each group.
        differing: Value in each group of each setting that is not the same in all groups, by dotted path.
        configs: Settings of each group as YAML, without the seed if its runs have several.
    """

    labels: tuple[str, ...]
    differing: dict[str, list[str]]
    configs: tuple[str, ...]


def settings_of(groups: Sequence[Group]) -> Settings:
    """Return the settings of the groups, and which of them differ.

    Args:
        groups: The groups.
    """
    labels = tuple(group.label for group in groups)
    known = [group for group in groups if group.runs[0].config]
    differing = differing_settings(groups) if len(known) > 1 else {}
    return Settings(labels, differing, tuple(_yaml(group) for group in groups))


def _yaml(group: Group) -> str:
    config = group.runs[0].config
    if not config:
        return "The settings are not known: config.yaml is missing or damaged."
    if len(group.runs) > 1 and isinstance(config.get("debugging"), dict):
        seeds = [run.setting(*SEED.split(".")) for run in group.runs]
        config = config | {"debugging": config["debugging"] | {"seed": f"one of {seeds}"}}
    return yaml.safe_dump(config, sort_keys=False)


def _number(value: float) -> str:
    return show_number(value, num_digits=4) if math.isfinite(value) else "-"


def _range(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as text, or the only one."""
    found = sorted(float(value) for value in values if math.isfinite(value))
    if not found:
        return "-"
    low, high = _number(found[0]), _number(found[-1])
    return low if low == high else f"{low} to {high}"


def _text(value: object) -> str:
    return "-" if value is None else str(value)
