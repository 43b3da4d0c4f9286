"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905), whole in this file.

A round samples an env step into the replay buffer, and takes a gradient step on a batch drawn from it: of the critics,
of the actor, which seeks value and entropy, and of the temperature that weighs the two. Discrete actions follow
Christodoulou 2019 (arXiv:1910.07207). `docs/algorithms/sac.md` lists the metrics and the implementation details by
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import Replay, ReplayAlgorithmConfig, learner_metrics
from corral.core.schedules import Schedule, schedule_value, validate_schedule
from corral.errors import ConfigError
from corral.learners.losses import Batch, Loss
from corral.modules.module import DEFAULT_MODULE_ID, Module
from corral.modules.sac_module import SACModule
from corral.replay import ReplayBuffer, ReplayConfig

Terms = tuple[Tensor, Tensor, Tensor, Tensor]
"""Terms of a batch: values of the actions taken, by critic, `[C, B]`; targets of these values, `[B]`; loss of the
actor; log-likelihood of the policy's own actions, `[B]`, detached."""


@dataclass(kw_only=True)
class SACConfig(ReplayAlgorithmConfig):
    """Settings of SAC; those below, and those of `ReplayAlgorithmConfig`, belong to `.training(...)`.

    Until learning starts, actions are drawn evenly from the action space; `exploration_config` changes that. The buffer
    keeps 1,000,000 env steps, unless `replay_buffer_config` has a `capacity`; memory is taken as they come.

    Attributes:
        twin_q: Whether there are two critics, of which the lower value counts (Fujimoto et al. 2018, arXiv:1802.09477).
        initial_alpha: The temperature at first: what a nat of entropy is worth in rewards.
        target_entropy: The entropy in nats that the temperature is moved to keep; `"auto"` is minus the dimensions of a
            Box, or half the largest entropy of Discrete actions.
        actor_lr: Learning rate of the actor, or a schedule over env steps; `None` is `lr`.
        critic_lr: Likewise, of the critics.
        alpha_lr: Likewise, of the temperature; 0 keeps it at `initial_alpha`.
    """

    DEFAULT_CAPACITY: ClassVar[int] = 1_000_000

    train_batch_size_per_learner: int = 256
    rollout_fragment_length: int | Literal["auto"] = 1
    target_network_update_freq: int = 0
    tau: float = 5e-3
    twin_q: bool = True
    initial_alpha: float = 1.0
    target_entropy: float | Literal["auto"] = "auto"
    actor_lr: Schedule | None = None
    critic_lr: Schedule | None = None
    alpha_lr: Schedule | None = None

    @property
    def algo_class(self) -> type[Algorithm]:
        """`SAC`."""
        return SAC

    @property
    def default_module_class(self) -> type[Module]:
        """`SACModule`."""
        return SACModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """What the module is made of, besides its layers."""
        return {"twin_q": self.twin_q, "initial_alpha": self.initial_alpha}

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Actions of the policy, drawn; before learning starts, even ones."""
        return {"type": "StochasticSampling", "random_timesteps": self.num_steps_sampled_before_learning_starts}

    @property
    def replay_config(self) -> ReplayConfig:
        """The settings of the buffer; see `ReplayAlgorithmConfig.replay_config`."""
        return ReplayConfig.parse({"capacity": self.DEFAULT_CAPACITY, **self.replay_buffer_config})

    def lrs(self, num_env_steps: int) -> dict[str, float]:
        """Return the learning rate of each group of parameters after so many env steps."""
        given = {"actor": self.actor_lr, "critic": self.critic_lr, "alpha": self.alpha_lr}
        return {
            name: schedule_value(self.lr if schedule is None else schedule, num_env_steps)
            for name, schedule in given.items()
        }

    def validate(self) -> None:
        """Refuse contradictions; see `AlgorithmConfig.validate`."""
        super().validate()
        for name in ("actor_lr", "critic_lr", "alpha_lr"):
            if getattr(self, name) is not None:
                validate_schedule(name, getattr(self, name))
        if self.initial_alpha <= 0:
            raise ConfigError(f"initial_alpha={self.initial_alpha} must be positive: its logarithm is learned.")


class SAC(Algorithm):
    """Soft actor-critic."""

    FIXED_SETTINGS = Algorithm.FIXED_SETTINGS | {"twin_q", "initial_alpha", "replay_buffer_config"}
    METRICS = (
        *("critic_loss", "actor_loss", "alpha_loss", "alpha", "entropy", "qf_mean", "qf_min", "qf_max"),
        *learner_metrics("actor", "critic", "alpha"),
    )

    config: SACConfig

    def setup(self) -> None:
        """Make the replay buffer, and what draws the noise of the policy's own actions."""
        assert self.config.seed is not None
        self._replay = Replay(self.config)
        self._noise_rng = np.random.default_rng([self.config.seed, 1])  # other noise than any other part draws

    @property
    def local_replay_buffer(self) -> ReplayBuffer:
        """The replay buffer: `add`, `sample`, `len`, `get_state`, `set_state`."""
        return self._replay.buffer

    def make_loss(self) -> Loss:
        """Return the loss with this config's constants."""
        given = self.config.target_entropy
        target_entropy = None if given == "auto" else given
        return partial(sac_loss, target_entropy=target_entropy)

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what training goes on from; see `store_buffer_in_checkpoints`."""
        return super().get_state() | {
            "replay": self._replay.get_state(self.config.store_buffer_in_checkpoints),
            "noise_rng": dict(self._noise_rng.bit_generator.state),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where the algorithm of this state was; see `Algorithm.set_state`."""
        super().set_state(state)
        self._replay.set_state(state["replay"])
        self._noise_rng.bit_generator.state = state["noise_rng"]

    def stop(self) -> None:
        """Close the envs, end all workers, and give back the buffer's memory."""
        super().stop()
        if hasattr(self, "_replay"):
            self._replay.buffer.close()

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Sample a round into the buffer, make the updates that are due, hand out the new weights."""
        rollouts = self.sample(self.round_size or 1)
        with self.timers.time("replay"):
            self._replay.buffer.add(rollouts)
        num_env_steps = sum(rollout.num_env_steps for rollout in rollouts)
        lrs = self.config.lrs(self.num_env_steps_sampled_lifetime)
        results = self._replay.learn(self, self.config, num_env_steps, lr=lrs, prepare=self._with_noise)
        self.sync_weights()
        return results

    def _with_noise(self, batch: Batch) -> Batch:
        """Add the columns `noise` and `next_noise`, float32 `[B, d]`, that pick the policy's actions."""
        distribution = self.get_module(DEFAULT_MODULE_ID).distribution
        noise = distribution.noise(self._noise_rng, (2, len(batch["rewards"])))
        return {**batch, "noise": noise[0], "next_noise": noise[1]}


