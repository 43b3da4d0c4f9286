"""Episodes in pieces: slicing, cutting and joining them, and their state."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.compat.rllib import episodes as rllib_episodes
from corral.data.episodes.episode import SingleAgentEpisode
from corral.errors import EpisodeError
from handmade import MakeRunner, made, plain, stepped

S = slice
ALL = S(-1000, None)


def contents(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return all that an episode holds, its lookback included."""
    return {
        "id_": episode.id_,
        "time": (episode.t_started, episode.t, len(episode)),
        "done": (episode.is_terminated, episode.is_truncated),
        "observations": plain(episode.get_observations(ALL)),
        "infos": episode.get_infos(ALL),
        "actions": plain(episode.get_actions(ALL)),
        "rewards": episode.get_rewards(ALL).tolist(),
        "extra_model_outputs": plain(episode.get_extra_model_outputs(indices=ALL)),
        "custom_data": episode.custom_data,
        "return": episode.get_return(),
    }


def held(episode: SingleAgentEpisode) -> tuple[int, list[float]]:
    """Return the time that an episode starts at and its rewards; check that its other columns go with them."""
    rewards = episode.get_rewards().tolist()
    first = rewards[0] - 1 if rewards else float(episode.get_observations(0))
    rows = [first + i for i in range(len(rewards) + 1)]
    assert len(episode) == episode.t - episode.t_started == len(rewards)
    assert episode.get_observations().tolist() == rows
    assert episode.get_infos() == [{"i": row} for row in rows]
    assert episode.get_actions().tolist() == [row + 10 for row in rows[:-1]]
    assert episode.get_extra_model_outputs("v").tolist() == [row / 2 for row in rows[:-1]]
    return episode.t_started, rewards


def lookback(episode: SingleAgentEpisode) -> list[float]:
    """Return the rewards in the lookback; check that its other columns go with them."""
    before = S(-1000, 0)
    rewards = episode.get_rewards(before, neg_index_as_lookback=True).tolist()
    rows = [reward - 1 for reward in rewards]
    assert episode.get_observations(before, neg_index_as_lookback=True).tolist() == rows
    assert episode.get_infos(before, neg_index_as_lookback=True) == [{"i": row} for row in rows]
    assert episode.get_actions(before, neg_index_as_lookback=True).tolist() == [row + 10 for row in rows]
    v = episode.get_extra_model_outputs("v", before, neg_index_as_lookback=True)
    assert v.tolist() == [row / 2 for row in rows]
    return rewards


def step_on(episode: SingleAgentEpisode, **end: bool) -> None:
    """Make the step that follows `made()`."""
    row = float(episode.get_observations(-1))
    episode.add_env_step(row + 1, int(row) + 10, row + 1, {"i": row + 1}, extra_model_outputs={"v": row / 2}, **end)


# slice -> t_started, rewards, and whether the end is in it
SLICES: list[tuple[slice, int, list[float], bool]] = [
    (S(None), 5, [4, 5, 6, 7], True),
    (S(0, 2), 5, [4, 5], False),
    (S(1, 3), 6, [5, 6], False),
    (S(2, None), 7, [6, 7], True),
    (S(2, 4), 7, [6, 7], True),
    (S(2, 20), 7, [6, 7], True),
    (S(-3, None), 6, [5, 6, 7], True),
    (S(-2, -1), 7, [6], False),
    (S(None, -1), 5, [4, 5, 6], False),
    (S(0, 0), 5, [], False),
    (S(3, 3), 8, [], False),
    (S(3, 1), 8, [], False),
    (S(4, 4), 9, [], True),
    (S(4, None), 9, [], True),
    (S(9, 12), 9, [], True),
    (S(-6, None), 5, [4, 5, 6, 7], True),  # a slice never begins in the lookback
    (S(-20, 2), 5, [4, 5], False),
    (S(-7, -5), 5, [], False),
]


