"""Asynchronous sampling: runners sample while the driver learns, and a batch is made of what arrives first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from corral.core.metrics.timers import Timers
from corral.data.episodes.rollout import Rollout
from corral.runners.requests import SampleRequest

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig
    from corral.runners.runner_group import EnvRunnerGroup
    from corral.runners.runner_handle import PendingSample


NUM_REQUESTS = 2
"""Requests that a runner of the engine holds: the one that it samples for, and the next one."""

_MOST_VERSIONS = 10_000  # of the weights, that are remembered


class Received(NamedTuple):
    """What a call of `AsyncSampler.sample` received.

    Attributes:
        rollouts: Fragments to learn from, in the order in which they arrived.
        num_env_steps_dropped: Env steps of fragments that were too old.
    """

    rollouts: list[Rollout]
    num_env_steps_dropped: int


class AsyncSampler:
    """Receives fragments of the runners of a group, each of which always has a next request.

    A runner in this process samples when it is asked. So the same code runs in turn there: deterministic, and with the
    runners of the local engine as old as with two requests in processes.

    Args:
        group: The runners.
        config: Their settings.
        count: Returns how many of the wanted steps a fragment holds.
    """

    def __init__(self, group: EnvRunnerGroup, config: RunnerConfig, count: Callable[[Rollout], int]) -> None:
        """Ask for nothing yet."""
        self._group, self._config, self._count = group, config, count
        self._updates_at: dict[int, int] = {}  # updates of the learners, by version of the weights
        self._updates_sent = 0  # updates that the weights which the runners have are from
        self._num_updates = 0  # at the call before
        self._num_env_steps = self._lag_sum = self._lag_max = 0

    def note_weights(self, version: int, num_updates: int) -> None:
        """Note after how many updates of the learners the weights of a version were sent."""
        self._updates_at[version] = self._updates_sent = num_updates
        if len(self._updates_at) > _MOST_VERSIONS:
            del self._updates_at[next(iter(self._updates_at))]

    def lag_of(self, version: int, num_updates: int) -> int:
        """Return how many updates the learners have made since the weights of a version."""
        oldest = next(iter(self._updates_at.values()), num_updates)
        return num_updates - self._updates_at.get(version, oldest)

    def sample(
        self,
        num_wanted: int,
        request: SampleRequest,
        num_updates: int,
        *,
        timers: Timers,
        wait: bool = True,
    ) -> Received:
        """Return the fragments that arrived first and hold at least so many steps.

        Args:
            num_wanted: Steps that are wanted.
            request: What each fragment is.
            num_updates: Updates that the learners have made.
            timers: Timers that count how long this process waits.
            wait: Whether to wait for the steps. Otherwise nothing is returned unless all of them have arrived.

        Raises:
            CorralError: The group was stopped.
            Exception: What a runner raised, unless the settings of fault tolerance let the run continue. The fragments
                that have arrived are returned by the next call, as after an interrupt.
        """
        # As many updates as before are likely to follow before the next fragment is received.
        next_updates = num_updates + max(1, num_updates - self._num_updates)
        ahead = self._samples_ahead(next_updates)
        if wait or not self._group.mail.answers_at_once:
            self._group.sample_async(request, max_requests=NUM_REQUESTS if ahead else 1)
        if not wait:
            left = num_wanted
            for part in self._group.mail.receive_samples():
                left -= 0 if self.is_too_old(part, num_updates) else self._count(part)
                if left <= 0:
                    break
            if left > 0:
                return Received([], 0)
        self._num_updates = num_updates
        taken: list[tuple[int, Rollout]] = []
        try:
            self._take(taken, num_wanted, request, num_updates, next_updates, ahead, timers)
        except BaseException:
            self._group.mail.put_back(taken)
            raise
        received = [rollout for _, rollout in taken if not self.is_too_old(rollout, num_updates)]
        num_env_steps = sum(rollout.num_env_steps for _, rollout in taken)
        return Received(received, num_env_steps - sum(rollout.num_env_steps for rollout in received))

    def _samples_ahead(self, next_updates: int) -> bool:
        """Return whether the runners sample for the next batch, after so many updates, before this one is full."""
        most = self._config.max_lag
        if self._group.local_env_runner is not None or most == 0:
            return False
        return most is None or self._config.on_lag == "drop" or next_updates - self._updates_sent <= most

    def _take(
        self,
        taken: list[tuple[int, Rollout]],
        left: int,
        request: SampleRequest,
        num_updates: int,
        next_updates: int,
        ahead: bool,
        timers: Timers,
    ) -> None:
        """Take fragments, also those that are too old, until the others hold so many steps; see `sample`."""
        group, config, ends_s = self._group, self._config, math.inf
        takes_several = ahead and request.num_wanted * group.num_remote_workers < left
        num_counted = num_env_steps = 0
        waits_for: list[PendingSample] | None = None  # in addition to the wanted steps
        while True:
            if left <= 0:
                if waits_for is None:
                    waits_for, ends_s = self._too_old(next_updates), time.perf_counter() + config.sample_timeout_s
                if not self._must_take_more(next_updates, ahead, waits_for):
                    break
            arrived = group.mail.next_sample()
            if arrived is None:
                if (left_s := min(config.sample_timeout_s, ends_s - time.perf_counter())) < 0:
                    break
                if left > 0:
                    # If a batch takes one fragment of each runner, what it does not need is asked for with the next
                    # batch, with the weights of then.
                    counted_per_env_step = num_counted / num_env_steps if num_env_steps else 1.0  # 1 unless of agents
                    needs_more = left > group.mail.num_env_steps_asked * counted_per_env_step
                    group.sample_async(request, max_requests=int(needs_more or takes_several) + int(ahead))
                with timers.time("waiting"):
                    group.mail.wait_for_sample(left_s)
                group.mail.report_late()
                continue
            taken.append(arrived)
            num = self._count(arrived[1])
            num_counted, num_env_steps = num_counted + num, num_env_steps + arrived[1].num_env_steps
            if not self.is_too_old(arrived[1], num_updates):
                left -= num

    def _too_old(self, next_updates: int) -> list[PendingSample]:
        """Return the fragments that runners are at, and that a batch waits for: with `on_lag="wait"`, if too old."""
        most = self._config.max_lag
        if most is None or self._config.on_lag != "wait":
            return []
        return [call for call in self._group.mail.pending() if self.lag_of(call.weights_version, next_updates) > most]

    def _must_take_more(self, next_updates: int, ahead: bool, waits_for: list[PendingSample]) -> bool:
        """Return whether a batch that is full takes more: what would be too old after so many updates.

        With `on_lag="wait"` that includes fragments that runners are at, and otherwise nothing if they sample ahead.
        """
        mail = self._group.mail
        if self._config.max_lag is None or (ahead and self._config.on_lag == "drop"):
            return False
        mail.take_arrived()
        while waits_for and waits_for[-1].future.done():
            waits_for.pop()
        return bool(waits_for) or (bool(mail.taken) and self.is_too_old(mail.taken[0][1], next_updates))

    def is_too_old(self, rollout: Rollout, num_updates: int) -> bool:
        """Return whether a fragment is older than `max_lag` allows, after so many updates of the learners."""
        most = self._config.max_lag
        return most is not None and self.lag_of(rollout.weights_version, num_updates) > most

    def note_lag(self, rollouts: Iterable[Rollout], num_updates: int) -> None:
        """Note that the next update, after so many others, is made from fragments."""
        for rollout in rollouts:
            lag = self.lag_of(rollout.weights_version, num_updates)
            self._num_env_steps += rollout.num_env_steps
            self._lag_sum += lag * rollout.num_env_steps
            self._lag_max = max(self._lag_max, lag)

    def take_costs(self) -> dict[str, Any]:
        """Return the mean and the largest lag, over the env steps that updates were made from since the last call."""
        num_steps, total, largest = self._num_env_steps, self._lag_sum, self._lag_max
        self._num_env_steps = self._lag_sum = self._lag_max = 0
        if not num_steps:
            return {"lag_mean": math.nan, "lag_max": math.nan}
        return {"lag_mean": total / num_steps, "lag_max": largest}
