"""Random episodes of several agents against a slow reference loop."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from agent_steps import AGENTS, Played, build, module_of, play, reference, same
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from handmade import plain

RANDOMS = st.randoms(use_true_random=False)  # which Hypothesis can make simpler
LONG = [HealthCheck.too_slow, HealthCheck.data_too_large]
fuzzed = settings(max_examples=15, deadline=None, suppress_health_check=LONG)


def check(episode: MultiAgentEpisode, played: Played, stop: int | None = None) -> None:
    """Compare an episode of the first env steps with the reference."""
    wanted = reference(played, stop)
    num_steps = len(played) if stop is None else stop
    assert episode.agent_ids == set(wanted)
    assert (len(episode), episode.env_t, episode.env_steps()) == (num_steps,) * 3
    assert episode.agent_steps() == sum(len(found.steps) for found in wanted.values())
    for agent, found in wanted.items():
        own = episode.agent_episodes[agent]
        assert (own.agent_id, own.module_id) == (agent, module_of(agent))
        assert (own.is_terminated, own.is_truncated) == found.ended
        assert plain(own.get_observations()) == [obs.tolist() for _, obs in found.obs]
        assert own.get_infos() == found.infos
        assert [own.get_actions().tolist(), own.get_rewards().tolist()] == [
            [step[0] for step in found.steps],
            [step[1] for step in found.steps],
        ]
        assert own.get_return() == sum(step[1] for step in found.steps)
        hanging = [*found.steps, *([found.hanging] if found.hanging else [])]
        assert plain(episode.get_actions(agent_ids=agent, env_steps=False)) == {agent: [step[0] for step in hanging]}
        assert plain(episode.get_rewards(agent_ids=agent, env_steps=False)) == {agent: [step[1] for step in hanging]}
    for t in range(num_steps + 1):
        at = {agent: obs for agent, found in wanted.items() for time, obs in found.obs if time == t}
        assert plain(episode.get_observations(t)) == plain(at)
        filled = episode.get_observations(t, fill=-1.0)
        assert plain(filled) == {agent: plain(at.get(agent, [-1, -1])) for agent in wanted}
        if t < num_steps:
            steps = {
                agent: step
                for agent, found in wanted.items()
                for step in [*found.steps, found.hanging]
                if step is not None and step[3] == t
            }
            assert plain(episode.get_actions(t)) == {agent: step[0] for agent, step in steps.items()}
            assert plain(episode.get_rewards(t)) == {agent: step[1] for agent, step in steps.items()}
            assert plain(episode.get_extra_model_outputs("v", t)) == {agent: step[2] for agent, step in steps.items()}
    listed = episode.get_actions(return_list=True)
    assert [plain(part) for part in listed] == [plain(episode.get_actions(t)) for t in range(num_steps)]
    total = sum(step[1] for found in wanted.values() for step in found.steps)
    assert episode.get_return() == total == sum(episode.get_module_returns().values())


@fuzzed
@given(rng=RANDOMS, ends=st.booleans())
def test_step_by_step(rng: random.Random, ends: bool) -> None:
    played = play(rng, ends=ends)
    note(played)
    episode = MultiAgentEpisode("e", agent_to_module_mapping_fn=module_of)
    episode.add_env_reset(played.observations[0], played.infos[0])
    check(episode, played, 0)
    for t in range(len(played)):
        assert episode.get_agents_to_act() == set(played.actions[t])
        build(played, t, t + 1, episode)
        check(episode, played, t + 1)
    rewards = {agent: sum(part.get(agent, 0.0) for part in played.rewards) for agent in AGENTS}
    returns = episode.get_agent_returns(include_hanging_rewards=True)
    assert {agent: returns.get(agent, 0.0) for agent in AGENTS} == rewards
    assert episode.get_return(include_hanging_rewards=True) == sum(rewards.values())


@fuzzed
@given(rng=RANDOMS, ends=st.booleans())
def test_chunks_and_their_concatenation(rng: random.Random, ends: bool) -> None:
    played = play(rng, ends=ends)
    note(played)
    whole = build(played)
    chunk = build(played, 0, 0)
    chunks = [chunk]
    for t in range(len(played)):
        build(played, t, t + 1, chunks[-1])
        if rng.random() < 0.3 and not chunks[-1].is_done:
            chunks.append(chunks[-1].cut(rng.randrange(4)))
    assert chunks[-1].get_agent_returns() == whole.get_agent_returns()
    assert sum(part.agent_steps() for part in chunks) == whole.agent_steps()
    assert sum(map(len, chunks)) == len(whole)
    joined = MultiAgentEpisode.from_state(chunks[0].get_state())
    for part in chunks[1:]:
        joined.concat_episode(MultiAgentEpisode.from_state(part.get_state()))
    check(joined, played)
    assert same(joined.get_state(), whole.get_state())


@pytest.mark.slow
@fuzzed
@given(rng=RANDOMS, ends=st.booleans())
def test_slices(rng: random.Random, ends: bool) -> None:
    played = play(rng, ends=ends)
    note(played)
    whole = build(played)
    at = sorted({0, len(whole), *(rng.randrange(len(whole) + 1) for _ in range(2))})
    parts = [whole[start:stop] for start, stop in itertools.pairwise(at)]
    for part, start, stop in zip(parts, at, at[1:], strict=False):
        assert (part.env_t_started, part.env_t, len(part)) == (start, stop, stop - start)
        for getter in ("get_observations", "get_infos"):
            wanted = getattr(whole, getter)(slice(start, stop + 1), return_list=True)
            assert same(getattr(part, getter)(return_list=True), wanted)
        for getter in ("get_actions", "get_rewards", "get_extra_model_outputs"):
            wanted = getattr(whole, getter)(indices=slice(start, stop), return_list=True)
            assert same(getattr(part, getter)(return_list=True), wanted)
        back = whole.slice(slice(start, stop), len_lookback_buffer=2)
        assert (back.len_lookback, len(back)) == (min(2, start), len(part))
        wanted = whole.get_rewards(slice(start - back.len_lookback, stop), return_list=True)
        lookback = slice(-back.len_lookback, None)
        assert same(back.get_rewards(lookback, neg_index_as_lookback=True, return_list=True), wanted)
    joined = parts[0]
    for part in parts[1:]:
        joined.concat_episode(part)
    assert same(joined.get_observations(return_list=True), whole.get_observations(return_list=True))
    assert joined.get_agent_returns() == whole.get_agent_returns()
    assert joined.get_terminateds() == whole.get_terminateds()


@settings(fuzzed, max_examples=12)
@given(rng=RANDOMS, lookback=st.integers(0, 3))
def test_built_from_lists(rng: random.Random, lookback: int) -> None:
    played = play(rng, ends=False)
    note(played)
    whole = build(played)
    episode = MultiAgentEpisode(
        observations=played.observations,
        infos=played.infos,
        actions=played.actions,
        rewards=played.rewards,
        extra_model_outputs=played.outputs,
        terminateds=played.terminateds[-1],
        truncateds=played.truncateds[-1],
        len_lookback_buffer=lookback,
        env_t_started=100,
    )
    assert (episode.len_lookback, len(episode), episode.env_t_started) == (lookback, len(played) - lookback, 100)
    every = slice(-lookback, None)
    unobserved = {agent for agent, own in whole.agent_episodes.items() if own.is_done}
    for agent in episode.agent_ids - unobserved:  # the lists do not tell who has ended without an observation
        found = episode.get_observations(every, agent, neg_index_as_lookback=True)
        assert same(found, whole.get_observations(agent_ids=agent))
        found = episode.get_rewards(every, agent, neg_index_as_lookback=True)
        assert same(found, whole.get_rewards(agent_ids=agent))
