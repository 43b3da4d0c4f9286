"""Results: nested dicts of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def flat_result(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested result as a flat dict `{"env_runners/episode_return_mean": ...}`, without the config."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            if key != "config" or prefix:
                flat |= flat_result(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def merge_nested(result: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add nested values to a nested result; a value replaces the value of the same key."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            merge_nested(result[key], value)
        else:
            result[key] = value


def evaluated_return(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the mean return of the latest evaluation round and its 95% interval as texts; `None` without a round."""
    found = result.get("evaluation", {}).get("env_runners", {})
    mean, low, high = (
        found.get(f"episode_return_{name}", math.nan) for name in ("mean", "interval_low", "interval_high")
    )
    interval = "none: too few episodes" if math.isnan(low) else f"{low:,.1f} .. {high:,.1f}"
    return None if math.isnan(mean) else (f"{mean:,.1f}", interval)


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
