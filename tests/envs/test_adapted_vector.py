"""EnvPool, and vector envs that follow Gymnasium's calls without its class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from corral import PPOConfig
from corral.envs import env_ids
from corral.envs.adapted_vector import AdaptedVectorEnv, EnvPoolVectorEnv
from corral.envs.vector import EnvContext, make_vector_env, resolve_env
from corral.errors import ConfigError, EnvError
from corral.testing import CountingEnv
from stored_frames import check_frames_are_stored_once

Make = Callable[..., VectorEnv[Any, Any, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VectorEnv[Any, Any, Any]] = []

    def make(env: Any, env_config: dict[str, Any] | None = None, **settings: Any) -> VectorEnv[Any, Any, Any]:
        made.append(make_vector_env(env, EnvContext(env_config or {}), **{"num_envs": None, **settings}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def played(env: VectorEnv[Any, Any, Any], num_steps: int, seed: int) -> NDArray[Any]:
    """Return the observations `[T + 1, N, ...]` of random play, in which all sub-envs take the same actions."""
    env.single_action_space.seed(0)
    rows = [env.reset(seed=seed)[0]]
    for _ in range(num_steps):
        action = np.asarray(env.single_action_space.sample())
        rows.append(env.step(np.repeat(action[None], env.num_envs, axis=0))[0])
    return np.array(rows)


def envpool() -> Any:
    """Return the package; its import takes a second in each process of the tests."""
    return importlib.import_module("envpool")


class TestEnvPool:
    def test_an_object_from_a_factory_is_a_vector_env(self) -> None:
        config = PPOConfig().environment(lambda: envpool().make_gymnasium("CartPole-v1", num_envs=16))
        with config.training(train_batch_size_per_learner=512).debugging(seed=0).build() as algo:
            assert algo.env_runner.num_envs == 16
            assert 10 < algo.train()["env_runners"]["episode_return_mean"] < 60  # random play: about 22

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_an_id_is_made_with_the_number_of_sub_envs_asked_for(self, make: Make, num_envs: int) -> None:
        env = make("envpool:HalfCheetah-v5", num_envs=num_envs)
        assert isinstance(env, EnvPoolVectorEnv)
        assert env.num_envs == num_envs
        gymnasium_env = gym.make("HalfCheetah-v5")
        assert env.single_observation_space == gymnasium_env.observation_space
        assert env.single_action_space.shape == gymnasium_env.action_space.shape

    @pytest.mark.parametrize("from_factory", [False, True])
    def test_seed_of_a_sub_env_is_the_seed_plus_its_index(self, make: Make, from_factory: bool) -> None:
        def env_of(num_envs: int) -> VectorEnv[Any, Any, Any]:
            if from_factory:
                return make(partial(envpool().make_gymnasium, "Acrobot-v1", num_envs=num_envs))
            return make("envpool:Acrobot-v1", num_envs=num_envs)

        three = env_of(3)
        first = played(three, 20, seed=5)
        np.testing.assert_array_equal(first, played(three, 20, seed=5))
        np.testing.assert_array_equal(first[:, 2], played(env_of(1), 20, seed=7)[:, 0])
        assert (first[:, 0] != first[:, 1]).any()
        played(three, 1, seed=2**31 - 2)  # seeds of EnvPool are int32

    def test_runners_with_other_seeds_have_other_episodes(self, make_runner: Any) -> None:
        def first_obs(**settings: Any) -> Any:
            return make_runner("envpool:CartPole-v1", num_envs=2, **settings).sample(num_timesteps=2).obs[0]

        np.testing.assert_array_equal(first_obs(), first_obs())
        assert (first_obs() != first_obs(seed=1)).all()
        assert (first_obs() != first_obs(worker_index=1)).all()

    def test_cartpole_steps_as_gymnasiums(self, make: Make) -> None:
        pool, env = (
            make("envpool:CartPole-v1", {"max_episode_steps": 30}, num_envs=1),
            gym.make("CartPole-v1").unwrapped,
        )
        rng, num_ends = np.random.default_rng(3), 0
        obs, _ = pool.reset(seed=3)
        env.reset()
        env.state = obs[0].astype(float)  # type: ignore[attr-defined]
        for _ in range(400):
            action = rng.integers(2, size=1)
            obs, rewards, terminated, truncated, infos = pool.step(action)
            expected = env.step(action[0])
            np.testing.assert_allclose(obs[0], expected[0], atol=1e-4)
            out_of_time = infos["elapsed_step"][0] == 30
            assert (rewards[0], terminated[0] or out_of_time, truncated[0]) == (
                1,
                expected[2] or out_of_time,
                out_of_time,
            )
            if terminated[0] or truncated[0]:
                obs, rewards, terminated, truncated, _ = pool.step(action)  # only resets
                assert (rewards[0], terminated[0], truncated[0]) == (0, False, False)
                assert (np.abs(obs) <= 0.05).all()
                env.reset()
                env.state = obs[0].astype(float)  # type: ignore[attr-defined]
                num_ends += 1
        assert num_ends > 10

    def test_half_cheetah_steps_as_gymnasiums(self, make: Make) -> None:
        pool, env = make("envpool:HalfCheetah-v5", num_envs=1), gym.make("HalfCheetah-v5").unwrapped
        obs, _ = pool.reset(seed=0)
        env.reset()
        env.set_state(np.concatenate([[0.0], obs[0, :8]]), obs[0, 8:])  # type: ignore[attr-defined]
        rng = np.random.default_rng(0)
        for _ in range(20):
            actions = rng.uniform(-1, 1, (1, 6))
            obs, rewards, terminated, truncated, infos = pool.step(actions)
            expected, reward, *_, info = env.step(actions[0])
            np.testing.assert_allclose(obs[0], expected, atol=1e-3)
            assert rewards[0] == pytest.approx(float(reward), abs=1e-3)
            assert infos["x_velocity"][0] == pytest.approx(info["x_velocity"], abs=1e-3)
            assert not (terminated[0] or truncated[0])

    def test_statistics_and_final_observations_match_a_slow_loop(self, make_runner: Any, make: Make) -> None:
        limit = {"max_episode_steps": 15}
        runner = make_runner("envpool:CartPole-v1", num_envs=4, env_config=limit)
        rollout = runner.sample(num_timesteps=400)
        pool = make("envpool:CartPole-v1", limit, num_envs=4)
        lengths: list[tuple[int, int, int]] = []  # row and sub-env of the end, and length
        pool.reset(seed=runner.env.pool.config["env_seed"][0])
        count, resetting = np.zeros(4, int), np.zeros(4, bool)
        for t in range(rollout.num_rows):
            np.testing.assert_array_equal(rollout.valid[t], ~resetting)
            obs, _, terminated, truncated, _ = pool.step(rollout.actions[t])
            np.testing.assert_array_equal(rollout.obs[t + 1], obs)  # of the last row of an episode: the final one
            np.testing.assert_array_equal(rollout.terminated[t], terminated)
            np.testing.assert_array_equal(rollout.truncated[t], truncated)
            count = np.where(resetting, 0, count + 1)
            resetting = terminated | truncated
            lengths += [(t, i, int(count[i])) for i in np.flatnonzero(resetting)]
        assert sorted(runner.last_statistics.lengths.tolist()) == sorted(length for *_, length in lengths)
        assert sorted(runner.last_statistics.returns.tolist()) == sorted(length for *_, length in lengths)
        assert rollout.truncated.any()
        assert rollout.terminated.any()

    def test_infos_match_the_sub_env(self, make_runner: Any) -> None:
        seen: list[tuple[int, int, int]] = []

        def note(episode: Any, env_index: int) -> None:
            info = episode.get_infos(-1)
            seen.append((len(episode), int(info["elapsed_step"]), int(info["players"]["env_id"]) - env_index))

        runner = make_runner("envpool:CartPole-v1", num_envs=3, on_episode_step=note)
        runner.sample(num_timesteps=150)
        assert len(seen) >= 150
        assert all(length == elapsed and difference == 0 for length, elapsed, difference in seen)

    def test_replay_stores_each_frame_once(self, make_runner: Any) -> None:
        runner = make_runner("envpool:Pong-v5", num_envs=2, env_config={"max_episode_steps": 12})
        check_frames_are_stored_once(runner)

    @pytest.mark.parametrize(
        ("env", "settings", "words"),
        [
            ("envpool:Pon-v5", {}, r"EnvPool has no env 'Pon-v5'\. Did you mean 'Pong-v5'\?"),
            ("envpool:Nothing", {}, r"EnvPool has no env 'Nothing'\. envpool\.list_all_envs\(\)"),
            ("envpool:Pong-v5", {"env_config": {"stack": 2}}, r"no setting 'stack'\. Did you mean 'stack_num'\?"),
            ("envpool:Pong-v5", {"env_config": {"seed": 2}}, r"\['seed'\] does not apply .* debugging\(seed=\.\.\.\)"),
            ("envpool:Pong-v5", {"env_config": {"num_envs": 2}}, r"\['num_envs'\] .* num_envs_per_env_runner\."),
            ("envpool:CartPole-v1", {"wrappers": [lambda env: env]}, "wrappers=.* EnvPool steps as a whole"),
            ("envpool:CartPole-v1", {"vectorization": "sync"}, "vectorization='sync' .* EnvPool steps as a whole"),
            ("envpool:CartPole-v1", {"autoreset_mode": "same_step"}, "autoreset_mode='same_step' contradicts"),
            ("envpool:CartPole-v1", {"env_reset_fn": lambda: None}, "resets its sub-envs itself, so that env_reset_fn"),
        ],
    )
    def test_settings_that_do_not_apply_are_refused(self, env: str, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            PPOConfig().copy(env=env, **settings).build()

    @pytest.mark.parametrize(
        ("pool", "words"),
        [
            (lambda: envpool().make_dm("CartPole-v1", num_envs=2), "env_type='dm': make it with env_type='gymnasium'"),
            (lambda: envpool().make_gymnasium("CartPole-v1", num_envs=4, batch_size=2), "batch_size=2 of num_envs=4"),
        ],
    )
    def test_pools_with_other_calls_are_refused(self, make: Make, pool: Any, words: str) -> None:
        with pytest.raises(EnvError, match=words):
            make(pool)

    def test_a_missing_package_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str, path: str) -> Any:
            raise ConfigError(f"{path!r} cannot be imported: No module named {name!r}")

        monkeypatch.setattr(env_ids, "module_named", missing)
        with pytest.raises(ConfigError, match=r"No module named 'envpool'\. Run `pip install 'corral\[envpool\]'`\.$"):
            resolve_env("envpool:Pong-v5")


class Other:
    """A vector env of another library: it has the calls of Gymnasium's, and not the class."""

    def __init__(self, *, mode: Any = AutoresetMode.NEXT_STEP, names: str = "both") -> None:
        modes = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
        known = next((m for m in modes if mode in (m, m.value, m.name.lower())), modes[0])
        self._env = gym.vector.SyncVectorEnv([partial(CountingEnv, {"episode_length": 4})] * 3, autoreset_mode=known)
        self.num_envs = 3
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        if names != "all":
            self.single_observation_space = self._env.single_observation_space
            self.single_action_space = self._env.single_action_space
        if names != "single":
            self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.is_closed = False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return self._env.step(actions)

    def close(self) -> None:
        self.is_closed = True


