"""Envs of JAX as tensor vector envs: a small one, stepped next to a loop in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import PPOConfig, SACConfig
from corral.envs.jax_env import JaxVectorEnv
from corral.errors import CheckpointError, ConfigError, EnvError
from exact_runs import check_continuation

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

# One process imports JAX, and compiles what several tests share.
pytestmark = pytest.mark.xdist_group("jax")

N = 6


class State(NamedTuple):
    """What a state of an env of JAX has, and things that only the env reads."""

    obs: Any
    reward: Any
    done: Any
    place: Any
    info: dict[str, Any]


class Walk:
    """A point that its action pushes; an episode ends where the point is further than 1 from 0.

    Args:
        form: `"vector"`, or `"parts"` for observations with a part that only a critic may see.
        typed: Whether the state holds a random key of JAX's own type.
    """

    action_size = 1

    def __init__(self, form: str = "vector", typed: bool = False) -> None:
        self.form, self.typed = form, typed

    def observe(self, place: Any) -> Any:
        vector = jnp.stack([place, place**2])
        return vector if self.form == "vector" else {"state": vector, "privileged": place[None], "is_right": place > 0}

    def reset(self, key: Any) -> State:
        place = jax.random.uniform(key, minval=-0.5, maxval=0.5)
        kept = jax.random.wrap_key_data(key) if self.typed else key
        return State(self.observe(place), jnp.zeros(()), jnp.zeros(()), place, {"key": kept, "num": jnp.zeros(())})

    def step(self, state: State, action: Any) -> State:
        place = state.place + 0.4 * action[0]
        info = {**state.info, "num": state.info["num"] + 1}
        return State(self.observe(place), -jnp.abs(place), (jnp.abs(place) > 1).astype(float), place, info)


def make_env(num_envs: int = N, device: Any = "cpu", max_episode_steps: int = 9, **settings: Any) -> JaxVectorEnv:
    return JaxVectorEnv(Walk(), num_envs, device, max_episode_steps, **settings)


def random_actions(seed: int, num_steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(2 * torch.rand((num_steps, N, 1), generator=generator) - 1)


def test_steps_are_those_of_a_loop_over_sub_envs() -> None:
    env = make_env(seed=0)
    assert env.single_observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert env.single_action_space == spaces.Box(-1.0, 1.0, (1,), np.float32)
    obs, infos = env.reset(seed=3)
    assert infos == {}
    assert obs.dtype == torch.float32
    assert obs.shape == (N, 2)
    place, count, num_ended = obs[:, 0].numpy().copy(), np.zeros(N, int), np.zeros(2, int)
    starts: list[float] = place.tolist()
    assert len(set(place.tolist())) == N
    for actions in random_actions(0, 60):
        obs, rewards, terminated, truncated, infos = env.step(actions)
        place, count = place + np.float32(0.4) * actions[:, 0].numpy(), count + 1
        np.testing.assert_allclose(infos["final_obs"][:, 0].numpy(), place, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(rewards.numpy(), -np.abs(place), rtol=1e-4, atol=1e-6)
        assert terminated.tolist() == (np.abs(place) > 1).tolist()
        assert truncated.tolist() == (count == 9).tolist()
        ended = (terminated | truncated).numpy()
        num_ended += terminated.sum().item(), truncated.sum().item()
        np.testing.assert_allclose(obs[~ended].numpy(), infos["final_obs"][~ended].numpy())
        assert (obs[ended, 0].abs() <= 0.5).all()
        starts += obs[ended, 0].tolist()
        assert not (obs[ended, 0] == infos["final_obs"][ended, 0]).any()
        place, count = obs[:, 0].numpy().copy(), np.where(ended, 0, count)
    assert num_ended.min() > 5
    assert len(set(starts)) == len(starts) == N + num_ended.sum()  # each episode begins at another place


def test_a_reset_without_a_seed_begins_other_episodes() -> None:
    env = make_env(seed=0)
    assert len({env.reset()[0][0, 0].item() for _ in range(3)}) == 3


@pytest.mark.slow
def test_a_seed_repeats_the_episodes_and_each_reset_without_one_begins_others() -> None:
    env, other = make_env(seed=0), make_env(seed=1)
    first = env.reset(seed=5)[0]
    assert torch.equal(first, other.reset(seed=5)[0])
    for actions in random_actions(1, 20):
        assert torch.equal(env.step(actions)[0], other.step(actions)[0])
    assert not torch.equal(first, env.reset()[0])
    assert torch.equal(env.reset()[0], [other.reset()[0], other.reset()[0]][1])
    assert not torch.equal(make_env(seed=0).reset()[0], make_env(seed=1).reset()[0])


def test_parts_of_observations_are_parts_of_the_space() -> None:
    env = JaxVectorEnv(Walk("parts"), N)
    assert isinstance(env.single_observation_space, spaces.Dict)
    assert env.single_observation_space["is_right"] == spaces.MultiBinary(())
    assert {name: leaf.shape for name, leaf in env.reset()[0].items()} == {
        "state": (N, 2),
        "privileged": (N, 1),
        "is_right": (N,),
    }
    one = JaxVectorEnv(Walk("parts"), N, obs_key="state")
    assert one.reset()[0].shape == (N, 2)
    assert one.step(torch.zeros(N, 1))[-1]["final_obs"].shape == (N, 2)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("typed", [False, True])
def test_a_restored_env_continues_exactly(typed: bool) -> None:
    env = JaxVectorEnv(Walk(typed=typed), N, max_episode_steps=9)
    env.reset(seed=1)
    for actions in random_actions(2, 13):
        env.step(actions)
    state = env.get_state()
    other = JaxVectorEnv(Walk(typed=typed), N, max_episode_steps=9)
    other.set_state(state)
    for actions in random_actions(3, 20):
        for mine, theirs in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
            assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError, match="is not of 7 sub-envs of Walk"):
        JaxVectorEnv(Walk(typed=typed), 7).set_state(state)


class Batched(Walk):
    def reset(self, key: Any) -> Any:
        return jax.vmap(super().reset)(jax.random.split(key, 4))

    def step(self, state: State, action: Any) -> Any:
        return jax.vmap(super().step)(state, jnp.tile(action, (4, 1)))


class Wrapped(Walk):
    def reset(self, key: Any) -> Any:
        state = super().reset(key)
        return state._replace(info={**state.info, "first_obs": state.obs})


class Growing(Walk):
    def step(self, state: State, action: Any) -> Any:
        after = super().step(state, action)
        return after._replace(info={**after.info, "num": after.info["num"][None]})


class WithMore(Walk):
    def step(self, state: State, action: Any) -> Any:
        after = super().step(state, action)
        return after._replace(info={**after.info, "more": after.done})


@pytest.mark.parametrize(
    ("env", "settings", "message"),
    [
        (Batched(), {}, r"the reward of Batched has the shape \[4\]: give it the env of a single sub-env"),
        (Wrapped(), {}, "a wrapper of Wrapped writes 'first_obs' into the info"),
        (Growing(), {}, r"of Growing must have the same parts .*: info\['num'\] is \(\) and \(1,\)"),
        (WithMore(), {}, r"of WithMore .*: info\['more'\] is missing and \(\)"),
        (Walk, {}, "type has not the interface of Brax's envs .*: give it the env of a single sub-env"),
        (object(), {}, "object has not the interface of Brax's envs"),
        (Walk(), {"obs_key": "state"}, "obs_key='state': the observations are no dict"),
        (Walk("parts"), {"obs_key": "stat"}, r"'stat': .* have the keys \['is_right', 'privileged', 'state'\]"),
        (Walk(), {"max_episode_steps": 0}, "max_episode_steps must be an int of at least 1, not 0"),
        (Walk(), {"max_episode_steps": None}, "max_episode_steps must be an int of at least 1, not None"),
        (Walk(), {"device": "meta"}, "device='meta', and JAX has no such device"),
    ],
)
def test_what_is_no_env_of_one_sub_env_is_refused(env: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JaxVectorEnv(env, N, **settings)


def test_steps_that_do_not_fit_are_refused() -> None:
    env = make_env()
    with pytest.raises(EnvError, match="stepped before its first reset"):
        env.step(torch.zeros(N, 1))
    env.reset(seed=2**70)
    with pytest.raises(EnvError, match=r"needs actions of shape \[6, 1\], not \[6, 2\]"):
        env.step(torch.zeros(N, 2))


class Mixed(Walk):
    """Has other dtypes after a reset than after a step, and observations that are no float32."""

    def observe(self, place: Any) -> Any:
        return super().observe(place).astype(jnp.bfloat16)

    def reset(self, key: Any) -> Any:
        state = super().reset(key)
        return state._replace(reward=jnp.zeros((), int), done=jnp.zeros((), bool))


@pytest.mark.slow
def test_dtypes_are_those_of_steps_and_observations_are_float32() -> None:
    env, other = (JaxVectorEnv(Mixed(), N, max_episode_steps=5) for _ in range(2))
    assert env.reset(seed=0)[0].dtype == torch.float32
    for actions in random_actions(4, 8):
        obs, rewards, *_, infos = env.step(actions)
        assert obs.dtype == rewards.dtype == infos["final_obs"].dtype == torch.float32
    other.set_state(env.get_state())
    for actions in random_actions(5, 8):
        assert torch.equal(env.step(actions)[0], other.step(actions)[0])


def test_wrappers_of_brax_are_refused_and_its_envs_are_taken() -> None:
    envs = pytest.importorskip("brax.envs", reason="Brax is not installed")
    for wrapped in (
        envs.create("fast", episode_length=7),
        envs.create("fast", episode_length=7, auto_reset=False),
        envs.training.wrap(envs.get_environment("fast"), episode_length=7),
    ):
        with pytest.raises(ConfigError, match="give it the env of a single sub-env"):
            JaxVectorEnv(wrapped, N)
    env = JaxVectorEnv(envs.get_environment("fast"), N, max_episode_steps=3)
    env.reset(seed=0)
    ends = [env.step(torch.zeros(N, env.env.action_size))[3].tolist() for _ in range(6)]
    assert ends == [[step in (2, 5)] * N for step in range(6)]


def test_a_robot_of_mujoco_playground_is_stepped_and_restored() -> None:
    registry = pytest.importorskip("mujoco_playground", reason="MuJoCo Playground is not installed").registry
    env, other = (JaxVectorEnv(registry.load("CartpoleBalance"), N, max_episode_steps=4) for _ in range(2))
    env.reset(seed=0)
    for actions in random_actions(6, 6):
        env.step(actions)
    other.set_state(env.get_state())
    for actions in random_actions(7, 6):
        for mine, theirs in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow_cases("SAC")
@pytest.mark.parametrize("config_class", [PPOConfig, SACConfig])
def test_training_stays_on_the_device_and_continues_exactly(config_class: Any, tmp_path: Path) -> None:
    config = config_class().environment(make_env).env_runners(num_envs_per_env_runner=N).debugging(seed=5)
    if config_class is PPOConfig:
        config.training(train_batch_size_per_learner=20 * N, minibatch_size=4 * N)
    else:
        config.training(train_batch_size_per_learner=16, num_steps_sampled_before_learning_starts=50)
        config.reporting(min_sample_timesteps_per_iteration=30 * N)
    algo = config.build()
    assert algo.env_runner_group.setting_of_arrays == ""
    for _ in range(2):
        result = algo.train()
    assert result["env_runners"]["num_episodes"] > N
    check_continuation(algo, tmp_path / "saved")
