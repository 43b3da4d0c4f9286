"""Transforms that look back give what wrappers of the env give, in sampling, learning, replay and use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from tests.exact_runs import Drift, StatefulDrift, limited, make_config

from corral import (
    FrameStack,
    NormalizeObservations,
    Policy,
    PrevActionsPrevRewards,
    TemporalTransform,
    evaluate_policy,
    load_policy,
    make_multi_agent,
)
from corral.core.tree import map_tree
from corral.errors import ConfigError, ObservationError
from corral.modules.module import ActorCritic
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.rows import RowTransforms

STACKED = [limited, partial(FrameStackObservation, stack_size=3)]


class Pictures(gym.ObservationWrapper[Any, Any, Any]):
    """Images that show the observation of the env."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(0, 255, (8, 8), np.uint8)

    def observation(self, observation: Any) -> Any:
        return np.resize((observation * 50 % 256).astype(np.uint8), (8, 8))


def run(algo: str, num_iterations: int = 3, **settings: Any) -> tuple[list[Any], Any]:
    """Return the learners' results, and an algorithm that was trained and stopped."""
    with make_config(algo, **settings).build() as algorithm:
        return [algorithm.train()["learners"]["default_policy"] for _ in range(num_iterations)], algorithm


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
@pytest.mark.parametrize("algo", ["PPO", "APPO", "DQN", "SAC"])
def test_stacks_train_exactly_as_stacks_of_a_wrapper(algo: str, autoreset_mode: str) -> None:
    settings: dict[str, Any] = {"autoreset_mode": autoreset_mode, "env": Drift}
    replay = {} if algo in ("PPO", "APPO") else {"replay_buffer_config": {"capacity": 500, "frame_stack": 3}}
    expected, _ = run(algo, wrappers=STACKED, **settings, **replay)
    found, algorithm = run(algo, transforms=[FrameStack(3)], **settings)
    assert found == expected
    if replay:
        assert algorithm.replay_buffers["default_policy"].frame_stack == 3


def test_replay_stores_each_frame_of_image_stacks_once() -> None:
    sizes = {}
    for transforms in ([], [FrameStack(4)]):
        config = make_config("DQN", wrappers=[limited, Pictures], transforms=transforms)
        with config.build() as algorithm:
            algorithm.train()
            sizes[len(transforms)] = algorithm.local_replay_buffer.nbytes
            batch = algorithm.local_replay_buffer.sample(4)
    assert batch["obs"].shape == (4, 4, 8, 8) and sizes[1] < 1.2 * sizes[0]


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
def test_previous_actions_and_rewards_equal_a_loop_over_episodes(autoreset_mode: str) -> None:
    with make_config("PPO", transforms=[PrevActionsPrevRewards()], autoreset_mode=autoreset_mode).build() as algorithm:
        space = algorithm.get_module().observation_space
        assert isinstance(space, spaces.Dict) and space["prev_actions"] == spaces.Discrete(3)
        last: dict[int, tuple[int, float]] = {}
        for _ in range(3):
            (rollout,) = algorithm.sample(60)
            seen = rollout.module_obs
            for n in range(rollout.num_envs):
                for t in range(rollout.num_rows):
                    if not rollout.valid[t, n]:
                        last.pop(n, None)
                        continue
                    action, reward = last.get(n, (0, 0.0))
                    assert seen["prev_actions"][t, n] == action
                    np.testing.assert_allclose(seen["prev_rewards"][t, n, 0], reward, rtol=1e-6)
                    last[n] = (int(rollout.actions[t, n]), float(rollout.rewards[t, n]))
                    if rollout.done[t, n]:
                        last.pop(n)
            np.testing.assert_array_equal(seen["observations"], rollout.obs)


