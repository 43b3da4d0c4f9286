"""Atari games: ids without a prefix, and the standard preprocessing on the vector env of ale-py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

import warm
from corral import PPOConfig
from corral.envs.registration import registered_envs
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import ConfigError
from stored_frames import check_frames_are_stored_once

PONG = "ALE/Pong-v5"
STACKED = {"preprocessing": True}
SHORT = {**STACKED, "max_num_frames_per_episode": 80}  # 20 steps
Make = Callable[..., VectorEnv[Any, Any, Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VectorEnv[Any, Any, Any]] = []

    def make(env_config: dict[str, Any], env: str = PONG, **settings: Any) -> VectorEnv[Any, Any, Any]:
        made.append(make_vector_env(env, EnvContext(env_config), **{"num_envs": 3, **settings}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def played(env: VectorEnv[Any, Any, Any], num_steps: int, seed: int = 5) -> dict[str, NDArray[Any]]:
    """Return columns of random play, with the final observations of same-step autoreset by step and sub-env."""
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=seed)
    rows: dict[str, list[Any]] = {"obs": [obs], "rewards": [], "terminated": [], "truncated": [], "final": []}
    for _ in range(num_steps):
        actions = np.full(env.num_envs, rng.integers(6))
        obs, rewards, terminated, truncated, infos = env.step(actions)
        for name, value in zip(rows, (obs, rewards, terminated, truncated), strict=False):
            rows[name].append(np.copy(value))
        for i in np.flatnonzero(terminated | truncated):
            if "final_obs" in infos or "final_obs" in infos.get(i, {}):
                rows["final"].append(infos["final_obs"][i] if "final_obs" in infos else infos[i]["final_obs"])
    return {name: np.array(values) for name, values in rows.items()}


class TestIds:
    def test_need_no_prefix_and_no_import(self) -> None:
        script = f"from corral.envs.vector import resolve_env; print(resolve_env({PONG!r}))"
        found = warm.run([sys.executable, "-c", script])
        assert found.stdout.strip() == PONG

    def test_an_unknown_game_suggests_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown env id 'ALE/Pon-v5'\. Did you mean 'ALE/Pong-v5'\?"):
            PPOConfig().environment("ALE/Pon-v5").validate()

    def test_env_ids_that_other_processes_register_are_not_sent(self) -> None:
        gym.register("HandMade-v0", entry_point="corral.testing:CountingEnv")
        try:
            assert [spec.id for spec in registered_envs([PONG, "HandMade-v0"]).specs] == ["HandMade-v0"]
        finally:
            del gym.registry["HandMade-v0"]

    @pytest.mark.parametrize("num_envs", [1, 2])
    def test_without_preprocessing_are_the_envs_of_gymnasium(self, make: Make, num_envs: int) -> None:
        env = make({"obs_type": "ram"}, num_envs=num_envs)
        assert env.single_observation_space == gym.make(PONG, obs_type="ram").observation_space


class TestPreprocessing:
    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
    def test_is_the_same_in_the_native_vector_env_and_one_by_one(self, make: Make, mode: str) -> None:
        chance = {"noop_max": 0, "repeat_action_probability": 0.0}
        for settings, num_steps in (
            (SHORT, 19),
            ({**SHORT, **chance}, 45),
        ):  # chance differs from the second episode on
            native = make(settings, autoreset_mode=mode)
            assert isinstance(native, ale_py.AtariVectorEnv)
            columns = played(native, num_steps)
            one_by_one = played(make(settings, autoreset_mode=mode, vectorization="sync"), num_steps)
            for name, column in columns.items():
                np.testing.assert_array_equal(column, one_by_one[name])
        assert columns["obs"].shape == (46, 3, 4, 84, 84)
        assert columns["truncated"].sum() == 6
        assert not columns["terminated"].any()
        assert len(columns["final"]) == (6 if mode == "same_step" else 0)

    @pytest.mark.slow
    def test_is_the_same_in_processes(self, make: Make) -> None:
        columns, others = (played(make(SHORT, num_envs=2, vectorization=form), 20) for form in ("auto", "async"))
        np.testing.assert_array_equal(columns["obs"], others["obs"])

    def test_seed_of_a_sub_env_is_the_seed_plus_its_index(self, make: Make) -> None:
        three, one = played(make(STACKED), 30, seed=5), played(make(STACKED, num_envs=1), 30, seed=7)
        np.testing.assert_array_equal(three["obs"][:, 2], one["obs"][:, 0])
        assert (three["obs"][:, 0] != three["obs"][:, 1]).any()

    def test_frames_match_a_slow_reference(self, make: Make) -> None:
        settings = {"noop_max": 0, "use_fire_reset": False, "repeat_action_probability": 0.0}
        stacks = played(make({**STACKED, **settings}, num_envs=1), 25)["obs"][1:, 0]
        for stack, newest in zip(stacks, reference_frames(25), strict=True):
            assert np.abs(stack[-1].astype(int) - newest).max() <= 1  # rounding
        np.testing.assert_array_equal(stacks[3:, 0], stacks[:-3, 3])  # the oldest of 4 was the newest 3 steps before

    def test_rewards_are_the_points_of_the_game(self, make: Make) -> None:
        rewards = played(make(STACKED, "ALE/MsPacman-v5"), 150)["rewards"]
        assert set(np.unique(rewards)) >= {0, 10}  # a pill is worth 10 points

    def test_two_vector_envs_have_their_own_autoreset_modes(self, make: Make) -> None:
        before = dict(VectorEnv.metadata)
        first, second = (make(STACKED, autoreset_mode=mode) for mode in ("next_step", "same_step"))
        assert first.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        assert second.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        assert VectorEnv.metadata == before

    def test_renders_the_newest_frame(self, make: Make) -> None:
        env: Any = make({**STACKED, "render_mode": "rgb_array"}, num_envs=1)
        obs, _ = env.reset(seed=0)
        np.testing.assert_array_equal(env.envs[0].render(), np.repeat(obs[0, -1, :, :, None], 3, axis=2))

    @pytest.mark.parametrize("num_envs", [1, 2])
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"stack": 2}, r"has no setting 'stack'\. Did you mean 'stack_num'\?"),
            ({"obs_type": "ram"}, r"'ALE/Pong-v5' with preprocessing=True has no setting 'obs_type'"),
            ({"preprocessing": "false"}, r"env_config\['preprocessing'\]='false' of env 'ALE/Pong-v5' must be True or"),
            ({"life_loss_info": True}, r"env_config\['life_loss_info'\] does not apply .* no reset follows"),
            ({"num_envs": 4}, r"env_config\['num_envs'\] does not apply .* set num_envs_per_env_runner\."),
        ],
    )
    def test_settings_that_do_not_apply_are_refused(
        self, make: Make, num_envs: int, settings: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            make({**STACKED, **settings}, num_envs=num_envs)

    def test_a_window_is_refused(self, make: Make) -> None:
        with pytest.raises(ConfigError, match=r"render_mode='human' does not apply"):
            make({**STACKED, "render_mode": "human"}, num_envs=1)


def reference_frames(num_steps: int) -> Iterator[NDArray[Any]]:
    """Yield the preprocessed frames of `played`: the greater of the last two of 4 screens, averaged over areas."""
    game = ale_py.ALEInterface()
    game.setFloat("repeat_action_probability", 0.0)
    game.loadROM(ale_py.roms.get_rom_path("pong"))
    game.reset_game()
    rng, actions = np.random.default_rng(0), game.getMinimalActionSet()
    for _ in range(num_steps):
        action = actions[rng.integers(6)]
        screens = []
        for _ in range(4):
            game.act(action)
            screens.append(game.getScreenGrayscale())
        yield area_mean(area_mean(np.maximum(*screens[2:]).astype(float), 84).T, 84).T


def area_mean(image: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return an image with fewer rows, each the mean of the rows that it covers, weighted by how much it covers."""
    size, tops, rows = len(image) / num_rows, np.arange(len(image)), []
    for i in range(num_rows):
        overlap = np.clip(np.minimum((i + 1) * size, tops + 1) - np.maximum(i * size, tops), 0, 1)
        rows.append((overlap[:, None] * image).sum(0) / overlap.sum())
    return np.array(rows)


class TestAlgorithms:
    def test_episodes_that_the_time_limit_ends_are_truncated_and_count_their_own_steps(self, make_runner: Any) -> None:
        runner = make_runner(PONG, num_envs=2, env_config=SHORT)
        rollout = runner.sample(num_timesteps=80)
        assert rollout.truncated.sum() >= 2
        assert not rollout.terminated.any()
        assert set(runner.last_statistics.lengths.tolist()) == {20}
        ends = rollout.truncated[:-1]
        np.testing.assert_array_equal(~rollout.valid[1:], ends)  # the next row only resets

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_replay_stores_each_frame_once(self, make_runner: Any, mode: str) -> None:
        runner = make_runner(PONG, num_envs=2, env_config=SHORT, autoreset_mode=mode)
        check_frames_are_stored_once(runner)