def sac_loss(
    module: SACModule, batch: Batch, coefficients: Mapping[str, float], *, target_entropy: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    The loss is the sum of three losses. Each has gradients in the parameters of its own group only, so one backward
    pass computes all of them. The equations refer to arXiv:1812.05905.

    - Critics, eq. 5: half the mean squared error of each critic. The target is the discounted sum of the rewards and,
      where the episode did not terminate, the discounted soft value of the next observation.
    - Actor, eq. 9: the temperature times the log-likelihood of the policy's actions, minus their value.
    - Temperature, eq. 18, with log alpha in place of alpha, as in the authors' code.

    Args:
        module: Module with a policy, values and a temperature.
        batch: Columns `[B, ...]` of a replay buffer, and for Box actions `noise` and `next_noise`, as tensors.
        coefficients: Not used.
        target_entropy: Target of the entropy in nats; `None` is the module's `auto_target_entropy`.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`, the absolute
        errors averaged over the critics.
    """
    alpha = module.log_alpha.detach().exp()
    terms = discrete_terms if module.is_discrete else continuous_terms
    q_taken, targets, actor_loss, logp = terms(module, batch, alpha)
    errors = q_taken - targets
    critic_loss = 0.5 * (batch["weights"] * errors.square()).mean(-1).sum()
    surplus = entropy_surplus(module, logp, target_entropy)
    alpha_loss = module.log_alpha * surplus
    reported = _reported(q_taken.detach(), errors.detach(), logp)
    losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss, "alpha": alpha}
    return critic_loss + actor_loss + alpha_loss, {name: loss.detach() for name, loss in losses.items()} | reported


def continuous_terms(module: SACModule, batch: Batch, alpha: Tensor) -> Terms:
    """Return the terms for Box actions, with expectations over actions estimated from one action of the policy.

    The columns hold actions before the tanh.
    """
    with torch.no_grad():
        next_actions, next_logp = module.sample(batch["next_obs"], batch["next_noise"])
        next_q = module.q_values(batch["next_obs"], next_actions, target=True).amin(0)
        targets = soft_targets(batch, next_q - alpha * next_logp)
    q_taken = module.q_values(batch["obs"], batch["actions"].flatten(1).tanh())
    actions, logp = module.sample(batch["obs"], batch["noise"])
    with module.frozen_critics():
        q_policy = module.q_values(batch["obs"], actions).amin(0)
    return q_taken, targets, (alpha * logp - q_policy).mean(), logp.detach()


def discrete_terms(module: SACModule, batch: Batch, alpha: Tensor) -> Terms:
    """Return the terms for Discrete actions, with exact expectations (Christodoulou 2019, eqs. 10 to 12)."""
    with torch.no_grad():
        next_logp = module.policy(batch["next_obs"]).log_softmax(-1)
        next_q = module.q_values(batch["next_obs"], target=True).amin(0)
        targets = soft_targets(batch, (next_logp.exp() * (next_q - alpha * next_logp)).sum(-1))
    logp = module.policy(batch["obs"]).log_softmax(-1)
    probs = logp.exp()
    q_values = module.q_values(batch["obs"])
    q_taken = q_values[:, torch.arange(q_values.shape[1], device=q_values.device), batch["actions"]]
    actor_loss = (probs * (alpha * logp - q_values.detach().amin(0))).sum(-1).mean()
    return q_taken, targets, actor_loss, (probs * logp).sum(-1).detach()


def soft_targets(batch: Batch, next_value: Tensor) -> Tensor:
    """Return the targets of the critics, float32 `[B]`; a terminated step has no next value."""
    targets: Tensor = batch["rewards"] + batch["discounts"] * (~batch["terminated"]) * next_value
    return targets


def entropy_surplus(module: SACModule, logp: Tensor, target_entropy: float | None) -> Tensor:
    """Return the entropy minus its target, in nats: the gradient of the loss by log alpha."""
    return -logp.mean() - (module.auto_target_entropy if target_entropy is None else target_entropy)


def _reported(q_taken: Tensor, errors: Tensor, logp: Tensor) -> dict[str, Tensor]:
    smallest, largest = q_taken.aminmax()
    return {
        "entropy": -logp.mean(),
        "qf_mean": q_taken.mean(),
        "qf_min": smallest,
        "qf_max": largest,
        "td_error": errors.abs().mean(0),
    }
