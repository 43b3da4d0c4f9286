"""The episodes of a runner of several agents against those that are built by hand from what its envs gave."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from agent_steps import build, module_of, same
from at_least import all_of, at_least
from corral import PPOConfig
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.errors import CallbackError, EpisodeError
from corral.runners.runner import EnvRunner
from corral.runners.runner_state import get_runner_state, set_runner_state
from scripted_agents import ScriptedAgents
from watched_episodes import Watching, WatchingWholes, assert_same


def config(num_envs: int = 3, apart: bool = False, fails: float = 0.0, **callbacks: Any) -> PPOConfig:
    episodes: dict[int, list[Any]] = defaultdict(list)

    def make_env(context: Any) -> ScriptedAgents:
        i = context.vector_index
        return ScriptedAgents(100 + i + 10 * len(episodes[i]), apart=apart, fails=fails, episodes=episodes[i])

    config = PPOConfig().environment(make_env, disable_env_checking=True)
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.env_runners(num_envs_per_env_runner=num_envs)
    config.multi_agent(policies={"main", "other"}, policy_mapping_fn=module_of)
    return config.callbacks(**callbacks).debugging(seed=0)


def by_hand(runner: Any) -> dict[int, list[MultiAgentEpisode]]:
    """Return the episodes that the envs of a runner played, by sub-env, with the actions that they were sent."""
    found = {}
    for i, env in enumerate(runner.foreach_env(lambda env: env.unwrapped)):
        for played in env.episodes:
            played.outputs = [{} for _ in played.actions]
        found[i] = [build(played) for played in env.episodes]
    return found


@pytest.mark.slow_cases("8-")
@pytest.mark.parametrize(("apart", "fails"), [(False, 0.0), (True, 0.0), (False, 0.05)])
@pytest.mark.parametrize("num_timesteps", [3, 8, 40])
def test_chunks_of_rollouts_join_to_the_episodes(num_timesteps: int, apart: bool, fails: float) -> None:
    """Chunks over several rollouts, joined, are what the envs gave, also where sub-envs failed and were replaced."""
    runner = EnvRunner(config(apart=apart, fails=fails, on_sample_end=lambda: None).freeze())
    joined: dict[str, MultiAgentEpisode] = {}
    of_env: dict[int, list[str]] = defaultdict(list)
    for _ in range(120 // num_timesteps):
        rollout = runner.sample(num_timesteps=num_timesteps * 3)
        assert rollout.num_agent_steps == sum(len(agent) for part in rollout.modules.values() for agent in part)
        for episode in rollout:
            episode.validate()
            agents = [agent for part in rollout.modules.values() for agent in part if agent.id_.startswith(episode.id_)]
            assert {agent.id_ for agent in agents} == {part.id_ for part in episode.agent_episodes.values()}
            if episode.id_ in joined:
                joined[episode.id_].concat_episode(episode)
            else:
                joined[episode.id_] = MultiAgentEpisode.from_state(episode.get_state())
                of_env[episode.env_index].append(episode.id_)
    hand = by_hand(runner)
    runner.stop()
    num_ended = 0
    for i, ids in of_env.items():
        played = [episode for episode in hand[i] if len(episode)]
        assert len(ids) == len(played)
        for id_, wanted in zip(ids, played, strict=True):
            assert joined[id_].is_done == wanted.is_done
            assert_same(joined[id_], wanted)
            if wanted.is_done:
                num_ended += 1
                assert joined[id_].get_return() == wanted.get_return()
                assert joined[id_].get_agent_returns() == wanted.get_agent_returns()
    assert num_ended > 5


@pytest.mark.parametrize("num_timesteps", [4, 25])
def test_events_of_the_episodes(num_timesteps: int) -> None:
    """At each step the episode is what the env gave until then, its chunks in earlier rollouts included."""
    watching = Watching()
    runner = EnvRunner(config(2, **watching.events()).freeze())
    for _ in range(100 // num_timesteps):
        runner.sample(num_timesteps=num_timesteps * 2)
    runner.stop()
    assert watching.num_hanging > 10
    for i in range(2):
        own = [(event, id_, t) for event, env_index, id_, t in watching.trace if env_index == i]
        ids = list(dict.fromkeys(id_ for _, id_, _ in own))
        for id_ in ids[:-2]:
            length = max(t for _, other, t in own if other == id_)
            assert [(event, t) for event, other, t in own if other == id_] == [
                ("created", 0),
                ("start", 0),
                *(("step", t) for t in range(1, length + 1)),
                ("end", length),
            ]
        assert len(ids) > 4


@pytest.mark.slow_cases("2-", "25-")
@pytest.mark.parametrize(("apart", "fails"), [(False, 0.0), (True, 0.0), (False, 0.05)])
@pytest.mark.parametrize("num_timesteps", [2, 7, 25])
def test_an_episode_at_its_end_answers_for_all_of_its_steps(num_timesteps: int, apart: bool, fails: float) -> None:
    watching = WatchingWholes()
    runner = EnvRunner(config(2, apart, fails, **watching.events()).freeze())
    for _ in range(84 // num_timesteps):
        runner.sample(num_timesteps=num_timesteps * 2)
    runner.stop()
    assert sum(event == "end" for event, *_ in watching.trace) > 5
    assert watching.num_rollouts == 84 // num_timesteps


def test_a_restored_runner_answers_for_the_steps_before_it_was_saved() -> None:
    watching = WatchingWholes()
    runner, other = (EnvRunner(config(2, **watching.events()).freeze()) for _ in range(2))
    runner.sample(num_timesteps=10)
    runner.sample(num_timesteps=8)
    other.sample(num_timesteps=2)
    set_runner_state(other, get_runner_state(runner))
    runner.stop()
    unfinished = {id_ for _, _, id_, t in watching.trace[-4:] if t}
    watching.trace.clear()
    other.sample(num_timesteps=60)
    other.stop()
    assert unfinished & {id_ for event, _, id_, _ in watching.trace if event == "end"}


def test_rewards_written_at_the_end_reach_the_latest_rollout_only() -> None:
    num_ended = 0

    def negate(episode: Any) -> None:
        nonlocal num_ended
        num_ended += 1
        rewards = episode.get_rewards(env_steps=False)
        episode.set_rewards(new_data={agent: np.full(len(own), -7.0) for agent, own in rewards.items()})

    runner = EnvRunner(config(1, on_episode_end=negate).freeze())
    before = {id_: part.rewards.copy() for id_, part in runner.sample(num_timesteps=4).modules.items()}
    kept = runner.sample(num_timesteps=200)
    runner.stop()
    assert num_ended > 3
    assert not any((rewards == -7.0).any() for rewards in before.values())
    ended = at_least(3, (episode for episode in kept if episode.is_done))
    for episode in ended:
        assert all_of((own.get_rewards() == -7.0).all() for own in episode.agent_episodes.values())


@pytest.mark.slow
def test_images_of_earlier_chunks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that count as large are let go with their rollout, and reading them says so."""
    monkeypatch.setattr("corral.data.episodes.step_columns.KEPT_BYTES_PER_ROW", 8)  # rewards of one lane
    refused: list[str] = []
    rollouts: list[weakref.ref[Any]] = []

    def end(episode: Any) -> None:
        gc.collect()
        assert sum(ref() is not None for ref in rollouts) <= 2
        assert len(episode) == episode.env_t
        if episode.env_t > 6:
            with pytest.raises(EpisodeError, match="prev_episode_chunks"):
                episode.get_observations()
            refused.append(episode.id_)

    runner = EnvRunner(config(1, on_episode_end=end, on_episode_step=lambda: None).freeze())
    for _ in range(40):
        rollout = runner.sample(num_timesteps=3)
        rollouts.extend(weakref.ref(part) for part in rollout.modules.values())
        del rollout
    runner.stop()
    assert refused


