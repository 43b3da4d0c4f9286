"""Callbacks that compare the live episodes of several agents with those that are built by hand from what envs gave."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_steps import build, module_of, same
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode


def assert_same(found: MultiAgentEpisode, wanted: MultiAgentEpisode) -> None:
    """Compare an episode with one that was built by hand."""
    assert (found.env_t, found.is_terminated, found.is_truncated) == (
        wanted.env_t,
        wanted.is_terminated,
        wanted.is_truncated,
    )
    ended = {agent for agent, own in wanted.agent_episodes.items() if own.is_done}
    for agent in ended | found.agent_ids:
        own, by_hand = found.agent_episodes[agent], wanted.agent_episodes[agent]
        assert (own.agent_id, own.module_id, own.t) == (agent, module_of(agent), by_hand.t)
        assert (own.is_terminated, own.is_truncated) == (by_hand.is_terminated, by_hand.is_truncated)
        assert own.get_return() == by_hand.get_return()
        for name in ("get_observations", "get_actions", "get_rewards"):
            assert np.array_equal(getattr(own, name)(), getattr(by_hand, name)()), (name, agent)
            # What hangs is in the next chunk.
            for how in ({"env_steps": False}, {"fill": -5}) if wanted.is_done else ():
                one, other = (getattr(part, name)(agent_ids=agent, **how)[agent] for part in (found, wanted))
                assert np.array_equal(one, other), (name, agent, how)
        assert own.get_infos() == by_hand.get_infos()


class Watching:
    """Callbacks that compare each live episode with one that is built by hand from what its env gave so far.

    Attributes:
        trace: Event, sub-env, id and env steps of each call.
        num_hanging: Number of hanging actions that were seen.
    """

    def __init__(self) -> None:
        self.trace: list[tuple[str, int, str, int]] = []
        self.num_hanging = 0

    def events(self) -> dict[str, Any]:
        return {
            "on_episode_created": lambda episode, env_index: self.note("created", episode, env_index),
            "on_episode_start": lambda episode, env_index: self.note("start", episode, env_index),
            "on_episode_step": self.check,
            "on_episode_end": self.check_whole,
        }

    def played_so_far(self, runner: Any, env_index: int) -> MultiAgentEpisode:
        """Return the current episode of a sub-env, built from what its env gave so far."""
        played = runner.env.envs[env_index].unwrapped.episodes[-1]
        played.outputs = [{} for _ in played.actions]
        episode: MultiAgentEpisode = build(played)
        return episode

    def note(self, event: str, episode: Any, env_index: int) -> None:
        self.trace.append((event, env_index, episode.id_, episode.env_t))

    def check(self, episode: Any, env_index: int, env_runner: Any, rl_module: Any) -> None:
        self.note("step", episode, env_index)
        assert set(rl_module) == {"main", "other"}
        wanted = self.played_so_far(env_runner, env_index)
        assert (episode.env_t, episode.is_done) == (wanted.env_t, wanted.is_done)
        assert episode.get_agents_to_act() == wanted.get_agents_to_act()
        assert episode.get_agents_that_stepped() == wanted.get_agents_that_stepped()
        for name in ("get_observations", "get_infos", "get_actions", "get_rewards"):
            assert same(getattr(episode, name)(-1), getattr(wanted, name)(-1)), name
        assert all("dist_inputs" in part for part in episode.get_extra_model_outputs(None, -1).values())
        assert episode.get_return(include_hanging_rewards=True) == wanted.get_return(include_hanging_rewards=True)
        returns = episode.get_agent_returns(include_hanging_rewards=True)
        for agent, own in wanted.agent_episodes.items():
            if len(own) or agent in wanted.get_actions(agent_ids=agent):
                assert returns[agent] == wanted.get_agent_returns(include_hanging_rewards=True)[agent]
        assert episode.get_module_returns().keys() <= {"main", "other"}
        self.num_hanging += len(episode.get_actions(-1).keys() - episode.get_observations(-1).keys())
        episode.custom_data.setdefault("steps", []).append(episode.env_t)

    def check_whole(self, episode: Any, env_index: int, env_runner: Any, prev_episode_chunks: list[Any]) -> None:
        self.note("end", episode, env_index)
        assert episode.custom_data["steps"] == list(range(1, episode.env_t + 1))
        first, *others = [*prev_episode_chunks, episode]
        whole = MultiAgentEpisode.from_state(first.get_state())
        for chunk in others:
            whole.concat_episode(chunk)
        assert_same(whole, self.played_so_far(env_runner, env_index))


class WatchingWholes(Watching):
    """At the end, the episode itself answers for all of its steps."""

    num_rollouts = 0

    def events(self) -> dict[str, Any]:
        return {**super().events(), "on_episode_end": self.check_end, "on_sample_end": self.count_rollouts}

    def count_rollouts(self) -> None:
        self.num_rollouts += 1

    def check_end(self, episode: Any, env_index: int, env_runner: Any) -> None:
        self.note("end", episode, env_index)
        wanted = self.played_so_far(env_runner, env_index)
        episode.validate()
        assert_same(episode, wanted)
        assert len(episode) == episode.env_t == len(wanted)
        assert episode.env_t_started == 0
        assert episode.agent_steps() == wanted.agent_steps()
        assert episode.agent_ids == wanted.agent_ids
        assert episode.get_agent_returns() == wanted.get_agent_returns()
        for hanging in (False, True):
            assert episode.get_return(include_hanging_rewards=hanging) == wanted.get_return(hanging)
        for name in ("get_observations", "get_infos", "get_actions", "get_rewards"):
            for how in ({}, {"indices": -1}, {"indices": [0, -1]}, {"indices": slice(1, 3)}, {"return_list": True}):
                assert same(getattr(episode, name)(**how), getattr(wanted, name)(**how)), (name, how)
        for agent, outputs in episode.get_extra_model_outputs("dist_inputs", env_steps=False).items():
            assert len(outputs) == len(episode.agent_episodes[agent])
        for part in (slice(0, 2), slice(1, None), slice(None)):
            assert_same_window(episode[part], wanted[part])
        again = MultiAgentEpisode.from_state(episode.get_state())
        assert_same(again, wanted)
        assert again.get_return(True) == wanted.get_return(True)


def assert_same_window(found: MultiAgentEpisode, wanted: MultiAgentEpisode) -> None:
    assert (found.env_t_started, found.env_t, found.agent_ids) == (wanted.env_t_started, wanted.env_t, wanted.agent_ids)
    for name in ("get_observations", "get_infos", "get_actions", "get_rewards"):
        assert same(getattr(found, name)(), getattr(wanted, name)())
