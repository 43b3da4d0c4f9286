"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236) and what was added to them, whole in this file.

A round samples a few env steps into the replay buffer, and takes gradient steps on batches drawn from it. Each addition
is a setting of its own; all of them together, with n_step=3, are Rainbow (Hessel et al. 2018, arXiv:1710.02298).
`docs/algorithms/dqn.md` lists the metrics and the implementation details by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.off_policy import Replay, ReplayAlgorithmConfig, learner_metrics
from corral.core.schedules import Schedule, schedule_value
from corral.errors import ConfigError
from corral.learners.losses import Batch, Loss
from corral.modules.module import Module
from corral.modules.q_module import QModule
from corral.replay import ReplayBuffer


@dataclass(kw_only=True)
class DQNConfig(ReplayAlgorithmConfig):
    """Settings of DQN; those below, and those of `ReplayAlgorithmConfig`, belong to `.training(...)`.

    Attributes:
        double_q: Whether the network chooses the next action that the target network values (van Hasselt et al. 2016,
            arXiv:1509.06461).
        dueling: Whether value and advantages are streams of their own (Wang et al. 2016, arXiv:1511.06581).
        noisy: Whether layers have learned noise, in place of epsilon (Fortunato et al. 2018, arXiv:1706.10295).
        sigma0: Initial noise of such layers.
        num_atoms: Atoms of the distribution of returns, such as 51 (Bellemare et al. 2017, arXiv:1707.06887); 1 learns
            its mean.
        v_min: Smallest return of the distribution.
        v_max: Largest return.
        td_error_loss_fn: `"huber"` (quadratic up to an error of 1, then linear) or `"mse"`, for one atom.
    """

    DEFAULT_EXPLORATION: ClassVar[dict[str, Any]] = {
        "type": "EpsilonGreedy",
        "initial_epsilon": 1.0,
        "final_epsilon": 0.02,
        "epsilon_timesteps": 10_000,
    }

    lr: Schedule = 1e-3
    train_batch_size_per_learner: int = 64
    grad_clip: float | None = 10.0
    rollout_fragment_length: int | Literal["auto"] = 4
    n_step: int = 3
    double_q: bool = True
    dueling: bool = False
    noisy: bool = False
    sigma0: float = 0.5
    num_atoms: int = 1
    v_min: float = -10.0
    v_max: float = 10.0
    td_error_loss_fn: Literal["huber", "mse"] = "huber"

    @property
    def algo_class(self) -> type[Algorithm]:
        """`DQN`."""
        return DQN

    @property
    def default_module_class(self) -> type[Module]:
        """`QModule`."""
        return QModule

    @property
    def module_settings(self) -> dict[str, Any]:
        """What the Q-network is made of."""
        return {name: getattr(self, name) for name in ("dueling", "noisy", "sigma0", "num_atoms", "v_min", "v_max")}

    @property
    def default_exploration(self) -> dict[str, Any]:
        """Epsilon-greedy; with noisy layers, which explore by themselves, epsilon is 0."""
        return {"type": "EpsilonGreedy", "epsilon_schedule": 0.0} if self.noisy else dict(self.DEFAULT_EXPLORATION)

    def validate(self) -> None:
        """Refuse contradictions; see `AlgorithmConfig.validate`."""
        super().validate()
        if self.num_atoms < 1:
            raise ConfigError(f"num_atoms={self.num_atoms} must be at least 1.")
        if self.num_atoms > 1 and self.v_min >= self.v_max:
            raise ConfigError(f"v_min={self.v_min} must lie below v_max={self.v_max}: the atoms lie between them.")
        if self.sigma0 < 0:
            raise ConfigError(f"sigma0={self.sigma0} must be at least 0.")