class TestSlice:
    @pytest.mark.parametrize(("slice_", "t_started", "rewards", "has_end"), SLICES, ids=str)
    @pytest.mark.parametrize("end", ["terminated", "truncated"])
    def test_slice(self, slice_: slice, t_started: int, rewards: list[float], has_end: bool, end: str) -> None:
        episode = made(**{end: True})
        for part in (episode[slice_], episode.slice(slice_)):
            assert part.id_ == "a"
            assert held(part) == (t_started, rewards)
            assert part.get_return() == sum(rewards)
            assert (part.is_terminated, part.is_truncated) == (
                has_end and end == "terminated",
                has_end and end == "truncated",
            )
        assert held(episode) == (5, [4, 5, 6, 7])

    def test_of_an_ongoing_episode(self) -> None:
        assert not made()[:].is_done

    @pytest.mark.parametrize(
        ("slice_", "len_lookback_buffer", "expected"),
        [
            (S(None), None, [1, 2, 3]),  # as many as the episode has
            (S(1, 3), None, [2, 3, 4]),
            (S(2, None), None, [3, 4, 5]),
            (S(4, 4), None, [5, 6, 7]),
            (S(1, 3), 0, []),
            (S(1, 3), 1, [4]),
            (S(-2, -1), 2, [4, 5]),
            (S(1, 3), 5, [1, 2, 3, 4]),  # no more than there is
            (S(2, None), 5, [1, 2, 3, 4, 5]),
            (S(None), 5, [1, 2, 3]),
        ],
        ids=str,
    )
    def test_lookback(self, slice_: slice, len_lookback_buffer: int | None, expected: list[float]) -> None:
        part = made().slice(slice_, len_lookback_buffer=len_lookback_buffer)
        assert lookback(part) == expected
        if len_lookback_buffer is None:
            assert lookback(made()[slice_]) == expected

    def test_without_lookback_there_is_none_to_keep(self) -> None:
        part = made(0)[3:5]
        assert (held(part), lookback(part)) == ((8, [4, 5]), [])

    def test_the_last_steps(self) -> None:
        part = stepped(5, truncated=True)[-3:]
        assert (part.t_started, part.t, len(part)) == (2, 5, 3)
        assert part.get_observations().tolist() == [2, 3, 4, 5]
        assert part.is_truncated

    def test_a_slice_can_continue(self) -> None:
        part = made(terminated=True)[1:3]
        step_on(part)
        assert (held(part), lookback(part)) == ((6, [5, 6, 7]), [2, 3, 4])

    def test_stepping_on_leaves_the_source_alone(self) -> None:
        episode = made()
        part = episode[:]
        part.add_env_step(-1.0, -1, -1.0, extra_model_outputs={"v": -1.0})
        step_on(episode)
        assert held(episode) == (5, [4, 5, 6, 7, 8])
        assert part.get_rewards().tolist() == [4, 5, 6, 7, -1]

    def test_nested(self) -> None:
        episode = SingleAgentEpisode(
            observations=[{"a": i, "b": (np.full(2, i),)} for i in range(4)],
            actions=[{"x": i} for i in range(3)],
            rewards=[0, 1, 2],
            len_lookback_buffer=0,
        )
        part = episode[1:]
        assert plain(part.get_observations()) == {"a": [1, 2, 3], "b": ([[1, 1], [2, 2], [3, 3]],)}
        assert plain(part.get_actions()) == {"x": [1, 2]}

    @pytest.mark.parametrize("step", [2, -1])
    def test_steps_are_refused(self, step: int) -> None:
        with pytest.raises(EpisodeError, match="step"):
            made()[::step]

    def test_an_index_is_refused(self) -> None:
        with pytest.raises((EpisodeError, TypeError), match="slice"):
            made()[0]  # type: ignore[index]


