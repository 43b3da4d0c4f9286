"""Fitted Q evaluation: the action values of a policy, learned from recorded episodes of another policy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.core.tree import Tree, map_tree
from corral.errors import ConfigError
from corral.modules.critics import Follower
from corral.modules.sac_module import CriticNetwork, SACNetworkConfig
from corral.modules.threads import num_threads_for, torch_threads

NUM_DRAWS = 16
"""Draws of actions by which the value of an observation is averaged, for Box actions."""

_NUM_FOLDS = 8  # times that what the first target network got wrong shrinks to 1/e in all gradient steps
_TAU_BOUNDS = 0.005, 0.1
_LAST_LR = 0.1  # learning rate of the last gradient step, as a part of the first one
_ROWS_AT_ONCE = 8192

Policy = NDArray[np.float32] | Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.float32]]
"""Probabilities of Discrete actions, float32 `[R, n]`; or a function of row numbers `[B]` and a generator that draws
Box actions, float32 `[B, d]`."""


@dataclass(frozen=True)
class FittedValues:
    """Values of a policy in the rows of recorded episodes.

    Attributes:
        q_values: Values of the recorded actions, float64 `[R]`; only valid rows have an action.
        state_values: Values of the observations, float64 `[R]`: of Discrete actions the expectation, of Box actions the
            mean over 16 draws.
        td_error: Root of the mean squared difference from the bootstrapped values in the last tenth of the gradient
            steps, in units of the rewards.
    """

    q_values: NDArray[np.float64]
    state_values: NDArray[np.float64]
    td_error: float


@dataclass(frozen=True)
class FitSettings:
    """Settings of fitted Q evaluation.

    Attributes:
        num_gradient_steps: Number of gradient steps.
        batch_size: Steps of the data in each of them.
        lr: Learning rate of Adam; it falls linearly to a tenth.
        model_config: Settings of the network, as of a critic of SAC.
        seed: Seed of the initial weights, of the batches and of the next actions.
    """

    num_gradient_steps: int = 10_000
    batch_size: int = 256
    lr: float = 1e-3
    model_config: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers out of bounds.

        Raises:
            ConfigError: Names the setting.
        """
        for name in ("num_gradient_steps", "batch_size", "lr"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"fitted Q evaluation: {name}={getattr(self, name)} must be above 0.")


