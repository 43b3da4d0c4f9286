"""Noise in the weights of the policy instead of in its actions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.tree import map_tree
from corral.exploration.base import Delegating, RowDistribution, not_negative
from corral.exploration.build import make_sub_exploration
from corral.exploration.epsilon import DISCRETE
from corral.exploration.noise import between
from corral.modules.distributions import DiagGaussian

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

ADAPTATION = 1.01  # alpha of the paper's section 3


class ParameterNoise(Delegating):
    """Acts with weights that have added Gaussian noise; the noise is drawn per sub-env at the start of each episode.

    The standard deviation is multiplied or divided by 1.01 after each rollout, so that the distance between the
    perturbed policy and the unperturbed policy stays near a target. For discrete actions the distance is the KL
    divergence of the softmax of the outputs, and the target is the divergence between epsilon-greedy and greedy
    actions, `-log(1 - epsilon + epsilon / num_actions)`. For continuous actions the distance is the root mean square of
    the difference between the most likely actions, in the unit of `DiagGaussian.to_unit`.

    `compute_actions` has no episodes, and uses the unperturbed weights.

    Args:
        initial_stddev: Initial standard deviation of the noise in each weight.
        random_timesteps: Number of env steps at the beginning with actions drawn uniformly from the action space.
        sub_exploration: The `exploration_config` that chooses actions from the outputs of the perturbed policy; `None`
            means the most likely actions.
        target_epsilon: Epsilon in the target for discrete actions, in [0, 1).
        target_distance: Target distance for continuous actions.
    """

    on_policy = False
    with_memory = False
    for_actions: ClassVar[Mapping[str, tuple[type[spaces.Space[Any]], ...]]] = {
        "target_epsilon": DISCRETE,
        "target_distance": (spaces.Box,),
    }
    paper = "Plappert et al. 2018, arXiv:1706.01905"

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        initial_stddev: float = 1.0,
        random_timesteps: int = 10_000,
        sub_exploration: Mapping[str, Any] | None = None,
        target_epsilon: float = 0.1,
        target_distance: float = 0.2,
        **kwargs: Any,
    ) -> None:
        """Keep the settings, and make the sub-exploration."""
        super().__init__(action_space, **kwargs)
        self.stddev = float(not_negative(self, "initial_stddev", initial_stddev))
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)
        self.target_epsilon = between(self, "target_epsilon", target_epsilon, 0, 1)
        self.target_distance = not_negative(self, "target_distance", target_distance)
        self.sub = make_sub_exploration(self, sub_exploration or {"type": "StochasticSampling"})
        self._draws = sub_exploration is not None
        self._due = np.ones(self.num_envs, np.bool_)  # sub-envs that have no noise, or noise of an earlier episode

    def begin_episodes(self, begins: NDArray[np.bool_], *, timestep: int, explore: bool) -> None:
        """Draw new noise for the weights of the sub-envs in which an episode begins."""
        self.sub.begin_episodes(begins, timestep=timestep, explore=explore)
        self._due |= begins
        if explore and self.inference is not None and self._due.any():
            self.inference.perturb(self.stddev, self._due, self.rng)
            self._due[:] = False

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        """Return actions chosen from the outputs of the perturbed policy; in the first steps, drawn uniformly."""
        if explore and timestep < self.random_timesteps:
            return action_distribution.random(), None
        return self.sub.get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore and self._draws
        )

    def end_sample(self, rollout: Rollout, *, timestep: int, explore: bool) -> None:
        """Measure the distance in the latest steps, and adapt the standard deviation of the noise."""
        self.sub.end_sample(rollout, timestep=timestep, explore=explore)
        rows, valid = rollout.latest_steps()
        if not explore or self.inference is None or not valid.any():
            return
        lanes = np.arange(rollout.num_lanes)
        plain = self.inference(map_tree(lambda column: column[rows, lanes], rollout.module_obs), perturbed=False)
        distance, target = self.distance(plain[valid], rollout.dist_inputs[rows, lanes][valid])
        self.stddev *= ADAPTATION if distance < target else 1 / ADAPTATION
        self.inference.perturb(self.stddev, np.zeros_like(valid), self.rng)

    def distance(self, plain: NDArray[np.float32], perturbed: NDArray[np.float32]) -> tuple[float, float]:
        """Return the distance between the outputs `[N, D]` of two policies, and the target distance."""
        distribution = self.model.distribution
        if isinstance(distribution, DiagGaussian):
            modes = [distribution.to_unit(distribution.mode(inputs)) for inputs in (plain, perturbed)]
            return math.sqrt(float(np.mean(np.square(modes[0] - modes[1])))), self.target_distance
        with torch.inference_mode():
            kl = distribution.kl(torch.from_numpy(plain), torch.from_numpy(perturbed)).mean().item()
        share = math.exp(distribution.random_logp(distribution.mode(plain[:1]))[0])  # 1 / num_actions
        return kl, -math.log(1 - self.target_epsilon + self.target_epsilon * share)

    def get_metrics(self, timestep: int) -> dict[str, float]:
        """Return `parameter_noise_stddev`, and the metrics of the sub-exploration."""
        return {**self.sub.get_metrics(timestep), "parameter_noise_stddev": self.stddev}

    def get_state(self) -> dict[str, Any]:
        """Return the standard deviation, which sub-envs have no noise, and the state of the sub-exploration."""
        return {**super().get_state(), "stddev": self.stddev, "due": self._due.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the standard deviation; where the inference has no noise of the weights, it is drawn again."""
        super().set_state(state)
        self.stddev = float(state["stddev"])
        due, noise = state["due"], None if self.inference is None else self.inference.get_noise()
        has_noise = noise is not None and noise["num_rows"] == len(due) == self.num_envs
        self._due = due.copy() if has_noise else np.ones(self.num_envs, np.bool_)
