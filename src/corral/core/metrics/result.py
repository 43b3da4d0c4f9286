"""Results: nested dicts of numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

EARLY_MEANS = "early_means"
"""Key of a result that lists the names of its early means; see `without_early_means`."""

NO_IMPROVEMENT = {"best_episode_return_mean": math.nan, "num_rounds_without_improvement": 0}
"""The best mean return of the rounds so far, and how many rounds there were since, before the first round."""


def flat_result(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested result as a flat dict `{"env_runners/episode_return_mean": ...}`.

    It has no config, and no list of early means.
    """
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, (dict, Mapping)):  # most are dicts, which Python tells at once
            if key != "config" or prefix:
                flat |= flat_result(value, f"{prefix}{key}/")
        elif prefix or key != EARLY_MEANS:
            flat[f"{prefix}{key}"] = value
    return flat


def without_early_means(result: Mapping[str, Any]) -> Any:
    """Return a result to decide by: NaN is in place of its early means. It is the result itself if there are none.

    Early means are statistics of few training episodes, of which short ones are too many, because longer ones have not
    ended yet. `result["early_means"]` names them; see docs/metrics.md.
    """
    names = frozenset(result.get(EARLY_MEANS) or ())
    return {**_hidden(result, names, ""), EARLY_MEANS: []} if names else result


def _hidden(values: Mapping[str, Any], names: Collection[str], prefix: str) -> dict[str, Any]:
    return {
        key: _hidden(value, names, f"{prefix}{key}/")
        if isinstance(value, Mapping)
        else math.nan
        if f"{prefix}{key}" in names
        else value
        for key, value in values.items()
    }


def merge_nested(result: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add nested values to a nested result; a value replaces the value of the same key."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            merge_nested(result[key], value)
        else:
            result[key] = value


def describe_return(result: Mapping[str, Any]) -> str:
    """Return the mean return of training episodes as text, or why there is none; empty where nothing is sampled."""
    episodes = result["env_runners"]
    if not math.isnan(mean := episodes["episode_return_mean"]):
        return f"mean return {mean:.1f}"
    if not episodes.get("num_env_steps_sampled_lifetime", 0) > 0:
        return ""
    return "mean return nan" if episodes.get("num_episodes_lifetime", 0) > 0 else "no episode has ended yet"


def evaluated_return(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the mean return of the latest evaluation round and its 95% interval as texts; `None` without a round."""
    found = result.get("evaluation", {}).get("env_runners", {})
    mean, low, high = (
        found.get(f"episode_return_{name}", math.nan) for name in ("mean", "interval_low", "interval_high")
    )
    interval = "none: too few episodes" if math.isnan(low) else f"{low:.1f} .. {high:.1f}"
    return None if math.isnan(mean) else (f"{mean:.1f}", interval)


def describe_faults(result: Mapping[str, Any]) -> str:
    """Return what failed so far while the run continued, also in evaluation, as text for people; empty for nothing."""
    parts = [result.get("fault_tolerance", {}), result.get("evaluation", {})]
    kinds = {
        "runner restart": "num_remote_worker_restarts",
        "sub-env restart": "num_sub_environment_restarts",
        "callback error": "num_callback_errors",
    }
    counts = {kind: int(np.nansum([part.get(key) or 0 for part in parts])) for kind, key in kinds.items()}
    failures = [
        max(0, (part.get("num_env_runner_failures") or 0) - (part.get(kinds["runner restart"]) or 0)) for part in parts
    ]
    counts = {"runner failure": int(np.nansum(failures)), **counts}  # those that no restart followed
    found = [f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in counts.items() if count]
    evaluation = parts[1]
    state = next((name for name in ("skipped", "truncated") if evaluation.get(name)), None)
    return ", ".join([*found, *([] if state is None else [f"the latest evaluation was {state}"])])


def plain_numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts of a nested result in plain types, without the config, arrays and lists."""
    plain: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            if key != "config":
                plain[str(key)] = plain_numbers(value)
        elif isinstance(value, (np.bool_, np.integer, np.floating)):
            plain[str(key)] = value.item()
        elif isinstance(value, (bool, int, float, str)):
            plain[str(key)] = value
    return plain