class TestCut:
    @pytest.mark.parametrize(
        ("len_lookback_buffer", "expected"),
        [
            (0, []),
            (1, [7]),
            (2, [6, 7]),
            (4, [4, 5, 6, 7]),
            (6, [2, 3, 4, 5, 6, 7]),  # from the lookback too
            (7, [1, 2, 3, 4, 5, 6, 7]),
            (9, [1, 2, 3, 4, 5, 6, 7]),
        ],
    )
    def test_cut(self, len_lookback_buffer: int, expected: list[float]) -> None:
        episode = made()
        chunk = episode.cut(len_lookback_buffer=len_lookback_buffer)
        assert (chunk.id_, chunk.t_started, chunk.t, len(chunk)) == ("a", 9, 9, 0)
        assert (chunk.is_reset, chunk.is_done) == (True, False)
        assert (chunk.get_observations().tolist(), chunk.get_infos()) == ([7], [{"i": 7}])
        assert lookback(chunk) == expected
        assert chunk.get_rewards(ALL).tolist() == expected
        assert held(episode) == (5, [4, 5, 6, 7])

    def test_keeps_no_lookback_unless_told(self) -> None:
        assert lookback(made().cut()) == []

    def test_stepping_on(self) -> None:
        chunk = made().cut(2)
        for _ in range(3):
            step_on(chunk)
        assert (held(chunk), lookback(chunk)) == ((9, [8, 9, 10]), [6, 7])
        assert (chunk.get_rewards(-4), chunk.get_rewards(-1, neg_index_as_lookback=True)) == (7, 7)
        assert chunk.get_rewards(S(-6, 1), neg_index_as_lookback=True, fill=0).tolist() == [0, 0, 0, 0, 6, 7, 8]
        again = chunk.cut(4)
        assert (again.t_started, lookback(again)) == (12, [7, 8, 9, 10])

    def test_the_return_continues_as_t_does(self) -> None:
        episode = made()
        chunk = episode.cut(2)
        assert chunk.get_return() == episode.get_return() == 4 + 5 + 6 + 7
        step_on(chunk)
        step_on(chunk)
        assert chunk.get_return() == 4 + 5 + 6 + 7 + 8 + 9

    def test_stepping_on_leaves_the_first_part_alone(self) -> None:
        episode = made()
        before = contents(episode)
        chunk = episode.cut(2)
        step_on(chunk)
        chunk.set_rewards(new_data=-1.0, at_indices=-1, neg_index_as_lookback=True)
        assert contents(episode) == before

    def test_custom_data_is_copied_deeply(self) -> None:
        episode = made()
        episode.custom_data["visited"] = [1]
        chunk = episode.cut()
        assert chunk.custom_data == {"visited": [1]}
        chunk.custom_data["visited"].append(2)
        assert episode.custom_data == {"visited": [1]}

    def test_right_after_the_reset(self) -> None:
        chunk = stepped(0).cut(3)
        assert (chunk.id_, chunk.t_started, len(chunk)) == ("b", 0, 0)
        assert (chunk.get_observations().tolist(), chunk.get_infos()) == ([0], [{"i": 0}])

    def test_before_the_reset(self) -> None:
        chunk = SingleAgentEpisode("a").cut()
        assert (chunk.id_, chunk.is_reset, len(chunk)) == ("a", False, 0)
        chunk.add_env_reset(0.0)

    @pytest.mark.parametrize("end", ["terminated", "truncated"])
    def test_a_done_episode_is_refused(self, end: str) -> None:
        with pytest.raises(EpisodeError):
            made(**{end: True}).cut()

    def test_a_negative_lookback_is_refused(self) -> None:
        with pytest.raises(EpisodeError, match="len_lookback_buffer"):
            made().cut(-1)


def following(**given: Any) -> SingleAgentEpisode:
    """Return an episode of one step that fits behind `made()`."""
    columns: dict[str, Any] = {
        "observations": [7.0, 8.0],
        "infos": [{"i": 7}, {"i": 8}],
        "actions": [17],
        "rewards": [8.0],
        "extra_model_outputs": {"v": [3.5]},
        "t_started": 9,
        "len_lookback_buffer": 0,
    }
    return SingleAgentEpisode(**{"id_": "a"} | columns | given)


class TestConcat:
    @pytest.mark.parametrize("len_lookback_buffer", [0, 2, 7])
    @pytest.mark.parametrize(
        "end", [{}, {"terminated": True}, {"truncated": True}, {"terminated": True, "truncated": True}]
    )
    def test_gives_the_uncut_episode(self, len_lookback_buffer: int, end: dict[str, bool]) -> None:
        uncut, first = made(), made()
        chunk = first.cut(len_lookback_buffer)
        for episode in (uncut, chunk):
            step_on(episode)
            step_on(episode, **end)
        assert first.concat_episode(chunk) is None  # type: ignore[func-returns-value]
        assert contents(first) == contents(uncut)
        assert (held(first), lookback(first)) == ((5, [4, 5, 6, 7, 8, 9]), [1, 2, 3])
        assert first.is_done == bool(end)
        first.validate()

    def test_the_second_part_stays_as_it_is(self) -> None:
        first, chunk = made(), following()
        first.concat_episode(chunk)
        first.set_rewards(new_data=-1.0, at_indices=-1)
        step_on(first)
        assert chunk.get_rewards().tolist() == [8]
        assert first.get_rewards().tolist() == [4, 5, 6, 7, -1, 9]

    def test_an_empty_second_part(self) -> None:
        first = made()
        first.concat_episode(first.cut())
        assert contents(first) == contents(made())

    def test_several_parts(self) -> None:
        whole = made()
        chunks = []
        chunk = whole.cut(1)
        for _ in range(4):
            step_on(chunk)
            step_on(chunk)
            chunks.append(chunk)
            chunk = chunk.cut(3)
        for part in chunks:
            whole.concat_episode(part)
        assert held(whole) == (5, [float(i) for i in range(4, 16)])

    def test_custom_data_is_merged_and_the_later_wins(self) -> None:
        first, chunk = made(), following()
        first.custom_data.update(x=1, y=1)
        chunk.custom_data.update(x=2, z=3)
        first.concat_episode(chunk)
        assert first.custom_data == {"x": 2, "y": 1, "z": 3}

    def test_at_the_seam_the_later_info_counts(self) -> None:
        first = made()
        first.concat_episode(following(infos=[{"late": True}, {"i": 8}]))
        assert first.get_infos(S(-3, None)) == [{"i": 6}, {"late": True}, {"i": 8}]

    @pytest.mark.parametrize(
        ("first", "given"),
        [
            ({}, {"id_": "other"}),
            ({}, {"t_started": 8}),
            ({}, {"t_started": 10}),
            ({"terminated": True}, {}),
            ({"truncated": True}, {}),
            ({}, {"observations": [6.5, 8.0]}),  # where they meet, both hold the same observation
            ({}, {"extra_model_outputs": None}),
            ({}, {"extra_model_outputs": {"v": [3.5], "w": [1.0]}}),
        ],
        ids=str,
    )
    def test_parts_that_do_not_fit(self, first: dict[str, Any], given: dict[str, Any]) -> None:
        episode = made(**first)
        before = contents(episode)
        with pytest.raises(EpisodeError):
            episode.concat_episode(following(**given))
        assert contents(episode) == before

    def test_the_error_names_what_differs(self) -> None:
        with pytest.raises(EpisodeError, match=r"other.*a|a.*other"):
            made().concat_episode(following(id_="other"))
        with pytest.raises(EpisodeError, match=r"9.*10|10.*9"):
            made().concat_episode(following(t_started=10))


