"""Contextual bandits: rewards are linear in the observation, and actions are chosen by reward and uncertainty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError
from corral.exploration.base import Choice, Exploration, RowDistribution, not_negative
from corral.modules.pixels import find_scaling

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

FloatArray = NDArray[np.float64]


class LinearBandit(Exploration, ABC):
    """Chooses the arm with the best score of a ridge regression on the steps of all runners; subclasses have `scores`.

    The score depends on the observation and on the rewards of single steps, not on the algorithm's module. The features
    x are the numbers of the observation in one vector (bytes scaled by their bounds to [0, 1], Discrete entries
    one-hot) and a 1. For each arm, the bandit stores the precision `lambda_ * I + sum(x x^T)` and the sum of
    `x * reward`.

    Args:
        alpha: Weight of the uncertainty.
        lambda_: Prior precision of the weights.
    """

    on_policy = False
    acts_by_module = False
    begins_without_state = True
    action_spaces = (spaces.Discrete,)

    def __init__(
        self, action_space: spaces.Space[Any], *, alpha: float = 1.0, lambda_: float = 1.0, **kwargs: Any
    ) -> None:
        """Keep the settings, and start with the prior."""
        super().__init__(action_space, **kwargs)
        self.alpha = not_negative(self, "alpha", alpha)
        if not_negative(self, "lambda_", lambda_) == 0:
            raise ConfigError(f"exploration_config of {type(self).__name__}: lambda_={lambda_} must be above 0.")
        assert isinstance(action_space, spaces.Discrete)
        self._space = space_tree(self.model.features_space)
        width = sum(_num_features(space) for space in leaves(self._space)) + 1
        self.num_arms = int(action_space.n)
        self._learns = False  # True in the algorithm, which learns, and False in runners
        self._prior = np.tile(lambda_ * np.eye(width), (self.num_arms, 1, 1)), np.zeros((self.num_arms, width))
        self._take(*self._prior)

    def _take(self, precision: FloatArray, sums: FloatArray) -> None:
        """Set the statistics: precision `[A, D, D]` and sums `[A, D]`; compute covariance and weights."""
        self.precision, self.sums = precision, sums
        self.covariance = np.linalg.inv(precision)
        self.weights: FloatArray = np.einsum("aij,aj->ai", self.covariance, sums)

    def features(self, obs: Tree) -> FloatArray:
        """Return the features `[B, D]` of observations, a tree of `[B, ...]`."""
        ordered = leaves(map_tree(lambda _, leaf: leaf, self._space, obs))
        parts = [_features(space, leaf) for space, leaf in zip(leaves(self._space), ordered, strict=True)]
        return np.concatenate([*parts, np.ones((len(parts[0]), 1))], -1)

    def expected(self, features: FloatArray) -> FloatArray:
        """Return the expected reward of each arm `[B, A]`."""
        rewards: FloatArray = features @ self.weights.T
        return rewards

    def deviations(self, features: FloatArray) -> FloatArray:
        """Return `sqrt(x^T covariance x)` of each arm `[B, A]`."""
        squares: FloatArray = ((features @ self.covariance) * features).sum(-1).T  # [A, B, D] before the sum
        return np.sqrt(np.maximum(squares, 0.0))  # rounding of large features may leave less

    @abstractmethod
    def scores(self, features: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the score of each arm, `[B, A]`."""

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> Choice:
        """Return the arm with the best score, a random one of equals; without exploration, by expected reward."""
        features, rng = self.features(action_distribution.obs), action_distribution.rng
        scores = self.scores(features, rng) if explore else self.expected(features)
        if action_distribution.legal is not None:
            scores = np.where(action_distribution.legal, scores, -np.inf)
        if not explore:
            return scores.argmax(-1), None
        best = scores.max(-1, keepdims=True)
        ties = scores >= best - 1e-12 * np.abs(best)
        return np.where(ties, rng.random(scores.shape), -1.0).argmax(-1), None

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Add the valid steps to the statistics; return the mean squared error of the expected rewards."""
        precision, sums = self.precision.copy(), self.sums.copy()
        errors = []
        for rollout in rollouts:
            if not rollout.valid.any():
                continue
            features = self.features(rollout.valid_rows(map_tree(lambda column: column[:-1], rollout.module_obs)))
            arms, rewards = rollout.valid_rows(rollout.actions), rollout.valid_rows(rollout.rewards)
            expected = self.expected(features)[np.arange(len(arms)), arms]
            errors.append(np.square(expected - rewards))
            for arm in np.unique(arms):
                x = features[arms == arm]
                precision[arm] += x.T @ x
                sums[arm] += x.T @ rewards[arms == arm]
        if not errors:
            return {}
        self._take(precision, sums)
        self._learns = True
        return {"bandit_squared_error": float(np.mean(np.concatenate(errors)))}

    def get_weights(self) -> dict[str, NDArray[Any]]:
        """Return the statistics, from which runners compute covariance and weights."""
        return {"precision": self.precision, "sums": self.sums}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Use the statistics that the algorithm's exploration has learned."""
        self._take(weights["precision"], weights["sums"])

    def get_state(self) -> dict[str, Any]:
        """Return the statistics; in a runner, which receives them as weights, return an empty dict."""
        return {"precision": self.precision.copy(), "sums": self.sums.copy()} if self._learns else {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics of a state, if it has the same numbers of arms and features; an empty one has none."""
        if not state:
            self._take(*self._prior)
            self._learns = False
        elif state["precision"].shape == self.precision.shape:
            self._take(state["precision"], state["sums"])
            self._learns = True


class ThompsonSampling(LinearBandit):
    """Chooses the arm with the highest reward drawn from the posterior `N(x^T weights, alpha^2 x^T covariance x)`.

    For one observation, this is equivalent to drawing the weights of each arm, and needs fewer random numbers.

    Args:
        alpha: Standard deviation of the reward noise, which scales the standard deviation of the posterior.
    """

    paper = "Agrawal and Goyal 2013, arXiv:1209.3352"

    def scores(self, features: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return rewards `[B, A]` drawn from the posterior."""
        deviations = self.deviations(features)
        drawn: FloatArray = self.expected(features) + self.alpha * deviations * rng.standard_normal(deviations.shape)
        return drawn


class UpperConfidenceBound(LinearBandit):
    """Chooses the arm with the highest upper bound, `x^T weights + alpha * sqrt(x^T covariance x)`: LinUCB.

    Args:
        alpha: Width of the confidence interval.
    """

    paper = "Li et al. 2010, arXiv:1003.0146"

    def scores(self, features: FloatArray, rng: np.random.Generator) -> FloatArray:
        bounds: FloatArray = self.expected(features) + self.alpha * self.deviations(features)
        return bounds


def _num_features(space: spaces.Space[Any]) -> int:
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ConfigError(f"exploration_config: a bandit cannot make features of observations in {space}.")
    return int(spaces.flatdim(space))


def _features(space: spaces.Space[Any], leaf: NDArray[Any]) -> FloatArray:
    """Return the features `[B, d]` of observations of a space that is not nested."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec.reshape(-1))
        values = (leaf - space.start).reshape(len(leaf), -1)
        rows = values + np.concatenate([[0], np.cumsum(sizes)[:-1]])
        one_hot = np.zeros((len(leaf), int(sizes.sum())))
        np.put_along_axis(one_hot, rows, 1.0, -1)
        return one_hot
    if isinstance(space, spaces.Box) and leaf.dtype == np.uint8:
        scaling = find_scaling(space)
        scaled: FloatArray = (leaf - scaling.offset) * scaling.scale
        return scaled.reshape(len(leaf), -1)
    return leaf.reshape(len(leaf), -1) * 1.0
