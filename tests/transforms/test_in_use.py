"""Transforms in exported files, in policies of several agents, and next to wrappers; actions with and without scale."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.exact_runs import SMALL, Drift, StatefulDrift, limited, make_config

from corral import (
    Algorithm,
    ClipObservations,
    FlattenObservations,
    FrameStack,
    NormalizeObservations,
    NormalizeRewards,
    Policy,
    PPOConfig,
    Transform,
    evaluate_policy,
    load_policy,
    make_multi_agent,
)
from corral.algorithms.config.config import AlgorithmConfig
from corral.core.tree import map_tree
from corral.errors import CheckpointError, ConfigError, CorralError, ExportError
from corral.modules.distributions import action_distribution
from corral.modules.module import ActorCritic
from corral.modules.transforms.pipeline import Pipeline
from corral.tools.cli.main import main

MIXED: Any = spaces.Dict(
    {
        "place": spaces.Box(-1.0, 1.0, (2,), np.float32),
        "kind": spaces.Discrete(3, start=1),
        "keys": spaces.MultiDiscrete([2, 3]),
    }
)
FLAT_CLIPPED = (FlattenObservations(), ClipObservations(-0.5, 0.5), NormalizeObservations(clip=1.0))
TARGET: Any = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32))


class Doubled(Transform):
    """A transform whose setting no file can hold."""

    def __init__(self, factors: Any) -> None:
        self.factors = factors

    def transform_obs(self, obs: Any) -> Any:
        return obs * self.factors


class OnlyNumPy(Transform):
    def transform_obs(self, obs: Any) -> Any:
        return np.sort(obs, -1)


def fitted(space: Any, *transforms: Transform) -> Policy:
    """Return a policy whose statistics are of random observations."""
    pipeline = Pipeline.build(transforms, space, TARGET)
    assert pipeline is not None
    stored = pipeline.spaces[pipeline.num_stored]
    draws = [stored.sample() for _ in range(50)]
    batch = map_tree(
        lambda *leaves: np.stack(leaves), *[dict(draw) if isinstance(draw, dict) else draw for draw in draws]
    )
    pipeline = pipeline.merged([pipeline.measure((), batch, {})])
    torch.manual_seed(0)
    return Policy(ActorCritic(pipeline.module_space, TARGET, SMALL), pipeline=pipeline)


CASES = [
    pytest.param(MIXED, (NormalizeObservations(), FlattenObservations()), id="normalize-flatten"),
    pytest.param(MIXED, FLAT_CLIPPED, id="flatten-clip"),
    pytest.param(spaces.Box(-1.0, 1.0, (3,), np.float32), (FrameStack(2), NormalizeObservations()), id="stack"),
]


@pytest.mark.parametrize(("space", "transforms"), CASES)
@pytest.mark.parametrize("kind", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_exported_policy_holds_transforms_and_statistics(
    space: Any, transforms: tuple[Transform, ...], kind: str, tmp_path: Path
) -> None:
    policy = fitted(space, *transforms)
    file = policy.export(tmp_path / f"policy.{kind}")
    pipeline = policy.pipeline
    assert pipeline is not None
    stored = pipeline.spaces[pipeline.num_stored]
    stored.seed(1)
    draws = [stored.sample() for _ in range(7)]
    batch: Any = map_tree(lambda *leaves: np.stack(leaves), *draws)
    expected = policy.module.distribution.env_mode(
        policy.module.policy(map_tree(torch.from_numpy, pipeline.from_stored(batch)))
    )
    if kind == "pt2":
        found = torch.export.load(file).module()(map_tree(torch.from_numpy, batch)).numpy()
    else:
        ort = pytest.importorskip("onnxruntime")
        session = ort.InferenceSession(file.read_bytes())
        names = [each.name for each in session.get_inputs()]
        inputs = {name: batch[name.partition("/")[2]] if "/" in name else batch for name in names}
        (found,) = session.run(None, inputs)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


class Halved(NormalizeObservations):
    """Changes both forms of a transform of the library."""

    def transform_obs(self, obs: Any) -> Any:
        return super().transform_obs(obs) / 2

    def transform_tensors(self, obs: Any) -> Any:
        return super().transform_tensors(obs) / 2


def test_a_subclass_is_exported_with_its_own_form_on_tensors(tmp_path: Path) -> None:
    policy = fitted(spaces.Box(-1.0, 1.0, (3,), np.float32), Halved())
    file = policy.export(tmp_path / "policy.pt2")
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    found = torch.export.load(file).module()(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(found, policy.batch(obs), rtol=1e-4, atol=1e-5)


def test_a_transform_that_torch_cannot_trace_is_named_in_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="define transform_tensors"):
        fitted(spaces.Box(-1.0, 1.0, (3,), np.float32), OnlyNumPy()).export(tmp_path / "policy.pt2")


def test_a_transform_that_no_file_can_hold_is_asked_for(tmp_path: Path) -> None:
    mine = [Doubled(np.array([1.0, 2.0, 3.0])), NormalizeObservations()]
    with make_config("PPO", transforms=mine).build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "saved")
        obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
        expected = algorithm.compute_actions(obs, explore=False)
    with pytest.raises(ConfigError, match=r"env_runners.transforms.0.*from_checkpoint\(path, .*transforms=..."):
        Algorithm.from_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"settings of the transforms .*Doubled: give transforms="):
        load_policy(path)
    np.testing.assert_array_equal(load_policy(path, transforms=mine).batch(obs), expected)
    with Algorithm.from_checkpoint(path, transforms=mine) as restored:
        np.testing.assert_array_equal(restored.compute_actions(obs, explore=False), expected)


# Wrappers.


def test_a_wrapper_with_statistics_of_each_sub_env_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "corral"):
        make_config("PPO", wrappers=[limited, gym.wrappers.NormalizeObservation]).build().stop()
    assert "NormalizeObservation each of the 3 sub-envs normalizes by statistics of its own" in caplog.text
    assert "transforms=[NormalizeObservations()]" in caplog.text
    caplog.clear()
    make_config("PPO", transforms=[NormalizeObservations()]).build().stop()
    assert "statistics" not in caplog.text


# Several agents.


def agents_config(**settings: Any) -> AlgorithmConfig:
    def one(config: dict[str, Any]) -> Any:
        return limited(StatefulDrift(config))

    return make_config(
        "PPO", env=make_multi_agent(one), env_config={"num_agents": 2}, wrappers=[], policies=["plain", "scaled"],
        policy_mapping_fn=lambda agent, episode: ["plain", "scaled"][int(str(agent)[-1]) % 2], **settings,
    )  # fmt: skip


def test_each_module_has_transforms_and_statistics_of_its_own(tmp_path: Path) -> None:
    overrides = {"scaled": {"transforms": [NormalizeObservations(), NormalizeRewards()]}}
    with agents_config(algorithm_config_overrides_per_module=overrides).build() as algorithm:
        for _ in range(2):
            algorithm.train()
        states = algorithm.modules.get_transform_states()
        assert list(states) == ["scaled"] and algorithm.get_pipeline("plain") is None
        (rollout,) = algorithm.sample(60)
        for part in rollout.by_module().values():
            obs = part.valid_rows(part.module_obs[:-1])
            outputs = algorithm.learner_group.dist_inputs(part.module_id, {"obs": obs})
            fresh = part.valid_rows(part.obs_rows[:-1]) >= 0  # chosen with the present weights
            np.testing.assert_allclose(outputs[fresh], part.valid_rows(part.dist_inputs)[fresh], atol=1e-6)
        count = float(states["scaled"]["NormalizeObservations"]["count"])
        assert 80 < count <= 180  # the steps of one of the two agents
        policy = load_policy(algorithm.save(tmp_path / "saved"), module_id="scaled")
        assert policy.pipeline is not None and float(policy.pipeline.state["NormalizeObservations"]["count"]) >= count


def test_modules_that_do_not_learn_keep_their_statistics_and_copies_take_them_along(tmp_path: Path) -> None:
    config = agents_config(transforms=[NormalizeObservations()], policies_to_train=["scaled"])
    with config.build() as algorithm:
        algorithm.train()
        states = algorithm.modules.get_transform_states()
        assert float(states["plain"]["NormalizeObservations"]["count"]) == 0
        algorithm.add_module("copy", copy_from="scaled")
        copied = algorithm.modules.get_transform_states()["copy"]["NormalizeObservations"]
        np.testing.assert_array_equal(copied["mean/"], states["scaled"]["NormalizeObservations"]["mean/"])
        algorithm.load_module_weights(algorithm.save(tmp_path / "saved"), "plain", "scaled")
        loaded = algorithm.modules.get_transform_states()["plain"]["NormalizeObservations"]
        np.testing.assert_array_equal(loaded["mean/"], copied["mean/"])


# Actions.


@pytest.mark.parametrize(
    ("settings", "action_bounds", "sent"),
    [
        ({}, "clip", [[3.0, 0.5], [0.5, 0.25]]),
        ({"normalize_actions": False, "clip_actions": True}, "clip_unscaled", [[3.0, 0.5], [0.0, 0.0]]),
        ({"normalize_actions": False}, "none", [[7.0, 1.0], [0.0, 0.0]]),
    ],
)
def test_actions_are_scaled_clipped_or_left_alone(settings: dict[str, Any], action_bounds: str, sent: Any) -> None:
    spec = PPOConfig().environment("CartPole-v1", **settings).module_spec(spaces.Box(-1.0, 1.0, (3,)), TARGET)
    module, actions = spec.build(), np.array([[7.0, 1.0], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(module.distribution.to_env(actions), sent)
    inputs = torch.cat([torch.from_numpy(actions), torch.zeros(2, 2)], -1)
    np.testing.assert_allclose(module.distribution.env_mode(inputs).numpy(), sent)
    drawn = module.distribution.random(np.random.default_rng(0), 1000)
    assert TARGET.contains(module.distribution.to_env(drawn)[0])
    low, high = (np.full(2, -1.0), np.full(2, 1.0)) if action_bounds == "clip" else (TARGET.low, TARGET.high)
    np.testing.assert_allclose(drawn.min(0), low, atol=0.02)
    np.testing.assert_allclose(drawn.max(0), high, atol=0.02)
    density = -np.log(np.prod(high - low))
    np.testing.assert_allclose(module.distribution.random_logp(drawn[:1]), [density], rtol=1e-5)
    assert type(module.distribution) is type(action_distribution(TARGET, action_bounds))


def test_the_env_gets_actions_in_its_units_where_they_are_not_normalised(tmp_path: Path) -> None:
    config = make_config("PPO", normalize_actions=False, clip_actions=True, env_config={"box": True})
    with config.build() as algorithm:
        algorithm.train()
        policy = load_policy(algorithm.save(tmp_path / "saved"))
        obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
        mean = policy.module.distribution.mode(policy.module.policy(torch.from_numpy(obs)).detach().numpy())
        np.testing.assert_allclose(policy.batch(obs), np.clip(mean, -1, 1), rtol=1e-6)


def test_contradictions_of_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"normalize_actions=False contradicts .*'squash'"):
        make_config("PPO", normalize_actions=False, model_config={"action_bounds": "squash"}).validate()
    with pytest.raises(ConfigError, match="normalize_actions=False: SAC squashes"):
        make_config("SAC", normalize_actions=False).validate()
    with pytest.raises(ConfigError, match=r"transforms.*evaluation uses the transforms of the algorithm"):
        make_config("PPO", evaluation_interval=1, evaluation_config={"transforms": [FrameStack()]}).validate()


def test_policies_of_several_agents_that_look_back_play_as_stacked_agents_do() -> None:
    """Two copies of an env as agents, against copies whose observations are stacked by the env."""

    def stacked(config: dict[str, Any]) -> Any:
        return gym.wrappers.FrameStackObservation(limited(StatefulDrift(config)), 3)

    def plain(config: dict[str, Any]) -> Any:
        return limited(StatefulDrift(config))

    found = []
    for env, transforms in ((stacked, []), (plain, [FrameStack(3)])):
        config = agents_config(transforms=transforms).copy(env=make_multi_agent(env))
        with config.build() as algorithm:
            algorithm.train()
            settings: Any = {"env_config": {"num_agents": 2}, "episodes": 6, "num_envs": 2, "seed": 1}
            found.append(evaluate_policy(algorithm, config.env, **settings))
    assert found[0] == found[1]


def test_the_command_line_evaluates_with_the_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_config("PPO", env=Drift, transforms=[FrameStack(2), NormalizeObservations()]).build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "saved")
        expected = evaluate_policy(algorithm, Drift, wrappers=[limited], episodes=5, seed=3)
    assert main(["evaluate", str(path), "--episodes", "5", "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episode_returns"] == list(expected.episode_returns)


class ThreeRewards(gym.Env[Any, Any]):
    """Every episode has three rewards of 1. Then it ends, or with `fails` the env raises in the step after them."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, config: dict[str, Any]) -> None:
        self.fails = config["fails"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        if self.t == 4:
            raise RuntimeError("broken")
        return np.zeros(1, np.float32), 1.0, self.t == 3 and not self.fails, False, {}


@pytest.mark.parametrize("fails", [False, True])
def test_the_normalized_return_ends_with_the_episode_also_where_a_sub_env_failed(fails: bool) -> None:
    config = (
        PPOConfig()
        .environment(ThreeRewards, env_config={"fails": fails})
        .env_runners(num_envs_per_env_runner=1, transforms=[NormalizeRewards(gamma=1.0)])
        .fault_tolerance(restart_failed_sub_environments=True)
        .training(train_batch_size_per_learner=60, minibatch_size=None, num_epochs=1)
    )
    with config.build() as algo:
        algo.train()
        state = algo.get_pipeline("default_policy").state["NormalizeRewards"]
    assert state["mean/return"] == pytest.approx(2.0)  # of 1, 2 and 3


@pytest.mark.parametrize("engine", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_normalized_rewards_follow_the_discount_of_the_algorithm(engine: Any, tmp_path: Path) -> None:
    config = PPOConfig().environment("CartPole-v1").engine(engine)
    config.env_runners(num_envs_per_env_runner=2, transforms=[NormalizeRewards(), NormalizeRewards(gamma=0.5)])
    config.env_runners(num_env_runners=0 if engine == "local" else 1)
    config.training(train_batch_size_per_learner=100, minibatch_size=None, num_epochs=1)

    def discounts(env_runner: Any) -> list[float]:
        return list(env_runner.actors["default_policy"].transforms.pipeline.discounts.values())

    with config.build() as algo:
        algo.train()
        algo.reconfigure(gamma=0.3)
        assert list(algo.get_pipeline().discounts.values()) == [0.3, 0.5]  # type: ignore[union-attr]
        assert algo.env_runner_group.foreach_env_runner(discounts) == [[0.3, 0.5]]  # before the next sample
        before = algo.get_pipeline().state["NormalizeRewards"]["count"]  # type: ignore[union-attr]
        algo.train()
        assert algo.get_pipeline().state["NormalizeRewards"]["count"] >= before + 100  # type: ignore[union-attr]
        algo.save(tmp_path / "saved")
    with type(algo).from_checkpoint(tmp_path / "saved") as again:
        assert list(again.get_pipeline().discounts.values()) == [0.3, 0.5]  # type: ignore[union-attr]


class Speaking(gym.Env[Any, Any]):
    """Env with parts of observations that no network reads."""

    observation_space: Any = spaces.Dict(
        {
            "place": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "said": spaces.Text(10),
            "seen": spaces.Dict({"far": spaces.Sequence(spaces.Discrete(2)), "near": spaces.Discrete(2)}),
            "kind": spaces.Discrete(3),
        }
    )
    action_space: Any = spaces.Discrete(2)

    def obs(self) -> Any:
        return {"place": np.ones(2, np.float32), "said": "hello", "seen": {"far": (0, 1), "near": 1}, "kind": 2}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.obs(), 1.0, self.t == 4, False, {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_parts_that_no_network_reads_are_left_out(tmp_path: Path, vectorization: str) -> None:
    config = PPOConfig().environment(Speaking).training(train_batch_size_per_learner=32, minibatch_size=16)
    config.env_runners(num_envs_per_env_runner=2, vectorization=vectorization)
    with pytest.raises(CorralError, match="unsupported observation space Text"):
        config.copy().build()
    config.env_runners(transforms=[FlattenObservations(left_out=("said", "seen"))])
    with config.build() as algorithm:
        assert algorithm.train()["env_runners"]["episode_return_mean"] == 4.0
        assert algorithm.get_module().observation_space == spaces.Box(
            np.array([0, 0, 0, -1, -1], np.float32), np.ones(5, np.float32)
        )
        assert algorithm.env_runner is not None
        seen = algorithm.env_runner.sample(num_timesteps=8).obs
        assert seen["said"].tolist() == np.zeros(seen["kind"].shape).tolist() and (seen["kind"] == 2).all()
        algorithm.save(tmp_path)
        assert evaluate_policy(algorithm, Speaking, episodes=2).episode_return_mean == 4.0
    policy = load_policy(tmp_path)
    for env in (Speaking, Speaking()):
        assert evaluate_policy(policy, env, episodes=2).episode_return_mean == 4.0
