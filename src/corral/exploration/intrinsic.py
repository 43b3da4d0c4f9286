"""Intrinsic rewards: what is new to a small net, or far from what was seen, is added to the env's rewards.

The nets live and learn in the algorithm's process, before anything else learns from the rollouts. Runners only choose
actions, by another exploration. What callbacks and results show of episodes are the env's own rewards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.core.tree import Tree, map_tree
from corral.errors import ConfigError, nearest
from corral.exploration.base import Delegating, RowDistribution
from corral.exploration.build import make_sub_exploration
from corral.exploration.sampling import not_negative
from corral.learners.learner_state import get_learner_state, set_learner_state
from corral.learners.optimizers import ModuleOptimizer
from corral.modules.module import ModelConfig
from corral.modules.networks import Encoder, num_outputs, orthogonal
from corral.modules.threads import num_threads_for, torch_threads

if TYPE_CHECKING:
    from corral.episodes.rollout import Rollout

FloatArray = NDArray[np.float64]

# Steps of one gradient step: more are cut, fewer wait. A step of 64 costs hardly more than one of 4, which is what
# algorithms with a replay buffer sample at once.
MINIBATCH_ROWS, MIN_ROWS = 256, 64
NET_SETTINGS = ("fcnet_hiddens", "fcnet_activation", "conv_filters")


class IntrinsicReward(Delegating, ABC):
    """Adds an intrinsic reward to the env's reward. A subclass defines `make_net`, `judge` and, to `train`, `errors`.

    Args:
        random_timesteps: Env steps at the beginning whose actions are drawn evenly from the action space.
        sub_exploration: The `exploration_config` by which actions are chosen; `None` is the algorithm's default.
    """

    def __init__(
        self,
        action_space: spaces.Space[Any],
        *,
        random_timesteps: int = 0,
        sub_exploration: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the settings."""
        super().__init__(action_space, **kwargs)
        self.random_timesteps = not_negative(self, "random_timesteps", random_timesteps)
        self.sub = make_sub_exploration(self, sub_exploration)
        self.lr = 0.0  # of nets that learn
        self._net: nn.Module | None = None  # made when it is first needed, which in a runner is never
        self._optimizers: dict[str, ModuleOptimizer] = {}
        self._num_threads: int | None = None
        self._waiting: list[Steps] = []  # that are too few for a gradient step

    @abstractmethod
    def make_net(self) -> nn.Module:
        """Return the net, all parts in one."""

    @abstractmethod
    def judge(self, steps: Steps, shares: Sequence[Share], timestep: int) -> tuple[FloatArray, dict[str, float]]:
        """Return the rewards `[B]` of steps, and numbers to report; learn from the steps.

        Args:
            steps: The valid steps of all rollouts.
            shares: Which of them are each rollout's.
            timestep: Env steps sampled so far.
        """

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        """Choose as the sub-exploration does, or evenly at the beginning."""
        if explore and timestep < self.random_timesteps:
            actions = action_distribution.random()
            return actions, action_distribution.random_logp(actions)
        return self.sub.get_exploration_action(
            action_distribution=action_distribution, timestep=timestep, explore=explore
        )

    def learn(self, rollouts: Sequence[Rollout], *, timestep: int) -> dict[str, float]:
        """Put rewards with the intrinsic ones added in the place of the rollouts' own."""
        learned = self.sub.learn(rollouts, timestep=timestep)
        steps, shares = gathered(rollouts)
        if not shares:
            return learned
        _ = self.net  # which is made now at the latest
        with torch_threads(self._num_threads):
            rewards, numbers = self.judge(steps, shares, timestep)
        for share in shares:
            column = share.rollout.rewards.copy()  # what came from another process may not be written to
            column[share.rollout.valid] += rewards[share.rows]
            share.rollout.rewards = column
        return {**learned, "intrinsic_reward_mean": float(rewards.mean()), **numbers}

    @property
    def net(self) -> nn.Module:
        """The net, with weights that the config's seed determines; what is trained of it gets an optimizer."""
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
        """Return the errors of what is trained, `[B]` each; of a net that does not learn there are none."""
        return ()

    def loss(self, *errors: Tensor) -> Tensor:
        """Return the loss of errors."""
        return errors[0].mean()

    def train(self, steps: Steps, timestep: int) -> NDArray[np.float32]:
        """Return the errors of steps, `[K, B]`, and learn from them; each is judged before it is learned from.

        A minibatch is one gradient step, in an order that seed and timestep determine. Fewer steps than make one wait
        for others.
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
        """Return the weights, what the optimizer has learned and what waits; nothing where no net was made."""
        state = super().get_state()
        if self._net is not None:
            state |= get_learner_state({"net": self._net}, self._optimizers)
            state["waiting"] = [map_tree(lambda leaf: leaf.numpy(), steps.columns) for steps in self._waiting]
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `get_state` returned.

        Raises:
            CheckpointError: It is of another net.
        """
        super().set_state(state)
        if "weights" in state:
            nets = {"net": self.net}
            set_learner_state(nets, self._optimizers, state)
            self._waiting = [Steps(*map_tree(torch.from_numpy, columns)) for columns in state["waiting"]]