def fit_values(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    obs: Tree,
    actions: NDArray[Any],
    rewards: NDArray[Any],
    terminated: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    policy: Policy,
    gamma: float,
    settings: FitSettings = FitSettings(),
) -> FittedValues:
    """Return a policy's values, learned from recorded episodes (Le et al. 2019, arXiv:1903.08738, algorithm 3).

    The network learns reward + gamma * value of the next observation under the policy, by the squared error, with a
    target network that follows it slowly in place of one fit after another. The value of the next observation is the
    exact expectation over Discrete actions, and the value of one action that is drawn for Box actions. A step that
    terminated its episode does not bootstrap. A step that truncated it does, from the final observation: unlike the
    estimates by importance sampling, the values are of episodes without a time limit.

    The network begins at the mean of the recorded returns, in which the mean reward follows a truncated episode, and
    learns in units of their deviation. With gamma below 1, the bootstrapped values are kept between the lowest and the
    highest sum that the recorded rewards allow, so that they cannot diverge.

    Args:
        observation_space: Space of the observations, without a mask of actions.
        action_space: A Discrete space, or a Box of float actions.
        obs: Observations of rows, a tree of `[R, ...]`: the steps of each episode, then its final observation.
        actions: Actions of the rows: int64 `[R]` from 0, or float32 `[R, d]` of about [-1, 1].
        rewards: Rewards `[R]`.
        terminated: bool `[R]`; whether the step of a row terminated its episode.
        valid: bool `[R]`; False for the final observation of each episode.
        policy: The policy that is evaluated.
        gamma: Discount per step.
        settings: Settings.

    Raises:
        ConfigError: The actions are neither Discrete nor a Box, or a setting of the network does not fit.
    """
    if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
        raise ConfigError(f"fitted Q evaluation takes Discrete or Box actions, and these are {action_space}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        config = SACNetworkConfig.parse(dict(settings.model_config or {}))
        for name in ("architecture", "share_features", "log_std_bounds"):
            if value := getattr(config, name):
                raise ConfigError(f"fitted Q evaluation: model_config: {name}={value!r} has no effect: leave it out.")
        network = CriticNetwork(observation_space, action_space, config)
    rng = np.random.default_rng(settings.seed)
    rows = _Rows(map_tree(torch.from_numpy, obs), np.asarray(actions), policy)
    returns = _returns(np.asarray(rewards, np.float64), terminated, valid, gamma)
    center, spread = float(returns.mean()), float(returns.std()) or 1.0
    q_values, state_values = np.zeros(len(valid)), np.zeros(len(valid))
    num_threads = num_threads_for(network, "auto")
    with torch_threads(num_threads):
        td_error = _learn(
            network, rows, np.asarray(rewards, np.float64), terminated, valid, gamma, settings, (center, spread), rng
        )
    network.eval()
    with torch_threads(num_threads), torch.inference_mode():
        for start in range(0, len(valid), _ROWS_AT_ONCE):
            part = np.arange(start, min(start + _ROWS_AT_ONCE, len(valid)))
            q_values[part] = rows.taken(network, part).double().numpy()
            draws = [rows.values(network, part, rng) for _ in range(NUM_DRAWS if callable(policy) else 1)]
            state_values[part] = torch.stack(draws).double().mean(0).numpy()
    return FittedValues(center + spread * q_values, center + spread * state_values, spread * td_error)


class _Rows:
    """Rows of observations with the recorded actions and the actions of the policy."""

    def __init__(self, obs: Tree, actions: NDArray[Any], policy: Policy) -> None:
        self._obs, self._policy = obs, policy
        self._actions = torch.from_numpy(actions)
        self._chances = None if callable(policy) else torch.from_numpy(np.asarray(policy, np.float32))

    def taken(self, network: nn.Module, rows: NDArray[np.int64]) -> Tensor:
        """Return the values `[B]` of the recorded actions in some rows."""
        index = torch.from_numpy(rows)
        obs, actions = self._at(index), self._actions[index]
        if self._chances is None:
            values: Tensor = network(obs, actions)
            return values
        # The rows of final observations have no action, and any number will do.
        columns = actions.clamp(0, self._chances.shape[1] - 1).unsqueeze(1)
        taken: Tensor = network(obs).gather(1, columns).squeeze(1)
        return taken

    def values(self, network: nn.Module, rows: NDArray[np.int64], rng: np.random.Generator) -> Tensor:
        """Return the values `[B]` of the policy's actions in some rows."""
        index = torch.from_numpy(rows)
        if self._chances is not None:
            expected: Tensor = (self._chances[index] * network(self._at(index))).sum(1)
            return expected
        assert callable(self._policy)
        values: Tensor = network(self._at(index), torch.from_numpy(self._policy(rows, rng)))
        return values

    def _at(self, index: Tensor) -> Tree:
        return map_tree(lambda leaf: leaf[index], self._obs)


def _learn(
    network: nn.Module,
    rows: _Rows,
    rewards: NDArray[np.float64],
    terminated: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    gamma: float,
    settings: FitSettings,
    units: tuple[float, float],
    rng: np.random.Generator,
) -> float:
    """Take the gradient steps; return the root of the mean squared error of the last tenth, in units of `units`."""
    center, spread = units
    target = copy.deepcopy(network).requires_grad_(False)
    both, follower = nn.ModuleDict({"network": network, "target": target}), Follower(target="network")
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr)
    steps, num = np.flatnonzero(valid), settings.num_gradient_steps
    low, high = -math.inf, math.inf
    if gamma < 1:
        low, high = (
            bound / (1 - gamma) for bound in (rewards.min(), rewards.max())
        )  # of final rows, which have 0, too
    tau = _tau(gamma, num)
    discounts = np.where(terminated, 0.0, gamma).astype(np.float32)
    errors = []
    for step in range(num):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - (1 - _LAST_LR) * step / num)
        batch = steps[rng.integers(len(steps), size=settings.batch_size)]
        with torch.no_grad():
            after = (center + spread * rows.values(target, batch + 1, rng)).clamp(low, high)
            wanted = torch.from_numpy(rewards[batch].astype(np.float32)) + torch.from_numpy(discounts[batch]) * after
        loss = nn.functional.mse_loss(rows.taken(network, batch), (wanted - center) / spread)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        follower.move(both, tau)
        if step >= 0.9 * num:
            errors.append(loss.item())
    return math.sqrt(sum(errors) / len(errors)) if errors else math.nan


def _tau(gamma: float, num_gradient_steps: int) -> float:
    """Return the part of the way that the target network moves after each gradient step.

    An error in the values of the target network shrinks by the factor 1 - tau * (1 - gamma) in each step at best.
    """
    low, high = _TAU_BOUNDS
    return min(high, max(low, _NUM_FOLDS / (num_gradient_steps * (1 - gamma)))) if gamma < 1 else high


def _returns(
    rewards: NDArray[np.float64], terminated: NDArray[np.bool_], valid: NDArray[np.bool_], gamma: float
) -> NDArray[np.float64]:
    """Return the discounted sum of the rewards from each valid row on: what the values are like, before learning.

    A truncated episode continues with the mean reward.
    """
    tail = float(rewards[valid].mean()) / (1 - gamma) if gamma < 1 else 0.0
    returns, running = np.zeros(len(rewards)), 0.0
    for row in range(len(rewards) - 1, -1, -1):
        running = float(rewards[row]) + (0.0 if terminated[row] else gamma * running) if valid[row] else tail
        returns[row] = running
    return returns[valid]
