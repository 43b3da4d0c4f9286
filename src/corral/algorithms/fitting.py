"""The loop of `Algorithm.fit`: iterations until a stop criterion is met, with a run directory and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from corral.algorithms.checkpoint import describe_policies
from corral.algorithms.loop_run import log_last_result
from corral.algorithms.run_checkpoints import RunCheckpoints, best_metric, newer_incomplete
from corral.algorithms.stopping import StopCriteria, criteria_from_file
from corral.core.familiar_names import meaning_of_key
from corral.core.ids import ALL_MODULES
from corral.core.interrupts import interruptible, raise_if_ending
from corral.core.metrics.named_number import NamedNumber, check_is_measured
from corral.core.metrics.result import flat_result, without_early_means
from corral.core.metrics.result_html import Result
from corral.core.paths import resolve_path
from corral.core.run_files import PROGRESS_FILE
from corral.errors import CheckpointError, ConfigError, StopCriterionError, nearest
from corral.learners.losses import learner_metrics
from corral.runs.checkpoint import Checkpoint, find_checkpoint, read_checkpoint
from corral.runs.checkpoint.directory import METADATA
from corral.runs.checkpoint.finding import CHECKPOINTS, NONE_YET
from corral.runs.loggers import Logger, Run
from corral.runs.loggers.named import make_loggers, names_of
from corral.runs.loggers.run import CONFIG_FILE, check_run_to_resume, locked, plain
from corral.runs.loggers.run_summary import last_numbers

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.runs.loggers.progress import Progress

log = logging.getLogger("corral")


def refuse_unknown(args: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """Refuse arguments that `fit` does not have.

    Raises:
        ConfigError: There is one; the message says what to write.
    """
    number = args[0] if args else settings.get("total_timesteps")
    if isinstance(number, (int, float)):
        raise ConfigError(f"fit: give the stop criterion by name: fit(stop={{'num_env_steps': {number:_}}}).")
    if args:
        raise ConfigError(f"fit: give {args[0]!r:.80} by name, as in fit(stop=...).")
    known = ("stop", "run_dir", "resume", "loggers", "progress")
    for name in settings:
        hint = meaning_of_key(name, known) or nearest(name, known)
        if name == "progress_bar":
            hint = "Write progress='panel', or 'lines', 'last' or False."
        raise ConfigError(f"fit: unknown argument {name!r}. {hint}")


@interruptible
def fit(
    algorithm: Algorithm,
    *,
    stop: Any,
    run_dir: str | Path | None,
    resume: str | Path | None,
    loggers: Sequence[Any] | None,
    progress: Any,
    late_keys: bool,
) -> Result:
    """Train until a criterion is met, and return the last result; see `Algorithm.fit`.

    `late_keys` says whether callbacks may log keys that are missing from the first results.
    """
    shows = _progress(algorithm, progress)
    if resume is not None:
        if run_dir is not None:
            raise ConfigError(
                f"fit: run_dir={run_dir!r} and resume={resume!r}: a run continues in its own directory. Leave run_dir "
                "out."
            )
        resume = resolve_path(resume, "the run directory")
        check_run_to_resume(resume)
        stop = stop_of_run(resume) if stop is None else stop
    criteria = StopCriteria({} if stop is None else stop, late_keys=late_keys)
    _check_names(criteria, algorithm, late_keys)
    changes: list[str] = []
    run = Run(
        algorithm.config,
        run_dir if resume is None else resume,
        _loggers(algorithm.config, loggers, resume),
        stop=criteria.plain(),
        restore=None if resume is None else lambda path: restore_run(algorithm, path, changes),
    )
    with contextlib.ExitStack() as stack:
        if algorithm.report.loop_run is not None:
            stack.enter_context(algorithm.report.loop_run.paused())
        stack.callback(setattr, algorithm, "stop_requested", None)  # a request is for one run, however it ends
        shown = stack.enter_context(shows(criteria.criteria)) if shows else None
        stack.enter_context(run)
        algorithm.run_dir = run.path
        if changes:
            log.info("Settings that differ from the run's: %s.", "; ".join(changes))
        if shown is not None:
            shown.start(run.path, algorithm.latest_numbers)
        stack.enter_context(algorithm.report.exceptions_shown())
        is_new = resume is None or algorithm.training_iteration == 0
        checkpoints = stack.enter_context(
            RunCheckpoints(algorithm, run.path, is_new=is_new, late_keys=late_keys, warn=run.warn_once)
        )
        stack.callback(_log_last_result, algorithm, run, algorithm.training_iteration, shown)
        result = Result(algorithm.latest_numbers)
        met = criteria.met(without_early_means(result), whole=False) if result else None
        reason = algorithm.stop_requested or met
        while reason is None:
            raise_if_ending()
            result = algorithm.train()
            run.log_result(result)
            if shown is not None:
                shown.update(result)
            decisive = without_early_means(result)
            reason = criteria.met(decisive) or algorithm.stop_requested
            checkpoints.update(decisive)
        log.info("Stopped: %s.", reason)
        if shown is not None:
            shown.reason = reason
        return result


def _log_last_result(algorithm: Algorithm, run: Run, first_iteration: int, shown: Progress | None) -> None:
    """Log the result of the last iteration, which is the state that is stored, and show it."""
    log_last_result(algorithm, run, first_iteration)
    if shown is not None and algorithm.training_iteration > first_iteration:
        shown.result = algorithm.report.latest


def _loggers(config: AlgorithmConfig, given: Sequence[Any] | None, resume: str | Path | None) -> list[Logger]:
    """Return the loggers of a run: those given, those in the config, those that it had, or the default ones."""
    if given is not None:
        return make_loggers(given, "fit: loggers")
    named = (
        names_of(None if resume is None else resolve_path(resume, "the run directory"))
        if config.loggers is None
        else config.loggers
    )
    return make_loggers(named, "reporting: loggers")


def _check_names(criteria: StopCriteria, algorithm: Algorithm, late_keys: bool) -> None:
    """Refuse numbers that the results will not have, where that is known before anything is sampled or written."""
    config, numbers = algorithm.config, criteria.numbers
    for name in numbers:
        check_is_measured(name, "stop criterion", config, StopCriterionError)
    best = best_metric(config)
    check_is_measured(best, "best_checkpoint_metric", config, ConfigError)
    is_own = not type(algorithm).__module__.startswith("corral.")  # its training step may log any number
    if late_keys or is_own:
        return
    if best is not None:
        numbers[best] = NamedNumber(best, "best_checkpoint_metric", ConfigError, late_keys=False)
    known = _known_numbers(algorithm)
    for name, number in numbers.items():
        if not _may_come_later(name, algorithm) and "env_runners/num_episodes" in known:
            number.check_known(known)


def _known_numbers(algorithm: Algorithm) -> dict[str, Any]:
    """Return the numbers of results that are known before the first one, as a flat result."""
    group = algorithm.env_runner_group
    if group.local_env_runner is None and len(group.mail.idle_runners()) == len(group.worker_indices):
        # The names of what runners of the engine log come with their fragments otherwise.
        logged = group.foreach_env_runner("get_metrics")
        algorithm.metrics.aggregate([parts for parts, _, _ in logged], key="env_runners")
    result = algorithm.report.result()
    algorithm.report.set_costs(result, 1.0)
    of_learners = {
        f"learners/{module_id}/{name}": math.nan
        for module_id in filter(algorithm.modules.trains, algorithm.module_ids)
        for name in learner_metrics(*algorithm.get_module(module_id).parameter_groups())
    }
    return {**of_learners, **flat_result(result)}


def _may_come_later(name: str, algorithm: Algorithm) -> bool:
    """Return whether a number may first appear in a later result: what losses and explorations report."""
    group, _, rest = name.partition("/")
    if group == "learners":
        return rest.partition("/")[0] in (*algorithm.module_ids, ALL_MODULES)
    if group == "evaluation":
        return algorithm.config.custom_evaluation_function is not None
    return group == "exploration"


def _progress(algorithm: Algorithm, mode: Any) -> Callable[[Mapping[str, Any]], Progress] | None:
    """Return what makes the progress that is shown from the stop criteria, or `None` if nothing is shown."""
    if mode is False:
        return None
    from corral.runs.loggers.progress import Progress, check_mode  # here, since rich takes time to import

    check_mode(mode)
    return lambda stop: Progress(algorithm.config, stop, mode)


def stop_of_run(run_dir: str | Path) -> dict[str, Any]:
    """Return the stop criteria of a run, from its config.yaml.

    Raises:
        RunDirectoryError: The directory holds no run.
        ConfigError: The run has none, or one that no file holds.
    """
    run_dir = resolve_path(run_dir, "the run directory")
    settings = read_config(run_dir)
    if not settings.get("stop"):
        raise ConfigError(f"{run_dir / CONFIG_FILE} has no 'stop': give stop criteria.")
    return dict(criteria_from_file(settings["stop"]))


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the settings by group of a run, with `algo` and `stop`.

    Raises:
        RunDirectoryError: The directory holds no run.
        ConfigError: Its config.yaml cannot be read.
    """
    check_run_to_resume(run_dir)
    try:
        settings = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{run_dir / CONFIG_FILE}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{run_dir / CONFIG_FILE} holds no settings.")
    return settings