def test_events_where_sub_envs_fail() -> None:
    """The episode of a sub-env that failed gets no further event; another is created and started."""
    watching = Watching()
    runner = EnvRunner(config(2, fails=0.05, **watching.events()).freeze())
    for _ in range(10):
        runner.sample(num_timesteps=20)
    assert runner.num_sub_env_restarts > 3
    runner.stop()
    of_episode: dict[str, list[str]] = defaultdict(list)
    for event, _, id_, _ in watching.trace:
        of_episode[id_].append(event)
    cut_off = [events for events in of_episode.values() if events[-1] == "step"]
    assert len(cut_off) >= 3
    assert all_of(events[:2] == ["created", "start"] for events in of_episode.values() if len(events) > 1)


def test_whole_episodes() -> None:
    """Of complete episodes every step of every agent is there, and nothing of others."""
    runner = EnvRunner(config(on_episode_step=lambda: None, on_sample_end=lambda: None).freeze())
    for _ in range(5):
        before = {i: len(episodes) for i, episodes in by_hand(runner).items()}
        found = list(runner.sample(num_episodes=4))
        assert len(found) == 4 and all(episode.is_done for episode in found)
        for i, hand in by_hand(runner).items():
            mine = [episode for episode in found if episode.env_index == i]
            for episode, wanted in zip(mine, hand[before[i] :], strict=False):
                assert_same(episode, wanted)
    runner.stop()


def test_a_runner_continues_its_episodes_from_a_state() -> None:
    """Notes, chunks, infos and steps that hang come through a state; the events continue."""
    watching = Watching()
    runner, other = (EnvRunner(config(2, **watching.events()).freeze()) for _ in range(2))
    runner.sample(num_timesteps=18)
    other.sample(num_timesteps=2)
    assert set_runner_state(other, get_runner_state(runner)) == {
        **{"num_envs_continued": 2, "num_envs_restarted": 0},
        **{"continued": ["runner 0, sub-envs 0 to 1"], "restarted": []},
    }
    runner.stop()
    unfinished = {id_ for _, _, id_, t in watching.trace[-4:] if t}
    watching.trace.clear()
    other.sample(num_timesteps=60)
    other.stop()
    ended = {id_ for event, _, id_, _ in watching.trace if event == "end"}
    assert unfinished & ended