class Steps:
    """Steps `[B, ...]` as tensors.

    Attributes:
        obs: What they started from, a tree.
        actions: Module actions.
        next_obs: What they led to, a tree.
    """

    def __init__(self, obs: Tree, actions: Any, next_obs: Tree) -> None:
        """Take the columns."""
        self.obs, self.actions, self.next_obs = obs, actions, next_obs

    @property
    def columns(self) -> tuple[Tree, Any, Tree]:
        """All three."""
        return self.obs, self.actions, self.next_obs

    @property
    def num_steps(self) -> int:
        """B."""
        return len(self.actions)

    def at(self, rows: NDArray[np.int64]) -> Steps:
        """Return some of the steps."""
        index = torch.from_numpy(rows)
        return Steps(*map_tree(lambda leaf: leaf[index], self.columns))


def join_steps(parts: Sequence[Steps]) -> Steps:
    """Return the steps of all parts."""
    return Steps(*map_tree(lambda *leaves: torch.cat(leaves), *(steps.columns for steps in parts)))


class Share:
    """Positions of the valid steps of a rollout among the valid steps of all."""

    def __init__(self, rollout: Rollout, rows: slice) -> None:
        """Take the rollout and the rows of its steps, in the order of `rollout.valid_rows`."""
        self.rollout, self.rows = rollout, rows


def gathered(rollouts: Sequence[Rollout]) -> tuple[Steps, list[Share]]:
    """Return the valid steps of rollouts, and whose they are; rollouts without any have no share."""
    parts, shares, start = [], [], 0
    for rollout in rollouts:
        count = int(np.count_nonzero(rollout.valid))
        if count:
            obs = map_tree(lambda column: column[:-1], rollout.obs)
            parts.append([rollout.valid_rows(column) for column in (obs, rollout.actions, next_observations(rollout))])
            shares.append(Share(rollout, slice(start, start + count)))
            start += count
    if not parts:
        return Steps(None, (), None), []
    columns = [
        map_tree(lambda *leaves: torch.from_numpy(np.concatenate(leaves)), *trees) for trees in zip(*parts, strict=True)
    ]
    return Steps(*columns), shares


def next_observations(rollout: Rollout) -> Tree:
    """Return what each step led to, a tree of `[T, N, ...]`: for the last of an episode its own final observation."""
    if not rollout.final_obs:
        return map_tree(lambda column: column[1:], rollout.obs)
    rows, envs = (np.array(part) for part in zip(*rollout.final_obs, strict=True))

    def replaced(column: NDArray[Any], *finals: NDArray[Any]) -> NDArray[Any]:
        column = column[1:].copy()
        column[rows, envs] = np.stack(finals)
        return column

    return map_tree(replaced, rollout.obs, *rollout.final_obs.values())


def encoder(space: spaces.Space[Any], config: ModelConfig, width: int) -> nn.Sequential:
    """Return a net from observations to `[B, width]`."""
    body = Encoder(space, list(config.fcnet_hiddens), config.fcnet_activation, config.conv_filters)
    features = config.fcnet_hiddens[-1] if config.fcnet_hiddens else num_outputs(body.parts)
    return nn.Sequential(body, orthogonal(nn.Linear(features, width), 1.0))


def net_config(exploration: IntrinsicReward, name: str, config: Mapping[str, Any] | None) -> ModelConfig:
    """Return the settings of a net.

    Raises:
        ConfigError: One is unknown or wrong.
    """
    for key in config or {}:
        if key not in NET_SETTINGS:
            raise ConfigError(
                f"exploration_config of {type(exploration).__name__}: {name} has no setting {key!r}. "
                f"{nearest(key, NET_SETTINGS)} It takes {', '.join(NET_SETTINGS)}."
            )
    return ModelConfig.parse(config or {})


def at_least_1(exploration: IntrinsicReward, name: str, value: Any) -> int:
    """Return a whole number above 0.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"exploration_config of {type(exploration).__name__}: {name}={value!r} must be at least 1.")
    return value
