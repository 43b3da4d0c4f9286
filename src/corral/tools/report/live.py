"""What a run does now, read from the ends of its files: for the page that follows a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.core.metrics.named_number import always_grows, find_value
from corral.core.metrics.result import describe_faults, evaluated_return, flat_result, without_early_means
from corral.core.metrics.summary import show_number
from corral.core.metrics.time_left import seconds_left, show_duration
from corral.core.run_files import RESULTS_FILE
from corral.runs.loggers.run import CONFIG_FILE
from corral.runs.loggers.run_summary import latest_results
from corral.tools.report.run_log import NOT_ENDED, read_log
from corral.tools.report.runs import read_config

NUM_RESULTS = 40
"""Latest results from which the speed of a run is taken."""

COLUMNS = (
    "state",
    "iterations",
    "env steps",
    "steps/s",
    "return",
    "evaluation",
    "time left",
    "lag",
    "bottleneck",
    "faults",
    "latest warning",
)


def live_row(run_dir: Path) -> dict[str, str]:
    """Return the present numbers of a run as texts by column, `"-"` where there is none.

    Args:
        run_dir: Directory of the run, whose files may be missing, damaged or in writing.
    """
    log, results = read_log(run_dir / "run.log", []), latest_results(run_dir / RESULTS_FILE, NUM_RESULTS)
    row = dict.fromkeys(COLUMNS, "-")
    state = log.ending or "unknown: there is no run.log"
    row["state"] = "runs" if state == NOT_ENDED else state
    if log.entries:
        row["latest warning"] = f"{log.entries[-1].time} {log.entries[-1].text.partition(chr(10))[0]}"
    if not results:
        return row
    flats = [flat_result(without_early_means(result)) for result in results]
    last, evaluated = flats[-1], evaluated_return(_with_nan(results[-1]))
    row["iterations"] = _number(last.get("training_iteration"))
    row["env steps"] = _number(last.get("num_env_steps_sampled_lifetime"))
    row["steps/s"] = _number(_speed(flats))
    row["return"] = _number(find_value(last, "episode_return_mean"))
    row["evaluation"] = "-" if evaluated is None else f"{evaluated[0]} [{evaluated[1]}]"
    row["time left"] = _time_left(flats, read_config(run_dir / CONFIG_FILE, [])) if state == NOT_ENDED else "-"
    row["lag"] = _number(last.get("runner_group/lag_mean"))
    row["bottleneck"] = str(last.get("bottleneck/part") or "-")
    row["faults"] = describe_faults(results[-1]) or "-"
    return row


def _with_nan(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result of a file with NaN where JSON has null."""
    return {
        key: _with_nan(value) if isinstance(value, Mapping) else float("nan") if value is None else value
        for key, value in result.items()
    }


def _number(value: Any) -> str:
    return show_number(value, num_digits=4) if isinstance(value, (int, float)) and value == value else "-"


def _speed(flats: list[dict[str, Any]]) -> float | None:
    """Return the env steps per second between the first and the last of some results; `None` if it is not known."""
    points = [(flat.get("time_total_s"), flat.get("num_env_steps_sampled_lifetime")) for flat in flats]
    known = [(time_s, steps) for time_s, steps in points if time_s is not None and steps is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return float((known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]))


def _time_left(flats: list[dict[str, Any]], config: Mapping[str, Any]) -> str:
    """Return how long the run will take to the first of its stop criteria that count iterations, steps or seconds."""
    stop = config.get("stop")
    found = []
    for name, limit in (stop if isinstance(stop, Mapping) else {}).items():
        points = [(flat.get("time_total_s"), find_value(flat, name)) for flat in flats]
        known = [(time_s, value) for time_s, value in points if time_s is not None and value is not None]
        if known and isinstance(limit, (int, float)) and always_grows(name):
            left_s = seconds_left(limit, *zip(*known, strict=True))
            found += [] if left_s is None else [(left_s, name)]
    left_s, name = min(found, default=(0.0, ""))
    return f"{show_duration(left_s)} to {name}" if name else "-"
