"""The algorithm: one iteration is a round of sampling, learning and handing out weights; `fit` is the loop."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from corral.algorithms.algorithm_state import (
    NOT_RESTORED,
    get_algorithm_state,
    restoring,
    set_algorithm_state,
)
from corral.algorithms.checkpoint import algorithm_state, load_algorithm, save_algorithm
from corral.algorithms.driver_policy import DriverPolicy
from corral.algorithms.fitting import fit, refuse_unknown
from corral.algorithms.loop_run import LoopRun
from corral.algorithms.module_changes import add_module, load_module_weights, remove_module, use_modules_of
from corral.algorithms.module_record import ModuleRecord
from corral.algorithms.pretrained import fitting_statistics, prepare_module
from corral.algorithms.resources import resources_of_workers
from corral.algorithms.stopping import Criterion
from corral.callbacks.dispatch import make_dispatcher
from corral.checkpoint import Checkpoint, read_checkpoint
from corral.config.validation import num_env_steps_per_round, optimizer_class, reconfigured, warn_of_mistakes
from corral.config.without_effect import refuse_settings_without_use
from corral.core.familiar_names import attribute_error
from corral.core.ids import ALL_MODULES, DEFAULT_MODULE_ID
from corral.core.interrupts import interruptible, interrupts_deferred, raise_if_ending
from corral.core.schedules import Schedule, has_ended_at_zero
from corral.core.seeding import seed_everything
from corral.core.tree import Tree, map_tree
from corral.engines.lazy import LazyEngine
from corral.episodes.lanes import count_agent_steps
from corral.episodes.rollout import group_by_module
from corral.errors import ConfigError, CorralError, SampleError, nearest
from corral.evaluation.evaluator import Evaluator
from corral.exploration.base import Exploration, overrides_method
from corral.learners.build import make_learner_group
from corral.learners.losses import Loss, learner_metrics, wrap_user_loss
from corral.learners.settings import LearningSpec
from corral.metrics.logger import MetricsLogger
from corral.metrics.reduction_settings import reduction_of_updates
from corral.metrics.result import EARLY_MEANS, merge_nested, plain_numbers
from corral.metrics.result_html import Result
from corral.metrics.timers import Timers, timer_results
from corral.modules.heuristic import HeuristicModule
from corral.modules.layers import Layers, share_layers
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec
from corral.modules.threads import limit_threads, num_threads_for
from corral.policies.agent_policies import AgentPolicies
from corral.runners.mapping import begin_mapping
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup

if TYPE_CHECKING:
    from corral.algorithms.recorded_episodes import RecordedEpisodes
    from corral.algorithms.recording import RecordingSummary
    from corral.config.config import AlgorithmConfig
    from corral.episodes.rollout import Rollout
    from corral.loggers.progress import Mode
    from corral.offline.recorder import Recorder
    from corral.runners.async_sampling import AsyncSampler
    from corral.runners.runner import EnvRunner
    from corral.transforms.pipeline import Pipeline
    from corral.transforms.transform import State

log = logging.getLogger("corral")

# Keys of the result that the algorithm sets itself, so that no metric can have them.
_FIXED_KEYS = frozenset(
    {
        "evaluation",
        "fault_tolerance",
        "runner_group",
        EARLY_MEANS,
        "training_iteration",
        "num_env_steps_sampled_lifetime",
        "restored",
        "engine",
        "config",
        "timers",
        "bottleneck",
        "time_total_s",
    }
)


class _WithHints(ABCMeta):
    """Class of algorithm classes: says for `PPO.load` and other names of other libraries what Corral calls them."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise attribute_error(cls, name, "ALGORITHM_METHODS")