class DQN(Algorithm):
    """Deep Q-networks."""

    FIXED_SETTINGS = Algorithm.FIXED_SETTINGS | {
        *("dueling", "noisy", "sigma0", "num_atoms", "v_min", "v_max", "replay_buffer_config")
    }
    METRICS = ("qf_mean", "qf_min", "qf_max", *learner_metrics("default"))

    config: DQNConfig

    def setup(self) -> None:
        """Make the replay buffer."""
        self._replay = Replay(self.config)

    @property
    def local_replay_buffer(self) -> ReplayBuffer:
        """The replay buffer: `add`, `sample`, `len`, `get_state`, `set_state`."""
        return self._replay.buffer

    def make_loss(self) -> Loss:
        """Return the loss with this config's constants."""
        config = self.config
        if config.num_atoms > 1:
            return partial(c51_loss, double_q=config.double_q)
        huber = config.td_error_loss_fn == "huber"
        return partial(dqn_loss, double_q=config.double_q, huber=huber)

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what training goes on from; see `store_buffer_in_checkpoints`."""
        return super().get_state() | {"replay": self._replay.get_state(self.config.store_buffer_in_checkpoints)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where the algorithm of this state was; see `Algorithm.set_state`."""
        super().set_state(state)
        self._replay.set_state(state["replay"])

    def stop(self) -> None:
        """Close the envs, end all workers, and give back the buffer's memory."""
        super().stop()
        if hasattr(self, "_replay"):
            self._replay.buffer.close()

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Sample a round into the buffer, make the updates that are due, hand out the new weights."""
        config = self.config
        rollouts = self.sample(self.round_size or 1)
        with self.timers.time("replay"):
            self._replay.buffer.add(rollouts)
        num_env_steps = sum(rollout.num_env_steps for rollout in rollouts)
        lr = schedule_value(config.lr, self.num_env_steps_sampled_lifetime)
        results = self._replay.learn(self, config, num_env_steps, lr=lr)
        self.sync_weights()
        return results


def dqn_loss(
    module: QModule, batch: Batch, coefficients: Mapping[str, float], *, double_q: bool, huber: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a minibatch; a pure function of weights and columns.

    The target is the discounted sum of the rewards and, where the episode did not terminate, the discounted value of
    the best next action. The target network gives this value. The target network also chooses the action (Mnih et al.
    2015), or with `double_q` the network does (van Hasselt et al. 2016, eq. 4).

    Args:
        module: Module with Q-values and target values.
        batch: Columns `[B, ...]` of a replay buffer, as tensors.
        coefficients: Not used.
        double_q: Whether the network chooses the next action.
        huber: Whether the loss is linear for errors above 1; otherwise it is quadratic for all errors.

    Returns:
        The scalar to minimise, and what to report: scalars, and the column `td_error`, float32 `[B]`.
    """
    module.draw_noise()
    q_values = module.q_values(batch["obs"])
    q_taken = q_values.gather(1, batch["actions"].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        next_values = module.q_values(batch["next_obs"], target=True)
        if double_q:
            best = module.q_values(batch["next_obs"]).argmax(1, keepdim=True)
            next_value = next_values.gather(1, best).squeeze(1)
        else:
            next_value = next_values.amax(1)
        targets = batch["rewards"] + batch["discounts"] * (~batch["terminated"]) * next_value
    if huber:
        losses = functional.smooth_l1_loss(q_taken, targets, reduction="none")
    else:
        losses = functional.mse_loss(q_taken, targets, reduction="none")
    loss = (batch["weights"] * losses).mean()
    return loss, _reported(q_taken.detach(), q_taken.detach() - targets)


def c51_loss(
    module: QModule, batch: Batch, coefficients: Mapping[str, float], *, double_q: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of distributional Q-learning: the cross-entropy to the projected target.

    This is algorithm 1 of Bellemare et al. 2017. Arguments and results are the same as for `dqn_loss`; the column
    `td_error` holds the cross-entropies, which serve as priorities (Hessel et al. 2018, "The Integrated Agent").
    """
    module.draw_noise()
    rows = torch.arange(len(batch["rewards"]), device=batch["rewards"].device)
    logp = module.logits(batch["obs"])[rows, batch["actions"]].log_softmax(-1)
    with torch.no_grad():
        next_probs = module.logits(batch["next_obs"], target=True).softmax(-1)
        chooser = module.q_values(batch["next_obs"]) if double_q else next_probs @ module.atoms
        next_probs = next_probs[rows, chooser.argmax(1)]
        discounts = batch["discounts"] * (~batch["terminated"])
        returns = batch["rewards"].unsqueeze(1) + discounts.unsqueeze(1) * module.atoms
        targets = projected(returns, next_probs, module.atoms)
    losses = -(targets * logp).sum(-1)
    loss = (batch["weights"] * losses).mean()
    return loss, _reported(logp.detach().exp() @ module.atoms, losses.detach())


def projected(returns: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """Project a distribution over returns onto evenly spaced atoms, each return onto its two nearest atoms.

    Args:
        returns: Returns, float32 `[B, K]`; returns beyond the atoms count as the nearest atom.
        probs: Probabilities of the returns, float32 `[B, K]`.
        atoms: Increasing atoms, float32 `[K]`.

    Returns:
        Probabilities of the atoms, float32 `[B, K]`.
    """
    position = (returns.clamp(atoms[0], atoms[-1]) - atoms[0]) / (atoms[1] - atoms[0])
    position = position.clamp(0, len(atoms) - 1)  # rounding may exceed the ends
    lower = position.floor()
    above = position - lower
    upper = (lower + 1).clamp(max=len(atoms) - 1)
    moved = torch.zeros_like(probs)
    moved.scatter_add_(1, lower.long(), probs * (1 - above))
    moved.scatter_add_(1, upper.long(), probs * above)
    return moved


def _reported(q_taken: Tensor, td_error: Tensor) -> dict[str, Tensor]:
    smallest, largest = q_taken.aminmax()
    return {"qf_mean": q_taken.mean(), "qf_min": smallest, "qf_max": largest, "td_error": td_error}