def check_resumable(run_dir: Path) -> dict[str, str]:
    """Return the settings of a run that no file can name, as texts by place, after checking that it can continue.

    Raises:
        RunDirectoryError: The directory holds no run, or another process runs it.
        CheckpointError: The run has no checkpoint.
    """
    check_run_to_resume(run_dir)
    with locked(run_dir):
        if has_just_begun(run_dir):
            return {}
        checkpoint = read_checkpoint(find_checkpoint(run_dir / CHECKPOINTS), with_state=False)
    return dict(checkpoint.metadata.get("unnamed") or {})


def has_just_begun(run_dir: Path) -> bool:
    """Return whether a run ended before its first checkpoint: it begins again.

    That is in its first two iterations, or later if the first checkpoints could not be written. Any other run that has
    more results and no checkpoint lost its checkpoints, or was to have none.
    """
    directory = run_dir / CHECKPOINTS
    if any((path / METADATA).exists() for path in directory.glob("*")):
        return False
    if (directory / NONE_YET).exists():
        return True
    is_kept = (read_config(run_dir).get("checkpointing") or {}).get("num_checkpoints_kept")
    progress = run_dir / PROGRESS_FILE
    num_rows = progress.read_bytes().count(b"\n") - 1 if progress.is_file() else 0
    iteration = last_numbers(run_dir).training_iteration
    return bool(is_kept) and num_rows <= 1 and not iteration > 1  # NaN if no file has it


