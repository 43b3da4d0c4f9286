"""The study of a search: Optuna's trials in SQLite, which one process reads and writes.

SQLite is no place for many writers, so that only the process of the search opens the file. The processes of trials tell
it their numbers through pipes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from corral.errors import MissingPackageError, RunDirectoryError
from corral.tools.search.settings import Search, SearchSettings

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

STUDY_NAME, STUDY_FILE = "search", "search.db"
REASON = "reason"
"""Attribute of a trial that failed: why. A trial that its search did not end has none."""

TIMEOUT_S = 60.0
"""Seconds to wait while another program, such as a dashboard, reads the file."""

MIN_TRIALS = 4
"""Number of complete trials from which importances are computed."""


def require_optuna() -> None:
    """Refuse to search without Optuna.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingPackageError(
            f"a search needs the packages of an extra ({error}): pip install 'corral[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@contextlib.contextmanager
def open_study(home: Path, search: Search) -> Iterator[Study]:
    """Open the study in the directory of a search, or a new one, and close its file at the end of the block.

    A grid waits in the study as a whole: its trials are asked for in their order.

    Raises:
        RunDirectoryError: The file cannot be read or written.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    path = home / STUDY_FILE

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=TIMEOUT_S, check_same_thread=False)

    try:
        # The function takes the place of a URL, in which a path may hold characters that mean something else.
        storage = optuna.storages.RDBStorage("sqlite:///", engine_kwargs={"creator": connect})
        study = optuna.create_study(
            storage=storage,
            pruner=_pruner(search.settings),
            study_name=STUDY_NAME,
            direction="maximize" if search.settings.mode == "max" else "minimize",
            load_if_exists=True,
        )
        trials = study.get_trials(deepcopy=False)
    except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.OptunaError, RuntimeError) as error:
        raise RunDirectoryError(f"{path} is damaged or cannot be written: {error}") from error
    try:
        if search.settings.sampler == "grid" and not trials:
            for values in search.combinations():
                study.enqueue_trial(values)
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()


def ask(study: Study, search: Search) -> Trial:
    """Return the next trial, with its values.

    Each trial has a sampler with a seed of its own, so that a search that continues draws what it would have drawn.
    """
    study.sampler = _sampler(search.settings, len(study.get_trials(deepcopy=False)))
    return study.ask({parameter.path: parameter.distribution() for parameter in search.parameters})


def requeue_running(study: Study) -> int:
    """Let the trials begin again that a search began and did not end, and return their number.

    No process runs them: each one ends with the process of its search. They fail without a reason, and the same values
    wait under another number.
    """
    from optuna.trial import TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in running:
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)
    return len(running)


def is_interrupted(trial: FrozenTrial) -> bool:
    """Return whether a trial failed because its search ended."""
    return trial.state.name == "FAIL" and REASON not in trial.user_attrs


def importances(study: Study) -> dict[str, float]:
    """Return the share of each parameter in how good trials are, by path, the largest first; `{}` with few trials."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(complete) < MIN_TRIALS:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is new, and that values are equal
        try:
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
        except (ValueError, RuntimeError):  # of trials that are all alike
            return {}
    return {path: float(share) for path, share in found.items() if np.isfinite(share)}


def _sampler(settings: SearchSettings, number: int) -> BaseSampler:
    import optuna

    seed = int(np.random.SeedSequence([settings.seed, number]).generate_state(1)[0])
    if settings.sampler != "tpe":  # the values of a grid wait in the study
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the constant liar is new: it keeps trials apart that run together
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=settings.num_startup_trials, constant_liar=True)


def _pruner(settings: SearchSettings) -> BasePruner:
    """Return the pruner; rounds count from 1."""
    from optuna import pruners

    if settings.pruner == "median":
        return pruners.MedianPruner(settings.num_startup_trials, n_warmup_steps=settings.num_warmup_rounds + 1)
    if settings.pruner == "hyperband":
        return pruners.HyperbandPruner()
    if settings.pruner == "successive_halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1)
    return pruners.NopPruner()