@pytest.mark.parametrize(("num_actions", "num_rewards"), [(3, 2), (0, 1), (2, 0)])
def test_several_previous_actions_and_rewards_equal_a_loop_over_episodes(num_actions: int, num_rewards: int) -> None:
    transform = PrevActionsPrevRewards(num_actions=num_actions, num_rewards=num_rewards)
    with make_config("PPO", transforms=[transform]).build() as algorithm:
        keys = [key for key, number in (("prev_actions", num_actions), ("prev_rewards", num_rewards)) if number]
        assert sorted(algorithm.get_module().observation_space.spaces) == ["observations", *keys]
        known: dict[int, list[tuple[int, float]]] = {}
        for _ in range(3):
            (rollout,) = algorithm.sample(60)
            seen = rollout.module_obs
            for n in range(rollout.num_envs):
                for t in range(rollout.num_rows):
                    if not rollout.valid[t, n]:
                        known.pop(n, None)
                        continue
                    steps = [(0, 0.0)] * 3 + known.setdefault(n, [])
                    if num_actions:
                        expected = [action for action, _ in steps[-num_actions:]]
                        assert seen["prev_actions"][t, n].tolist() == expected
                    if num_rewards:
                        rewards = [reward for _, reward in steps[-num_rewards:]]
                        np.testing.assert_allclose(seen["prev_rewards"][t, n], rewards, rtol=1e-6)
                    known[n].append((int(rollout.actions[t, n]), float(rollout.rewards[t, n])))
                    if rollout.done[t, n]:
                        known.pop(n)


def test_no_previous_action_and_no_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_actions=0 and num_rewards=0 have no effect"):
        PrevActionsPrevRewards(num_actions=0, num_rewards=0)


@pytest.mark.parametrize("transforms", [[FrameStack(3), NormalizeObservations()], [PrevActionsPrevRewards()]])
def test_learning_sees_exactly_what_the_module_saw(transforms: list[Any]) -> None:
    with make_config("PPO", transforms=transforms, num_env_runners=2, engine_name="local").build() as algorithm:
        for _ in range(2):
            algorithm.train()
        for rollout in algorithm.sample(90):
            obs = rollout.valid_rows(map_tree(lambda column: column[:-1], rollout.module_obs))
            outputs = algorithm.learner_group.dist_inputs("default_policy", {"obs": obs})
            np.testing.assert_allclose(outputs, rollout.valid_rows(rollout.dist_inputs), atol=1e-6)


def test_normalising_before_stacking_is_refused_where_a_buffer_would_keep_old_statistics() -> None:
    with pytest.raises(ConfigError, match="NormalizeObservations is before FrameStack"):
        make_config("DQN", transforms=[NormalizeObservations(), FrameStack(2)]).build()


def test_a_key_of_a_nested_dict_is_no_mask_and_is_stacked() -> None:
    inner = spaces.Dict(action_mask=spaces.MultiBinary(2), x=spaces.Box(-1, 1, (3,), np.float32))
    space = spaces.Dict(player=inner, action_mask=spaces.MultiBinary(2))
    pipeline = Pipeline.build([FrameStack(2)], space, spaces.Discrete(2))
    assert pipeline is not None
    obs = pipeline.example_rows(1)
    seen, _ = pipeline.to_store(obs, pipeline.initial_memories(1), np.ones(1, np.bool_), None, None)
    assert pipeline.module_space.contains(map_tree(lambda leaf: leaf[0], seen))
    assert seen["action_mask"].shape == (1, 2) and seen["player"]["action_mask"].shape == (1, 2, 2)


def test_rows_that_do_not_act_remember_nothing() -> None:
    pipeline = Pipeline.build([FrameStack(2)], spaces.Box(-9.0, 9.0, (1,), np.float32), spaces.Discrete(2))
    assert pipeline is not None
    rows = RowTransforms(pipeline, np.zeros((), np.int64), 2)
    begins, acts = np.ones(2, bool), np.array([True, False])
    rows(np.array([[1.0], [5.0]], np.float32), begins, acts)
    seen = rows(np.array([[2.0], [6.0]], np.float32), np.array([False, True]), np.ones(2, bool))
    assert seen[..., 0].tolist() == [[1, 2], [6, 6]]
    assert rows.peek(np.array([[3.0], [7.0]], np.float32), np.zeros(2, bool))[..., 0].tolist() == [[2, 3], [6, 7]]


def test_lanes_of_several_agents_stack_as_a_wrapper_of_each_does() -> None:
    """Two copies of an env as agents, against copies whose observations are stacked by the env."""

    def stacked(config: dict[str, Any]) -> Any:
        return FrameStackObservation(limited(StatefulDrift(config)), 3)

    def plain(config: dict[str, Any]) -> Any:
        return limited(StatefulDrift(config))

    results = []
    for env, transforms in ((stacked, []), (plain, [FrameStack(3)])):
        config = make_config(
            "PPO", env=make_multi_agent(env), env_config={"num_agents": 2}, wrappers=[], policies=["main"],
            transforms=transforms,
        )  # fmt: skip
        with config.build() as algorithm:
            results.append([algorithm.train()["learners"]["main"] for _ in range(3)])
    assert results[0] == results[1]


