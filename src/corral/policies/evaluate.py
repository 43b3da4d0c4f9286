"""How good a policy is: returns and lengths of whole episodes, with a confidence interval of the mean return."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from corral.core.spaces import module_observation_space, space_kinds
from corral.core.tree import Tree, map_tree
from corral.envs.env_state import warn_of_statistics
from corral.envs.sub_envs import env_error, original
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.vector import EnvContext, env_name, make_vector_env
from corral.errors import ConfigError, CorralError, EnvError
from corral.policies.policy import Policy

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.modules.spec import ModuleSpec

CONFIDENCE = 0.95
DEFAULT_NUM_ENVS = 8
MAX_EPISODE_STEPS = 100_000


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

    @property
    def episode_return_mean(self) -> float:
        """Mean return."""
        return statistics.fmean(self.episode_returns)

    @property
    def episode_return_std(self) -> float:
        """Standard deviation of the returns, with n - 1 in the denominator; NaN for a single episode."""
        return statistics.stdev(self.episode_returns) if self.num_episodes > 1 else math.nan

    @property
    def episode_return_interval(self) -> tuple[float, float]:
        """95% confidence interval of the mean return, by Student's t distribution; NaN for a single episode.

        The interval is mean +- t * deviation / sqrt(n). It is exact for normally distributed returns, and nearly so for
        other returns of a few dozen episodes.
        """
        if self.num_episodes < 2:
            return math.nan, math.nan
        quantile = student_t_quantile((1 + CONFIDENCE) / 2, self.num_episodes - 1)
        half = quantile * self.episode_return_std / math.sqrt(self.num_episodes)
        return self.episode_return_mean - half, self.episode_return_mean + half

    @property
    def episode_len_mean(self) -> float:
        """Mean length, in env steps."""
        return statistics.fmean(self.episode_lens)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers in types that JSON holds; what a single episode does not have is `None`."""
        low, high = self.episode_return_interval
        several = self.num_episodes > 1
        return {
            "num_episodes": self.num_episodes,
            "num_env_steps": sum(self.episode_lens),
            "episode_return_mean": self.episode_return_mean,
            "episode_return_std": self.episode_return_std if several else None,
            "episode_return_interval": [low, high] if several else None,
            "episode_return_min": min(self.episode_returns),
            "episode_return_max": max(self.episode_returns),
            "episode_len_mean": self.episode_len_mean,
            "episode_len_min": min(self.episode_lens),
            "episode_len_max": max(self.episode_lens),
            "episode_returns": list(self.episode_returns),
            "episode_lens": list(self.episode_lens),
        }

    def __str__(self) -> str:
        """Return the numbers as a few lines of text."""
        low, high = self.episode_return_interval
        several, missing = self.num_episodes > 1, "needs two episodes or more"
        rows = {
            "episodes": f"{self.num_episodes}",
            "mean return": f"{self.episode_return_mean:.2f}",
            "95% interval": f"{low:.2f} to {high:.2f} (Student's t)" if several else missing,
            "standard deviation": f"{self.episode_return_std:.2f}" if several else missing,
            "lowest, highest": f"{min(self.episode_returns):.2f}, {max(self.episode_returns):.2f}",
            "mean length": f"{self.episode_len_mean:.1f} env steps",
            "shortest, longest": f"{min(self.episode_lens)}, {max(self.episode_lens)} env steps",
        }
        return "\n".join(f"{name:<20}{value}" for name, value in rows.items())


Acting = Callable[[Tree], Any]
"""From the observations of N sub-envs, a tree of `[N, ...]`, to their actions."""


