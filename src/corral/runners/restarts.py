"""Decide what follows from the failure of a runner: restart it, continue without it, or end the run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from corral.errors import CallbackError, ConfigError, SampleError, SerializationError, WeightsError
from corral.metrics.reduction_settings import MetricsError

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig
    from corral.runners.remote_runner import RemoteRunner

log = logging.getLogger("corral")

# Failures of the user's own code and settings: a restarted runner would fail in the same way.
NOT_FAULTS = (CallbackError, ConfigError, MetricsError, SampleError, SerializationError, WeightsError)

LONGEST_DELAY_S = 60.0


def restart_delay_s(num_failures_in_row: int, delay_s: float) -> float:
    """Return seconds to wait before a restart: 0 the first time, then `delay_s`, doubled each time."""
    return 0.0 if num_failures_in_row == 1 else min(LONGEST_DELAY_S, delay_s * 2.0 ** (num_failures_in_row - 2))


def note_failure(
    runner: RemoteRunner, error: BaseException, config: RunnerConfig, num_restarts_of_all: int
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


def _limit(runner: RemoteRunner, config: RunnerConfig, num_restarts_of_all: int) -> str | None:
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
