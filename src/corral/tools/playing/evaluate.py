"""How good a policy is: returns and lengths of whole episodes, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from corral.core.interrupts import interruptible
from corral.envs.async_vector import AsyncLimits
from corral.envs.env_state import warn_of_statistics
from corral.envs.episode_resets import EpisodeReset, EpisodeResets
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.unread_parts import unread_wrappers
from corral.envs.vector import EnvContext, env_name, make_vector_env
from corral.errors import ConfigError, EnvError
from corral.runners.evaluation.statistics import summarize_episodes
from corral.runs.policies.agent_policies import AgentPolicies
from corral.runs.policies.policy import Policy
from corral.tools.playing.player import MAX_EPISODE_STEPS, Faults, Player, acting_of, with_queues

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm

DEFAULT_NUM_EPISODES = 100
DEFAULT_NUM_ENVS = 8
MAX_BROKEN_PER_EPISODE = 100
"""Limit of restarts of sub-envs per episode, from which an env counts as one that breaks all its episodes."""


@dataclass(frozen=True)
class PolicyEvaluation:
    """Returns and lengths of the episodes of an evaluation.

    Attributes:
        episode_returns: Return of each episode, without discount.
        episode_lens: Length of each episode, in env steps.
    """

    episode_returns: tuple[float, ...]
    episode_lens: tuple[int, ...]

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episode_returns)

    @cached_property
    def statistics(self) -> dict[str, float]:
        """Statistics of the returns and lengths by name, as evaluation during training reports them.

        `corral.runners.evaluation.statistics.summarize_episodes` describes them.
        """
        return summarize_episodes(self.episode_returns, self.episode_lens)

    @property
    def episode_return_mean(self) -> float:
        """Mean return."""
        return self.statistics["episode_return_mean"]

    @property
    def episode_return_median(self) -> float:
        """Median of the returns."""
        return self.statistics["episode_return_median"]

    @property
    def episode_return_iqm(self) -> float:
        """Interquartile mean: the mean return without the lowest and the highest quarter of the episodes."""
        return self.statistics["episode_return_iqm"]

    @property
    def episode_return_std(self) -> float:
        """Standard deviation of the returns, with n - 1 in the denominator; NaN for a single episode."""
        return self.statistics["episode_return_std"]

    @property
    def episode_return_interval(self) -> tuple[float, float]:
        """95% confidence interval of the mean return, by the bootstrap; NaN for fewer than five episodes."""
        return self.statistics["episode_return_interval_low"], self.statistics["episode_return_interval_high"]

    @property
    def episode_len_mean(self) -> float:
        """Mean length, in env steps."""
        return self.statistics["episode_len_mean"]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers in types that JSON holds; what so few episodes do not have is `None`."""
        return {
            "num_episodes": self.num_episodes,
            "num_env_steps": sum(self.episode_lens),
            **{name: None if math.isnan(value) else value for name, value in self.statistics.items()},
            "episode_returns": list(self.episode_returns),
            "episode_lens": list(self.episode_lens),
        }

    def __str__(self) -> str:
        """Return the numbers as a few lines of text."""
        found = SimpleNamespace(**{name.removeprefix("episode_"): value for name, value in self.statistics.items()})
        few, one = math.isnan(found.return_interval_low), self.num_episodes < 2
        rows = {
            "episodes": f"{self.num_episodes}",
            "mean return": f"{found.return_mean:.2f}",
            "95% interval": "needs five episodes or more"
            if few
            else f"{found.return_interval_low:.2f} to {found.return_interval_high:.2f} (bootstrap)",
            "standard deviation": "needs two episodes or more" if one else f"{found.return_std:.2f}",
            "median": f"{found.return_median:.2f}",
            "interquartile mean": f"{found.return_iqm:.2f}",
            "lowest, highest": f"{found.return_min:.2f}, {found.return_max:.2f}",
            "mean length": f"{found.len_mean:.1f} env steps",
            "shortest, longest": f"{found.len_min:.0f}, {found.len_max:.0f} env steps",
        }
        return "\n".join(f"{name:<20}{value}" for name, value in rows.items())


