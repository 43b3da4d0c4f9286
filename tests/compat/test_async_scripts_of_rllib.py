"""Scripts for APPO and IMPALA in the manner of RLlib's tuned examples, each run for a few iterations."""

from __future__ import annotations

import pytest
from rllib_scripts import Run

PROCESS = ("--no-tune", "--num-env-runners=0", "--num-learners=0", "--stop-iters=2")
"""Options with which a script runs in one process."""

BEGIN = """
import numpy as np
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.examples.utils import add_rllib_example_script_args, run_rllib_example_script_experiment

parser = add_rllib_example_script_args(default_reward=450.0, default_timesteps=2000000)
parser.set_defaults(num_env_runners=2, num_envs_per_env_runner=4)
args = parser.parse_args()
kept = {}

class Watch(RLlibCallback):
    def on_algorithm_init(self, *, algorithm, metrics_logger, **kwargs):
        kept["weights"] = algorithm.get_weights()
        kept["native"] = algorithm.native.config

    def on_train_result(self, *, algorithm, result, metrics_logger, **kwargs):
        kept["now"] = algorithm.get_weights()

def check_learned(result, *module_ids, fewest=500):
    for module_id in module_ids:
        before, now = kept["weights"][module_id], kept["now"][module_id]
        assert sum(not np.array_equal(before[name], now[name]) for name in before) > len(before) / 2
        numbers = result["learners"][module_id]
        for name in ("total_loss", "entropy", "curr_entropy_coeff", "diff_num_grad_updates_vs_sampler_policy"):
            assert np.isfinite(numbers[name]), name
        assert numbers["num_module_steps_trained"] > 0
    assert result[NUM_ENV_STEPS_SAMPLED_LIFETIME] >= fewest and result["training_iteration"] == 2
    assert np.isfinite(result[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN]), result[ENV_RUNNER_RESULTS]
"""

FAST = ".reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=1000)"
END = "result = run_rllib_example_script_experiment(config, args)\n"


def test_cartpole_with_impala(run: Run) -> None:
    done = run(
        BEGIN
        + f"""
config = (
    IMPALAConfig()
    .environment("CartPole-v1")
    .learners(num_aggregator_actors_per_learner=1)
    .training(
        train_batch_size_per_learner=400,
        grad_clip=40.0,
        grad_clip_by="global_norm",
        lr=0.0005 * ((args.num_learners or 1) ** 0.5),
        vf_loss_coeff=0.05,
        entropy_coeff=[[0, 0.01], [100000, 0.0]],
    )
    .rl_module(model_config=DefaultModelConfig(vf_share_layers=True, fcnet_hiddens=[32]))
    .callbacks(Watch)
    {FAST}
)
{END}
native, numbers = kept["native"], result["learners"]["default_policy"]
assert (native.train_batch_size_per_learner, native.vf_loss_coeff, native.grad_clip) == (400, 0.05, 40.0)
assert (native.num_envs_per_env_runner, native.sample_async, native.num_env_runners) == (4, True, 0)
check_learned(result, "default_policy", fewest=2000)
assert numbers["mean_vf_loss"] > 0 and numbers["vf_loss"] > numbers["mean_vf_loss"]
assert 0.009 < numbers["curr_entropy_coeff"] < 0.01
""",
        *PROCESS,
    )
    assert done.stdout.splitlines()[-1] == "Stop criterion (training_iteration=2) fulfilled!"
    assert done.stdout.startswith("iter=0 R=")


