"""Explorations without envs, and an algorithm that samples and learns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral import PPOConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.ppo import PPO
from corral.data.episodes.rollout import Rollout
from corral.exploration import Exploration, RowDistribution, make_exploration
from corral.modules.inference import Inference

STATE = spaces.Box(-1.0, 1.0, (3,), np.float32)
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
FOUR = spaces.Discrete(4)


@dataclass(kw_only=True)
class SamplingConfig(PPOConfig):
    """Of `Sampling`, which takes any exploration."""

    ON_POLICY = False

    minibatch_size: int | None = None

    @property
    def algo_class(self) -> type[Algorithm]:
        return Sampling


class Sampling(PPO):
    """Samples a batch per iteration, and learns nothing from it; `rollouts` is the last batch."""

    rollouts: list[Rollout]

    def training_step(self) -> dict[str, dict[str, float]]:
        self.rollouts = self.sample(self.config.total_train_batch_size)
        return {"default_policy": {"total_loss": 0.0}}


class Explorer:
    """An exploration and the row that it chooses from."""

    def __init__(
        self,
        kind: Any,
        action_space: spaces.Space[Any] = FOUR,
        *,
        observation_space: spaces.Space[Any] = STATE,
        num_envs: int = 1,
        num_workers: int = 0,
        worker_index: int = 0,
        model_config: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = SamplingConfig(seed=0, model_config=model_config or {}, num_env_runners=num_workers)
        config.exploration(exploration_config={"type": kind, **settings})
        self.module = config.module_spec(observation_space, action_space).build()
        self.inference = Inference(self.module)
        rng = np.random.default_rng(0)
        self.exploration: Any = make_exploration(
            config,
            action_space,
            model=self.module,
            inference=self.inference,
            num_envs=num_envs,
            num_workers=num_workers,
            worker_index=worker_index,
            rng=rng,
        )
        self.row = RowDistribution(self.module.distribution, rng)
        self.num_envs = num_envs

    def choose(
        self, inputs: Any, *, obs: Any = None, timestep: int = 0, explore: bool = True
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return actions and log-likelihoods for the policy's outputs `[B, D]`."""
        self.row.inputs, self.row.obs = np.asarray(inputs, np.float32), obs
        actions, logp = self.exploration.get_exploration_action(
            action_distribution=self.row, timestep=timestep, explore=explore
        )
        return actions, logp


class Recorder(Exploration):
    """Notes the timestep and the switch of each row, and takes the first action.

    Args:
        log: Where to note it.
    """

    def __init__(self, action_space: spaces.Space[Any], *, log: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(action_space, **kwargs)
        self.log = [] if log is None else log

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        self.log.append((timestep, explore))
        return np.zeros(len(action_distribution.inputs), np.int64), None


def rollout_of(
    obs: Any, actions: Any, rewards: Any = 0.0, *, valid: Any = True, final_obs: dict[Any, Any] | None = None
) -> Rollout:
    """Return a rollout of columns: `obs` `[T + 1, N, ...]`, `actions` `[T, N, ...]`."""
    actions = np.asarray(actions)
    shape = actions.shape[:2]
    rollout = Rollout(
        {
            "obs": np.asarray(obs),
            "actions": actions,
            "rewards": np.broadcast_to(np.asarray(rewards, np.float64), shape).copy(),
            "terminated": np.zeros(shape, np.bool_),
            "truncated": np.zeros(shape, np.bool_),
            "valid": np.broadcast_to(np.asarray(valid), shape).copy(),
        },
        num_rows=shape[0],
    )
    rollout.final_obs = final_obs or {}
    rollout.num_env_steps = int(rollout.valid.sum())
    return rollout
