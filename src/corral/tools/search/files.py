"""The files of a search: its experiment, its trials as JSON and as a table, and the settings of the best trial."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from corral.core.run_files import EXPERIMENT_FILE, SEARCH_FILE
from corral.errors import RunDirectoryError
from corral.runs.loggers.files import replaced
from corral.tools.search.settings import Search
from corral.tools.search.study import REASON, importances, is_interrupted

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

TABLE_FILE, BEST_FILE = "trials.csv", "best.yaml"
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
SEED_VALUES = "seed_values"
"""Attribute of a trial: its value with each seed."""


@dataclass(frozen=True)
class TrialSummary:
    """A trial.

    Attributes:
        number: Its number, from 0.
        state: `"complete"`, `"pruned"`, `"failed"`, `"interrupted"`, `"running"` or `"waiting"`.
        value: Mean over its seeds; of a pruned trial, the value of its last round; `None` if there is none.
        seed_values: Value with each seed.
        num_rounds: Number of rounds after which its first seed was compared with other trials.
        time_s: Duration in seconds, `None` until it ends.
        values: Settings by path.
        reason: Why it failed; `""` otherwise.
    """

    number: int
    state: str
    value: float | None
    seed_values: tuple[float, ...]
    num_rounds: int
    time_s: float | None
    values: dict[str, Any]
    reason: str

    @property
    def shown_values(self) -> str:
        """The settings as text."""
        return ", ".join(f"{path.rpartition('.')[2]}={_shown(value)}" for path, value in self.values.items())


def trial_dir(home: Path, number: int) -> Path:
    """Return the directory of a trial."""
    return home / "trials" / f"{number:04d}"


def read_trials(study: Study, search: Search) -> list[TrialSummary]:
    """Return the trials of a study in the order of their numbers."""
    return [_record(trial, search) for trial in study.get_trials(deepcopy=False)]


def best_of(trials: Sequence[TrialSummary], search: Search) -> TrialSummary | None:
    """Return the best complete trial, the first one of equal ones, or `None`."""
    sign = 1.0 if search.settings.mode == "max" else -1.0
    complete = [trial for trial in trials if trial.state == "complete"]
    return max(complete, key=lambda trial: sign * float(trial.value or 0.0), default=None)


def write_experiment(home: Path, search: Search) -> None:
    """Write the experiment with its group `search`."""
    write_atomically(home / EXPERIMENT_FILE, _yaml(search.whole()))


def write_state(home: Path, study: Study, search: Search) -> list[TrialSummary]:
    """Write the trials and the settings of the best one so far, and return the trials.

    Raises:
        RunDirectoryError: A file cannot be written.
    """
    trials = read_trials(study, search)
    best = best_of(trials, search)
    state = {
        "metric": search.metric,
        "mode": search.settings.mode,
        "best": None if best is None else best.number,
        "parameters": {parameter.path: {parameter.kind: [*parameter.values]} for parameter in search.parameters},
        "importances": importances(study),
        "trials": [asdict(trial) for trial in trials],
    }
    write_atomically(home / SEARCH_FILE, json.dumps(state, indent=1, default=str))
    write_atomically(home / TABLE_FILE, _table(trials, search))
    if best is not None:
        write_atomically(home / BEST_FILE, _best_experiment(best, search))
    return trials


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name and move it into place.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    try:
        with replaced(path) as file:
            file.write(text)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}; choose another directory.") from error


def _record(trial: FrozenTrial, search: Search) -> TrialSummary:
    rounds = trial.intermediate_values
    state = "interrupted" if is_interrupted(trial) else STATES[trial.state.name]
    value = trial.value
    if state == "pruned" and rounds:
        value = rounds[max(rounds)]
    return TrialSummary(
        number=trial.number,
        state=state,
        value=None if value is None or not math.isfinite(value) else value,
        seed_values=tuple(trial.user_attrs.get(SEED_VALUES, ())),
        num_rounds=len(rounds),
        time_s=None if trial.duration is None else trial.duration.total_seconds(),
        values=search.values_of(trial.params),
        reason=trial.user_attrs.get(REASON, ""),
    )


def _best_experiment(best: TrialSummary, search: Search) -> str:
    seeds = f", the mean of seeds {', '.join(map(str, search.seeds))}" if len(search.seeds) > 1 else ""
    found = " ".join(best.shown_values.split())
    head = f"# Trial {best.number}: {search.metric} {best.value:.6g}{seeds}.\n# {found}\n"
    return head + _yaml(search.experiment(best.values))


def _table(trials: Sequence[TrialSummary], search: Search) -> str:
    paths = [parameter.path for parameter in search.parameters]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    seeds = [f"seed-{seed}" for seed in search.seeds]
    writer.writerow(["number", "state", "value", *seeds, "num_rounds", "time_s", *paths, "reason"])
    for trial in trials:
        seed_values = [*trial.seed_values, *[""] * len(seeds)][: len(seeds)]
        row = [trial.number, trial.state, trial.value, *seed_values, trial.num_rounds, trial.time_s]
        writer.writerow([*row, *(_cell(trial.values.get(path, "")) for path in paths), trial.reason])
    return text.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=False)