@pytest.mark.slow
def test_multi_agent_cartpole_with_two_policies(run: Run) -> None:
    pytest.importorskip("ray")
    run(
        BEGIN
        + f"""
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from ray.tune.registry import register_env

register_env("multi_cart", lambda config: MultiAgentCartPole(config={{"num_agents": args.num_agents}}))
config = (
    APPOConfig()
    .environment("multi_cart")
    .training(use_kl_loss=True, kl_coeff=0.5, kl_target=0.02, target_network_update_freq=1)
    .rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={{f"p{{i}}": RLModuleSpec(model_config={{"fcnet_hiddens": [16]}}) for i in range(2)}}
        ),
        algorithm_config_overrides_per_module={{"p1": APPOConfig.overrides(lr=0.0001, clip_param=0.1)}},
    )
    .multi_agent(
        policy_mapping_fn=lambda agent_id, *_, **kwargs: f"p{{agent_id}}",
        policies={{f"p{{i}}" for i in range(args.num_agents)}},
    )
    .callbacks(Watch)
    {FAST}
)
{END}
native = kept["native"]
assert (native.use_kl_loss, native.kl_coeff, native.kl_target) == (True, 0.5, 0.02)
assert native.target_network_update_freq == 1
assert (native.for_module("p0").clip_param, native.for_module("p1").clip_param) == (0.4, 0.1)
check_learned(result, "p0", "p1")
rates = [result["learners"][name]["default_optimizer_learning_rate"] for name in ("p0", "p1")]
assert np.allclose(rates, [0.0005, 0.0001])
assert all(result["learners"][name]["mean_kl_loss"] >= 0 for name in ("p0", "p1"))
assert set(result[ENV_RUNNER_RESULTS]["module_episode_return_mean"]) == {{"p0", "p1"}}
""",
        *PROCESS,
        "--num-agents=2",
    )


@pytest.mark.slow
def test_a_curriculum_by_results_with_appo(run: Run) -> None:
    run(
        BEGIN
        + f"""
from functools import partial
import gymnasium as gym

class Corridor(gym.Env):
    def __init__(self, config):
        self.length = config["length"]
        self.observation_space, self.action_space = gym.spaces.Box(0, 99, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.place, self.steps = 0, 0
        return np.array([0.0], np.float32), {{}}

    def step(self, action):
        self.steps += 1
        self.place = max(0, self.place + (1 if action else -1))
        done = self.place >= self.length
        return np.array([self.place], np.float32), 1.0 if done else -0.1, done, self.steps >= 50, {{}}

def remake_env(env_runner, length):
    env_runner.config.environment(env_config={{"length": length}})
    env_runner.make_env()

class Curriculum(Watch):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        super().on_train_result(algorithm=algorithm, metrics_logger=metrics_logger, result=result)
        if result[ENV_RUNNER_RESULTS][EPISODE_RETURN_MEAN] > -5.0 and not kept.get("length"):
            kept["length"] = 5
            algorithm.env_runner_group.foreach_env_runner(func=partial(remake_env, length=5))
        kept["lengths"] = algorithm.env_runner_group.foreach_env_runner(
            func=lambda runner: [env.unwrapped.length for env in runner.env.unwrapped.envs]
        )

config = (
    APPOConfig()
    .environment(Corridor, env_config={{"length": 2}})
    .callbacks(Curriculum)
    {FAST}
)
{END}
assert kept["length"] == 5 and kept["lengths"] == [[5] * 4], kept["lengths"]
check_learned(result, "default_policy", fewest=2000)
""",
        *PROCESS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["APPO", "IMPALA"])
def test_two_learners_and_two_runners(run: Run, name: str) -> None:
    done = run(
        BEGIN
        + f"""
config = (
    {name}Config()
    .environment("CartPole-v1")
    .learners(max_requests_in_flight_per_learner=4)
    .training(train_batch_size_per_learner=200)
    .callbacks(Watch)
    {FAST}
)
{END}
native = kept["native"]
assert (native.num_learners, native.num_env_runners, native.total_train_batch_size) == (2, 2, 400)
check_learned(result, "default_policy", fewest=2000)
assert result["runner_group"]["by_runner"].keys() >= {{"1", "2"}}
""",
        "--no-tune",
        "--num-env-runners=2",
        "--num-learners=2",
        "--stop-iters=2",
    )
    assert done.stdout.splitlines()[-1] == "Stop criterion (training_iteration=2) fulfilled!"