def assert_plain(state: Any) -> None:
    """Check that a state is dicts with string keys, lists, numbers, strings and arrays all the way down."""
    if isinstance(state, dict):
        assert all(isinstance(key, str) for key in state)
        for part in state.values():
            assert_plain(part)
    elif isinstance(state, list | tuple):
        for part in state:
            assert_plain(part)
    elif isinstance(state, np.ndarray):
        assert state.dtype != object
    else:
        assert state is None or isinstance(state, bool | int | float | str | np.generic), type(state)


def rich(num_steps: int = 4, len_lookback_buffer: int = 2) -> SingleAgentEpisode:
    """Return an episode with nested observations and actions and everything else that one can hold."""
    num_rows = num_steps + len_lookback_buffer
    episode = SingleAgentEpisode(
        "rich",
        observations=[{"image": np.full((2, 3), i, np.uint8), "pair": (i, i / 2)} for i in range(num_rows + 1)],
        infos=[{"i": i, "cells": [i, i + 1]} for i in range(num_rows + 1)],
        actions=[{"move": i, "force": np.array([i, -i], np.float32)} for i in range(num_rows)],
        rewards=[float(i) for i in range(num_rows)],
        extra_model_outputs={"logp": [-i / 4 for i in range(num_rows)], "state": np.ones((num_rows, 3), np.float32)},
        t_started=11,
        len_lookback_buffer=len_lookback_buffer,
    )
    episode.custom_data["visited"] = {"cells": [1, 2]}
    return episode


def step_richly(episode: SingleAgentEpisode, **end: bool) -> None:
    i = episode.t
    episode.add_env_step(
        {"image": np.full((2, 3), i, np.uint8), "pair": (i, i / 2)},
        {"move": i, "force": np.array([i, -i], np.float32)},
        float(i),
        {"i": i},
        extra_model_outputs={"logp": -i / 4, "state": np.full(3, i, np.float32)},
        **end,
    )


