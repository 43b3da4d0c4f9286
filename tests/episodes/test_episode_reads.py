"""Reading episodes: ints, lists, slices, lookback, fill, one-hot; against literals and against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from corral.core.tree import leaves
from corral.data.episodes.episode import SingleAgentEpisode
from handmade import made, plain

S = slice
NOTHING = S(1, 1)


# indices -> rewards, with 1 2 3 | 4 5 6 7: without the lookback flag, and with it (None: the same)
READS: list[tuple[Any, Any, Any]] = [
    (None, [4, 5, 6, 7], None),
    (0, 4, None),
    (3, 7, None),
    (-1, 7, 3),
    (-3, 5, 1),
    ([0, 2], [4, 6], None),
    ([0, -1], [4, 7], [4, 3]),
    ([2, 0, 0], [6, 4, 4], None),
    ([-1, -3], [7, 5], [3, 1]),
    ([], [], None),
    (S(None), [4, 5, 6, 7], None),
    (S(0, 2), [4, 5], None),
    (S(None, 2), [4, 5], None),
    (S(2, None), [6, 7], None),
    (S(2, 9), [6, 7], None),
    (S(10, 12), [], None),
    (S(2, 2), [], None),
    (S(3, 1), [], None),
    (S(-2, None), [6, 7], [2, 3, 4, 5, 6, 7]),
    (S(None, -1), [4, 5, 6], []),
    (S(-6, -2), [2, 3, 4, 5], [1]),
    (S(-5, 2), [3, 4, 5], [1, 2, 3, 4, 5]),
    (S(-20, 2), [1, 2, 3, 4, 5], None),
    (S(-20, -10), [], None),
    (S(-2, 1), [], [2, 3, 4]),
    (S(-6, 9), [2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]),
    (S(None, None, 2), [4, 6], None),
    (S(1, None, 2), [5, 7], None),
    (S(-4, 4, 2), [4, 6], [1, 3, 5, 7]),
    (S(-20, 4, 3), [1, 4, 7], None),
    (S(3, 0, -1), [7, 6, 5], None),
    (S(8, 1, -1), [7, 6], None),
    (S(-1, -4, -1), [7, 6, 5], [3, 2, 1]),
    (S(-1, -12, -1), [7, 6, 5, 4, 3, 2, 1], [3, 2, 1]),
    (S(2, -2, -1), [], [6, 5, 4, 3]),
    (S(None, None, -1), [7, 6, 5, 4], None),
    (S(2, None, -2), [6, 4], None),
]

# the same with fill=-9
FILLED: list[tuple[Any, Any, Any]] = [
    (None, [4, 5, 6, 7], None),
    (4, -9, None),
    (20, -9, None),
    (-7, 1, -9),
    (-8, -9, -9),
    (-4, 4, -9),
    ([0, 9], [4, -9], None),
    ([-8, -1], [-9, 7], [-9, 3]),
    ([-20, 20], [-9, -9], None),
    (S(None), [4, 5, 6, 7], None),
    (S(2, 6), [6, 7, -9, -9], None),
    (S(2, 2), [], None),
    (S(3, 1), [], None),
    (S(10, 12), [-9, -9], None),
    (S(4, 5), [-9], None),
    (S(-20, -18), [-9, -9], None),
    (S(-5, 2), [3, 4, 5], [-9, -9, 1, 2, 3, 4, 5]),
    (S(-9, -4), [-9, -9, 1, 2, 3], [-9] * 5),
    (S(-9, -2), [-9, -9, 1, 2, 3, 4, 5], [-9] * 6 + [1]),
    (S(-5, 5), [3, 4, 5, 6, 7, -9], [-9, -9, 1, 2, 3, 4, 5, 6, 7, -9]),
    (S(None, None, 2), [4, 6], None),
    (S(1, 9, 3), [5, -9, -9], None),
    (S(-4, 4, 2), [4, 6], [-9, 2, 4, 6]),
    (S(-1, -9, -2), [7, 5, 3, 1], [3, 1, -9, -9]),
    (S(5, 1, -1), [-9, -9, 7, 6], None),
]


class TestReading:
    @pytest.mark.parametrize(("indices", "expected", "as_lookback"), READS, ids=str)
    def test_rewards(self, indices: Any, expected: Any, as_lookback: Any) -> None:
        episode = made()
        assert episode.get_rewards(indices).tolist() == expected
        wanted = expected if as_lookback is None else as_lookback
        assert episode.get_rewards(indices, neg_index_as_lookback=True).tolist() == wanted

    @pytest.mark.parametrize(("indices", "expected", "as_lookback"), FILLED, ids=str)
    def test_filled_rewards(self, indices: Any, expected: Any, as_lookback: Any) -> None:
        episode = made()
        got = episode.get_rewards(indices, fill=-9)
        assert (got.tolist(), got.dtype) == (expected, np.float64)
        got = episode.get_rewards(indices, neg_index_as_lookback=True, fill=-9.0)
        assert (got.tolist(), got.dtype) == (expected if as_lookback is None else as_lookback, np.float64)

    @pytest.mark.parametrize(
        ("indices", "observations", "actions"),
        [
            (None, [3, 4, 5, 6, 7], [13, 14, 15, 16]),
            (0, 3, 13),
            (-1, 7, 16),
            (-5, 3, 12),
            (-7, 1, 10),
            (S(-2, None), [6, 7], [15, 16]),
            (S(1, 9), [4, 5, 6, 7], [14, 15, 16]),
            ([0, -1], [3, 7], [13, 16]),
        ],
        ids=str,
    )
    def test_observations_are_one_more(self, indices: Any, observations: Any, actions: Any) -> None:
        episode = made()
        assert episode.get_observations(indices).tolist() == observations
        assert episode.get_actions(indices).tolist() == actions
        infos = episode.get_infos(indices)
        assert ([i["i"] for i in infos] if isinstance(infos, list) else infos["i"]) == observations
        v = [(a - 10) / 2 for a in np.atleast_1d(actions)]
        assert np.atleast_1d(episode.get_extra_model_outputs("v", indices)).tolist() == v
        assert np.atleast_1d(episode.get_extra_model_outputs(indices=indices)["v"]).tolist() == v

    @pytest.mark.parametrize("indices", [4, 20, -8, -20, [0, 4], [-8]], ids=str)
    def test_out_of_range(self, indices: Any) -> None:
        episode = made()
        for get in (episode.get_rewards, episode.get_actions, lambda i: episode.get_extra_model_outputs("v", i)):
            with pytest.raises(IndexError):
                get(indices)

    @pytest.mark.parametrize("indices", [-4, -7, -8, [0, -4]], ids=str)
    def test_beyond_the_lookback_does_not_wrap(self, indices: Any) -> None:
        for get in (made().get_rewards, made().get_observations, made().get_infos):
            with pytest.raises(IndexError):
                get(indices, neg_index_as_lookback=True)

    def test_observations_and_infos_end_one_later(self) -> None:
        episode = made()
        assert (episode.get_observations(4), episode.get_infos(4), episode.get_infos(-8)) == (7, {"i": 7}, {"i": 0})
        for get in (episode.get_observations, episode.get_infos):
            for index in (5, -9):
                with pytest.raises(IndexError):
                    get(index)

    def test_before_the_reset(self) -> None:
        episode = SingleAgentEpisode()
        with pytest.raises(IndexError, match="has not been reset"):
            episode.get_observations()
        with pytest.raises(IndexError):
            episode.get_rewards(-1)

    def test_infos_fill(self) -> None:
        episode = made()
        assert episode.get_infos(9, fill={}) == {}
        assert episode.get_infos([0, 9], fill={"f": 1}) == [{"i": 3}, {"f": 1}]
        assert episode.get_infos(S(3, 7), fill={"f": 1}) == [{"i": 6}, {"i": 7}, {"f": 1}, {"f": 1}]
        before = episode.get_infos(S(-4, 1), neg_index_as_lookback=True, fill={})
        assert before == [{}, {"i": 0}, {"i": 1}, {"i": 2}, {"i": 3}]
        assert episode.get_infos(NOTHING) == []

    def test_extra_model_outputs(self) -> None:
        episode = made(extra_model_outputs={"v": [0.0] * 6 + [1.0], "w": np.arange(14).reshape(7, 2)})
        assert plain(episode.get_extra_model_outputs(indices=-1)) == {"v": 1, "w": [12, 13]}
        filled = episode.get_extra_model_outputs(indices=S(3, 5), fill=-1)
        assert plain(filled) == {"v": [1, -1], "w": [[12, 13], [-1, -1]]}
        assert episode.get_extra_model_outputs("w", -1, neg_index_as_lookback=True).tolist() == [4, 5]
        with pytest.raises(KeyError, match=r"'z'.*v.*w"):
            episode.get_extra_model_outputs("z")
        assert SingleAgentEpisode(observations=[1.0]).get_extra_model_outputs() == {}

    def test_a_vector_fill_is_the_scalar_everywhere(self) -> None:
        episode = SingleAgentEpisode(
            observations=[np.array([i, i + 0.5], np.float32) for i in range(5)],
            actions=[0, 1, 2, 3],
            rewards=[0.0] * 4,
            len_lookback_buffer=2,
        )
        get = episode.get_observations
        left = get(S(-4, 1), neg_index_as_lookback=True, fill=0.0)
        assert (left.tolist(), left.dtype) == ([[0, 0], [0, 0], [0, 0.5], [1, 1.5], [2, 2.5]], np.float32)
        assert get(S(1, 5), fill=7).tolist() == [[3, 3.5], [4, 4.5], [7, 7], [7, 7]]
        assert get(S(8, 10), fill=0).tolist() == [[0, 0], [0, 0]]
        assert get(9, fill=0).tolist() == [0, 0]
        assert get([0, 9], fill=0).tolist() == [[2, 2.5], [0, 0]]
        assert get(NOTHING, fill=0).shape == get(NOTHING).shape == get([]).shape == (0, 2)
        actions = episode.get_actions(S(-3, 1), neg_index_as_lookback=True, fill=0.0)
        assert (actions.tolist(), actions.dtype) == ([0, 0, 1, 2], np.int64)

    def test_views_and_copies(self) -> None:
        episode = made()
        episode.get_rewards()[0] = -1  # writing through a range writes the column
        episode.get_rewards(S(-6, -4))[0] = -2
        episode.get_rewards([1, 2])[:] = -3  # a list picks a copy
        assert episode.get_rewards(S(-7, None)).tolist() == [1, -2, 3, -1, 5, 6, 7]


def nested() -> SingleAgentEpisode:
    """Return an episode with a lookback of one, nested observations and MultiDiscrete actions."""
    space = spaces.Dict(
        {
            "a": spaces.Discrete(3),
            "b": spaces.MultiDiscrete([2, 3]),
            "c": spaces.Tuple((spaces.Box(-9, 9, (2,)), spaces.Discrete(2))),
        }
    )
    return SingleAgentEpisode(
        observation_space=space,
        action_space=spaces.MultiDiscrete([2, 3]),
        observations=[
            {"a": i % 3, "b": np.array([i % 2, i % 3]), "c": (np.array([i, -i], np.float32), i % 2)} for i in range(4)
        ],
        actions=[np.array([1, 2]), np.array([0, 1]), np.array([1, 0])],
        rewards=[1, 2, 3],
        len_lookback_buffer=1,
    )


class TestNested:
    @pytest.mark.parametrize(
        ("indices", "fill", "expected"),
        [
            (
                None,
                None,
                {"a": [1, 2, 0], "b": [[1, 1], [0, 2], [1, 0]], "c": ([[1, -1], [2, -2], [3, -3]], [1, 0, 1])},
            ),
            (0, None, {"a": 1, "b": [1, 1], "c": ([1, -1], 1)}),
            (-1, None, {"a": 0, "b": [0, 0], "c": ([0, 0], 0)}),
            ([0, 2], None, {"a": [1, 0], "b": [[1, 1], [1, 0]], "c": ([[1, -1], [3, -3]], [1, 1])}),
            (S(-3, 1), None, {"a": [0, 1], "b": [[0, 0], [1, 1]], "c": ([[0, 0], [1, -1]], [0, 1])}),
            (S(-2, 0), 5, {"a": [5, 0], "b": [[5, 5], [0, 0]], "c": ([[5, 5], [0, 0]], [5, 0])}),
            ([2, 9], 0.0, {"a": [0, 0], "b": [[1, 0], [0, 0]], "c": ([[3, -3], [0, 0]], [1, 0])}),
            (9, 0, {"a": 0, "b": [0, 0], "c": ([0, 0], 0)}),
        ],
        ids=str,
    )
    def test_observations(self, indices: Any, fill: Any, expected: Any) -> None:
        assert plain(nested().get_observations(indices, neg_index_as_lookback=True, fill=fill)) == expected

    def test_empty(self) -> None:
        for indices in ([], S(2, 1)):
            obs = nested().get_observations(indices)
            assert [leaf.shape for leaf in leaves(obs)] == [(0,), (0, 2), (0, 2), (0,)]

    def test_one_hot(self) -> None:
        obs = nested().get_observations(S(1, None), one_hot_discrete=True)
        assert obs["a"].tolist() == [[0, 0, 1], [1, 0, 0]]
        assert obs["b"].tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
        assert plain(obs["c"]) == ([[2, -2], [3, -3]], [[1, 0], [0, 1]])
        assert obs["a"].dtype == obs["b"].dtype == np.float32

    def test_one_hot_of_one_row_and_of_a_list(self) -> None:
        obs = nested().get_observations(-1, one_hot_discrete=True, neg_index_as_lookback=True)
        assert plain(obs) == {"a": [1, 0, 0], "b": [1, 0, 1, 0, 0], "c": ([0, 0], [1, 0])}
        actions = nested().get_actions([1, 0], one_hot_discrete=True)
        assert actions.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 1, 0]]

    def test_a_filled_one_hot_is_zero_hot(self) -> None:
        actions = nested().get_actions(S(-2, 1), neg_index_as_lookback=True, fill=0, one_hot_discrete=True)
        assert actions.tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
        obs = nested().get_observations(9, fill=0, one_hot_discrete=True)
        assert plain(obs) == {"a": [0, 0, 0], "b": [0] * 5, "c": ([0, 0], [0, 0])}

    def test_one_hot_discrete_actions(self) -> None:
        episode = made(
            action_space=spaces.Discrete(4, start=13)
        )  # three actions of the lookback are outside the space; none is requested
        assert episode.get_actions(one_hot_discrete=True).tolist() == np.eye(4).tolist()
        assert episode.get_actions(-1, one_hot_discrete=True).tolist() == [0, 0, 0, 1]
        assert episode.get_actions(NOTHING, one_hot_discrete=True).shape == (0, 4)

    def test_one_hot_of_numbers_that_do_not_start_at_zero(self) -> None:
        space = spaces.MultiDiscrete([2, 3], start=[-1, 5])
        episode = SingleAgentEpisode(
            observations=[np.zeros(1)] * 3,
            actions=[np.array([-1, 7]), np.array([0, 5])],
            rewards=[0.0, 0.0],
            action_space=space,
            len_lookback_buffer=0,
        )
        assert episode.get_actions(one_hot_discrete=True).tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]

    def test_one_hot_leaves_the_rest_alone(self) -> None:
        episode = made(observation_space=spaces.Box(-9, 9, ()))
        assert episode.get_observations(one_hot_discrete=True).tolist() == [3, 4, 5, 6, 7]

    def test_one_hot_without_a_space(self) -> None:
        with pytest.raises(ValueError, match="action_space"):
            made().get_actions(one_hot_discrete=True)
        with pytest.raises(ValueError, match="observation_space"):
            made().get_observations(one_hot_discrete=True)


Index = st.integers(-12, 12)
Bound = st.none() | Index
Step = st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3])


def expected(column: list[float], lookback: int, indices: Any, as_lookback: bool, fill: float | None) -> Any:
    """Read a list as an episode does: position 0 is the first after the lookback. An out-of-range one raises."""
    length = len(column) - lookback

    def position(index: int) -> int:
        return index if index >= 0 or as_lookback else length + index

    def at(position: int) -> float:
        if -lookback <= position < length:
            return column[lookback + position]
        if fill is None:
            raise IndexError(position)
        return fill

    if indices is None:
        return column[lookback:]
    if isinstance(indices, int):
        return at(position(indices))
    if isinstance(indices, list):
        return [at(position(index)) for index in indices]
    step = 1 if indices.step is None else indices.step
    first, last = (0, length) if step > 0 else (length - 1, -1)
    start = first if indices.start is None else position(indices.start)
    stop = last if indices.stop is None else position(indices.stop)
    if fill is None:  # clip, then count from there
        start = max(start, -lookback) if step > 0 else min(start, length - 1)
        stop = min(stop, length) if step > 0 else max(stop, -lookback - 1)
    return [at(position) for position in range(start, stop, step)]


@given(
    length=st.integers(0, 8),
    lookback=st.integers(0, 5),
    indices=st.none() | Index | st.lists(Index, max_size=4) | st.builds(slice, Bound, Bound, Step),
    as_lookback=st.booleans(),
    fill=st.none() | st.just(-1.0),
)
def test_reads_as_a_list_would(length: int, lookback: int, indices: Any, as_lookback: bool, fill: float | None) -> None:
    rewards = [float(i) for i in range(lookback + length)]
    observations = [100.0 + i for i in range(lookback + length + 1)]
    episode = SingleAgentEpisode(
        observations=observations, actions=rewards, rewards=rewards, len_lookback_buffer=lookback
    )
    for get, column in (
        (episode.get_rewards, rewards),
        (episode.get_actions, rewards),
        (episode.get_observations, observations),
    ):
        try:
            wanted = expected(column, lookback, indices, as_lookback, fill)
        except IndexError:
            with pytest.raises(IndexError):
                get(indices, neg_index_as_lookback=as_lookback, fill=fill)
        else:
            assert get(indices, neg_index_as_lookback=as_lookback, fill=fill).tolist() == wanted
