"""Episodes of several agents built by hand: what they hold, what getters return, what they refuse.

Random episodes are in `test_multi_agent_fuzz.py`; the episodes of runners in `tests/runners/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral import MultiAgentEpisode, SingleAgentEpisode
from corral.errors import EpisodeError
from handmade import plain

S = slice


def turns() -> MultiAgentEpisode:
    """Return an episode in which "a" acts at env steps 0 and 3 and "b" at 0, 1 and 2, where it ends.

    Observations and actions are the env step, plus 10 for "b"; each env step gives each agent that is there 1.
    """
    episode = MultiAgentEpisode("e")
    episode.add_env_reset({"a": 0.0, "b": 10.0}, {"a": {"i": 0}})
    episode.add_env_step({"b": 11.0}, {"a": 0, "b": 10}, {"a": 1, "b": 1})
    episode.add_env_step({"b": 12.0}, {"b": 11}, {"a": 1, "b": 1}, {"b": {"i": 2}})
    episode.add_env_step({"a": 3.0, "b": 13.0}, {"b": 12}, {"a": 1, "b": 1}, terminateds={"b": True})
    episode.add_env_step({}, {"a": 3}, {"a": 1})
    return episode


def test_steps_of_agents_and_of_the_env() -> None:
    episode = turns()
    assert (len(episode), episode.env_t, episode.agent_steps(), episode.is_done) == (4, 4, 4, False)
    assert {agent: len(own) for agent, own in episode.agent_episodes.items()} == {"a": 1, "b": 3}
    assert plain(episode.get_observations()) == {"a": [0, 3], "b": [10, 11, 12, 13]}
    assert plain(episode.get_actions()) == {"a": [0, 3], "b": [10, 11, 12]}  # the last of "a" hangs
    assert plain(episode.get_rewards()) == {"a": [3, 1], "b": [1, 1, 1]}
    assert plain(episode.get_observations(-1)) == plain(episode.get_observations(4)) == {}
    assert plain(episode.get_observations(3)) == {"a": 3, "b": 13}
    assert plain(episode.get_actions(-1)) == {"a": 3}
    assert plain(episode.get_actions(1, env_steps=False)) == {"a": 3, "b": 11}
    assert episode.get_infos(S(0, 3)) == {"a": [{"i": 0}], "b": [{}, {}, {"i": 2}]}
    assert plain(episode.get_observations(S(1, 3), fill=-1)) == {"a": [-1, -1], "b": [11, 12]}
    assert plain(episode.get_rewards([0, 3], "a")) == {"a": [3, 1]}
    assert episode.get_actions(S(2, 4), return_list=True) == [{"b": 12}, {"a": 3}]
    assert episode.get_terminateds() == {"a": False, "b": True, "__all__": False}
    assert episode.get_truncateds() == {"a": False, "b": False, "__all__": False}


def test_returns() -> None:
    episode = turns()
    assert episode.get_return() == 6 and episode.get_return(include_hanging_rewards=True) == 7
    assert episode.get_agent_returns() == {"a": 3, "b": 3}
    assert episode.get_module_returns() == {"default_policy": 6}


def test_agents_to_act() -> None:
    episode = MultiAgentEpisode()
    episode.add_env_reset({"a": 0.0, 7: 0.0})
    assert episode.get_agents_to_act() == {"a", 7}
    episode.add_env_step({"a": 1.0, 7: 1.0}, {"a": 0, 7: 0}, {}, truncateds={7: True})
    assert episode.get_agents_to_act() == {"a"} and episode.get_agents_that_stepped() == {"a", 7}
    episode.add_env_step({"a": 2.0}, {"a": 0}, {"a": 1.0}, terminateds={"a": True})
    assert (episode.is_terminated, episode.is_truncated) == (True, False)  # nobody is left
    assert episode.get_agents_to_act() == set()


def test_an_agent_that_dies_at_the_truncation_is_terminated() -> None:
    episode = MultiAgentEpisode()
    episode.add_env_reset({"a": 0.0, "b": 0.0, "c": 0.0})
    seen = {"a": 1.0, "b": 1.0}
    ends = {"terminateds": {"a": True, "__all__": False}, "truncateds": {"__all__": True}}
    episode.add_env_step(seen, dict.fromkeys("abc", 0), {"c": 2.0}, **ends)
    assert episode.get_terminateds() == {"a": True, "b": False, "c": False, "__all__": False}
    assert episode.get_truncateds() == {"a": False, "b": True, "c": True, "__all__": True}
    assert plain(episode.get_observations(-1)) == {"a": 1, "b": 1, "c": 0}  # "c" was not observed again
    assert episode.get_agent_returns() == {"a": 0, "b": 0, "c": 2}


def test_rewards_before_the_first_action_count_in_the_first_step() -> None:
    episode = MultiAgentEpisode()
    episode.add_env_reset({"a": 0.0})
    episode.add_env_step({"a": 1.0}, {"a": 0}, {"late": 5.0})
    episode.add_env_step({"a": 2.0, "late": 2.0}, {"a": 0}, {"late": 7.0})
    assert (episode.get_return(), episode.get_return(include_hanging_rewards=True)) == (0, 12)
    episode.add_env_step({"a": 3.0, "late": 3.0}, {"a": 0, "late": 1}, {"late": 1.0})
    assert episode.get_agent_returns() == {"a": 0, "late": 13}
    assert plain(episode.get_observations(agent_ids="late", fill=-1)) == {"late": [-1, -1, 2, 3]}


def test_one_hot_and_spaces() -> None:
    episode = MultiAgentEpisode(observation_space={"a": spaces.Discrete(3)}, action_space={"a": spaces.Discrete(2)})
    episode.add_env_reset({"a": 2})
    episode.add_env_step({}, {"a": 1}, {})
    assert plain(episode.get_observations(0, one_hot_discrete=True)) == {"a": [0, 0, 1]}
    assert plain(episode.get_actions(0, one_hot_discrete=True)) == {"a": [0, 1]}
    assert plain(episode.get_observations(S(0, 2), one_hot_discrete=True, fill=0)) == {"a": [[0, 0, 1], [0, 0, 0]]}


def test_modules_are_asked_once() -> None:
    asked: list[Any] = []

    def mapping(agent_id: Any, episode: MultiAgentEpisode) -> str:
        asked.append((agent_id, episode.id_))
        return f"module_{agent_id}"

    episode = MultiAgentEpisode("e", agent_to_module_mapping_fn=mapping, agent_module_ids={"b": "given"})
    assert episode.module_for("c") == "module_c"
    episode.add_env_reset({"a": 0.0, "b": 0.0, "c": 0.0})
    assert {agent: own.module_id for agent, own in episode.agent_episodes.items()} == {
        "a": "module_a",
        "b": "given",
        "c": "module_c",
    }
    assert asked == [("c", "e"), ("a", "e")]
    assert episode.cut().module_for("a") == "module_a" and len(asked) == 2


def test_setters() -> None:
    episode = turns()
    episode.set_rewards(new_data={"a": [9.0], "b": [1.0, 2.0, 3.0]})
    episode.set_actions(new_data={"b": 5}, at_indices=-1)
    episode.set_observations(new_data={"b": 0.5}, at_indices=0)
    episode.set_extra_model_outputs(key="v", new_data={"b": np.zeros(3)})
    assert episode.get_agent_returns() == {"a": 9, "b": 6}
    assert plain(episode.get_actions(agent_ids="b")) == {"b": [10, 11, 5]}
    assert plain(episode.get_observations(0, "b")) == {"b": 0.5}
    assert plain(episode.get_extra_model_outputs("v")) == {"b": [0, 0, 0]}


def test_notes() -> None:
    episode = turns()
    episode.custom_data["x"] = [1]
    episode.add_temporary_timestep_data("y", 2)
    chunk = episode.cut()
    chunk.custom_data["x"].append(2)
    chunk.add_temporary_timestep_data("y", 3)
    assert (episode.custom_data, episode.get_temporary_timestep_data("y")) == ({"x": [1]}, [2])
    episode.concat_episode(chunk)
    assert (episode.custom_data, episode.get_temporary_timestep_data("y")) == ({"x": [1, 2]}, [2, 3])


def test_a_chunk_continues_a_step_that_hangs() -> None:
    chunk = turns().cut()
    assert (chunk.env_t_started, len(chunk), chunk.agent_ids) == (4, 0, {"a"})
    chunk.add_env_step({"a": 5.0}, {}, {"a": 1.0})
    assert plain(chunk.agent_episodes["a"].get_observations()) == [3, 5]
    assert chunk.agent_episodes["a"].get_rewards().tolist() == [2]
    assert chunk.get_agent_returns() == {"a": 5, "b": 3}  # of the whole episode, also of "b", which has ended


def test_agents_know_who_they_are() -> None:
    own = turns().agent_episodes["a"]
    assert (own.agent_id, own.module_id, own.id_, own.multi_agent_episode_id) == ("a", "default_policy", "e_a", "e")
    for other in (own[:], own.cut(), SingleAgentEpisode.from_state(own.get_state())):
        assert (other.agent_id, other.module_id, other.multi_agent_episode_id) == ("a", "default_policy", "e")
    alone = SingleAgentEpisode()
    assert (alone.agent_id, alone.module_id, alone.multi_agent_episode_id) == (None, None, None)


def test_the_table_shows_when_agents_were_observed(capsys: pytest.CaptureFixture[str]) -> None:
    episode = MultiAgentEpisode("e")
    episode.add_env_reset({"white": 0})
    episode.add_env_step({"black": 1}, {"white": 10}, {})
    episode.add_env_step({"white": 2, "black": 2}, {"black": 21}, {})
    episode.print()
    assert capsys.readouterr().out.splitlines() == ["env_t  0  1  2", "black  .  x  x", "white  x  .  x"]
    episode.cut().print()
    assert capsys.readouterr().out.splitlines() == ["env_t  2", "black  x", "white  x"]


@pytest.mark.parametrize(
    ("act", "names"),
    [
        (lambda e: e.add_env_step({"b": 1.0}, {}, {}), "agent 'b' has ended, and was observed again"),
        (lambda e: e.add_env_step({"a": 1.0}, {}, {"b": 2.0}), "agent 'b' has ended, and was given the reward 2.0"),
        (lambda e: e.add_env_step({"a": 1.0}, {"a": 1}, {}), r"\[\] have to act.*actions of \['a'\]"),
        (lambda e: e.add_env_reset({}), "reset already"),
        (lambda e: e.get_actions(env_steps=False, return_list=True), "return_list"),
        (lambda e: e[::2], "step width"),
        (lambda e: e[1], "indexed by slices"),
        (lambda e: e.cut(-1), "cannot be negative"),
        (lambda e: e.concat_episode(MultiAgentEpisode("other")), "a chunk of episode other"),
        (lambda e: e.concat_episode(e[:2]), "continues at env step 4, but the chunk begins at 0"),
        (lambda e: MultiAgentEpisode().validate(), "was not reset"),
        (lambda e: MultiAgentEpisode(observations=[{}], actions=[{}], rewards=[{}]), "n \\+ 1 of observations"),
        (lambda e: MultiAgentEpisode(len_lookback_buffer=-1), "len_lookback_buffer=-1"),
    ],
)
def test_refused(act: Callable[[MultiAgentEpisode], Any], names: str) -> None:
    with pytest.raises(EpisodeError, match=names):
        act(turns())


def test_an_env_step_in_which_nobody_acts() -> None:
    episode = turns()
    episode.add_env_step({}, {}, {"a": 1.0})
    assert len(episode) == 5 and episode.get_return(include_hanging_rewards=True) == 8


def test_unknown_names() -> None:
    episode = turns()
    with pytest.raises(KeyError, match="no agent 'c'"):
        episode.get_rewards(agent_ids=["a", "c"])
    with pytest.raises(KeyError, match="no temporary data"):
        episode.get_temporary_timestep_data("x")
    with pytest.raises(IndexError):
        episode.get_rewards(4)
    assert plain(episode.get_rewards(4, fill=0.0)) == {"a": 0, "b": 0}
