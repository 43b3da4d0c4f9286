"""What a custom exploration may count on: the timestep, the switch, state and metrics, and errors in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from explorers import Explorer, Recorder, SamplingConfig

from at_least import all_of
from corral import DQNConfig, PPOConfig
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError, CorralError
from corral.exploration import BUILT_IN, Exploration, RowDistribution, exploration_class
from corral.exploration.epsilon import EpsilonGreedy
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv, IdentityEnv
from random_agents import RandomAgents


def config_of(kind: Any, env: Any = IdentityEnv, **settings: Any) -> SamplingConfig:
    config = SamplingConfig().environment(env).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=3, rollout_fragment_length=10)
    config.training(train_batch_size_per_learner=30)
    return config.exploration(exploration_config={"type": kind, **settings})


def box_config(kind: Any, **settings: Any) -> SamplingConfig:
    return config_of(kind, **settings).environment(env_config={"space": "box", "episode_length": 4})


# Custom types.


class AlwaysThird(Exploration):
    """Takes one action, as a tensor, with a likelihood that is a tensor too."""

    def __init__(self, *args: Any, action: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.action = action

    def get_exploration_action(
        self, *, action_distribution: RowDistribution, timestep: int, explore: bool = True
    ) -> tuple[Any, Any]:
        num_rows = len(action_distribution.inputs)
        return torch.full((num_rows,), self.action), torch.full((num_rows,), -0.5)


class LazyEpsilon(EpsilonGreedy):
    """A built-in type with a setting more."""

    def __init__(self, *args: Any, factor: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def epsilons(self, timestep: int, num_envs: int) -> Any:
        return self.factor * super().epsilons(timestep, num_envs)


@pytest.mark.parametrize(
    "kind", [AlwaysThird, f"{__name__}:AlwaysThird", f"{__name__}.AlwaysThird"], ids=["class", "colon", "dot"]
)
def test_a_custom_type_by_class_or_import_path(kind: Any) -> None:
    with config_of(kind, action=2).build() as algo:
        algo.train()
        for rollout in algo.rollouts:  # type: ignore[attr-defined]
            assert np.all(rollout.actions == 2)
            assert np.all(rollout.logp == -0.5)
        assert np.all(algo.compute_actions(np.zeros(5, np.int64)) == 2)
        assert algo.compute_single_action(0) == 2


def test_ppo_learns_from_the_likelihood_that_a_type_gives() -> None:
    config = PPOConfig().environment(IdentityEnv).exploration(exploration_config={"type": AlwaysThird})
    seen: list[Any] = []
    config.training(train_batch_size_per_learner=256).debugging(seed=0)
    config.callbacks(on_learn_on_batch=lambda train_batch: seen.append(train_batch["logp"]))
    with config.build() as algo:
        assert np.isfinite(algo.train()["learners"]["default_policy"]["policy_loss"])
    assert np.all(np.asarray(seen[0]) == -0.5)


def test_a_subclass_of_a_built_in_type_takes_its_settings_too() -> None:
    explorer = Explorer(LazyEpsilon, epsilon_schedule=0.8, factor=0.25)
    assert explorer.exploration.get_metrics(0) == {"epsilon": 0.2}
    values = np.tile([0.0, 0.1, 0.3, 0.2], (20_000, 1))
    assert np.mean(explorer.choose(values)[0] != 2) == pytest.approx(0.2 * 0.75, abs=0.02)


# The timestep.


def log_of(algo: Algorithm) -> list[int]:
    """Return the timesteps that the embedded runner's exploration saw, and forget them."""
    exploration: Any = algo.env_runner.exploration  # type: ignore[union-attr]
    log = [timestep for timestep, _ in exploration.log]
    exploration.log.clear()
    return log


