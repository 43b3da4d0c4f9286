"""One client that plays one env gives a run, to the bit, what the same env gives it that the runner steps itself."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from simulators import address_of, runner_of

from corral import DQNConfig, ExternalEnv, PPOConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.core.tree import map_tree
from corral.data.episodes.rollout import Rollout
from corral.runners.serving.client import MultiAgentPolicyClient, drive
from random_agents import RandomAgents

ENV = {"seed": 3, "num_kinds": 2}


def module_of(agent: str, episode: Any) -> str:
    return "odd" if agent in ("a1", "a3") else "even"


def configs(algo: Any, **model_config: Any) -> list[AlgorithmConfig]:
    """Return a config with the env, and one in which a client plays it."""
    env = RandomAgents(ENV)
    both = {"observation_spaces": env.observation_spaces, "action_spaces": env.action_spaces}
    found = []
    for which, env_config in ((RandomAgents, ENV), (ExternalEnv, {"address": "127.0.0.1:0", **both})):
        config = algo().environment(which, env_config=env_config).env_runners(num_envs_per_env_runner=1)
        config.multi_agent(policies={"even", "odd"}, policy_mapping_fn=module_of)
        found.append(config.rl_module(model_config={"fcnet_hiddens": [8], **model_config}).debugging(seed=0))
    return found


def play_in_thread(address: str) -> None:
    def play() -> None:
        with MultiAgentPolicyClient(address) as client:
            drive(client, [RandomAgents(ENV)])

    threading.Thread(target=play, daemon=True).start()


def columns_by_agent(rollouts: list[Rollout]) -> dict[Any, list[Any]]:
    """Return the columns of all steps, and the next observations, of each agent in the order of time."""
    found: dict[Any, list[Any]] = {}
    for rollout in rollouts:
        for module_id, part in rollout.by_module().items():
            for t, lane in np.argwhere(part.valid).tolist():
                step = {
                    name: map_tree(lambda leaf, t=t, lane=lane: leaf[t, lane].tolist(), column)
                    for name, column in part.columns.items()
                    if name != "row_times_s"
                }
                step["next_obs"] = part.obs[t + 1, lane].tolist()
                found.setdefault((module_id, part.lane_agents[lane]), []).append(step)  # type: ignore[attr-defined]
    return found


NOT_COMPARED = ("time", "_sec", "clients", "throughput", "bottleneck", "date", "pid", "perf", "memory", "/config/env")


def compared(value: Any, path: str = "") -> Any:
    """Return a result without what depends on clocks, or on who steps the env."""
    if not isinstance(value, dict):
        return repr(value)  # NaN is equal to NaN
    paths = {key: f"{path}/{key}" for key in value}
    return {
        key: compared(part, paths[key])
        for key, part in value.items()
        if not any(word in paths[key] for word in NOT_COMPARED)
    }


@pytest.mark.parametrize("model_config", [{}, {"use_lstm": True}])
def test_columns_episodes_and_metrics_are_the_same(model_config: Any) -> None:
    found = []
    for config in configs(PPOConfig, **model_config):
        with runner_of(config) as runner:
            if config.env is ExternalEnv:
                play_in_thread(address_of(runner))
            rollouts = [runner.sample(num_timesteps=num_timesteps) for num_timesteps in (40, 1, 60)]
            episodes: list[Any] = [episode for rollout in rollouts for episode in rollout]
            found.append(
                (
                    [(rollout.num_env_steps, rollout.num_agent_steps) for rollout in rollouts],  # type: ignore[attr-defined]
                    columns_by_agent(rollouts),
                    [(len(one), one.get_return(), one.get_agent_returns()) for one in episodes],
                    compared(runner.metrics.reduce()),
                )
            )
    assert len(found[0][1]) == 4 and len(found[0][2]) > 5
    for ordinary, of_client in zip(*found, strict=True):
        assert ordinary == of_client


@pytest.mark.parametrize(
    ("algo", "training"),
    [
        (PPOConfig, {"train_batch_size_per_learner": 64, "num_epochs": 2, "minibatch_size": 32}),
        (
            DQNConfig,
            {
                "num_steps_sampled_before_learning_starts": 30,
                "train_batch_size_per_learner": 16,
                "n_step": 3,
                "replay_buffer_config": {"type": "prioritized", "capacity": 1000},
            },
        ),
    ],
)
def test_results_of_training_are_the_same(algo: Any, training: Any) -> None:
    found = []
    for config in configs(algo):
        config.training(**training)
        if algo is DQNConfig:
            config.reporting(min_sample_timesteps_per_iteration=60)
        with config.build() as algorithm:
            if config.env is ExternalEnv:
                play_in_thread(algorithm.env_runner.env.server.address)  # type: ignore[union-attr]
            found.append([compared(algorithm.train()) for _ in range(3)])
    assert found[0] == found[1]
    assert "total_loss" in found[0][2]["learners"]["even"]
