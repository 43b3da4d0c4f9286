"""Searches as their directories hold them: the trials that `corral search` has written so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.core.run_files import SEARCH_FILE

MAX_TRIALS = 8
"""Number of trials of a search whose runs a report shows; the figures of the search show all trials."""


@dataclass(frozen=True)
class SearchFiles:
    """What the directory of a search holds.

    Attributes:
        path: Directory of the search.
        metric: Name of the number that is compared.
        mode: Whether the largest value is the best, `"max"`, or the smallest one, `"min"`.
        parameters: By the path of a setting, its range or its choices by the kind, such as `{"log": [1e-5, 1e-2]}`.
        importances: Share of each setting in how good trials are, by path.
        trials: Trials in the order of their numbers, each with `number`, `state`, `value` and `values`.
    """

    path: Path
    metric: str
    mode: str
    parameters: dict[str, dict[str, list[Any]]]
    importances: dict[str, float]
    trials: tuple[dict[str, Any], ...]

    def with_value(self, *states: str) -> list[dict[str, Any]]:
        """Return the trials in some states that have a value."""
        return [trial for trial in self.trials if trial["state"] in states and trial["value"] is not None]

    def best(self) -> list[dict[str, Any]]:
        """Return the complete trials, the best one first."""
        sign = -1.0 if self.mode == "max" else 1.0
        return sorted(self.with_value("complete"), key=lambda trial: sign * float(trial["value"]))


def read_search(path: Path) -> SearchFiles | None:
    """Return the search in a directory; `None` if there is none, or its file is damaged."""
    try:
        found = json.loads((path / SEARCH_FILE).read_text(encoding="utf-8"))
        names = ("metric", "mode", "parameters", "importances")
        trials = tuple({**trial, "number": int(trial["number"])} for trial in found["trials"])
        search = SearchFiles(path=path, trials=trials, **{name: found[name] for name in names})
        search.best()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return search


def find_searches(paths: Sequence[Path]) -> list[SearchFiles]:
    """Return the searches in directories, or in directories inside of them."""
    inside = [child for path in paths for child in (path, *sorted(path.iterdir() if path.is_dir() else ()))]
    found = {path.resolve(): search for path in inside if (search := read_search(path)) is not None}
    return [*found.values()]


def dirs_of_best(path: Path) -> list[Path]:
    """Return the directories of the best trials of a search; `[]` if it has no complete trial, or is none."""
    search = read_search(path)
    best = [] if search is None else search.best()[:MAX_TRIALS]
    return [trial for found in best if (trial := path / "trials" / f"{found['number']:04d}").is_dir()]