def expected_log(rollouts: list[Any], before: int) -> list[int]:
    """Return the env steps sampled before each row."""
    steps = np.concatenate([rollout.valid.sum(1) for rollout in rollouts])
    return [before, *(before + np.cumsum(steps)[:-1]).tolist()]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_the_timestep_counts_env_steps_exactly(mode: str) -> None:
    config = config_of(Recorder, CountingEnv).environment(env_config={"stagger": True}, disable_env_checking=True)
    with config.env_runners(autoreset_mode=mode).build() as algo:
        for _ in range(4):
            before = algo.num_env_steps_sampled_lifetime
            algo.train()
            assert log_of(algo) == expected_log(algo.rollouts, before)  # type: ignore[attr-defined]
        # A sample that the user takes continues from there, and does not count.
        algo.env_runner.sample(num_timesteps=6)  # type: ignore[union-attr]
        assert log_of(algo)[0] == algo.num_env_steps_sampled_lifetime
        before = algo.num_env_steps_sampled_lifetime
        algo.train()
        assert log_of(algo)[0] == before
        algo.compute_actions(np.zeros((2, 2), np.float32))
        assert algo.exploration.log == [(algo.num_env_steps_sampled_lifetime, True)]  # type: ignore[attr-defined]


class Ending(EpsilonGreedy):
    """Notes the timestep at the end of each rollout."""

    ends: ClassVar[list[tuple[int, int]]] = []

    def end_sample(self, rollout: Rollout, *, timestep: int, explore: bool) -> None:
        self.ends.append((timestep, rollout.num_env_steps))


def test_a_rollout_ends_at_the_timestep_after_its_steps() -> None:
    Ending.ends.clear()
    with config_of(Ending, CountingEnv).build() as algo:
        for _ in range(3):
            algo.train()
    timesteps, num_steps = zip(*Ending.ends, strict=True)
    assert list(timesteps) == np.cumsum(num_steps).tolist()


def test_rows_that_only_reset_are_no_steps_of_several_agents() -> None:
    config = config_of(Recorder, RandomAgents).environment(env_config={"together": True}, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=1).multi_agent(policies=["shared"])
    runner = EnvRunner(config.freeze())
    rollout = runner.sample(num_timesteps=60)
    assert rollout.num_rows > rollout.num_env_steps == 60
    exploration: Any = runner.actors["shared"].exploration
    assert [timestep for timestep, _ in exploration.log] == list(range(60))


def test_the_timestep_continues_over_the_rounds_of_an_iteration() -> None:
    config = config_of(Recorder, CountingEnv).env_runners(rollout_fragment_length=2)
    with config.build() as algo:
        algo.train()
        assert len(algo.rollouts) > 3  # type: ignore[attr-defined]
        # A row of resets only is in the log, and takes no step.
        assert log_of(algo) == expected_log(algo.rollouts, 0)  # type: ignore[attr-defined]


def test_the_timestep_continues_from_a_checkpoint(tmp_path: Path) -> None:
    with config_of(Recorder, CountingEnv).build() as algo, config_of(Recorder, CountingEnv).build() as other:
        algo.train()
        other.restore_from_path(algo.save(tmp_path / "checkpoint"))
        other.train()
        assert algo.num_env_steps_sampled_lifetime == 30
        assert log_of(other)[0] == 30
        assert other.num_env_steps_sampled_lifetime == 60


