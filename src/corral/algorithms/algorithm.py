"""The algorithm: one iteration is a round of sampling, learning and handing out weights; `fit` is the loop."""

from __future__ import annotations

import logging
import os
import time
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from corral.algorithms.acting import Acting
from corral.algorithms.algorithm_state import get_algorithm_state, restoring, set_algorithm_state
from corral.algorithms.checkpoint import algorithm_state, load_algorithm, save_algorithm
from corral.algorithms.config.validation import reconfigured, warn_of_mistakes
from corral.algorithms.config.without_effect import refuse_settings_without_use
from corral.algorithms.driver_policy import DriverPolicy
from corral.algorithms.evaluator import Evaluator
from corral.algorithms.fitting import fit, refuse_unknown
from corral.algorithms.iteration_report import (
    FIXED_KEYS,
    MOST_CALLS_WITHOUT_STEPS,
    Report,
    check_results,
    refuse_to_repeat,
)
from corral.algorithms.module_changes import add_module, load_module_weights, remove_module, use_modules_of
from corral.algorithms.modules import Modules
from corral.algorithms.resources import resources_of_workers
from corral.algorithms.sampler import Sampler, Weights
from corral.algorithms.stopping import Criterion
from corral.callbacks.dispatch import make_dispatcher
from corral.core.familiar_names import attribute_error
from corral.core.interrupts import interruptible, interrupts_deferred, raise_if_ending
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.result import EARLY_MEANS, plain_numbers
from corral.core.metrics.result_html import Result
from corral.core.metrics.timers import Timers
from corral.core.seeding import seed_everything
from corral.core.tree import Tree
from corral.data.episodes.rollout import group_by_module
from corral.engines.lazy import LazyEngine
from corral.errors import ConfigError, CorralError
from corral.exploration.base import Exploration
from corral.learners.build import make_learner_group
from corral.learners.losses import Loss
from corral.learners.settings import LearningSpec
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec
from corral.modules.threads import limit_threads
from corral.moved import MOVED_METHODS, moved_method
from corral.runners.runner_group import EnvRunnerGroup
from corral.runs.checkpoint import Checkpoint, read_checkpoint

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.algorithms.recorded_episodes import RecordedEpisodes
    from corral.algorithms.recording import RecordingSummary
    from corral.data.episodes.rollout import Rollout
    from corral.modules.transforms.pipeline import Pipeline
    from corral.runners.runner import EnvRunner
    from corral.runs.loggers.progress import Mode

log = logging.getLogger("corral")


