"""What off-policy algorithms share: the settings and the training step of learning from a replay buffer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.algorithm_state import all_or_nothing, restore_last
from corral.config.config import AlgorithmConfig
from corral.core.columns import describe
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.schedules import schedule_value
from corral.core.settings import NonNegativeInt, PositiveFloat, PositiveInt
from corral.errors import ConfigError, LossError
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayConfig, make_replay_buffer

log = logging.getLogger("corral")

AUTO_STORE_BYTES = 256_000_000
"""Size below which `store_buffer_in_checkpoints="auto"` stores a replay buffer."""


@dataclass(kw_only=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from a replay buffer.

    Attributes:
        replay_buffer_config: `type`, `capacity` and other settings of the buffer; see `ReplayConfig`.
        num_steps_sampled_before_learning_starts: Number of env steps added to the buffer before the first update.
        training_intensity: Ratio of steps trained on to env steps sampled: a batch of 32 every 4 env steps is 8. `None`
            makes one update after each round of sampling.
        n_step: Number of steps whose rewards are summed before the bootstrapped value.
        target_network_update_freq: Env steps between updates of the target network; 0 updates it after every gradient
            step.
        tau: Fraction by which an update moves the target network towards the network; 1 copies the network.
        store_buffer_in_checkpoints: Whether checkpoints hold the buffer; without it, a restored algorithm fills a new
            buffer before it continues to learn. `"auto"` stores a buffer of less than 256 MB, and warns once about a
            larger one.
    """

    ON_POLICY: ClassVar[bool] = False

    min_sample_timesteps_per_iteration: int = 1000
    replay_buffer_config: dict[str, Any] = field(default_factory=dict)
    num_steps_sampled_before_learning_starts: NonNegativeInt = 1000
    training_intensity: PositiveFloat | None = None
    n_step: PositiveInt = 1
    target_network_update_freq: NonNegativeInt = 500
    tau: Annotated[float, Field(gt=0, le=1)] = 1.0
    store_buffer_in_checkpoints: bool | Literal["auto"] = "auto"

    def validate(self) -> None:
        """Refuse contradictions; see `AlgorithmConfig.validate`."""
        super().validate()
        self.replay_config.check_capacity(self.total_train_batch_size, "train_batch_size_per_learner * num_learners")

    @property
    def replay_config(self) -> ReplayConfig:
        """Settings of the buffer.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        return ReplayConfig.parse(self.replay_buffer_config)


class OffPolicyAlgorithm(Algorithm):
    """An algorithm that learns from a replay buffer: owns the buffer, and decides when to update module and targets.

    Subclasses define `make_loss`, whose loss reports the column `td_error`, and name in `METRICS` what their learners
    report. They may override `lr` and `prepare_batch`. The module must have a method `update_target(tau)`.

    Attributes:
        local_replay_buffer: Replay buffer with `add`, `sample`, `len`, `num_env_steps_added`, `get_state`, `set_state`
            and `close`.
    """

    STATE = (*Algorithm.STATE, "_update_credit", "_target_updated_at")
    FIXED_SETTINGS = Algorithm.FIXED_SETTINGS | {"replay_buffer_config"}

    config: OffPolicyConfig

    def setup(self) -> None:
        """Make the replay buffer.

        Raises:
            ConfigError: The module cannot move a target network.
        """
        config, module = self.config, self.get_module(DEFAULT_MODULE_ID)
        if not callable(getattr(module, "update_target", None)):
            raise ConfigError(
                f"rl_module: {type(module).__name__} must define update_target(self, tau), which moves its target "
                "network towards its network."
            )
        self._replay_config = config.replay_config
        self.local_replay_buffer: ReplayBuffer = make_replay_buffer(
            self._replay_config, num_runners=max(1, config.num_env_runners), seed=config.seed
        )
        self._warned_of_buffer = False
        self._update_credit = 0.0  # updates that are due but not made yet, in [0, 1)
        self._target_updated_at = 0  # number of env steps sampled at the last update of the target

    # What a subclass may override.

    def lr(self) -> float | Mapping[str, float]:
        """Return the learning rate of the next update, or one learning rate per group of parameters."""
        return schedule_value(self.config.lr, self.num_env_steps_sampled_lifetime)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch from the buffer in the form that the loss expects."""
        return batch

    # The training step.

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Sample a round into the buffer, make the updates that are due, and send the new weights to the runners."""
        rollouts = self.sample(self.round_size or 1)
        with self.timers.time("replay"):
            self.local_replay_buffer.add(rollouts)
        results = self.learn(sum(rollout.num_env_steps for rollout in rollouts))
        self.sync_weights()
        return results

    def learn(self, num_env_steps: int) -> dict[str, dict[str, Any]]:
        """Make the updates that are due after a round of sampling.

        Args:
            num_env_steps: Env steps of the round.

        Returns:
            The results of the last update by module id, without columns; empty if no update was due. The results of
            the other updates are logged.
        """
        config, results = self.config, dict[str, dict[str, Any]]()
        settings = UpdateSettings.from_config(config, lr=self.lr())
        for _ in range(self._num_updates_due(num_env_steps)):
            self.log_learner_results(results)
            with self.timers.time("replay"):
                batch = self.prepare_batch(
                    self.local_replay_buffer.sample(
                        config.total_train_batch_size,
                        n_step=config.n_step,
                        gamma=config.gamma,
                        beta=schedule_value(self._replay_config.beta, self.num_env_steps_sampled_lifetime),
                    )
                )
            with self.timers.time("learning"):
                results = self.learner_group.update({DEFAULT_MODULE_ID: batch}, {DEFAULT_MODULE_ID: settings})
                self._update_target_if_due()
            td_errors = _checked_td_errors(results[DEFAULT_MODULE_ID].pop("td_error", None), len(batch["indices"]))
            if isinstance(self.local_replay_buffer, PrioritizedReplayBuffer):
                with self.timers.time("replay"):
                    self.local_replay_buffer.update_priorities(batch["indices"], np.abs(td_errors))
            results[DEFAULT_MODULE_ID]["td_error_mean"] = float(np.mean(td_errors))
        return results

    def _num_updates_due(self, num_env_steps: int) -> int:
        config = self.config
        # Not steps held: rows that only reset a sub-env take room in the ring, so it may never hold so many.
        buffer = self.local_replay_buffer
        if not len(buffer) or buffer.num_env_steps_added < config.num_steps_sampled_before_learning_starts:
            return 0
        if config.training_intensity is None:
            return 1
        self._update_credit += config.training_intensity * num_env_steps / config.total_train_batch_size
        num_updates = int(self._update_credit)
        self._update_credit -= num_updates
        return num_updates

    def _update_target_if_due(self) -> None:
        steps = self.num_env_steps_sampled_lifetime
        if steps - self._target_updated_at >= self.config.target_network_update_freq:
            self._target_updated_at = steps
            self.learner_group.foreach_module(DEFAULT_MODULE_ID, _update_target, self.config.tau)

    # State, and the end.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state; it includes the buffer as `store_buffer_in_checkpoints` says."""
        state = super().get_state()
        if self._large_arrays != "left_out" and self._stores_buffer():
            shared = self._large_arrays == "shared" and isinstance(self.local_replay_buffer, ReplayBuffer)
            settings = {"copy": False} if shared else {}
            state["replay_buffer"] = self.local_replay_buffer.get_state(**settings)
        return state

    def _stores_buffer(self) -> bool:
        """Return whether states include the buffer; warn once if it is too large for that."""
        setting = self.config.store_buffer_in_checkpoints
        if setting != "auto":
            return setting
        num_bytes = getattr(self.local_replay_buffer, "nbytes", 0)
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
        with all_or_nothing(self):
            super().set_state(state)
            if "replay_buffer" in state:  # last, because nobody has room for a copy of the old buffer
                restore_last(self, partial(self.local_replay_buffer.set_state, state["replay_buffer"]))

    def stop(self) -> None:
        """Close the envs, end all workers, and release the buffer's memory."""
        super().stop()
        if hasattr(self, "local_replay_buffer"):  # building may have failed before it
            self.local_replay_buffer.close()


def _checked_td_errors(td_errors: Any, size: int) -> NDArray[Any]:
    """Return what a loss reported as `td_error`, if it has one number for each of `size` transitions.

    Raises:
        LossError: It was not reported, or has another shape.
    """
    if isinstance(td_errors, np.ndarray) and td_errors.shape == (size,):
        return td_errors
    given = "none" if td_errors is None else "one number"
    if isinstance(td_errors, np.ndarray):
        given = describe(td_errors)
    raise LossError(
        f"learners/{DEFAULT_MODULE_ID}: the loss must report the column 'td_error', float32[{size}], which holds the "
        f"error of each transition for the priorities of the replay buffer, and it reported {given}: return (loss, "
        '{"td_error": errors.detach(), ...}).'
    )


def _update_target(module: Any, tau: float) -> None:
    module.update_target(tau)


def learner_metrics(*groups: str) -> tuple[str, ...]:
    """Return the names that every update reports besides the loss's own, given the names of groups of parameters."""
    return (
        *("total_loss", "td_error_mean", "module_train_batch_size_mean", "num_gradient_steps", "num_epochs"),
        *(f"gradients_{group}_optimizer_global_norm" for group in groups),
        *(f"{group}_optimizer_learning_rate" for group in groups),
    )
