"""Episodes built by hand: what they hold, how their data are written, what they refuse.

Reading them is in `test_episode_reads.py`; slicing, cutting, joining and saving in `test_episode_chunks.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from corral.data.episodes.episode import SingleAgentEpisode
from corral.errors import CorralError, EpisodeError
from handmade import made, plain, stepped

S = slice


class TestBuilding:
    def test_new(self) -> None:
        episode = SingleAgentEpisode()
        assert (len(episode), episode.t, episode.t_started) == (0, 0, 0)
        assert (episode.is_reset, episode.is_done) == (False, False)
        assert (episode.custom_data, episode.get_return(), episode.get_duration_s()) == ({}, 0, 0)
        assert episode.get_rewards().shape == (0,)

    def test_ids(self) -> None:
        ids = {SingleAgentEpisode().id_ for _ in range(100)}
        assert len(ids) == 100
        assert all(isinstance(id_, str) and id_ for id_ in ids)
        assert SingleAgentEpisode("mine").id_ == SingleAgentEpisode(id_="mine").id_ == "mine"

    def test_step_by_step(self) -> None:
        episode = SingleAgentEpisode()
        episode.add_env_reset(np.zeros(2, np.float32))
        assert (len(episode), episode.is_reset, episode.get_infos()) == (0, True, [{}])
        assert episode.get_observations().tolist() == [[0, 0]]
        episode.add_env_step(np.ones(2, np.float32), np.int64(3), 1, {"k": 1}, extra_model_outputs={"v": np.float32(2)})
        episode.add_env_step(np.full(2, 2, np.float32), 4, 0.5, terminated=True, extra_model_outputs={"v": 3.0})
        assert (len(episode), episode.t, episode.t_started) == (2, 2, 0)
        assert episode.get_observations().tolist() == [[0, 0], [1, 1], [2, 2]]
        assert episode.get_actions().tolist() == [3, 4]
        assert episode.get_rewards().tolist() == [1, 0.5]
        assert episode.get_infos() == [{}, {"k": 1}, {}]
        assert plain(episode.get_extra_model_outputs()) == {"v": [2, 3]}
        assert (episode.is_terminated, episode.is_truncated, episode.is_done) == (True, False, True)
        assert episode.get_return() == 1.5
        episode.validate()

    def test_dtypes(self) -> None:
        episode = SingleAgentEpisode()
        episode.add_env_reset(np.zeros(2, np.float32))
        episode.add_env_step(np.ones(2, np.float32), 1, 1, extra_model_outputs={"v": np.float32(1)})
        assert episode.get_observations().dtype == np.float32
        assert episode.get_actions().dtype == np.int64
        assert episode.get_rewards().dtype == np.float64
        assert episode.get_extra_model_outputs("v").dtype == np.float32

    @pytest.mark.parametrize(("terminated", "truncated"), [(True, False), (False, True), (True, True)])
    def test_either_end_is_done(self, terminated: bool, truncated: bool) -> None:
        for episode in (
            stepped(terminated=terminated, truncated=truncated),
            made(terminated=terminated, truncated=truncated),
        ):
            assert (episode.is_terminated, episode.is_truncated, episode.is_done) == (terminated, truncated, True)

    def test_grows_to_ten_thousand_steps(self) -> None:
        episode = SingleAgentEpisode()
        episode.add_env_reset({"x": np.zeros(2), "n": 0}, {"i": 0})
        for t in range(1, 10_001):
            obs = {"x": np.full(2, t), "n": t}
            episode.add_env_step(obs, t % 7, t / 4, {"i": t}, extra_model_outputs={"v": [t, -t]})
        steps = np.arange(1, 10_001)
        assert (len(episode), episode.t, episode.get_return()) == (10_000, 10_000, steps.sum() / 4)
        assert np.array_equal(episode.get_observations()["x"], np.stack([np.arange(10_001)] * 2, axis=1))
        assert np.array_equal(episode.get_observations()["n"], np.arange(10_001))
        assert np.array_equal(episode.get_actions(), steps % 7)
        assert np.array_equal(episode.get_rewards(), steps / 4)
        assert np.array_equal(episode.get_extra_model_outputs("v"), np.stack([steps, -steps], axis=1))
        assert [info["i"] for info in episode.get_infos()] == list(range(10_001))

    def test_arrays_are_copied_in(self) -> None:
        obs = np.zeros(2)  # many envs give the same array at every step
        episode = SingleAgentEpisode()
        episode.add_env_reset(obs)
        for t in (1, 2):
            obs += 1
            episode.add_env_step(obs, 0, t)
        assert episode.get_observations().tolist() == [[0, 0], [1, 1], [2, 2]]

    def test_arrays_given_to_the_constructor(self) -> None:
        episode = SingleAgentEpisode(
            observations=np.arange(3.0), actions=np.arange(2), rewards=np.ones(2), len_lookback_buffer=0
        )
        assert (len(episode), episode.get_observations().tolist(), episode.get_infos()) == (2, [0, 1, 2], [{}] * 3)

    @pytest.mark.parametrize(
        ("settings", "length", "t_started", "t", "rewards"),
        [
            ({}, 0, 0, 0, []),  # "auto": all that is given is lookback
            ({"len_lookback_buffer": 0}, 2, 0, 2, [1, 2]),
            ({"len_lookback_buffer": 1}, 1, 0, 1, [2]),
            ({"len_lookback_buffer": 2}, 0, 0, 0, []),
            ({"len_lookback_buffer": 7}, 0, 0, 0, []),  # no more than there is
            ({"t_started": 4}, 0, 4, 4, []),
            ({"t_started": 4, "len_lookback_buffer": 1}, 1, 4, 5, [2]),
            ({"t_started": 4, "len_lookback_buffer": 0}, 2, 4, 6, [1, 2]),
        ],
    )
    def test_lookback_does_not_count(
        self, settings: dict[str, Any], length: int, t_started: int, t: int, rewards: list[float]
    ) -> None:
        episode = SingleAgentEpisode(observations=[1, 2, 3], actions=[1, 2], rewards=[1, 2], **settings)
        assert (len(episode), episode.t_started, episode.t) == (length, t_started, t)
        assert episode.get_rewards().tolist() == rewards
        assert episode.get_return() == sum(rewards)
        assert len(episode.get_observations()) == len(episode.get_infos()) == length + 1
        assert episode.get_rewards(S(-2, None)).tolist() == [1, 2]

    def test_an_observation_alone_is_a_reset(self) -> None:
        episode = SingleAgentEpisode(observations=[3.0])
        assert (len(episode), episode.is_reset, episode.get_observations().tolist()) == (0, True, [3])
        episode.add_env_step(4.0, 0, 1.0)
        assert episode.get_observations().tolist() == [3, 4]

    def test_steps_follow_what_the_constructor_got(self) -> None:
        episode = made()
        episode.add_env_step(8.0, 17, 8.0, {"i": 8}, truncated=True, extra_model_outputs={"v": 3.5})
        assert (len(episode), episode.t, episode.t_started, episode.get_return()) == (5, 10, 5, 30)
        assert episode.get_observations(S(-4, None)).tolist() == [5, 6, 7, 8]
        assert episode.get_extra_model_outputs("v").tolist() == [1.5, 2, 2.5, 3, 3.5]
        assert episode.get_infos(-1) == {"i": 8}

    def test_duration(self) -> None:
        before = time.perf_counter()
        episode = stepped(3)
        assert 0 < episode.get_duration_s() <= time.perf_counter() - before
        assert episode.get_duration_s() == episode.get_duration_s()


# indices, new data -> rewards with the lookback: without the lookback flag, and with it (None: the same)
WRITES: list[tuple[Any, Any, Any, Any]] = [
    (None, [9, 8, 7, 6], [1, 2, 3, 9, 8, 7, 6], None),
    (0, 9, [1, 2, 3, 9, 5, 6, 7], None),
    (-1, 9, [1, 2, 3, 4, 5, 6, 9], [1, 2, 9, 4, 5, 6, 7]),
    (-3, 9, [1, 2, 3, 4, 9, 6, 7], [9, 2, 3, 4, 5, 6, 7]),
    (S(0, 2), [8, 9], [1, 2, 3, 8, 9, 6, 7], None),
    (S(3, None), [9], [1, 2, 3, 4, 5, 6, 9], None),
    (S(2, 9), [8, 9], [1, 2, 3, 4, 5, 8, 9], None),
    (S(None, None, 2), [8, 9], [1, 2, 3, 8, 5, 9, 7], None),
    (S(3, 1, -1), [8, 9], [1, 2, 3, 4, 5, 9, 8], None),
    (S(1, 1), [], [1, 2, 3, 4, 5, 6, 7], None),
    ([0, 2], [8, 9], [1, 2, 3, 8, 5, 9, 7], None),
    ([0, -1], [8, 9], [1, 2, 3, 8, 5, 6, 9], [1, 2, 9, 8, 5, 6, 7]),
    ([], [], [1, 2, 3, 4, 5, 6, 7], None),
]


class TestWriting:
    @pytest.mark.parametrize(("indices", "new_data", "expected", "as_lookback"), WRITES, ids=str)
    @pytest.mark.parametrize("convert", [list, np.array], ids=["list", "array"])
    def test_rewards(
        self, indices: Any, new_data: Any, expected: Any, as_lookback: Any, convert: Callable[[Any], Any]
    ) -> None:
        data = convert(new_data) if isinstance(new_data, list) else new_data
        episode = made()
        episode.set_rewards(new_data=data, at_indices=indices)
        assert episode.get_rewards(S(-7, None)).tolist() == expected
        episode = made()
        episode.set_rewards(new_data=data, at_indices=indices, neg_index_as_lookback=True)
        got = episode.get_rewards(S(-3, None), neg_index_as_lookback=True).tolist()
        assert got == (expected if as_lookback is None else as_lookback)

    @pytest.mark.parametrize(
        ("indices", "new_data"),
        [(-7, 9), (S(-2, None), [8, 9]), (S(-6, -4), [8, 9]), ([-5, -7], [8, 9])],
        ids=str,
    )
    def test_negative_indices_reach_into_the_lookback(self, indices: Any, new_data: Any) -> None:
        episode = made()
        episode.set_rewards(new_data=new_data, at_indices=indices)
        assert episode.get_rewards(indices).tolist() == new_data

    @pytest.mark.parametrize(
        ("indices", "new_data"),
        [
            (None, [0.0] * 3),
            (None, [0.0] * 7),
            (None, 0.0),  # nothing is broadcast
            (0, [9.0]),
            (4, 9.0),
            (-8, 9.0),
            (S(0, 2), [9.0]),
            (S(0, 2), 9.0),
            (S(2, 9), [9.0] * 7),
            (S(-2, 1), [7.0, 8.0, 9.0]),
            ([0, 2], [8.0]),
            ([0, 2], [8.0, 9.0, 10.0]),
            ([0, 9], [8.0, 9.0]),
            ([0], 7.0),
        ],
        ids=str,
    )
    def test_another_size(self, indices: Any, new_data: Any) -> None:
        episode = made()
        with pytest.raises(IndexError):
            episode.set_rewards(new_data=new_data, at_indices=indices)
        assert episode.get_rewards(S(-7, None)).tolist() == [1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.parametrize("indices", [-4, -7, S(-2, None), [0, -4]], ids=str)
    def test_another_size_in_the_lookback(self, indices: Any) -> None:
        with pytest.raises(IndexError):
            made().set_rewards(new_data=9 if isinstance(indices, int) else [8, 9], **_at(indices))

    def test_the_other_columns(self) -> None:
        episode = made()
        episode.set_observations(new_data=[9.0] * 5)
        episode.set_actions(new_data=[5, 6], at_indices=S(-2, None))
        episode.set_extra_model_outputs(key="v", new_data=[5.0, 6.0], at_indices=[0, -1])
        assert episode.get_observations(S(-8, None)).tolist() == [0, 1, 2, 9, 9, 9, 9, 9]
        assert episode.get_actions(S(-7, None)).tolist() == [10, 11, 12, 13, 14, 5, 6]
        assert episode.get_extra_model_outputs("v").tolist() == [5, 2, 2.5, 6]
        with pytest.raises(IndexError):
            episode.set_observations(new_data=[9.0] * 4)
        with pytest.raises(IndexError):
            episode.set_extra_model_outputs(key="v", new_data=[9.0] * 3)

    def test_nested_observations(self) -> None:
        episode = SingleAgentEpisode(
            observations=[{"a": i, "b": (np.array([i, -i]), i)} for i in range(4)],
            actions=[0, 1, 2],
            rewards=[0, 0, 0],
            len_lookback_buffer=1,
        )
        row = {"a": 2, "b": ([8, 9], 0)}
        episode.set_observations(new_data=row, at_indices=0)
        assert plain(episode.get_observations(0)) == row
        rows = {"a": [0, 7], "b": ([[1, 2], [3, 4]], [1, 1])}
        episode.set_observations(new_data=rows, at_indices=S(-2, None))
        assert plain(episode.get_observations(S(1, None))) == rows
        with pytest.raises(IndexError):
            episode.set_observations(new_data=rows)
        with pytest.raises(IndexError):  # one leaf alone has another size
            episode.set_observations(new_data=rows | {"a": [5]}, at_indices=[0, 1])
        assert plain(episode.get_observations()) == {"a": [2, 0, 7], "b": ([[8, 9], [1, 2], [3, 4]], [0, 1, 1])}

    def test_another_row_shape_or_dtype(self) -> None:
        episode = SingleAgentEpisode(observations=[np.zeros(2)] * 3, actions=[0, 1], rewards=[0, 0])
        with pytest.raises(IndexError, match=r"2.*3|3.*2"):
            episode.set_observations(new_data=np.ones(3), at_indices=0)
        with pytest.raises((EpisodeError, IndexError), match=r"float64.*int64|int64.*float64"):
            episode.set_actions(new_data=0.5, at_indices=-1)
        assert (episode.get_observations(0).tolist(), episode.get_actions(-1)) == ([0, 0], 1)

    def test_a_new_extra_model_output(self) -> None:
        episode = made()
        episode.set_extra_model_outputs(key="w", new_data=[1.0, 2.0, 3.0, 4.0])
        assert episode.get_extra_model_outputs("w").tolist() == [1, 2, 3, 4]
        assert list(episode.get_extra_model_outputs()) == ["v", "w"]
        episode.set_extra_model_outputs(key="w", new_data=9.0, at_indices=-1)
        assert episode.get_extra_model_outputs("w", -1) == 9
        with pytest.raises(IndexError):
            episode.set_extra_model_outputs(key="x", new_data=[1.0, 2.0])
        with pytest.raises(KeyError, match="'x'"):
            episode.set_extra_model_outputs(key="x", new_data=1.0, at_indices=0)
        assert list(episode.get_extra_model_outputs()) == ["v", "w"]

    def test_the_return_follows(self) -> None:
        episode = made()
        episode.set_rewards(new_data=[0.0] * 4)
        assert episode.get_return() == 0
        episode.set_rewards(new_data=100.0, at_indices=-1, neg_index_as_lookback=True)
        assert episode.get_return() == 0

    def test_temporary_timestep_data(self) -> None:
        episode = stepped()
        for value in (1.0, 2.0):
            episode.add_temporary_timestep_data("angle", value)
        episode.add_temporary_timestep_data("cell", (1, 2))
        assert episode.get_temporary_timestep_data("angle") == [1, 2]
        assert episode.get_temporary_timestep_data("cell") == [(1, 2)]
        with pytest.raises(KeyError, match=r"'angel'.*angle"):
            episode.get_temporary_timestep_data("angel")


def _at(indices: Any) -> dict[str, Any]:
    return {"at_indices": indices, "neg_index_as_lookback": True}


class TestRefused:
    def test_the_error(self) -> None:
        assert issubclass(EpisodeError, CorralError)
        assert issubclass(EpisodeError, ValueError)

    def test_a_second_reset(self) -> None:
        episode = SingleAgentEpisode()
        episode.add_env_reset(0.0)
        for started in (episode, stepped(), made()):
            with pytest.raises(EpisodeError, match="reset"):
                started.add_env_reset(1.0)

    def test_a_step_before_the_reset(self) -> None:
        with pytest.raises(EpisodeError, match="reset"):
            SingleAgentEpisode().add_env_step(1.0, 0, 1.0)

    @pytest.mark.parametrize("end", ["terminated", "truncated"])
    def test_a_step_after_the_end(self, end: str) -> None:
        for episode in (stepped(**{end: True}), made(**{end: True})):
            length = len(episode)
            with pytest.raises(EpisodeError):
                episode.add_env_step(9.0, 0, 1.0)
            assert len(episode) == length

    def test_extra_model_outputs_that_come_and_go(self) -> None:
        episode = stepped(1, extra_model_outputs={"v": 1.0})
        for outputs, named in (({"v": 1.0, "w": 2.0}, "'w'"), ({}, "'v'"), (None, "'v'")):
            with pytest.raises(EpisodeError, match=named):
                episode.add_env_step(2.0, 2, 2.0, extra_model_outputs=outputs)
        assert (len(episode), episode.get_observations().tolist()) == (1, [0, 1])

    @pytest.mark.parametrize("len_lookback_buffer", ["auto", 0, 1])
    @pytest.mark.parametrize(
        ("columns", "lengths"),
        [
            ({"observations": [1, 2, 3], "actions": [1], "rewards": [1, 2]}, (3, 1, 2)),
            ({"observations": [1, 2], "actions": [1, 2], "rewards": [1, 2]}, (2,)),
            ({"observations": [1, 2, 3], "actions": [1, 2], "rewards": [1]}, (3, 2, 1)),
            ({"actions": [1], "rewards": [1]}, (0, 1)),
            ({"observations": [1, 2, 3], "actions": [1, 2], "rewards": [1, 2], "infos": [{}]}, (3, 1)),
            (
                {"observations": [1, 2], "actions": [1], "rewards": [1], "extra_model_outputs": {"v": [1, 2, 3]}},
                (1, 3),
            ),
        ],
    )
    def test_lengths_that_do_not_fit(
        self, columns: dict[str, Any], lengths: tuple[int, ...], len_lookback_buffer: Any
    ) -> None:
        with pytest.raises(EpisodeError) as caught:
            SingleAgentEpisode(len_lookback_buffer=len_lookback_buffer, **columns)
        for length in lengths:
            assert re.search(rf"\b{length}\b", str(caught.value))

    def test_a_negative_lookback(self) -> None:
        with pytest.raises(EpisodeError, match="len_lookback_buffer"):
            made(-1)


@pytest.mark.parametrize("name", ["rewards", "actions", "obs", "valid", "terminated"])
def test_extra_outputs_do_not_hide_columns(name: str) -> None:
    with pytest.raises(EpisodeError, match=name):
        SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[1.0], extra_model_outputs={name: [9.0]})
    episode = SingleAgentEpisode(observations=[0])
    with pytest.raises(EpisodeError, match=name):
        episode.add_env_step(1, 0, 1.0, extra_model_outputs={name: 9.0})
    assert len(episode) == 0


@pytest.mark.parametrize("observations", [[[0.0], [1.0, 2.0]], [{"a": 0}, {"b": 1}], [(0, 1), (0,)]], ids=str)
def test_observations_that_differ_in_form_are_refused(observations: list[Any]) -> None:
    with pytest.raises(EpisodeError, match="'obs' differ"):
        SingleAgentEpisode(observations=observations, actions=[0], rewards=[1.0])


@pytest.mark.parametrize("lookback", [-1, "all", 1.5])
def test_a_lookback_is_a_number_of_steps(lookback: Any) -> None:
    with pytest.raises(EpisodeError, match="len_lookback_buffer"):
        SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[1.0], len_lookback_buffer=lookback)


def test_a_slice_has_no_negative_lookback_and_the_return_of_its_steps() -> None:
    episode = SingleAgentEpisode(observations=range(5), actions=[0] * 4, rewards=[1, 2, 3, 4], len_lookback_buffer=0)
    with pytest.raises(EpisodeError, match="len_lookback_buffer=-3"):
        episode.slice(slice(1, 3), len_lookback_buffer=-3)
    assert episode[1:3].get_return() == 2 + 3


def test_from_state_keeps_a_subclass() -> None:
    class Mine(SingleAgentEpisode):
        __slots__ = ()

    assert type(Mine.from_state(Mine(observations=[0]).get_state())) is Mine


def test_a_first_step_that_does_not_fit_decides_nothing() -> None:
    episode = SingleAgentEpisode(observations=[[0.0, 0.0]])
    with pytest.raises(EpisodeError, match="obs"):
        episode.add_env_step([1.0], [9, 9], 1.0, extra_model_outputs={"x": 1})
    assert len(episode) == 0 and episode.get_extra_model_outputs() == {}
    episode.add_env_step([1.0, 2.0], 0.5, 1.0)
    assert (episode.get_actions().tolist(), episode.get_extra_model_outputs()) == ([0.5], {})
