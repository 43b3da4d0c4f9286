"""The states of all runners of a group, for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from corral.envs.host_state import find_env_config
from corral.errors import CheckpointError
from corral.runners.requests import WorkerCounts
from corral.runners.runner_handle import RunnerHandle
from corral.runners.runner_state import (
    check_runner_state,
    get_runner_state,
    make_runner_state,
    set_runner_state,
)

log = logging.getLogger("corral")

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig


class StatesOfRunners:
    """Reads the states of the runners of a group, and lets the runners continue from states.

    A state is a list with one state for each runner, in the order of their indices.

    Args:
        config: Settings of the runners.
        runners: Handles of the runners by index.
    """

    def __init__(self, config: RunnerConfig, runners: Mapping[int, RunnerHandle]) -> None:
        """Keep the runners, which the group still owns."""
        self._config, self._runners = config, runners
        self._spare: list[dict[str, Any]] = []  # states of a restored run, beyond the runners here

    def get(self, lost: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return the states of all runners as copies of plain data; see `EnvRunnerGroup.get_state`.

        Args:
            lost: Env steps of each runner, by index, that it is past and that no call has returned yet.

        A runner that raises has the state of its replacement, with a warning.
        """
        runners = self._runners.values()
        calls = [runner.call(get_runner_state) if self._can_answer(runner) else None for runner in runners]
        wait([call for call in calls if call is not None], self._config.sample_timeout_s)
        pairs = zip(runners, calls, strict=True)
        return [*(self._state_of(runner, call, lost.get(runner.index, 0)) for runner, call in pairs), *self._spare]

    def _can_answer(self, runner: RunnerHandle) -> bool:
        is_busy = runner.sampling is not None and not runner.sampling.future.done()
        return runner.ready and not (self._config.in_evaluation and is_busy)

    def _state_of(self, runner: RunnerHandle, call: Future[Any] | None, num_lost: int) -> dict[str, Any]:
        """Return the state of a runner, with what its place has counted; the embedded runner counts itself."""
        error = call.exception() if call is not None and call.done() else None
        if error is not None:
            _warn_of(runner.index, error)
        num_lost += sum(call.num_env_steps for call in runner.requests)
        if runner.index == 0:
            assert call is not None
            known = {} if error is None else runner.handle.call("get_state").result()
            state: dict[str, Any] = call.result() if error is None else make_runner_state(self._config, 0, 1, known)
            state["numbers"]["num_env_steps_lost"] += num_lost
            return state
        counts = asdict(runner.counts + WorkerCounts(num_env_steps_lost=num_lost))
        if call is None or not call.done() or error is not None:
            counts["num_restarts"] += 1
            made = make_runner_state(self._config, runner.index, counts["num_restarts"], runner.state)
            return {**made, "counts": counts}
        return {**call.result(), "counts": counts}

    def check(self, states: list[dict[str, Any]]) -> None:
        """Check that the runners can take states, without changing anything.

        Raises:
            Exception: A runner cannot; see `check_runner_state`.
        """
        for state in states:
            counts = state.get("counts", {})
            if counts.keys() - asdict(WorkerCounts()).keys() or {int} != {int, *map(type, counts.values())}:
                raise CheckpointError(f"the counts of a runner are {counts!r:.80}, and not integers.")
        self._call_each(check_runner_state, states)

    def set(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Let the runners continue from states that `check` accepted, and return which envs continue."""
        restored = self._call_each(set_runner_state, states)
        self._spare = list(states[max(1, len(self._runners)) :])
        for runner, state in zip(self._runners.values(), states, strict=False):
            runner.continue_from(state)
        for runner in self._runners.values():
            runner.requests.clear()
            runner.weights_version, runner.syncs = -1, []
        for runner in [*self._runners.values()][len(states) :] if states else ():
            saved = states[(runner.index - 1) % len(states)]["env"]
            env_config = find_env_config(saved, self._config.env_config)
            changed = {} if env_config is None else {"env_config": env_config}
            runner.make_up_for(("set_state", {"state": {"environment": changed, "tasks": saved["tasks"]}}))
        return {
            **{name: sum(found[name] for found in restored) for name in ("num_envs_continued", "num_envs_restarted")},
            **{name: [text for found in restored for text in found[name]] for name in ("continued", "restarted")},
        }

    def _call_each(self, function: Callable[..., Any], states: list[dict[str, Any]]) -> list[Any]:
        """Return `function(runner, its_state)` of every runner that has a state; all of them have answered.

        Raises:
            Exception: Exception of the first runner that raised.
        """
        pairs = zip(self._runners.values(), states, strict=False)
        futures = [runner.call(function, state) for runner, state in pairs if runner.ready]
        wait(futures)
        return [future.result() for future in futures]


def _warn_of(index: int, error: BaseException) -> None:
    log.warning(
        "The checkpoint has no state of runner %d, so that a restored run continues as with a new one: %s: %s",
        *(index, type(error).__name__, error),
        exc_info=error,
    )