def test_two_runners_estimate_what_the_other_does() -> None:
    config = config_of(Recorder, CountingEnv).engine("local")
    config.env_runners(num_env_runners=2, rollout_fragment_length=5)
    with config.build() as algo:
        expected: dict[int, list[int]] = {1: [], 2: []}
        sampled = 0
        for _ in range(3):
            algo.train()
            rollouts = algo.rollouts  # type: ignore[attr-defined]
            for pair in zip(rollouts[::2], rollouts[1::2], strict=True):  # the two of a round
                for rollout in pair:
                    own = np.cumsum([0, *rollout.valid.sum(1)[:-1]])
                    expected[rollout.worker_index] += (sampled + 2 * own).tolist()
                sampled += sum(rollout.num_env_steps for rollout in pair)
        assert algo.num_env_steps_sampled_lifetime == sampled >= 90
        logs = algo.env_runner_group.foreach_env_runner(lambda runner: runner.exploration.log)
        assert {i: [timestep for timestep, _ in log] for i, log in enumerate(logs, 1)} == expected


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_a_runner_that_takes_the_place_of_a_dead_one_knows_the_timestep(engine: str) -> None:
    config = config_of(Recorder, CountingEnv).env_runners(num_env_runners=1).engine(engine)
    config.fault_tolerance(delay_between_env_runner_restarts_s=0.0)
    with config.build() as algo:
        algo.train()
        algo.train()
        [runner] = algo.env_runner_group._runners.values()
        runner.handle.kill()
        before = algo.num_env_steps_sampled_lifetime
        assert before == 60
        algo.train()
        [log] = algo.env_runner_group.foreach_env_runner(lambda runner: runner.exploration.log)
        assert runner.counts.num_restarts == 1
        assert log[0] == (60, True)
        assert len(log) == 3 * 30 / 6 - 2  # as many rows as 30 steps of 3 envs took it, and none of the dead one's


# The switch.


@pytest.fixture
def runner() -> Iterator[EnvRunner]:
    made = EnvRunner(config_of(Recorder, CountingEnv).exploration(explore=False).freeze())
    yield made
    made.stop()


def switches(runner: EnvRunner) -> set[bool]:
    exploration: Any = runner.exploration
    found = {explore for _, explore in exploration.log}
    exploration.log.clear()
    return found


def test_a_call_overrides_the_config(runner: EnvRunner) -> None:
    runner.sample(num_timesteps=6)
    assert switches(runner) == {False}
    runner.sample(num_timesteps=6, explore=True)
    assert switches(runner) == {True}
    runner.sample(num_timesteps=6)
    assert switches(runner) == {False}
    runner.sample(num_timesteps=6, explore=True, random_actions=True)
    assert switches(runner) == set()


def test_evaluation_may_switch_it_off() -> None:
    config = config_of(Recorder, CountingEnv).evaluation(evaluation_config={"explore": False}).freeze()
    for made, expected in ((config, {True}), (config.for_evaluation(), {False})):
        runner = EnvRunner(made)
        runner.sample(num_timesteps=6)
        assert switches(runner) == expected
        runner.stop()


def test_compute_actions_asks_the_config_unless_it_is_told() -> None:
    for default in (True, False):
        with config_of(Recorder).exploration(explore=default).build() as algo:
            for explore in (None, True, False):
                algo.compute_actions(np.zeros(2, np.int64), explore=explore)
                algo.compute_single_action(0, explore=explore)
            found = [explore for _, explore in algo.exploration.log]  # type: ignore[attr-defined]
            assert found == [default, default, True, True, False, False]


DISCRETE_TYPES = [name for name in BUILT_IN if "Noise" not in name or name == "ParameterNoise"]


@pytest.mark.parametrize("kind", BUILT_IN)
def test_no_type_explores_when_told_not_to(kind: str) -> None:
    config = (config_of if kind in DISCRETE_TYPES else box_config)(kind)
    with config.build() as algo:
        algo.train()
        obs = np.stack([algo.env_runner.env.single_observation_space.sample()] * 50)  # type: ignore[union-attr]
        first = algo.compute_actions(obs, explore=False)
        assert first == pytest.approx(np.broadcast_to(first[0], first.shape), abs=1e-5)
        assert np.array_equal(algo.compute_actions(obs, explore=False), first)
        if kind != "UpperConfidenceBound":  # which draws nothing
            explored = np.stack([algo.compute_actions(obs, explore=True) for _ in range(2)])
            assert np.abs(explored - first).max() > 1e-3


# State and metrics.

