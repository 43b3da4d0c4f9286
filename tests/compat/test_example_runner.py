"""The options of example scripts and the experiment in which they end."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

import pytest
from rllib_scripts import Run

from corral import PPOConfig
from corral.compat.rllib.examples import (
    add_rllib_example_script_args,
    check_learning_achieved,
    run_rllib_example_script_experiment,
    should_stop,
)
from corral.compat.rllib.results import add_rllib_keys


@pytest.fixture(autouse=True)
def _keep_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the Ray that other tests of this process may have started: experiments end it."""
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "shutdown", lambda: None)


def config() -> PPOConfig:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=4)
        .training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)
        .debugging(seed=0)
    )


def test_the_options_have_the_defaults_of_rllib() -> None:
    parser = ArgumentParser()
    parser.add_argument("--own", type=int, default=3)
    assert add_rllib_example_script_args(parser, default_reward=450.0, default_timesteps=300000) is parser
    args = parser.parse_args(["--num-env-runners=1", "--evaluation-duration=auto", "--no-tune"])
    assert (args.own, args.stop_reward, args.stop_timesteps, args.stop_iters) == (3, 450.0, 300000, 200)
    assert (args.algo, args.framework, args.num_agents, args.num_cpus, args.verbose) == ("PPO", "torch", 0, 0, 2)
    assert (args.num_env_runners, args.num_learners, args.evaluation_duration) == (1, None, "auto")
    assert add_rllib_example_script_args().parse_args([]).stop_reward == 100.0


def test_training_stops_at_the_first_criterion_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    args = add_rllib_example_script_args().parse_args(["--no-tune", "--stop-iters=2", "--stop-reward=1e9"])
    result = run_rllib_example_script_experiment(config(), args)
    lines = capsys.readouterr().out.splitlines()  # of a Ray that another test started, too
    first, second, last = [line for line in lines if line.startswith(("iter=", "Stop "))]
    assert first.startswith("iter=0 R=")
    assert second == f"iter=1 R={result['env_runners']['episode_return_mean']}"
    assert last == "Stop criterion (training_iteration=2) fulfilled!"
    assert result["training_iteration"] == 2


def test_a_return_or_a_number_of_steps_stops_too(capsys: pytest.CaptureFixture[str]) -> None:
    args = add_rllib_example_script_args(default_reward=5).parse_args(["--no-tune"])
    run_rllib_example_script_experiment(config(), args)
    assert "Stop criterion (env_runners/episode_return_mean=5) fulfilled!" in capsys.readouterr().out
    result = run_rllib_example_script_experiment(config(), args, stop={"num_env_steps_sampled_lifetime": 300})
    assert (result["training_iteration"], result["num_env_steps_sampled_lifetime"] >= 300) == (2, True)
    assert "iter=1 " in capsys.readouterr().out


def test_options_change_the_config_unless_it_is_kept() -> None:
    words = ["--no-tune", "--stop-iters=1", "--num-envs-per-env-runner=2", "--evaluation-interval=1"]
    args = add_rllib_example_script_args().parse_args([*words, "--evaluation-duration=3", "--log-level=WARN"])
    kept, changed = config(), config()
    run_rllib_example_script_experiment(kept, args, keep_config=True)
    result = run_rllib_example_script_experiment(changed, args)
    assert (kept.num_envs_per_env_runner, kept.evaluation_interval) == (4, config().evaluation_interval)
    assert (changed.num_envs_per_env_runner, changed.evaluation_interval) == (2, 1)
    assert changed.num_env_runners == 0
    assert changed.log_level == "WARNING"
    assert result["evaluation"]["env_runners"]["num_episodes"] == 3


def test_a_script_may_lack_options_and_set_others_to_none() -> None:
    from argparse import Namespace

    result = run_rllib_example_script_experiment(config(), Namespace(no_tune=True, stop_iters=1, env="Acrobot-v1"))
    assert result["training_iteration"] == 1


