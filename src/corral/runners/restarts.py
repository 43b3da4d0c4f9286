"""Decide what follows from the failure of a runner: restart it, continue without it, or end the run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from threading import Event
from typing import TYPE_CHECKING

from corral.core.metrics.reduction_settings import MetricsError
from corral.errors import CallbackError, ConfigError, SampleError, SerializationError, WeightsError, WorkerDiedError

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig
    from corral.runners.runner_handle import PendingSample, RunnerHandle, SentWeights

log = logging.getLogger("corral")

# Failures of the user's own code and settings: a restarted runner would fail in the same way.
NOT_FAULTS = (CallbackError, ConfigError, MetricsError, SampleError, SerializationError, WeightsError)

LONGEST_DELAY_S = 60.0


def restart_delay_s(num_failures_in_row: int, delay_s: float) -> float:
    """Return seconds to wait before a restart: 0 the first time, then `delay_s`, doubled each time."""
    return 0.0 if num_failures_in_row == 1 else min(LONGEST_DELAY_S, delay_s * 2.0 ** (num_failures_in_row - 2))


def note_failure(
    runner: RunnerHandle, error: BaseException, config: RunnerConfig, num_restarts_of_all: int
) -> BaseException | None:
    """Decide what follows from a failure, note it on the runner, and return the error that ends the run, if any.

    Args:
        runner: The runner that failed.
        error: Exception that it raised, or that says how it died.
        config: Config with the settings of fault tolerance.
        num_restarts_of_all: Restarts of all runners of the group so far.

    Returns:
        The exception that ends the run, or `None` if the run continues.
    """
    runner.starting = None
    if isinstance(error, NOT_FAULTS):
        return error
    runner.failure = error
    runner.num_failures_in_row += 1
    runner.restart_at_s = None
    if not (config.restart_failed_env_runners or config.ignore_env_runner_failures):
        return error
    limit = _limit(runner, config, num_restarts_of_all)
    if limit is None:
        delay_s = restart_delay_s(runner.num_failures_in_row, config.delay_between_env_runner_restarts_s)
        runner.restart_at_s = time.perf_counter() + delay_s
        log.warning("%s failed, and restarts in %.1f s: %s", runner.name, delay_s, describe(error))
        return None
    runner.end()
    if config.ignore_env_runner_failures:
        log.error(
            "%s failed, and is not restarted (%s): the run continues without it. %s",
            runner.name,
            limit,
            describe(error),
        )
        return None
    error.add_note(f"{runner.name} is not restarted: {limit}.")
    return error


def _limit(runner: RunnerHandle, config: RunnerConfig, num_restarts_of_all: int) -> str | None:
    """Return the reason not to restart a failed runner, or `None` if it restarts."""
    if not config.restart_failed_env_runners:
        return "restart_failed_env_runners=False"
    if num_restarts_of_all >= config.max_num_env_runner_restarts:
        return f"max_num_env_runner_restarts={config.max_num_env_runner_restarts} is reached"
    if runner.num_failures_in_row > config.num_consecutive_env_runner_failures_tolerance:
        return (
            f"it failed {runner.num_failures_in_row} times in a row, and num_consecutive_env_runner_failures_tolerance="
            f"{config.num_consecutive_env_runner_failures_tolerance}"
        )
    return None


def describe(error: BaseException) -> str:
    """Return an exception and its notes, for the log."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