def evaluate_policy(
    policy: Policy | Algorithm | Callable[[Any], Any],
    env: Any,
    *,
    episodes: int = 100,
    env_config: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    num_envs: int | None = None,
    seed: int | None = 0,
    explore: bool = False,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> PolicyEvaluation:
    """Return returns and lengths of whole episodes.

    Sub-envs are stepped together. Each sub-env plays a fixed share of the episodes, so that short episodes are not
    counted more often than long ones.

    Args:
        policy: A policy, an algorithm, or a function from one observation to one env action.
        env: A Gymnasium id, an import path, a class, or a factory, as in `.environment(env)`; or an env or vector env,
            which stays open.
        episodes: Number of episodes.
        env_config: Settings of the env; see `.environment(env_config=...)`.
        wrappers: Wrappers of each sub-env; the first one is the innermost.
        num_envs: Number of sub-envs; `None` is 8 at most, and 1 if `policy` is a function.
        seed: Seed of the first reset; sub-env i gets `seed + i`. `None` draws another one each time.
        explore: Whether a policy or an algorithm explores.
        max_episode_steps: Length from which an episode counts as one that never ends.

    Raises:
        ConfigError: An argument is out of bounds, or the policy is for other spaces than the env's.
        EnvError: The env raised an exception, gave a return that is not finite, or has an episode that does not end.
        ObservationError: An observation does not fit the policy.
    """
    for name, value in (("episodes", episodes), ("max_episode_steps", max_episode_steps), ("num_envs", num_envs or 1)):
        if value < 1:
            raise ConfigError(f"evaluate_policy: {name}={value} must be at least 1.")
    by_batch = isinstance(policy, Policy) or hasattr(policy, "compute_actions")
    default_num_envs = min(episodes, DEFAULT_NUM_ENVS) if by_batch else 1
    with _opened(env, env_config, wrappers, num_envs, default_num_envs, seed or 0) as vector_env:
        name = env_name(env)
        acting = _acting(policy, vector_env, name, explore)
        return _play_episodes(acting, vector_env, name, episodes, seed, max_episode_steps)


@contextmanager
def _opened(
    env: Any,
    env_config: Mapping[str, Any] | None,
    wrappers: Sequence[Callable[[Any], Any]],
    num_envs: int | None,
    default_num_envs: int,
    seed: int,
) -> Iterator[VectorEnv[Any, Any, Any]]:
    """Open a vector env for a block. An env that is an instance is not closed: it is the caller's."""
    if isinstance(env, (gym.Env, VectorEnv)):
        if env_config or wrappers or num_envs:
            raise ConfigError(
                "evaluate_policy: env_config, wrappers and num_envs do not apply to an env that is made already: give "
                "its class or id."
            )
        yield env if isinstance(env, VectorEnv) else SyncVectorEnv([lambda: env])
        return
    context = EnvContext(dict(env_config or {}))
    vector_env = make_vector_env(
        env, context, num_envs=num_envs, default_num_envs=default_num_envs, wrappers=wrappers, seed=seed
    )
    try:
        for sub_env in vector_env.envs[:1] if isinstance(vector_env, SyncVectorEnv) else ():
            warn_of_statistics(sub_env, env_name(env))
        yield vector_env
    finally:
        vector_env.close()


def _acting(policy: Any, env: VectorEnv[Any, Any, Any], name: str, explore: bool) -> Acting:
    """Return the function that chooses the actions of all sub-envs."""
    given = env.single_observation_space, env.single_action_space
    if isinstance(policy, Policy):
        check_spaces_fit(policy, *given, name)
        return partial(policy.batch, explore=explore)
    if hasattr(policy, "compute_actions"):
        check_spaces_fit(policy.env_runner_group.module_spec, *given, name)
        return partial(policy.compute_actions, explore=explore)
    if not callable(policy):
        raise ConfigError(f"evaluate_policy: {policy!r:.80} is no policy, no algorithm and no function.")

    def act(obs: Tree) -> NDArray[Any]:
        return np.asarray([policy(map_tree(lambda leaf, i=i: leaf[i], obs)) for i in range(env.num_envs)])

    return act


def check_spaces_fit(
    policy: Policy | ModuleSpec, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], name: str
) -> None:
    """Refuse an env with other spaces than a policy has; the bounds of Box observations may differ.

    Raises:
        ConfigError: Names the env and both spaces.
    """
    given = module_observation_space(observation_space)
    if space_kinds(policy.observation_space) != space_kinds(given):
        raise ConfigError(
            f"the policy takes observations of {policy.observation_space}, and env {name!r} gives {given}: give the "
            "env with which it was trained."
        )
    if policy.action_space != action_space:
        raise ConfigError(
            f"the policy chooses actions of {policy.action_space}, and env {name!r} takes {action_space}: give the env "
            "with which it was trained."
        )


def _play_episodes(
    acting: Acting,
    env: VectorEnv[Any, Any, Any],
    name: str,
    episodes: int,
    seed: int | None,
    max_episode_steps: int,
) -> PolicyEvaluation:
    n = env.num_envs
    shares = [episodes // n + (i < episodes % n) for i in range(n)]
    found: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    total, length, resets = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    next_step = env.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP
    obs, _ = _called(name, "reset", 0, partial(env.reset, seed=seed))
    step = 0
    while any(len(ended) < share for ended, share in zip(found, shares, strict=True)):
        actions = acting(obs)
        obs, rewards, terminated, truncated, _ = _called(name, "step", step, partial(env.step, actions))
        step += 1
        total += np.where(resets, 0.0, rewards)
        length += ~resets
        ends = (terminated | truncated) & ~resets
        for i in np.flatnonzero(ends).tolist():
            if len(found[i]) < shares[i]:
                found[i].append((float(total[i]), int(length[i])))
        total[ends], length[ends] = 0.0, 0
        resets = ends if next_step else resets
        for i in np.flatnonzero(length >= max_episode_steps).tolist():
            if len(found[i]) < shares[i]:
                raise EnvError(
                    f"env {name!r}: an episode has not ended after {max_episode_steps:,} steps: limit it, with "
                    "wrappers=[lambda env: gymnasium.wrappers.TimeLimit(env, 1000)], or raise max_episode_steps."
                )
    played = [found[i][k] for k in range(max(shares)) for i in range(n) if k < shares[i]]
    if not all(math.isfinite(episode_return) for episode_return, _ in played):
        raise EnvError(f"env {name!r}: the rewards of an episode are not all finite.")
    returns, lens = zip(*played, strict=True)
    return PolicyEvaluation(returns, lens)


def _called(name: str, method: str, step: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CorralError as error:
        raise env_error(name, step, method, error) from original(error)
    except Exception as error:
        raise env_error(name, step, method, error) from error


@cache
def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, for a probability above 0.5.

    The distribution function is the finite sum 26.7.3 and 26.7.4 of Abramowitz and Stegun 1964; its inverse is found by
    bisection, to the precision of a float.

    Args:
        probability: Probability in (0.5, 1).
        degrees: Degrees of freedom, at least 1.
    """
    low, high = 0.0, math.tan(math.pi * (probability - 0.5))  # the quantile of 1 degree is the largest
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + _central_probability(middle, degrees) / 2 < probability
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _central_probability(t: float, degrees: int) -> float:
    """Return the probability of [-t, t]."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    ranks = np.arange(2 + odd, degrees - 1, 2)
    terms = np.cumprod(np.concatenate([[1.0], (ranks - 1) / ranks * math.cos(angle) ** 2]))
    series = math.sin(angle) * float(terms.sum())
    if not odd:
        return series
    return 2 / math.pi * (angle + (math.cos(angle) * series if degrees > 1 else 0.0))