def test_trajectories_of_all_agents() -> None:
    """Each agent's trajectory is a view of its lane, and comes with the original columns of all agents."""
    seen: list[tuple[str, Any]] = []

    def share(
        episode: Any, agent_id: Any, policy_id: str, policies: Any, postprocessed_batch: Any, original_batches: Any
    ) -> None:
        seen.append((episode.id_, agent_id))
        assert policy_id == module_of(agent_id) == episode.module_for(agent_id)
        assert set(original_batches) == episode.agent_ids
        own = episode.agent_episodes[agent_id]
        for other, (module, columns) in original_batches.items():
            assert module is policies[module_of(other)]
            hand = episode.agent_episodes[other]
            assert np.array_equal(columns["obs"], hand.get_observations(slice(0, -1)))
            assert np.array_equal(columns["actions"], hand.get_actions())
        assert np.array_equal(original_batches[agent_id][1]["rewards"], own.get_rewards())
        assert np.array_equal(postprocessed_batch["next_obs"], own.get_observations(slice(1, None)))
        assert postprocessed_batch["infos"] == own.get_infos(slice(1, None))
        team = sum(columns["rewards"].sum() for _, columns in original_batches.values())
        postprocessed_batch["rewards"] = np.full(len(own), team)
        postprocessed_batch["team"] = np.full(len(own), team)

    runner = EnvRunner(config(on_postprocess_trajectory=share).freeze())
    for _ in range(4):
        seen.clear()
        rollout = runner.sample(num_timesteps=60)
        for episode in rollout:
            values = {own.get_extra_model_outputs("team", 0) for own in episode.agent_episodes.values()}
            assert len(values) == 1 and all(own.get_rewards(0) in values for own in episode.agent_episodes.values())
        assert seen == [(episode.id_, agent) for episode in rollout for agent in episode.agent_episodes]
        assert rollout.num_agent_steps == sum(
            int(np.isfinite(part["team"][part.valid]).sum()) for part in rollout.modules.values()
        )
    runner.stop()


def test_a_callback_that_writes_an_impossible_action_is_named() -> None:
    def spoil(episode: Any) -> None:
        for agent in episode.agent_episodes.values():
            if len(agent):
                agent.set_actions(new_data=7, at_indices=-1)

    runner = EnvRunner(config(on_episode_step=spoil).freeze())
    with pytest.raises(CallbackError, match=r"on_episode_step.*spoil.*wrote the action 7"):
        runner.sample(num_timesteps=60)
    runner.stop()


def test_the_mapping_is_asked_once_with_the_episode() -> None:
    """The mapping gets the episode of the callbacks, which know the modules of agents that are not there yet."""
    asked: list[tuple[str, Any]] = []

    def mapping(agent_id: Any, episode: MultiAgentEpisode) -> str:
        if "choice" in episode.custom_data:  # otherwise it is asked which modules an agent may have
            assert episode.custom_data["choice"] == episode.id_
            asked.append((episode.id_, agent_id))
        return module_of(agent_id)

    def create(episode: MultiAgentEpisode) -> None:
        episode.custom_data["choice"] = episode.id_
        assert episode.module_for("d") == "other"

    made = config(on_episode_created=create, on_sample_end=lambda: None)
    runner = EnvRunner(made.multi_agent(policy_mapping_fn=mapping).freeze())
    for _ in range(10):
        for episode in runner.sample(num_timesteps=12):
            assert episode.custom_data["choice"] == episode.id_
            assert all(own.module_id == module_of(agent) for agent, own in episode.agent_episodes.items())
            assert all(own.multi_agent_episode_id == episode.id_ for own in episode.agent_episodes.values())
    runner.stop()
    assert len(asked) == len(set(asked)) > 20


def test_rollouts_are_freed_at_once() -> None:
    """Nothing keeps an old rollout, neither the rollouts of its modules nor the episodes that continue."""
    runner = EnvRunner(config(on_episode_step=lambda episode: episode.get_rewards(-1)).freeze())
    gc.collect()
    gc.disable()
    try:
        kept = [weakref.ref(runner.sample(num_timesteps=30)) for _ in range(4)]
        assert [ref() for ref in kept[:3]] == [None] * 3
    finally:
        gc.enable()
    runner.stop()


def test_a_rollout_that_was_sent() -> None:
    """Episodes and infos are the same after a rollout was pickled; without infos, reading them is an error."""
    runner = EnvRunner(config(on_sample_end=lambda: None).freeze())
    rollout = runner.sample(num_timesteps=60)
    sent = pickle.loads(pickle.dumps(rollout))
    for here, there in zip(rollout, sent, strict=True):
        assert same(here.get_state(), there.get_state())
    main = sent.modules["main"]
    at = main.info_column("at")
    for _, agent in main.chunks():
        start, lane = agent.place
        own = [info.get("at", np.nan) for info in agent.get_infos(slice(1, None))]
        assert np.array_equal(at[start : start + len(agent), lane], own, equal_nan=True)
    assert np.isfinite(at).any()
    for episode in rollout.without_infos():
        with pytest.raises(EpisodeError, match="stay in the runner"):
            episode.get_infos()
    runner.stop()