class TestState:
    @pytest.mark.parametrize("end", [{}, {"terminated": True}, {"truncated": True}])
    def test_round_trip(self, end: dict[str, bool]) -> None:
        for episode in (made(**end), stepped(**end), made(0, **end)):
            state = episode.get_state()
            assert_plain(state)
            back = SingleAgentEpisode.from_state(pickle.loads(pickle.dumps(state)))
            assert contents(back) == contents(episode)

    def test_with_everything_in_it(self) -> None:
        episode = rich()
        assert_plain(episode.get_state())
        back = SingleAgentEpisode.from_state(episode.get_state())
        assert contents(back) == contents(episode)
        obs = back.get_observations()
        assert (obs["image"].dtype, obs["image"].shape) == (np.uint8, (5, 2, 3))
        assert isinstance(obs["pair"], tuple)
        assert back.get_actions()["force"].dtype == np.float32

    def test_going_on_is_the_same_as_without(self) -> None:
        straight = rich()
        saved = SingleAgentEpisode.from_state(straight.get_state())
        for end in ({}, {}, {"truncated": True}):
            step_richly(straight, **end)
            saved = SingleAgentEpisode.from_state(saved.get_state())
            step_richly(saved, **end)
        assert contents(saved) == contents(straight)
        assert (saved.t_started, saved.t, saved.is_done) == (11, 18, True)

    def test_right_after_the_reset_and_before(self) -> None:
        reset = SingleAgentEpisode.from_state(stepped(0).get_state())
        assert (reset.is_reset, len(reset), reset.get_infos()) == (True, 0, [{"i": 0}])
        reset.add_env_step(1.0, 1, 1.0)
        assert reset.get_observations().tolist() == [0, 1]
        new = SingleAgentEpisode.from_state(SingleAgentEpisode("n").get_state())
        assert (new.id_, new.is_reset) == ("n", False)
        new.add_env_reset(0.0)

    def test_is_a_snapshot(self) -> None:
        episode = rich()
        before = contents(SingleAgentEpisode.from_state(rich().get_state()))
        state = episode.get_state()
        episode.set_rewards(new_data=-1.0, at_indices=0)
        episode.custom_data["visited"]["cells"].append(3)
        step_richly(episode)
        back = SingleAgentEpisode.from_state(state)
        assert contents(back) == before
        step_richly(back)
        assert contents(SingleAgentEpisode.from_state(state)) == before

    def test_a_chunk_keeps_its_lookback(self) -> None:
        back = SingleAgentEpisode.from_state(made().cut(2).get_state())
        step_on(back)
        assert (held(back), lookback(back)) == ((9, [8]), [6, 7])


@given(
    num_steps=st.integers(0, 12),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=4),
    save=st.booleans(),
)
def test_chunks_join_up_however_the_episode_is_cut_and_saved(
    num_steps: int, cuts: list[tuple[int, int]], save: bool
) -> None:
    chunk, uncut, chunks = rich(), rich(), []
    for t in range(num_steps + 1):
        for at, len_lookback_buffer in cuts:
            if at == t < num_steps:
                chunks.append(chunk)
                chunk = chunk.cut(len_lookback_buffer)
        if save:
            chunk = SingleAgentEpisode.from_state(chunk.get_state())
        if t < num_steps:
            step_richly(chunk, truncated=t + 1 == num_steps)
    chunks.append(chunk)
    whole, *others = chunks
    for part in others:
        whole.concat_episode(part)
    for t in range(num_steps):
        step_richly(uncut, truncated=t + 1 == num_steps)
    assert contents(whole) == contents(uncut)
    third = num_steps // 3
    assert uncut[third:].get_rewards().tolist() == uncut.get_rewards(S(third, None)).tolist()


def test_a_slice_shares_no_list_of_temporary_data() -> None:
    episode = SingleAgentEpisode(
        observations=[0.0, 1.0, 2.0], actions=[0, 0], rewards=[0.0, 0.0], len_lookback_buffer=0
    )
    episode.add_temporary_timestep_data("x", 1)
    part = episode[1:]
    part.add_temporary_timestep_data("x", 2)
    assert (episode.get_temporary_timestep_data("x"), part.get_temporary_timestep_data("x")) == ([1], [1, 2])


def test_parts_of_a_runner_s_episode_are_of_its_sub_env(make_runner: MakeRunner) -> None:
    _, second = make_runner(num_envs=2).sample(num_timesteps=4).episodes()
    assert second.env_index == 1
    for part in (second[1:], second.cut(), SingleAgentEpisode.from_state(second.get_state())):
        assert part.env_index == 1


def test_the_whole_return_survives_two_cuts_where_get_return_counts_the_chunk() -> None:
    """RLlib's `get_return` counts the steps of the chunk, and its older `total_reward` the whole episode."""
    one = rllib_episodes.SingleAgentEpisode()
    one.add_env_reset(0)
    for reward in (1.0, 10.0, 100.0):
        one.add_env_step(0, 0, reward)
        one = one.cut()
    one.add_env_step(0, 0, 1000.0)
    assert (one.get_return(), one.total_reward) == (1000.0, 1111.0)

    both = rllib_episodes.MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent_id, episode: "m")
    both.add_env_reset({"a": 0, "b": 0})
    for reward in (1.0, 10.0, 100.0):
        ends = {"b": reward == 10.0}
        agents = both.get_agents_to_act()
        both.add_env_step(
            dict.fromkeys(agents, 0), dict.fromkeys(agents, 0), dict.fromkeys(agents, reward), terminateds=ends
        )
        both = both.cut()
    both.add_env_step({"a": 0}, {"a": 0}, {"a": 1000.0})
    assert both.get_return() == 1000.0
    assert both.agent_rewards == {("a", "m"): 1111.0, ("b", "m"): 11.0}
