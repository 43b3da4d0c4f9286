"""An episode at its end answers for all of its steps, also where it spans several rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig
from corral.callbacks.callback import Callback
from corral.errors import EpisodeError
from corral.runners.runner import EnvRunner

LENGTH = 25


class Counts(gym.Env[Any, Any]):
    """Observation, reward and info are the step of the episode, from 1 on; episodes have 25 steps."""

    action_space = gym.spaces.Discrete(4)

    def __init__(self, config: Any = None) -> None:
        shape = (128, 128, 3) if (config or {}).get("images") else (1,)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {"t": 0}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), float(self.t), False, self.t >= LENGTH, {"t": self.t}

    def _obs(self) -> Any:
        return np.full(self.observation_space.shape, self.t, np.float32)


def run(callback: Any, num_samples: int = 12, **settings: Any) -> EnvRunner:
    """Sample in rollouts of 7 rows, so that each episode spans four or five of them."""
    config = PPOConfig().environment(Counts, env_config=settings.pop("env_config", {})).callbacks(**callback)
    config.env_runners(num_envs_per_env_runner=2, **settings).debugging(seed=0)
    runner = EnvRunner(config.freeze())
    for _ in range(num_samples):
        runner.sample(num_timesteps=14)
    runner.stop()
    return runner


def check(episode: Any) -> None:
    assert len(episode) == episode.t == LENGTH
    assert episode.t_started == 0
    assert episode.return_before == 0
    assert episode.get_rewards().tolist() == list(range(1, LENGTH + 1))
    assert episode.get_rewards([0, -1]).tolist() == [1, LENGTH]
    assert episode.get_return() == sum(range(1, LENGTH + 1))
    assert episode.get_observations()[:, 0].tolist() == list(range(LENGTH + 1))
    assert episode.get_observations(-1).tolist() == [LENGTH]
    assert [info["t"] for info in episode.get_infos()] == list(range(LENGTH + 1))
    assert episode.get_infos(3) == {"t": 3}
    assert episode.get_infos(-2) == {"t": LENGTH - 1}
    assert episode.get_infos(slice(5, 9)) == [{"t": t} for t in range(5, 9)]
    assert episode.get_actions().shape == (LENGTH,)
    assert episode.get_extra_model_outputs("dist_inputs").shape == (LENGTH, 4)
    middle = episode[5:20]
    assert middle.get_rewards().tolist() == list(range(6, 21))
    assert [info["t"] for info in middle.get_infos()] == list(range(5, 21))
    again = type(episode).from_state(episode.get_state())
    assert again.get_return() == episode.get_return()
    assert len(again) == LENGTH


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_length_getters_infos_and_slices_are_of_the_whole_episode(mode: str) -> None:
    found: list[Any] = []

    def end(episode: Any) -> None:
        check(episode)
        found.append(episode)

    run({"on_episode_end": end}, autoreset_mode=mode)
    assert len(found) >= 4


def test_callbacks_with_any_arguments_get_the_whole_episode_too() -> None:
    found: list[Any] = []

    class Listens(Callback):
        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            check(episode)
            first, *others = kwargs["prev_episode_chunks"]
            for chunk in [*others, episode]:  # the last chunk of the whole is appended
                first.concat_episode(chunk)
            assert first.get_rewards().tolist() == list(range(1, LENGTH + 1))
            found.append(episode)

    run({"callbacks_class": Listens})
    assert len(found) >= 4


def test_a_callback_that_names_the_earlier_chunks_gets_the_last_chunk() -> None:
    found: list[Any] = []

    def chunks(episode: Any, prev_episode_chunks: Any) -> None:
        assert sum(map(len, [*prev_episode_chunks, episode])) == LENGTH
        found.append(len(episode))

    whole: list[int] = []
    run({"on_episode_end": [chunks, lambda episode: whole.append(len(episode))]})
    assert max(found) <= 7
    assert set(whole) == {LENGTH}


def test_steps_of_the_last_rollout_can_be_written_at_the_end() -> None:
    def end(episode: Any) -> None:
        episode.set_rewards(new_data=100.0, at_indices=-1)
        episode.set_rewards(new_data=-episode.get_rewards(slice(0, 24)), at_indices=slice(0, 24))
        episode.set_extra_model_outputs(key="bonus", new_data=np.arange(LENGTH, dtype=np.float32))

    config = PPOConfig().environment(Counts).callbacks(on_episode_end=end).debugging(seed=0)
    runner = EnvRunner(config.env_runners(num_envs_per_env_runner=1, autoreset_mode="same_step").freeze())
    rollouts = [runner.sample(num_timesteps=10) for _ in range(3)]
    runner.stop()
    assert rollouts[0].rewards[:, 0].tolist() == list(range(1, 11))  # learned from already
    assert rollouts[2].rewards[:5, 0].tolist() == [-21, -22, -23, -24, 100]
    assert rollouts[2]["bonus"][:5, 0].tolist() == [20, 21, 22, 23, 24]


def test_images_of_earlier_chunks_are_kept_only_where_they_are_asked_for() -> None:
    found: list[Callable[[], Any]] = []

    def small(episode: Any) -> None:
        assert len(episode) == LENGTH
        assert episode.get_infos(0) == {"t": 0}
        assert episode.get_return() == sum(range(1, LENGTH + 1))
        with pytest.raises(EpisodeError, match="prev_episode_chunks"):
            episode.get_observations()
        assert all("obs" not in chunk._columns for chunk in episode._earlier)
        found.append(episode)

    def all_of_it(episode: Any, **kwargs: Any) -> None:
        assert episode.get_observations()[:, 0, 0, 0].tolist() == list(range(LENGTH + 1))
        found.append(episode)

    for callback in (small, all_of_it):
        found.clear()
        run({"on_episode_end": callback}, num_samples=5, env_config={"images": True})
        assert found


def test_nothing_is_kept_without_a_listener_at_the_end() -> None:
    runner = run({"on_episode_step": lambda episode: None, "on_episode_end": lambda env_index: None})
    assert runner.stepping.events is not None
    assert not runner.stepping.events.keeps_small
    assert not any(runner.stepping.events._chunks)


def test_a_restored_run_answers_for_the_steps_before_it_was_saved(tmp_path: Any) -> None:
    lengths: list[int] = []
    config = PPOConfig().environment(Counts).callbacks(on_episode_end=lambda episode: lengths.append(len(episode)))
    config.env_runners(num_envs_per_env_runner=1).training(train_batch_size_per_learner=10, minibatch_size=10)
    with config.debugging(seed=0).build() as algo:
        algo.train()
        algo.save(tmp_path / "saved")
    with config.copy().build() as again:
        again.restore_from_path(tmp_path / "saved")
        for _ in range(4):
            again.train()
    assert lengths
    assert set(lengths) == {LENGTH}