def restore_run(algorithm: Algorithm, run_dir: Path, changes: list[str]) -> tuple[int, int]:
    """Restore an algorithm from the last checkpoint of a run, and return its iteration and number of env steps.

    The settings that differ from the run's are added to `changes` as text.

    Raises:
        CheckpointError: The run has lost its checkpoints, or the algorithm, its module or its spaces are not the run's.
    """
    if has_just_begun(run_dir):
        return _begin_again(algorithm, run_dir, changes)
    path = find_checkpoint(run_dir / CHECKPOINTS)
    checkpoint = read_checkpoint(path, with_state=False)
    fixed = [change for change in _changes(checkpoint.config, algorithm) if change.startswith(("algo:", "rl_module."))]
    fixed += _changes_of_spaces(checkpoint, algorithm)
    if fixed:
        raise CheckpointError(
            f"{run_dir} cannot continue with this algorithm, which differs in {'; '.join(fixed)}: build it with the "
            "settings of the run, or begin another run."
        )
    algorithm.restore_from_path(path)
    changes += _changes(checkpoint.config, algorithm)
    if newer := newer_incomplete(run_dir / CHECKPOINTS, algorithm.training_iteration):
        which = f"{newer[0]} is an incomplete checkpoint"
        if len(newer) > 1:
            which = f"{newer[0]} to {newer[-1]} are {len(newer)} incomplete checkpoints"
        log.warning("%s: the run continues from iteration %d.", which, algorithm.training_iteration)
    return algorithm.training_iteration, algorithm.num_env_steps_sampled_lifetime


def _begin_again(algorithm: Algorithm, run_dir: Path, changes: list[str]) -> tuple[int, int]:
    """Let a run that has no checkpoint yet continue from iteration 0, with an algorithm that has not trained.

    Raises:
        CheckpointError: The algorithm has trained.
    """
    if algorithm.training_iteration:
        raise CheckpointError(
            f"{run_dir} holds no complete checkpoint, so its run must begin again, but this algorithm has already "
            f"trained {algorithm.training_iteration} iterations: build a new one."
        )
    log.warning("%s has no checkpoint yet: the run begins again.", run_dir)
    changes += _changes(read_config(run_dir), algorithm)
    return 0, 0


def _changes(before: Mapping[str, Any], algorithm: Algorithm) -> Iterator[str]:
    """Yield the settings of an algorithm that differ from other ones, by group, as text."""
    now = plain(algorithm.config.to_dict())
    if _last_name(before["algo"]) != _last_name(now["algo"]):  # a class may move to another module
        yield f"algo: {now['algo']!r}, was {before['algo']!r}"
    for group, names in algorithm.config.group_fields().items():
        for name in names:
            value, was = now[group][name], before.get(group, {}).get(name)
            if value != was:
                yield f"{group}.{name}: {value!r:.80}, was {was!r:.80}"


def _changes_of_spaces(checkpoint: Checkpoint, algorithm: Algorithm) -> Iterator[str]:
    """Yield the spaces of modules that differ from the spaces in a checkpoint, as text."""
    for module_id, now in describe_policies(algorithm).items():
        before = checkpoint.policies.get(module_id, now)  # the run may have removed it
        for name in ("observation_space", "action_space"):
            if before.get(name) != now[name]:
                yield f"{name}: {now[name]!r:.120}, was {before.get(name)!r:.120}"


def _last_name(path: str) -> str:
    return path.rpartition(":")[2].rpartition(".")[2]