def test_as_test_fails_if_the_return_is_not_reached(capsys: pytest.CaptureFixture[str]) -> None:
    args = add_rllib_example_script_args().parse_args(["--no-tune", "--as-test", "--stop-iters=1"])
    with pytest.raises(ValueError, match=r"`env_runners/episode_return_mean` of 1000.* not reached! Best value"):
        run_rllib_example_script_experiment(config(), args, success_metric={"env_runners/episode_return_mean": 1000.0})
    run_rllib_example_script_experiment(config(), args, success_metric={"env_runners/episode_return_mean": 5.0})
    assert "`env_runners/episode_return_mean` of 5.0 reached! ok" in capsys.readouterr().out


@pytest.mark.slow
def test_without_ray_training_runs_in_this_process(run: Run) -> None:
    script = """
import ray
from ray import tune
from ray.tune.registry import get_trainable_cls, register_env, _global_registry, ENV_CREATOR
from ray.tune.result import TRAINING_ITERATION
from ray.rllib.utils.test_utils import add_rllib_example_script_args, run_rllib_example_script_experiment
from ray.rllib.examples.utils import run_rllib_example_script_experiment as same
from corral import PPOConfig

assert same is run_rllib_example_script_experiment and "stub" in ray.init.__module__
args = add_rllib_example_script_args(default_iters=1).parse_args()
config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=256, minibatch_size=128)
ray.init(num_cpus=4)
assert ray.is_initialized() and ray.get(ray.put(3)) == 3
register_env("own", lambda config: 7)
assert _global_registry.get(ENV_CREATOR, "own")({}) == 7
result = run_rllib_example_script_experiment(config, args, stop={TRAINING_ITERATION: 1})
assert result[TRAINING_ITERATION] == 1 and not ray.is_initialized()
tune.grid_search([1, 2])
"""
    done = run(script, with_ray=False, code=1)
    assert "Stop criterion (training_iteration=1) fulfilled!" in done.stdout
    assert "Ray is not installed, so training runs without Tune" in done.stderr
    assert "ray.tune.grid_search needs Ray, which is not installed: pip install 'corral[rllib]'" in done.stderr


def test_values_that_are_missing_or_nan_stop_nothing() -> None:
    result: dict[str, Any] = {"env_runners": {"episode_return_mean": float("nan")}, "config": {}}
    assert not should_stop({"env_runners/episode_return_mean": 1, "env_runners/none/here": 1, "config": 0}, result)
    result["env_runners"]["episode_return_mean"] = 1.0
    assert should_stop({"env_runners/episode_return_mean": 1}, result)


def test_learning_is_checked_over_all_trials() -> None:
    pandas = pytest.importorskip("pandas")

    class Grid:
        def get_dataframe(self) -> Any:
            return pandas.DataFrame({"env_runners/episode_return_mean": [10.0, 30.0]})

    check_learning_achieved(Grid(), 30.0)
    with pytest.raises(ValueError, match="did not reach 31"):
        check_learning_achieved(Grid(), 31.0)


def test_an_option_of_a_script_takes_the_place_of_one_that_later_versions_have() -> None:
    parser = add_rllib_example_script_args()
    parser.add_argument("--num-envs-per-env-runner", type=int, default=3)
    assert parser.parse_args([]).num_envs_per_env_runner == 3


def test_early_means_meet_no_criterion_under_any_name() -> None:
    runners = {"episode_return_mean": 9.0, "num_episodes_lifetime": 3}
    result = add_rllib_keys({"env_runners": runners, "early_means": ["env_runners/episode_return_mean"]})
    names = ["env_runners/episode_return_mean", "env_runners/episode_reward_mean", "episode_reward_mean"]
    names += ["sampler_results/episode_return_mean", "env_runners/agent_episode_returns_mean/default_agent"]
    assert {*names} <= {*result["early_means"]}
    for name in names:
        assert not should_stop({name: 5.0}, result)
    assert should_stop({"env_runners/num_episodes_lifetime": 3}, result)
    assert should_stop({names[0]: 5.0}, {**result, "early_means": []})
    of_agents = {"env_runners": {"module_episode_return_mean": {"main": 9.0}, "agent_episode_return_mean": {"a": 1.0}}}
    early = ["env_runners/module_episode_return_mean/main"]
    found = add_rllib_keys({**of_agents, "early_means": early})["early_means"]
    assert {"policy_reward_mean/main", "env_runners/module_episode_returns_mean/main"} <= {*found}
    assert not any("agent_episode" in name for name in found)
