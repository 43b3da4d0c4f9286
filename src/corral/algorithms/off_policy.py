"""What off-policy algorithms share: the settings and the training step of learning from a replay buffer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.algorithm_state import restoring, set_algorithm_state
from corral.algorithms.config.config import AlgorithmConfig
from corral.core.action_masks import has_mask_key
from corral.core.columns import describe
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.interrupts import interruptible
from corral.core.schedules import schedule_value
from corral.core.seeding import module_seed
from corral.core.settings import (
    Need,
    NonNegativeInt,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Probability,
)
from corral.core.tree import Tree, map_tree
from corral.data.offline.config import HAS_INPUT
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayConfig, make_replay_buffer
from corral.data.replay.memory import bytes_per_step, check_memory
from corral.errors import CheckpointError, ConfigError, LossError, UnknownAttributeError
from corral.learners.losses import Batch, Loss, learner_metrics
from corral.learners.settings import UpdateSettings
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.temporal import FrameStack
from corral.modules.transforms.transform import TemporalTransform

if TYPE_CHECKING:
    from corral.algorithms.recorded_episodes import RecordedEpisodes
    from corral.data.replay.hindsight import GoalFunctions

log = logging.getLogger("corral")

_num_env_steps = attrgetter("num_env_steps")

AUTO_STORE_BYTES = 256_000_000
"""Size below which `store_buffer_in_checkpoints="auto"` stores a replay buffer."""


def _in_order(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError("the first number must not be larger than the second one")
    return bounds


FILLS_BUFFER = Need("num_offline_updates: nothing is sampled", attrgetter("samples"))
LEARNS_FROM_INPUT = Need(
    "input_, and num_offline_updates or recorded_fraction above 0",
    lambda config: config.input_ is not None and (config.num_offline_updates != 0 or config.recorded_fraction),
)


@dataclass(kw_only=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from a replay buffer.

    With several agents, a step is a step of the module: the steps of all its agents count, and each module that learns
    has a buffer of its own.

    Attributes:
        replay_buffer_config: `type`, `capacity` and other settings of the buffer; see `ReplayConfig`.
        num_steps_sampled_before_learning_starts: Number of env steps added to the buffer before the first update.
        training_intensity: Ratio of steps trained on to env steps sampled: a batch of 32 every 4 env steps is 8. `None`
            makes one update after each round of sampling, however many sub-envs sample in it. `"auto"` makes one update
            for every `rollout_fragment_length` steps, so that more sub-envs do not mean fewer updates.
        n_step: Number of steps whose rewards are summed before the bootstrapped value. With `(min, max)` each
            transition of a batch draws its own number, evenly from min to max, both included.
        burn_in_len: For a module with memory, the number of steps before each sequence that only bring the stored state
            up to date (Kapturowski et al. 2019). A batch has `train_batch_size_per_learner / max_seq_len` sequences.
        target_network_update_freq: Env steps between updates of the target network; 0 updates it after every gradient
            step.
        tau: Fraction by which an update moves the target network towards the network; 1 copies the network.
        store_buffer_in_checkpoints: Whether checkpoints hold the buffer; without it, a restored algorithm fills a new
            buffer before it continues to learn. `"auto"` stores a buffer of less than 256 MB, and warns once about a
            larger one.
        num_offline_updates: With recorded data, the number of updates of each module from the data alone, before the
            first env step is sampled. `None` learns from the data alone and samples nothing; the steps of the batches
            then count as env steps. Otherwise they do not count, so that schedules over env steps stay at their start.
        num_updates_per_iteration: Updates of each module in an iteration that learns from recorded data alone. `None`
            is as many as it takes to draw as many steps as there are.
        recorded_fraction: Fraction of each batch that is drawn from recorded data while the algorithm samples (0.5 in
            Ball et al. 2023, arXiv:2302.02948). With 0 the data is only learned from before that.
        imitation_coeff: Weight of a loss that makes the policy imitate the recorded actions, or a schedule over env
            steps, which stand still while the algorithm learns from the data alone. For SAC, TD3, DDPG and CQL it is
            multiplied by the mean absolute value of the batch, as in Fujimoto and Gu 2021, arXiv:2106.06860.
    """

    ON_POLICY: ClassVar[bool] = False
    LEARNS_FROM_DATA: ClassVar[bool] = True
    DEFAULT_CAPACITY: ClassVar[int] = ReplayConfig.capacity
    """Env steps that the buffer keeps, unless `replay_buffer_config` has a `capacity`."""

    min_sample_timesteps_per_iteration: int = 1000
    replay_buffer_config: Annotated[dict[str, Any], FILLS_BUFFER] = field(default_factory=dict)
    num_steps_sampled_before_learning_starts: Annotated[NonNegativeInt, FILLS_BUFFER] = 1000
    training_intensity: Annotated[PositiveFloat | Literal["auto"] | None, FILLS_BUFFER] = None
    n_step: PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(_in_order)] = 1
    burn_in_len: NonNegativeInt = 0
    target_network_update_freq: NonNegativeInt = 500
    tau: Annotated[float, Field(gt=0, le=1)] = 1.0
    store_buffer_in_checkpoints: Annotated[bool | Literal["auto"], FILLS_BUFFER] = "auto"
    num_offline_updates: Annotated[NonNegativeInt | None, HAS_INPUT] = 0
    num_updates_per_iteration: Annotated[
        PositiveInt | None, Need("num_offline_updates", lambda config: config.num_offline_updates != 0)
    ] = 1000
    recorded_fraction: Annotated[
        Probability, Need("input_, and env steps", lambda config: config.input_ is not None and config.samples)
    ] = 0.5
    imitation_coeff: Annotated[NonNegativeSchedule, LEARNS_FROM_INPUT] = 0.0

    @property
    def samples(self) -> bool:
        """Whether the algorithm samples from an env, at first or after its updates from recorded data."""
        return self.num_offline_updates is not None

    @property
    def num_random_steps(self) -> int:
        """Env steps with uniform actions at the beginning; none if the policy has learned from recorded data before."""
        return self.num_steps_sampled_before_learning_starts if self.num_offline_updates == 0 else 0

    @property
    def replay_config(self) -> ReplayConfig:
        """Settings of the buffer.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        return ReplayConfig.parse({"capacity": self.DEFAULT_CAPACITY, **self.replay_buffer_config})

    def check_settings(self) -> None:
        """Refuse a buffer that has no room for a batch.

        Raises:
            ConfigError: Names the settings.
        """
        self.replay_config.check_capacity(self.total_train_batch_size, "train_batch_size_per_learner * num_learners")


@dataclass(kw_only=True, repr=False)
class ActorCriticSettings:
    """Settings of off-policy algorithms with an actor and critics: an update per env step, and targets that follow.

    The buffer keeps 1,000,000 env steps, unless `replay_buffer_config` has a `capacity`; memory is allocated as steps
    arrive.

    Attributes:
        twin_q: Whether there are two critics, of which the lower value is used (Fujimoto et al. 2018,
            arXiv:1802.09477).
        actor_lr: Learning rate of the actor, or a schedule over env steps; `None` is `lr`.
        critic_lr: Learning rate of the critics, or a schedule over env steps; `None` is `lr`.
    """

    DEFAULT_CAPACITY: ClassVar[int] = 1_000_000
    LR_GROUPS: ClassVar[tuple[str, ...]] = ("actor", "critic")

    train_batch_size_per_learner: int = 256
    rollout_fragment_length: int | Literal["auto"] = 1
    target_network_update_freq: int = 0
    tau: float = 5e-3
    twin_q: bool = True
    actor_lr: NonNegativeSchedule | None = None
    critic_lr: NonNegativeSchedule | None = None


def off_policy_metrics(*groups: str) -> tuple[str, ...]:
    """Return what every off-policy update reports besides the loss's own, given the groups of parameters."""
    return ("td_error_mean", *learner_metrics(*groups))


