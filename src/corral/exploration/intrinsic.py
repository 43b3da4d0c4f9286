"""Intrinsic rewards: rewards for novel observations, which are added to the rewards of the env.

The nets are in the algorithm's process and learn there, before the learners receive the rollouts. Runners only choose
actions, by another exploration. Callbacks in runners, and the returns in results, have the rewards of the env only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.core.tree import Tree, map_tree
from corral.errors import ConfigError, nearest
from corral.exploration.base import Delegating, RowDistribution, not_negative
from corral.exploration.build import make_sub_exploration
from corral.learners.learner_state import get_learner_state, set_learner_state
from corral.learners.optimizers import ModuleOptimizer
from corral.modules.module import ModelConfig, NetworkConfig
from corral.modules.networks import Encoder, orthogonal
from corral.modules.threads import num_threads_for, torch_threads

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

FloatArray = NDArray[np.float64]

# Largest and smallest number of env steps in one gradient step: more env steps are split, fewer wait for others. A
# gradient step on 64 env steps costs hardly more than on 4, which algorithms with a replay buffer sample at once.
MINIBATCH_ROWS, MIN_ROWS = 256, 64
NET_SETTINGS = tuple(
    field.name for field in fields(NetworkConfig) if field.name not in ("action_masks", "architecture")
)


class IntrinsicReward(Delegating, ABC):
    """Adds an intrinsic reward to the reward of the env.

    A subclass defines `make_net` and `judge`; if its net learns, it also defines `errors` and calls `train`.

    Args:
        random_timesteps: Number of env steps at the beginning with actions drawn uniformly from the action space.
        sub_exploration: The `exploration_config` that chooses the actions; `None` means the algorithm's default.
    """

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        random_timesteps: int = 0,
        sub_exploration: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the settings, and make the sub-exploration."""
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)
        self.sub = make_sub_exploration(self, sub_exploration)
        self.lr = 0.0  # set by subclasses whose nets learn
        self._net: nn.Module | None = None  # made when it is first needed; runners never need it
        self._optimizers: dict[str, ModuleOptimizer] = {}
        self._num_threads: int | None = None
        self._waiting: list[Steps] = []  # too few for a gradient step

    begins_without_state = True

    @abstractmethod
    def make_net(self) -> nn.Module:
        """Return one module with all nets."""

    @abstractmethod
    def judge(self, steps: Steps, shares: Sequence[Share], timestep: int) -> tuple[FloatArray, dict[str, float]]:
        """Return the rewards `[B]` of steps and numbers to report, and learn from the steps.

        Args:
            steps: Valid steps of all rollouts.
            shares: Rows of each rollout in `steps`.
            timestep: Number of env steps sampled so far.
        """

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        """Return actions of the sub-exploration; for the first `random_timesteps`, actions drawn uniformly."""
        if explore and timestep < self.random_timesteps:
            actions = action_distribution.random()
            return actions, action_distribution.random_logp(actions)
        return self.sub.get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore
        )

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Add the intrinsic rewards to the rewards of the rollouts, learn, and return numbers to report."""
        learned = self.sub.learn(rollouts, timestep=timestep)
        steps, shares = gathered(rollouts)
        if not shares:
            return learned
        _ = self.net  # makes the net and sets the number of threads
        with torch_threads(self._num_threads):
            rewards, numbers = self.judge(steps, shares, timestep)
        for share in shares:
            column = share.rollout.rewards.copy()  # arrays from another process are read-only
            column[share.rollout.valid] += rewards[share.rows]
            share.rollout.rewards = column
        return {**learned, "intrinsic_reward_mean": float(rewards.mean()), **numbers}

    @property
    def net(self) -> nn.Module:
        """The net, whose initial weights depend on the config's seed; made at the first use, with an optimizer."""
        if self._net is None:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.config.seed or 0)
                self._net = self.make_net()
            if any(parameter.requires_grad for parameter in self._net.parameters()):
                groups = {"default": self._net.parameters()}
                self._optimizers = {"net": ModuleOptimizer(groups, torch.optim.Adam, {"lr": self.lr})}
            self._num_threads = num_threads_for(self._net, self.config.num_threads)
        return self._net

    def errors(self, steps: Steps) -> tuple[Tensor, ...]:
        """Return the errors of the nets that learn, `[B]` each; empty if no net learns."""
        return ()

    def loss(self, *errors: Tensor) -> Tensor:
        """Return the loss for errors `[B]`."""
        return errors[0].mean()

    def train(self, steps: Steps, timestep: int) -> NDArray[np.float32]:
        """Return the errors of steps, `[K, B]`, and learn; the errors of each step are from before learning from it.

        There is one gradient step per minibatch, and the order of the steps depends on the seed and the timestep. If
        there are fewer than `MIN_ROWS` steps, they are kept until there are enough for a gradient step.
        """
        if steps.num_steps < MIN_ROWS:
            with torch.no_grad():
                judged: NDArray[np.float32] = torch.stack(self.errors(steps)).numpy()
            self._waiting.append(steps)
            if sum(part.num_steps for part in self._waiting) >= MIN_ROWS:
                self._step(self.errors(join_steps(self._waiting)))
                self._waiting = []
            return judged
        found = []
        order = np.random.default_rng([self.config.seed or 0, timestep]).permutation(steps.num_steps)
        for rows in np.array_split(order, -(-len(order) // MINIBATCH_ROWS)):
            errors = self.errors(steps.at(rows))
            self._step(errors)
            found.append(torch.stack(errors).detach().numpy())
        judged = np.empty((len(found[0]), steps.num_steps), np.float32)
        judged[:, order] = np.concatenate(found, -1)
        return judged

    def _step(self, errors: tuple[Tensor, ...]) -> None:
        optimizer = self._optimizers["net"]
        optimizer.sync()
        optimizer.zero_grad()
        self.loss(*errors).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def get_state(self) -> dict[str, Any]:
        """Return the states of the sub-exploration and, if they were made, of net and optimizer, with waiting steps."""
        state = super().get_state()
        if self._net is not None:
            state |= get_learner_state({"net": self._net}, self._optimizers)
            state["waiting"] = [map_tree(lambda leaf: leaf.numpy(), steps.columns) for steps in self._waiting]
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned; without a net in it, the net is made again at the next use.

        Raises:
            CheckpointError: The state belongs to a different net.
        """
        super().set_state(state)
        if "weights" not in state:
            self._net, self._optimizers, self._waiting = None, {}, []
        else:
            nets = {"net": self.net}
            set_learner_state(nets, self._optimizers, state)
            self._waiting = [Steps(*map_tree(torch.from_numpy, columns)) for columns in state["waiting"]]


class Steps:
    """Steps `[B, ...]` as tensors.

    Attributes:
        obs: Observations before the steps, a tree.
        actions: Module actions.
        next_obs: Observations after the steps, a tree.
    """

    def __init__(self, obs: Tree, actions: Any, next_obs: Tree) -> None:
        """Keep the columns."""
        self.obs, self.actions, self.next_obs = obs, actions, next_obs

    @property
    def columns(self) -> tuple[Tree, Any, Tree]:
        """Tuple of observations, actions and next observations."""
        return self.obs, self.actions, self.next_obs

    @property
    def num_steps(self) -> int:
        """Number of steps B."""
        return len(self.actions)

    def at(self, rows: NDArray[np.int64]) -> Steps:
        """Return the steps with the given indices."""
        index = torch.from_numpy(rows)
        return Steps(*map_tree(lambda leaf: leaf[index], self.columns))


def join_steps(parts: Sequence[Steps]) -> Steps:
    """Return the steps of all parts, concatenated."""
    return Steps(*map_tree(lambda *leaves: torch.cat(leaves), *(steps.columns for steps in parts)))


class Share:
    """Positions of the valid steps of one rollout among the valid steps of all rollouts."""

    def __init__(self, rollout: Rollout, rows: slice) -> None:
        """Keep the rollout and the rows of its steps, in the order of `rollout.valid_rows`."""
        self.rollout, self.rows = rollout, rows


def gathered(rollouts: Sequence[Rollout]) -> tuple[Steps, list[Share]]:
    """Return the valid steps of all rollouts, and a share for each rollout that has valid steps."""
    parts, shares, start = [], [], 0
    for rollout in rollouts:
        seen = rollout.transformed()
        count = int(np.count_nonzero(rollout.valid))
        if count:
            obs = map_tree(lambda column: column[:-1], seen.obs)
            parts.append([rollout.valid_rows(column) for column in (obs, rollout.actions, next_observations(seen))])
            shares.append(Share(rollout, slice(start, start + count)))
            start += count
    if not parts:
        return Steps(None, (), None), []
    columns = [
        map_tree(lambda *leaves: torch.from_numpy(np.concatenate(leaves)), *trees) for trees in zip(*parts, strict=True)
    ]
    return Steps(*columns), shares


def next_observations(rollout: Rollout) -> Tree:
    """Return the observation after each step, a tree of `[T, N, ...]`; at the end of an episode, the final one."""
    if not rollout.final_obs:
        return map_tree(lambda column: column[1:], rollout.obs)
    rows, envs = (np.array(part) for part in zip(*rollout.final_obs, strict=True))

    def replaced(column: NDArray[Any], *finals: NDArray[Any]) -> NDArray[Any]:
        column = column[1:].copy()
        column[rows, envs] = np.stack(finals)
        return column

    return map_tree(replaced, rollout.obs, *rollout.final_obs.values())


def encoder(space: spaces.Space[Any], config: ModelConfig, width: int) -> nn.Sequential:
    """Return a net that maps observations to features `[B, width]`."""
    body = Encoder(space, config.hiddens_for(space), config)
    return nn.Sequential(body, orthogonal(nn.Linear(body.num_outputs, width), 1.0))


def net_config(exploration: IntrinsicReward, name: str, config: Mapping[str, Any] | None) -> ModelConfig:
    """Return the settings of a net.

    Raises:
        ConfigError: A setting is unknown or has a wrong value.
    """
    for key in config or {}:
        if key not in NET_SETTINGS:
            raise ConfigError(
                f"exploration_config of {type(exploration).__name__}: {name} has no setting {key!r}. "
                f"{nearest(key, NET_SETTINGS)} The settings are {', '.join(NET_SETTINGS)}."
            )
    return ModelConfig.parse(config or {})


def at_least_1(exploration: IntrinsicReward, name: str, value: Any) -> int:
    """Return the value if it is an integer of at least 1.

    Raises:
        ConfigError: The value is not an integer, or is below 1.
    """
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be at least 1.")
    return value
