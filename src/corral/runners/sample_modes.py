"""How far a sample goes, and which of its rows are valid: so many steps, so many episodes, or all episodes begun.

A mode answers how many rows are still wanted; the runner steps them, and hands them back to be settled. Nothing else
decides what is valid: not the runner, and not the vector env.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corral.data.episodes.rollout import Rollout
from corral.envs.episode_resets import quotas
from corral.errors import EnvError
from corral.runners.requests import SampleRequest

MAX_BROKEN = 100
"""Episodes that may break, because their sub-env failed, for each one that is complete, and before the first."""


def make_mode(request: SampleRequest, *, whole_episodes: bool, name: str) -> SampleMode:
    """Return the mode of a request.

    Args:
        request: What is asked for.
        whole_episodes: Whether a number of steps asks for whole episodes.
        name: Name of the env, for errors.
    """
    if request.num_episodes is not None:
        return Episodes(request.num_episodes, name)
    return BegunEpisodes(request.num_wanted, name) if whole_episodes else Steps(request.num_wanted, name)


class SampleMode:
    """How far a sample goes, which of its rows are valid, and how its steps are taken.

    Attributes:
        playing: Bool `[N]`, the sub-envs whose episodes are still wanted; `None` is all of them.
        num_settled_rows: Rows that have been settled.
        num_steps: Valid steps in these rows.
        explore: Whether to explore.
        random_actions: Whether to draw actions evenly from the action space instead.
        timestep: Env steps of all runners when the sample began, or ended if it is complete.
        num_samplers: Runners that sample at the same time: a step of this one stands for so many.
        keeps_infos: Whether the rollout keeps the infos of the envs.
        takes_tensors: Whether who asked for the rollout takes one of tensors.
    """

    playing: NDArray[np.bool_] | None = None
    explore = True
    random_actions = keeps_infos = takes_tensors = False
    timestep = num_samplers = 0

    def __init__(self, num_wanted: int, name: str) -> None:
        """Take the number of steps or episodes, and the name of the env for errors."""
        self._num_wanted = num_wanted
        self._name = name
        self.num_settled_rows = self.num_steps = 0

    def num_rows_wanted(self, rollout: Rollout) -> int:
        """Return how many rows to step next, after all rows so far were settled; 0 ends the sample.

        It is as many rows as cannot overshoot the wanted number of steps by N.
        """
        num_envs: int = rollout.rewards.shape[1]
        return max(0, -((self.num_steps - self._num_wanted) // num_envs))

    def settle(self, rollout: Rollout) -> None:
        """Fill `valid` of the rows that were stepped since the last call.

        Raises:
            EnvError: Sub-envs fail before almost any episode is complete, though whole episodes are asked for.
        """
        start, self.num_settled_rows = self.num_settled_rows, rollout.num_rows
        rollout.valid[start : rollout.num_rows] = steps = rollout.steps_from(start)
        self.num_steps += int(np.count_nonzero(steps))

    def _drop_broken(self, rollout: Rollout) -> None:
        """Mark as invalid the steps of episodes that broke, and count the valid steps again."""
        drop_broken(rollout, self._name)
        self.num_steps = int(np.count_nonzero(rollout.valid[: rollout.num_rows]))


class Steps(SampleMode):
    """At least so many steps, and fewer than that many plus N."""


class Episodes(SampleMode):
    """Exactly so many episodes; the envs were reset just before. No steps of other episodes are valid.

    Each sub-env plays its quota to the end, and then counts no more; see `quotas`.
    """

    def num_rows_wanted(self, rollout: Rollout) -> int:
        """Return 1, because any row may be the last, until every sub-env has played its quota."""
        if self.playing is None:
            self._num_left = quotas(self._num_wanted, rollout.num_envs)
            self.playing = self._num_left > 0
        return int(self.playing.any())

    def settle(self, rollout: Rollout) -> None:
        """Fill `valid`; a broken episode does not count, and its successor takes its place."""
        super().settle(rollout)
        last = rollout.num_rows - 1
        rollout.valid[last] &= self.playing
        self._drop_broken(rollout)
        self._num_left -= rollout.valid[last] & rollout.done[last]
        self.playing = self._num_left > 0


class BegunEpisodes(SampleMode):
    """At least `num_wanted` steps, and then every episode that has begun until its end; the envs are reset before.

    A sub-env whose last such episode is over is still stepped with the others, but its steps do not count. Of the
    episodes that begin there, only short ones would end in time, so the mean return would be too low or too high.
    """

    def num_rows_wanted(self, rollout: Rollout) -> int:
        """Return as many rows as cannot overshoot by N, then one at a time until the last episode ends."""
        return super().num_rows_wanted(rollout) if self.playing is None else int(self.playing.any())

    def settle(self, rollout: Rollout) -> None:
        """Fill `valid`; once enough steps are taken, only episodes that were under way then stay valid."""
        super().settle(rollout)
        last = rollout.num_rows - 1
        if self.playing is None:
            self._drop_broken(rollout)
            if self.num_steps >= self._num_wanted:
                self.playing = rollout.unfinished_in(last)
            return
        rollout.valid[last] &= self.playing
        self._drop_broken(rollout)
        # An episode that broke is made up for by its successor.
        ended = rollout.valid[last] & rollout.done[last]
        self.playing = self.playing & ~ended
        if not self.playing.any() and self.num_steps < self._num_wanted:  # too many broke
            self.playing = ended


def drop_broken(rollout: Rollout, name: str) -> None:
    """Mark as invalid the steps of episodes that broke because their sub-env failed.

    Raises:
        EnvError: Many times as many broke as are complete.
    """
    if not rollout.broken:
        return
    complete = int(np.count_nonzero((rollout.done & rollout.valid)[: rollout.num_rows]))
    if len(rollout.broken) > MAX_BROKEN * (1 + complete):
        raise EnvError(
            f"env {name!r}: sub-envs failed in {len(rollout.broken)} episodes, and {complete} were complete: whole "
            "episodes, as batch_mode='complete_episodes' and num_episodes ask for, would take forever."
        )
    for row, i in rollout.broken:
        rollout.drop_episode(row, i)
