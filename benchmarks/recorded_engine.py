"""An engine whose workers replay recorded answers in virtual time, so that one process drives thousands of runners.

One real runner answers each kind of call once. All workers replay its answers, as many virtual seconds later as the
work takes. Some workers are slow, some calls fail, and some are never answered. The driver is the real one: only the
clock and the waits of Python, which it uses, are replaced, so that a wait lets virtual time pass.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from corral.algorithms import evaluator
from corral.engines import lazy
from corral.engines.base import TRAITS, Resources
from corral.engines.call_limits import overdue_message
from corral.engines.local import LocalHandle
from corral.engines.serialization import pack
from corral.errors import WorkerDiedError
from corral.runners import restarts, runner_group, states_of_runners, user_calls
from corral.runners.requests import SampleReply, SampleRequest, WorkerCounts

# Virtual seconds of an env step, of an episode, and of a call that samples nothing.
STEP_S, EPISODE_S, CALL_S = 1e-3, 1e-2, 1e-3
# What varies from call to call, as a part of its seconds; and how much slower a straggler is.
SPREAD, SLOWNESS = 0.1, 10.0
# Calls of runners that start, which are answered at once: a failure there ends the run.
STARTING = ("describe_env", "make_modules")


class Clock:
    """Virtual time: what is to happen, in the order of time.

    Attributes:
        now_s: Clock reading.
    """

    def __init__(self) -> None:
        """Begin at 0, with nothing that is to happen."""
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._num_added = 0

    def read(self) -> float:
        """Return the clock reading, as `time.perf_counter` does."""
        return self.now_s

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Call a function when it is so late; of two at the same time, the one that was given first."""
        self._num_added += 1
        heapq.heappush(self._due, (time_s, self._num_added, action))

    def run(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Let time pass until something is over, at most so long, and return whether it is over.

        Raises:
            RuntimeError: The driver waits without limit for something that never happens.
        """
        end_s = math.inf if timeout_s is None else self.now_s + timeout_s
        while not is_over():
            if not self._due or self._due[0][0] > end_s:
                if timeout_s is None:
                    raise RuntimeError("the driver waits without limit for an answer that never comes.")
                self.now_s = max(self.now_s, end_s)
                return False
            time_s, _, action = heapq.heappop(self._due)
            self.now_s = max(self.now_s, time_s)
            action()
        return True

    def wait(
        self, futures: Iterable[Future[Any]], timeout: float | None = None, return_when: str = ALL_COMPLETED
    ) -> tuple[set[Future[Any]], set[Future[Any]]]:
        """Wait as `concurrent.futures.wait` does."""
        given = set(futures)
        left = [future for future in given if not future.done()]
        finished: list[Future[Any]] = []
        wanted = len(left) if return_when == ALL_COMPLETED else int(len(left) == len(given) > 0)
        for future in left if wanted else ():
            future.add_done_callback(finished.append)
        self.run(lambda: len(finished) >= wanted, timeout)
        done = {future for future in given if future.done()}
        return done, given - done


class Event:
    """An event whose `wait` lets virtual time pass."""

    def __init__(self, clock: Clock) -> None:
        """Begin without being set."""
        self._clock, self._is_set = clock, False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it."""
        self._is_set = True

    def clear(self) -> None:
        """Set it no more."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most so long, and return whether it is."""
        return self._clock.run(self.is_set, timeout)


@dataclass(frozen=True)
class Faults:
    """How often something goes wrong, as a part of all calls or of all workers.

    Attributes:
        failing: Calls that raise.
        hanging: Calls that are never answered; the worker is killed at their time limit, if they have one.
        slow: Workers that are stragglers.
    """

    failing: float = 0.0
    hanging: float = 0.0
    slow: float = 0.0


@dataclass
class Call:
    """A call that was not answered yet.

    Attributes:
        future: Future of the answer.
        answer: The answer.
        request: What it samples; `None` if it samples nothing.
    """

    future: Future[Any]
    answer: Any
    request: SampleRequest | None


class RecordedEngine:
    """Starts workers that replay the answers of one real runner.

    Attributes:
        traits: Traits of the process engine, in whose place it is used.
        clock: Virtual time.
        faults: What goes wrong.
        counts: Calls by name, `put` included, and calls that failed or hung. Of training, env steps that were asked
            for, and of these those that were answered, that were lost with an exception or a worker, and that were not
            taken; and episodes that were answered.
        rng: Generator of what goes wrong, and of how long calls take.
        has_begun: Whether time passes and faults happen; see `going_wrong`.
    """

    traits = TRAITS["process"]

    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        """Start nothing yet."""
        self.clock, self.faults = Clock(), faults or Faults()
        self.counts: Counter[str] = Counter()
        self.rng = random.Random(seed)
        self.has_begun = False
        self._real: dict[str, LocalHandle] = {}
        self._answers: dict[Any, Any] = {}

    def require(self, resources: Sequence[Resources]) -> None:
        """Accept all."""

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> RecordedHandle:
        """Return a worker; the first one of each kind is made, and answers for all."""
        kind, _, index = name.rpartition(" ")
        if kind not in self._real:
            self._real[kind] = LocalHandle(factory, name)
        return RecordedHandle(self, kind, int(index))

    def put(self, value: Any) -> Any:
        """Return a value that is packed once, as the process engine does it."""
        self.counts["put"] += 1
        pack(value, "a value")
        return Put(value)

    def describe_available(self) -> str:
        """Return a sentence for messages."""
        return "Recorded runners never run out."

    def stop(self) -> None:
        """Close the env of the real runners."""
        for worker in self._real.values():
            worker.call("stop")

    def answer(self, kind: str, method: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what the real runner answered to the first call of this kind."""
        asked = args[0] if args and isinstance(args[0], SampleRequest) else None
        # A request is of the kind of another one if it asks for as much; user code that is called is a kind of its own.
        what = (asked.num_timesteps, asked.num_episodes, asked.digest) if asked else str(args[:1])
        key = kind, method, what if asked or getattr(method, "__name__", "") == "call_runner" else None
        if key not in self._answers:
            given = [arg.value if isinstance(arg, Put) else arg for arg in args]
            self._answers[key] = self._real[kind].call(method, *given, **kwargs).result()
        return self._answers[key]

    @contextmanager
    def in_use(self) -> Iterator[RecordedEngine]:
        """Let algorithms that are built in the block, with `engine_name="process"`, use this engine and its clock."""
        modules = (evaluator, runner_group, states_of_runners, user_calls)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(lazy, "make_engine", lambda name: self))
            stack.enter_context(mock.patch.object(time, "perf_counter", self.clock.read))
            stack.enter_context(mock.patch.object(restarts, "Event", partial(Event, self.clock)))
            for module in modules:
                stack.enter_context(mock.patch.object(module, "wait", self.clock.wait))
            yield self

    @contextmanager
    def going_wrong(self) -> Iterator[None]:
        """Let virtual time pass in the block, and let the faults happen; elsewhere calls are answered at once."""
        self.has_begun = True
        try:
            yield
        finally:
            self.has_begun = False


class Put:
    """A value that was packed once.

    Attributes:
        value: The value.
    """

    def __init__(self, value: Any) -> None:
        """Keep the value for the real runner."""
        self.value = value


class RecordedHandle:
    """Handle of a worker that replays answers."""

    def __init__(self, engine: RecordedEngine, kind: str, index: int) -> None:
        """Store what it replays; it may be a straggler."""
        self._engine, self._kind, self._index = engine, kind, index
        self._slowness = SLOWNESS if engine.rng.random() < engine.faults.slow else 1.0
        self._death: WorkerDiedError | None = None
        self._calls: deque[Call] = deque()
        self._free_s = 0.0
        self._version = self._num_env_steps_lost = 0

    def call(self, method: Any, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Future[Any]:
        """Return a future at once, which gets the recorded answer when its time has come."""
        engine, future, name = self._engine, Future[Any](), getattr(method, "__name__", method)
        if self._death is not None:
            future.set_exception(self._death)
            return future
        engine.counts[name] += 1
        if name in ("set_weight_parts", "restore_runner"):
            assert isinstance(args[0], Put), "the weights are packed for each runner"
            self._version = args[1]
        answer = engine.answer(self._kind, method, args, kwargs)
        request = args[0] if isinstance(answer, SampleReply) else None
        call = Call(future, self._own(answer) if request else answer, request)
        self._count("asked", call)
        self._calls.append(call)
        self._plan(call, timeout_s, goes_wrong=engine.has_begun and name not in STARTING)
        return future

    def _plan(self, call: Call, timeout_s: float | None, *, goes_wrong: bool) -> None:
        """Choose when a call is answered, and how."""
        engine, request = self._engine, call.request
        chance = engine.rng.random() if goes_wrong else 1.0
        seconds = CALL_S
        if request is not None:
            seconds = (request.num_timesteps or 0) * STEP_S + (request.num_episodes or 0) * EPISODE_S
        seconds *= self._slowness * (1 + SPREAD * engine.rng.random())
        begins_s = max(engine.clock.now_s, self._free_s)
        if chance < engine.faults.hanging:
            engine.counts["hung"] += 1
            self._free_s = math.inf
            if timeout_s is not None:
                death = WorkerDiedError(f"Runner {self._index} {overdue_message(timeout_s)}")
                engine.clock.at(begins_s + timeout_s, partial(self._die, death))
        elif not goes_wrong and len(self._calls) == 1:
            self._answer(True)
        elif begins_s < math.inf:
            self._free_s = begins_s + seconds
            succeeds = chance >= engine.faults.hanging + engine.faults.failing
            engine.clock.at(self._free_s, partial(self._answer, succeeds))

    def _answer(self, succeeds: bool) -> None:
        """Answer the oldest call."""
        if self._death is not None:
            return
        call = self._calls.popleft()
        if succeeds:
            self._count("answered", call)
            if call.request is not None and self._num_env_steps_lost:
                call.answer = replace(call.answer, counts=WorkerCounts(0, 0, 0, self._num_env_steps_lost))
            call.future.set_result(call.answer)
            return
        error = RuntimeError("a fault")
        self._engine.counts["failed"] += 1
        if call.request is not None:  # it failed in the middle, and says so, as a real runner does
            num_lost = call.answer.rollout.num_env_steps // 2
            self._count("lost", call, num_lost)
            self._count("not_taken", call, call.answer.rollout.num_env_steps - num_lost)
            self._num_env_steps_lost += num_lost
            error.num_env_steps_lost = num_lost  # type: ignore[attr-defined]
        call.future.set_exception(error)

    def _own(self, reply: SampleReply) -> SampleReply:
        """Return a recorded reply as this worker gives it, with the weights that it has."""
        played = reply.rollout
        if hasattr(played, "columns"):
            played = copy.copy(played)
            played.weights_version, played.worker_index = self._version, self._index
        else:
            episodes = tuple(replace(episode, worker_index=self._index) for episode in played.episodes)
            played = replace(played, weights_version=self._version, episodes=episodes)
        return replace(reply, rollout=played)

    def _count(self, what: str, call: Call, num_env_steps: int | None = None) -> None:
        """Count env steps of a call of training, `None` is all; if it is answered, its episodes too."""
        if call.request is None or self._kind != "env runner":
            return
        whole: int = call.answer.rollout.num_env_steps
        self._engine.counts[f"env_steps_{what}"] += whole if num_env_steps is None else num_env_steps
        if what == "answered":
            self._engine.counts["episodes_answered"] += int(call.answer.rollout.done.sum())

    def alive(self) -> bool:
        """Return whether it can still answer."""
        return self._death is None

    def kill(self) -> None:
        """End it; calls that it has not answered fail."""
        self._die(WorkerDiedError(f"Runner {self._index} was ended."))

    def _die(self, death: WorkerDiedError) -> None:
        if self._death is None:
            self._death = death
            what = "lost"  # what it was at, as the driver sees it: a worker that died says nothing
            for call in self._calls:
                self._count(what, call)
                if call.request is not None:
                    what = "not_taken"
                call.future.set_exception(death)
            self._calls.clear()
