"""How good a policy is: returns and lengths of whole episodes, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from corral.core.interrupts import interruptible
from corral.core.spaces import module_observation_space, space_kinds, space_tree
from corral.core.tree import Tree, map_tree
from corral.envs.async_vector import AsyncLimits
from corral.envs.checks import mismatch
from corral.envs.env_state import warn_of_statistics
from corral.envs.episode_resets import EpisodeReset, EpisodeResets, fill_queue, quotas
from corral.envs.seats import SeatsSpace
from corral.envs.step_checks import check_step_columns
from corral.envs.step_timeout import StepTimer
from corral.envs.sub_envs import Restarts, call_directly, env_error, original
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.unread_parts import unread_wrappers
from corral.envs.vector import EnvContext, env_name, make_vector_env
from corral.errors import ConfigError, CorralError, EnvError, SubEnvError
from corral.evaluation.statistics import summarize_episodes
from corral.policies.agent_policies import AgentPolicies, refuse_several_agents
from corral.policies.policy import Policy

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.modules.spec import ModuleSpec

DEFAULT_NUM_EPISODES = 100
DEFAULT_NUM_ENVS = 8
MAX_EPISODE_STEPS = 100_000
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

        `corral.evaluation.statistics.summarize_episodes` describes them.
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


Acting = Callable[[Tree, NDArray[np.bool_], NDArray[Any]], Any]
"""From the observations of N sub-envs, a tree of `[N, ...]`, whether they begin episodes, and the rewards that came
with them, to their actions."""


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
    faults = _Faults(env_name(env), env_step_timeout_s, restarts)
    with (
        faults.installed(),
        _opened(env, env_config, wrappers, num_envs, default_num_envs, seed or 0, resets, faults) as vector_env,
    ):
        acting = _acting(policy, vector_env, faults.name, explore)
        return _play_episodes(acting, vector_env, faults, episodes, seed, max_episode_steps)


def _transforms_of(policy: Any) -> Sequence[Any]:
    """Return the transforms of a policy or of an algorithm; several policies and functions have none here."""
    if isinstance(policy, Policy):
        return () if policy.pipeline is None else policy.pipeline.transforms
    return getattr(getattr(policy, "config", None), "transforms", ())


class _Faults:
    """Limits the calls of an env, and restarts its sub-envs.

    Attributes:
        name: Name of the env.
        step: Number of steps so far.
        failed: Sub-envs that were restarted in the latest call.
        timeout_s: Seconds that one call may take.
        restarts: What restarts sub-envs; `None` if a failure is an error.
    """

    def __init__(self, name: str, timeout_s: float | None, max_num_restarts: int) -> None:
        self.name, self.step, self.failed, self.timeout_s = name, 0, list[int](), timeout_s
        self._max_num_restarts = max_num_restarts
        timer = None if timeout_s is None else StepTimer(timeout_s)
        self.installed = nullcontext if timer is None else timer.installed
        self._call = call_directly if timer is None else timer.call
        self.restarts = (
            Restarts(timer, lambda: int(np.random.SeedSequence().generate_state(1)[0]), _do_nothing, self._restarted)
            if max_num_restarts
            else None
        )

    def _restarted(self, failure: SubEnvError) -> None:
        self.failed.append(failure.env_index)
        assert self.restarts is not None
        if self.restarts.num_restarts == self._max_num_restarts:
            raise failure
        self.restarts.count(failure, self.name, self.step)

    def call(self, method: str, call: Callable[[], Any]) -> Any:
        """Call an env; see `failed`.

        Raises:
            EnvError: The env failed.
        """
        self.failed.clear()
        try:
            return self._call(call)
        except CorralError as error:
            raise env_error(self.name, self.step, method, error) from original(error)
        except Exception as error:
            raise env_error(self.name, self.step, method, error) from error


def _do_nothing(*_: Any) -> None:
    pass


@contextmanager
def _opened(
    env: Any,
    env_config: Mapping[str, Any] | None,
    wrappers: Sequence[Callable[[Any], Any]],
    num_envs: int | None,
    default_num_envs: int,
    seed: int,
    resets: list[EpisodeReset] | None,
    faults: _Faults,
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
        yield _with_queues(SyncVectorEnv([lambda: outer]), resets)
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
        yield _with_queues(vector_env, resets)
    finally:
        vector_env.close()


def _with_queues(env: VectorEnv[Any, Any, Any], resets: list[EpisodeReset] | None) -> VectorEnv[Any, Any, Any]:
    """Give each sub-env the reset arguments of its episodes."""
    if resets is not None:
        for i, sub_env in enumerate(env.unwrapped.envs):  # type: ignore[attr-defined]
            fill_queue(sub_env, resets[i :: env.num_envs])
    return env


def _acting(policy: Any, env: VectorEnv[Any, Any, Any], name: str, explore: bool) -> Acting:
    """Return the function that chooses the actions of all sub-envs."""
    given = env.single_observation_space, env.single_action_space
    if hasattr(policy, "compute_actions") and policy.config.is_multi_agent:
        policy = policy.acting.agent_policies()
    if isinstance(policy, AgentPolicies):
        seats = policy.find_seats(given[0], name)
        return lambda obs, begins, _: policy.batch(seats, obs, begins, explore=explore)
    refuse_several_agents(given[0], name)
    if isinstance(policy, Policy):
        check_spaces_fit(policy, *given, name)
        policy.reset()
        return partial(_act_by_policy, policy, explore)
    if hasattr(policy, "compute_actions"):
        check_spaces_fit(policy.env_runner_group.module_specs[policy.resolve_module_id()], *given, name)
        own = policy.acting_policy()
        if own.has_memory:
            return _remembering(partial(policy.compute_actions, explore=explore), own, env.num_envs)
        return lambda obs, *_: policy.compute_actions(obs, explore=explore)
    if not callable(policy):
        raise ConfigError(f"evaluate_policy: {policy!r:.80} is no policy, no algorithm and no function.")

    tree = space_tree(given[0])

    def act(obs: Tree, *_: Any) -> NDArray[Any]:
        if problem := mismatch(tree, obs, "observation", batch=(env.num_envs,)):  # policies check what they are given
            raise EnvError(f"env {name!r}: {problem}.")
        return np.asarray([policy(map_tree(lambda leaf, i=i: leaf[i], obs)) for i in range(env.num_envs)])

    return act


def _act_by_policy(policy: Policy, explore: bool, obs: Tree, begins: NDArray[np.bool_], rewards: NDArray[Any]) -> Any:
    policy.note_rewards(rewards)
    return policy.batch(obs, explore=explore, begins=begins)


def _remembering(compute_actions: Callable[..., tuple[Any, Tree]], policy: Policy, num_envs: int) -> Acting:
    """Return the function that chooses actions with states, and keeps the states."""
    states = policy.initial_states(num_envs)

    def act(obs: Tree, begins: NDArray[np.bool_], rewards: NDArray[Any]) -> Any:
        nonlocal states
        actions, states = compute_actions(obs, state=policy.continued(states, begins=begins, rewards=rewards))
        return actions

    return act


def check_spaces_fit(
    policy: Policy | ModuleSpec, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], name: str
) -> None:
    """Refuse an env with other spaces than a policy has; the bounds of Box observations may differ.

    Raises:
        ConfigError: Names the env and both spaces.
    """
    if isinstance(observation_space, SeatsSpace):
        raise ConfigError(
            f"env {name!r} has several agents, and one policy acts for one: build the algorithm with "
            "Algorithm.from_checkpoint(path), and call its evaluate()."
        )
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


@interruptible
def _play_episodes(
    acting: Acting,
    env: VectorEnv[Any, Any, Any],
    faults: _Faults,
    episodes: int,
    seed: int | None,
    max_episode_steps: int,
) -> PolicyEvaluation:
    n = env.num_envs
    num_episodes = quotas(episodes, n).tolist()
    found: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    total, length, resets = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
    next_step = env.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP
    name = faults.name
    obs, _ = faults.call("reset", partial(env.reset, seed=seed))
    begins = np.ones(n, np.bool_)
    rewards = np.zeros(n)
    while any(len(ended) < wanted for ended, wanted in zip(found, num_episodes, strict=True)):
        actions = acting(obs, begins, rewards)
        obs, rewards, terminated, truncated = faults.call("step", partial(_checked_step, env, actions))
        faults.step += 1
        total += np.where(resets, 0.0, rewards)
        length += ~resets
        ends = (terminated | truncated) & ~resets
        for i in np.flatnonzero(ends).tolist():
            if len(found[i]) < num_episodes[i]:
                found[i].append((float(total[i]), int(length[i])))
        total[ends], length[ends] = 0.0, 0
        begins = resets if next_step else ends
        resets = ends if next_step else resets
        for i in faults.failed:  # its episode is lost, and the observation is the first one of another
            total[i], length[i], begins[i], resets[i] = 0.0, 0, True, False
        for i in np.flatnonzero(length >= max_episode_steps).tolist():
            if len(found[i]) < num_episodes[i]:
                raise EnvError(
                    f"env {name!r}: an episode has not ended after {max_episode_steps:,} steps: limit it, with "
                    "wrappers=[lambda env: gymnasium.wrappers.TimeLimit(env, 1000)], or raise max_episode_steps."
                )
    played = [found[i][k] for k in range(max(num_episodes)) for i in range(n) if k < num_episodes[i]]
    if not all(math.isfinite(episode_return) for episode_return, _ in played):
        raise EnvError(f"env {name!r}: the rewards of an episode are not all finite.")
    returns, lens = zip(*played, strict=True)
    return PolicyEvaluation(returns, lens)


def _checked_step(env: VectorEnv[Any, Any, Any], actions: Any) -> tuple[Any, ...]:
    obs, rewards, terminated, truncated, _ = env.step(actions)
    return obs, *check_step_columns(env.num_envs, rewards, terminated, truncated)
