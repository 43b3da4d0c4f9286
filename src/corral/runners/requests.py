"""A request for samples, how far a runner samples for it, and the reply: what travels between a group and its runners.

A mode answers how many rows are still wanted; the runner steps them, and hands them back to be settled. Nothing else
decides what is valid: not the runner, and not the vector env.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.metrics.logger import Parts
from corral.data.episodes.rollout import Rollout
from corral.envs.episode_resets import EpisodeReset, quotas
from corral.errors import EnvError, SampleError


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """What a runner, or all runners of a group together, are asked to sample. Give one of the two numbers.

    Attributes:
        num_timesteps: Env steps to take: at least this many, and for one runner fewer than `num_timesteps + N`. With
            `batch_mode="complete_episodes"` the envs are reset before and after, and every episode that has begun by
            then is played to its end; the steps of these episodes are valid, and no others.
        num_episodes: Complete episodes to play, exactly; the envs are reset before and after. They are spread evenly
            over the runners and their sub-envs, each of which plays its quota to the end: short and long episodes are
            as frequent as in the env.
        explore: Whether to explore (True) or act deterministically; `None` asks the config.
        random_actions: Whether to draw actions evenly from the action space instead.
        force_reset: Whether to reset all sub-envs first and drop their unfinished episodes.
        timestep: Env steps that all runners have sampled so far, which schedules of the exploration use; `None` is what
            the runner or the group has counted itself.
        with_infos: Whether the caller reads infos or what callbacks noted on episodes (`custom_data`, temporary data).
            Otherwise they stay in the runner.
        takes_tensors: Whether the caller, in the same process, takes a rollout of tensors from an env of tensors, and
            not a copy with arrays.
        training_iteration: Finished iterations of the algorithm, which `env_reset_fn` may ask for; `None` is the last
            number that the runner was given.
        resets: Reset arguments of each of the `num_episodes` episodes; sub-env i of N plays number i, i + N, and so on.
            An episode that breaks, because its sub-env fails, is played again with the same arguments. Only one runner
            can be asked, whose config chooses resets.
        time_limit_s: Seconds after which the runner ends the sample itself, even if it waits for an env. What was
            sampled until then is returned, and the next sample begins with a reset. An env can be interrupted only
            where the runner is in the main thread of its process; elsewhere the sample ends after the step that takes
            too long. `None` is no limit.
        digest: Function `(env_runner, rollout)` that makes in the runner what is sent instead of the rollout: an object
            with `num_env_steps` and `weights_version`. `None` sends the rollout.
        num_wanted: The number that was given: env steps, or episodes.

    Raises:
        SampleError: Neither or both of the numbers are given, one is negative, or there is not one reset for each
            episode.
    """

    num_timesteps: int | None = None
    num_episodes: int | None = None
    explore: bool | None = None
    random_actions: bool = False
    force_reset: bool = False
    timestep: int | None = None
    with_infos: bool = False
    takes_tensors: bool = False
    training_iteration: int | None = None
    resets: tuple[EpisodeReset, ...] | None = None
    time_limit_s: float | None = None
    digest: Callable[[Any, Rollout], Any] | None = None
    num_wanted: int = field(init=False)

    def __post_init__(self) -> None:
        """Refuse a request that makes no sense."""
        wanted = self.num_episodes if self.num_timesteps is None else self.num_timesteps
        if wanted is None or None not in (self.num_timesteps, self.num_episodes):
            raise SampleError("a request for samples takes exactly one of num_timesteps and num_episodes.")
        object.__setattr__(self, "num_wanted", wanted)
        if wanted < 0:
            raise SampleError(
                f"a request for samples: num_timesteps and num_episodes cannot be negative, got {wanted}."
            )
        if self.resets is not None and len(self.resets) != self.num_episodes:
            raise SampleError(
                f"a request for samples: {len(self.resets)} resets for num_episodes={self.num_episodes}; give one for "
                "each episode."
            )

    @property
    def unit(self) -> str:
        """What `num_wanted` counts: `"env steps"` or `"episodes"`."""
        return "episodes" if self.num_timesteps is None else "env steps"

    def num_in(self, rollout: Rollout) -> int:
        """Return how many of the wanted env steps, or episodes, a rollout holds."""
        if self.num_timesteps is not None:
            return rollout.num_env_steps
        return int(np.count_nonzero(rollout.done & rollout.valid))

    def after(self, seconds: float) -> SampleRequest:
        """Return the request with the time that is left of its limit after so many seconds."""
        return self if self.time_limit_s is None else replace(self, time_limit_s=max(0.0, self.time_limit_s - seconds))

    def part(self, num_wanted: int, timestep: int) -> SampleRequest:
        """Return a request for a part of it, with the timestep at which it is made."""
        if self.num_timesteps is not None:
            return replace(self, num_timesteps=num_wanted, timestep=timestep)
        return replace(self, num_episodes=num_wanted, timestep=timestep)


@dataclass(frozen=True)
class WorkerCounts:
    """What is counted over the lifetime of a runner, or in sum over several runners.

    Attributes:
        num_restarts: Restarts, in place or in a new worker.
        num_callback_errors: Exceptions in callbacks that were logged.
        num_sub_env_restarts: Sub-envs that were restarted.
        num_env_steps_lost: Env steps that were taken and are in no rollout: steps of rollouts that an exception ended,
            and if whole episodes were asked for, steps of other episodes. A worker that died counts with the env steps
            of its request, and with none if the request was for episodes.
    """

    num_restarts: int = 0
    num_callback_errors: int = 0
    num_sub_env_restarts: int = 0
    num_env_steps_lost: int = 0

    @classmethod
    def of(cls, runner: Any) -> WorkerCounts:
        """Return what an `EnvRunner` has counted in its lifetime."""
        return cls(0, runner.num_callback_errors, runner.num_sub_env_restarts, runner.num_env_steps_lost)

    def __add__(self, other: WorkerCounts) -> WorkerCounts:
        """Return the sums of both, field by field."""
        return WorkerCounts(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: WorkerCounts) -> WorkerCounts:
        """Return the differences, field by field."""
        return WorkerCounts(*map(operator.sub, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class SampleReply:
    """A fragment, and what there is to say about it; one answer, so that steps and their metrics arrive together.

    Attributes:
        rollout: The fragment, or what the `digest` of the request made of it.
        metrics: What the runner logged since its last reply.
        seconds: Seconds of the runner's timers since its last reply, by part.
        counts: What this runner has counted in its lifetime.
        state: State from which a replacement of the runner continues; see `EnvRunner.get_state`.
        sample_s: Seconds that sampling took.
        idle_s: Seconds that the runner had waited for the request.
    """

    rollout: Any
    metrics: Parts
    seconds: dict[str, float]
    counts: WorkerCounts
    state: dict[str, Any]
    sample_s: float
    idle_s: float


# How far a sample goes, and which of its rows are valid: so many steps, so many episodes, or all episodes begun.

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
        begun: Sub-envs in which clients of a policy server began episodes in the last row, in the order of time.
        unfinished: Where such an episode continues after it, bool `[N]`; `None` where the runner steps the sub-envs.
    """

    playing: NDArray[np.bool_] | None = None
    explore = True
    random_actions = keeps_infos = takes_tensors = False
    timestep = num_samplers = 0
    begun: Sequence[int] = ()
    unfinished: NDArray[np.bool_] | None = None

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
                self.playing = rollout.unfinished_in(last) if self.unfinished is None else self.unfinished
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
