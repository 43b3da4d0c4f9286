"""What off-policy algorithms share: the settings and the training step of learning from a replay buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.algorithm_state import restoring, set_algorithm_state
from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.replay_buffers import ReplayBuffers, can_stay_on_device
from corral.core.columns import describe
from corral.core.schedules import schedule_value
from corral.core.settings import (
    Need,
    NonNegativeInt,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Probability,
)
from corral.data.offline.config import HAS_INPUT
from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayConfig
from corral.errors import ConfigError, LossError, UnknownAttributeError
from corral.learners.losses import Batch, Loss, learner_metrics
from corral.learners.settings import UpdateSettings
from corral.modules.critics import Following

if TYPE_CHECKING:
    from corral.algorithms.recorded_episodes import RecordedEpisodes

_num_env_steps = attrgetter("num_env_steps")


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
            makes one update after each round of sampling, `"auto"` one for every `rollout_fragment_length` steps.
        n_step: Number of steps whose rewards are summed before the bootstrapped value. With `(min, max)` each
            transition draws its own number, evenly from min to max.
        burn_in_len: For a module with memory, the number of steps before each sequence that only bring the stored state
            up to date (Kapturowski et al. 2019). A batch has `train_batch_size_per_learner / max_seq_len` sequences,
            rounded down, and at least one.
        target_network_update_freq: Env steps between updates of the target network; 0 updates it after every gradient
            step.
        tau: Fraction by which an update moves the target network towards the network; 1 copies the network. `"auto"` is
            1 with a `target_network_update_freq` above 0; otherwise 0.03 for Q-networks with layer normalisation, and
            0.01 for others.
        store_buffer_in_checkpoints: Whether checkpoints hold the buffer; without it, a restored algorithm fills a new
            buffer before it continues to learn. `"auto"` stores a buffer of less than 256 MB, and warns once about a
            larger one.
        num_offline_updates: With recorded data, the number of updates of each module from the data alone, before the
            first env step is sampled. `None` learns from the data alone and samples nothing; the steps of the batches
            then count as env steps.
        num_updates_per_iteration: Updates of each module in an iteration that learns from recorded data alone. `None`
            is as many as it takes to draw as many steps as there are.
        recorded_fraction: Fraction of each batch that is drawn from recorded data while the algorithm samples (0.5 in
            Ball et al. 2023, arXiv:2302.02948). With 0 the data is only learned from before that.
        imitation_coeff: Weight of a loss that makes the policy imitate the recorded actions, or a schedule over env
            steps, which stand still while the algorithm learns from the data alone. For SAC, TD3, DDPG and CQL it is
            multiplied by the mean absolute value of the batch, as in Fujimoto and Gu 2021, arXiv:2106.06860.
    """

    ON_POLICY: ClassVar[bool] = False
    SAMPLES_BATCHES: ClassVar[bool] = False
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
    tau: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = 1.0
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


def off_policy_metrics(*groups: str) -> tuple[str, ...]:
    """Return what every off-policy update reports besides the loss's own, given the groups of parameters."""
    return ("td_error_mean", *learner_metrics(*groups))