class TestOtherVectorEnvs:
    @pytest.mark.parametrize("names", ["both", "single", "all"])
    def test_are_recognised_by_their_spaces(self, make: Make, names: str) -> None:
        env = make(partial(Other, names=names))
        assert isinstance(env, AdaptedVectorEnv)
        assert env.num_envs == 3
        assert env.single_observation_space == CountingEnv().observation_space
        assert env.single_action_space == CountingEnv().action_space
        env.close()
        assert env.env.is_closed

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, "NextStep", "next_step", "SameStep"])
    def test_sample_as_gymnasiums(self, make_runner: Any, mode: Any) -> None:
        def ready() -> Any:
            return Other(mode=mode)._env

        expected, given = (
            make_runner(env, num_envs=None).sample(num_timesteps=30) for env in (ready, lambda: Other(mode=mode))
        )
        np.testing.assert_array_equal(expected.obs, given.obs)
        np.testing.assert_array_equal(expected.valid, given.valid)
        assert given.valid.all() == (mode == "SameStep")
        assert given.terminated.sum() > 3

    def test_without_an_autoreset_mode_are_refused(self, make: Make) -> None:
        with pytest.raises(EnvError, match=r"metadata\['autoreset_mode'\] of a VectorEnv must be .* got None"):
            make(partial(Other, mode=None))

    def test_without_spaces_are_refused_with_the_name_of_the_space(self, make: Make) -> None:
        class Spaceless(Other):
            def __init__(self) -> None:
                super().__init__(names="single")
                del self.single_action_space

        with pytest.raises(EnvError, match=r"Spaceless has num_envs=3, and its single_action_space must be"):
            make(Spaceless)

    def test_a_space_of_all_that_is_no_batch_is_refused(self, make: Make) -> None:
        class Uneven(Other):
            def __init__(self) -> None:
                super().__init__(names="all")
                self.action_space = spaces.MultiDiscrete([2, 3, 2])

        with pytest.raises(EnvError, match="single_action_space must be a gymnasium space"):
            make(Uneven)
