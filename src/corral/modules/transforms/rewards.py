"""Transforms of rewards, which only learning sees: metrics such as `episode_return_mean` are of the env's rewards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.settings import PositiveFloat, Probability
from corral.core.tree import Tree
from corral.modules.transforms.moments import mean_and_variance, moments_of, no_moments
from corral.modules.transforms.transform import State, Transform, set_checked


@dataclass(frozen=True)
class NormalizeRewards(Transform):
    """Divides rewards by the running deviation of the discounted returns, and clips the result.

    The returns are the discounted sums of the rewards so far in each episode (Engstrom et al. 2020, arXiv:2005.12729,
    section 3), over all runners and sub-envs. The mean is not subtracted.

    Attributes:
        clip: Largest absolute value of the result; `None` does not clip.
        gamma: Discount per step of these returns; `None` is the algorithm's `gamma`.
        epsilon: Number that is added to the variance.
        max_return: Largest absolute value of a return so far, after the division: rewards are divided by more than the
            deviation if returns would be larger (Lee et al. 2025, arXiv:2502.15280, section 4.4). `None` has no limit.
    """

    clip: PositiveFloat | None = 10.0
    gamma: Probability | None = None
    epsilon: PositiveFloat = 1e-8
    max_return: PositiveFloat | None = None
    _algorithm_gamma: float | None = dataclasses.field(default=None, repr=False, compare=False)
    _state: State = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute what `transform_rewards` needs from the statistics.

        Raises:
            ConfigError: A setting is out of bounds.
        """
        set_checked(self)
        scale = 1.0
        if self._state:
            divisor = float(np.sqrt(mean_and_variance(self._state, "return")[1] + self.epsilon))
            if self.max_return is not None:
                divisor = max(divisor, float(self._state["largest/return"]) / self.max_return)
            scale = 1 / divisor
        object.__setattr__(self, "_scale", scale)

    @property
    def discount(self) -> float | None:
        """Discount per step of the returns."""
        return self._algorithm_gamma if self.gamma is None else self.gamma

    def with_gamma(self, gamma: float) -> Self:
        """Return the transform with the algorithm's discount, which counts if it has none of its own."""
        return self if self.discount == gamma else dataclasses.replace(self, _algorithm_gamma=gamma)

    def initial_state(self, space: spaces.Space[Any]) -> State:
        moments = no_moments({"return": ()})
        return moments if self.max_return is None else {**moments, "largest/return": np.zeros(())}

    def with_state(self, state: State) -> Self:
        return dataclasses.replace(self, _state=state)

    def measure(self, obs: Tree, returns: NDArray[np.float64]) -> State:
        """Return the statistics of returns, float64 `[B]`."""
        moments = moments_of({"return": returns})
        if self.max_return is None:
            return moments
        return {**moments, "largest/return": np.asarray(np.abs(returns).max(initial=0.0))}

    def transform_rewards(self, rewards: NDArray[Any]) -> NDArray[Any]:
        scaled: NDArray[Any] = rewards * self._scale  # type: ignore[attr-defined]
        return scaled if self.clip is None else scaled.clip(-self.clip, self.clip)


@dataclass(frozen=True)
class ClipRewards(Transform):
    """Clips rewards to an interval, or to their sign.

    Attributes:
        limit: Largest absolute value, or `"sign"` for -1, 0 or 1, as Mnih et al. 2015 (doi:10.1038/nature14236) do.
    """

    limit: PositiveFloat | Literal["sign"] = 1.0

    def __post_init__(self) -> None:
        """Refuse a limit that is no limit.

        Raises:
            ConfigError: The limit is neither a positive number nor `"sign"`.
        """
        set_checked(self)

    def transform_rewards(self, rewards: NDArray[Any]) -> NDArray[Any]:
        clipped: Any
        if self.limit == "sign":
            clipped = torch.sign(rewards) if isinstance(rewards, torch.Tensor) else np.sign(rewards)
        else:
            clipped = rewards.clip(-self.limit, self.limit)
        return clipped  # type: ignore[no-any-return]


def discounted_returns(
    rewards: NDArray[Any],
    valid: NDArray[np.bool_],
    over: NDArray[np.bool_],
    before: NDArray[np.float64],
    gamma: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the discounted sums of the rewards so far in each episode, and those that the next fragment continues.

    Args:
        rewards: Rewards `[T, N]`.
        valid: Whether a step counts, bool `[T, N]`; other rows change nothing.
        over: Whether the episode was over after a row, bool `[T, N]`; see `Rollout.over`.
        before: Sums before row 0, `[N]`.
        gamma: Discount per step.

    Returns:
        R_t = gamma * R_(t-1) + r_t, float64 `[T, N]`, and the sums after the last row, 0 where an episode ended.
    """
    returns, running = np.zeros(rewards.shape), before
    for t in range(len(rewards)):
        running = np.where(valid[t], gamma * running + rewards[t], running)
        returns[t] = running
        running = np.where(over[t], 0.0, running)
    return returns, running
