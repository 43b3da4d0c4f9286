"""A request for samples, and the reply to it: what travels between a group and its runners."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from corral.core.metrics.logger import Parts
from corral.data.episodes.rollout import Rollout
from corral.envs.episode_resets import EpisodeReset
from corral.errors import SampleError


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

    def __post_init__(self) -> None:
        """Refuse a request that makes no sense."""
        if (self.num_timesteps is None) == (self.num_episodes is None):
            raise SampleError("a request for samples takes exactly one of num_timesteps and num_episodes.")
        if (self.num_timesteps or self.num_episodes or 0) < 0:
            raise SampleError(
                f"a request for samples: num_timesteps and num_episodes cannot be negative, got {self.num_wanted}."
            )
        if self.resets is not None and len(self.resets) != self.num_episodes:
            raise SampleError(
                f"a request for samples: {len(self.resets)} resets for num_episodes={self.num_episodes}; give one for "
                "each episode."
            )

    @cached_property
    def num_wanted(self) -> int:
        """Env steps, or episodes."""
        wanted = self.num_episodes if self.num_timesteps is None else self.num_timesteps
        assert wanted is not None  # the constructor made sure
        return wanted

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
        return WorkerCounts(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: WorkerCounts) -> WorkerCounts:
        """Return the differences, field by field."""
        return WorkerCounts(*map(operator.sub, astuple(self), astuple(other)))


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
