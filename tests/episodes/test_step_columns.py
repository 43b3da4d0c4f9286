"""The storage below rollouts and episodes: columns of time steps in lanes, of which no env needs to exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral.core.tree import map_tree
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.episodes.infos import Infos
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.step_columns import StepColumns
from corral.errors import ColumnError
from handmade import plain


def two_lanes(num_rows: int = 3) -> StepColumns:
    """Return columns in which row t of lane n has the observation 10 n + t, the action t and the reward t + 1."""
    t, n = np.arange(num_rows + 1), np.arange(2)
    columns = {
        "obs": {"x": 10 * n + t[:, None]},
        "actions": np.broadcast_to(t[:-1, None], (num_rows, 2)).copy(),
        "rewards": np.broadcast_to(t[:-1, None] + 1.0, (num_rows, 2)).copy(),
    }
    return StepColumns(columns, num_rows=num_rows)


class TestColumns:
    def test_a_column_is_an_item_and_an_attribute(self) -> None:
        columns = two_lanes()
        assert columns.rewards is columns["rewards"] and columns.obs is columns["obs"]
        columns.rewards = np.zeros((3, 2))
        assert columns["rewards"].tolist() == [[0, 0]] * 3
        assert ("rewards" in columns, "reward" in columns) == (True, False)
        assert (len(columns), columns.capacity, columns.num_lanes) == (3, 3, 2)

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(KeyError, match=r"StepColumns has no column 'reward'.*rewards"):
            two_lanes()["reward"]
        with pytest.raises(AttributeError):
            two_lanes().reward = np.zeros((3, 2))  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("rewards", np.zeros((3, 2), np.float32), r"float64\[3, 2\].*float32\[3, 2\]"),
            ("rewards", np.zeros((2, 2)), r"float64\[3, 2\].*float64\[2, 2\]"),
            ("mark", np.zeros((3, 1)), r"float64\[3, 1\].*\[3, 2\]"),
        ],
    )
    def test_another_shape_or_dtype_is_refused(self, name: str, value: Any, message: str) -> None:
        with pytest.raises(ColumnError, match=message):
            two_lanes()[name] = value

    def test_an_added_column_is_there_in_every_lane(self) -> None:
        columns = two_lanes()
        columns["mark"] = np.ones((3, 2, 4), np.int32)
        columns.add_column("later", np.zeros((7, 5), np.float32))
        assert (columns["later"].shape, columns["later"].dtype) == ((3, 2, 5), np.float32)
        assert np.isnan(columns["later"]).all()

    def test_room_for_more_rows(self) -> None:
        columns = two_lanes()
        columns.resize(5)
        assert (columns.capacity, len(columns), len(columns.obs["x"])) == (5, 3, 6)
        assert columns.obs["x"][:4, 1].tolist() == [10, 11, 12, 13]
        columns.resize(2)
        assert (columns.capacity, columns.rewards.tolist()) == (2, [[1, 1], [2, 2]])


class TestAppending:
    def made(self) -> StepColumns:
        return StepColumns.one_lane({"obs": {"x": np.array([0.0])}, "rewards": np.zeros(0)}, [{"i": 0}])

    def test_steps_and_infos(self) -> None:
        columns = self.made()
        assert (len(columns), columns.num_lanes) == (0, 1)
        for t in range(1, 100):
            columns.append_step({"x": t}, {"rewards": t / 2, "actions": [t, -t]}, {"i": t} if t % 2 else None)
        assert (len(columns), columns.actions.dtype) == (99, np.int64)
        assert columns.obs["x"][:100, 0].tolist() == list(range(100))
        assert columns.rewards[:99, 0].tolist() == [t / 2 for t in range(1, 100)]
        assert [columns.next_info_at(row, 0) for row in (0, 1, 98)] == [{"i": 1}, {}, {"i": 99}]

    @pytest.mark.parametrize(
        ("obs", "step", "error"),
        [
            ({"x": [1.0, 2.0]}, {"rewards": 1.0, "actions": 0}, ValueError),
            ({"y": 1.0}, {"rewards": 1.0, "actions": 0}, KeyError),
            ({"x": 1.0}, {"rewards": "much", "actions": 0}, ValueError),
            ({"x": 1.0}, {"rewards": 1.0}, ValueError),
            ({"x": 1.0}, {"rewards": 1.0, "actions": 0.5}, ValueError),
        ],
        ids=str,
    )
    def test_a_step_that_does_not_fit_leaves_no_trace(self, obs: Any, step: Any, error: type[Exception]) -> None:
        columns = self.made()
        columns.append_step({"x": 1.0}, {"rewards": 1.0, "actions": 0})
        before = {name: map_tree(np.copy, column) for name, column in columns.columns.items()}
        with pytest.raises(error):
            columns.append_step(obs, step, {"i": 9})
        assert (len(columns), columns.info_rows.keys()) == (1, {0})
        assert plain(columns.obs["x"][:2]) == plain(before["obs"]["x"][:2])
        columns.append_step({"x": 2.0}, {"rewards": 2.0, "actions": 1})
        assert columns.rewards[:2, 0].tolist() == [1, 2]


class TestEpisodesStandOnIt:
    def test_a_view_shows_its_lane_and_grows_with_the_columns(self) -> None:
        columns = two_lanes()
        columns.num_rows = 0
        episode = SingleAgentEpisode.view("a", 1, columns)
        episode.start(0, 0.0)
        assert (len(episode), plain(episode.get_observations())) == (0, {"x": [10]})
        columns.num_rows = 2
        assert (len(episode), episode.get_return(), plain(episode.get_observations())) == (2, 3, {"x": [10, 11, 12]})
        episode.set_rewards(new_data=9.0, at_indices=-1)
        assert columns.rewards.tolist() == [[1, 1], [2, 9], [3, 3]]

    def test_a_view_starts_in_any_row(self) -> None:
        episode = SingleAgentEpisode.view("a", 0, two_lanes())
        episode.start(1, 0.0)
        episode.end(True, False, 3)
        assert (len(episode), episode.is_terminated, episode.get_rewards().tolist()) == (2, True, [2, 3])
        assert plain(episode[1:].get_observations()) == {"x": [2, 3]}

    def test_the_final_observation_that_a_reset_overwrote(self) -> None:
        columns = two_lanes()
        columns.add_final_obs(1, 1, {"x": 99})
        columns.info_rows[2] = Infos({0: {"k": 5}, 1: {"k": 6}}, final={1: {"k": 7}})
        episode = SingleAgentEpisode.view("a", 1, columns)
        episode.start(0, 0.0)
        episode.end(True, False, 2)
        assert plain(episode.get_observations()) == {"x": [10, 11, 99]}
        assert (columns.next_obs_at(1, 1)["x"], columns.next_obs_at(1, 0)["x"]) == (99, 2)
        assert (columns.next_info_at(1, 1), columns.next_info_at(1, 0)) == ({"k": 7}, {"k": 5})

    def test_the_next_chunk_is_a_view_of_other_columns(self) -> None:
        first = SingleAgentEpisode.view("a", 1, two_lanes())
        first.start(1, 0.0)
        chunk = first.continued_in(two_lanes(), return_before=5.0, last_time_s=1.0)
        assert (chunk.id_, chunk.env_index, chunk.t_started, chunk.t, chunk.get_return()) == ("a", 1, 2, 5, 11)
        assert chunk.notes is first.notes

    def test_a_rollout_is_such_storage(self) -> None:
        assert issubclass(Rollout, StepColumns)
        columns = dict(two_lanes().columns)
        columns |= {name: np.zeros((3, 2), np.bool_) for name in ("terminated", "truncated")}
        columns |= {"valid": np.ones((3, 2), np.bool_), "row_times_s": np.zeros(3)}
        columns["terminated"][1, 1] = True
        rollout = Rollout(columns, num_rows=3)
        assert rollout.num_envs == rollout.num_lanes == 2
        assert [(e.env_index, len(e), e.is_done) for e in rollout] == [(0, 3, False), (1, 2, True), (1, 1, False)]