class OffPolicyAlgorithm(Algorithm):
    """An algorithm that learns from replay buffers: owns them, and decides when to update modules and targets.

    Each module that learns has its own buffer, its own credit of updates and its own target network.

    Subclasses define `make_loss`, whose loss reports the column `td_error`, and name in `METRICS` what their learners
    report. They may override `lr`, `prepare_batch`, `make_replay_buffer` and
    `update_module`. A module that learns must have a method `update_target(tau)`.

    Attributes:
        replay_buffers: Replay buffers by module id, each with `add`, `sample`, `len`, `num_env_steps_added`,
            `get_state`, `set_state` and `close`; empty if nothing is sampled.
    """

    STATE = (*Algorithm.STATE, "_update_credit", "_target_updated_at")
    FIXED_SETTINGS = Algorithm.FIXED_SETTINGS | {"replay_buffer_config"}
    VALIDATION_COEFFICIENTS: ClassVar[Mapping[str, float]] = {}
    """Coefficients of the loss on episodes for validation."""

    SEEKS_VALUES: ClassVar[bool] = True
    """Whether an actor seeks the values of critics."""

    DELAYS_ACTOR: ClassVar[bool] = False
    """Whether the actor learns only in every `policy_delay` updates, which is a setting; `STATE` then names
    `_num_updates`."""

    config: OffPolicyConfig

    def setup(self) -> None:
        """Make the replay buffers.

        Raises:
            ConfigError: A module cannot move a target network.
        """
        self.replay_buffers: dict[str, ReplayBuffer] = {}
        self._replay_configs: dict[str, ReplayConfig] = {}
        self._warned_of_buffer = False
        if self.DELAYS_ACTOR:
            self._num_updates: dict[str, int] = {}
        self._update_credit: dict[str, float] = {}  # updates that are due but not made yet, in [0, 1)
        self._target_updated_at: dict[str, int] = {}  # env steps sampled at the last update of the target
        # For noise that `prepare_batch` draws; with a seed of its own, so that no other part draws the same noise.
        self._noise_rng = np.random.default_rng([self.config.seed or 0, 1])
        self._tensor_forms: dict[str, tuple[Pipeline, Callable[[Tree], Tree]]] = {}
        # Callbacks of updates read numbers.
        self._defers_reports = self.sampler.takes_tensors and "on_update_end" not in self._callbacks.heard
        self.setup_modules()

    def setup_modules(self) -> None:
        """Make a replay buffer for each module that learns now and has none; drop the buffers of removed modules."""
        for module_id in self.replay_buffers.keys() - set(self.module_ids):
            self.replay_buffers.pop(module_id).close()
            self._update_credit.pop(module_id, None)
            self._target_updated_at.pop(module_id, None)
        for module_id in filter(self.modules.trains, self.module_ids):
            if module_id in self.replay_buffers:
                continue
            if self.recorded is not None and self.modules[module_id].has_memory:
                raise ConfigError(
                    f"offline_data: input_: modules with memory learn from recorded data with BC only, not with "
                    f"{self.config.algo_name}: leave out the memory of module {module_id!r}, or the data."
                )
            config, module = self.module_config(module_id), self.learner_group.get_module(module_id)
            if not callable(getattr(module, "update_target", None)):
                raise ConfigError(
                    f"rl_module: {type(module).__name__} must define update_target(self, tau), which moves its target "
                    "network towards its network."
                )
            self._replay_configs[module_id] = _with_frames(config.replay_config, self.get_pipeline(module_id))
            if not config.samples:
                continue
            if self.sampler.takes_tensors:
                self.replay_buffers[module_id] = self._make_device_buffer(config, module_id)
                continue
            self.replay_buffers[module_id] = self.make_replay_buffer(module_id, self._replay_configs[module_id])
        check_memory(
            {
                module_id: (config.capacity, self._bytes_per_step(module_id, config.frame_stack))
                for module_id, config in self._replay_configs.items()
                if module_id in self.replay_buffers and config.directory is None and not self.sampler.takes_tensors
            }
        )
        if self.recorded is not None:
            self.recorded.set_modules(self, lambda module_id: None)

    def make_replay_buffer(self, module_id: str, config: ReplayConfig) -> ReplayBuffer:
        """Return the replay buffer of a module, on arrays; override it for a class of your own."""
        return make_replay_buffer(
            config,
            num_runners=max(1, self.config.num_env_runners),
            seed=module_seed(self.config.seed, module_id),
            find_goals=self._find_goals,
        )

    def can_take_tensors(self) -> bool:
        """Return whether buffers and batches can stay on the device of the env, with the settings of this run."""
        configs = [self.config.for_module(module_id) for module_id in self.config.module_ids] or [self.config]
        makes_own = type(self).make_replay_buffer is not OffPolicyAlgorithm.make_replay_buffer
        return (
            not makes_own
            and super().can_take_tensors()
            and all(
                config.input_ is None
                and config.batch_mode == "truncate_episodes"  # else lanes are valid in different rows
                and config.replay_config.type == "uniform"
                and config.replay_config.directory is None
                and config.loss is None
                and config.learner_class is None
                for config in configs
            )
        )

    def _make_device_buffer(self, config: OffPolicyConfig, module_id: str) -> Any:
        from corral.data.replay.device_buffer import DeviceReplayBuffer

        device = self.env_runner_group.local_env_runner.env.device  # type: ignore[union-attr]
        return DeviceReplayBuffer(config.replay_config.capacity, device, seed=module_seed(config.seed, module_id))

    def _find_goals(self) -> GoalFunctions:
        """Return what the env computes for other goals."""
        from corral.envs.goals import find_goal_functions
        from corral.envs.vector import EnvContext

        if self.config.is_multi_agent:
            raise ConfigError(
                "replay_buffer_config: type='hindsight' is for one agent, and this env has several: use type='uniform'."
            )
        return find_goal_functions(self.config.env, EnvContext(self.config.env_config), self.config.all_wrappers)

    def _bytes_per_step(self, module_id: str, frame_stack: int) -> int:
        """Return the bytes that a step takes in the replay buffer of a module."""
        module, pipeline = self.learner_group.get_module(module_id), self.get_pipeline(module_id)
        stored = module.observation_space if pipeline is None else pipeline.spaces[pipeline.num_stored]
        return bytes_per_step(stored, module.action_space, frame_stack)

    @property
    def local_replay_buffer(self) -> ReplayBuffer:
        """The replay buffer of the only module; with several modules, see `replay_buffers`.

        Raises:
            UnknownAttributeError: The module does not learn here.
        """
        module_id = self.modules.resolve_id()
        if module_id not in self.replay_buffers:
            raise UnknownAttributeError(f"Module {module_id!r} has no replay buffer, because it does not learn here.")
        return self.replay_buffers[module_id]

    def default_loss(self, config: OffPolicyConfig) -> Loss:
        """Return what `make_loss` returns, and the loss of imitation if there is one."""
        loss = super().default_loss(config)
        if not config.imitation_coeff:
            return loss
        from corral.algorithms.imitation import with_imitation

        return with_imitation(loss, in_values=self.SEEKS_VALUES)

    def metrics_of(self, module_id: str) -> tuple[str, ...]:
        """Return the names of what the updates of a module report."""
        names = super().metrics_of(module_id)
        return (*names, "imitation_loss") if self.modules[module_id].config.imitation_coeff else names

    # What a subclass may override.

    def lr(self, config: OffPolicyConfig) -> float | Mapping[str, float]:
        """Return the learning rate of the next update of a module, or one learning rate per group of parameters."""
        return config.lrs(self.num_env_steps_sampled_lifetime)

    def prepare_batch(self, module_id: str, batch: Batch) -> Batch:
        """Return a batch from the buffer of a module in the form that the loss expects."""
        return batch

    def update_module(self, module_id: str, batch: Batch, settings: UpdateSettings) -> dict[str, Any]:
        """Take one update of a module from a batch, then move its targets if that is due; return the results.

        If the actor is delayed, each update moves the critics, and every `policy_delay` updates all else and the
        targets. The loss then gets the coefficient `actor_coeff`, 1 or 0.
        """
        moves_actor = True
        if self.DELAYS_ACTOR:
            self._num_updates[module_id] = count = self._num_updates.get(module_id, 0) + 1
            config: Any = self.modules[module_id].config
            moves_actor = count % config.policy_delay == 0
            settings = replace(
                settings,
                groups=None if moves_actor else ("critic",),
                coefficients={**settings.coefficients, "actor_coeff": float(moves_actor)},
            )
        results = self.learner_group.update({module_id: batch}, {module_id: settings})
        if moves_actor:
            self.update_target_if_due(module_id)
        return results[module_id]

    # The training step.

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Sample a round into the buffers, make the updates that are due, send the weights, and return the metrics."""
        if self.recorded is not None and not self._sampling_has_begun(self.recorded):
            return self._learn_offline(self.recorded)
        num_before = self.num_env_steps_sampled_lifetime
        rollouts = self.group_trained(self.sample(self.sampler.num_env_steps_per_round or 1))
        num_env_steps = self.num_env_steps_sampled_lifetime - num_before
        if rollouts.keys() - self.replay_buffers.keys():  # `policies_to_train` is a function, and changed its mind
            self.setup_modules()
        start_s = time.perf_counter()
        for module_id, parts in rollouts.items():
            self.replay_buffers[module_id].add([part.for_replay() for part in parts])
        self.timers.seconds["replay"] += time.perf_counter() - start_s
        taken: dict[str, int] = {}
        for module_id in self.replay_buffers:
            num = sum(map(_num_env_steps, rollouts.get(module_id, [])))
            # `target_network_update_freq` counts the module's steps, which may differ from the env steps: the last
            # update is dated by the difference.
            self._target_updated_at[module_id] = self._target_updated_at.get(module_id, 0) + num_env_steps - num
            if num:
                taken[module_id] = num
        due = {module_id: self._num_updates_due(module_id, num) for module_id, num in taken.items()}
        groups = self.learner_group.group_sharing(taken) if len(taken) > 1 else [list(taken)]
        # Modules that share layers make their updates in turn.
        order = [
            module_id
            for group in groups
            for turn in range(max(map(due.__getitem__, group), default=0))
            for module_id in group
            if turn < due[module_id]
        ]
        results: dict[str, dict[str, Any]] = {}
        if self.sampler.takes_tensors:
            self._learn_on_device(order, results)
        else:
            for module_id in order:
                if module_id in results:
                    self.log_learner_results({module_id: results[module_id]})
                results[module_id] = self.learn(module_id)
        self.sync_weights()
        return results

    def _learn_on_device(self, order: Sequence[str], results: dict[str, dict[str, Any]]) -> None:
        """Make the updates that are due, by module id, and then read all reports at once."""
        from corral.learners.device_update import DEFERRED, read_reports

        made: list[tuple[str, dict[str, Any]]] = []
        try:
            for module_id in order:
                made.append((module_id, self.learn(module_id)))
        finally:  # after an interrupt too, optimizers must not wait for a reading
            if deferred := [report for _, report in made if DEFERRED in report]:
                read_reports(deferred)
        for module_id, report in made:
            if module_id in results:
                self.log_learner_results({module_id: results[module_id]})
            results[module_id] = report

    def _sampling_has_begun(self, recorded: RecordedEpisodes) -> bool:
        """Return whether the updates from recorded data alone are over, and note it in `samples_now`."""
        total = self.config.num_offline_updates
        self.sampler.samples_now = total is not None and recorded.num_updates >= total
        return self.sampler.samples_now

    @interruptible
    def _learn_offline(self, recorded: RecordedEpisodes) -> dict[str, dict[str, Any]]:
        """Make the updates of an iteration that learns from recorded data alone."""
        config = self.config
        if config.is_multi_agent:
            self.setup_modules()  # `policies_to_train` may be a function
        learning = list(filter(self.modules.trains, recorded.modules))
        num_updates, total = recorded.num_updates_per_iteration, config.num_offline_updates
        if total is not None:
            num_updates = min(num_updates, total - recorded.num_updates)
        results: dict[str, dict[str, Any]] = {}
        for _ in range(num_updates if learning else 0):
            if results:
                self.log_learner_results(results)
            if total is None:
                self.num_env_steps_sampled_lifetime += config.total_train_batch_size
            else:  # env steps stand still, and `target_network_update_freq` counts the steps of the batches
                for module_id in learning:
                    marked = self._target_updated_at.get(module_id, 0)
                    self._target_updated_at[module_id] = marked - config.total_train_batch_size
            results = {module_id: self.learn(module_id) for module_id in learning}
        recorded.num_updates += num_updates
        if config.validation_fraction:
            for module_id, found in results.items():
                draw = partial(self._draw_prepared, module_id)
                weight = self._imitation_coefficients(module_id, recorded, {})
                coefficients = {**self.VALIDATION_COEFFICIENTS, **weight}
                found |= recorded.validate(self, module_id, draw, coefficients, found.keys())
        self.sync_weights()
        return results

    def _draw_prepared(self, module_id: str, buffer: ReplayBuffer, size: int) -> Batch:
        """Return a batch for validation, with noise that neither depends on the training so far nor changes it."""
        kept, self._noise_rng = self._noise_rng, np.random.default_rng([self.config.seed or 0, 2])
        try:
            batch = self._mark_recorded(module_id, self._draw(module_id, buffer, size), np.ones(size, bool))
            return self.prepare_batch(module_id, batch)
        finally:
            self._noise_rng = kept

    def _draw_mixed(self, module_id: str, recorded: RecordedEpisodes) -> tuple[Batch, NDArray[np.bool_]]:
        """Return a batch of sampled and recorded transitions, and which rows are recorded."""
        config = self.modules[module_id].config
        size = config.total_train_batch_size
        num_sampled = size - round(size * config.recorded_fraction) if self.sampler.samples_now else 0
        data = recorded.modules[module_id].train
        if not num_sampled:
            batch, is_recorded = self._draw(module_id, data), np.ones(size, bool)
        elif num_sampled == size:
            batch, is_recorded = self._draw(module_id), np.zeros(size, bool)
        else:
            sampled = self._draw(module_id, size=num_sampled)
            found = self._draw(module_id, data, size - num_sampled)
            # Spread evenly, so that each of several learners, and each minibatch of rows in order, has its share.
            places = np.concatenate([np.arange(0.5, num) / num for num in (num_sampled, size - num_sampled)])
            order = places.argsort(kind="stable")
            batch = {
                name: map_tree(lambda *parts: np.concatenate(parts)[order], column, found[name])
                for name, column in sampled.items()
                if name in found
            }
            is_recorded = order >= num_sampled
        return self._mark_recorded(module_id, batch, is_recorded), is_recorded

    def _mark_recorded(self, module_id: str, batch: Batch, is_recorded: NDArray[np.bool_]) -> Batch:
        """Add the column `recorded` if recorded actions are imitated; see `with_imitation`."""
        if not self.modules[module_id].config.imitation_coeff:
            return batch
        share = len(is_recorded) / max(1, int(np.count_nonzero(is_recorded)))
        return batch | {"recorded": np.where(is_recorded, np.float32(share), np.float32(0.0))}

    def _imitation_coefficients(self, module_id: str, recorded: RecordedEpisodes, batch: Batch) -> dict[str, float]:
        """Return the weight of imitation in the next update, if there is any; the batch is the next one.

        If the policy seeks values, the setting is multiplied by the mean absolute value of the update before, and in
        the first update of its own batch: 0.4 is then TD3+BC with its alpha of 2.5 (Fujimoto and Gu 2021,
        arXiv:2106.06860, eqs. 3 and 5). If actions are chosen by their values themselves, nothing multiplies it.
        """
        setting = self.modules[module_id].config.imitation_coeff
        if not setting:
            return {}
        coeff = schedule_value(setting, self.num_env_steps_sampled_lifetime)
        if not self.SEEKS_VALUES:
            return {"imitation_coeff": coeff}
        if module_id not in recorded.mean_abs_q:
            from corral.algorithms.recorded_episodes import evaluate_loss

            coefficients = {**self.VALIDATION_COEFFICIENTS, "imitation_coeff": 0.0}
            _, found = evaluate_loss(self, module_id, self.modules.loss_of(module_id), batch, coefficients)
            recorded.mean_abs_q[module_id] = float(found.get("mean_abs_q", 1.0))  # a user's loss may not report it
        return {"imitation_coeff": coeff * recorded.mean_abs_q[module_id]}

    def learn(self, module_id: str) -> dict[str, Any]:
        """Make one update of a module from a new batch of its buffer, and return the results without columns.

        Raises:
            LossError: The loss did not report the column `td_error`.
        """
        config, buffer = self.modules[module_id].config, self.replay_buffers.get(module_id)
        seconds, is_sampled = self.timers.seconds, None
        settings = UpdateSettings.from_config(
            config,
            lr=self.lr(config),
            timestep=self.num_env_steps_sampled_lifetime,
            defers_report=self._defers_reports,
        )
        start_s = time.perf_counter()
        if self.recorded is None:
            batch = self._draw(module_id)
        else:
            batch, is_recorded = self._draw_mixed(module_id, self.recorded)
            is_sampled = ~is_recorded
        batch = self.prepare_batch(module_id, batch)
        if self.recorded is not None:
            settings = replace(settings, coefficients=self._imitation_coefficients(module_id, self.recorded, batch))
        drawn_s = time.perf_counter()
        seconds["replay"] += drawn_s - start_s
        result = self.update_module(module_id, batch, settings)
        learned_s = time.perf_counter()
        seconds["learning"] += learned_s - drawn_s
        if self.recorded is not None:
            self.recorded.note_values(module_id, result)
        td_errors = result.pop("td_error", None)
        if not isinstance(td_errors, (np.ndarray, Tensor)) or td_errors.shape != batch["indices"].shape:
            raise _wrong_td_errors(module_id, td_errors, len(batch["indices"]))
        if isinstance(buffer, PrioritizedReplayBuffer) and (is_sampled is None or is_sampled.any()):
            rows = slice(None) if is_sampled is None else is_sampled
            buffer.update_priorities(batch["indices"][rows], np.abs(td_errors[rows]))
            seconds["replay"] += time.perf_counter() - learned_s
        learned = td_errors[batch["learns"]] if "sequence_starts" in batch else td_errors
        result["td_error_mean"] = learned.mean() if isinstance(learned, Tensor) else float(learned.mean())
        return result

    def _draw(self, module_id: str, buffer: ReplayBuffer | None = None, size: int | None = None) -> Batch:
        """Return transitions from a buffer, or sequences if the module has memory, as the module sees them.

        Without a buffer they are from the replay buffer of the module, and without a size there is a whole batch.
        """
        record = self.modules[module_id]
        config, pipeline = record.config, record.policy.pipeline
        buffer = self.replay_buffers[module_id] if buffer is None else buffer
        size = config.total_train_batch_size if size is None else size
        form: dict[str, Any] = {"n_step": config.n_step, "gamma": config.gamma}
        if pipeline is not None:
            form["reward_fn"] = pipeline.rewards
        if record.has_memory:
            batch = record.draw_sequences(buffer, size, **form)
        else:
            beta = self._replay_configs[module_id].beta
            if not isinstance(beta, float):
                beta = schedule_value(beta, self.num_env_steps_sampled_lifetime)
            batch = buffer.sample(size, beta=beta, **form)
        if pipeline is not None:
            device = batch["rewards"].device if self.sampler.takes_tensors else None
            from_stored = pipeline.from_stored if device is None else self._tensor_form(module_id, pipeline, device)
            batch |= {name: from_stored(batch[name]) for name in ("obs", "next_obs") if name in batch}
        return batch

    def _tensor_form(self, module_id: str, pipeline: Pipeline, device: Any) -> Callable[[Tree], Tree]:
        """Return the form of a module's pipeline on a device; new statistics make another pipeline."""
        known = self._tensor_forms.get(module_id)
        if known is None or known[0] is not pipeline:
            known = self._tensor_forms[module_id] = pipeline, pipeline.tensor_form(device)
        return known[1]

    def _num_updates_due(self, module_id: str, num_env_steps: int) -> int:
        """Return how many updates of a module are due after a round in which it took so many steps."""
        config, buffer = self.modules[module_id].config, self.replay_buffers[module_id]
        # Not steps held: rows that only reset a sub-env take room in the ring, so it may never hold so many.
        if not len(buffer) or buffer.num_env_steps_added < config.num_steps_sampled_before_learning_starts:
            return 0
        if config.training_intensity is None:
            return 1
        credit = self._update_credit.get(module_id, 0.0)
        if config.training_intensity == "auto":
            length = config.rollout_fragment_length
            credit += num_env_steps / (1 if length == "auto" else length)
        else:
            credit += config.training_intensity * num_env_steps / config.total_train_batch_size
        num_updates = int(credit)
        self._update_credit[module_id] = credit - num_updates
        return num_updates

    def update_target_if_due(self, module_id: str) -> None:
        """Move the targets of a module if `target_network_update_freq` env steps were sampled since the last time."""
        steps, config = self.num_env_steps_sampled_lifetime, self.modules[module_id].config
        if steps - self._target_updated_at.get(module_id, 0) >= config.target_network_update_freq:
            self._target_updated_at[module_id] = steps
            self.learner_group.foreach_module(module_id, methodcaller("update_target", config.tau))

    # State, and the end.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state; it includes the buffers as `store_buffer_in_checkpoints` says."""
        state = super().get_state()
        if self.replay_buffers and self._large_arrays != "left_out" and self._stores_buffer():
            buffers = {}
            for module_id, buffer in self.replay_buffers.items():
                shared = self._large_arrays == "shared" and isinstance(buffer, ReplayBuffer)
                buffers[module_id] = buffer.get_state(**({"copy": False} if shared else {}))
            state["replay_buffer"] = buffers if self.config.is_multi_agent else buffers[DEFAULT_MODULE_ID]
        return state

    def _stores_buffer(self) -> bool:
        """Return whether states include the buffer; warn once if it is too large for that."""
        setting = self.config.store_buffer_in_checkpoints
        if setting != "auto":
            return setting
        num_bytes = sum(getattr(buffer, "nbytes", 0) for buffer in self.replay_buffers.values())
        is_small = num_bytes < AUTO_STORE_BYTES
        if not (is_small or self._warned_of_buffer):
            self._warned_of_buffer = True
            log.warning(
                "Checkpoints do not hold the replay buffer, which takes %.0f MB: a restored algorithm fills a new one "
                "first. Set training(store_buffer_in_checkpoints=True) to store it, or False for no warning.",
                num_bytes / 1e6,
            )
        return is_small

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `Algorithm.set_state`. If it includes no buffer, this buffer stays as it is."""
        with restoring(self):
            saved = state.get("replay_buffer", {})
            if not self.config.is_multi_agent and "replay_buffer" in state:
                saved = {DEFAULT_MODULE_ID: saved}
            check_sub_envs(saved.values(), state["runners"]["runners"], self.env_runner_group.num_envs)
            buffers = self.replay_buffers  # a module that does not learn here has none
            set_buffers = [partial(buffers[name].set_state, part) for name, part in saved.items() if name in buffers]
            set_algorithm_state(self, state, set_buffers)

    def stop(self) -> None:
        """Close the envs, end all workers, and release the memory of the buffers."""
        super().stop()
        for buffer in getattr(self, "replay_buffers", {}).values():  # building may have failed before it
            buffer.close()


def check_sub_envs(buffers: Iterable[Any], runners: Iterable[Any], num_envs: int) -> None:
    """Check that replay buffers whose rows have a step of each sub-env are of runners with as many sub-envs.

    Rows of a buffer with lanes do not: its lanes begin and end with agents and simulators.

    Args:
        buffers: States of the buffers.
        runners: States of the runners.
        num_envs: Number of sub-envs of each runner here.

    Raises:
        CheckpointError: The runners had another number of sub-envs.
    """
    has_rows = any("lanes" not in buffer and buffer.get("layout") for buffer in buffers)
    for runner in runners:
        saved = len(runner.get("num_episodes_over") or ()) or num_envs
        if has_rows and saved != num_envs:
            raise CheckpointError(
                f"replay_buffer: the state has the steps of {saved} sub-envs, and here are {num_envs}: give "
                f"num_envs_per_env_runner={saved}, or begin a new run with the weights of the checkpoint (load_from)."
            )


def refuse_unscaled_actions(config: AlgorithmConfig, name: str) -> None:
    """Refuse actions in the units of the env, where the module keeps them within bounds.

    Raises:
        ConfigError: `normalize_actions` is False.
    """
    if not config.normalize_actions:
        raise ConfigError(
            f"normalize_actions=False: {name} squashes Box actions by tanh and maps them to the bounds: leave it out."
        )


def _with_frames(config: ReplayConfig, pipeline: Pipeline | None) -> ReplayConfig:
    """Return the settings of a replay buffer that stores stacks of frames once.

    Raises:
        ConfigError: The buffer would hold observations that were normalised by statistics of the past.
    """
    if pipeline is None or not pipeline.num_stored:
        return config
    *before, last = pipeline.transforms[: pipeline.num_stored]
    for transform in before:
        if isinstance(transform, NormalizeObservations):
            raise ConfigError(
                f"transforms: NormalizeObservations is before {type(last).__name__}, and a replay buffer would hold "
                f"observations with old statistics: put it after {type(last).__name__}."
            )
    is_alone = not any(isinstance(each, TemporalTransform) for each in before)
    if isinstance(last, FrameStack) and is_alone and not has_mask_key(pipeline.observation_space):
        return replace(config, frame_stack=last.num_frames)
    return config


def _wrong_td_errors(module_id: str, td_errors: Any, size: int) -> LossError:
    """Return the error for a loss that did not report one `td_error` for each of `size` transitions."""
    given = "none" if td_errors is None else "one number"
    if isinstance(td_errors, np.ndarray):
        given = describe(td_errors)
    return LossError(
        f"learners/{module_id}: the loss must report the column 'td_error', float32[{size}], which holds the "
        f"error of each transition for the priorities of the replay buffer, and it reported {given}: return (loss, "
        '{"td_error": errors.detach(), ...}).'
    )