MOST_CALLS_WITHOUT_STEPS = 100
"""Calls of a training step of the user, one after another, that may take no env steps."""


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
        callback_parts: Parts that count exceptions in callbacks, as `num_callback_errors`.
        explorations: Explorations by module id; a module without a network has none.
        weight_providers: Functions that return the parts of the weights that runners need; runners have a receiver for
            each part in `EnvRunner.weight_receivers`.
        training_iteration: Finished calls of `train()`.
        num_env_steps_sampled_lifetime: Env steps sampled so far.
        recorded: Recorded episodes that the algorithm learns from, or `None`.
        samples_now: Whether the latest training step sampled; False while an algorithm learns from recorded data alone.
        num_env_steps_per_round: Env steps that all runners sample in one round; `None` if the whole batch is one round.
        stop_requested: Why `request_stop` was called; `None` if it was not called.
        run_dir: Directory of the latest run, of `fit` or of `train` with `.reporting(loggers=...)`; `None` before it.
        METRICS: Metrics of the learners that are in the result from the first iteration, even if nothing was learned.
        STATE: Names of attributes that an algorithm keeps between iterations, which checkpoints hold: plain data and
            NumPy generators.
        READS_INFOS: Whether `training_step` reads the infos of rollouts, or what callbacks noted on their episodes.
            Otherwise they stay in the runners.
        LEARNS_TENSORS: Whether `training_step` takes rollouts of tensors, see `TensorRollout`, from an env whose data
            are tensors. A subclass must say it again, because its own code may need arrays.
        FIXED_SETTINGS: Settings of `training` that cannot change after building.
        FIRST_SETTINGS: Settings that only say how a run begins.
    """

    STATE: ClassVar[tuple[str, ...]] = (
        *("training_iteration", "num_env_steps_sampled_lifetime"),
        *("_time_total_s", "_num_exploration_versions", "latest_numbers"),
    )
    METRICS: ClassVar[tuple[str, ...]] = ()
    READS_INFOS: ClassVar[bool] = False
    LEARNS_TENSORS: ClassVar[bool] = False
    FIXED_SETTINGS: ClassVar[frozenset[str]] = frozenset({"optimizer", "optimizer_config", "lr_scheduler"})
    FIRST_SETTINGS: ClassVar[frozenset[str]] = frozenset({"seed"})

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
            raise attribute_error(self, name, "ALGORITHM_METHODS")

    @interruptible
    def __init__(self, config: AlgorithmConfig) -> None:
        """Build runners and learners from a copy of the config.

        Raises:
            ConfigError: Settings contradict each other.
            EnvError: The env cannot be made or is not what its spaces say.
        """
        config = config.copy()
        config.validate()
        warn_of_mistakes(config)  # not in `validate`, which the command line calls once more
        self.records: dict[str, ModuleRecord] = {}
        if config.seed is None:
            config.seed = int(np.random.SeedSequence().generate_state(1)[0]) >> 1
        self._use_config(config)
        seed_everything(config.seed)
        self.metrics = MetricsLogger(reserved=_FIXED_KEYS)
        self.timers = Timers()
        self.training_iteration = 0
        self.num_env_steps_sampled_lifetime = 0
        self._time_total_s = 0.0
        self._latest_result: dict[str, Any] = {}
        self.samples_now = config.samples
        self.stop_requested: str | None = None
        self.run_dir: Path | None = None
        self.loop_run = None if config.loggers is None else LoopRun(self)  # of a loop around `train`
        self._num_steps_trained = 0  # rows of all gradient steps of the iteration, over all modules
        self._num_steps_before = 0  # env steps before the iteration
        self._num_exploration_versions = 0  # times that explorations or transforms changed what runners need
        self._may_be_early = True  # whether a sub-env may still be in its first episode
        self._stopped = False
        self._shown: BaseException | None = None  # the exception that on_exception saw
        self._restored: dict[str, Any] = dict(NOT_RESTORED)
        self._large_arrays: Literal["copied", "shared", "left_out"] = "copied"
        self._running = False  # from on_algorithm_init to on_algorithm_stop
        self._callbacks = make_dispatcher(config)
        self.engine = LazyEngine(config.engine_name)
        weakref.finalize(self, _end_dropped, self.engine).atexit = False  # at exit, the handles end their workers
        try:
            self._reads_infos = self.READS_INFOS or config.output_infos
            self.engine.require(resources_of_workers(config))
            self.recorded: RecordedEpisodes | None = None if config.input_ is None else self._open_recorded()
            self.env_runner_group = self.make_env_runner_group(config.for_workers())
            self.env_runner_group.on_recreated = self._announce_recreated
            self._takes_tensors = self.env_runner_group.gives_tensors and self.can_take_tensors()
            self._async_sampler = self._make_async_sampler() if config.sample_async else None
            log.info("Engine: %s.", self.env_runner_group.engine_name)
            self.num_env_steps_per_round = num_env_steps_per_round(config, self.env_runner_group.num_envs)
            specs = self.env_runner_group.module_specs
            refuse_settings_without_use(config, specs)
            modules: dict[str, Module] = {}
            for module_id, spec in specs.items():
                modules[module_id] = self.make_module(module_id, spec, modules)
            wanted = [num_threads_for(module, config.num_threads) for module in modules.values()]
            self._num_threads = None if None in wanted else max(filter(None, wanted))
            learning = {
                module_id: self.learning_spec(module_id)
                for module_id, module in modules.items()
                if not isinstance(module, HeuristicModule)
            }
            self.learner_group = make_learner_group(
                config.for_workers(), specs, modules, learning, self.engine, self.metrics, self.timers
            )
            self.weight_providers: dict[str, Callable[[], Mapping[str, Any]]] = {
                "modules": self.learner_group.get_acting_weights
            }
            self._resolve_modules()
            self._recorder = None if config.output is None else self._make_recorder(config.output)
            self.setup()  # which may add a part to the weights
            self.sync_weights()
            self.callback_parts: list[Any] = [self, self.env_runner_group, self.learner_group]
            self._evaluator = Evaluator(self, self._callbacks)
            self._during_training: Callable[[], AbstractContextManager[None]] = nullcontext
            self._finishers: list[Callable[[dict[str, Any]], None]] = []  # called with the result of an iteration
            if config.evaluation_interval is not None:
                self._evaluator.build()
                self._during_training = self._evaluator.during_training
                self._finishers.append(self._evaluator.finish)
            self.reserve_metrics()
            self._log_steps_trained()
            raise_if_ending()
            self._callbacks.fire("on_algorithm_init", algorithm=self, metrics_logger=self.metrics)
            self._running = True
            self.timers.take()  # what building took is no part of the first iteration
        except BaseException:
            self.stop()
            raise

    # Defined by each algorithm.

    def make_env_runner_group(self, config: AlgorithmConfig) -> EnvRunnerGroup:
        """Return the group of the runners, given the config for workers; their env says the spaces."""
        if self.recorded is not None and not config.samples:
            return self.recorded.make_group(self, config)
        return EnvRunnerGroup(config, self.engine, metrics=self.metrics, timers=self.timers)

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
        return list(self.records)

    def module_config(self, module_id: str) -> Any:
        """Return the frozen config of a module: with several agents, with the module's own settings in it."""
        return self.records[module_id].config

    def _config_of(self, module_id: str) -> Any:
        return self.config.for_module(module_id) if self.config.is_multi_agent else self.config

    def trains(self, module_id: str) -> bool:
        """Return whether a module learns now: it has weights, and `policies_to_train` includes it."""
        if self.config.policies_to_train is None:
            return self.records[module_id].has_weights
        return self.records[module_id].has_weights and self.config.trains(module_id)

    def group_trained(self, rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
        """Return the rollouts of each module that learns and took steps, by module id."""
        grouped = group_by_module(rollouts)
        return {
            module_id: grouped[module_id]
            for module_id in self.records
            if module_id in grouped and self.trains(module_id) and any(map(_num_env_steps, grouped[module_id]))
        }

    def can_take_tensors(self) -> bool:
        """Return whether the training step learns from rollouts of tensors, with the settings of this run."""
        config = self.config
        # Not what a subclass inherits: its own code may need arrays.
        return "LEARNS_TENSORS" in vars(type(self)) and not (
            config.num_learners or config.output is not None or "on_learn_on_batch" in self._callbacks.heard
        )

    def shows_batches(self, config: Any) -> bool:
        """Return whether code of the user gets the batches of a module with this config.

        This is a loss, a learner, a callback or an algorithm class. Batches then have columns that the algorithm's own
        loss does not read.
        """
        own = config.loss is not None or config.learner_class is not None
        own = own or not type(self).__module__.startswith("corral.")
        return own or "on_learn_on_batch" in self._callbacks.heard

    def resolve_module_id(self, module_id: str | None = None, policy_id: str | None = None) -> str:
        """Return the id of a module that exists.

        Args:
            module_id: The id; `None` is the only module, or `default_policy` if there are several.
            policy_id: Another name of `module_id`.

        Raises:
            ConfigError: There is no such module, or there are several and no id was given; the message lists them.
        """
        ids, given = self.module_ids, module_id if policy_id is None else policy_id
        if given is None:
            given = ids[0] if len(ids) == 1 else DEFAULT_MODULE_ID
            if given not in ids:
                raise ConfigError(f"module_id: there are several modules, {ids}: give the id of one of them.")
        if given not in ids:
            raise ConfigError(f"module_id: there is no module {given!r}. {nearest(given, ids)}")
        return given

    def make_module(self, module_id: str, spec: ModuleSpec, others: Mapping[str, Module]) -> Module:
        """Return a new module for the learners, and make the policy and the exploration of this process for it.

        Args:
            module_id: Its id.
            spec: Its spec.
            others: The modules that are there already, with which it may share layers.

        Raises:
            ConfigError: A method of the module returns what it must not, or the module lacks layers that it shares.
        """
        config = self._config_of(module_id)
        policy = DriverPolicy(config, module_id, spec, self.env_runner_group.num_envs)  # which checks the module
        module = spec.build()
        self.records[module_id] = ModuleRecord(module_id, config, policy, module)
        share_layers(module_id, module, others, self.config.shared_layers)
        if not isinstance(module, HeuristicModule):
            statistics = prepare_module(module, module_id, config)
            fitting = fitting_statistics(policy.pipeline, statistics)
            if policy.pipeline is not None:
                policy.pipeline = policy.pipeline.with_state(fitting)
        layers = Layers(module)
        self._callbacks.fire("on_create_policy", policy_id=module_id, policy=module, metrics_logger=self.metrics)
        layers.check_alike("on_create_policy")  # runners and learners of an engine build the class
        return module

    def learning_spec(self, module_id: str) -> LearningSpec:
        """Return how a module learns: its loss and its optimizer."""
        config = self.module_config(module_id)
        optimizer = optimizer_class(config.optimizer)
        return LearningSpec(self.loss_of(module_id), optimizer, config.optimizer_config, config.lr_scheduler)

    def _find_ending_lrs(self) -> None:
        """Note the learning rates of the modules of which all end at 0."""
        self._ending_lrs: dict[str, list[Schedule]] = {}
        for module_id, record in self.records.items():
            # A temperature alone is not learning.
            lrs = [lr for group, lr in record.config.lrs_of_groups().items() if group != "alpha"] or [record.config.lr]
            if all(has_ended_at_zero(lr, math.inf) for lr in lrs):
                self._ending_lrs[module_id] = lrs

    def _resolve_modules(self) -> None:
        """Note what the modules of now need in each iteration: explorations that learn, and parts of the weights."""
        self._find_ending_lrs()
        explorations = self.explorations
        self._learning_explorations = {
            module_id: each for module_id, each in explorations.items() if overrides_method(each, "learn")
        }
        if any(overrides_method(each, "get_weights") for each in explorations.values()):
            self.weight_providers["exploration"] = self._exploration_weights
        if self.get_transform_states():
            self.weight_providers["transforms"] = self._transform_parts
        self._receivers: list[Callable[[Sequence[Rollout]], None]] = []  # what learns from all rollouts
        if self.config.output is not None:
            self._receivers.append(self._record)  # before explorations change rewards
        if "transforms" in self.weight_providers:
            self._receivers.append(self.merge_statistics)
        if self._learning_explorations:
            self._receivers.append(self._let_explorations_learn)

    def default_loss(self, config: Any) -> Loss:
        """Return the loss of a module if the setting `loss` gives none."""
        return self.make_loss(config)

    def loss_of(self, module_id: str) -> Loss:
        """Return the loss of a module: the setting `loss`, or the default loss."""
        config = self.module_config(module_id)
        loss = self.default_loss(config)
        return loss if config.loss is None else wrap_user_loss(config.loss, loss)

    def metrics_of(self, module_id: str) -> tuple[str, ...]:
        """Return the names of what the updates of a module report."""
        return self.METRICS

    def reserve_metrics(self) -> None:
        """Put the metrics of the modules that learn into the result, before anything is learned."""
        for module_id in filter(self.trains, self.module_ids):
            names = self.metrics_of(module_id)
            if self.config.is_multi_agent:  # a module may learn nothing at first, because no agent has it
                names = (*names, *learner_metrics(*self.records[module_id].module.parameter_groups()))
            for name in dict.fromkeys(names):
                self.metrics.log_reserved({("learners", module_id, name): []}, reduction_of_updates(name))

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

    def use_modules(self, config: AlgorithmConfig, specs: Mapping[str, ModuleSpec]) -> None:
        """Use a config with other modules in this process and in all runners; forget modules without a spec."""
        for module_id in self.records.keys() - specs.keys():
            del self.records[module_id]
        self._use_config(config)
        if specs.keys() != self.env_runner_group.module_specs.keys():
            self.env_runner_group.set_modules(self.config, specs)
        self._resolve_modules()
        if self._recorder is not None:
            from corral.algorithms.recording import describe_recording

            self._recorder.use_modules(*describe_recording(self))
        self._evaluator.set_modules(self.config, specs)

    @property
    def exploration(self) -> Exploration:
        """Exploration of the only module; with several modules, see `explorations`."""
        return self.explorations[self.resolve_module_id()]

    @property
    def explorations(self) -> dict[str, Exploration]:
        """Explorations of the algorithm by module id, for the modules that have a network."""
        found = {module_id: record.policy.exploration for module_id, record in self.records.items()}
        return {module_id: exploration for module_id, exploration in found.items() if exploration is not None}

    def _exploration_weights(self) -> Mapping[str, Any]:
        if not self.config.is_multi_agent:
            return self.exploration.get_weights()
        return {name: arrays for name, each in self.explorations.items() if (arrays := each.get_weights())}

    # Transforms of observations and rewards.

    def get_pipeline(self, module_id: str | None = None) -> Pipeline | None:
        """Return the transforms of a module with their present statistics, or `None` if it has none."""
        return self.records[self.resolve_module_id(module_id)].policy.pipeline

    def get_transform_states(self) -> dict[str, Mapping[str, State]]:
        """Return the statistics of transforms by module id, for the modules that have any."""
        pipelines = {module_id: record.policy.pipeline for module_id, record in self.records.items()}
        return {name: each.state for name, each in pipelines.items() if each is not None and each.state}

    def _transform_parts(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of transforms with the discount of their module, by module id, for the runners."""
        return {
            module_id: {"state": record.policy.pipeline.state, "gamma": record.config.gamma}
            for module_id, record in self.records.items()
            if record.policy.pipeline is not None and record.policy.pipeline.state
        }

    def set_transform_states(self, states: Mapping[str, Mapping[str, State]]) -> None:
        """Use other statistics of transforms, by module id, from now on; runners get them with the next weights.

        Raises:
            CheckpointError: They are of other transforms, or of observations of another shape.
        """
        for module_id, state in states.items():
            record = self.records.get(module_id)  # there is none if the module was removed
            if record is not None and record.policy.pipeline is not None:
                record.policy.pipeline.check_state(state)
                record.policy.pipeline = record.policy.pipeline.with_state(state)

    def merge_statistics(self, rollouts: Sequence[Rollout]) -> None:
        """Merge the statistics that rollouts carry into the statistics of the modules that learn, as `sample` does.

        Rewards are seen by learning alone, so the rollouts get the merged statistics for them.
        """
        for module_id, parts in group_by_module(rollouts).items():
            record = self.records.get(module_id)  # there is none if the module was removed
            measured = [part.measured for part in parts if part.measured]
            if record is not None and record.policy.pipeline is not None and measured and self.trains(module_id):
                policy = record.policy
                assert policy.pipeline is not None
                policy.pipeline = policy.pipeline.merged(measured)
                self._num_exploration_versions += 1  # though the learners took no step
                for part in parts:
                    part.reward_pipeline = policy.pipeline

    # Pieces of a training step.

    def log_learner_results(self, *updates: Mapping[str, Mapping[str, Any]]) -> None:
        """Log the results of updates, each by module id; no other metric can have the names of the numbers among them.

        Over the updates of an iteration, a number has its mean in the result, or its minimum or maximum if its name
        ends with `_min` or `_max`.
        """
        self.count_steps_trained(*updates)
        for results in updates:
            for module_id, values in results.items():
                self.metrics.log_update(("learners", module_id), values)

    def count_steps_trained(self, *updates: Mapping[str, Mapping[str, Any]]) -> None:
        """Count the rows of the gradient steps of updates, given the results of each by module id."""
        for results in updates:
            for values in results.values():
                if "num_gradient_steps" in values:
                    num_rows = values["num_gradient_steps"] * values["module_train_batch_size_mean"]
                    self._num_steps_trained += round(num_rows)

    def _log_steps_trained(self) -> None:
        steps, self._num_steps_trained = self._num_steps_trained, 0
        units = ("module",) if self.config.policies else ("env", "module")
        for name in [f"num_{unit}_steps_trained" for unit in units]:
            self.metrics.log_reserved({("learners", ALL_MODULES, name): [steps]}, "sum")
            self.metrics.log_reserved({("learners", ALL_MODULES, f"{name}_lifetime"): [steps]}, "lifetime_sum")

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
        if self._async_sampler is not None:
            if num_timesteps is None or num_episodes is not None:
                raise SampleError("sample(num_episodes=...) asks all runners at once: leave out sample_async=True.")
            rollouts = self.sample_ahead(num_timesteps)
            self._async_sampler.note_lag(rollouts, self.learner_group.weights_version)
            return rollouts
        rollouts = []
        left, by_episode = num_timesteps, num_timesteps is None
        if left is None or num_episodes is not None:
            left = SampleRequest(num_timesteps=num_timesteps, num_episodes=num_episodes).num_wanted  # one of the two
        by_agent = self.config.count_steps_by == "agent_steps" and self.config.is_multi_agent
        while left > 0:
            num_env_steps = self.num_env_steps_per_round or (self._env_steps_for(left, rollouts) if by_agent else left)
            request = SampleRequest(
                num_timesteps=None if by_episode else num_env_steps,
                num_episodes=left if by_episode else None,
                timestep=self.num_env_steps_sampled_lifetime,
                with_infos=self._reads_infos,
                takes_tensors=self._takes_tensors,
                training_iteration=self.training_iteration,
            )
            arrived = self.env_runner_group.sample(request, self.timers)
            num_env_steps = sum(rollout.num_env_steps for rollout in arrived)
            self.num_env_steps_sampled_lifetime += num_env_steps  # also if an exception ends the next round
            if by_episode:
                left -= sum(map(request.num_in, arrived))
            else:
                left -= count_agent_steps(arrived) if by_agent else num_env_steps
            rollouts += arrived
        for learn in self._receivers:
            learn(rollouts)
        return rollouts

    def sample_ahead(self, num_timesteps: int, *, wait: bool = True) -> list[Rollout]:
        """Return the fragments that arrived first and hold at least so many steps, while runners sample the next ones.

        `sample` calls it with `sample_async=True`, without which it cannot be called, and notes their lag.

        Args:
            num_timesteps: As for `sample`. Fragments are whole, so there may be up to one fragment more.
            wait: Whether to wait for them; otherwise nothing is returned unless there are so many steps.

        Raises:
            SampleError: `sample_async` is off.
        """
        if self._async_sampler is None:
            raise SampleError("sample_ahead: runners sample ahead only with env_runners(sample_async=True).")
        counts_agents = self.config.count_steps_by == "agent_steps" and self.config.is_multi_agent
        num_env_steps = self._env_steps_for(num_timesteps, []) if counts_agents else num_timesteps
        request = SampleRequest(
            num_timesteps=-(-(self.num_env_steps_per_round or num_env_steps) // max(1, self.config.num_env_runners)),
            with_infos=self._reads_infos,
            training_iteration=self.training_iteration,
        )
        num_updates = self.learner_group.weights_version
        received = self._async_sampler.sample(num_timesteps, request, num_updates, timers=self.timers, wait=wait)
        self.count_dropped(received.num_env_steps_dropped)
        self.num_env_steps_sampled_lifetime += received.num_env_steps_dropped
        self.receive(received.rollouts)
        return received.rollouts

    def _open_recorded(self) -> RecordedEpisodes:
        from corral.algorithms.recorded_episodes import RecordedEpisodes

        return RecordedEpisodes(self.config)

    def _make_recorder(self, output: str) -> Recorder:
        from corral.algorithms.recording import make_recorder

        return make_recorder(self, output)

    def _record(self, rollouts: Sequence[Rollout]) -> None:
        assert self._recorder is not None
        with self.timers.time("storage"):
            self._recorder.add(rollouts)

    def count_dropped(self, num_env_steps: int) -> None:
        """Count env steps that were sampled, and that nothing will be learned from."""
        self.metrics.log_reserved({("env_runners", "num_env_steps_dropped"): [num_env_steps]}, "sum")
        self.metrics.log_reserved({("env_runners", "num_env_steps_dropped_lifetime"): [num_env_steps]}, "lifetime_sum")

    def _make_async_sampler(self) -> AsyncSampler:
        from corral.runners.async_sampling import AsyncSampler

        self.count_dropped(0)
        by_agent = self.config.count_steps_by == "agent_steps" and self.config.is_multi_agent
        count = _count_own_agent_steps if by_agent else _num_env_steps
        return AsyncSampler(self.env_runner_group, self.config, count)

    def receive(self, rollouts: Sequence[Rollout]) -> None:
        """Count the env steps of rollouts, and let statistics of transforms and explorations learn from them.

        For a training step that asks for rollouts with `env_runner_group.sample_async`, and receives them with
        `fetch_samples`; `sample` does all of it. Env steps of a training step that samples by hand otherwise, with
        `env_runner_group.sample` or `env_runner.sample`, count when it ends.
        """
        self.num_env_steps_sampled_lifetime += sum(rollout.num_env_steps for rollout in rollouts)
        for learn in self._receivers:
            learn(rollouts)

    def _env_steps_for(self, num_agent_steps: int, rollouts: Sequence[Rollout]) -> int:
        """Return the env steps that take about so many agent steps, but not more, judging by rollouts so far."""
        agents_per_step = float(self.env_runner_group.num_agents)  # before the first rollout: as if all of them act
        if steps := count_agent_steps(rollouts):
            agents_per_step = steps / sum(rollout.num_env_steps for rollout in rollouts)
        return max(1, int(num_agent_steps / agents_per_step))

    def _let_explorations_learn(self, rollouts: Sequence[Rollout]) -> None:
        """Let explorations learn from the rollouts of their modules, and send their weights if they have any.

        What they add to the rewards stays apart from rewards that transforms change: the statistics of transforms are
        of the rewards of the env.
        """
        by_module = group_by_module(rollouts)
        for module_id, exploration in self._learning_explorations.items():
            parts = by_module.get(module_id, [])
            changed = [part for part in parts if part.pipeline is not None and part.pipeline.changes_rewards]
            env_rewards = [part.rewards.copy() for part in changed]
            with self.timers.time("exploring"):
                learned = exploration.learn(parts, timestep=self.num_env_steps_sampled_lifetime)
            for part, rewards in zip(changed, env_rewards, strict=True):
                part.separate_rewards(rewards)
            key = ("exploration", module_id) if self.config.is_multi_agent else ("exploration",)
            self.metrics.log_dict(learned, key=key, reduce="mean")
        if any(overrides_method(each, "get_weights") for each in self._learning_explorations.values()):
            self._num_exploration_versions += 1  # though the learners took no step
            self.sync_weights()

    def sync_weights(self) -> None:
        """Give the runners the parts of the weights from every provider, if the version or the set of parts changed."""
        start = time.perf_counter()
        parts, version = self.get_weight_parts()
        self.env_runner_group.sync_weights(parts, version)
        if self._async_sampler is not None:
            self._async_sampler.note_weights(version, self.learner_group.weights_version)
        self.timers.seconds["syncing"] += time.perf_counter() - start

    def take_changed_weights(self) -> None:
        """Give all learners and runners the weights that were changed by hand in the modules of `get_module`."""
        if self.learner_group.take_changes():
            self.sync_weights()

    @contextmanager
    def _taking_changes(self) -> Iterator[None]:
        """Take weights that were changed by hand before the block, in which updates change them."""
        self.take_changed_weights()
        self.learner_group.forget_weights()
        try:
            yield
        finally:
            self.learner_group.note_weights()

    def get_weight_parts(self) -> tuple[dict[str, Mapping[str, Any]], int]:
        """Return the parts of the weights that runners need, by name of the provider, and their version."""
        parts = {name: arrays for name, provide in self.weight_providers.items() if (arrays := provide())}
        return parts, self.learner_group.weights_version + self._num_exploration_versions

    def _announce_recreated(self, indices: list[int]) -> None:
        with self.timers.time("callbacks"):
            self._callbacks.fire(
                "on_env_runners_recreated",
                algorithm=self,
                env_runner_group=self.env_runner_group,
                env_runner_indices=indices,
                is_evaluation=False,
            )

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
        if self._stopped:
            self._check_running()
        with self.exceptions_shown(), limit_threads(self._num_threads):
            if self.loop_run is not None:
                self.loop_run.open()
            if self._ending_lrs:
                self._warn_of_ended_lr()
            start = time.perf_counter()
            with self._taking_changes() if self.learner_group.is_watched else nullcontext(), self._during_training():
                self._repeat_training_step(start)
            self._log_steps_trained()
            self.env_runner_group.collect_metrics(self.metrics, self.timers)
            self.learner_group.collect_metrics(self.metrics, self.timers)
            result = self._result()
            try:
                with interrupts_deferred():  # an iteration that is counted has its result
                    self.training_iteration += 1
                    self._latest_result = result
                if self._finishers:
                    self.metrics.mark()
                    for finish in self._finishers:
                        finish(result)
                    merge_nested(result, self.metrics.peek_new())  # metrics that their callbacks logged
                if self.config.env_task_fn is not None:
                    with self.timers.time("callbacks"):
                        self.env_runner_group.choose_tasks(result)
                if "on_train_result" in self._callbacks.heard:
                    self._fire_train_result(result, start)
            finally:  # the iteration was counted, also if a callback raises
                with interrupts_deferred():
                    self.metrics.start_period()
                    iteration_s = time.perf_counter() - start
                    self._set_costs(result, iteration_s)  # with the time of the callbacks
                    self._time_total_s += iteration_s
                    self.timers.take()
            if self.loop_run is not None:
                self.loop_run.log_result(result)
            return result

    def _warn_of_ended_lr(self) -> None:
        """Warn once of a module whose learning rates have all fallen to 0: it would learn nothing, without a sign."""
        steps = self.num_env_steps_sampled_lifetime
        for module_id, lrs in list(self._ending_lrs.items()):
            if all(has_ended_at_zero(lr, steps) for lr in lrs) and self.trains(module_id):
                del self._ending_lrs[module_id]
                log.warning(
                    "Module %r learns nothing after %s env steps: its learning rate is 0 at the end of its schedule. "
                    "Stop the run at this step, or give a longer schedule.",
                    module_id,
                    f"{steps:,}",
                )

    def _repeat_training_step(self, start: float) -> None:
        """Train until the iteration is as long as the settings say; `start` is the clock reading of its begin."""
        config = self.config
        steps_before = self._num_steps_before = self.num_env_steps_sampled_lifetime
        group, by_users = self.env_runner_group, self.env_runner_group.hand_sampler
        num_calls_without_steps = 0
        while True:
            steps_at_call = self.num_env_steps_sampled_lifetime
            sampled = group.num_env_steps_returned + by_users.num_env_steps_by_hand
            uncounted = sampled - self.num_env_steps_sampled_lifetime
            try:
                results = self.training_step()
            finally:  # also if an interrupt comes between the return of a rollout and the line that counts it
                sampled = group.num_env_steps_returned + by_users.num_env_steps_by_hand
                by_hand = sampled - self.num_env_steps_sampled_lifetime - uncounted
                self.num_env_steps_sampled_lifetime += max(0, by_hand)
            if type(results) is not dict or {*map(type, results.values())} - {dict}:
                self._refuse_results(results)
            self.log_learner_results(results)
            elapsed_s = time.perf_counter() - start
            sampled = self.num_env_steps_sampled_lifetime - steps_before
            num_calls_without_steps = (
                num_calls_without_steps + 1 if self.num_env_steps_sampled_lifetime == steps_at_call else 0
            )
            if elapsed_s < config.min_time_s_per_iteration:
                continue
            if sampled >= config.min_sample_timesteps_per_iteration or not self.samples_now:
                return
            if num_calls_without_steps >= MOST_CALLS_WITHOUT_STEPS:
                self._refuse_to_repeat()

    def _refuse_results(self, results: Any) -> None:
        """Raise for what a training step returned, if it holds no numbers by module id.

        Raises:
            CorralError: It does not.
        """
        if not isinstance(results, Mapping) or not all(isinstance(values, Mapping) for values in results.values()):
            raise CorralError(
                f"{type(self).__name__}.training_step returned {results!r:.100}: return dicts of numbers by module id, "
                "as self.learner_group.update(...) does."
            )

    def _refuse_to_repeat(self) -> None:
        """Raise if a training step of the user takes no env steps: an iteration of it would never end.

        Raises:
            CorralError: It takes none. The training steps of Corral may wait for runners.
        """
        if not type(self).training_step.__module__.startswith("corral."):
            raise CorralError(
                f"{type(self).__name__}.training_step took no env steps in {MOST_CALLS_WITHOUT_STEPS} calls, and an "
                "iteration ends after "
                f"min_sample_timesteps_per_iteration={self.config.min_sample_timesteps_per_iteration} of them: sample "
                "with self.sample(...), or set it to 0."
            )

    def _check_running(self) -> None:
        if self._stopped:
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
        with self.exceptions_shown(), limit_threads(self._num_threads):
            self.take_changed_weights()
            return Result(self._evaluator.evaluate())

    def training_done(self) -> bool:
        """Return whether no iteration is training now.

        A custom evaluation function asks this, if it is called at the same time as training; otherwise it is True.
        """
        return self._evaluator.training_done

    @property
    def latest_numbers(self) -> dict[str, Any]:
        """The numbers and texts of the latest result, nested as in the result; empty before the first iteration.

        The list of its early means is there, too.
        """
        result = self._latest_result
        return {**plain_numbers(result), EARLY_MEANS: list(result.get(EARLY_MEANS, []))} if result else {}

    @latest_numbers.setter
    def latest_numbers(self, numbers: dict[str, Any]) -> None:
        self._latest_result = numbers

    def request_stop(self, reason: str = "") -> None:
        """Ask for the end of training: `fit` and the command line end the run after the current iteration.

        A loop of your own around `train()` asks `stop_requested`.

        Args:
            reason: Why, for the log and the display.
        """
        self.stop_requested = reason or "request_stop() was called"

    def _fire_train_result(self, result: dict[str, Any], start: float) -> None:
        self._set_costs(result, time.perf_counter() - start)
        self.metrics.mark()
        with self.timers.time("callbacks"):
            self._callbacks.fire("on_train_result", algorithm=self, metrics_logger=self.metrics, result=result)
        merge_nested(result, self.metrics.peek_new())  # metrics that the callbacks of this event logged
        if self._may_be_early:
            result[EARLY_MEANS] = [*dict.fromkeys((*self._find_early_means(), *result[EARLY_MEANS]))]

    @contextmanager
    def exceptions_shown(self) -> Iterator[None]:
        """Fire `on_exception` for an exception of the block; once, also if blocks are nested."""
        try:
            yield
        except BaseException as error:
            if error is not self._shown:
                self._shown = error
                try:
                    self._callbacks.fire("on_exception", algorithm=self, exception=error)
                except Exception:
                    log.exception("A callback raised at on_exception; the first exception is raised further.")
            raise

    def _set_costs(self, result: dict[str, Any], iteration_s: float) -> None:
        """Put times and callback errors into a result; callbacks of `on_train_result` add to both."""
        group, num_steps = self.env_runner_group, 0
        if group.steps_envs_one_by_one:
            num_steps = self.num_env_steps_sampled_lifetime - self._num_steps_before
        timers, bottleneck = timer_results(
            self.timers.seconds,
            iteration_s,
            num_single_steps=num_steps,
            num_envs=group.num_envs,
            setting_of_arrays=group.setting_of_arrays,
            is_served=group.is_served,
        )
        num_errors = {"num_callback_errors": sum(part.num_callback_errors for part in self.callback_parts)}
        costs = {"timers": timers, "bottleneck": bottleneck, "time_total_s": self._time_total_s + iteration_s}
        if "timers" in result:  # callbacks of on_train_result may have written into each part
            merge_nested(result, {"fault_tolerance": num_errors, **costs})
        else:
            result["fault_tolerance"] |= num_errors
            result |= costs

    def _result(self) -> Result:
        """Return the result of the iteration that ends now, without its costs."""
        group = self.env_runner_group
        evaluation = {} if self.config.evaluation_interval is None else {"evaluation": self._evaluator.result()}
        result = Result(
            **evaluation,
            fault_tolerance=group.fault_results(),
            runner_group=group.take_costs(),
            training_iteration=self.training_iteration + 1,
            num_env_steps_sampled_lifetime=self.num_env_steps_sampled_lifetime,
            restored=dict(self._restored),
            engine=group.engine_name,
            config=self._config_dict,
        )
        if self._async_sampler is not None:
            result["runner_group"] |= self._async_sampler.take_costs()
        result |= self.metrics.peek()
        result[EARLY_MEANS] = self._find_early_means() if self._may_be_early else []
        if evaluation:
            result[EARLY_MEANS] += self._evaluator.early_means
        return result

    def _find_early_means(self) -> list[str]:
        """Return the names of the statistics that favour short episodes, because long ones have not ended yet.

        They are early until every sub-env has ended the episode that it began with, or their window is full. A
        statistic without a window counts as full with as many episodes as the other windows have.
        """
        if not any(0 in counts for counts in self.env_runner_group.num_episodes_over.values()):
            self._may_be_early = False
            return []
        num_episodes = self.metrics.peek(("env_runners", "num_episodes_lifetime"))
        if num_episodes == 0:  # then it is about something else
            return []
        window = self.config.metrics_num_episodes_for_smoothing
        return self.metrics.names_of_unfilled(without_window=num_episodes < window)

    def _use_config(self, config: AlgorithmConfig) -> None:
        """Freeze a config and use it from now on; all results share one dict of its settings."""
        self.config = config.freeze()
        for module_id, record in self.records.items():
            record.config = self._config_of(module_id)
        self._find_ending_lrs()
        self._config_dict = config.to_dict()

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
        self.num_env_steps_per_round = num_env_steps_per_round(config, self.env_runner_group.num_envs)
        self._use_config(config)
        losses = {name: self.loss_of(name) for name in self.learner_group.learning_ids}
        self.learner_group.set_losses(losses)
        self._use_gamma()

    def _use_gamma(self) -> None:
        """Let transforms use the discount of now; runners get it before the next sample."""
        before = {name: record.policy.pipeline for name, record in self.records.items()}
        after = {name: each and each.with_gamma(self.records[name].config.gamma) for name, each in before.items()}
        if changed := [name for name, pipeline in after.items() if pipeline is not before[name]]:
            for name in changed:
                self.records[name].policy.pipeline = after[name]
            self._num_exploration_versions += 1  # though the learners took no step
            self.sync_weights()

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
        with self.exceptions_shown():
            self.take_changed_weights()
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
        module_id = self.resolve_module_id(module_id, policy_id)
        policy, explore = self.records[module_id].policy, self.config.explore if explore is None else explore
        if policy.has_memory != (state is not None):
            missing = "has memory: give state=, which begins an episode as acting_policy().initial_states(B)"
            raise ConfigError(
                f"compute_actions: module {module_id!r} {missing if policy.has_memory else 'has no memory'}, and "
                f"{'no ' if state is None else ''}state was given."
            )
        if self.learner_group.is_watched:
            self.take_changed_weights()
        actions, state = policy.compute_actions(
            obs, state, self.learner_group, timestep=self.num_env_steps_sampled_lifetime, explore=explore
        )
        return (actions, state) if policy.has_memory else actions

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
        module_id = self.resolve_module_id(module_id, policy_id)
        self.records[module_id].policy.check_obs(obs)
        batch = map_tree(lambda leaf: np.asarray(leaf)[None], obs)
        if state is None:
            actions = self.compute_actions(batch, explore=explore, module_id=module_id)
            return map_tree(lambda leaf: leaf[0], actions)
        states = map_tree(lambda leaf: np.asarray(leaf)[None], state)
        actions, states = self.compute_actions(batch, state=states, explore=explore, module_id=module_id)
        return map_tree(lambda leaf: leaf[0], (actions, states))

    def acting_policy(self, module_id: str | None = None) -> DriverPolicy:
        """Return the policy with which `compute_actions` acts, with the weights of now.

        Raises:
            ConfigError: There is no such module, or there are several and none was named.
        """
        policy = self.records[self.resolve_module_id(module_id)].policy
        if self.learner_group.is_watched:
            self.take_changed_weights()
        policy.read_weights(self.learner_group)
        return policy

    def agent_policies(self) -> AgentPolicies:
        """Return the policies of several agents with their mapping, which choose actions as `compute_actions` does."""
        policies = {
            module_id: SimpleNamespace(
                observation_space=spec.observation_space,
                action_space=spec.action_space,
                has_memory=self.records[module_id].policy.has_memory,
                initial_states=self.records[module_id].policy.initial_states,
                continued=self.records[module_id].policy.continued,
                act=partial(self._act, module_id),
            )
            for module_id, spec in self.env_runner_group.module_specs.items()
        }
        return AgentPolicies(policies, begin_mapping(self.config))

    def _act(self, module_id: str, obs: Tree, states: Tree, *, explore: bool) -> tuple[Any, Tree]:
        found = self.compute_actions(obs, state=states, explore=explore, module_id=module_id)
        return found if states is not None else (found, None)

    def get_module(self, module_id: str | None = None) -> Module:
        """Return the module that is being trained, on the learner's device; `None` is the only one.

        Weights that are changed in it by hand act and learn from the next call of a method of the algorithm on; in the
        middle of `train()`, from the next update on. With `num_learners` above 0 it is a copy: what is changed in it by
        a callback in the middle of `train()` is overwritten by the next update.

        Raises:
            ConfigError: There is no such module, or there are several and none was named.
        """
        module = self.learner_group.get_module(self.resolve_module_id(module_id))
        if not self.learner_group.is_watched:
            self.learner_group.watch()
        return module

    @property
    def num_callback_errors(self) -> int:
        """Exceptions in the algorithm's own events that `on_error="log"` kept from ending the run."""
        return self._callbacks.num_errors

    @property
    def env_runner(self) -> EnvRunner | None:
        """The embedded runner, with the present weights; `None` when the engine runs the runners."""
        if self.learner_group.is_watched:
            self.take_changed_weights()
        return self.env_runner_group.local_env_runner

    @property
    def eval_env_runner_group(self) -> EnvRunnerGroup | None:
        """The group of the evaluation runners; `None` before the first use, if there is no `evaluation_interval`."""
        return self._evaluator.group

    # Ending.

    def stop(self) -> None:
        """Close envs and loggers and end all workers; a second call only ends what an interrupted first call left."""
        self._stopped = True
        running, self._running = self._running, False
        with ExitStack() as ending:  # the last one first, and every one of them whatever another raises
            for name in ("recorded", "engine", "env_runner_group", "learner_group", "_evaluator"):
                if (part := getattr(self, name, None)) is not None:  # building may have failed before it
                    ending.callback(part.stop)
            if self.loop_run is not None:
                ending.callback(self.loop_run.close)
            if (recorder := getattr(self, "_recorder", None)) is not None:
                ending.callback(recorder.close)
            if running:
                self._callbacks.fire("on_algorithm_stop", algorithm=self)

    def __enter__(self) -> Self:
        """Return the algorithm."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; run.log of a run of `train` says how it ended."""
        try:
            if self.loop_run is not None:
                self.loop_run.close(error)
        finally:
            self.stop()


_num_env_steps = attrgetter("num_env_steps")


def _count_own_agent_steps(rollout: Rollout) -> int:
    return count_agent_steps([rollout])


def _end_dropped(engine: LazyEngine) -> None:
    """End the workers of an algorithm that nobody can stop any more."""
    if running := engine.running():
        log.warning("An algorithm was deleted before stop() was called: its %d worker(s) are ended.", len(running))
    engine.stop()


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
