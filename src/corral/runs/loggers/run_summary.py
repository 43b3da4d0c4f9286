"""Final numbers of runs, read from their directories, and their mean over runs that differ in the seed only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.comparisons import NO_ESTIMATE, estimate_iqm
from corral.core.intervals import t_interval
from corral.core.metrics.result import describe_faults, flat_result, without_early_means
from corral.core.run_files import RESULTS_FILE

TRAINED, EVALUATED = "env_runners/episode_return_mean", "evaluation/env_runners/episode_return_mean"
TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class RunNumbers:
    """The latest numbers of a run; a number that does not exist is NaN.

    Attributes:
        training_iteration: Number of iterations.
        num_env_steps: Number of env steps.
        time_s: Duration in seconds.
        trained_return: Mean return of the latest episodes of training.
        evaluated_return: Mean return of the latest evaluation round.
        faults: What failed while the run continued; see `describe_faults`.
    """

    training_iteration: float = math.nan
    num_env_steps: float = math.nan
    time_s: float = math.nan
    trained_return: float = math.nan
    evaluated_return: float = math.nan
    faults: str = ""


@dataclass(frozen=True)
class RunsSummary:
    """The final returns of runs that differ in the seed only; a number that these runs do not have is NaN.

    Attributes:
        metric: Name of the return in the result: of evaluation if all runs have one, else of training.
        returns: Final return of each run.
        mean: Mean of the returns.
        std: Standard deviation of the returns, with n - 1 in the denominator.
        interval_low: Lower end of the 95% confidence interval of the mean; see `t_interval`.
        interval_high: Upper end of the interval.
        iqm: Interquartile mean of the returns: without the lowest and the highest quarter.
        iqm_low: Lower end of its 95% bootstrap interval, from three runs on; see `corral.core.comparisons`.
        iqm_high: Upper end of this interval.
    """

    metric: str
    returns: list[float]
    mean: float
    std: float
    interval_low: float
    interval_high: float
    iqm: float
    iqm_low: float
    iqm_high: float


def summarize_runs(run_dirs: Sequence[Path]) -> RunsSummary:
    """Return the final returns of runs, with mean, deviation and 95% interval over the runs.

    Args:
        run_dirs: Directories of runs with `result.jsonl`. A run without a return makes mean and interval NaN.
    """
    return summarize_numbers([last_numbers(run_dir) for run_dir in run_dirs])


def summarize_numbers(numbers: Sequence[RunNumbers]) -> RunsSummary:
    """Return the final returns of runs, with mean, deviation and 95% interval over the runs; see `summarize_runs`."""
    evaluated = bool(numbers) and not any(math.isnan(run.evaluated_return) for run in numbers)
    returns = [run.evaluated_return if evaluated else run.trained_return for run in numbers]
    low, high = t_interval(returns if all(map(math.isfinite, returns)) else [])
    iqm = estimate_iqm([returns]) if all(map(math.isfinite, returns)) else NO_ESTIMATE
    return RunsSummary(
        metric=EVALUATED if evaluated else TRAINED,
        returns=returns,
        mean=float(np.mean(returns)) if returns else math.nan,
        std=float(np.std(returns, ddof=1)) if len(returns) > 1 else math.nan,
        interval_low=float(low),
        interval_high=float(high),
        iqm=iqm.value,
        iqm_low=iqm.low,
        iqm_high=iqm.high,
    )


def last_numbers(run_dir: Path) -> RunNumbers:
    """Return the numbers of the last result of a run, which may still be running, without early means."""
    result = _last_result(run_dir / RESULTS_FILE)
    flat = flat_result(without_early_means(result))

    def number(name: str) -> float:
        value = flat.get(name)
        return math.nan if value is None else float(value)

    return RunNumbers(
        training_iteration=number("training_iteration"),
        num_env_steps=number("num_env_steps_sampled_lifetime"),
        time_s=number("time_total_s"),
        trained_return=number(TRAINED),
        evaluated_return=number(EVALUATED),
        faults=describe_faults(result),
    )


def _last_result(path: Path) -> dict[str, Any]:
    return next(iter(latest_results(path, 1)), {})


def latest_results(path: Path, number: int) -> list[dict[str, Any]]:
    """Return the last whole lines of a file of JSON lines that are objects, in their order.

    Args:
        path: The file; one that cannot be read has no lines.
        number: Number of lines; fewer are returned if the file has no more.
    """
    try:
        with path.open("rb") as file:
            size, num_bytes = file.seek(0, 2), TAIL_BYTES
            while True:
                file.seek(max(0, size - num_bytes))
                found = _last_objects(file.read(), number)
                if len(found) == number or num_bytes >= size:
                    return found
                num_bytes *= 2  # the lines are longer
    except OSError:
        return []


def _last_objects(text: bytes, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in reversed(text.splitlines(keepends=True)):
        if not line.endswith(b"\n"):  # it is being written
            continue
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.insert(0, value)
        if len(found) == number:
            break
    return found