def evaluate_policy(
    policy: Policy | AgentPolicies | Algorithm | Callable[[Any], Any],
    env: Any,
    *,
    episodes: int | None = None,
    env_config: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    num_envs: int | None = None,
    seed: int | None = 0,
    seeds: Sequence[int] | None = None,
    explore: bool = False,
    max_episode_steps: int = MAX_EPISODE_STEPS,
    env_step_timeout_s: float | None = None,
    restart_failed_sub_environments: bool = False,
) -> PolicyEvaluation:
    """Return returns and lengths of whole episodes.

    Sub-envs are stepped together. Each sub-env plays a fixed number of the episodes, so that short episodes are not
    counted more often than long ones.

    Args:
        policy: A policy, the policies of several agents, an algorithm, or a function from one observation to one env
            action.
        env: A Gymnasium id, an import path, a class, or a factory, as in `.environment(env)`; or an env or vector env,
            which stays open.
        episodes: Number of episodes; `None` is 100, or as many as there are `seeds`.
        env_config: Settings of the env; see `.environment(env_config=...)`.
        wrappers: Wrappers of each sub-env; the first one is the innermost.
        num_envs: Number of sub-envs; `None` is 8 at most, and 1 if `policy` is a function.
        seed: Seed of the first reset; sub-env i gets `seed + i`. `None` draws another one each time.
        seeds: Seeds of the episodes, one each, in the order of `episode_returns`. Two policies that are evaluated with
            the same seeds begin the same episodes, whatever `num_envs` is.
        explore: Whether a policy or an algorithm explores.
        max_episode_steps: Length from which an episode counts as one that never ends.
        env_step_timeout_s: Seconds that one step or reset of all sub-envs may take; only in the main thread. What hangs
            in C code is not interrupted.
        restart_failed_sub_environments: Whether a sub-env that raises or hangs is made again, and another episode is
            played in place of its unfinished one. With `seeds`, and in a ready vector env, a failure is an error.

    Raises:
        ConfigError: An argument is out of bounds, or the policy is for other spaces than the env's.
        EnvError: The env raised an exception, gave a return that is not finite, or has an episode that does not end.
        ObservationError: An observation does not fit the policy.
    """
    resets = None if seeds is None else [EpisodeReset(seed=one) for one in seeds]
    if episodes is None:
        episodes = DEFAULT_NUM_EPISODES if resets is None else len(resets)
    for name, value in (("episodes", episodes), ("max_episode_steps", max_episode_steps), ("num_envs", num_envs or 1)):
        if value < 1:
            raise ConfigError(f"evaluate_policy: {name}={value} must be at least 1.")
    if resets is not None and len(resets) != episodes:
        raise ConfigError(
            f"evaluate_policy: there are {len(resets)} seeds for episodes={episodes}: leave episodes out."
        )
    by_batch = isinstance(policy, (Policy, AgentPolicies)) or hasattr(policy, "compute_actions")
    default_num_envs = min(episodes, DEFAULT_NUM_ENVS) if by_batch else 1
    blanking = unread_wrappers(_transforms_of(policy))
    if isinstance(env, gym.Env):
        for wrapper in blanking:
            env = wrapper(env)
    elif not isinstance(env, VectorEnv):
        wrappers = [*wrappers, *blanking]
    restarts = episodes * MAX_BROKEN_PER_EPISODE if restart_failed_sub_environments and resets is None else 0
    faults = Faults(env_name(env), env_step_timeout_s, restarts)
    with (
        faults.installed(),
        _opened(env, env_config, wrappers, num_envs, default_num_envs, seed or 0, resets, faults) as vector_env,
    ):
        acting = acting_of(policy, vector_env, faults.name, explore)
        return _evaluate(Player(acting, vector_env, faults, max_episode_steps), episodes, seed)


def _transforms_of(policy: Any) -> Sequence[Any]:
    """Return the transforms of a policy or of an algorithm; several policies and functions have none here."""
    if isinstance(policy, Policy):
        return () if policy.pipeline is None else policy.pipeline.transforms
    return getattr(getattr(policy, "config", None), "transforms", ())


@contextmanager
def _opened(
    env: Any,
    env_config: Mapping[str, Any] | None,
    wrappers: Sequence[Callable[[Any], Any]],
    num_envs: int | None,
    default_num_envs: int,
    seed: int,
    resets: list[EpisodeReset] | None,
    faults: Faults,
) -> Iterator[VectorEnv[Any, Any, Any]]:
    """Open a vector env for a block. An env that is an instance is not closed: it is the caller's."""
    if isinstance(env, (gym.Env, VectorEnv)):
        if env_config or wrappers or num_envs:
            raise ConfigError(
                "evaluate_policy: env_config, wrappers and num_envs do not apply to an env that is made already: give "
                "its class or id."
            )
        if isinstance(env, VectorEnv):
            if resets is not None:
                raise ConfigError(
                    f"evaluate_policy: seeds do not apply to {env_name(env)}, which resets its sub-envs itself."
                )
            yield env
            return
        outer = env if resets is None else EpisodeResets(env)
        yield with_queues(SyncVectorEnv([lambda: outer]), resets)
        return
    context = EnvContext(dict(env_config or {}))
    vector_env = make_vector_env(
        env,
        context,
        num_envs=num_envs,
        default_num_envs=default_num_envs,
        wrappers=wrappers,
        outermost=None if resets is None else EpisodeResets,
        seed=seed,
        limits=AsyncLimits(faults.timeout_s),
        restarts=faults.restarts,
    )
    try:
        for sub_env in vector_env.envs[:1] if isinstance(vector_env, SyncVectorEnv) else ():
            warn_of_statistics(sub_env, env_name(env))
        yield with_queues(vector_env, resets)
    finally:
        vector_env.close()


@interruptible
def _evaluate(player: Player, episodes: int, seed: int | None) -> PolicyEvaluation:
    found: list[list[tuple[float, int]]] = [[] for _ in range(player.env.num_envs)]
    for ended in player.play(episodes, seed):
        for i, episode_return, length in ended:
            found[i].append((episode_return, length))
    # Of episodes k of all sub-envs, then of episodes k + 1: as they are numbered, whatever their lengths are.
    played = [each for turn in zip_longest(*found) for each in turn if each is not None]
    if not all(math.isfinite(episode_return) for episode_return, _ in played):
        raise EnvError(f"env {player.faults.name!r}: the rewards of an episode are not all finite.")
    returns, lens = zip(*played, strict=True)
    return PolicyEvaluation(returns, lens)
