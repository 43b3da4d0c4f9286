"""Sample modes by themselves: how many rows they want of a table of steps, and which of them they settle as valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corral.data.episodes.rollout import Rollout
from corral.errors import EnvError
from corral.runners.requests import SampleMode, SampleRequest, make_mode


def play(
    mode: SampleMode, table: list[str], *, same_step: bool = True, broken: list[tuple[int, int]] | None = None
) -> tuple[Rollout, list[int]]:
    """Give a mode the rows that it wants of a table, and return the rollout and how many rows it wanted each time.

    Args:
        mode: The mode.
        table: A row each: `"."` is a step, `"E"` a step that ends its episode.
        same_step: Whether the next episode begins in the next row, or after a row that is only a reset.
        broken: Rows and columns in which the sub-env failed.
    """
    ends = np.array([[letter == "E" for letter in row] for row in table])
    columns: dict[str, Any] = {
        "rewards": np.zeros(ends.shape),
        "terminated": ends,
        "truncated": np.zeros_like(ends),
        "valid": np.zeros_like(ends),
    }
    rollout, wanted = Rollout(columns), []
    rollout.same_step = same_step
    while rows := mode.num_rows_wanted(rollout):
        wanted.append(rows)
        rollout.num_rows += rows
        rollout.broken += [where for where in broken or [] if rollout.num_rows - rows <= where[0] < rollout.num_rows]
        mode.settle(rollout)
    return rollout, wanted


def valid(rollout: Rollout) -> list[str]:
    return ["".join("x" if step else "-" for step in row) for row in rollout.valid[: rollout.num_rows]]


def mode(whole_episodes: bool = False, **request: int) -> SampleMode:
    return make_mode(SampleRequest(**request), whole_episodes=whole_episodes, name="Table-v0")


class TestSteps:
    def test_rows_that_cannot_overshoot_by_n(self) -> None:
        rollout, wanted = play(mode(num_timesteps=7), [".."] * 9)
        assert (valid(rollout), wanted) == (["xx"] * 4, [4])

    def test_rows_that_only_reset_are_not_valid_and_made_up_for(self) -> None:
        rollout, wanted = play(mode(num_timesteps=7), ["..", "E.", "..", "..", "E.", "..", ".."], same_step=False)
        assert valid(rollout) == ["xx", "xx", "-x", "xx"]
        assert wanted == [4]
        rollout, wanted = play(mode(num_timesteps=8), ["..", "E.", "..", "..", "..", ".."], same_step=False)
        assert (valid(rollout), wanted) == (["xx", "xx", "-x", "xx", "xx"], [4, 1])

    def test_an_end_in_the_last_row_of_a_block_makes_the_next_row_a_reset(self) -> None:
        rollout, wanted = play(mode(num_timesteps=5), [".", ".", "E", ".", ".", "E", ".", "."], same_step=False)
        assert (valid(rollout), wanted) == (["x", "x", "x", "-", "x", "x"], [5, 1])

    def test_a_step_that_failed_is_not_valid(self) -> None:
        rollout, wanted = play(mode(num_timesteps=4), [".."] * 5, broken=[(1, 0)])
        assert (valid(rollout), wanted) == (["xx", "-x", "xx"], [2, 1])

    def test_a_request_for_zero_steps_wants_no_rows(self) -> None:
        for which in (mode(num_timesteps=0), mode(num_episodes=0), mode(whole_episodes=True, num_timesteps=0)):
            assert play(which, [".."])[1] == []


class TestEpisodes:
    def test_exactly_so_many_and_no_other_steps(self) -> None:
        rollout, wanted = play(mode(num_episodes=2), ["..", "E.", ".E", ".."])
        assert (valid(rollout), wanted) == (["xx", "xx", "-x"], [1, 1, 1])

    def test_each_sub_env_plays_its_quota_whoever_ends_first(self) -> None:
        rollout, wanted = play(mode(num_episodes=3), ["..", "E.", "E.", "E.", "E.", "EE", ".."])
        assert (valid(rollout), wanted) == (["xx", "xx", "xx", "-x", "-x", "-x"], [1] * 6)

    def test_sub_envs_without_a_quota_count_nothing(self) -> None:
        rollout, _ = play(mode(num_episodes=2), ["...", "EEE", "..."])
        assert valid(rollout) == ["xx-", "xx-"]

    def test_events_are_told_who_plays(self) -> None:
        which, playing = mode(num_episodes=3), []
        original = which.num_rows_wanted

        def noted(rollout: Rollout) -> int:
            rows = original(rollout)
            assert which.playing is not None
            playing.append(which.playing.tolist())
            return rows

        which.num_rows_wanted = noted  # type: ignore[method-assign]
        play(which, ["E.", ".E", "E.", ".."])
        assert playing == [[True, True], [True, True], [True, False], [False, False]]

    def test_a_broken_episode_does_not_count(self) -> None:
        rollout, _ = play(mode(num_episodes=1), [".", ".", ".", ".", "E"], broken=[(2, 0)])
        assert valid(rollout) == ["-", "-", "-", "x", "x"]


class TestBegunEpisodes:
    def test_running_episodes_are_played_to_their_end(self) -> None:
        which = mode(whole_episodes=True, num_timesteps=4)
        rollout, wanted = play(which, ["..", "E.", "..", ".E", "E.", "..", ".."])
        # After two rows there are enough steps; sub-env 0 has just ended, and sub-env 1 plays to its end.
        assert (valid(rollout), wanted) == (["xx", "xx", "-x", "-x"], [2, 1, 1])
        assert which.playing is not None and not which.playing.any()

    def test_a_broken_episode_is_made_up_for_by_its_successor(self) -> None:
        which = mode(whole_episodes=True, num_timesteps=2)
        rollout, _ = play(which, [".", ".", ".", ".", "E", "."], broken=[(2, 0)])
        assert valid(rollout) == ["-", "-", "-", "x", "x"]

    def test_more_episodes_are_played_where_the_successor_of_a_broken_one_is_too_short(self) -> None:
        which = mode(whole_episodes=True, num_timesteps=3)
        rollout, _ = play(which, [".", ".", ".", ".", "E", ".", ".", "E", "."], broken=[(3, 0)])
        assert valid(rollout) == ["-", "-", "-", "-", "x", "x", "x", "x"]

    def test_envs_that_break_all_the_time_are_an_error(self) -> None:
        table, broken = ["."] * 400, [(row, 0) for row in range(1, 400, 2)]
        for which in (mode(num_episodes=1), mode(whole_episodes=True, num_timesteps=10)):
            with pytest.raises(EnvError, match=r"env 'Table-v0': sub-envs failed in 10\d episodes"):
                play(which, table, broken=broken)
