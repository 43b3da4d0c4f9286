"""Parallelised Q-networks (Gallici et al. 2024, arXiv:2407.04811): Q-learning without replay and target network.

An iteration samples a batch from many sub-envs, computes lambda returns of the Q-values that sampled it, and takes
several epochs of minibatch steps towards them. Layer normalisation keeps the Q-values from growing without bound.
`docs/algorithms/pqn.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from torch import Tensor
from torch.nn import functional

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.ppo import ppo_batch
from corral.core.returns import FloatColumn, gae
from corral.core.schedules import Schedule, schedule_value
from corral.core.settings import Probability
from corral.data.episodes.rollout import Rollout
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.q_module import QModule
from corral.modules.recurrent_q_module import RecurrentQModule

if TYPE_CHECKING:
    from corral.algorithms.config.setter_types import PQNTrainingArgs


@dataclass(kw_only=True)
class PQNConfig(AlgorithmConfig):
    """Settings of PQN; the settings below belong to `.training(...)`.

    Attributes:
        lambda_: Lambda of the lambda returns: 0 bootstraps from the next observation, 1 sums rewards to the end of the
            batch.
    """

    ON_POLICY: ClassVar[bool] = False
    DEFAULT_NUM_ENVS: ClassVar[int] = 16
    LEARNS_SEQUENCES: ClassVar[bool] = True
    DEFAULT_EXPLORATION: ClassVar[dict[str, Any]] = {
        "type": "EpsilonGreedy",
        "initial_epsilon": 1.0,
        "final_epsilon": 0.1,
        "epsilon_timesteps": 15_000,
    }

    # Many small minibatches of short batches learn most from an env step; see benchmarks/QUALITY.md.
    lr: Schedule = field(default_factory=lambda: [(0.0, 1e-3), (60_000.0, 2e-4)])
    train_batch_size_per_learner: int = 512
    minibatch_size: int | None = 32
    num_epochs: int = 4
    grad_clip: float | dict[str, float] | None = 10.0
    lambda_: Probability = 0.95

    def training(self, **settings: Unpack[PQNTrainingArgs]) -> Self:
        """Set how to learn, and return the config; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

    @property
    def algo_class(self) -> type[Algorithm]:
        """`PQN`."""
        return PQN

    @property
    def default_module_class(self) -> type[Module]:
        """`QModule`, or `RecurrentQModule` with `use_lstm` or `use_gru`."""
        return RecurrentQModule if self.asks_for_memory else QModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the Q-network: layer normalisation, and no target network."""
        return {"has_targets": False, "is_normalized": True}

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Epsilon-greedy."""
        return dict(self.DEFAULT_EXPLORATION)


class PQN(Algorithm):
    """Parallelised Q-networks."""

    LEARNS_TENSORS = True
    METRICS = ("td_loss", "qf_mean", "qf_min", "qf_max")

    config: PQNConfig

    def make_loss(self, config: PQNConfig) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """Return the loss."""
        return pqn_loss

    def training_step(self) -> dict[str, dict[str, float]]:
        """Sample a batch, compute its targets, take the gradient steps, send the weights, and return the metrics."""
        # No replay: the batch is as new as the weights, and is thrown away after this iteration.
        rollouts = self.group_trained(self.sample(self.config.total_train_batch_size))
        # Targets of the old weights stay the same in all epochs, which is what a target network is for elsewhere.
        with self.timers.time("returns"):
            batches = {module_id: self._batch(module_id, parts) for module_id, parts in rollouts.items()}
        with self.timers.time("learning"):
            results = self.learner_group.update(
                batches, {module_id: self._settings(module_id) for module_id in batches}
            )
        self.sync_weights()
        return results

    def _batch(self, module_id: str, rollouts: list[Rollout]) -> Batch:
        config, record = self.module_config(module_id), self.modules[module_id]
        return ppo_batch(
            rollouts,
            partial(self.learner_group.values, module_id),
            partial(lambda_returns, gamma=config.gamma, lambda_=config.lambda_),
            normalize_advantages=False,
            max_seq_len=record.module.max_seq_len,
            for_user_code=record.shows_batches,
        )

    def _settings(self, module_id: str) -> UpdateSettings:
        config, steps = self.module_config(module_id), self.num_env_steps_sampled_lifetime
        return UpdateSettings.from_config(config, lr=schedule_value(config.lr, steps), timestep=steps)


def lambda_returns(
    rollout: Rollout, values: FloatColumn, next_values: FloatColumn, *, gamma: float, lambda_: float
) -> tuple[FloatColumn, FloatColumn]:
    """Return how far the lambda returns are above the values, and the lambda returns, float32 `[T, N]` each.

    They are Peng's Q(lambda) (eq. 5 and algorithm 1 of the paper): the return of step t is
    `r_t + gamma * ((1 - lambda) * V(s_t+1) + lambda * return_t+1)`, where V is the largest Q-value. A random action
    does not cut them. Where values are V, this is the recursion of `gae`.

    Args:
        rollout: Columns `[T, N, ...]` of one module.
        values: Largest Q-values of the observations, float32 `[T, N]`.
        next_values: Largest Q-values of the observations that the steps led to, float32 `[T, N]`.
        gamma: Discount per step.
        lambda_: Lambda.
    """
    ended = rollout.terminated, rollout.truncated
    return gae(rollout.rewards, values, next_values, *ended, rollout.valid, gamma=gamma, lambda_=lambda_)


def pqn_loss(
    module: QModule, batch: Batch, coefficients: Mapping[str, float], *, outputs: dict[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch, half the mean squared error; a pure function of weights and columns.

    Args:
        module: Module with Q-values.
        batch: Columns `[B, ...]` as `ppo_batch` returns them, as tensors; `value_targets` are the lambda returns.
        coefficients: Not used.
        outputs: Receives `q_values`, `[B, n]`, and `q_taken`, `[B]`.

    Returns:
        The scalar to minimise, and scalars to report.
    """
    q_values = module.q_values(*module_inputs(batch))
    q_taken = q_values.gather(1, batch["actions"].unsqueeze(1)).squeeze(1)
    if outputs is not None:
        outputs |= {"q_values": q_values, "q_taken": q_taken}
    loss = 0.5 * functional.mse_loss(q_taken, batch["value_targets"])
    smallest, largest = q_taken.detach().aminmax()
    return loss, {"td_loss": loss.detach(), "qf_mean": q_taken.detach().mean(), "qf_min": smallest, "qf_max": largest}
