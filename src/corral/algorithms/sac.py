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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import Replay, ReplayAlgorithmConfig, learner_metrics
from corral.core.schedules import schedule_value
from corral.core.settings import NonNegativeSchedule, PositiveFloat
from corral.learners.losses import Batch, Loss, LossInTwoForms
from corral.modules.distributions import SquashedGaussian
from corral.modules.module import DEFAULT_MODULE_ID, Module
from corral.modules.sac_module import SACModule
from corral.replay import ReplayBuffer, ReplayConfig

if TYPE_CHECKING:
    from corral.config.setter_types import SACTrainingArgs

Terms = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a batch: values of the actions taken, by critic `[C, B]`; their targets `[B]`; the actor's loss; and the
log-likelihood of the policy's own actions, `[B]`, without a graph."""


@dataclass(kw_only=True)
class SACConfig(ReplayAlgorithmConfig):
    """Settings of SAC; those below, and those of `ReplayAlgorithmConfig`, belong to `.training(...)`.

    Until learning starts, actions are drawn uniformly from the action space; `exploration_config` changes that. The
    buffer keeps 1,000,000 env steps, unless `replay_buffer_config` has a `capacity`; memory is allocated as steps
    arrive.

    Attributes:
        twin_q: Whether there are two critics, of which the lower value is used (Fujimoto et al. 2018,
            arXiv:1802.09477).
        initial_alpha: Initial temperature: the reward that one nat of entropy is worth.
        target_entropy: Entropy in nats that the temperature is adapted to; `"auto"` is minus the number of dimensions
            of a Box, or half the largest entropy of Discrete actions.
        actor_lr: Learning rate of the actor, or a schedule over env steps; `None` is `lr`.
        critic_lr: Learning rate of the critics, or a schedule over env steps; `None` is `lr`.
        alpha_lr: Learning rate of the temperature, or a schedule over env steps; `None` is `lr`, and 0 keeps the
            temperature at `initial_alpha`.
    """

    DEFAULT_CAPACITY: ClassVar[int] = 1_000_000

    train_batch_size_per_learner: int = 256
    rollout_fragment_length: int | Literal["auto"] = 1
    target_network_update_freq: int = 0
    tau: float = 5e-3
    twin_q: bool = True
    initial_alpha: PositiveFloat = 1.0
    target_entropy: float | Literal["auto"] = "auto"
    actor_lr: NonNegativeSchedule | None = None
    critic_lr: NonNegativeSchedule | None = None
    alpha_lr: NonNegativeSchedule | None = None

    def training(self, **settings: Unpack[SACTrainingArgs]) -> Self:
        """Set how to learn; see `TrainingSettings` and the settings above."""
        return super().training(**settings)

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
        """Settings of the module in addition to its layers."""
        return {"twin_q": self.twin_q, "initial_alpha": self.initial_alpha}

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Actions sampled from the policy; before learning starts, uniform actions."""
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
        return LossInTwoForms(
            partial(sac_loss, target_entropy=target_entropy), partial(sac_loss_on_arrays, target_entropy=target_entropy)
        )

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
    """The loss of a minibatch; a pure function of weights and columns.

    It is the sum of three, none of which has a gradient in the parameters of another, so that one backward pass serves
    all. Equations are those of arXiv:1812.05905.

    - Critics, eq. 5: half the mean squared error of each, to the discounted sum of the rewards plus the discounted soft
      value of the next observation where the episode did not terminate.
    - Actor, eq. 9: the temperature times the log-likelihood of its actions, less their value.
    - Temperature, eq. 18, with log alpha in place of alpha, as in the authors' code.

    Args:
        module: Gives actions and values.
        batch: Columns `[B, ...]` as a replay buffer draws them, and for Box actions `noise` and `next_noise`, as
            tensors.
        coefficients: None are used.
        target_entropy: In nats; `None` is the module's `auto_target_entropy`.

    Returns:
        The scalar to minimise, and to report: scalars, and the column `td_error`, float32 `[B]`, the mean over the
        critics of their absolute errors.
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
    """Return the terms of Box actions: one action of the policy stands for all of them, here and after the next step.

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
    """Return the terms of Discrete actions, whose expectations are sums (Christodoulou 2019, eqs. 10 to 12)."""
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
    """Return what the critics should say, float32 `[B]`: only a termination leaves the next value out."""
    targets: Tensor = batch["rewards"] + batch["discounts"] * (~batch["terminated"]) * next_value
    return targets


def entropy_surplus(module: SACModule, logp: Tensor, target_entropy: float | None) -> Tensor:
    """Return how much more entropy there is than there should be, in nats: the gradient of log alpha."""
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


@torch.no_grad()
def sac_loss_on_arrays(
    module: SACModule, batch: Batch, coefficients: Mapping[str, float], *, target_entropy: float | None
) -> tuple[Any, dict[str, Any]]:
    """Do what `sac_loss` does for Box actions and plain nets, and leave the gradients in the parameters.

    Columns are arrays. The gradients are worked out by hand: torch's graph would take a quarter of the time.
    """
    networks = module.array_networks()
    assert networks is not None and isinstance(module.distribution, SquashedGaussian)
    actor, critics, target_critics = networks[0], networks[1 : 1 + len(module.q)], networks[1 + len(module.q) :]
    columns = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}
    obs, next_obs = columns["obs"].flatten(1).float(), columns["next_obs"].flatten(1).float()
    alpha, size = module.log_alpha.exp(), len(obs)

    next_actions, next_logp = module.distribution.squashed_sample(actor.forward(next_obs)[-1], columns["next_noise"])
    pairs = torch.cat([next_obs, next_actions], -1)
    next_q = torch.cat([critic.forward(pairs)[-1] for critic in target_critics], -1).amin(-1)
    targets = soft_targets(columns, next_q - alpha * next_logp)

    noise, from_actor = columns["noise"], actor.forward(obs)
    actions, logp = module.distribution.squashed_sample(from_actor[-1], noise)
    taken = torch.cat([obs, columns["actions"].flatten(1).tanh()], -1)
    pairs = torch.cat([obs, actions], -1)
    q_taken, from_critics = [], []
    for critic in critics:
        outputs = critic.forward(taken)
        q_taken.append(outputs[-1].squeeze(-1))
        critic.backward(outputs, (columns["weights"] * (q_taken[-1] - targets) / size).unsqueeze(-1))
        from_critics.append(critic.forward(pairs))

    q_policy, lowest = torch.cat([outputs[-1] for outputs in from_critics], -1).min(-1, keepdim=True)
    slope = torch.zeros_like(actions)  # of the value by the action; each row has that of one critic
    for index, (critic, outputs) in enumerate(zip(critics, from_critics, strict=True)):
        rows = (lowest == index).squeeze(-1).nonzero().squeeze(-1)
        of_rows = critic.backward_to_input([output[rows] for output in outputs], torch.ones(len(rows), 1))
        slope[rows] = of_rows[:, obs.shape[1] :]
    # u = mean + std * noise, action = tanh(u): d action / du = 1 - action^2, and d logp / du = 2 action, but for the
    # Gaussian's part of logp, which is constant in u, and -log std.
    by_u = (2 * alpha * actions - slope * (1 - actions * actions)) / size
    std = from_actor[-1][:, actions.shape[1] :].exp()
    actor.backward(from_actor, torch.cat([by_u, by_u * std * noise - alpha / size], -1))

    surplus = entropy_surplus(module, logp, target_entropy)
    assert module.log_alpha.grad is not None
    module.log_alpha.grad.copy_(surplus)
    values = torch.stack(q_taken)
    errors = values - targets
    losses = {
        "critic_loss": 0.5 * (columns["weights"] * errors.square()).mean(-1).sum(),
        "actor_loss": (alpha * logp - q_policy.squeeze(-1)).mean(),
        "alpha_loss": module.log_alpha * surplus,
    }
    total = losses["critic_loss"] + losses["actor_loss"] + losses["alpha_loss"]
    reported = losses | {"alpha": alpha} | _reported(values, errors, logp)
    return total.numpy(), {name: value.numpy() for name, value in reported.items()}
