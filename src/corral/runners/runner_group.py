"""The runner group: all runners of an algorithm behind one object, wherever they live."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from corral.core.interrupts import interrupts_deferred
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.core.spaces import space_kinds
from corral.core.tree import leaves
from corral.core.views import Viewable
from corral.data.episodes.rollout import Rollout
from corral.engines.call_limits import CallLimits
from corral.engines.forks import forks_end_here
from corral.engines.local import LocalEngine
from corral.envs.vector import env_name, resolve_env
from corral.errors import ConfigError, CorralError, SampleError, WorkerDiedError
from corral.modules.config import MultiAgentSettings
from corral.runners.mailbox import Mailbox, shares
from corral.runners.requests import SampleRequest, WorkerCounts
from corral.runners.restarts import Recovery
from corral.runners.runner import EnvRunner, reserve_episode_metrics
from corral.runners.runner_handle import Costs, RunnerHandle, SentWeights
from corral.runners.states_of_runners import StatesOfRunners
from corral.runners.user_calls import UserCalls
from corral.runners.worker_calls import call_directly

log = logging.getLogger("corral")

if TYPE_CHECKING:
    from corral.engines import Engine
    from corral.modules.spec import ModuleSpec
    from corral.runners.config import RunnerConfig

# Seconds that a runner has to close its env when the run ends.
CLOSE_S = 5.0

_NO_COSTS = Costs().result()


class EnvRunnerGroup(Viewable):
    """Samples from the runners, gives all of them the same weights, and restarts them when they fail.

    The engine runs the runners 1, 2, .... With `num_env_runners=0` there is one embedded runner, with the index 0,
    which the local engine runs: it answers at once, and what it raises is raised to the caller.

    Attributes:
        local_env_runner: The embedded runner, or `None`.
        engine_name: Name of the engine; `"embedded"` if there is only the embedded runner, `"none"` if there is none.
        module_specs: Specs of the modules by module id, the same object for all runners and for their replacements.
        num_envs: Sub-envs of one runner.
        steps_envs_one_by_one: Whether a runner steps its sub-envs one after the other.
        num_agents: Possible agents of a sub-env.
        is_served: Whether simulators that drive themselves play the episodes.
        gives_tensors: Whether who asks for tensors gets them, from an env of tensors in this process.
        setting_of_arrays: The setting because of which an env of tensors is stepped on arrays; `""` if it is not.
        on_recreated: Function that is called with the indices of runners that were restarted, before they sample.
        mail: What asks the runners for fragments, and receives them.
        recovery: What restarts runners that failed.
        hand_sampler: What counts the env steps that calls of `EnvRunner.sample` took, as `num_env_steps_by_hand`.
    """

    setting_of_arrays: str = ""
    gives_tensors: bool = False
    is_served: bool = False
    steps_envs_one_by_one: bool = False
    num_envs = num_agents = 1

    def __init__(
        self,
        config: RunnerConfig,
        engine: Engine,
        module_specs: Mapping[str, ModuleSpec] | None = None,
        metrics: MetricsLogger | None = None,
        timers: Timers | None = None,
        *,
        samples: bool = True,
    ) -> None:
        """Start the runners, all at once, and wait until they are ready.

        Args:
            config: Settings of the runners.
            engine: Engine that runs them, if there are any besides the embedded one. Its owner stops it.
            module_specs: Specs of the modules of all runners by module id; `None` is what the config and the spaces of
                the first runner's env give.
            metrics: Where an embedded runner logs, under `env_runners`; `None` is a logger of its own.
            timers: Timers of an embedded runner; `None` is its own.
            samples: Whether there are runners. Without any, the group has the given specs and metrics, for an algorithm
                that learns from recorded data.

        Raises:
            ConfigError: An env setting is wrong.
            EnvError: The env cannot be made, or gave values that its spaces do not allow.
            CorralError: A runner did not start within `start_timeout_s`.
        """
        self._engine = engine
        self._config = config
        self.local_env_runner: EnvRunner | None = None
        self.on_recreated: Callable[[list[int]], None] = lambda indices: None
        self._stopped = False
        view = None if metrics is None else metrics.view("env_runners")
        self._handles = self._make_handles(view, timers) if samples else {}
        self._runners = {index: runner for index, runner in self._handles.items() if index}  # the engine's
        self.engine_name = engine.traits.name if self._runners else "embedded" if samples else "none"
        self._weights = SentWeights()
        self.recovery = Recovery(config, self._handles, self._weights)
        self._user_calls = UserCalls(self._runners, self.recovery.fail)
        own_process = bool(self._runners) and engine.traits.has_own_process
        self.mail = Mailbox(config, self._handles, self._weights, self.recovery, has_own_process=own_process)
        self._states = StatesOfRunners(config, self._handles)
        if samples:
            self._start(module_specs)
        else:
            assert module_specs is not None and view is not None
            self.module_specs = module_specs
            self._spaces: Any = {
                name: (spec.observation_space, spec.action_space) for name, spec in module_specs.items()
            }
            reserve_episode_metrics(view, config.metrics_num_episodes_for_smoothing)
        self.hand_sampler = self.local_env_runner or self._user_calls

    def _make_handles(self, metrics: MetricsLogger | None, timers: Timers | None) -> dict[int, RunnerHandle]:
        """Return handles of the runners by index; no runner is started yet."""
        config, limits = self._config, CallLimits(self._config.worker_timeout_s)
        if not config.num_env_runners:
            return {0: RunnerHandle(0, config, LocalEngine(), limits, {"metrics": metrics, "timers": timers})}
        indices = range(1, config.num_env_runners + 1)
        return {index: RunnerHandle(index, config, self._engine, limits) for index in indices}

    def _start(self, module_specs: Mapping[str, ModuleSpec] | None) -> None:
        """Start all runners at once, and wait; a failure at the very start ends the run."""
        runners = self._handles.values()
        try:
            for runner in runners:
                runner.begin_start()
            if not self._runners:
                self.local_env_runner = self._handles[0].handle.call(lambda runner: runner).result()
            deadline_s = time.perf_counter() + self._config.start_timeout_s
            descriptions = [runner.await_start(deadline_s) for runner in runners]
            self._describe(descriptions[0], module_specs)
            for runner in runners:
                runner.begin_make_modules(self.module_specs)
            for runner in runners:
                runner.await_start(deadline_s)
                runner.starting = None
        except BaseException:
            self.stop()
            raise
        if self.local_env_runner is not None:
            self.setting_of_arrays = self.local_env_runner.stepping.setting_of_arrays
            self.gives_tensors = self.local_env_runner.stepping.is_on_device

    def _describe(self, description: tuple[Any, Any, int, bool], module_specs: Mapping[str, ModuleSpec] | None) -> None:
        """Note what `EnvRunner.describe_env` returned, and make the spec of the module from it if there is none yet.

        Raises:
            ConfigError: The env has other spaces than the spec.
        """
        observation_space, action_space, self.num_envs, self.steps_envs_one_by_one = description
        self._spaces = observation_space, action_space
        self.is_served = getattr(resolve_env(self._config.env), "IS_EXTERNAL", False)
        found = self._config.module_specs(observation_space, action_space, module_specs)
        self.module_specs = module_specs or found
        for module_id, spec in self.module_specs.items():
            _check_spaces(found[module_id], spec, env_name(self._config.env))
        self.num_agents = len(observation_space.seats.agents) if self._config.is_multi_agent else 1

    # Modules.

    def specs_with(self, config: RunnerConfig) -> dict[str, ModuleSpec]:
        """Return the specs of the modules of a config with other modules: present specs, and specs of new modules.

        Raises:
            ConfigError: The mapping leads to no module, or the spaces of a module are not known or do not fit.
        """
        if self._handles:
            observation_space, action_space = self._spaces
            found = config.module_specs(observation_space, action_space, self.module_specs)
        else:
            found = config.module_specs_of_spaces(self._spaces)
        return {module_id: self.module_specs.get(module_id, spec) for module_id, spec in found.items()}

    def set_modules(self, config: RunnerConfig, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Let all runners and their replacements use other modules, and the mapping of a config, from the next sample.

        The weights of new modules come with the next `sync_weights`. See `EnvRunner.set_modules`.

        Args:
            config: Config whose settings of `multi_agent` apply; the other settings stay.
            module_specs: Specs of all modules, see `specs_with`.
        """
        settings = {each.name: getattr(config, each.name) for each in dataclasses.fields(MultiAgentSettings)}
        self._config = self._config.copy(**settings).freeze()
        self.module_specs = dict(module_specs)
        if self.local_env_runner is not None:
            self.local_env_runner.set_modules(settings, self.module_specs)
        for runner in self._runners.values():
            runner.config, runner.module_specs = self._config, self.module_specs
            runner.make_up_for(("set_modules", {"settings": settings, "module_specs": self.module_specs}))

    # Health.

    @property
    def healthy_worker_ids(self) -> list[int]:
        """Indices of the engine's runners that can answer requests."""
        return [index for index, runner in self._runners.items() if runner.is_healthy]

    @property
    def worker_indices(self) -> list[int]:
        """Indices of all runners; 0 is the embedded runner."""
        return [*self._handles]

    @property
    def num_healthy_remote_workers(self) -> int:
        """Number of the engine's runners that can answer requests."""
        return len(self.healthy_worker_ids)

    @property
    def num_remote_workers(self) -> int:
        """Number of runners that the engine runs, ready or not."""
        return len(self._runners)

    @property
    def num_remote_worker_restarts(self) -> int:
        """Restarts of runners of the engine so far, in place or in a new worker."""
        return self.counts.num_restarts

    @property
    def counts(self) -> WorkerCounts:
        """What all runners have counted so far, where known: a runner of the engine reports it with its fragments."""
        if (runner := self.local_env_runner) is not None:
            restarts = runner.host.restarts.num_restarts
            return WorkerCounts(0, runner.callbacks.num_errors, restarts, runner.num_env_steps_lost)
        return sum((runner.counts for runner in self._runners.values()), WorkerCounts())

    @property
    def num_episodes_over(self) -> dict[int, list[int]]:
        """Episodes of each sub-env that are over, by index of the runner, where known; without runners that are lost.

        See `EnvRunner.num_episodes_over`.
        """
        if self.local_env_runner is not None:
            return {0: self.local_env_runner.num_episodes_over.tolist()}
        unknown = [0] * self.num_envs
        runners = [runner for runner in self._runners.values() if not runner.is_lost]
        return {runner.index: runner.state.get("num_episodes_over") or unknown for runner in runners}

    @property
    def num_failures(self) -> int:
        """Failures of runners so far."""
        return self.recovery.num_failures

    def fault_results(self) -> dict[str, int]:
        """Return the numbers about runners that the result shows under `fault_tolerance`.

        A fragment that this group has not returned yet is in flight. One that has not arrived counts with the env steps
        of its request, and with none if the request was for episodes.
        """
        counts, requests = self.counts, [call for runner in self._handles.values() for call in runner.requests]
        taken = sum(rollout.num_env_steps for _, rollout in self.mail.taken)
        return {
            "num_healthy_workers": sum(runner.is_healthy for runner in self._runners.values()),
            "num_remote_worker_restarts": counts.num_restarts,
            "num_env_runner_failures": self.recovery.num_failures,
            "num_sub_environment_restarts": counts.num_sub_env_restarts,
            "num_env_steps_lost": counts.num_env_steps_lost,
            "num_env_steps_in_flight": taken + sum(call.num_env_steps for call in requests),
        }

    def restore_runners(self, *, known_only: bool = False) -> list[int]:
        """Restart the failed runners that are due, without waiting, and return their indices; `sample` calls it.

        Args:
            known_only: Whether to leave out the look at all runners for one that died while it had nothing to do.

        Returns:
            Indices of the runners that became ready; `on_recreated` was called with them.

        Raises:
            CorralError: The group was stopped.
        """
        self._check_running()
        if self._user_calls.unnoted:
            self._user_calls.note_done()
        if known_only:
            troubled = self.recovery.runners_to_continue()
        else:  # a runner that has a request says itself, with its answer, that it died
            runners = self._runners.values()
            troubled = [each for each in runners if not (each.ready and (each.requests or each.handle.alive()))]
        restarted = [runner.index for runner in troubled if self.recovery.continue_restart(runner)]
        if restarted:
            log.info("Ready again: env runners %s.", restarted)
            self.mail.freed.update(restarted)
            self.on_recreated(restarted)
        return restarted

    def _check_running(self) -> None:
        """Refuse to sample without runners, and after `stop`, because nobody would end the workers of new ones."""
        if not self._handles:
            raise SampleError("this algorithm learns from recorded data, and has no runners that sample.")
        if self._stopped:
            raise CorralError("these env runners were stopped, and their envs are closed: build() another algorithm.")

    # Sampling.

    def sample(self, request: SampleRequest, timers: Timers | None = None) -> list[Rollout]:
        """Return the rollouts of a request, which is spread evenly over the runners, one rollout each.

        It waits for the runners that can be waited for; see `sample_timeout_s` and `straggler_factor`. Fewer steps, or
        episodes, come back when a runner fails or is late, and more when a late fragment of an earlier round is among
        them. If an exception ends the call, fragments that have arrived are returned by the next call.

        Args:
            request: What to sample: at least this many steps or episodes if all goes well.
            timers: Timers that count how long this process waits for runners of the engine; `None` counts nothing.

        Raises:
            CorralError: The group was stopped.
            SampleError: The group has no runners.
            Exception: What a runner raised, unless the settings of fault tolerance let the run continue.
        """
        if (embedded := self.local_env_runner) is not None and not self._stopped:
            # It has the whole request, and raises here what it raises: neither is news that a mailbox has to keep.
            with forks_end_here():
                rollout = embedded.collect(request)
            self.mail.num_env_steps_returned += rollout.num_env_steps
            return [rollout if request.with_infos else rollout.without_infos()]
        timestep = self.mail.timestep_of(request)
        self.restore_runners()
        self.mail.take_arrived()
        missing = request.num_wanted - sum(request.num_in(rollout) for _, rollout in self.mail.taken)
        for runner, wanted in shares(max(0, missing), self.mail.idle(), exactly=request.num_episodes is not None):
            self.mail.ask(runner.index, request.part(wanted, timestep))
        with (timers or Timers()).time("waiting"):
            deadline_s = time.perf_counter() + self._config.sample_timeout_s
            if not self.mail.taken and not any(runner.ready for runner in self._runners.values()):
                # All have failed: wait until one that starts is ready again, or one whose restart is due.
                while not self.restore_runners() and (left_s := deadline_s - time.perf_counter()) > 0:
                    self.recovery.wait(left_s)
            self.mail.receive_round(deadline_s)
        self.mail.report_late()
        return self.mail.return_taken()

    def sample_async(self, request: SampleRequest, *, max_requests: int = 1) -> int:
        """Ask each runner that holds fewer than `max_requests` for fragments, and return how many were asked for.

        A runner also holds the fragments that have arrived and that no call has returned yet.

        Args:
            request: What each fragment is. Without a `timestep`, the group counts: the steps of all fragments that it
                has received, and those that runners are at.
            max_requests: Requests that a runner holds at most. With 2, a runner begins the next fragment as soon as it
                has delivered one, whatever this process is doing, with the weights that it had been sent when it was
                asked. The embedded runner and runners of the local engine sample when they are asked.

        Raises:
            CorralError: The group was stopped.
        """
        self.restore_runners(known_only=True)
        return self.mail.ask_all(request, max_requests)

    def fetch_samples(self, timeout_seconds: float = 0.0) -> list[Rollout]:
        """Return the fragments that have arrived; if there is none, wait up to `timeout_seconds` for one.

        Raises:
            Exception: As `sample` does.
        """
        self.mail.take_arrived()
        if not self.mail.taken and any(runner.requests for runner in self._handles.values()):
            self.mail.wait_for_sample(timeout_seconds)
            self.mail.take_arrived()
        return self.mail.return_taken()

    # Weights and metrics.

    def sync_weights(self, parts: Mapping[str, Mapping[str, Any]], version: int) -> None:
        """Give the runners new weights, if their version or the set of parts changed since the last call.

        Runners that are busy get them before their next fragment; nobody is waited for. See
        `EnvRunner.set_weight_parts`.
        """
        weights = self._weights
        if version == weights.version and parts.keys() == weights.names:
            return
        if parts.keys() != weights.names:
            for runner in self._runners.values():
                runner.weights_version = -1  # the same version has another part now, which busy runners need too
        weights.version, weights.names = version, set(parts)
        if self.local_env_runner is not None:  # it needs no copy that travels
            self._handles[0].weights_version = version
            self.local_env_runner.set_weight_parts(parts, version)
        if not self._runners:
            return
        weights.parts = self._engine.put(parts)
        weights.num_bytes = (
            sum(getattr(leaf, "nbytes", 8) for leaf in leaves(dict(parts)))
            if self._engine.traits.has_own_process
            else 0
        )
        for runner in self.mail.idle():
            runner.send_weights(weights)

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Collect what the runners logged since the last call: metrics under `env_runners`, seconds into the timers.

        The metrics of a runner of the engine arrive with its fragments. If no call has returned a fragment yet, its
        metrics wait with it.
        """
        with interrupts_deferred():  # else metrics that a runner gave away could be nowhere
            if (embedded := self.local_env_runner) is not None and embedded.timers is timers:  # it logs there itself
                embedded.log_samples()
                if self.mail.taken or self._handles[0].requests:
                    embedded.log_later(self.fault_results()["num_env_steps_in_flight"])
                return
            if embedded is not None:
                self.mail.keep_logged(0, *embedded.get_metrics()[:2])
            self.mail.collect_metrics(metrics, timers)

    def take_costs(self) -> dict[str, Any]:
        """Return the costs of the runners since the last call, in total and for each of the engine's runners."""
        costs = {runner.index: runner.take_costs() for runner in self._runners.values()}
        runners = {
            str(index): {"num_restarts": self._runners[index].counts.num_restarts, **part.result()}
            for index, part in costs.items()
        }
        total = sum(costs.values(), Costs()).result() if costs else _NO_COSTS
        return {"weights_version": self._weights.version, **total, "by_runner": runners}

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return the state of all runners as copies of plain data: `runners`, in the order of indices, and counts.

        A runner that does not answer within `sample_timeout_s` has the state of its replacement. So has an evaluation
        runner that is busy, because the round that wanted its answer is over. Steps of a fragment
        that has not been returned yet count as lost in the state, because the runners are past them.
        """
        return {
            "runners": self._states.get(self.mail.num_env_steps_held()),
            "num_failures": self.recovery.num_failures,
            "num_env_steps": self.mail.num_env_steps,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the runners can take a state, without changing anything.

        Raises:
            Exception: A runner cannot; see `check_runner_state`.
        """
        int(state["num_failures"] + state["num_env_steps"])
        self._states.check(state["runners"])

    def set_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Let the runners continue from a state that `check_state` accepted, and return which envs continue.

        A runner beyond the states begins with the seeds that it was made with, which no other runner has had, and with
        tasks and `env_config` of one of the states. States
        beyond the runners wait until there is a runner for them again. Fragments that are under way are dropped. The
        weights come with the next `sync_weights`, whatever their version.

        Returns:
            Numbers and names of the envs that continue and that restart; see `set_runner_state`.

        Raises:
            Exception: What an env or a callback raised; a part of the state may be set then.
        """
        continued = self._states.set(state["runners"])
        self.recovery.num_failures, self.recovery.num_restarts = int(state["num_failures"]), self.counts.num_restarts
        self.mail.forget(int(state["num_env_steps"]))
        self.forget_weights()
        return continued

    def forget_weights(self) -> None:
        """Let the next `sync_weights` give all runners the weights, whatever their version."""
        self._weights.version, self._weights.names = -1, set()

    # User code.

    def foreach_env_runner(
        self,
        fn: str | Callable[..., Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        local_env_runner: bool = True,
        remote_worker_ids: Iterable[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Call a method by name, or `fn(env_runner)`, on the runners, and return the results.

        Args:
            fn: Name of a method, or a function, which is sent to the process of the runner.
            kwargs: Further keyword arguments.
            local_env_runner: Whether to include the embedded runner, if there is one; its result is the first.
            remote_worker_ids: Indices of the engine's runners to call; `None` is all that are healthy.
            timeout_seconds: Seconds to wait for all results; later results are dropped. `None` waits without limit.

        Returns:
            The results in the order of indices; a runner that failed or is late has no result.

        Raises:
            ValueError: No runner has one of the ids.
            SerializationError: `fn` cannot be pickled.
            Exception: Exception that the function raised.
        """
        found = []
        if local_env_runner and self.local_env_runner is not None:
            found.append(call_directly(self.local_env_runner, fn, kwargs or {}))
        calls = self._user_calls.begin(fn, kwargs, remote_worker_ids)
        wait([call.future for call in calls], timeout_seconds)
        done = [call for call in calls if call.future.done()]
        if len(done) < len(calls):
            names = ", ".join(call.runner.name for call in calls if not call.future.done())
            log.warning("foreach_env_runner: no result within %s s from %s.", timeout_seconds, names)
        return found + [result for _, result in self._user_calls.take_results(done)]

    def foreach_env(self, fn: Callable[[Any], Any], **selection: Any) -> list[list[Any]]:
        """Return `fn(env)` for every sub-env of the runners, called in its process; see `foreach_env_runner`.

        Returns:
            A list for each runner, with a result for each sub-env.
        """
        return self.foreach_env_runner("foreach_env", kwargs={"fn": fn}, **selection)

    def foreach_env_runner_async(
        self,
        fn: str | Callable[..., Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        remote_worker_ids: Iterable[int] | None = None,
    ) -> int:
        """Call a method or a function on the engine's runners without waiting; `fetch_ready` returns the results.

        Returns:
            The number of runners that were called.
        """
        return self._user_calls.begin_fetched(fn, kwargs, remote_worker_ids)

    def fetch_ready(self, timeout_seconds: float = 0.0) -> list[tuple[int, Any]]:
        """Return the results of `foreach_env_runner_async` that have arrived: pairs of a runner's index and its result.

        Args:
            timeout_seconds: Seconds to wait for one, if there is none yet.

        Raises:
            Exception: Exception that the function raised.
        """
        return self._user_calls.fetch_ready(timeout_seconds)

    def known_tasks(self) -> list[Any]:
        """Return the tasks of all sub-envs, as runners of the engine last reported them; no runner is waited for."""
        if self.local_env_runner is not None:
            return self.local_env_runner.host.get_tasks() or []
        return [task for runner in self._runners.values() for task in runner.state.get("tasks") or ()]

    def choose_tasks(self, train_results: Mapping[str, Any]) -> None:
        """Let all runners call the setting `env_task_fn` for their sub-envs; see `EnvRunner.choose_tasks`.

        A runner that is still sampling does so after its fragment, and is not waited for.

        Raises:
            CallbackError: `env_task_fn` raised an exception, now or in a runner that was busy the last time.
        """
        if self.local_env_runner is not None:
            self.local_env_runner.choose_tasks(train_results)
        self._user_calls.choose_tasks(train_results)

    def stop(self) -> None:
        """Close all envs and end all workers, also if Ctrl-C interrupts it. Nothing can be sampled afterwards."""
        self._stopped = True
        if self.local_env_runner is not None:
            self.local_env_runner.stop()
        runners = [runner for runner in self._runners.values() if hasattr(runner, "handle")]
        try:
            closing = [runner.handle.call("stop") for runner in runners if runner.handle.alive() and runner.ready]
            done, late = wait(closing, CLOSE_S)
            for future in done:
                if (error := future.exception()) is not None and not isinstance(error, WorkerDiedError):
                    log.error("A runner could not close its env.", exc_info=error)
            if late:
                log.warning(
                    "%d env runner(s) did not close their envs within %s s, and were ended.", len(late), CLOSE_S
                )
        finally:
            with interrupts_deferred():
                for runner in runners:
                    runner.handle.kill()


def _check_spaces(here: ModuleSpec, spec: ModuleSpec, env: str) -> None:
    """Refuse an env whose spaces are not the spaces of a module.

    Raises:
        ConfigError: The spaces differ; the bounds of observations may.
    """
    for what, given, expected, kinds in (
        ("observations", here.observation_space, spec.observation_space, space_kinds),
        ("actions", here.action_space, spec.action_space, lambda space: space),
    ):
        if kinds(given) != kinds(expected):
            raise ConfigError(
                f"env {env!r} has {what} of {given}, and the module is made for {expected}: evaluation needs an env "
                "with the spaces of the training env. Change the env or the env_config in evaluation_config."
            )
