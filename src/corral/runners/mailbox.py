"""Requests to the runners of a group: who is asked for how much, what has arrived, and how long the group waits for it.

The group limits how long it waits for runners that are many times slower than the others, and how much it asks of them.

A slow runner may keep the others waiting for `PATIENCE_S` in total, on top of `straggler_factor` times the time that
they need themselves. From then on it gets shares that it can finish in the time of the others, and its fragments count
when they arrive. As soon as it is as fast as the others again, it is treated like them.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from bisect import bisect_left, insort, insort_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from corral.core.metrics.logger import MetricsLogger, Parts
from corral.core.metrics.timers import Timers
from corral.data.episodes.rollout import Rollout
from corral.runners.requests import SampleReply, SampleRequest
from corral.runners.restarts import Recovery
from corral.runners.runner_handle import PendingSample, RunnerHandle, SentWeights

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig

log = logging.getLogger("corral")

PATIENCE_S = 0.5


class Speeds:
    """The seconds per env step of all runners, sorted, so that a median takes no look at each of them."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        """Store the seconds per env step of the runners; NaN is a runner that has sampled nothing."""
        self._sorted = sorted(value for value in seconds if not math.isnan(value))

    def replace(self, old: float, new: float) -> None:
        """Note that a runner's seconds per env step have changed; NaN is not known."""
        if not math.isnan(old):
            del self._sorted[bisect_left(self._sorted, old)]
        if not math.isnan(new):
            insort(self._sorted, new)

    def usual_without(self, own: float) -> float:
        """Return the median of the other runners' seconds per env step; NaN while they have sampled nothing.

        Args:
            own: The runner's own seconds, which are among them; NaN if not known.
        """
        place = len(self._sorted) if math.isnan(own) else bisect_left(self._sorted, own)
        num_others = len(self._sorted) - (not math.isnan(own))
        if not num_others:
            return math.nan
        low, high = (num_others - 1) // 2, num_others // 2
        return (self._sorted[low + (low >= place)] + self._sorted[high + (high >= place)]) / 2


def add_excess_wait(runner: RunnerHandle, speeds: Speeds, factor: float | None, num_env_steps: int) -> None:
    """Add the time that a slow runner cost the others with a fragment; a runner as fast as they are starts at 0 again.

    Args:
        runner: Runner whose fragment has arrived.
        speeds: Speeds of all runners of the group.
        factor: Setting `straggler_factor`; `None` counts nothing.
        num_env_steps: Env steps of the fragment.
    """
    usual = speeds.usual_without(runner.seconds_per_step)
    if factor is None or math.isnan(usual) or runner.seconds_per_step <= factor * usual:
        runner.excess_wait_s = 0.0
    else:
        runner.excess_wait_s += num_env_steps * (runner.seconds_per_step - factor * usual)


def is_straggler(runner: RunnerHandle) -> bool:
    """Return whether a runner has used up the patience of the others."""
    return runner.excess_wait_s > PATIENCE_S


def patience_ends_s(runner: RunnerHandle, speeds: Speeds, factor: float | None) -> float:
    """Return the clock reading until which a requested fragment is worth waiting for; infinity where not known."""
    usual, call = speeds.usual_without(runner.seconds_per_step), runner.sampling
    if factor is None or math.isnan(usual) or call is None or call.request.num_timesteps is None:
        return math.inf
    expected_s = factor * usual * call.request.num_timesteps
    return call.asked_s + expected_s + max(0.0, PATIENCE_S - runner.excess_wait_s)


def shares(num_wanted: int, idle: Sequence[RunnerHandle], *, exactly: bool = False) -> list[tuple[RunnerHandle, int]]:
    """Return each runner's even part of env steps or episodes; stragglers get as much as they finish in the same time.

    Args:
        num_wanted: Env steps or episodes that the other runners take in total.
        idle: Runners that can be asked.
        exactly: Whether the shares of all runners must add up to `num_wanted`, as for episodes.

    Returns:
        Runners, each with its share; runners with a share of 0 are left out.
    """
    slow = [runner for runner in idle if is_straggler(runner)]
    others = [runner for runner in idle if not is_straggler(runner)]
    if exactly or not others:  # or nobody is faster
        slow, others = [], list(idle)
    if not others:
        return []
    share, extra = divmod(num_wanted, len(others))
    asked = [(runner, share + (position < extra)) for position, runner in enumerate(others)]
    usual = Speeds(runner.seconds_per_step for runner in others).usual_without(math.nan) if slow else math.nan
    for runner in slow:
        asked.append((runner, share if math.isnan(usual) else round(share * usual / runner.seconds_per_step)))
    return [(runner, wanted) for runner, wanted in asked if wanted]