METRICS = {
    "EpsilonGreedy": "epsilon",
    "PerWorkerEpsilonGreedy": "epsilon",
    "SoftQ": "temperature",
    "GaussianNoise": "noise_scale",
    "PerWorkerGaussianNoise": "noise_scale",
    "OrnsteinUhlenbeckNoise": "noise_scale",
    "PerWorkerOrnsteinUhlenbeckNoise": "noise_scale",
    "ParameterNoise": "parameter_noise_stddev",
}
LEARNED = {
    "Curiosity": {"intrinsic_reward_mean", "forward_loss", "inverse_loss"},
    "RND": {"intrinsic_reward_mean", "distillation_loss"},
    "RE3": {"intrinsic_reward_mean", "re3_beta", "neighbour_distance_mean"},
    "ThompsonSampling": {"bandit_squared_error"},
    "UpperConfidenceBound": {"bandit_squared_error"},
}


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_result_has_the_same_keys(kind: str) -> None:
    config = (config_of if kind in DISCRETE_TYPES else box_config)(kind)
    with config.build() as algo:
        results = [algo.train() for _ in range(3)]
    for part in ("env_runners", "exploration"):
        first, *others = [set(result.get(part, {})) for result in results]
        assert all_of(other == first for other in others)
    if kind in METRICS:
        assert all(np.isfinite(result["env_runners"][METRICS[kind]]) for result in results)
    assert set(results[0].get("exploration", {})) == LEARNED.get(kind, set())


def test_epsilon_is_in_the_result() -> None:
    config = config_of("EpsilonGreedy", final_epsilon=0.0, epsilon_timesteps=60)
    with config.build() as algo:
        assert [algo.train()["env_runners"]["epsilon"] for _ in range(3)] == pytest.approx([0.5, 0.0, 0.0])


def test_epsilon_is_nan_where_nothing_explores() -> None:
    greedy = config_of("EpsilonGreedy").exploration(explore=False)
    with greedy.evaluation(evaluation_config={"explore": True}).build() as algo:
        assert np.isnan(algo.train()["env_runners"]["epsilon"])
        assert algo.evaluate()["env_runners"]["epsilon"] > 0.99
    with config_of("EpsilonGreedy").build() as algo:
        assert algo.train()["env_runners"]["epsilon"] > 0.99
        assert np.isnan(algo.evaluate()["env_runners"]["epsilon"])


def test_the_process_of_a_runner_continues_from_a_checkpoint(tmp_path: Path) -> None:
    config = box_config("OrnsteinUhlenbeckNoise", random_timesteps=0)
    with config.build() as algo, config.build() as other:
        algo.train()
        runner, restored = algo.env_runner, other.env_runner
        assert runner is not None and restored is not None
        other.set_state(algo.get_state())
        found: Any = restored.exploration.get_state()["ou_state"]
        assert np.abs(found).max() > 0
        assert np.array_equal(found, runner.exploration.get_state()["ou_state"])
        restored.exploration.set_state({"ou_state": np.zeros((3, 2))})
        other.restore_from_path(algo.save(tmp_path / "checkpoint"))
        assert np.array_equal(restored.exploration.get_state()["ou_state"], found)


def test_a_runner_that_dies_before_it_samples_passes_on_the_state_of_a_checkpoint() -> None:
    config = box_config("OrnsteinUhlenbeckNoise", random_timesteps=0).env_runners(num_env_runners=1).engine("local")
    with config.build() as algo:
        group, state = algo.env_runner_group, algo.get_state()
        state["runners"]["runners"][0]["exploration"]["ou_state"][:] = 0.5
        algo.set_state(state)
        group._runners[1].handle.kill()
        while not group.healthy_worker_ids:
            group.restore_runners()
        [found] = group.foreach_env_runner(lambda runner: runner.exploration.get_state())
        assert np.array_equal(found["ou_state"], np.full((3, 2), 0.5))


# Bad input.


def build_error(config: AlgorithmConfig) -> str:
    with pytest.raises(CorralError) as caught, config.build():
        pass
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


