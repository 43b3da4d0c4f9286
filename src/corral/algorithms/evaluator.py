"""Evaluation during training: when rounds are played, on which runners, with which weights, and what they report."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from itertools import chain
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any

from corral.core.metrics.logger import MetricsLogger, check_metrics_state
from corral.core.metrics.result import EARLY_MEANS, NO_IMPROVEMENT, merge_nested, plain_numbers
from corral.core.metrics.timers import Timers
from corral.core.plain import check_parts, is_plain
from corral.core.seeding import (
    check_global_rngs,
    get_global_rngs,
    runner_seeds,
    seed_everything,
    set_global_rngs,
)
from corral.engines.lazy import LazyEngine
from corral.envs.tasks import has_tasks
from corral.errors import CheckpointError, ConfigError, CorralError, EnvError, WorkerDiedError
from corral.runners.evaluation.episodes import episode_resets
from corral.runners.evaluation.results import (
    LIFETIME,
    NAN,
    by_task,
    describe_round,
    keep_videos,
    means_of,
    require_images,
    without_images,
    without_values,
)
from corral.runners.evaluation.rounds import Round, RoundPlan, play_round
from corral.runners.evaluation.statistics import improvement, summarize_episodes
from corral.runners.restarts import describe
from corral.runners.runner_group import EnvRunnerGroup

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.callbacks.dispatch import Dispatcher
    from corral.data.episodes.rollout import Rollout
    from corral.modules.spec import ModuleSpec
    from corral.runners.evaluation.config import EvaluationConfig
    from corral.runners.requests import SampleRequest
    from corral.runners.runner_handle import PendingSample

log = logging.getLogger("corral")

# Seconds after the time limit of a round until its thread is left alone; a round ends half a second after it at most.
GRACE_S = 1.0
# Seconds that a round has to end after an exception in training.
CANCEL_S = 5.0


class Evaluator:
    """Plays the evaluation rounds of an algorithm, in turn with training or at the same time.

    The algorithm calls `during_training` around the training of an iteration, and `finish` after it. Callbacks and
    metrics stay in the thread of the algorithm. A round that is played at the same time as training has a thread, which
    only waits for runners in other processes; training keeps the main thread, because Python handles signals there.

    Attributes:
        group: Group of the evaluation runners; `None` before the first use.
        training_done: Whether no iteration is training now.
    """

    def __init__(self, algorithm: Algorithm, callbacks: Dispatcher) -> None:
        """Store the algorithm, and the callbacks of its own events; no runner is started."""
        self._algorithm, self._callbacks = algorithm, callbacks
        self._settings: EvaluationConfig = algorithm.config
        self._config: EvaluationConfig = self._settings
        self.group: EnvRunnerGroup | None = None
        self._own_engine: LazyEngine | None = None
        self._metrics = _new_metrics()
        self._latest: dict[str, Any] | None = None  # metrics of the latest round
        self._num_env_steps = 0  # of all rounds
        self._shares_process = True  # whether runners are in the process of the algorithm
        self._rngs: dict[str, Any] | None = None  # global generators of such runners
        self._runner_states: Mapping[str, Any] | None = None  # restored before the runners were made
        # A round that is played while an iteration trains.
        self._is_due = False
        self._training = threading.Event()
        self._cancelled = threading.Event()
        self._playing: Future[tuple[Round, dict[str, Any]]] | None = None
        self._is_evaluating = False  # in `evaluate`
        self._began_s = self._trained_s = self._evaluation_s = 0.0
        self._recreated: list[int] = []  # runners that were restarted since the round began
        self._weights_version = -1
        self._late: dict[int, PendingSample] = {}  # what runners had not answered when the last round ended
        tasks = self._settings.evaluation_tasks
        self._tasks: list[Any] | None = tasks if isinstance(tasks, list) else None

    # The runners.

    def build(self) -> EnvRunnerGroup:
        """Return the group of the evaluation runners; the first call starts them.

        Raises:
            ConfigError: An env setting is wrong, or the env has other spaces than the module.
            EnvError: The env cannot be made, or gave values that its spaces do not allow.
            CorralError: A runner did not start within `start_timeout_s`.
        """
        if self.group is not None:
            return self.group
        config, engine = self._settings.for_evaluation(), self._algorithm.engine
        if self._in_parallel and not config.num_env_runners and engine.traits.has_own_process:
            # An env that holds Python's global lock would stop training, so the only runner has its own process.
            config.num_env_runners, engine = 1, LazyEngine("process")
            self._own_engine = engine
            weakref.finalize(self, engine.stop).atexit = False  # an algorithm may be dropped without stop()
        elif self._settings.evaluation_interval is None:  # else building the algorithm asked for them
            engine.require([config.runner_resources] * config.num_env_runners)
        self._config = config.freeze()
        restored_rngs = self._rngs
        self._shares_process = not config.num_env_runners or not engine.traits.has_own_process
        try:
            with self._own_generators():
                group = EnvRunnerGroup(config, engine, self._algorithm.env_runner_group.module_specs)
        except ConfigError as error:
            if self._settings.evaluation_num_videos and "env_config['render_mode']" in str(error):
                raise without_images(config, str(error).rstrip(".")) from error
            raise
        self.group = group
        group.on_recreated = self._note_recreated
        if self._takes_tasks_of_training or self._tasks is not None:
            self._require_tasks(group)
        if self._settings.evaluation_num_videos:
            require_images(group, self._config)
        if self._runner_states is not None:
            group.check_state(self._runner_states)
            callbacks = self._callbacks.get_state()
            group.set_state(self._runner_states)
            self._callbacks.set_state(callbacks)  # runners here share instances, which training has changed since
            self._runner_states, self._rngs = None, restored_rngs  # as before making the envs, which may draw
        return group

    @contextmanager
    def begun_again(self, seed: int | None) -> Iterator[None]:
        """Use new evaluation runners that begin with a seed; the runners of later rounds continue where these were.

        Args:
            seed: The seed; `None` changes nothing.

        Raises:
            CorralError: A round is being played.
        """
        self._check_idle()
        if seed is None:
            yield
            return
        settings, states, rngs = self._settings, self._runner_states, self._rngs
        if self.group is not None:
            states = self.group.get_state()
        overrides = {**settings.evaluation_config, "seed": seed}
        try:
            self._stop_runners()
            self._settings = settings.copy(evaluation_config=overrides).freeze()
            self._runner_states = self._rngs = None
            yield
        finally:
            self._stop_runners()
            self._settings, self._runner_states, self._rngs = settings, states, rngs

    def _check_idle(self) -> None:
        if self._is_evaluating or self._is_playing():
            raise CorralError("an evaluation round is being played: record episodes between iterations.")

    def set_modules(self, config: EvaluationConfig, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Use the modules of a config from the next round on."""
        self._settings = config
        if self.group is not None and module_specs.keys() != self.group.module_specs.keys():
            self.group.set_modules(config.for_evaluation(), module_specs)

    @property
    def _takes_tasks_of_training(self) -> bool:
        """Whether episodes have the tasks of the training envs; `env_reset_fn` chooses them by itself."""
        return self._settings.evaluation_tasks == "training" and self._config.env_reset_fn is None

    def _require_tasks(self, group: EnvRunnerGroup) -> None:
        groups = [group, *([self._algorithm.env_runner_group] if self._takes_tasks_of_training else [])]
        if not all(chain.from_iterable(chain.from_iterable(group.foreach_env(has_tasks) for group in groups))):
            raise ConfigError(
                f"evaluation_tasks={self._settings.evaluation_tasks!r:.80}: the env has no methods get_task and "
                "set_task: define them, or leave evaluation_tasks out."
            )

    @property
    def _in_parallel(self) -> bool:
        return self._settings.evaluation_interval is not None and self._settings.evaluation_parallel_to_training

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Give runners in this process global generators of their own, as runners in other processes have.

        So training draws the same numbers with and without evaluation.
        """
        if not self._shares_process:
            yield
            return
        of_training = get_global_rngs()
        if self._rngs is None:
            process_seed = runner_seeds(self._config.seed or 0, 0, 0, in_evaluation=True)[-1]
            seed_everything(int(process_seed.generate_state(1)[0]) >> 1)
        else:
            set_global_rngs(self._rngs)
        try:
            yield
        finally:
            self._rngs = get_global_rngs()
            set_global_rngs(of_training)

    def _note_recreated(self, indices: list[int]) -> None:
        self._recreated += indices
        if self._playing is None:
            self._announce_recreated()

    def _announce_recreated(self) -> None:
        """Fire the event for runners that were restarted; in the thread of the algorithm only."""
        indices, self._recreated = self._recreated, []
        if indices:
            self._fire(
                "on_env_runners_recreated",
                env_runner_group=self.group,
                env_runner_indices=indices,
                is_evaluation=True,
            )

    # Rounds.

    @property
    def training_done(self) -> bool:
        """Whether no iteration is training now."""
        return not self._training.is_set()

    @contextmanager
    def during_training(self) -> Iterator[None]:
        """Wrap the training of an iteration: a round that is due at the same time begins before it."""
        is_playing = self._is_playing()
        interval = self._settings.evaluation_interval
        self._is_due = interval is not None and (self._algorithm.training_iteration + 1) % interval == 0
        if not (self._is_due and self._in_parallel) or is_playing:
            yield  # a custom function that has not returned keeps the runners
            return
        self._prepare()
        self._training.set()
        playing: Future[tuple[Round, dict[str, Any]]] = Future()
        self._playing = playing
        thread = threading.Thread(target=_run, args=[playing, self._play], name="corral evaluation", daemon=True)
        try:
            thread.start()
            yield
        except BaseException:
            self._is_due = False
            self.cancel()
            raise
        finally:
            self._training.clear()
            self._trained_s = time.perf_counter()

    def _is_playing(self) -> bool:
        """Return whether a round is being played, or waits for its iteration; one that came too late is dropped."""
        if self._playing is not None and self._playing.done() and not self._is_due:
            self._playing = None
        return self._playing is not None

    def finish(self, result: dict[str, Any]) -> None:
        """Put the metrics of the round that is due into the result of an iteration, after waiting for it or playing it.

        Raises:
            Exception: What ended the round, with `on_evaluation_failure="raise"`, and what a callback or a custom
                function raised.
        """
        if self._is_due:
            self._is_due = False
            metrics = self._await() if self._playing is not None else self._ask_algorithm()
            result["evaluation"] = metrics
            of_training = [name for name in result[EARLY_MEANS] if not name.startswith("evaluation/")]
            result[EARLY_MEANS] = of_training + self.early_means

    def _ask_algorithm(self) -> dict[str, Any]:
        """Return the metrics of the algorithm's `evaluate`, which a subclass may override and add to.

        Raises:
            CorralError: It returned no metrics.
        """
        found = self._algorithm.evaluate()
        if not isinstance(found, Mapping):
            name = type(self._algorithm).__name__
            raise CorralError(f"{name}.evaluate returned {found!r:.80}: return the metrics of the round, a dict.")
        metrics = dict(found)
        self._latest = _copied({name: value for name, value in metrics.items() if name != "videos"})
        return metrics

    def evaluate(self) -> dict[str, Any]:
        """Play a round now, and return its metrics.

        Raises:
            CorralError: A round is being played.
            Exception: See `finish`.
        """
        if self._is_evaluating or self._is_playing():
            raise CorralError(
                "evaluate(): an evaluation round is being played already: call evaluate() between iterations, or in "
                "on_train_result."
            )
        self._is_evaluating = True
        try:
            self._prepare()
            try:
                with self._algorithm.timers.time("evaluating"), self._own_generators():
                    played = self._play()
            except Exception as error:
                played = self._failed(error)
            return self._report(*played)
        finally:
            self._is_evaluating = False

    def sample(self, request: SampleRequest) -> list[Rollout]:
        """Return rollouts that the evaluation runners sample now, with the present weights.

        Raises:
            CorralError: A round is being played.
        """
        self._check_idle()
        group = self.build()
        with self._own_generators():
            group.restore_runners()
            self._algorithm.weights.sync(group)
            rollouts = group.sample(request)
        group.collect_metrics(MetricsLogger(), Timers())
        return rollouts

    def _prepare(self) -> None:
        """Restart runners, give all of them the weights, and fire `on_evaluate_start`."""
        group = self.build()
        algorithm = self._algorithm
        self._cancelled.clear()
        try:
            with self._own_generators():
                group.restore_runners()
        except WorkerDiedError as error:  # the last runner
            log.debug("Evaluation: %s", error)
        self._weights_version = algorithm.weights.sync(group)
        self._timestep = algorithm.num_env_steps_sampled_lifetime
        if self._takes_tasks_of_training:
            self._tasks = algorithm.env_runner_group.known_tasks() or self._tasks
        self._fire("on_evaluate_start", metrics_logger=algorithm.metrics)
        self._began_s = time.perf_counter()

    def _fire(self, event: str, **arguments: Any) -> None:
        algorithm = self._algorithm
        with algorithm.timers.time("callbacks"):
            self._callbacks.fire(event, algorithm=algorithm, **arguments)

    def _play(self) -> tuple[Round, dict[str, Any]]:
        """Play a round, or call the custom function; return the round and the metrics of the function."""
        group, function = self.group, self._settings.custom_evaluation_function
        assert group is not None
        try:
            if function is not None:
                return self._call(function, group)
            played = play_round(
                *(group, self._plan()),
                goes_on=self._training.is_set,
                is_cancelled=self._cancelled.is_set,
                late=self._late,
            )
            self._late = played.late
            return played, {}
        finally:
            self._evaluation_s = time.perf_counter() - self._began_s

    def _plan(self) -> RoundPlan:
        settings = self._settings
        unit = settings.evaluation_duration_unit
        duration = None if settings.evaluation_duration == "auto" else settings.evaluation_duration
        if settings.evaluation_seeds is not None:
            duration = len(settings.evaluation_seeds)
        return RoundPlan(
            num_episodes=duration if unit == "episodes" else None,
            num_timesteps=duration if unit == "timesteps" else None,
            resets=episode_resets(settings.evaluation_seeds, self._tasks),
            num_videos=settings.evaluation_num_videos,
            in_pieces=settings.enable_async_evaluation,
            # Rounds of episodes begin with a reset; see `evaluation_force_reset_envs_before_iteration`.
            force_reset=settings.evaluation_force_reset_envs_before_iteration or unit == "episodes",
            cuts_episodes=unit == "timesteps",
            timestep=self._timestep,
            training_iteration=self._algorithm.training_iteration,
            time_limit_s=settings.evaluation_sample_timeout_s,
        )

    def _call(self, function: Callable[..., Any], group: EnvRunnerGroup) -> tuple[Round, dict[str, Any]]:
        """Call a custom function; what it sampled counts by what it returns.

        Raises:
            CorralError: It returned something else than metrics, or metrics and two numbers of steps.
        """
        found = function(self._algorithm, group)
        metrics, *steps = found if isinstance(found, tuple) and len(found) == 3 else (found, 0, 0)
        if not isinstance(metrics, Mapping) or not all(isinstance(number, Integral) for number in steps):
            raise CorralError(
                f"custom_evaluation_function={function!r} returned {found!r:.80}: it must return a dict of metrics, or "
                "(metrics, env_steps, agent_steps)."
            )
        logged = group.foreach_env_runner("get_metrics", local_env_runner=False, timeout_seconds=GRACE_S)
        self._metrics.aggregate([parts for parts, _, _ in logged], key="env_runners")
        return Round(num_env_steps=int(steps[0])), dict(metrics)

    def _failed(self, error: Exception) -> tuple[Round, dict[str, Any]]:
        """Return a round without episodes if an env or all runners failed, and the settings say that this is no end.

        Raises:
            Exception: The failure otherwise.
        """
        if not isinstance(error, (EnvError, WorkerDiedError, TimeoutError)):
            raise error
        return Round(is_complete=False, error=error), {}

    def _await(self) -> dict[str, Any]:
        """Wait for the round that was played while an iteration trained, no longer than its time limit after that."""
        playing = self._playing
        assert playing is not None
        limit_s = self._settings.evaluation_sample_timeout_s
        try:
            with self._algorithm.timers.time("evaluating"):
                wait([playing], max(0.0, self._trained_s + limit_s + GRACE_S - time.perf_counter()))
            if not playing.done():  # a custom function, or a thread in an env that cannot be interrupted
                self._evaluation_s = time.perf_counter() - self._began_s
                raise TimeoutError(f"the evaluation took longer than evaluation_sample_timeout_s={limit_s:g}")
            played = playing.result()
        except Exception as error:
            played = self._failed(error)
        except BaseException:
            self.cancel()
            raise
        finally:
            if playing.done():
                self._playing = None
        self._announce_recreated()
        return self._report(*played)

    def cancel(self) -> None:
        """End a round that is played while an iteration trains, without its result.

        A custom function, or the env of an embedded runner, may take longer to return; then no round can be played.
        """
        if self._playing is None:
            return
        self._cancelled.set()
        wait([self._playing], CANCEL_S)
        if self._playing.done():
            self._playing = None

    # Results.

    def _report(self, played: Round, custom: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a round as `on_evaluate_end` leaves them; raise its failure if the settings say so."""
        group = self.group
        assert group is not None
        error = played.error
        if error is not None and self._settings.on_evaluation_failure == "raise":
            raise error
        if not played.is_complete:
            log.warning(
                "The evaluation round %s: %d episodes are missing; by runner: %s. %s",
                "was skipped" if played.skipped else "is truncated",
                played.num_episodes_missing,
                played.missing_by_runner,
                f"Time limit: evaluation_sample_timeout_s={self._settings.evaluation_sample_timeout_s:g}."
                if error is None
                else describe(error),
            )
        group.collect_metrics(self._metrics, Timers())
        logged: dict[str, Any] = self._metrics.reduce()["env_runners"]
        counts: dict[str, int] = {}
        if self._settings.custom_evaluation_function is not None and error is None:
            # What the function has played is counted by the runners, and its steps by the function if it says so.
            num_env_steps = played.num_env_steps or int(logged["num_env_steps_sampled"])
            counts = {"num_episodes": int(logged["num_episodes"]), "num_env_steps_sampled": num_env_steps}
        self._num_env_steps += counts.get("num_env_steps_sampled", played.num_env_steps)
        of_runners = {name: value for name, value in logged.items() if not name.endswith(LIFETIME)}
        metrics = self._metrics_of(played, {**of_runners, **describe_round(played, self._settings), **counts})
        if self._settings.evaluation_num_videos:
            metrics["videos"] = keep_videos(played, self._algorithm.run_dir, self._algorithm.training_iteration)
        merge_nested(metrics, custom)
        self._fire("on_evaluate_end", metrics_logger=self._algorithm.metrics, evaluation_metrics=metrics)
        index: float | None = None  # of the task that a curriculum of training has in force
        if self._takes_tasks_of_training:
            index = self._algorithm.metrics.peek(("curriculum", "task_index"), None)
        metrics |= improvement(metrics, self._latest, index)
        self._latest = _copied({name: value for name, value in metrics.items() if name != "videos"})
        return metrics

    def _metrics_of(self, played: Round | None, of_runners: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a round with the keys that every result has; `None` is before the first round."""
        group, found = self.group, played or Round()
        missing = {
            str(index): found.missing_by_runner.get(index, 0) for index in (group.worker_indices if group else ())
        }
        counts: dict[str, Any] = {
            "num_episodes_missing": found.num_episodes_missing,
            "missing_by_runner": missing,
            "num_episodes_taken_over": found.num_episodes_taken_over,
            "num_unfinished_episodes": found.num_unfinished_episodes,
            "num_env_steps_of_older_weights": found.num_env_steps_of_older_weights,
        }
        return {
            "env_runners": dict(of_runners),
            **by_task(played, self._settings),
            "fresh": played is not None,
            "explore": self._config.explore,
            "weights_version": NAN if played is None else self._weights_version,
            "truncated": found.truncated,
            "skipped": found.skipped,
            **(without_values(counts) if played is None else counts),
            "num_env_steps_sampled_lifetime": self._num_env_steps,
            "num_healthy_workers": 0 if group is None else group.num_healthy_remote_workers,
            "num_remote_worker_restarts": 0 if group is None else group.num_remote_worker_restarts,
            "num_env_runner_failures": 0 if group is None else group.num_failures,
            "evaluation_s": NAN if played is None else self._evaluation_s,
        }

    def result(self, *, fresh: bool = False) -> dict[str, Any]:
        """Return the metrics of the latest round for the result of an iteration; NaN before the first round.

        Args:
            fresh: Whether the round belongs to this iteration.
        """
        if self._latest is not None:
            return {**_copied(self._latest), "fresh": fresh}
        of_training = self._algorithm.metrics.peek_reserved().get("env_runners", {})
        nothing = {"num_episodes": NAN, "num_env_steps_sampled": NAN}
        of_runners = without_values(of_training) | describe_round(Round(), self._settings) | nothing
        return {**self._metrics_of(None, of_runners), **NO_IMPROVEMENT}

    @property
    def early_means(self) -> list[str]:
        """Names of the statistics of the latest round if it is truncated: its time limit ended long episodes only."""
        if self._latest is None or not self._latest.get("truncated"):
            return []
        return means_of(self._latest)

    # State.

    def get_state(self) -> dict[str, Any] | None:
        """Return the state of the runners, the metrics and the latest round as plain data; `None` if there is none."""
        if self._is_playing():
            log.warning("The checkpoint has no state of evaluation, because a round of evaluation did not end.")
            return None
        runners = self._runner_states if self.group is None else self.group.get_state()
        if runners is None and self._latest is None:
            return None
        latest = self._latest
        return {
            "runners": runners,
            "metrics": self._metrics.get_state(),
            "latest": _copied(latest) if latest is None or is_plain(latest) else plain_numbers(latest),
            "num_env_steps": self._num_env_steps,
            "rngs": self._rngs,
        }

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        """Check that a state can be set.

        Raises:
            Exception: It cannot; see `EnvRunnerGroup.check_state`.
        """
        if state is None:
            return
        check_parts(state, ("runners", "metrics", "latest", "num_env_steps", "rngs"), "evaluation", CheckpointError)
        check_metrics_state(state["metrics"])
        int(state["num_env_steps"])
        if not isinstance(state["latest"], dict | NoneType):
            raise CheckpointError(f"the latest evaluation is {state['latest']!r:.80}, and not a dict.")
        if state["rngs"] is not None:
            check_global_rngs(state["rngs"])
        if self.group is not None and len(self.group.mail.idle_runners()) < len(self.group.worker_indices):
            self._stop_runners()  # one of them could not answer; the next round starts them
        if self.group is not None and state["runners"] is not None:
            self.group.check_state(state["runners"])

    def set_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state that `check_state` accepted; `None`, as in older checkpoints, is the beginning.

        Raises:
            Exception: What an env or a callback raised; a part of the state may be set then.
        """
        self._metrics = _new_metrics()
        if self.group is not None:
            self.group.forget_weights()  # of the state, which may have the same version
        if state is None:
            self._latest, self._num_env_steps, self._rngs = None, 0, None
            return
        self._metrics.set_state(state["metrics"])
        self._latest = None if state["latest"] is None else _copied(state["latest"])
        self._num_env_steps, self._rngs = int(state["num_env_steps"]), state["rngs"]
        if self.group is None:
            self._runner_states = state["runners"]
        elif state["runners"] is not None:
            self.group.set_state(state["runners"])

    # Ending.

    def stop(self) -> None:
        """End a round that is being played, and all evaluation runners."""
        self._cancelled.set()
        self._stop_runners()
        self.cancel()

    def _stop_runners(self) -> None:
        group, self.group = self.group, None
        engine, self._own_engine = self._own_engine, None
        try:
            if group is not None:
                group.stop()
        finally:
            if engine is not None:
                engine.stop()


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    """Set a future to what a function returns or raises; the main function of a thread."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _new_metrics() -> MetricsLogger:
    """Return the logger of what evaluation runners log, in which the names of the result are taken."""
    metrics = MetricsLogger()
    for name in (*summarize_episodes([], []), "episode_returns", "episode_lens"):
        if not name.endswith(("_mean", "_min", "_max")):  # runners reserve these
            metrics.log_reserved({("env_runners", name): []})
    return metrics


def _copied(metrics: Any) -> Any:
    """Return a copy of nested dicts and lists."""
    if isinstance(metrics, dict):
        return {key: _copied(part) for key, part in metrics.items()}
    return list(metrics) if isinstance(metrics, list) else metrics
