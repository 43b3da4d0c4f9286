"""Calls of user code in the runners of the engine: who got a call, who missed it, and what it changed there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from corral.errors import WorkerDiedError
from corral.runners.runner_handle import PendingUserCall, RoundOfCalls, RunnerHandle


class UserCalls:
    """Makes calls of user code, and lets a runner that missed a change of the envs make it later.

    Args:
        runners: Runners of the engine by index.
        fail: Function that counts a failure of a runner and plans its restart; it raises what ends the run.

    Attributes:
        num_env_steps_by_hand: Env steps that the calls sampled, once they are done.
        unnoted: Calls whose effect on their runner is not known yet, by their `id`.
    """

    def __init__(
        self, runners: Mapping[int, RunnerHandle], fail: Callable[[RunnerHandle, BaseException], None]
    ) -> None:
        """Keep the runners; no call is made yet."""
        self._runners = runners
        self._fail = fail
        self.num_env_steps_by_hand = 0
        self.unnoted: dict[int, PendingUserCall] = {}  # by `id`
        self._unfetched: list[PendingUserCall] = []  # calls whose results `fetch_ready` returns
        self._task_calls: list[PendingUserCall] = []  # of `choose_tasks`, in runners that were busy

    def begin(
        self, fn: str | Callable[..., Any], kwargs: Mapping[str, Any] | None, ids: Iterable[int] | None
    ) -> list[PendingUserCall]:
        """Call `fn` in the healthy ones of the runners `ids` (`None`: all), and return the pending calls.

        Raises:
            ValueError: There is no runner with one of the ids.
        """
        chosen = [*self._runners] if ids is None else list(ids)
        unknown = sorted(set(chosen) - self._runners.keys())
        if unknown:
            raise ValueError(f"remote_worker_ids: this group has no runners {unknown}; it has {[*self._runners]}.")
        reached = {i for i in chosen if self._runners[i].is_healthy}
        calls = RoundOfCalls((fn, dict(kwargs or {})))
        # What nobody receives may have been meant to change the envs.
        calls.note(missed_by=[self._runners[i] for i in chosen if i not in reached], changes_envs=not reached)
        made = [self._runners[i].call_for_user(calls) for i in chosen if i in reached]
        self.unnoted |= {id(call): call for call in made}
        return made

    def begin_fetched(
        self, fn: str | Callable[..., Any], kwargs: Mapping[str, Any] | None, ids: Iterable[int] | None
    ) -> int:
        """Make calls as `begin` does, whose results `fetch_ready` returns; return the number of calls."""
        calls = self.begin(fn, kwargs, ids)
        self._unfetched += calls
        return len(calls)

    def fetch_ready(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        """Return index and result of calls that are done; wait up to `timeout_seconds` for one if there is none."""
        wait([call.future for call in self._unfetched], timeout_seconds, FIRST_COMPLETED)
        done, self._unfetched = _split(self._unfetched)
        return self.take_results(done)

    def choose_tasks(self, train_results: Mapping[str, Any]) -> None:
        """Let all runners choose tasks, and wait for those that are not sampling."""
        self._task_calls += self.begin("choose_tasks", {"train_results": train_results}, None)
        wait([call.future for call in self._task_calls if call.runner.sampling is None])
        done, self._task_calls = _split(self._task_calls)
        self.take_results(done)

    def take_results(self, calls: Iterable[PendingUserCall]) -> list[tuple[int, Any]]:
        """Return index and result of calls that are done and reached their runners.

        Raises:
            Exception: Exception that the function raised.
        """
        results = []
        for call in calls:
            self._note(call)
            error = call.future.exception()
            if error is None:
                results.append((call.runner.index, call.future.result()[0]))
            elif not isinstance(error, WorkerDiedError):
                raise error
        return results

    def note_done(self) -> None:
        """Note what the calls that are done did to their runners, whether or not somebody waits for the results."""
        for call in [call for call in self.unnoted.values() if call.future.done()]:
            self._note(call)

    def _note(self, call: PendingUserCall) -> None:
        """Note once what a call that is done did to its runner."""
        if self.unnoted.pop(id(call), None) is None:
            return
        runner, error = call.runner, call.future.exception()
        if isinstance(error, WorkerDiedError):
            call.round.note(missed_by=[runner])
            if runner.failure is None and runner.handle is call.handle:  # not restarted since
                self._fail(runner, error)
        elif error is None:
            _, state, changes_envs, num_env_steps = call.future.result()
            self.num_env_steps_by_hand += num_env_steps
            runner.note_state(state, call.asked_s)
            call.round.note(changes_envs=changes_envs)


def _split(calls: Iterable[PendingUserCall]) -> tuple[list[PendingUserCall], list[PendingUserCall]]:
    """Return the calls that are done, and the others."""
    parts: tuple[list[PendingUserCall], list[PendingUserCall]] = [], []
    for call in calls:
        parts[not call.future.done()].append(call)
    return parts