class OffPolicyAlgorithm(Algorithm):
    """An algorithm that learns from replay buffers, and decides when to update modules and targets.

    Each module that learns has its own buffer, its own credit of updates and its own target network.

    Subclasses define `make_loss`, whose loss reports the column `td_error`, and name in `METRICS` what their learners
    report. They may override `lr`, `prepare_batch`, `make_replay_buffer` and `update_module`. A module that learns must
    have a method `update_target(tau)`.

    Attributes:
        replay_buffers: Replay buffers by module id; empty if nothing is sampled.
        SEEKS_VALUES: Whether an actor seeks the values of critics.
        CROSSES_EPISODES: Whether sequences for a module with memory continue in the next episode; see
            `ReplayBuffer.sample_sequences`.
        DELAYS_ACTOR: Whether the actor learns only in every `policy_delay` updates, which is a setting; `STATE` then
            names `_num_updates`.
        VALIDATION_COEFFICIENTS: Coefficients of the loss on episodes for validation.
    """

    STATE = (*Algorithm.STATE, "_update_credit", "_target_updated_at")
    OF_MODULES: ClassVar[tuple[str, ...]] = ("_update_credit", "_target_updated_at")
    # Whether anything is sampled, and how it explores at first, follows from `num_offline_updates` when building.
    FIXED_SETTINGS = Algorithm.FIXED_SETTINGS | {"replay_buffer_config", "num_offline_updates"}
    VALIDATION_COEFFICIENTS: ClassVar[Mapping[str, float]] = {}
    SEEKS_VALUES: ClassVar[bool] = True
    CROSSES_EPISODES: ClassVar[bool] = False
    DELAYS_ACTOR: ClassVar[bool] = False

    config: OffPolicyConfig

    def setup(self) -> None:
        """Make the replay buffers.

        Raises:
            ConfigError: A module cannot move a target network.
        """
        self.replay_buffers = ReplayBuffers(self)
        if self.DELAYS_ACTOR:
            self._num_updates: dict[str, int] = {}
        self._update_credit: dict[str, float] = {}  # updates that are due but not made yet, in [0, 1)
        # Env steps sampled at the last update of the target, moved by steps that are not the module's.
        self._target_updated_at: dict[str, int] = {}
        # For noise that `prepare_batch` draws; with a seed of its own, so that no other part draws the same noise.
        self._noise_rng = np.random.default_rng([self.config.seed or 0, 1])
        # Callbacks of updates read numbers.
        self._defers_reports = self.sampler.takes_tensors and "on_update_end" not in self._callbacks.heard
        self.setup_modules()

    def setup_modules(self) -> None:
        """Prepare what each module that learns now needs, and forget the buffers of removed modules."""
        for module_id in filter(self.modules.trains, self.module_ids):
            module = self.learner_group.get_module(module_id)
            if self.recorded is not None and self.modules[module_id].has_memory:
                raise ConfigError(
                    f"offline_data: input_: modules with memory learn from recorded data with BC only, not with "
                    f"{self.config.algo_name}: leave out the memory of module {module_id!r}, or the data."
                )
            if not callable(getattr(module, "update_target", None)):
                raise ConfigError(
                    f"rl_module: {type(module).__name__} must define update_target(self, tau), which moves its target "
                    "network towards its network."
                )
        self.replay_buffers.set_modules()
        if self.recorded is not None:
            self.recorded.set_modules()

    # What a subclass may override.

    def make_replay_buffer(self, module_id: str, config: ReplayConfig) -> ReplayBuffer:
        """Return the replay buffer of a module, on arrays; override it for a class of your own."""
        return self.replay_buffers.make(module_id, config)

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
        # Recorded data comes first, alone, if there is any.
        if self.recorded is not None and not self.recorded.sampling_has_begun():
            return self.recorded.learn_alone()
        num_before = self.num_env_steps_sampled_lifetime
        rollouts = self.group_trained(self.sample(self.sampler.num_env_steps_per_round or 1))
        num_env_steps = self.num_env_steps_sampled_lifetime - num_before
        if rollouts.keys() - self.replay_buffers.keys():  # `policies_to_train` is a function, and changed its mind
            self.setup_modules()
        # Each module keeps the steps of its own agents, and counts them.
        start_s = time.perf_counter()
        for module_id, parts in rollouts.items():
            self.replay_buffers[module_id].add([part.for_replay() for part in parts])
        self.timers.seconds["replay"] += time.perf_counter() - start_s
        taken: dict[str, int] = {}
        for module_id in self.replay_buffers:
            num = sum(map(_num_env_steps, rollouts.get(module_id, [])))
            if num != num_env_steps:
                self.count_for_target(module_id, num, num_env_steps)
            if num:
                taken[module_id] = num
        # The updates that are due. Modules that share layers make theirs in turn.
        due = {module_id: self._num_updates_due(module_id, num) for module_id, num in taken.items()}
        groups = self.learner_group.group_sharing(taken) if len(taken) > 1 else [list(taken)]
        order = [
            module_id
            for group in groups
            for turn in range(max(map(due.__getitem__, group), default=0))
            for module_id in group
            if turn < due[module_id]
        ]
        updates: Iterator[dict[str, Any]] = map(self.learn, order)  # each is made when it is asked for
        if self.sampler.takes_tensors:
            from corral.learners.device_update import read_at_once

            updates = read_at_once(updates)
        results: dict[str, dict[str, Any]] = {}
        for module_id in order:
            if module_id in results:
                self.log_learner_results({module_id: results[module_id]})
            results[module_id] = next(updates)
        self.sync_weights()
        return results

    def learn(self, module_id: str) -> dict[str, Any]:
        """Make one update of a module from a new batch of its buffer, and return the results without columns.

        Raises:
            LossError: The loss did not report the column `td_error`.
        """
        config, recorded, seconds = self.modules[module_id].config, self.recorded, self.timers.seconds
        # A batch is drawn; with recorded data, a part of it from there.
        start_s, is_recorded, coefficients = time.perf_counter(), None, {}
        if recorded is None:
            batch = self.prepare_batch(module_id, self._draw(module_id))
        else:
            batch, is_recorded = self._draw_mixed(module_id, recorded)
            batch = self.prepare_batch(module_id, batch)
            coefficients = recorded.imitation_coefficients(module_id, batch)
        drawn_s = time.perf_counter()
        seconds["replay"] += drawn_s - start_s
        # The gradient step, and then the targets.
        settings = UpdateSettings.from_config(
            config,
            lr=self.lr(config),
            coefficients=coefficients,
            timestep=self.num_env_steps_sampled_lifetime,
            defers_report=self._defers_reports,
        )
        result = self.update_module(module_id, batch, settings)
        learned_s = time.perf_counter()
        seconds["learning"] += learned_s - drawn_s
        if recorded is not None:
            recorded.note_values(module_id, result)
        # The errors become priorities of the rows of the buffer.
        td_errors = result.pop("td_error", None)
        if not isinstance(td_errors, (np.ndarray, Tensor)) or td_errors.shape != batch["indices"].shape:
            raise _wrong_td_errors(module_id, td_errors, len(batch["indices"]))
        buffer = self.replay_buffers.get(module_id)
        if isinstance(buffer, PrioritizedReplayBuffer) and not (is_recorded is not None and is_recorded.all()):
            rows = slice(None) if is_recorded is None else ~is_recorded
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
            batch = record.draw_sequences(buffer, size, across_episodes=self.CROSSES_EPISODES, **form)
        else:
            beta = self.replay_buffers.configs[module_id].beta
            if not isinstance(beta, float):
                beta = schedule_value(beta, self.num_env_steps_sampled_lifetime)
            batch = buffer.sample(size, beta=beta, **form)
        return batch if pipeline is None else record.transform_stored(batch)

    def _draw_mixed(self, module_id: str, recorded: RecordedEpisodes) -> tuple[Batch, NDArray[np.bool_]]:
        """Return a batch of sampled and recorded transitions, and which rows are recorded."""
        return recorded.draw_mixed(module_id)

    def _num_updates_due(self, module_id: str, num_env_steps: int) -> int:
        """Return how many updates of a module are due after a round in which it took so many steps."""
        record, buffer = self.modules[module_id], self.replay_buffers[module_id]
        config = record.config
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
            size = config.total_train_batch_size
            if record.has_memory:  # whole sequences may be more steps, or fewer
                size = record.num_sequences(size) * record.module.max_seq_len
            credit += config.training_intensity * num_env_steps / size
        num_updates = int(credit)
        self._update_credit[module_id] = credit - num_updates
        return num_updates

    def count_for_target(self, module_id: str, num_steps: int, num_env_steps: int) -> None:
        """Let `target_network_update_freq` count so many steps of a module, where env steps grew by another number."""
        updated_at = self._target_updated_at.get(module_id, 0)
        self._target_updated_at[module_id] = updated_at + num_env_steps - num_steps

    def update_target_if_due(self, module_id: str) -> None:
        """Move the targets of a module if `target_network_update_freq` env steps were sampled since the last time."""
        steps, config = self.num_env_steps_sampled_lifetime, self.modules[module_id].config
        if steps - self._target_updated_at.get(module_id, 0) >= config.target_network_update_freq:
            self._target_updated_at[module_id] = steps
            tau: Any = config.tau
            if tau == "auto":
                module: Any = self.modules[module_id].module
                tau = 1.0 if config.target_network_update_freq else getattr(module, "auto_tau", Following.auto_tau)
            self.learner_group.foreach_module(module_id, methodcaller("update_target", tau))

    # What the settings of a run add.

    def can_take_tensors(self) -> bool:
        """Return whether buffers and batches can stay on the device of the env, with the settings of this run."""
        configs = [self.config.for_module(module_id) for module_id in self.config.module_ids] or [self.config]
        makes_own = type(self).make_replay_buffer is not OffPolicyAlgorithm.make_replay_buffer
        return not makes_own and super().can_take_tensors() and all(map(can_stay_on_device, configs))

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

    @property
    def local_replay_buffer(self) -> ReplayBuffer:
        """The replay buffer of the only module; with several modules, see `replay_buffers`.

        Raises:
            UnknownAttributeError: The module does not learn here.
        """
        module_id = self.modules.resolve_id()
        if module_id not in self.replay_buffers:
            raise UnknownAttributeError(f"Module {module_id!r} has no replay buffer, because it does not learn here.")
        buffer: ReplayBuffer = self.replay_buffers[module_id]
        return buffer

    # State, and the end.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state; it includes the buffers as `store_buffer_in_checkpoints` says."""
        return {**super().get_state(), **self.replay_buffers.get_state(large_arrays=self._large_arrays)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `Algorithm.set_state`. If it includes no buffer, this buffer stays as it is."""
        with restoring(self):
            set_algorithm_state(self, state, self.replay_buffers.setters(state))

    def stop(self) -> None:
        """Close the envs, end all workers, and release the memory of the buffers."""
        super().stop()
        if "replay_buffers" in vars(self):  # building may have failed before it
            self.replay_buffers.close()


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
