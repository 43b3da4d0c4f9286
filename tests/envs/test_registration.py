"""Envs that a script registers are known in the processes of its runners."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.envs.registration import WrapperSpec

from corral import PPOConfig


class Pole(CartPoleEnv):
    def __init__(self, length=0.5, **kwargs):
        super().__init__(**kwargs)
        self.length = length


class Poles(CartPoleVectorEnv):
    pass


class Halved(gym.RewardWrapper):
    def __init__(self, env, scale):
        super().__init__(env)
        self.scale = scale

    def reward(self, reward):
        return reward * self.scale


halved = WrapperSpec("Halved", "__main__:Halved", {"scale": 0.5})
gym.register("Pole-v0", Pole, max_episode_steps=7, kwargs={"length": 2.0}, vector_entry_point=Poles)
gym.register("Named-v0", "__main__:Pole", max_episode_steps=9, additional_wrappers=(halved,))
gym.register("Native-v0", "__main__:Pole", vector_entry_point="__main__:Poles")


def describe(sub_env):
    return sub_env.spec.max_episode_steps, sub_env.unwrapped.length, getattr(sub_env, "scale", None)


def evaluated(runner):
    evaluation = runner.config.for_evaluation()
    return gym.make(evaluation.env).spec.max_episode_steps


engine = sys.argv[1]
if engine == "ray":
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
for env, num_envs in (("Pole-v0", 1), ("Named-v0", 1), ("Native-v0", 2)):
    config = PPOConfig().environment(env).engine(engine).evaluation(evaluation_config={"env": "Named-v0"})
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=num_envs)
    config.training(train_batch_size_per_learner=20, minibatch_size=20, num_epochs=1)
    with config.build() as algo:
        result = algo.train()
        group = algo.env_runner_group
        class_names = group.foreach_env_runner(lambda runner: type(runner.env).__name__)
        shown = group.foreach_env(describe) if num_envs == 1 else class_names
        is_limited = num_envs == 1 and result["env_runners"]["episode_len_mean"] <= 9
        print(shown, is_limited, group.foreach_env_runner(evaluated))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def test_an_env_of_the_script_is_known_to_its_runners(engine: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script), engine], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[[(7, 2.0, None)]] True [9]",
        "[[(9, 0.5, 0.5)]] True [9]",
        "['Poles'] False [9]",
    ], done.stdout
