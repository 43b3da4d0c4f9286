"""The modules of an algorithm in its own process: records by module id, and what changes them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from corral.algorithms.driver_policy import DriverPolicy
from corral.algorithms.module_record import ModuleRecord
from corral.algorithms.pretrained import fitting_statistics, prepare_module
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.schedules import Schedule, has_ended_at_zero
from corral.core.settings import check_names
from corral.data.episodes.rollout import group_by_module
from corral.errors import ConfigError, nearest
from corral.exploration.base import Exploration, overrides_method
from corral.learners.losses import Loss, wrap_user_loss
from corral.learners.optimizer_settings import optimizer_class
from corral.learners.settings import LearningSpec
from corral.modules.heuristic import HeuristicModule
from corral.modules.layers import Layers, share_layers
from corral.modules.module import Module
from corral.modules.threads import num_threads_for

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.data.episodes.rollout import Rollout
    from corral.modules.spec import ModuleSpec
    from corral.modules.transforms.transform import State

log = logging.getLogger("corral")


class Modules(dict[str, ModuleRecord]):
    """The records of the modules of an algorithm, by module id; those that do not learn are included.

    Attributes:
        learning_explorations: Explorations that learn from rollouts, by module id.
        ending_lrs: Learning rates of the modules of which all end at 0, by module id, until a warning was given.
        num_threads: Threads of PyTorch in this process; `None` leaves them as they are.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Begin without a module."""
        super().__init__()
        self._algorithm = algorithm
        self.ending_lrs: dict[str, list[Schedule]] = {}
        self.learning_explorations: dict[str, Exploration] = {}
        self.num_threads: int | None = None

    def make(self, module_id: str, spec: ModuleSpec, others: Mapping[str, Module]) -> Module:
        """Return a new module for the learners, and make the policy and the exploration of this process for it.

        Args:
            module_id: Its id.
            spec: Its spec.
            others: The modules that are there already, with which it may share layers.

        Raises:
            ConfigError: A method of the module returns what it must not, or the module lacks layers that it shares.
        """
        algorithm, config = self._algorithm, self._config_of(module_id)
        policy = DriverPolicy(config, module_id, spec, algorithm.env_runner_group.num_envs)  # which checks the module
        module = spec.build()
        self[module_id] = ModuleRecord(module_id, config, policy, module, self._shows_batches(config))
        share_layers(module_id, module, others, algorithm.config.shared_layers)
        if not isinstance(module, HeuristicModule):
            statistics = prepare_module(module, module_id, config)
            fitting = fitting_statistics(policy.pipeline, statistics)
            if policy.pipeline is not None:
                policy.pipeline = policy.pipeline.with_state(fitting)
        layers = Layers(module)
        algorithm._callbacks.fire(
            "on_create_policy", policy_id=module_id, policy=module, metrics_logger=algorithm.metrics
        )
        layers.check_alike("on_create_policy")  # runners and learners of an engine build the class
        return module

    def _config_of(self, module_id: str) -> Any:
        config = self._algorithm.config
        return config.for_module(module_id) if config.is_multi_agent else config

    def _shows_batches(self, config: Any) -> bool:
        own = config.loss is not None or config.learner_class is not None
        own = own or not type(self._algorithm).__module__.startswith("corral.")
        return own or "on_learn_on_batch" in self._algorithm._callbacks.heard

    def choose_num_threads(self) -> None:
        """Choose the threads of PyTorch that the largest module wants."""
        config = self._algorithm.config
        wanted = [num_threads_for(record.module, config.num_threads) for record in self.values()]
        self.num_threads = None if None in wanted else max(filter(None, wanted))

    def use_config(self) -> None:
        """Use the settings that the config of the algorithm has for each module now."""
        for module_id, record in self.items():
            record.config = config = self._config_of(module_id)
            record.shows_batches = self._shows_batches(config)
        self._find_ending_lrs()

    def resolve(self) -> None:
        """Note what the modules of now need in each iteration: explorations that learn, and learning rates that end."""
        self._find_ending_lrs()
        self.learning_explorations = {
            module_id: each for module_id, each in self.explorations.items() if overrides_method(each, "learn")
        }

    def resolve_id(self, module_id: str | None = None, policy_id: str | None = None) -> str:
        """Return the id of a module that exists.

        Args:
            module_id: The id; `None` is the only module, or `default_policy` if there are several.
            policy_id: Another name of `module_id`.

        Raises:
            ConfigError: There is no such module, or there are several and no id was given; the message lists them.
        """
        ids, given = list(self), module_id if policy_id is None else policy_id
        if given is None:
            given = ids[0] if len(ids) == 1 else DEFAULT_MODULE_ID
            if given not in ids:
                raise ConfigError(f"module_id: there are several modules, {ids}: give the id of one of them.")
        if given not in ids:
            raise ConfigError(f"module_id: there is no module {given!r}. {nearest(given, ids)}")
        return given

    # Learning.

    def trains(self, module_id: str) -> bool:
        """Return whether a module learns now: it has weights, and `policies_to_train` includes it."""
        config = self._algorithm.config
        if config.policies_to_train is None:
            return self[module_id].has_weights
        return self[module_id].has_weights and config.trains(module_id)

    def loss_of(self, module_id: str) -> Loss:
        """Return the loss of a module: the setting `loss`, or the default loss."""
        config = self[module_id].config
        loss = self._algorithm.default_loss(config)
        return loss if config.loss is None else wrap_user_loss(config.loss, loss)

    def learning_spec(self, module_id: str) -> LearningSpec:
        """Return how a module learns: its loss and its optimizer.

        Raises:
            ConfigError: `grad_clip` limits a group of parameters that the module does not have.
        """
        config = self[module_id].config
        if isinstance(config.grad_clip, Mapping):
            check_names("grad_clip", config.grad_clip, self[module_id].module.parameter_groups(), list_known=True)
        optimizer = optimizer_class(config.optimizer)
        return LearningSpec(self.loss_of(module_id), optimizer, config.optimizer_config, config.lr_scheduler)

    def _find_ending_lrs(self) -> None:
        """Note the learning rates of the modules of which all end at 0."""
        self.ending_lrs = {}
        for module_id, record in self.items():
            # A temperature alone is not learning.
            groups = [getattr(record.config, f"{group}_lr") for group in record.config.LR_GROUPS if group != "alpha"]
            lrs = [record.config.lr if lr is None else lr for lr in groups or [None]]
            if all(has_ended_at_zero(lr, math.inf) for lr in lrs):
                self.ending_lrs[module_id] = lrs

    def warn_of_ended_lr(self) -> None:
        """Warn once of a module whose learning rates have all fallen to 0: it would learn nothing, without a sign."""
        steps = self._algorithm.num_env_steps_sampled_lifetime
        for module_id, lrs in list(self.ending_lrs.items()):
            if all(has_ended_at_zero(lr, steps) for lr in lrs) and self.trains(module_id):
                del self.ending_lrs[module_id]
                log.warning(
                    "Module %r learns nothing after %s env steps: its learning rate is 0 at the end of its schedule. "
                    "Stop the run at this step, or give a longer schedule.",
                    module_id,
                    f"{steps:,}",
                )

    # Explorations.

    @property
    def explorations(self) -> dict[str, Exploration]:
        """Explorations by module id, for the modules that have a network."""
        found = {module_id: record.policy.exploration for module_id, record in self.items()}
        return {module_id: exploration for module_id, exploration in found.items() if exploration is not None}

    def exploration_weights(self) -> Mapping[str, Any]:
        """Return what runners need of explorations, by module id; with a single agent, of the only one."""
        explorations = self.explorations
        if not self._algorithm.config.is_multi_agent:
            return explorations[self.resolve_id()].get_weights()
        return {name: arrays for name, each in explorations.items() if (arrays := each.get_weights())}

    def let_explorations_learn(self, rollouts: Sequence[Rollout]) -> None:
        """Let explorations learn from the rollouts of their modules, and send their weights if they have any.

        What they add to the rewards stays apart from rewards that transforms change, because the statistics of
        transforms are of the rewards of the env, and from rewards that hindsight replaces.
        """
        algorithm, by_module = self._algorithm, group_by_module(rollouts)
        for module_id, exploration in self.learning_explorations.items():
            parts = by_module.get(module_id, [])
            relabels = getattr(self[module_id].config, "replay_buffer_config", {}).get("type") == "hindsight"
            changed = [part for part in parts if relabels or (part.pipeline and part.pipeline.changes_rewards)]
            env_rewards = [part.rewards.copy() for part in changed]
            with algorithm.timers.time("exploring"):
                learned = exploration.learn(parts, timestep=algorithm.num_env_steps_sampled_lifetime)
            for part, rewards in zip(changed, env_rewards, strict=True):
                part.separate_rewards(rewards)
            key = ("exploration", module_id) if algorithm.config.is_multi_agent else ("exploration",)
            algorithm.metrics.log_dict(learned, key=key, reduce="mean")
        if any(overrides_method(each, "get_weights") for each in self.learning_explorations.values()):
            algorithm.weights.send_anyway()

    # Transforms of observations and rewards.

    def get_transform_states(self) -> dict[str, Mapping[str, State]]:
        """Return the statistics of transforms by module id, for the modules that have any."""
        pipelines = {module_id: record.policy.pipeline for module_id, record in self.items()}
        return {name: each.state for name, each in pipelines.items() if each is not None and each.state}

    def transform_parts(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of transforms with the discount of their module, by module id, for the runners."""
        states = self.get_transform_states()
        return {name: {"state": state, "gamma": self[name].config.gamma} for name, state in states.items()}

    def set_transform_states(self, states: Mapping[str, Mapping[str, State]]) -> None:
        """Use other statistics of transforms, by module id, from now on; runners get them with the next weights.

        Raises:
            CheckpointError: They are of other transforms, or of observations of another shape.
        """
        for module_id, state in states.items():
            record = self.get(module_id)  # there is none if the module was removed
            if record is not None and record.policy.pipeline is not None:
                record.policy.pipeline.check_state(state)
                record.policy.pipeline = record.policy.pipeline.with_state(state)

    def merge_statistics(self, rollouts: Sequence[Rollout]) -> None:
        """Merge the statistics that rollouts carry into the statistics of the modules that learn.

        Rewards are seen by learning alone, so the rollouts get the merged statistics for them.
        """
        for module_id, parts in group_by_module(rollouts).items():
            record = self.get(module_id)  # there is none if the module was removed
            measured = [part.measured for part in parts if part.measured]
            if record is not None and record.policy.pipeline is not None and measured and self.trains(module_id):
                policy = record.policy
                assert policy.pipeline is not None
                policy.pipeline = policy.pipeline.merged(measured)
                self._algorithm.weights.num_exploration_versions += 1  # though the learners took no step
                for part in parts:
                    part.reward_pipeline = policy.pipeline

    def use_gamma(self) -> None:
        """Let transforms use the discount of now; runners get it before the next sample."""
        has_changed = False
        for record in self.values():
            if (before := record.policy.pipeline) is not None:
                record.policy.pipeline = before.with_gamma(record.config.gamma)
                has_changed |= record.policy.pipeline is not before
        if has_changed:
            self._algorithm.weights.send_anyway()
