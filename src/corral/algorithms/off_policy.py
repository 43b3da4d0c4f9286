"""What algorithms share that learn from a replay buffer: their settings, and one round of learning from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from corral.algorithms.algorithm import Algorithm
from corral.config.config import AlgorithmConfig
from corral.core.schedules import schedule_value
from corral.core.settings import NonNegativeInt, PositiveFloat, PositiveInt
from corral.learners.losses import Batch
from corral.modules.module import DEFAULT_MODULE_ID
from corral.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayConfig, make_replay_buffer


@dataclass(kw_only=True)
class ReplayAlgorithmConfig(AlgorithmConfig):
    """Settings of algorithms that learn from a replay buffer.

    Attributes:
        replay_buffer_config: `type`, `capacity` and other settings of the buffer; see `ReplayConfig`.
        num_steps_sampled_before_learning_starts: Number of env steps in the buffer before the first update.
        training_intensity: Ratio of steps trained on to env steps sampled: a batch of 32 every 4 env steps is 8. `None`
            makes one update after each round of sampling.
        n_step: Number of steps whose rewards are summed before the bootstrapped value.
        target_network_update_freq: Env steps between updates of the target network; 0 updates it after every gradient
            step.
        tau: Fraction by which an update moves the target network towards the network; 1 copies the network.
        store_buffer_in_checkpoints: Whether checkpoints hold the buffer; without it, a restored algorithm fills a new
            buffer before it continues to learn.
    """

    ON_POLICY: ClassVar[bool] = False

    min_sample_timesteps_per_iteration: int = 1000
    replay_buffer_config: dict[str, Any] = field(default_factory=dict)
    num_steps_sampled_before_learning_starts: NonNegativeInt = 1000
    training_intensity: PositiveFloat | None = None
    n_step: PositiveInt = 1
    target_network_update_freq: NonNegativeInt = 500
    tau: Annotated[float, Field(gt=0, le=1)] = 1.0
    store_buffer_in_checkpoints: bool = False

    def validate(self) -> None:
        """Refuse contradictions; see `AlgorithmConfig.validate`."""
        super().validate()
        self.replay_config.check_capacity(self.total_train_batch_size, "train_batch_size_per_learner * num_learners")

    @property
    def replay_config(self) -> ReplayConfig:
        """The settings of the buffer.

        Raises:
            ConfigError: One is unknown or out of range.
        """
        return ReplayConfig.parse(self.replay_buffer_config)


def learner_metrics(*groups: str) -> tuple[str, ...]:
    """Return what an update reports whatever the loss, for groups of parameters of these names."""
    return (
        *("total_loss", "td_error_mean", "module_train_batch_size_mean", "num_gradient_steps"),
        *(f"gradients_{group}_optimizer_global_norm" for group in groups),
        *(f"{group}_optimizer_learning_rate" for group in groups),
    )


class Replay:
    """An algorithm's replay buffer, and how much it learns from it, and when.

    Attributes:
        buffer: The buffer.
        update_credit: Updates that sampling has earned and that have not been made: a part of one.
        target_updated_at: Env steps sampled when the target was last updated.
    """

    def __init__(self, config: ReplayAlgorithmConfig) -> None:
        """Make the buffer of a frozen config."""
        replay_config = config.replay_config
        self.buffer: ReplayBuffer = make_replay_buffer(
            replay_config, num_runners=max(1, config.num_env_runners), seed=config.seed
        )
        self._beta, self._capacity = replay_config.beta, replay_config.capacity
        self.update_credit = 0.0
        self.target_updated_at = 0

    def learn(
        self,
        algorithm: Algorithm,
        config: ReplayAlgorithmConfig,
        num_env_steps: int,
        *,
        lr: float | Mapping[str, float],
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
        coefficients: Mapping[str, float] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Make the updates that are due after a round of sampling.

        Args:
            algorithm: Whose learners to update.
            config: Its config.
            num_env_steps: Env steps of the round.
            lr: Learning rate, or one for each group of parameters.
            prepare: Called with each batch.
            coefficients: Handed to the loss.

        Returns:
            The results of the last update, by module id, without columns; empty if none was due. Those of the others
            are logged.
        """
        steps = algorithm.num_env_steps_sampled_lifetime
        results: dict[str, dict[str, Any]] = {}
        for _ in range(self._num_updates_due(config, num_env_steps)):
            algorithm.metrics.log_dict(results, key="learners", reduce="mean")
            with algorithm.timers.time("replay"):
                batch = prepare(
                    self.buffer.sample(
                        config.total_train_batch_size,
                        n_step=config.n_step,
                        gamma=config.gamma,
                        beta=schedule_value(self._beta, steps),
                    )
                )
            with algorithm.timers.time("learning"):
                results = algorithm.learner_group.update(
                    {DEFAULT_MODULE_ID: batch},
                    lr=lr,
                    num_epochs=config.num_epochs,
                    minibatch_size=config.minibatch_size,
                    shuffle=config.shuffle_batch_per_epoch,
                    coefficients={DEFAULT_MODULE_ID: coefficients or {}},
                )
                self._update_target(algorithm, config, steps)
            td_errors = results[DEFAULT_MODULE_ID].pop("td_error")
            if isinstance(self.buffer, PrioritizedReplayBuffer):
                with algorithm.timers.time("replay"):
                    self.buffer.update_priorities(batch["indices"], np.abs(td_errors))
            results[DEFAULT_MODULE_ID]["td_error_mean"] = float(np.mean(td_errors))
        return results

    def _num_updates_due(self, config: ReplayAlgorithmConfig, num_env_steps: int) -> int:
        enough = min(config.num_steps_sampled_before_learning_starts, self._capacity)
        if len(self.buffer) < max(enough, 1):
            return 0
        if config.training_intensity is None:
            return 1
        self.update_credit += config.training_intensity * num_env_steps / config.total_train_batch_size
        num_updates = int(self.update_credit)
        self.update_credit -= num_updates
        return num_updates

    def _update_target(self, algorithm: Algorithm, config: ReplayAlgorithmConfig, steps: int) -> None:
        if steps - self.target_updated_at >= config.target_network_update_freq:
            self.target_updated_at = steps
            algorithm.learner_group.foreach_module(DEFAULT_MODULE_ID, _update_target, config.tau)

    def get_state(self, with_buffer: bool) -> dict[str, Any]:
        """Return what learning goes on from; the buffer's contents only if asked for."""
        state = {"update_credit": self.update_credit, "target_updated_at": self.target_updated_at}
        return {**state, "buffer": self.buffer.get_state()} if with_buffer else state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; without a buffer in it, this one stays as it is."""
        if "buffer" in state:
            self.buffer.set_state(state["buffer"])
        self.update_credit, self.target_updated_at = state["update_credit"], state["target_updated_at"]


def _update_target(module: Any, tau: float) -> None:
    module.update_target(tau)