def _no_fragment() -> None:
    """Stand for the reference to a fragment that nobody holds."""


class Mailbox:
    """Asks runners for fragments, and keeps what has arrived until somebody takes it.

    No call looks at all runners for each answer: an answer says itself which runner it is from.

    Attributes:
        taken: Fragments that no call has returned yet, each in a pair with the index of its runner. Those with the
            oldest weights are the first, and of these the one that arrived first.
        num_env_steps: Env steps of all runners of the algorithm, where known.
        num_env_steps_asked: Env steps of the fragments that runners are asked for, and that were not received yet.
        freed: Runners that may hold fewer requests than `ask_all` last gave them, or are ready again.
        num_env_steps_returned: Env steps of the fragments that were returned.
    """

    def __init__(
        self,
        config: RunnerConfig,
        runners: Mapping[int, RunnerHandle],
        weights: SentWeights,
        recovery: Recovery,
        *,
        has_own_process: bool,
    ) -> None:
        """Ask for nothing yet.

        Args:
            config: Settings of the runners.
            runners: Handles of the runners by index.
            weights: Weights that a runner gets before it is asked.
            recovery: What is told of failures.
            has_own_process: Whether each runner is in a process of its own.
        """
        self._config, self._runners, self._weights, self._recovery = config, runners, weights, recovery
        self._has_own_process = has_own_process
        self.num_env_steps = self.num_env_steps_returned = self.num_env_steps_asked = 0
        self.taken: list[tuple[int, Rollout]] = []
        # Answers since the last look: the index of the runner, and the env steps that it was asked for.
        self._arrived: deque[tuple[int, int]] = deque()
        self.freed = set(runners)
        self._num_requests = 0  # that it gave each
        self._looked_s = -math.inf
        self._speeds = Speeds()
        # What came with fragments: index of the runner, metrics, seconds, and the fragment, which they wait for.
        self._logged: list[tuple[int, Parts, dict[str, float], Callable[[], Rollout | None]]] = []

    def pending(self) -> Iterable[PendingSample]:
        """Return the calls for fragments that were not received yet."""
        return [call for runner in self._runners.values() for call in runner.requests]

    def timestep_of(self, request: SampleRequest) -> int:
        """Return the env steps at which a request is made, and count on from there if the request says so itself."""
        if request.timestep is not None:
            self.num_env_steps = request.timestep
            return request.timestep
        return self.num_env_steps + self.num_env_steps_asked

    @property
    def answers_at_once(self) -> bool:
        """Whether a runner has sampled when the call that asks it returns, because it is in this process."""
        return not self._has_own_process

    def receive_samples(self) -> list[Rollout]:
        """Receive what has arrived, and return all fragments that `next_sample` will return.

        Raises:
            Exception: As `sample` does.
        """
        self.take_arrived()
        return [rollout for _, rollout in self.taken]

    def next_sample(self) -> tuple[int, Rollout] | None:
        """Return the fragment that has arrived with the oldest weights, of several the first, or `None`.

        The index of its runner comes with it, for `put_back`.
        """
        self.take_arrived()
        if not self.taken:
            return None
        index, rollout = self.taken.pop(0)
        self.freed.add(index)
        self.num_env_steps_returned += rollout.num_env_steps
        return index, rollout

    def put_back(self, taken: Sequence[tuple[int, Rollout]]) -> None:
        """Put back what `next_sample` returned, so that it is returned again before what arrives later."""
        for entry in reversed(taken):
            insort_left(self.taken, entry, key=lambda entry: entry[1].weights_version)
        self.num_env_steps_returned -= sum(rollout.num_env_steps for _, rollout in taken)

    def idle(self, indices: Iterable[int] | None = None) -> list[RunnerHandle]:
        """Return the runners that can be asked and hold no request, of all runners or of those with some indices."""
        runners = self._runners.values() if indices is None else map(self._runners.__getitem__, sorted(set(indices)))
        return [runner for runner in runners if runner.ready and not runner.requests]

    def return_taken(self) -> list[Rollout]:
        """Return the fragments that were received, in the order of the runners' indices."""
        taken, self.taken = self.taken, []
        self.freed.update(index for index, _ in taken)
        self.num_env_steps_returned += sum(rollout.num_env_steps for _, rollout in taken)
        return [rollout for _, rollout in sorted(taken, key=lambda entry: entry[0])]

    def take_arrived(self) -> int:
        """Receive the fragments that are there, and what runners raised in place of them; see `take_replies`.

        Returns:
            How many answers there were.
        """
        num_answers = 0
        for index, call, reply in self.take_replies():
            num_answers += 1
            if isinstance(reply, BaseException) or call.request.digest is not None:
                continue  # it failed, or the reply is too late for the evaluation round that wanted it
            insort(self.taken, (index, reply.rollout), key=lambda entry: entry[1].weights_version)
            self.keep_logged(index, reply.metrics, reply.seconds, weakref.ref(reply.rollout))
            self.num_env_steps += reply.rollout.num_env_steps
            factor = None if call.request.num_timesteps is None else self._straggler_factor
            add_excess_wait(self._runners[index], self._speeds, factor, reply.rollout.num_env_steps)
        return num_answers

    def idle_runners(self, indices: Iterable[int] | None = None) -> list[int]:
        """Return the indices that `ask` can be called with now, of all or of some."""
        return [runner.index for runner in self.idle(indices)]

    def ask(self, index: int, request: SampleRequest, timeout_s: float | None = None) -> PendingSample:
        """Ask one runner for samples, and return the call, whose answer `take_replies` returns.

        The embedded runner and runners of the local engine have answered when this method returns.

        Args:
            index: Index of the runner.
            request: What it samples.
            timeout_s: Seconds after which a runner in its own process counts as hung, is ended and replaced;
                `worker_timeout_s` applies, too.
        """
        runner = self._runners[index]
        if runner.weights_version != self._weights.version:
            runner.send_weights(self._weights)
        runner.ask(request, timeout_s)
        call, arrived, arrival = runner.requests[-1], self._arrived, (index, request.num_timesteps or 0)
        self.num_env_steps_asked += arrival[1]
        call.future.add_done_callback(lambda _: self._note_arrival(arrived, arrival))
        return call

    def ask_all(self, request: SampleRequest, max_requests: int) -> int:
        """Ask each runner that holds fewer than `max_requests`; see `EnvRunnerGroup.sample_async`.

        It looks at the runners that may hold fewer than the last call gave them, and at all only if that was less.
        """
        freed = sorted(self.freed if max_requests <= self._num_requests else self._runners)
        num_asked, arrived = 0, Counter(index for index, _ in self.taken)
        for num_held in range(max_requests):
            timestep = self.timestep_of(request)
            for index in freed:
                runner = self._runners[index]
                if runner.ready and len(runner.requests) + arrived[index] == num_held:
                    self.ask(index, request.part(request.num_wanted, timestep))
                    num_asked += 1
        self.freed = set()
        self._num_requests = max_requests
        return num_asked

    def _note_arrival(self, arrived: deque[tuple[int, int]], arrival: tuple[int, int]) -> None:
        arrived.append(arrival)
        self._recovery.news.set()

    def take_replies(self) -> Iterator[tuple[int, PendingSample, SampleReply | BaseException]]:
        """Receive the replies that are there, and yield them with the runner's index and the call.

        If a runner failed, the exception takes the place of the reply. The metrics of a reply count only after
        `keep_metrics`.

        Raises:
            Exception: What a runner raised, if it ends the run.
        """
        self._recovery.news.clear()
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        self.num_env_steps_asked -= sum(num_env_steps for _, num_env_steps in arrived)
        indices = sorted({index for index, _ in arrived}, reverse=True)
        self.freed.update(indices)
        try:
            while indices:
                runner = self._runners[indices[-1]]
                while (call := runner.sampling) is not None and call.future.done():
                    if error := call.future.exception() or runner.sync_error():
                        self._recovery.fail(runner, error, call)
                        yield runner.index, call, error
                    else:
                        seconds_before = runner.seconds_per_step
                        reply = runner.take(call, self._weights.version)
                        self._speeds.replace(seconds_before, runner.seconds_per_step)
                        yield runner.index, call, reply
                indices.pop()
        finally:  # an exception leaves the others to the next look
            self._arrived.extend((index, 0) for index in indices)

    def keep_logged(
        self, index: int, parts: Parts, seconds: dict[str, float], fragment: Callable[[], Rollout | None] = _no_fragment
    ) -> None:
        """Let `collect_metrics` collect what a runner logged, and the seconds of its timers.

        Args:
            index: Index of the runner.
            parts: What it logged.
            seconds: Seconds by part; empty if it logs into the metrics and timers of the algorithm itself.
            fragment: Returns the fragment with which they came, which nobody may have returned yet.
        """
        if seconds:
            self._logged.append((index, parts, seconds, fragment))

    def wait_for_sample(self, timeout_s: float) -> None:
        """Wait at most so long until a fragment arrives, or `restore_runners` can take the next step of a restart."""
        if not self._arrived:
            self._recovery.wait(timeout_s)

    def report_late(self) -> None:
        """Log the runners whose fragments have been late for `sample_timeout_s`, each fragment once.

        Calls that follow soon do nothing: with many runners, one follows each answer.
        """
        now = time.perf_counter()
        if now - self._looked_s < min(PATIENCE_S, self._config.sample_timeout_s):
            return
        self._looked_s, asked_before_s = now, now - self._config.sample_timeout_s
        calls = [(runner, runner.sampling) for runner in self._runners.values() if runner.sampling is not None]
        for runner, call in calls:
            began_s = max(call.asked_s, runner.replied_s)  # until then it was at another one
            if call.is_reported or began_s > asked_before_s or call.future.done():
                continue
            call.is_reported = True
            log.warning(
                "No fragment arrived within sample_timeout_s=%s from %s; a later fragment counts in a later round. "
                "If an env may hang, set fault_tolerance(env_step_timeout_s=...). %s",
                self._config.sample_timeout_s,
                runner.name,
                "worker_timeout_s=None: the runner is never replaced for being late."
                if call.timeout_s is None
                else f"The runner is replaced if it takes longer than {call.timeout_s:.0f} s (worker_timeout_s).",
            )

    @property
    def _straggler_factor(self) -> float | None:
        return self._config.straggler_factor if self._config.batch_mode == "truncate_episodes" else None

    def receive_round(self, deadline_s: float) -> None:
        """Receive the fragments that runners are at, as long as each is worth waiting for.

        If nothing has been received, and none is worth it, any of them is.

        Args:
            deadline_s: Clock reading after which none is waited for.
        """
        waiting: Iterable[RunnerHandle] = self._runners.values()
        while waiting := [runner for runner in waiting if runner.sampling is not None]:
            now = time.perf_counter()
            ends_s = [patience_ends_s(runner, self._speeds, self._straggler_factor) for runner in waiting]
            ends_s = [end_s for end_s in ends_s if end_s > now]
            if self.taken and not ends_s:
                break
            # Answers move the ends, so all are computed again soon. After each answer it would cost the square of the
            # number of runners: half of the runners answer before.
            look_s, num_new = min(deadline_s, now + PATIENCE_S, *ends_s), 0
            while num_new <= (len(waiting) - 1) // 2:
                if not self._arrived and not self._recovery.news.wait(max(0.0, look_s - time.perf_counter())):
                    break
                num_new += self.take_arrived()
            if time.perf_counter() >= deadline_s:
                break

    # Metrics and state.

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Collect what came with fragments; see `EnvRunnerGroup.collect_metrics`."""
        held = {id(rollout) for _, rollout in self.taken}
        collected = [entry for entry in self._logged if id(entry[3]()) not in held]
        self._logged = [entry for entry in self._logged if id(entry[3]()) in held]
        for parts_of_round in _rounds([(index, parts) for index, parts, _, _ in collected]):
            metrics.aggregate(parts_of_round, key="env_runners")
        for _, _, seconds, _ in collected:
            timers.add(seconds)

    def parts_in_flight(self) -> list[Parts]:
        """Return what runners logged with fragments that are there, and that `collect_metrics` has not collected."""
        done = [call.future for call in self.pending() if call.future.done()]
        arrived = [future.result().metrics for future in done if future.exception() is None]
        return [*arrived, *(parts for _, parts, _, _ in self._logged)]

    def num_env_steps_held(self) -> Counter[int]:
        """Return the env steps of the fragments that no call has returned yet, by index of the runner."""
        held: Counter[int] = Counter()
        for index, rollout in self.taken:
            held[index] += rollout.num_env_steps
        return held

    def forget(self, num_env_steps: int) -> None:
        """Drop all fragments and their metrics; all runners have taken so many env steps."""
        self.taken, self._logged, self.num_env_steps = [], [], num_env_steps
        self._arrived, self.num_env_steps_asked = deque(), 0  # requests that are under way belong to nobody
        self.freed.update(self._runners)


def _rounds(fragments: Sequence[tuple[int, Parts]]) -> list[list[Parts]]:
    """Return the metrics of fragments by round, in the order of the runners' indices.

    Fragments of one round are from the same time. So the next round begins when a runner delivers its next fragment.

    Args:
        fragments: Index of the runner and metrics of each fragment, in the order in which they arrived.
    """
    rounds: list[dict[int, Parts]] = [{}]
    for index, parts in fragments:
        if index in rounds[-1]:
            rounds.append({})
        rounds[-1][index] = parts
    return [[round_[index] for index in sorted(round_)] for round_ in rounds]
