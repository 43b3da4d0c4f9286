"""Classes of episodes of the user's own, which callbacks receive."""

from __future__ import annotations

from typing import Any

import pytest

from corral import PPOConfig, SampleRequest
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.errors import ConfigError
from corral.testing import CountingEnv
from scripted_agents import ScriptedAgents


class TwiceEpisode(SingleAgentEpisode):
    """An episode with a method more."""

    __slots__ = ()

    def twice(self) -> float:
        return 2 * self.get_return()


class TwiceEpisodes(MultiAgentEpisode):
    """An episode of several agents whose episodes have a method more."""

    agent_class = TwiceEpisode


def config_of(is_multi_agent: bool, **callbacks: Any) -> PPOConfig:
    env = (lambda context: ScriptedAgents(context.vector_index)) if is_multi_agent else CountingEnv
    config = PPOConfig().environment(env, disable_env_checking=True).env_runners(num_envs_per_env_runner=2)
    if is_multi_agent:
        config.multi_agent(policies={"main"})
    path = f"{__name__}:{'TwiceEpisodes' if is_multi_agent else 'TwiceEpisode'}"
    config.env_runners(episode_class=path)
    return config.callbacks(**callbacks).debugging(seed=0)


@pytest.mark.parametrize("is_multi_agent", [False, True])
def test_callbacks_and_rollouts_have_episodes_of_the_class(is_multi_agent: bool) -> None:
    seen: list[Any] = []

    def keep(episode: Any, **kwargs: Any) -> None:
        seen.append(episode)

    def keep_chunks(episode: Any, prev_episode_chunks: list[Any], **kwargs: Any) -> None:
        seen.extend([episode, *prev_episode_chunks])

    config = config_of(is_multi_agent, on_episode_start=keep, on_episode_step=keep, on_episode_end=keep_chunks)
    with config.build() as algorithm:
        state = None
        for _ in range(6):
            for rollout in algorithm.env_runner_group.sample(SampleRequest(num_timesteps=6)):
                seen += rollout.episodes()
            state = algorithm.get_state()
    with config.build() as algorithm:
        algorithm.set_state(state)
        algorithm.env_runner_group.sample(SampleRequest(num_timesteps=40))
    kinds = {type(each) for each in seen}
    assert kinds == {TwiceEpisodes if is_multi_agent else TwiceEpisode}
    agents = [part for each in seen for part in getattr(each, "agent_episodes", {None: each}).values()]
    assert len(agents) >= len(seen) / 2
    assert all(part.twice() == 2 * part.get_return() for part in agents)


@pytest.mark.slow
def test_a_runner_in_another_process_makes_episodes_of_the_class() -> None:
    config = config_of(False).env_runners(num_env_runners=1).engine("process")
    with config.build() as algorithm:
        (rollout,) = algorithm.env_runner_group.sample(SampleRequest(num_timesteps=8))
    assert {type(each) for each in rollout.episodes()} == {TwiceEpisode}


def test_an_episode_of_the_class_that_is_built_by_hand_has_agents_of_its_class() -> None:
    episode = TwiceEpisodes()
    episode.add_env_reset({"a": 0.0})
    episode.add_env_step({"a": 1.0}, {"a": 0}, {"a": 3.0})
    again = TwiceEpisodes.from_state(episode.get_state())
    assert [each.agent_episodes["a"].twice() for each in (episode, again)] == [6.0, 6.0]


@pytest.mark.parametrize(
    ("is_multi_agent", "given"), [(False, TwiceEpisodes), (True, TwiceEpisode), (False, dict), (False, TwiceEpisode())]
)
def test_other_classes_are_refused(is_multi_agent: bool, given: Any) -> None:
    base = "MultiAgentEpisode" if is_multi_agent else "SingleAgentEpisode"
    with pytest.raises(ConfigError, match=rf"episode_class=.* must be a subclass of corral\.{base}"):
        config_of(is_multi_agent).env_runners(episode_class=given).build()
