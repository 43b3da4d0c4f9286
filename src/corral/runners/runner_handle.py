"""A runner as the group sees it: its worker, its pending calls, its failures and its costs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from corral.core.plain import is_same
from corral.engines import Engine, WorkerHandle
from corral.engines.call_limits import CallLimits
from corral.errors import CorralError, WorkerDiedError
from corral.runners.requests import SampleReply, SampleRequest, WorkerCounts
from corral.runners.runner import EnvRunner
from corral.runners.worker_calls import UserCall, call_runner, repeat_calls, restore_runner, sample_and_report

if TYPE_CHECKING:
    from corral.modules.spec import ModuleSpec
    from corral.runners.config import RunnerConfig

# The speed of a runner is a mean over its latest fragments; each fragment has half the weight of the next one.
SPEED_COEFF = 0.5


@dataclass
class PendingCall:
    """A call of a runner, and when it was made and answered.

    Attributes:
        future: Future of the answer.
        asked_s: Clock reading when the call was made.
        arrived_s: Clock reading when the answer was there; NaN before.
    """

    future: Future[Any]
    asked_s: float
    arrived_s: float = float("nan")

    def __post_init__(self) -> None:
        """Note when the answer arrives."""
        self.future.add_done_callback(lambda _: setattr(self, "arrived_s", time.perf_counter()))


@dataclass
class PendingSample(PendingCall):
    """A call for a fragment, whose answer is a `SampleReply`.

    Attributes:
        request: What was asked for.
        weights_version: Version of the weights with which the runner samples.
        timeout_s: Seconds after which the runner counts as hung; `None` is no limit.
        is_reported: Whether the log says that the fragment is late.
    """

    request: SampleRequest = field(kw_only=True)
    weights_version: int = field(kw_only=True, default=-1)
    timeout_s: float | None = None
    is_reported: bool = False

    @property
    def num_env_steps(self) -> int:
        """Env steps of the fragment if it has arrived, else of the request; 0 if the request is for episodes."""
        if self.future.done() and self.future.exception() is None:
            return int(self.future.result().rollout.num_env_steps)
        return self.request.num_timesteps or 0


@dataclass
class PendingUserCall(PendingCall):
    """A call of a user's function, whose answer is what `call_runner` returns.

    Attributes:
        runner: The runner that was called.
        handle: Its worker at that time; the runner may have another one when the answer arrives.
        round: The calls of the same function in all runners.
    """

    runner: RunnerHandle = field(kw_only=True)
    handle: WorkerHandle = field(kw_only=True)
    round: RoundOfCalls = field(kw_only=True)


@dataclass
class RoundOfCalls:
    """The calls of one function in several runners.

    If the function changed tasks or settings of the envs of one of them, runners that were not there, or failed in it,
    get it as soon as they are ready again.

    Attributes:
        call: The function and its keyword arguments.
        missed_by: Runners that it did not reach, and that do not wait for it yet.
        changes_envs: Whether it is known to have changed the envs of a runner.
    """

    call: UserCall
    missed_by: list[RunnerHandle] = field(default_factory=list)
    changes_envs: bool = False

    def note(self, *, missed_by: Sequence[RunnerHandle] = (), changes_envs: bool = False) -> None:
        """Note runners that it did not reach, or that it changed the envs of a runner."""
        self.missed_by += missed_by
        self.changes_envs |= changes_envs
        if self.changes_envs:
            for runner in self.missed_by:
                runner.make_up_for(self.call)
            self.missed_by = []


@dataclass
class Costs:
    """Costs of a runner since they were last taken: sums over fragments and over weight syncs."""

    num_fragments: int = 0
    num_env_steps: int = 0
    sample_s: float = 0.0
    idle_s: float = 0.0
    queue_wait_s: float = 0.0
    weights_version_lag: int = 0
    num_syncs: int = 0
    sync_s: float = 0.0
    sync_bytes: int = 0

    def __add__(self, other: Costs) -> Costs:
        """Return the sums of both, field by field."""
        return Costs(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def result(self) -> dict[str, float]:
        """Return the numbers that the result shows; a mean over nothing is NaN."""
        return {
            "num_env_steps_sampled": self.num_env_steps,
            "sample_ms_mean": _mean(1e3 * self.sample_s, self.num_fragments),
            "idle_ms_mean": _mean(1e3 * self.idle_s, self.num_fragments),
            "queue_wait_ms_mean": _mean(1e3 * self.queue_wait_s, self.num_fragments),
            "weights_version_lag_mean": _mean(self.weights_version_lag, self.num_env_steps),
            "weights_sync_ms_mean": _mean(1e3 * self.sync_s, self.num_syncs),
            "weights_sync_bytes": self.sync_bytes,
        }


def _mean(total: float, count: int) -> float:
    return total / count if count else float("nan")


@dataclass
class SentWeights:
    """The latest weights of the runners of a group; a busy runner gets them before its next fragment.

    Attributes:
        parts: The weights, as the engine packs them.
        version: Their version.
        names: Names of the parts.
        num_bytes: What a runner in its own process is sent.
    """

    parts: Any = field(default_factory=dict)
    version: int = -1
    names: set[str] = field(default_factory=set)
    num_bytes: int = 0


@dataclass
class RunnerHandle:
    """One runner, wherever it is: a worker of the engine, or the embedded one, a worker of the local engine.

    The embedded runner answers at once. It is not restarted: what it raises is the caller's.

    Attributes:
        index: 0 for the embedded runner, 1 and up for others.
        config: Config that the runner is made from.
        engine: Engine that runs it.
        limits: Time limits of calls, shared by all runners of the group.
        logs_into: Metrics and timers of the algorithm, for an embedded runner; empty if it has its own.
        module_specs: Specs of its modules; `None` until the driver has made the specs and calls `make_modules`.
        handle: Handle of the worker.
        requests: Calls for fragments that were not received yet, the oldest first.
        syncs: Calls that sent weights to it.
        starting: Future that is done when the runner is ready, while it starts or restarts; otherwise `None`.
        started_s: Clock reading when it last began to start or restart.
        missed: Calls of user code that the runner gets with its next restart; see `RoundOfCalls`.
        failure: Exception because of which the runner cannot be used, if any.
        restart_at_s: Clock reading when it may be restarted; `None` if it will not be.
        num_failures_in_row: Failures since its last fragment.
        counts: What was counted over all workers in this place.
        state: State from which a replacement continues; see `EnvRunner.get_state`.
        weights_version: Version of the weights that were sent to it last.
        replied_s: Clock reading when its last fragment was received.
        costs: Costs since they were last taken.
        seconds_per_step: Seconds per env step while it samples; NaN before its first fragment.
        excess_wait_s: Seconds that the others waited because it is slow, since it was last as fast as they are.
    """

    index: int
    config: RunnerConfig
    engine: Engine
    limits: CallLimits
    logs_into: Mapping[str, Any] = field(default_factory=dict)
    module_specs: Mapping[str, ModuleSpec] | None = None
    handle: WorkerHandle = field(init=False)
    requests: deque[PendingSample] = field(default_factory=deque)
    starting: Future[Any] | None = None
    started_s: float = 0.0
    syncs: list[PendingCall] = field(default_factory=list)
    failure: BaseException | None = None
    restart_at_s: float | None = None
    missed: list[UserCall] = field(default_factory=list)
    _num_repeated: int = 0  # of these, in the restart that is under way
    num_failures_in_row: int = 0
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    _counted: WorkerCounts = field(default_factory=WorkerCounts)  # of these, by the current worker
    state: dict[str, Any] = field(default_factory=dict)
    _state_asked_s: float = -math.inf
    weights_version: int = -1
    replied_s: float = -math.inf
    costs: Costs = field(default_factory=Costs)
    seconds_per_step: float = float("nan")
    excess_wait_s: float = 0.0

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{'evaluation' if self.config.in_evaluation else 'env'} runner {self.index}"

    @property
    def sampling(self) -> PendingSample | None:
        """The oldest call for a fragment that was not received yet, if any."""
        return self.requests[0] if self.requests else None

    @property
    def ready(self) -> bool:
        """Whether it can take requests: started, and not failed."""
        return self.starting is None and self.failure is None

    @property
    def is_healthy(self) -> bool:
        """Whether it can take requests, and its worker runs."""
        return self.ready and self.handle.alive()

    @property
    def is_lost(self) -> bool:
        """Whether it failed, and will not be restarted."""
        return self.starting is None and self.failure is not None and self.restart_at_s is None

    def start(self) -> None:
        """Start a worker for the runner, and return before it is ready."""
        config = self.config
        factory = partial(
            EnvRunner,
            config,
            self.index,
            num_restarts=self.counts.num_restarts,
            has_own_process=self.engine.traits.has_own_process,
            module_specs=self.module_specs,
            makes_modules=self.module_specs is not None,
            **self.logs_into,
        )
        self._counted = WorkerCounts()
        self.weights_version = -1
        self.handle = self.engine.start(factory, name=self.name, resources=config.runner_resources)
        self.started_s = time.perf_counter()

    def begin_start(self) -> None:
        """Start the runner for the first time; its description of the env says that it is ready."""
        self.start()
        self.starting = self.handle.call("describe_env")

    def begin_make_modules(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Let the runner make its modules, now and whenever it is restarted."""
        self.module_specs = module_specs
        self.starting = self.handle.call("make_modules", module_specs)

    def await_start(self, deadline_s: float) -> Any:
        """Return the result of a step of the start, or raise if it takes too long."""
        assert self.starting is not None
        try:
            return self.starting.result(max(0.0, deadline_s - time.perf_counter()))
        except TimeoutError:
            if self.starting.done():  # the env raised it
                raise
            raise CorralError(
                f"{self.name} did not start within start_timeout_s={self.config.start_timeout_s}. "
                f"{self.engine.describe_available()}"
            ) from None

    def begin_restart(self, weights: SentWeights) -> None:
        """Restart the runner: in its worker after a first failure that the worker survived, else in a new worker."""
        in_place = self.handle.alive() and self.num_failures_in_row <= 1  # 0 if another fragment has arrived since
        self.counts += WorkerCounts(num_restarts=1)
        self.restart_at_s = None
        if not in_place:
            self.end()
            self.start()
        self.started_s = time.perf_counter()
        self.syncs = []
        self._num_repeated = len(self.missed)
        self.starting = self.handle.call(
            restore_runner, weights.parts, weights.version, self.state, in_place, self.missed
        )
        self.weights_version = weights.version

    def end_restart(self) -> bool:
        """Take the answer of a step of a restart that succeeded; return whether the runner is ready.

        It is not if it missed a call in the meantime, which then is the next step.
        """
        assert self.starting is not None
        self.note_state(self.starting.result(), self.started_s)
        missed, self._num_repeated = self.missed[self._num_repeated :], len(self.missed)
        if missed:
            self.starting = self.handle.call(repeat_calls, missed)
            return False
        self.starting = self.failure = None
        self.missed = []
        return True

    def make_up_for(self, call: UserCall) -> None:
        """Make a call that did not reach the runner, as soon as the runner is ready."""
        if self.is_healthy:
            self.handle.call(call_runner, *call)
        elif self.failure is None or self.starting is not None or self.restart_at_s is not None:
            self.missed.append(call)

    def ask(self, request: SampleRequest, timeout_s: float | None = None) -> None:
        """Ask for a fragment; the runner counts as hung after the limit of the group, or after `timeout_s` if less."""
        limits_s = self.limits.limit_s(request.unit, request.num_wanted), timeout_s
        limit_s = min((limit_s for limit_s in limits_s if limit_s is not None), default=None)
        start = time.perf_counter()
        try:
            future = self.handle.call(sample_and_report, request, timeout_s=limit_s)
        except BaseException as error:  # an interrupt, while a runner of the local engine samples in this process
            self.count_lost(getattr(error, "num_env_steps_lost", 0))
            raise
        version = self.weights_version
        self.requests.append(PendingSample(future, start, request=request, weights_version=version, timeout_s=limit_s))

    def count_lost(self, num_env_steps: int) -> None:
        """Count steps that were taken and will not arrive; the next reply of the same worker includes them."""
        lost = WorkerCounts(num_env_steps_lost=num_env_steps)
        self.counts, self._counted = self.counts + lost, self._counted + lost

    def forget_requests(self, error: BaseException, call: PendingSample | None) -> None:
        """Forget the call for a fragment that failed, and all others if the worker died; count what was taken for them.

        Another fragment of a worker that lives still arrives.
        """
        if call is not None:
            self.requests.remove(call)
            if call.future.done() and call.future.exception() is None:  # the runner believes that it arrives
                self.counts += WorkerCounts(num_env_steps_lost=call.num_env_steps)
            else:
                self.count_lost(getattr(error, "num_env_steps_lost", call.num_env_steps))
        if isinstance(error, WorkerDiedError):
            if call is None and self.requests:  # the later ones have not begun
                self.count_lost(self.requests[0].num_env_steps)
            self.requests.clear()

    def end(self) -> None:
        """End the worker, and forget its requests."""
        self.handle.kill()
        self.forget_requests(WorkerDiedError(f"{self.name} was ended."), None)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Continue the counts of a restored runner, whose worker has taken its state; see `get_runner_state`."""
        numbers, env, now = state["numbers"], state["env"], self.config.env_config
        errors, restarts = state["callbacks"]["num_errors"], env["restarts"]["num_restarts"]
        self._counted = WorkerCounts(0, errors, restarts, numbers["num_env_steps_lost"])
        self.counts = replace(self._counted, **state.get("counts", {}))
        steps = numbers["num_env_steps_sampled_lifetime"]
        self.state = {"exploration": state["exploration"], "num_env_steps_sampled_lifetime": steps}
        if env.get("env_config") is not None and is_same(env.get("built_env_config", now), now):  # see find_env_config
            self.state["environment"] = {"env_config": env["env_config"]}
        if env["tasks"] is not None:
            self.state["tasks"] = env["tasks"]
        if env.get("num_episodes") is not None:
            self.state["num_episodes"] = env["num_episodes"]
        if state.get("num_episodes_over") is not None:
            self.state["num_episodes_over"] = state["num_episodes_over"]

    def call(self, method: str | Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a method of the runner by name, or a function with it, with a limit of time, and return the future."""
        return self.handle.call(method, *args, timeout_s=self.limits.limit_s())

    def call_for_user(self, round_of_calls: RoundOfCalls) -> PendingUserCall:
        """Call a function of user code, and return the pending call."""
        start = time.perf_counter()
        future = self.call(call_runner, *round_of_calls.call)
        return PendingUserCall(future, start, runner=self, handle=self.handle, round=round_of_calls)

    def note_state(self, state: dict[str, Any], asked_s: float) -> None:
        """Keep the state that came with an answer, unless the answer to a later call has arrived before.

        Args:
            state: State of the runner after the call.
            asked_s: Clock reading when the call was made; a runner answers its calls in this order.
        """
        if asked_s >= self._state_asked_s:
            self.state, self._state_asked_s = state, asked_s

    def send_weights(self, weights: SentWeights) -> None:
        """Send weights, and note the call, which tells how long they take to arrive."""
        start = time.perf_counter()
        future = self.handle.call("set_weight_parts", weights.parts, weights.version, timeout_s=self.limits.limit_s())
        self.syncs.append(PendingCall(future, start))
        self.costs.sync_bytes += weights.num_bytes
        self.weights_version = weights.version

    def sync_error(self) -> BaseException | None:
        """Return the exception that the runner raised when it received weights, if any."""
        return next((error for sync in self.syncs if sync.future.done() and (error := sync.future.exception())), None)

    def take(self, call: PendingSample, version: int) -> SampleReply:
        """Return a fragment that has arrived, and count its costs; `version` is the version of the latest weights.

        Raises:
            Exception: Exception that the runner raised instead.
        """
        self.requests.remove(call)
        reply: SampleReply = call.future.result()
        rollout, costs, now = reply.rollout, self.costs, time.perf_counter()
        self.num_failures_in_row, self.replied_s = 0, now
        self.limits.note(call.request.unit, call.request.num_wanted, reply.sample_s)
        self.note_state(reply.state, call.asked_s)
        costs.num_fragments += 1
        costs.num_env_steps += rollout.num_env_steps
        costs.sample_s += reply.sample_s
        costs.idle_s += reply.idle_s
        costs.queue_wait_s += now - call.arrived_s if call.arrived_s == call.arrived_s else 0.0
        costs.weights_version_lag += rollout.num_env_steps * (version - rollout.weights_version)
        if rollout.num_env_steps:
            new = reply.sample_s / rollout.num_env_steps
            old = self.seconds_per_step
            self.seconds_per_step = new if old != old else SPEED_COEFF * new + (1 - SPEED_COEFF) * old
        self.counts, self._counted = self.counts + reply.counts - self._counted, reply.counts
        return reply

    def take_costs(self) -> Costs:
        """Return the costs, and start again at zero; a sync that has not arrived yet counts the next time."""
        # One that failed stays: the next fragment that is received tells of it.
        arrived = [sync for sync in self.syncs if sync.arrived_s == sync.arrived_s]
        finished = [sync for sync in arrived if sync.future.exception() is None]
        self.syncs = [sync for sync in self.syncs if sync not in finished]
        self.costs.num_syncs = len(finished)
        self.costs.sync_s = sum(sync.arrived_s - sync.asked_s for sync in finished)
        taken, self.costs = self.costs, Costs()
        return taken
