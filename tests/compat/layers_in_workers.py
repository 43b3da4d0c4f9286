"""Each layer of RLlib's interface with a runner in another process; the argument is the engine, "process" or "ray".

Prints the name of each layer that holds. Classes and functions are the script's own, as users write them.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.tune.registry import register_env

ENGINE = sys.argv[1]
register_env("short", lambda config: gym.make("CartPole-v1", max_episode_steps=config.get("limit", 20)))
register_env("pair", lambda config: make_multi_agent("CartPole-v1")({"num_agents": 2}))


class WhereEpisodesEnd(RLlibCallback):
    def on_episode_end(self, *, episode: Any, metrics_logger: Any, **kwargs: Any) -> None:
        metrics_logger.log_value("pid", os.getpid(), reduce="max", window=1)
        metrics_logger.log_value("longest", len(episode), reduce="max", window=1)


class Net(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        self.policy, self.values = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy(batch[Columns.OBS])}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return self.values(batch[Columns.OBS]).squeeze(-1)


class LogsSeven(PPOTorchLearner):
    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        self.metrics.log_value((module_id, "seven"), 7.0)
        return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)


class Zeros(ConnectorV2):
    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(at_indices=-1, new_data=np.zeros(4, np.float32))
        return batch


class CountsSteps(PPO):
    def training_step(self) -> None:
        super().training_step()
        self.metrics.log_value("own_steps", 1, reduce="sum")


def config(env: str = "short", **env_config: Any) -> PPOConfig:
    found = (
        PPOConfig().environment(env, env_config=env_config).env_runners(num_env_runners=1).callbacks(WhereEpisodesEnd)
    )
    return found.training(train_batch_size=120, minibatch_size=60, num_epochs=1)


@contextmanager
def trained(settings: PPOConfig) -> Iterator[tuple[Any, dict[str, Any]]]:
    algo = settings.build()
    try:
        algo.train()
        result = algo.train()
        assert result["engine"] == ENGINE and result["env_runners"]["pid"] != os.getpid()
        yield algo, result
    finally:
        algo.stop()


def registered_envs_and_callbacks() -> None:
    with trained(config(limit=6)) as (_, result):
        assert result["env_runners"]["longest"] == 6


def modules() -> None:
    with trained(config().rl_module(rl_module_spec=RLModuleSpec(Net))) as (algo, _):
        assert isinstance(algo.get_module(), Net)


def learner_classes() -> None:
    with trained(config().training(learner_class=LogsSeven)) as (_, result):
        assert result["learners"]["default_policy"]["seven"] == 7.0


def connectors() -> None:
    settings = config().env_runners(env_to_module_connector=lambda env, spaces, device: Zeros())
    with trained(settings) as (algo, _):
        for episodes in algo.env_runner_group.foreach_env_runner(lambda runner: runner.sample(num_timesteps=5)):
            assert all(not episode.get_observations().any() for episode in episodes)


def several_agents() -> None:
    settings = config("pair").multi_agent(
        policies={"left", "right"}, policy_mapping_fn=lambda agent_id, *args, **kwargs: ("left", "right")[agent_id]
    )
    with trained(settings) as (_, result):
        assert {"left", "right"} <= result["learners"].keys()


def own_algorithms() -> None:
    settings = config()
    settings.algo_class = CountsSteps
    with trained(settings) as (_, result):
        assert result["own_steps"] >= 1


def evaluation() -> None:
    settings = config().evaluation(
        evaluation_interval=1,
        evaluation_num_env_runners=1,
        evaluation_duration=3,
        evaluation_config={"env_config": {"limit": 5}},
    )
    with trained(settings) as (_, result):
        found = result["evaluation"]["env_runners"]
        assert (
            found["pid"] not in (os.getpid(), result["env_runners"]["pid"])
            and found["longest"] == 5 < result["env_runners"]["longest"]
        )


def checkpoints() -> None:
    with trained(config()) as (algo, _):
        path = algo.save().checkpoint.path
        with PPO.from_checkpoint(path) as again:
            again.train()
            assert again.iteration == 3


def curricula() -> None:
    def shorten(runner: Any) -> None:
        runner.config.environment(env_config={"limit": 4})
        runner.make_env()

    with trained(config()) as (algo, _):
        algo.env_runner_group.foreach_env_runner(shorten)
        algo.train()
        assert algo.train()["env_runners"]["longest"] == 4


LAYERS: tuple[Callable[[], None], ...] = (
    *(registered_envs_and_callbacks, modules, learner_classes, connectors, several_agents, own_algorithms),
    *(evaluation, checkpoints, curricula),
)

if __name__ == "__main__":
    if ENGINE == "ray":
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    for layer in LAYERS:
        layer()
        print("holds:", layer.__name__, flush=True)
