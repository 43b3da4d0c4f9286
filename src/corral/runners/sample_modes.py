"""How long a runner plays: so many steps, so many episodes, or all episodes that begin within so many steps."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corral.episodes.rollout import Rollout
from corral.errors import EnvError

MAX_BROKEN = 100
"""Episodes that may break, because their sub-env failed, for every one that is complete, and before the first."""


class StepRows(Protocol):
    """Steps the envs `num_rows` times, and fills `valid` as far as it got; see `EnvRunner._step_rows`."""

    def __call__(
        self, num_rows: int, *, episodes_left: int | None = None, playing: NDArray[np.bool_] | None = None
    ) -> None:
        """Step; events fire for the first `episodes_left` ends, and for the sub-envs that are `playing`, bool `[N]`."""


def num_valid(rollout: Rollout) -> int:
    """Return the steps of a rollout so far."""
    return int(np.count_nonzero(rollout.valid[: rollout.num_rows]))


def _num_complete(rollout: Rollout) -> int:
    return int(np.count_nonzero((rollout.done & rollout.valid)[: rollout.num_rows]))


def play_steps(rollout: Rollout, num_steps: int, step_rows: StepRows) -> None:
    """Take at least so many steps, and fewer than `num_steps + N`."""
    while (left := num_steps - num_valid(rollout)) > 0:
        step_rows(-(-left // rollout.num_envs))  # which cannot overshoot by N


def play_episodes(rollout: Rollout, num_episodes: int, step_rows: StepRows, name: str) -> None:
    """Play exactly so many episodes to their ends; no other steps are valid.

    Args:
        rollout: The rollout, in which all sub-envs were just reset.
        num_episodes: How many.
        step_rows: Steps.
        name: The env's, for errors.

    Raises:
        EnvError: Sub-envs fail before almost any episode is complete.
    """
    while (left := num_episodes - _num_complete(rollout)) > 0:
        step_rows(1, episodes_left=left)  # any row may be the last
        _drop_broken(rollout, name)
    rollout.resize(rollout.num_rows)
    ends = rollout.done & rollout.valid
    surplus = int(np.count_nonzero(ends)) - num_episodes
    if surplus > 0:  # several ended in the last row
        ends[-1, np.flatnonzero(ends[-1])[-surplus:]] = False
    rollout.valid &= np.logical_or.accumulate(ends[::-1], axis=0)[::-1]


def play_begun_episodes(rollout: Rollout, num_steps: int, step_rows: StepRows, name: str) -> None:
    """Take at least so many steps, and play on to the end of all episodes that are under way then; no others are valid.

    A sub-env whose last such episode is over is stepped on with the others, but counts no more: of the episodes that
    begin there, only short ones would come to their end, and the returns would be those of short episodes.

    Args:
        rollout: The rollout, in which all sub-envs were just reset.
        num_steps: How many.
        step_rows: Steps.
        name: The env's, for errors.

    Raises:
        EnvError: Sub-envs fail before almost any episode is complete.
    """
    while (left := num_steps - num_valid(rollout)) > 0:
        step_rows(-(-left // rollout.num_envs))
        _drop_broken(rollout, name)
    if not num_steps:
        return
    playing = rollout.valid[rollout.num_rows - 1] & ~rollout.done[rollout.num_rows - 1]
    while playing.any():
        step_rows(1, playing=playing)
        last = rollout.num_rows - 1
        rollout.valid[last] &= playing
        _drop_broken(rollout, name)
        # An episode that broke is made up for by its successor.
        ended = rollout.valid[last] & rollout.done[last]
        playing = playing & ~ended
        if not playing.any() and num_valid(rollout) < num_steps:  # too many broke
            playing = ended


def _drop_broken(rollout: Rollout, name: str) -> None:
    """Mark as invalid the steps of episodes that broke because their sub-env failed."""
    num_complete = _num_complete(rollout)
    if len(rollout.broken) > MAX_BROKEN * (1 + num_complete):
        raise EnvError(
            f"env {name!r}: sub-envs failed in {len(rollout.broken)} episodes, and {num_complete} were complete: whole "
            "episodes, as batch_mode='complete_episodes' and num_episodes ask for, would take for ever."
        )
    for row, i in rollout.broken:
        before = np.flatnonzero(rollout.done[:row, i] | ~rollout.valid[:row, i])
        rollout.valid[before[-1] + 1 if len(before) else 0 : row, i] = False