class Recovery:
    """Restarts the runners of a group that failed, without waiting for them.

    Attributes:
        num_failures: Failures of runners so far.
        num_restarts: Restarts of runners so far, also in the run that this one continues.
        news: Event that is set when a runner has answered: a call for a fragment, or a step of its restart.
    """

    def __init__(self, config: RunnerConfig, runners: Mapping[int, RunnerHandle], weights: SentWeights) -> None:
        """Store the runners, and the weights with which they continue."""
        self._config, self._runners, self._weights = config, runners, weights
        self.num_failures = self.num_restarts = 0
        self.news = Event()
        self._stepped: deque[int] = deque()  # runners that have answered a step of their restart
        self._due: list[tuple[float, int]] = []  # when a restart is due or takes too long, and whose; a heap

    def fail(self, runner: RunnerHandle, error: BaseException, call: PendingSample | None = None) -> None:
        """Count a failure, of a call for a fragment if one is given, and plan a restart unless it ends the run.

        A fault of an evaluation runner never does: the round reports it, and what follows is a setting of evaluation.
        An embedded runner is not restarted.

        Raises:
            Exception: The failure, if it ends the run.
        """
        runner.forget_requests(error, call)
        in_evaluation, is_embedded = self._config.in_evaluation, runner.index == 0
        if is_embedded and (not in_evaluation or isinstance(error, NOT_FAULTS)):
            raise error
        self.num_failures += 1
        if is_embedded:
            log.warning(
                "The embedded evaluation runner failed; its next episodes begin with a reset. %s", describe(error)
            )
            return
        problem = note_failure(runner, error, self._config, self.num_restarts)
        if runner.restart_at_s is not None:
            heappush(self._due, (runner.restart_at_s, runner.index))
        if in_evaluation and not isinstance(error, NOT_FAULTS):
            return
        if problem is not None:
            raise problem
        if self.lost_because() is not None:
            error.add_note("It was the last runner.")
            raise error

    def continue_restart(self, runner: RunnerHandle) -> bool:
        """Take the next step of restarting a runner, if it failed; return whether it became ready."""
        now = time.perf_counter()
        if runner.ready and not runner.requests and not runner.handle.alive():
            self.fail(runner, runner.handle.call("ping").exception() or WorkerDiedError(f"{runner.name} died."))
        if runner.restart_at_s is not None and now >= runner.restart_at_s:
            runner.begin_restart(self._weights)
            self.num_restarts += 1
            self._watch(runner)
        if runner.starting is None:
            return False
        if runner.starting.done():
            error = runner.starting.exception()
            if error is not None:
                self.fail(runner, error)
                return False
            if runner.end_restart():
                return True
            self._watch(runner)
            return False
        if now >= runner.started_s + self._config.start_timeout_s:
            runner.end()
            limit = f"start_timeout_s={self._config.start_timeout_s}"
            self.fail(runner, WorkerDiedError(f"{runner.name} was not ready again within {limit}."))
        return False

    def lost_because(self) -> BaseException | None:
        """Return the failure of a runner if all have failed, and none will be restarted; otherwise `None`."""
        runners = self._runners.values()
        return [*runners][-1].failure if runners and all(runner.is_lost for runner in runners) else None

    def _watch(self, runner: RunnerHandle) -> None:
        """Note when the next step of a restart is over, or takes too long."""
        assert runner.starting is not None
        heappush(self._due, (runner.started_s + self._config.start_timeout_s, runner.index))
        runner.starting.add_done_callback(lambda _: self._note_step(runner.index))

    def _note_step(self, index: int) -> None:
        self._stepped.append(index)
        self.news.set()

    def runners_to_continue(self) -> list[RunnerHandle]:
        """Return the failed runners whose restart is due, has taken a step, or takes too long."""
        self._note_due()
        return [self._runners[i] for i in sorted({self._stepped.popleft() for _ in range(len(self._stepped))})]

    def _note_due(self) -> bool:
        """Note the restarts that have become due, or take too long, and return whether there are any."""
        now, num_before = time.perf_counter(), len(self._due)
        while self._due and self._due[0][0] <= now:
            self._stepped.append(heappop(self._due)[1])
        return len(self._due) < num_before

    def wait(self, timeout_s: float) -> None:
        """Wait at most so long until a runner has answered, or the next step of a restart is due."""
        if self._note_due():  # each ends one call only: who looks at all runners does not ask which they are
            return
        if self._due:
            timeout_s = min(timeout_s, self._due[0][0] - time.perf_counter())
        self.news.wait(max(0.0, timeout_s))
        self.news.clear()
