"""Ray Tune with algorithm classes and configs of RLlib; each script is a process of its own, with its own Ray."""

from __future__ import annotations

import pytest
from rllib_scripts import Run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

BEGINS = """
import ray
from ray import tune
from ray.tune.registry import get_trainable_cls
from ray.rllib.algorithms.ppo import PPO, PPOConfig

STOP = {"stop": {"training_iteration": 2}, "verbose": 0}
ray.init(address="local", num_cpus=4, include_dashboard=False)
"""


def test_a_tuner_takes_a_class_and_a_config(run: Run) -> None:
    pytest.importorskip("ray")
    script = """
config = get_trainable_cls("PPO").get_default_config().environment("CartPole-v1")
config.env_runners(num_env_runners=1).training(train_batch_size=256, num_epochs=1)
(result,) = tune.Tuner(config.algo_class, param_space=config, run_config=tune.RunConfig(**STOP)).fit()
print(result.error, result.metrics["training_iteration"], result.metrics["env_runners"]["episode_return_mean"] > 5)
"""
    assert "None 2 True" in run(BEGINS + script).stdout


def test_a_tuner_takes_a_name_and_a_dict_and_its_checkpoints_continue(run: Run) -> None:
    pytest.importorskip("ray")
    script = """
space = {"env": "CartPole-v1", "num_workers": 0, "train_batch_size": 128, "num_sgd_iter": 1}
space["lr"] = tune.grid_search([1e-3, 1e-4])
kept = tune.CheckpointConfig(checkpoint_at_end=True)
results = tune.Tuner("PPO", param_space=space, run_config=tune.RunConfig(**STOP, checkpoint_config=kept)).fit()
print(sorted(result.metrics["config"]["lr"] for result in results), results[0].metrics["episode_reward_mean"] > 5)
algo = PPO.from_checkpoint(results[0].checkpoint.path)
print("iteration", algo.iteration, algo.config.lr)
algo.stop()
"""
    printed = run(BEGINS + script).stdout
    assert "[0.0001, 0.001] True" in printed and "iteration 2 0.001" in printed


def test_workers_share_a_cpu_where_the_cluster_has_too_few(run: Run) -> None:
    pytest.importorskip("ray")
    script = """
import ray
from ray import tune
from ray.rllib.algorithms.ppo import PPO, PPOConfig

ray.init(address="local", num_cpus=2, include_dashboard=False)
config = PPOConfig().environment("CartPole-v1").training(train_batch_size=256, num_epochs=1)
print(PPO.default_resource_request(config.copy().env_runners(num_env_runners=1)).bundles)
print(PPO.default_resource_request(config).bundles)
stop = tune.RunConfig(stop={"training_iteration": 1}, verbose=0)
(result,) = tune.Tuner("PPO", param_space=config, run_config=stop).fit()
print(result.error, result.metrics["num_env_steps_sampled_lifetime"])
"""
    done = run(script)
    assert "[{'CPU': 1.0}, {'CPU': 1.0}]\n[{'CPU': 1.0}]\n" in done.stdout
    assert "None 256" in done.stdout
    assert "a trial asks for 3 CPUs, and the cluster has 2" in done.stderr
