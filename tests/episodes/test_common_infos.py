"""Infos of no agent in particular: an env gives them under `"__common__"`, and episodes have the same key."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from at_least import all_of
from corral import MultiAgentEnv, PPOConfig, SampleRequest
from corral.compat.rllib.episodes import MultiAgentEpisode as EpisodeOfRLlib
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode

OBS = np.zeros(2, np.float32)


class Weather(MultiAgentEnv):
    """Episodes of 5 steps, with an info of nobody at the reset and after each step but the third."""

    def __init__(self, config: Any = None) -> None:
        self.possible_agents = self.agents = ["p", "q"]
        self.observation_space, self.action_space = gym.spaces.Box(0, 1, (2,), np.float32), gym.spaces.Discrete(2)
        self.num_episodes = 0

    def infos(self) -> dict[str, Any]:
        common = {} if self.t == 3 else {"__common__": {"t": self.t, "episode": self.num_episodes}}
        return {**common, "p": {"own": self.t}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.num_episodes = 0, self.num_episodes + 1
        return dict.fromkeys("pq", OBS), self.infos()

    def step(self, action_dict: Any) -> Any:
        self.t += 1
        return (
            dict.fromkeys("pq", OBS),
            dict.fromkeys("pq", 1.0),
            {"__all__": self.t == 5},
            {"__all__": False},
            self.infos(),
        )


def times(infos: Any) -> list[int]:
    return [info["t"] for info in infos]


def test_callbacks_read_them_at_every_step() -> None:
    seen: list[list[int]] = []
    latest: list[Any] = []

    def note(episode: Any) -> None:
        seen.append(times(episode.get_infos()["__common__"]))
        latest.append(episode.get_infos(-1).get("__common__"))

    config = PPOConfig().environment(Weather).multi_agent(policies={"m"}).callbacks(on_episode_step=note)
    config.env_runners(num_envs_per_env_runner=1, rollout_fragment_length=3)
    config.training(train_batch_size_per_learner=6, minibatch_size=6, num_epochs=1)
    with config.debugging(seed=0).build() as algorithm:
        for _ in range(4):
            algorithm.train()
    # A chunk begins with the observation that the last one ended with.
    assert seen[:2] == [[0, 1], [0, 1, 2]] and [0, 1, 2, 4, 5] not in seen[:2]
    assert all_of(found == sorted(found) for found in seen)
    for infos in latest:
        assert infos is None or infos["t"] in (1, 2, 4, 5)
    assert None in latest


def test_episodes_of_a_request_have_them() -> None:
    config = PPOConfig().environment(Weather).multi_agent(policies={"m"}).env_runners(num_envs_per_env_runner=2)
    with config.debugging(seed=0).build() as algorithm:
        assert algorithm.env_runner is not None
        rollout = algorithm.env_runner.collect(SampleRequest(num_episodes=2, with_infos=True))
        episodes = rollout.episodes()
    for episode in episodes:
        assert times(episode.get_infos()["__common__"]) == [0, 1, 2, 4, 5]
        assert len({info["episode"] for info in episode.get_infos()["__common__"]}) == 1
        assert [info["own"] for info in episode.get_infos()["p"]] == [0, 1, 2, 3, 4, 5]


def built() -> MultiAgentEpisode:
    episode = MultiAgentEpisode("e")
    episode.add_env_reset(dict.fromkeys("pq", 0.0), {"__common__": {"t": 0}})
    for t in range(1, 6):
        infos = {} if t == 3 else {"__common__": {"t": t}}
        episode.add_env_step(dict.fromkeys("pq", float(t)), dict.fromkeys("pq", 0), dict.fromkeys("pq", 1.0), infos)
    return episode


def test_indices_are_env_steps() -> None:
    episode = built()
    assert episode.get_infos(2, "__common__") == {"__common__": {"t": 2}}
    assert episode.get_infos(3, "__common__") == {}
    assert episode.get_infos(3, "__common__", fill=None) == {}
    assert episode.get_infos([2, 3], "__common__", fill="none") == {"__common__": [{"t": 2}, "none"]}
    assert times(episode.get_infos(slice(1, 5), ["p", "__common__"])["__common__"]) == [1, 2, 4]
    assert [part.get("__common__") for part in episode.get_infos(slice(2, 5), return_list=True)] == [
        {"t": 2},
        None,
        {"t": 4},
    ]
    assert set(episode.get_infos(agent_ids="p")) == {"p"}
    assert "__common__" not in episode.get_rewards()
    with pytest.raises(KeyError, match="__common__"):
        episode.set_rewards(new_data={"__common__": [1.0]})


def test_parts_copies_and_chunks_keep_them() -> None:
    episode = built()
    assert times(episode[2:4].get_infos()["__common__"]) == [2, 4]
    with_lookback = episode.slice(slice(2, 4), len_lookback_buffer=1)
    assert times(with_lookback.get_infos(slice(-1, None), neg_index_as_lookback=True)["__common__"]) == [1, 2, 4]
    copied = MultiAgentEpisode.from_state(episode.get_state())
    assert times(copied.get_infos()["__common__"]) == [0, 1, 2, 4, 5]
    head = built()
    tail = head.cut()
    assert times(tail.get_infos()["__common__"]) == [5]
    tail.add_env_step({"p": 6.0, "q": 6.0}, {"p": 0, "q": 0}, {"p": 1.0}, {"__common__": {"t": 6}})
    head.concat_episode(tail)
    assert times(head.get_infos()["__common__"]) == [0, 1, 2, 4, 5, 6]
    from_data = MultiAgentEpisode(
        observations=[{"p": 0.0}, {"p": 1.0}, {"p": 2.0}],
        actions=[{"p": 0}, {"p": 0}],
        rewards=[{"p": 1.0}, {"p": 1.0}],
        infos=[{"__common__": {"t": 0}}, {}, {"__common__": {"t": 2}}],
        len_lookback_buffer=1,
    )
    assert times(from_data.get_infos()["__common__"]) == [2]


def test_episodes_of_rllib_have_agents_only_unless_asked() -> None:
    episode = EpisodeOfRLlib("e")
    episode.add_env_reset({"p": 0.0}, {"__common__": {"t": 0}})
    assert set(episode.get_infos()) == {"p"}
    assert episode.get_infos(-1, "__common__") == {"__common__": {"t": 0}}
    assert episode.last_info_for("__common__") == {"t": 0}