def test_a_policy_in_use_looks_back_until_it_is_reset(tmp_path: Path) -> None:
    with make_config("PPO", transforms=[FrameStack(3)]).build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "saved")
        policy = load_policy(path)
        rng, module = np.random.default_rng(0), policy.module
        obs = rng.normal(size=(5, 2, 3)).astype(np.float32)
        for _ in range(2):
            stack = np.repeat(obs[0][:, None], 3, 1)
            for row in obs:
                stack = np.concatenate([stack[:, 1:], row[:, None]], 1)
                expected = module.policy(torch.from_numpy(stack)).argmax(-1).numpy()
                np.testing.assert_array_equal(policy.batch(row), expected)
            policy.reset()
        stacked = evaluate_policy(policy, Drift, episodes=6, wrappers=[limited], num_envs=2, seed=1)
        again = evaluate_policy(policy, Drift, episodes=6, wrappers=[limited], num_envs=2, seed=1)
        assert stacked == again
        with pytest.raises(ObservationError, match=r"episodes of 2 row.s., and is given 1: call reset"):
            policy(obs[0, 0])
        with pytest.raises(ConfigError, match="has memory: give state="):
            algorithm.compute_single_action(obs[0, 0])
        _, state = algorithm.compute_actions(obs[0], state=algorithm.acting_policy().initial_states(2), explore=False)
        stack = np.stack([obs[0], obs[0], obs[1]], 1)
        expected = module.policy(torch.from_numpy(stack)).argmax(-1).numpy()
        np.testing.assert_array_equal(algorithm.compute_actions(obs[1], state=state, explore=False)[0], expected)
        of_algorithm = evaluate_policy(algorithm, Drift, episodes=6, wrappers=[limited], num_envs=2, seed=1)
        assert of_algorithm == stacked


class Change(TemporalTransform):
    """A user's transform: the observation and its change since the last one."""

    def initial_memory(self, space: Any, num_envs: int) -> Any:
        return np.zeros((num_envs, *space.shape), space.dtype)

    def step(self, obs: Any, memory: Any, begins: Any, actions: Any, rewards: Any) -> tuple[Any, Any]:
        return np.concatenate([obs, np.where(begins[:, None], 0, obs - memory)], -1), obs


class Short(Change):
    def step(self, obs: Any, memory: Any, begins: Any, actions: Any, rewards: Any) -> tuple[Any, Any]:
        return obs[:1], obs


class SinceFirst(Change):
    """A transform whose observations have the shape of the observations of the env."""

    def step(self, obs: Any, memory: Any, begins: Any, actions: Any, rewards: Any) -> tuple[Any, Any]:
        first = np.where(begins[:, None], obs, memory)
        return obs - first, first


def test_acting_without_states_is_refused_also_where_the_shapes_would_fit() -> None:
    space, actions = spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,))
    pipeline = Pipeline.build([SinceFirst()], space, actions)
    policy, obs = Policy(ActorCritic(space, actions, {}), pipeline=pipeline), np.ones((2, 3), np.float32)
    found, _ = policy.act(obs, policy.initial_states(2))
    np.testing.assert_array_equal(found, Policy(policy.module).batch(0 * obs))
    with pytest.raises(ObservationError, match=r"state of the transforms: .*begin with initial_states\(B\)"):
        policy.act(obs)


def test_your_own_transform_may_look_back() -> None:
    with make_config("PPO", transforms=[Change]).build() as algorithm:
        assert algorithm.get_module().observation_space.shape == (6,)
        algorithm.train()
        (rollout,) = algorithm.sample(60)
        linked = rollout.valid[:-1] & ~rollout.done[:-1] & rollout.valid[1:]
        change = rollout.module_obs[1:-1][..., 3:]
        np.testing.assert_allclose(change[linked], (rollout.obs[1:-1] - rollout.obs[:-2])[linked], atol=1e-6)
    with pytest.raises(ConfigError, match=r"Short.step must return arrays of numbers \[B, ...\] for B observations"):
        make_config("PPO", transforms=[Short]).build()
