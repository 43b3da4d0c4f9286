"""The checkpoints of a run: when they are written, which one is the best, and which ones stay."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from corral.algorithms.checkpoint import describe_algorithm
from corral.core.metrics.named_number import NamedNumber
from corral.core.metrics.result import flat_result
from corral.errors import CheckpointError, ConfigError
from corral.runs.checkpoint.directory import METADATA, read_checkpoint, write_checkpoint
from corral.runs.checkpoint.finding import BEST, CHECKPOINTS, NONE_YET

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.config import AlgorithmConfig

log = logging.getLogger("corral")
WRITE_PAUSE, COPY_PAUSE = 50, 100
"""Times the duration of a write, or of a copy in memory, for which no other one begins."""
_OF_ITERATION = re.compile(r"iteration-(\d+)")


class RunCheckpoints:
    """Writes the checkpoints of a run; a checkpoint that cannot be written gives one warning, and the run continues.

    If the last state cannot be written either, the run ends with an error, unless something else has ended it.

    It is a context manager: however the block ends, the last state and the best one are written. A new run has
    one of its first iteration until the next one is written.

    Before there is a best value, the best checkpoint is the latest one: when training has only early means, or when no
    round of evaluation was played yet. A new best state that may not be written yet stays in memory until it may.
    Copying it has a pause of the same kind, so that a peak that is shorter than 100 times the duration of a copy may be
    missed. A number of evaluation counts in
    the iteration of its round only, and only if the round is complete. If the round was played while an iteration
    trained, the best state is the one from before this iteration, whose weights were evaluated. When a
    `ThresholdCurriculum` begins the next task, the best value is forgotten, unless it is of other tasks.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        run_dir: Path,
        *,
        late_keys: bool,
        warn: Callable[[object, str], None],
        is_new: bool = False,
    ) -> None:
        """Continue with the best checkpoint that the run has.

        Args:
            algorithm: The algorithm of the run, restored if the run continues.
            run_dir: Directory of the run.
            late_keys: Whether callbacks may log keys that are missing from the first results.
            warn: Shows a message once for each subject, given as the first argument.
            is_new: Whether the run begins; then a checkpoint follows its first iteration.
        """
        config = algorithm.config
        self._algorithm, self._config, self._warn = algorithm, config, warn
        self._directory = run_dir.absolute() / CHECKPOINTS
        self._metric, name = None, best_metric(config)
        self._choice = {"metric": name, "mode": config.best_checkpoint_mode}
        if name is not None:
            self._metric = NamedNumber(name, "best_checkpoint_metric", ConfigError, late_keys=late_keys)
        self._is_evaluated = str(name).startswith("evaluation/")
        self._is_behind = self._is_evaluated and config.evaluation_parallel_to_training
        self._best_value, self._task = self._value_of_best(), _task_of(algorithm.latest_numbers)
        of_others = str(name).startswith(("learners/", "curriculum/"))
        self._depends_on_task = not of_others and (not self._is_evaluated or config.evaluation_tasks == "training")
        self._new_best: dict[str, Any] | None = None  # arguments of write_checkpoint
        self._better: tuple[tuple[int, int], float] | None = None  # the latest state, if it is better and not copied
        self._copy_from_s = self._write_from_s = float("-inf")  # the ends of the pauses
        self._before: dict[str, Any] | None = None  # arguments of write_checkpoint, before the iteration of a round
        self._start_interval()
        self._latest_best: tuple[int, int] | None = None  # position of the latest state that is the best one so far
        self._is_first, self._early = is_new, -1  # the iteration of the first checkpoint if it is not due
        self._written: tuple[int, int] | None = None
        self._problem: Exception | None = None  # why the present state was not written
        if (_checkpoint_of(self._directory, algorithm.training_iteration) / METADATA).exists():
            self._written = self._position()  # the one that the run continues from
        self._keep_before()

    def _value_of_best(self) -> float:
        """Return the value of the best checkpoint that is there, or a value that any number beats."""
        with contextlib.suppress(CheckpointError):
            best = read_checkpoint(self._directory / BEST, with_state=False).metadata.get("best")
            if isinstance(best, Mapping) and {name: best.get(name) for name in self._choice} == self._choice:
                if best["value"] is not None:
                    return float(best["value"])
        return -math.inf if self._config.best_checkpoint_mode == "max" else math.inf

    def _position(self) -> tuple[int, int]:
        return self._algorithm.training_iteration, self._algorithm.num_env_steps_sampled_lifetime

    def _start_interval(self) -> None:
        self._interval_from_s, self._interval_from_iteration = time.monotonic(), self._algorithm.training_iteration

    # After each iteration.

    def update(self, result: dict[str, Any]) -> None:
        """Note the result of an iteration, and write what is due.

        Raises:
            ConfigError: `best_checkpoint_metric` is not in the result.
        """
        if self._metric is not None:
            self._follow_task(result)
            value = self._metric.find(flat_result(result))
            self._better = None
            if value is not None and self._counts(result) and self._is_better(value):
                if not self._is_behind:
                    self._better = (self._position(), value)
                    if time.monotonic() >= self._copy_from_s:
                        self._set_best(self._copied(), value)
                else:
                    self._set_best(self._before, value)
            self._keep_before()
        if self._is_due():
            self.write()
        elif self._is_first:  # it goes with the next one, and changes nothing of when that is due
            self._write_both()
            self._early = self._algorithm.training_iteration
        self._is_first = False

    def _counts(self, result: Mapping[str, Any]) -> bool:
        """Return whether the number of a result is of this iteration. A truncated round favours short episodes."""
        evaluation = result.get("evaluation", {})
        return not self._is_evaluated or (evaluation.get("fresh", False) and not evaluation.get("truncated", False))

    def _follow_task(self, result: Mapping[str, Any]) -> None:
        """Forget the best value if a curriculum has begun the next task: returns of an easier one would stay best."""
        task, self._task = self._task, _task_of(result)
        if self._depends_on_task and task not in (None, self._task):
            self._best_value = -math.inf if self._config.best_checkpoint_mode == "max" else math.inf

    def _keep_before(self) -> None:
        """Copy the state if the next iteration trains while a round evaluates these weights."""
        self._before, every = None, self._config.evaluation_interval
        is_next = every is not None and (self._algorithm.training_iteration + 1) % every == 0
        if self._is_behind and is_next and time.monotonic() >= self._copy_from_s:
            self._before = self._copied()

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return value > self._best_value if self._config.best_checkpoint_mode == "max" else value < self._best_value

    def _copied(self) -> dict[str, Any] | None:
        """Return a copy of the present state, or `None` if that fails."""
        start_s = time.monotonic()
        try:
            described = describe_algorithm(self._algorithm, with_buffer=False)
        except Exception as error:
            self._warn_of(BEST, error)
            return None
        self._copy_from_s = _end_of_pause(start_s, COPY_PAUSE)
        return described

    def _set_best(self, described: dict[str, Any] | None, value: float) -> None:
        if described is not None:
            described["metadata"]["best"] = {**self._choice, "value": value}
            self._new_best, self._best_value, self._better = described, value, None

    def _set_latest_as_best(self) -> None:
        """Let the present state be the best one while there is no value by which to choose."""
        if self._metric is None or math.isfinite(self._best_value) or self._latest_best == self._position():
            return
        pause_end_s = self._copy_from_s
        if (described := self._copied()) is not None:
            described["metadata"]["best"] = {**self._choice, "value": None}
            self._new_best, self._latest_best = described, self._position()
        self._copy_from_s = pause_end_s  # the first best value does not wait for this copy

    def _is_due(self) -> bool:
        now_s, every_s = time.monotonic(), self._config.checkpoint_every_s
        every = self._config.checkpoint_every_iterations
        if every is not None and self._algorithm.training_iteration - self._interval_from_iteration >= every:
            return True
        return every_s is not None and now_s >= max(self._interval_from_s + every_s, self._write_from_s)

    # Writing.

    def write(self) -> None:
        """Write the present state and the best one, where they are not written yet, and remove old checkpoints."""
        self._write_both()
        self._start_interval()

    def _write_both(self) -> None:
        start_s = time.monotonic()
        self._write_present()
        self._set_latest_as_best()
        self._write_best()
        self._write_from_s = _end_of_pause(start_s, WRITE_PAUSE)

    def _write_present(self) -> None:
        position = self._position()
        if not self._config.num_checkpoints_kept or position == self._written:
            return
        path = _checkpoint_of(self._directory, self._algorithm.training_iteration)
        try:
            self._algorithm.save(path)
            self._written = position
            (self._directory / NONE_YET).unlink(missing_ok=True)
            self._remove_old()
        except Exception as error:
            self._problem = error
            self._warn_of(path.name, error)

    def _write_best(self) -> None:
        if self._new_best is None:
            return
        try:
            write_checkpoint(self._directory / BEST, **self._new_best)
            self._new_best = None
        except Exception as error:
            self._warn_of(BEST, error)

    def _remove_old(self) -> None:
        matches = [(path, _OF_ITERATION.fullmatch(path.name)) for path in self._directory.iterdir()]
        found = {int(match[1]): path for path, match in matches if match}
        earlier = sorted(iteration for iteration in found if iteration <= self._algorithm.training_iteration)
        old = {*earlier[: -self._config.num_checkpoints_kept], self._early} & found.keys()
        old -= {self._algorithm.training_iteration}  # it may be the early one again, with steps of the next iteration
        self._early = -1
        for iteration in old:
            (found[iteration] / METADATA).unlink(missing_ok=True)  # first, so that no reader finds half a checkpoint
            shutil.rmtree(found[iteration], ignore_errors=True)

    def _warn_of(self, name: str, error: Exception) -> None:
        log.debug("The checkpoint %s was not written.", name, exc_info=error)
        self._warn(
            RunCheckpoints,
            f"The checkpoint {self._directory / name} cannot be written: {error}. The run continues, and earlier "
            "checkpoints stay; the next one is tried when it is due.",
        )
        with contextlib.suppress(OSError):
            if not any((path / METADATA).exists() for path in self._directory.glob("*")):
                self._directory.mkdir(exist_ok=True)
                (self._directory / NONE_YET).touch()

    def __enter__(self) -> Self:
        """Return the checkpoints."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is not written yet.

        Raises:
            CheckpointError: The last state cannot be written, and the block raised no exception.
        """
        if self._better is not None and self._better[0] == self._position():
            self._set_best(self._copied(), self._better[1])
        self.write()
        if self._config.num_checkpoints_kept and self._written != self._position():
            latest = "there is none" if self._written is None else f"the latest one is of iteration {self._written[0]}"
            message = (
                f"No checkpoint holds the last state of the run, of iteration {self._algorithm.training_iteration}: "
                f"{latest} in {self._directory}."
            )
            if error is None:
                raise CheckpointError(f"{message} {self._problem}") from self._problem
            self._warn((RunCheckpoints, "end"), message)


def _task_of(result: Mapping[str, Any]) -> Any:
    """Return the index of the task that a curriculum has in force, or `None`."""
    return result.get("curriculum", {}).get("task_index")


def best_metric(config: AlgorithmConfig) -> str | None:
    """Return the number of the result by which the best checkpoint is chosen, or `None`."""
    if config.best_checkpoint_metric != "auto":
        return config.best_checkpoint_metric
    if config.evaluation_interval is not None and config.custom_evaluation_function is None:
        return "evaluation/env_runners/episode_return_mean"
    return "env_runners/episode_return_mean" if config.samples else None


def _checkpoint_of(directory: Path, iteration: int) -> Path:
    return directory / f"iteration-{iteration:06d}"


def _end_of_pause(start_s: float, times: float) -> float:
    now_s = time.monotonic()
    return now_s + times * (now_s - start_s)


def newer_incomplete(directory: Path, iteration: int) -> list[str]:
    """Return the names of checkpoints of later iterations that were not written to their end."""
    matches = [(path, _OF_ITERATION.fullmatch(path.name)) for path in sorted(directory.iterdir())]
    later = [path for path, match in matches if match and int(match[1]) > iteration]
    return [path.name for path in later if not (path / METADATA).exists()]
