"""Infos and notes of callbacks come to the driver only if somebody there reads them; reading others is an error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from corral import PPOConfig
from corral.algorithms.ppo import PPO
from corral.core.metrics.timers import Timers
from corral.data.episodes.rollout import Rollout
from corral.errors import EpisodeError
from corral.runners.requests import SampleRequest
from corral.testing import CountingEnv


class Telling(CountingEnv):
    """Every step gives a large info."""

    def step(self, action: int) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"text": "x" * 10_000, "t": reward}


def note(episode: Any) -> None:
    episode.custom_data["blob"] = "y" * 100_000
    episode.add_temporary_timestep_data("t", episode.t)


def config(num_env_runners: int) -> PPOConfig:
    config = PPOConfig().environment(Telling, disable_env_checking=True).engine("local").debugging(seed=0)
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=1)
    config.training(train_batch_size_per_learner=12, minibatch_size=None, num_epochs=1)
    return config.callbacks(on_episode_step=note)


class Reading(PPO):
    READS_INFOS = True
    seen: Any = None

    def sample(self, num_timesteps: int) -> list[Rollout]:
        rollouts = super().sample(num_timesteps)
        self.seen = [rollout.info_column("t").tolist() for rollout in rollouts]
        return rollouts


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_they_stay_in_the_runner_and_reading_them_names_the_remedy(num_env_runners: int) -> None:
    with config(num_env_runners).build() as algo:
        (rollout,) = algo.env_runner_group.sample(SampleRequest(num_timesteps=12), Timers())
    assert len(pickle.dumps(rollout)) < 10_000
    episode = rollout.episodes()[0]
    part = episode[1:]
    assert episode.get_return() == part.get_return() + 1
    for read in (
        lambda: rollout.info_column("t"),
        lambda: episode.get_infos(-1),
        lambda: part.get_infos(),
        lambda: episode.custom_data["blob"],
        lambda: part.custom_data,
        lambda: episode.get_temporary_timestep_data("t"),
    ):
        with pytest.raises(EpisodeError, match=r"with_infos=True.*READS_INFOS = True"):
            read()


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_they_come_if_they_are_asked_for(num_env_runners: int) -> None:
    with config(num_env_runners).build() as algo:
        (rollout,) = algo.env_runner_group.sample(SampleRequest(num_timesteps=3, with_infos=True), Timers())
    episode = rollout.episodes()[0]
    assert [info["t"] for info in episode.get_infos(slice(1, None))] == [1, 2, 3]
    assert len(episode.custom_data["blob"]) == 100_000
    assert episode.get_temporary_timestep_data("t") == [1, 2, 3]


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_an_algorithm_with_reads_infos_gets_infos_without_any_callback(num_env_runners: int) -> None:
    experiment = config(num_env_runners)
    experiment.callback_functions.clear()
    with Reading(experiment) as algo:
        algo.train()
        assert algo.seen[0][:3] == [[1.0], [2.0], [3.0]]