def discrete(**exploration_config: Any) -> AlgorithmConfig:
    return DQNConfig().environment(IdentityEnv).exploration(exploration_config=exploration_config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type": "EpsilonGredy"}, ["'EpsilonGredy'", "Did you mean 'EpsilonGreedy'?"]),
        ({"type": "Wild"}, ["'Wild'", "Known names", *BUILT_IN]),
        ({"type": "no.such.module.Kind"}, ["no.such.module.Kind"]),
        ({"type": "corral.testing:DeepSea"}, ["is not a subclass of corral.Exploration"]),
        ({"type": 3}, ["type 3"]),
        ({"type": Exploration}, ["must define get_exploration_action"]),
        ({"type": "corral.exploration.bandits:LinearBandit"}, ["is abstract", "must define scores"]),
        ({"type": "corral.exploration.intrinsic:IntrinsicReward"}, ["is abstract", "judge, make_net"]),
        ({"type": "EpsilonGreedy", "epsilon": 0.1}, ["unknown setting 'epsilon'", "It takes", "final_epsilon"]),
        ({"epsilon_timestep": 5}, ["unknown setting 'epsilon_timestep'", "'epsilon_timesteps'"]),
        ({"type": "Random", "seed": 1}, ["unknown setting 'seed'", "It takes no settings"]),
        ({"final_epsilon": -0.1}, ["epsilon"]),
        ({"initial_epsilon": 1.5}, ["[0, 1]"]),
        ({"initial_epsilon": float("nan")}, ["finite"]),
        ({"epsilon_timesteps": -1}, ["epsilon_timesteps=-1"]),
        ({"epsilon_schedule": [[5, 1.0], [9, 0.1]]}, ["must be 0"]),
        ({"epsilon_schedule": [[0, 1.0], [0, 0.1]]}, ["must rise"]),
        ({"epsilon_schedule": [[0, 1.0], [float("nan"), 0.1]]}, ["must rise"]),
        ({"epsilon_schedule": []}, ["at least one"]),
        ({"epsilon_schedule": [1.0, 0.1]}, ["[step, value] pairs", "[1.0, 0.1]"]),
        ({"epsilon_schedule": [[0, 1.0], [50]]}, ["[step, value] pairs"]),
        ({"epsilon_schedule": [[0, 1, 3]]}, ["[step, value] pairs"]),
        ({"epsilon_schedule": "0.1"}, ["[step, value] pairs", "'0.1'"]),
        ({"epsilon_schedule": {0: 1.0}}, ["[step, value] pairs"]),
        ({"initial_epsilon": "1"}, ["pairs of numbers", "'1'"]),
        ({"type": "SoftQ", "temperature": "hot"}, ["temperature", "pairs of numbers", "'hot'"]),
        ({"type": "SoftQ", "temperature": 0}, ["above 0"]),
        ({"type": "StochasticSampling", "random_timesteps": float("nan")}, ["random_timesteps=nan"]),
        ({"type": "GaussianNoise"}, ["GaussianNoise needs the action space Box", "use StochasticSampling, Random"]),
        ({"type": "OrnsteinUhlenbeckNoise"}, ["needs the action space Box"]),
        ({"type": "ParameterNoise", "initial_stddev": -1}, ["initial_stddev=-1"]),
        ({"type": "ParameterNoise", "target_epsilon": 1.0}, ["target_epsilon=1.0", "[0, 1)"]),
        (
            {"type": "ParameterNoise", "sub_exploration": {"type": "GaussianNoise"}},
            ["GaussianNoise needs the action space Box"],
        ),
        ({"type": "Curiosity", "beta": 1.5}, ["beta=1.5"]),
        ({"type": "Curiosity", "lr": -1e-3}, ["lr=-0.001"]),
        ({"type": "Curiosity", "feature_dim": 0}, ["feature_dim=0"]),
        ({"type": "Curiosity", "inverse_net_activation": "relo"}, ["inverse_net_activation", "'relu'"]),
        ({"type": "Curiosity", "forward_net_hiddens": (0,)}, ["forward_net_hiddens=0"]),
        (
            {"type": "Curiosity", "feature_net_config": {"architecture": "simba"}},
            ["feature_net_config", "architecture"],
        ),
        ({"type": "Curiosity", "feature_net_config": {"hidens": [3]}}, ["feature_net_config", "fcnet_hiddens"]),
        ({"type": "Curiosity", "sub_exploration": {"type": "Epsilon"}}, ["unknown type 'Epsilon'"]),
        ({"type": "Curiosity", "sub_exploration": {"lr": 3}}, ["unknown setting 'lr'"]),
        ({"type": "RND", "sub_exploration": "EpsilonGreedy"}, ["RND: sub_exploration='EpsilonGreedy' must be a dict"]),
        ({"type": "RND", "distill_net_config": {"fcnet_activation": "cosine"}}, ["'cosine'"]),
        ({"type": "RND", "intrinsic_reward_coeff": float("inf")}, ["intrinsic_reward_coeff=inf"]),
        ({"type": "RE3", "k_nn": 0}, ["k_nn=0"]),
        ({"type": "RE3", "beta_schedule": "linear"}, ["beta_schedule='linear'", "'linear_decay'"]),
        ({"type": "RE3", "rho": 2}, ["rho=2"]),
        ({"type": "ThompsonSampling", "lambda_": 0}, ["lambda_=0"]),
        ({"type": "UpperConfidenceBound", "alpha": -1}, ["alpha=-1"]),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_build(settings: dict[str, Any], said: list[str]) -> None:
    message = build_error(discrete(**settings))
    assert all_of(part in message for part in said), message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type": "EpsilonGreedy"}, ["EpsilonGreedy needs the action space Discrete", "GaussianNoise"]),
        ({"type": "ThompsonSampling"}, ["ThompsonSampling needs the action space Discrete"]),
        ({"type": "GaussianNoise", "stddev": -0.1}, ["stddev=-0.1"]),
        ({"type": "GaussianNoise", "scale_schedule": [[0, -1.0]]}, ["scale", "at least 0"]),
        ({"type": "GaussianNoise", "scale_schedule": [[0, 1.0], [10]]}, ["scale", "[step, value] pairs"]),
        ({"type": "GaussianNoise", "ou_theta": 0.1}, ["unknown setting 'ou_theta'", "stddev"]),
        ({"type": "OrnsteinUhlenbeckNoise", "ou_theta": 2.5}, ["ou_theta=2.5", "[0, 2)"]),
        ({"type": "OrnsteinUhlenbeckNoise", "ou_sigma": float("nan")}, ["ou_sigma=nan"]),
        ({"type": "OrnsteinUhlenbeckNoise", "scale_timesteps": -3}, ["scale_timesteps=-3"]),
    ],
    ids=str,
)
def test_bad_settings_for_continuous_actions(settings: dict[str, Any], said: list[str]) -> None:
    config = SamplingConfig().environment(IdentityEnv, env_config={"space": "box"})
    message = build_error(config.exploration(exploration_config=settings))
    assert all_of(part in message for part in said), message


@pytest.mark.parametrize("kind", [name for name in BUILT_IN if not exploration_class(name).on_policy])
def test_ppo_refuses_actions_of_others_before_anything_starts(kind: str) -> None:
    config = PPOConfig().environment(IdentityEnv).exploration(exploration_config={"type": kind})
    with pytest.raises(ConfigError, match=f"actions of its own policy only, and {kind} chooses other actions"):
        config.validate()


def test_ppo_refuses_them_beneath_an_intrinsic_reward() -> None:
    sub = {"type": "EpsilonGreedy"}
    config = PPOConfig().environment(IdentityEnv)
    config.exploration(exploration_config={"type": "Curiosity", "sub_exploration": sub})
    assert "EpsilonGreedy chooses other actions: use StochasticSampling, Curiosity, RND, RE3" in build_error(config)


def test_ppo_takes_the_others() -> None:
    takes = [name for name in BUILT_IN if exploration_class(name).on_policy]
    assert takes == ["StochasticSampling", "Curiosity", "RND", "RE3"]
    for kind in takes:
        PPOConfig().environment(IdentityEnv).exploration(exploration_config={"type": kind}).validate()
