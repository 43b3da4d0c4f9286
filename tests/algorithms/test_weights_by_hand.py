"""Weights that are changed by hand in the module of `get_module` act, learn and are saved from the next call on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from at_least import all_of
from corral import PPO, APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, evaluate_policy, load_policy
from corral.algorithms.algorithm import Algorithm

OBS = np.zeros((50, 4), np.float32)


def small(num_learners: int = 0, num_env_runners: int = 0) -> PPOConfig:
    """A config of CartPole, where always pushing to the right ends an episode after some 9 steps."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=4, num_env_runners=num_env_runners)
        .learners(num_learners=num_learners)
        .training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1, lr=1e-6)
        .evaluation(evaluation_duration=5, evaluation_config={"explore": False})
        .debugging(seed=0)
    )


def last_bias(module: Any) -> torch.Tensor:
    [bias] = [p for name, p in module.named_parameters() if p.shape == (2,) and "bias" in name]
    return bias


def no_grad(bias: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        bias.copy_(values)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "no_grad": no_grad,
    "data": lambda bias, values: bias.data.copy_(values),
    "numpy": lambda bias, values: np.copyto(bias.detach().numpy(), values.numpy()),
}


def push_right(algorithm: Algorithm, way: str = "no_grad") -> None:
    WAYS[way](last_bias(algorithm.get_module()), torch.tensor([-50.0, 50.0]))


def length(algorithm: Algorithm) -> float:
    return float(algorithm.evaluate()["env_runners"]["episode_len_mean"])


@pytest.mark.parametrize("way", WAYS)
def test_all_policies_get_weights_that_are_set_by_hand_at_once(way: str, tmp_path: Path) -> None:
    with small().build() as algorithm:
        module = algorithm.get_module()
        algorithm.train()
        assert length(algorithm) > 12 and not algorithm.compute_actions(OBS).all()
        WAYS[way](last_bias(module), torch.tensor([-50.0, 50.0]))  # the module of before
        assert length(algorithm) < 12
        WAYS[way](last_bias(module), torch.tensor([50.0, -50.0]))
        assert not algorithm.compute_actions(OBS).any()
        WAYS[way](last_bias(module), torch.tensor([-50.0, 50.0]))
        assert algorithm.env_runner is not None and algorithm.env_runner.sample(num_timesteps=20).actions.all()
        WAYS[way](last_bias(module), torch.tensor([50.0, -50.0]))
        assert evaluate_policy(algorithm, "CartPole-v1", episodes=2).episode_len_mean < 12
        assert not load_policy(algorithm.save(tmp_path / "saved")).batch(OBS).any()


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_the_next_iteration_samples_with_them(num_env_runners: int) -> None:
    actions: list[Any] = []
    config = small(num_env_runners=num_env_runners)
    with config.build() as algorithm:
        algorithm.train()
        push_right(algorithm)
        sampled = algorithm.env_runner_group.sample

        def noted(*args: Any, **settings: Any) -> Any:
            found = sampled(*args, **settings)
            actions.extend(rollout.actions for rollout in found)
            return found

        algorithm.env_runner_group.sample = noted  # type: ignore[method-assign]
        algorithm.train()
        assert actions and all(part.all() for part in actions)
        assert length(algorithm) < 12


@pytest.mark.parametrize("base", [IMPALAConfig, APPOConfig])
def test_algorithms_that_sample_ahead_act_and_learn_with_them(base: Any, tmp_path: Path) -> None:
    config = base().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    config.env_runners(rollout_fragment_length=8).training(train_batch_size_per_learner=32, lr=1e-6)
    config.reporting(min_sample_timesteps_per_iteration=64).debugging(seed=0)
    config.evaluation(evaluation_duration=5, evaluation_config={"explore": False})
    with config.build() as algorithm:
        algorithm.train()
        push_right(algorithm)
        assert length(algorithm) < 12 and all_of(rollout.actions.all() for rollout in algorithm.sample(32))
        algorithm.train()
        assert float(last_bias(algorithm.get_module())[1].detach()) == pytest.approx(50.0, abs=0.1)
        path = algorithm.save(tmp_path / "saved")
        assert load_policy(path).batch(OBS).all()
        given = algorithm.learner_group.get_weights()["default_policy"]
    with config.copy().rl_module(load_from=path).build() as loaded:
        assert loaded.compute_actions(OBS).all()
        if base is APPOConfig:
            target = loaded.target_weights["default_policy"]  # type: ignore[attr-defined]
            assert all_of(np.array_equal(target[name], value) for name, value in given.items())


@pytest.mark.slow
def test_learners_in_processes_have_them_too(tmp_path: Path) -> None:
    with small(num_learners=1).build() as algorithm:
        algorithm.train()
        push_right(algorithm)
        path = algorithm.save(tmp_path / "saved")
        assert load_policy(path).batch(OBS).all()
        algorithm.train()
        assert float(last_bias(algorithm.get_module())[1].detach()) == pytest.approx(50.0, abs=0.1)
        assert algorithm.compute_actions(OBS).all() and length(algorithm) < 12


def test_what_was_changed_by_a_callback_between_iterations_counts() -> None:
    def change(algorithm: Algorithm) -> None:
        if algorithm.training_iteration == 1:
            push_right(algorithm)

    with small().callbacks(on_train_result=change).build() as algorithm:
        algorithm.train()
        assert length(algorithm) < 12


def test_a_value_based_policy() -> None:
    config = DQNConfig().environment("CartPole-v1").training(num_steps_sampled_before_learning_starts=1000)
    with config.debugging(seed=0).build() as algorithm:
        module = algorithm.get_module()
        for first in (True, False):
            algorithm.evaluate()
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if not name.startswith("target"):
                        parameter.zero_()
                        if parameter.shape == (2,):
                            parameter[0 if first else 1] = 1.0
            assert set(algorithm.compute_actions(OBS, explore=False).tolist()) == {0 if first else 1}


def test_weights_that_nobody_changed_keep_their_version() -> None:
    versions = []
    for watches in (False, True):
        with small().build() as algorithm:
            for _ in range(2):
                if watches:
                    algorithm.get_module()
                algorithm.train()
                algorithm.evaluate()
                algorithm.compute_actions(OBS)
            versions.append(algorithm.learner_group.weights_version)
    assert versions[0] == versions[1] == 2


def test_a_restored_algorithm_has_no_changes(tmp_path: Path) -> None:
    with small().build() as algorithm:
        algorithm.get_module()
        algorithm.train()
        path = algorithm.save(tmp_path / "saved")
        push_right(algorithm)
        algorithm.restore_from_path(path)
        assert algorithm.learner_group.weights_version == 1
        algorithm.evaluate()
        assert algorithm.learner_group.weights_version == 1
    with PPO.from_checkpoint(path) as restored:
        assert restored.learner_group.weights_version == 1