class _WithHints(ABCMeta):
    """Class of algorithm classes: says for `PPO.load` and other names of other libraries what Corral calls them."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise attribute_error(cls, name, "ALGORITHM_METHODS")


class Algorithm(metaclass=_WithHints):
    """Trains modules on an env. Subclasses define `make_loss` and `training_step`.

    Use it as a context manager, or call `stop()` at the end. If it is dropped without that, its workers are ended when
    Python collects it.

    Attributes:
        config: Frozen config.
        metrics: Logger whose numbers become the result.
        engine: Engine of all runners and learners; made when the first worker starts.
        env_runner_group: Group of the runners.
        eval_env_runner_group: Group of the evaluation runners, or `None`.
        learner_group: Group of the learners.
        modules: Records of the modules, by module id.
        sampler: What asks the runners, receives rollouts and counts them.
        weights: What sends weights to the runners.
        report: What makes the result of an iteration.
        acting: What chooses actions for `compute_actions`.
        evaluator: What plays evaluation rounds.
        training_iteration: Finished calls of `train()`.
        num_env_steps_sampled_lifetime: Env steps sampled so far.
        recorded: Recorded episodes that the algorithm learns from, or `None`.
        stop_requested: Why `request_stop` was called; `None` if it was not called.
        run_dir: Directory of the latest run, of `fit` or of `train` with `.reporting(loggers=...)`; `None` before it.
        METRICS: Metrics of the learners that are in the result from the first iteration, even if nothing was learned.
        STATE: Names of attributes that an algorithm keeps between iterations, which checkpoints hold: plain data and
            NumPy generators.
        OF_MODULES: Names of those that are dicts by module id; a module that is removed takes its entries along.
        READS_INFOS: Whether `training_step` reads the infos of rollouts, or what callbacks noted on their episodes.
            Otherwise they stay in the runners.
        LEARNS_TENSORS: Whether `training_step` takes rollouts of tensors, see `TensorRollout`, from an env whose data
            are tensors. A subclass must say it again, because its own code may need arrays.
        FIXED_SETTINGS: Settings of `training` that cannot change after building.
        FIRST_SETTINGS: Settings that only say how a run begins.
        ADAPTED: Attribute with numbers by module id that begin at a setting and adapt, by the setting. They begin again
            at another value of it, of `reconfigure` or in the config of a checkpoint.
    """

    STATE: ClassVar[tuple[str, ...]] = (
        *("training_iteration", "num_env_steps_sampled_lifetime"),
        *("report.time_total_s", "weights.num_exploration_versions", "latest_numbers"),
    )
    OF_MODULES: ClassVar[tuple[str, ...]] = ()
    METRICS: ClassVar[tuple[str, ...]] = ()
    READS_INFOS: ClassVar[bool] = False
    LEARNS_TENSORS: ClassVar[bool] = False
    FIXED_SETTINGS: ClassVar[frozenset[str]] = frozenset({"optimizer", "optimizer_config", "lr_scheduler"})
    FIRST_SETTINGS: ClassVar[frozenset[str]] = frozenset({"seed"})
    ADAPTED: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse the arguments with which other libraries make an algorithm.

        Raises:
            ConfigError: The first argument is a name or a dict.
        """
        if isinstance(args[0] if args else settings.get("config"), (str, dict)):
            raise ConfigError(
                f"{cls.__name__} is made from a config: call build() of its config class, as in "
                "PPOConfig().environment('CartPole-v1').training(lr=1e-3).build()."
            )
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property that raised; raise its error again
            if name in MOVED_METHODS:
                return moved_method(self, name)
            raise attribute_error(self, name, "ALGORITHM_METHODS")

    @interruptible
    def __init__(self, config: AlgorithmConfig) -> None:
        """Build runners and learners from a copy of the config.

        Raises:
            ConfigError: Settings contradict each other.
            EnvError: The env cannot be made or is not what its spaces say.
        """
        self._begin(config)
        try:
            self._make_runners()
            self._make_modules()
            self._make_learners()
            self.setup()  # which may add a part to the weights
            self.sync_weights()
            self._make_evaluation()
            self._announce()
        except BaseException:
            self.stop()
            raise

    def _begin(self, config: AlgorithmConfig) -> None:
        """Check the config, and make what needs no env; nothing is there that must be stopped."""
        config = config.copy()
        config.validate()
        warn_of_mistakes(config)  # not in `validate`, which the command line calls once more
        if config.seed is None:
            config.seed = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
        seed_everything(config.seed)
        self.config = config.freeze()
        self.metrics, self.timers = MetricsLogger(reserved=FIXED_KEYS), Timers()
        self.training_iteration = self.num_env_steps_sampled_lifetime = 0
        self.stop_requested: str | None = None
        self.run_dir: Path | None = None
        self._stage: Literal["building", "running", "stopped"] = "building"
        self._large_arrays: Literal["copied", "shared", "left_out"] = "copied"
        self._callbacks = make_dispatcher(config)
        self.modules, self.report, self.acting = Modules(self), Report(self), Acting(self)
        self.engine = LazyEngine(config.engine_name)
        weakref.finalize(self, _end_dropped, self.engine).atexit = False  # at exit, the handles end their workers

    def _make_runners(self) -> None:
        """Start the runners, whose env says the spaces; without sampling, the recorded data say them."""
        config = self.config.for_workers()
        self.engine.require(resources_of_workers(self.config))
        self.env_runner_group: EnvRunnerGroup
        self.recorded: RecordedEpisodes | None = None
        if self.config.input_ is not None:
            from corral.algorithms.recorded_episodes import RecordedEpisodes

            self.recorded = RecordedEpisodes(self)
        if self.recorded is not None and not config.samples:
            self.env_runner_group = self.recorded.make_group(config)
        else:
            self.env_runner_group = EnvRunnerGroup(config, self.engine, metrics=self.metrics, timers=self.timers)
        self.env_runner_group.on_recreated = self.report.announce_recreated
        log.info("Engine: %s.", self.env_runner_group.engine_name)
        self.sampler = Sampler(self)

    def _make_modules(self) -> None:
        """Make the modules that the runners' spaces ask for, with their policies and explorations in this process."""
        specs = self.env_runner_group.module_specs
        refuse_settings_without_use(self.config, specs)
        made: dict[str, Module] = {}
        for module_id, spec in specs.items():
            made[module_id] = self.modules.make(module_id, spec, made)
        self.modules.choose_num_threads()

    def _make_learners(self) -> None:
        """Start the learners with the modules, and note what travels from them to the runners."""
        modules = {module_id: record.module for module_id, record in self.modules.items()}
        learning = {
            module_id: self.learning_spec(module_id) for module_id in modules if self.modules[module_id].has_weights
        }
        self.learner_group = make_learner_group(
            *(self.config.for_workers(), self.env_runner_group.module_specs, modules, learning),
            *(self.engine, self.metrics, self.timers),
        )
        self.weights = Weights(self)
        if self.config.output is not None:
            from corral.algorithms.recording import make_recorder

            self.sampler.recorder = make_recorder(self, self.config.output)
        self._resolve_modules()

    def _make_evaluation(self) -> None:
        """Start the evaluation runners, if rounds are played at intervals; otherwise the first round starts them."""
        self.evaluator = Evaluator(self, self._callbacks)
        if self.config.evaluation_interval is not None:
            self.evaluator.build()

    def _announce(self) -> None:
        """Reserve the keys of all results, and fire `on_algorithm_init`."""
        self.report.reserve_metrics()
        self.report.log_steps_trained()
        raise_if_ending()
        self._callbacks.fire("on_algorithm_init", algorithm=self, metrics_logger=self.metrics)
        self._stage = "running"
        self.timers.take()  # what building took is no part of the first iteration

    def _resolve_modules(self) -> None:
        """Note what the modules of now need in each iteration, and what runners need of them."""
        self.modules.resolve()
        self.weights.resolve()
        self.sampler.resolve()

    # Defined by each algorithm.

    def setup(self) -> None:
        """Prepare the state that the training step keeps between iterations."""
        return

    @abstractmethod
    def make_loss(self, config: Any) -> Loss:
        """Return the loss, a pure function; see `corral.learners.losses.Loss`.

        Args:
            config: Config of the module that learns, see `module_config`; with a single agent, the algorithm's config.
        """

    @abstractmethod
    def training_step(self) -> dict[str, dict[str, float]]:
        """Sample, learn, and hand out the new weights. Return metrics of the learners by module id."""

    # Modules.

    @property
    def module_ids(self) -> list[str]:
        """Ids of all modules, those that do not learn included."""
        return list(self.modules)

    def module_config(self, module_id: str) -> Any:
        """Return the frozen config of a module: with several agents, with the module's own settings in it."""
        return self.modules[module_id].config

    def group_trained(self, rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
        """Return the rollouts of each module that learns and took steps, by module id."""
        grouped = group_by_module(rollouts)
        chosen = None if self.config.policies_to_train is None else self.modules.trains
        return {
            module_id: grouped[module_id]
            for module_id, record in self.modules.items()
            if module_id in grouped
            and (record.has_weights if chosen is None else chosen(module_id))
            and any(map(_num_env_steps, grouped[module_id]))
        }

    def can_take_tensors(self) -> bool:
        """Return whether the training step learns from rollouts of tensors, with the settings of this run."""
        config = self.config
        # Not what a subclass inherits: its own code may need arrays.
        return "LEARNS_TENSORS" in vars(type(self)) and not (
            config.num_learners or config.output is not None or "on_learn_on_batch" in self._callbacks.heard
        )

    def learning_spec(self, module_id: str) -> LearningSpec:
        """Return how a module learns: its loss and its optimizer."""
        return self.modules.learning_spec(module_id)

    def default_loss(self, config: Any) -> Loss:
        """Return the loss of a module if the setting `loss` gives none."""
        return self.make_loss(config)

    def metrics_of(self, module_id: str) -> tuple[str, ...]:
        """Return the names of what the updates of a module report."""
        return self.METRICS

    def add_module(
        self,
        module_id: str,
        *,
        module_class: type[Module] | None = None,
        model_config: Mapping[str, Any] | None = None,
        observation_space: Any = None,
        action_space: Any = None,
        copy_from: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        policy_mapping_fn: Any = None,
        policies_to_train: Any = None,
        shared_layers: Mapping[str, Any] | None = None,
    ) -> Module:
        """Add a module while training, in all learners and runners, and return it. Fires `on_create_policy`.

        Episodes that have begun keep their modules; the new mapping counts for agents that are first observed later.
        Checkpoints from now on hold the module, and `from_checkpoint` builds it.

        Args:
            module_id: Id that no module has.
            module_class: Class of the module; `None` is as in the config.
            model_config: Settings of the class; `None` is as in the config.
            observation_space: Space of one observation; `None` is the space of the agents that are mapped to it.
            action_space: Space of one action; `None` is the space of the agents that are mapped to it.
            copy_from: Id of a module whose class, settings, spaces and present weights the new one gets, where no
                others are given; the new one has an optimizer of its own.
            overrides: Settings of the module, as in `algorithm_config_overrides_per_module`.
            policy_mapping_fn: A new mapping; `None` keeps the present one.
            policies_to_train: Which modules learn from now on; `None` keeps the present choice.
            shared_layers: Layers that modules share from now on, in which only the new module may be new. `None`
                keeps the present setting: the new module shares none.

        Raises:
            ConfigError: The module exists, or a setting is wrong; nothing was changed.
        """
        given = {
            "module_class": module_class,
            "model_config": None if model_config is None else dict(model_config),
            "observation_space": observation_space,
            "action_space": action_space,
        }
        return add_module(
            self,
            module_id,
            {name: value for name, value in given.items() if value is not None},
            overrides=overrides or {},
            copy_from=copy_from,
            changes=_given(
                policy_mapping_fn=policy_mapping_fn, policies_to_train=policies_to_train, shared_layers=shared_layers
            ),
        )

    def remove_module(self, module_id: str, *, policy_mapping_fn: Any = None, policies_to_train: Any = None) -> None:
        """Remove a module while training, from all learners and runners, with its optimizer and its replay buffer.

        Args:
            module_id: Id of the module.
            policy_mapping_fn: A mapping that does not lead to the module; `None` keeps the present one.
            policies_to_train: Which modules learn from now on; `None` keeps the present choice, without the module.

        Raises:
            ConfigError: There is no such module, or the mapping leads to it; nothing was changed.
        """
        remove_module(self, module_id, _given(policy_mapping_fn=policy_mapping_fn, policies_to_train=policies_to_train))

    def load_module_weights(self, path: str | Path, module_id: str, from_module_id: str | None = None) -> None:
        """Load the weights of one module from a checkpoint of this run or another one, and send them to the runners.

        Its optimizer keeps its state. Other modules stay as they are, except for layers that they share with it: a
        warning names them.

        Args:
            path: A checkpoint, a run directory, of which the best checkpoint is taken, or a file of weights, as for
                `.rl_module(load_from=...)`.
            module_id: Id of the module that gets the weights.
            from_module_id: Id of the module in the checkpoint; `None` is the same id, or the only one.

        Raises:
            CheckpointError: There is no such checkpoint or module, or the weights do not fit; nothing was changed.
        """
        load_module_weights(self, path, module_id, from_module_id)

    def setup_modules(self) -> None:
        """Prepare what the training step keeps for each module; called again when a module was added or removed."""
        return

    def _use_modules(self, config: AlgorithmConfig, specs: Mapping[str, ModuleSpec]) -> None:
        """Use a config with other modules in this process and in all runners; forget modules without a spec."""
        for module_id in self.modules.keys() - specs.keys():
            del self.modules[module_id]
            for name in self.OF_MODULES:
                getattr(self, name).pop(module_id, None)
        self._use_config(config)
        if specs.keys() != self.env_runner_group.module_specs.keys():
            self.env_runner_group.set_modules(self.config, specs)
        self._resolve_modules()
        if self.sampler.recorder is not None:
            from corral.algorithms.recording import describe_recording

            self.sampler.recorder.use_modules(*describe_recording(self))
        self.evaluator.set_modules(self.config, specs)

    @property
    def exploration(self) -> Exploration:
        """Exploration of the only module; with several modules, see `explorations`."""
        return self.explorations[self.modules.resolve_id()]

    @property
    def explorations(self) -> dict[str, Exploration]:
        """Explorations of the algorithm by module id, for the modules that have a network."""
        return self.modules.explorations

    def get_pipeline(self, module_id: str | None = None) -> Pipeline | None:
        """Return the transforms of a module with their present statistics, or `None` if it has none."""
        return self.modules[self.modules.resolve_id(module_id)].policy.pipeline

    # Pieces of a training step.

    def log_learner_results(self, *updates: Mapping[str, Mapping[str, Any]]) -> None:
        """Log the results of updates, each by module id; no other metric can have the names of the numbers among them.

        Over the updates of an iteration, a number has its mean in the result, or its minimum or maximum if its name
        ends with `_min` or `_max`.
        """
        self.report.log_learner_results(*updates)

    def sample(self, num_timesteps: int | None = None, *, num_episodes: int | None = None) -> list[Rollout]:
        """Return rollouts of at least `num_timesteps` env steps, or of exactly `num_episodes` whole episodes.

        Args:
            num_timesteps: Env steps, sampled in rounds of the fragment length if one is set. With
                `count_steps_by="agent_steps"`, agent steps.
            num_episodes: Whole episodes, spread evenly over all sub-envs, which are reset before and after. More come
                back if a fragment of an earlier call arrives late.

        Raises:
            SampleError: Neither or both of the numbers are given, or episodes with `sample_async`.
        """
        return self.sampler.sample(num_timesteps, num_episodes)

    def sample_ahead(self, num_timesteps: int, *, wait: bool = True) -> list[Rollout]:
        """Return the fragments that arrived first and hold at least so many steps, while runners sample the next ones.

        `sample` calls it with `sample_async=True`, without which it cannot be called, and notes their lag.

        Args:
            num_timesteps: As for `sample`. Fragments are whole, so there may be up to one fragment more.
            wait: Whether to wait for them; otherwise nothing is returned unless there are so many steps.

        Raises:
            SampleError: `sample_async` is off.
        """
        return self.sampler.sample_ahead(num_timesteps, wait=wait)

    def receive(self, rollouts: Sequence[Rollout]) -> None:
        """Count the env steps of rollouts, and let statistics of transforms and explorations learn from them.

        For a training step that asks for rollouts with `env_runner_group.sample_async`, and receives them with
        `fetch_samples`; `sample` does all of it. Env steps of a training step that samples by hand otherwise, with
        `env_runner_group.sample` or `env_runner.sample`, count when it ends.
        """
        self.sampler.receive(rollouts)

    @property
    def weight_providers(self) -> dict[str, Callable[[], Mapping[str, Any]]]:
        """Functions that return the parts of the weights that runners need, by name.

        Runners have a receiver for each part in `EnvRunner.weight_receivers`.
        """
        return self.weights.providers

    def sync_weights(self) -> None:
        """Give the runners the parts of the weights from every provider, if the version or the set of parts changed."""
        self.weights.sync()

    # Training.

    def train(self) -> Result:
        """Run one iteration and return its result, one nested dict with the same keys every time.

        With `.reporting(loggers=...)`, the first call makes a run directory and opens the loggers, each call gives them
        its result, and `stop` closes them.

        Raises:
            EnvError: An env raised or gave NaN.
            LossError: A loss became NaN.
            CallbackError: A callback raised.
            CorralError: The algorithm was stopped.
        """
        if self._stage == "stopped":
            self._check_running()
        report = self.report
        with report.exceptions_shown(), limit_threads(self.modules.num_threads):
            if report.loop_run is not None:
                report.loop_run.open()
            if self.modules.ending_lrs:
                self.modules.warn_of_ended_lr()
            start = time.perf_counter()
            # Sample and learn. Weights that somebody may have changed by hand count first, and a round of evaluation
            # that is due may be played at the same time.
            with ExitStack() as around:
                if self.learner_group.is_watched:
                    around.enter_context(self.weights.taking_changes())
                if self.config.evaluation_interval is not None:
                    around.enter_context(self.evaluator.during_training())
                self._repeat_training_step(start)
            # What everybody logged is the result. From here on the iteration is counted, also if a callback raises.
            report.log_steps_trained()
            self.env_runner_group.collect_metrics(self.metrics, self.timers)
            self.learner_group.collect_metrics(self.metrics, self.timers)
            result = report.result()
            try:
                with interrupts_deferred():  # an iteration that is counted has its result
                    self.training_iteration += 1
                    report.latest = result
                self._complete(result, start)
            finally:
                with interrupts_deferred():
                    self.metrics.start_period()
                    iteration_s = time.perf_counter() - start
                    report.set_costs(result, iteration_s)  # with the time of the callbacks
                    report.time_total_s += iteration_s
                    self.timers.take()
            if report.loop_run is not None:
                report.loop_run.log_result(result)
            return result

    def _complete(self, result: Result, start: float) -> None:
        """Add to a result what follows an iteration: evaluation, the next tasks, and what callbacks log."""
        if self.config.evaluation_interval is not None:
            with self.report.taking_new_metrics(result):  # from its callbacks
                self.evaluator.finish(result)
        if self.config.env_task_fn is not None:
            with self.timers.time("callbacks"):
                self.env_runner_group.choose_tasks(result)
        if "on_train_result" in self._callbacks.heard:
            self._fire_train_result(result, start)

    def _fire_train_result(self, result: dict[str, Any], start: float) -> None:
        self.report.fire_train_result(result, start)

    def _repeat_training_step(self, start: float) -> None:
        """Train until the iteration is as long as the settings say; `start` is the clock reading of its begin."""
        config, mail, by_users = self.config, self.env_runner_group.mail, self.env_runner_group.hand_sampler
        steps_before = self.report.num_steps_before = self.num_env_steps_sampled_lifetime
        num_calls_without_steps = 0
        while True:
            counted = self.num_env_steps_sampled_lifetime
            returned = mail.num_env_steps_returned + by_users.num_env_steps_by_hand
            try:
                results = self.training_step()
            finally:
                # A training step may sample by hand, and an interrupt may come between the return of a rollout and the
                # line that counts it. All that runners have returned since counts, and nothing twice.
                steps = counted - returned + mail.num_env_steps_returned + by_users.num_env_steps_by_hand
                steps = self.num_env_steps_sampled_lifetime = max(steps, self.num_env_steps_sampled_lifetime)
            if type(results) is not dict or {*map(type, results.values())} - {dict}:
                check_results(self, results)
            self.report.log_learner_results(results)
            num_calls_without_steps = num_calls_without_steps + 1 if steps == counted else 0
            if time.perf_counter() - start < config.min_time_s_per_iteration:
                continue
            if steps - steps_before >= config.min_sample_timesteps_per_iteration or not self.sampler.samples_now:
                return
            if num_calls_without_steps >= MOST_CALLS_WITHOUT_STEPS:
                refuse_to_repeat(self)

    def _check_running(self) -> None:
        if self._stage == "stopped":
            raise CorralError("this algorithm was stopped, and its envs are closed: build() another one.")

    def evaluate(self) -> Result:
        """Play an evaluation round now, with the present weights, and return its metrics.

        The settings of `.evaluation(...)` apply; no `evaluation_interval` is needed. Fires `on_evaluate_start` and
        `on_evaluate_end`.

        Returns:
            What `result["evaluation"]` holds; docs/evaluation.md lists it.

        Raises:
            ConfigError: The evaluation env has other spaces than the module, or a setting of it is wrong.
            CallbackError: A callback raised.
            CorralError: The algorithm was stopped, or a round is being played at the same time as training.
            Exception: What made all runners fail, with `on_evaluation_failure="raise"`.
        """
        self._check_running()
        with self.report.exceptions_shown(), limit_threads(self.modules.num_threads):
            self.weights.take_changed()
            return Result(self.evaluator.evaluate())

    def training_done(self) -> bool:
        """Return whether no iteration is training now.

        A custom evaluation function asks this, if it is called at the same time as training; otherwise it is True.
        """
        return self.evaluator.training_done

    @property
    def latest_numbers(self) -> dict[str, Any]:
        """The numbers and texts of the latest result, nested as in the result; empty before the first iteration.

        The list of its early means is there, too.
        """
        result = self.report.latest
        return {**plain_numbers(result), EARLY_MEANS: list(result.get(EARLY_MEANS, []))} if result else {}

    @latest_numbers.setter
    def latest_numbers(self, numbers: dict[str, Any]) -> None:
        self.report.latest = numbers

    def request_stop(self, reason: str = "") -> None:
        """Ask for the end of training: `fit` and the command line end the run after the current iteration.

        A loop of your own around `train()` asks `stop_requested`.

        Args:
            reason: Why, for the log and the display.
        """
        self.stop_requested = reason or "request_stop() was called"

    def _use_config(self, config: AlgorithmConfig) -> None:
        """Freeze a config and use it from now on."""
        self.config = config.freeze()
        self.modules.use_config()
        self.report.use_config()

    def fit(
        self,
        *no_args: Any,
        stop: Mapping[str, Criterion] | Callable[[dict[str, Any]], bool] | None = None,
        run_dir: str | Path | None = None,
        resume: str | Path | None = None,
        loggers: Sequence[Any] | None = None,
        progress: Mode | Literal[False] = "auto",
        **unknown: Any,
    ) -> Result:
        """Train until a stop criterion is met, write a run directory, and return the last result.

        The criteria are also checked before the first iteration, against the latest result of this algorithm or of the
        run that continues. Which checkpoints are written is set by `config.checkpointing(...)`.

        Args:
            stop: By name, the number to reach, such as `{"episode_return_mean": 450, "num_env_steps": 500_000}`,
                `Below(number)`, or a function `f(result) -> bool`; the first one met ends the run. See
                `StopCriteria` for the names. `None` is for runs that continue: the criteria of the run.
            run_dir: Where to write; `None` is `runs/<algo>-<env>-<time>`.
            resume: Directory of a run to continue: the algorithm is restored from its last checkpoint, and the files of
                the run are appended. Algorithm, env spaces and module must be the run's; other settings may differ.
            loggers: What to write each result with, as in `.reporting(loggers=...)`; `None` is what the config says.
                If that is `None` too, it is progress.csv and result.jsonl, and for a run that continues the other
                built-in loggers that it had.
            *no_args: Refused, with what to write instead.
            **unknown: Refused, with what to write instead.
            progress: `"auto"` shows a panel on a terminal and in a notebook, and lines elsewhere; `"panel"` and
                `"lines"` choose one of them; `"last"` prints the last line only; False shows nothing.

        Returns:
            The last result. If a criterion was met before the first iteration, the numbers of the earlier result.

        Raises:
            StopCriterionError: A criterion never appears in the result, or is met by every result.
            FileExistsError: The run directory holds a run already.
            RunDirectoryError: The run directory cannot be written, or there is no run to continue, or another process
                runs it. Later, a full disk only gives a warning.
            CheckpointError: The run to continue has no checkpoint, or it is of another algorithm, module or env.
            ConfigError: `best_checkpoint_metric` never appears in the result.
        """
        refuse_unknown(no_args, unknown)
        return fit(
            self,
            stop=stop,
            run_dir=run_dir,
            resume=resume,
            loggers=loggers,
            progress=progress,
            late_keys=self._callbacks.subscribed(),
        )

    def reconfigure(self, **settings: Any) -> None:
        """Change settings of `training`, such as `lr`, from the next iteration on.

        With several modules, `algorithm_config_overrides_per_module` keeps its effect.

        Raises:
            ConfigError: A setting is unknown, contradicts another one, or cannot change after building.
        """
        config = reconfigured(self.config, settings, fixed=self.FIXED_SETTINGS)
        self._use_config(config)
        self.sampler.plan_rounds()
        losses = {name: self.modules.loss_of(name) for name in self.learner_group.learning_ids}
        self.learner_group.set_losses(losses)
        self.modules.use_gamma()
        for name in self.ADAPTED.keys() & settings.keys():
            getattr(self, self.ADAPTED[name]).clear()

    def record(
        self,
        output: str | Path,
        *,
        num_episodes: int,
        explore: bool = True,
        seed: int | None = None,
        with_infos: bool = False,
        max_rows_per_file: int = 100_000,
    ) -> RecordingSummary:
        """Play episodes in evaluation envs, write them as recorded data, and return a summary.

        Args:
            output: Directory or URL of Parquet files, to which files are added, or `"minari:ID"`, a new Minari dataset.
            num_episodes: Number of episodes; with several agents, of the env.
            explore: Whether to explore as training does. Otherwise the policy acts greedily.
            seed: Seed of the envs and of exploration, in runners of their own; `None` lets the evaluation runners
                play.
            with_infos: Whether the infos of the envs are written, too, as JSON.
            max_rows_per_file: Rows after which a file is complete.

        Returns:
            The numbers of episodes and steps, and the mean return.

        Raises:
            DataError: The output cannot be written.
            MissingPackageError: A package that writes it is not installed.
            ConfigError: There is no env.
            CorralError: The algorithm was stopped.
        """
        from corral.algorithms.recording import record_episodes

        self._check_running()
        with self.report.exceptions_shown():
            self.weights.take_changed()
            return record_episodes(
                self,
                os.fspath(output),
                num_episodes=num_episodes,
                explore=explore,
                seed=seed,
                with_infos=with_infos,
                max_rows_per_file=max_rows_per_file,
            )

    # State and checkpoints.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the whole state, plain data and arrays by part; docs/checkpoints.md lists it.

        A part that cannot be had is left out, with a warning.
        """
        return get_algorithm_state(self)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where the algorithm of this state was; `result["restored"]` counts the envs that could not.

        All parts are checked first, and a state that does not fit changes nothing. If setting one fails after that,
        such as the `set_state` of an env, the algorithm stops: build it again.

        Raises:
            CheckpointError: The state is damaged, or of other modules or another optimizer, or a part cannot be set.
        """
        with restoring(self):
            set_algorithm_state(self, state)

    @contextmanager
    def large_arrays(self, how: Literal["copied", "shared", "left_out"]) -> Iterator[None]:
        """Choose what `get_state` does within the block with large arrays, such as the columns of a replay buffer.

        Args:
            how: `"copied"` is the default. `"shared"` returns views, which change as training continues; saving uses
                it. `"left_out"` returns a state without them: who restores it begins with an empty buffer.
        """
        before, self._large_arrays = self._large_arrays, how
        try:
            yield
        finally:
            self._large_arrays = before

    def save(self, path: str | Path | None = None) -> str | Path:
        """Write a checkpoint, a directory, and return where; `None` is `checkpoints/<algo>-<env>-<time>-<iteration>`.

        Raises:
            CheckpointError: The path holds something else, or the state holds an object that cannot be saved.
            OSError: The files cannot be written, such as on a full disk. A checkpoint that was there is unchanged.
        """
        return save_algorithm(self, path)

    def save_to_path(self, path: str | Path | None = None) -> str | Path:
        """Write a checkpoint, and return its path; another name of `save`."""
        return self.save(path)

    def restore_from_path(self, path: str | Path) -> None:
        """Continue from a checkpoint; see `set_state`. No code from it is run. Fires `on_checkpoint_loaded`.

        With several agents, modules that the run added are made, as the checkpoint says, and those that it removed are
        removed; the classes and functions that the checkpoint names for this are imported.

        Raises:
            CheckpointError: There is none, it is damaged, or it is of another algorithm, module or optimizer. If it
                says that a part was restored, the algorithm was stopped; otherwise nothing was changed.
        """
        self._restore(read_checkpoint(path))

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = algorithm_state(checkpoint, type(self))
        with restoring(self):  # also what a subclass restores in its own `set_state`
            use_modules_of(self, checkpoint)
            self.set_state(state)
        self._callbacks.fire("on_checkpoint_loaded", algorithm=self)
        for name, attribute in self.ADAPTED.items():
            if not np.array_equal(checkpoint.config["training"].get(name, np.nan), getattr(self.config, name)):
                getattr(self, attribute).clear()

    @classmethod
    def from_checkpoint(cls, path: str | Path, **settings: Any) -> Self:
        """Return an algorithm of this class, built from a checkpoint's config and restored.

        The classes and functions that the config names are imported, except for the ones that `settings` replaces. The
        class is the one that was saved, a subclass of it, or a base of it, which gives an instance of the saved class.

        Args:
            path: The checkpoint, a directory or a URL for fsspec.
            **settings: Any settings of the config by name, in place of the saved ones, such as `env=MyEnv` or
                `num_env_runners=0`; `algo` is the config class.

        Raises:
            CheckpointError: The checkpoint cannot be read, is of another algorithm, or names what no checkpoint should,
                such as a function of the standard library.
            ConfigError: The config holds an object that no file can name and that is not given, names a class that
                cannot be imported, or a setting is unknown.
        """
        return load_algorithm(path, cls, settings)

    # Acting.

    def compute_actions(
        self,
        obs: Tree,
        *,
        state: Tree = None,
        explore: bool | None = None,
        module_id: str | None = None,
        policy_id: str | None = None,
    ) -> Any:
        """Return the env actions `[B, ...]` for observations, a tree of `[B, ...]`.

        Args:
            obs: Observations as the env gives them, stacked on axis 0.
            state: For a policy with memory, the states in which it sees them, a tree of `[B, ...]`. Episodes begin with
                `acting_policy(...).initial_states(B)`.
            explore: Whether to explore as the runners do; `None` asks the config, False acts deterministically.
            module_id: Id of the module that chooses the actions; `None` is the only one.
            policy_id: Another name of `module_id`.

        Returns:
            The actions; for a policy with memory, a pair of the actions and the next states.

        Raises:
            ObservationError: The observations do not fit the observation space, or hold NaN or infinity; or the states
                do not fit the module.
            ConfigError: There is no such module, or there are several and none was named; or the policy has memory and
                no state was given, or the reverse.
        """
        return self.acting.compute_actions(obs, state, explore, module_id, policy_id)

    def compute_single_action(
        self,
        obs: Tree,
        state: Tree = None,
        *,
        explore: bool | None = None,
        module_id: str | None = None,
        policy_id: str | None = None,
    ) -> Any:
        """Return the env action for one observation; see `compute_actions`.

        Args:
            obs: Observation as the env gives it.
            state: For a policy with memory, the state in which it sees the observation, a tree of arrays `[...]`. An
                episode begins with the only entry of `acting_policy(...).initial_states(1)`.
            explore: Whether to explore as the runners do; `None` asks the config, False acts deterministically.
            module_id: Id of the module that chooses the action; `None` is the only one.
            policy_id: Another name of `module_id`.

        Returns:
            The action; for a policy with memory, a pair of the action and the next state.
        """
        return self.acting.compute_single_action(obs, state, explore, module_id, policy_id)

    def acting_policy(self, module_id: str | None = None) -> DriverPolicy:
        """Return the policy with which `compute_actions` acts, with the weights of now.

        Raises:
            ConfigError: There is no such module, or there are several and none was named.
        """
        return self.acting.policy(module_id)

    def get_module(self, module_id: str | None = None) -> Module:
        """Return the module that is being trained, on the learner's device; `None` is the only one.

        Weights that are changed in it by hand act and learn from the next call of a method of the algorithm on; in the
        middle of `train()`, from the next update on. With `num_learners` above 0 it is a copy: what is changed in it by
        a callback in the middle of `train()` is overwritten by the next update.

        Raises:
            ConfigError: There is no such module, or there are several and none was named.
        """
        module = self.learner_group.get_module(self.modules.resolve_id(module_id))
        if not self.learner_group.is_watched:
            self.learner_group.watch()
        return module

    @property
    def env_runner(self) -> EnvRunner | None:
        """The embedded runner, with the present weights; `None` when the engine runs the runners."""
        self.weights.take_changed()
        return self.env_runner_group.local_env_runner

    @property
    def eval_env_runner_group(self) -> EnvRunnerGroup | None:
        """The group of the evaluation runners; `None` before the first use, if there is no `evaluation_interval`."""
        return self.evaluator.group

    # Ending.

    def stop(self) -> None:
        """Close envs and loggers and end all workers; a second call only ends what an interrupted first call left."""
        stage, self._stage = self._stage, "stopped"
        with ExitStack() as ending:  # the last one first, and every one of them whatever another raises
            for name in ("recorded", "engine", "env_runner_group", "learner_group", "evaluator"):
                if (part := getattr(self, name, None)) is not None:  # building may have failed before it
                    ending.callback(part.stop)
            if self.report.loop_run is not None:
                ending.callback(self.report.loop_run.close)
            if (sampler := getattr(self, "sampler", None)) is not None and sampler.recorder is not None:
                ending.callback(sampler.recorder.close)
            if stage == "running":
                self._callbacks.fire("on_algorithm_stop", algorithm=self)

    def __enter__(self) -> Self:
        """Return the algorithm."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; run.log of a run of `train` says how it ended."""
        try:
            if self.report.loop_run is not None:
                self.report.loop_run.close(error)
        finally:
            self.stop()


_num_env_steps = attrgetter("num_env_steps")


def _end_dropped(engine: LazyEngine) -> None:
    """End the workers of an algorithm that nobody can stop any more."""
    if running := engine.running():
        log.warning("An algorithm was deleted before stop() was called: its %d worker(s) are ended.", len(running))
    engine.stop()


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
