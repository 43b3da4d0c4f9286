"""Plays whole episodes of a policy in a vector env, to measure it, to show it, and to record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from corral.core.spaces import module_observation_space, space_kinds, space_tree
from corral.core.tree import Tree, map_tree
from corral.envs.checks import mismatch
from corral.envs.episode_resets import EpisodeReset, quotas
from corral.envs.seats import SeatsSpace
from corral.envs.step_checks import check_step_columns
from corral.envs.step_timeout import StepTimer
from corral.envs.sub_envs import Restarts, call_directly, env_error, original
from corral.errors import ConfigError, CorralError, EnvError, SubEnvError
from corral.runs.policies.agent_policies import AgentPolicies, refuse_several_agents
from corral.runs.policies.policy import Policy

if TYPE_CHECKING:
    from corral.modules.spec import ModuleSpec

MAX_EPISODE_STEPS = 100_000

Acting = Callable[[Tree, NDArray[np.bool_], NDArray[Any]], Any]
"""From the observations of N sub-envs, a tree of `[N, ...]`, whether they begin episodes, and the rewards that came
with them, to their actions."""


class Faults:
    """Limits the calls of an env, and restarts its sub-envs.

    Attributes:
        name: Name of the env.
        step: Number of steps so far.
        failed: Sub-envs that were restarted in the latest call.
        timeout_s: Seconds that one call may take.
        restarts: What restarts sub-envs; `None` if a failure is an error.
    """

    def __init__(self, name: str, timeout_s: float | None = None, max_num_restarts: int = 0) -> None:
        """Count no failure yet."""
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


class Player:
    """Plays whole episodes in all sub-envs of a vector env.

    Args:
        acting: What chooses the actions.
        env: The vector env.
        faults: What calls it.
        max_episode_steps: Length from which an episode counts as one that never ends.
    """

    def __init__(self, acting: Acting, env: VectorEnv[Any, Any, Any], faults: Faults, max_episode_steps: int) -> None:
        """Play nothing yet."""
        self.acting, self.env, self.faults, self._max_episode_steps = acting, env, faults, max_episode_steps

    def play(self, num_episodes: int, seed: int | None) -> Iterator[list[tuple[int, float, int]]]:
        """Play so many episodes, and yield after the first reset and after each step the episodes that ended there.

        Each sub-env plays a fixed number of the episodes, so that short episodes are not counted more often than long
        ones; what it plays beyond that is not yielded.

        Args:
            num_episodes: Number of episodes of all sub-envs.
            seed: Seed of the first reset; `None` leaves it to the envs.

        Yields:
            For each episode the index of its sub-env, its return without discount, and its length in env steps.

        Raises:
            EnvError: The env failed, or an episode does not end.
        """
        env, faults, n = self.env, self.faults, self.env.num_envs
        left = quotas(num_episodes, n)
        total, length, resets = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.bool_)
        next_step = env.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP
        obs, _ = faults.call("reset", partial(env.reset, seed=seed))
        begins, rewards = np.ones(n, np.bool_), np.zeros(n)
        yield []
        while left.any():
            actions = self.acting(obs, begins, rewards)
            obs, rewards, terminated, truncated = faults.call("step", partial(_checked_step, env, actions))
            faults.step += 1
            # The step of a sub-env that it only resets, after the end of an episode, belongs to no episode.
            total += np.where(resets, 0.0, rewards)
            length += ~resets
            ends = (terminated | truncated) & ~resets
            counts = ends & (left > 0)
            ended = [(i, float(total[i]), int(length[i])) for i in np.flatnonzero(counts).tolist()]
            left -= counts
            total[ends], length[ends] = 0.0, 0
            begins = resets if next_step else ends
            resets = ends if next_step else resets
            for i in faults.failed:  # its episode is lost, and the observation is the first one of another
                total[i], length[i], begins[i], resets[i] = 0.0, 0, True, False
            if ((length >= self._max_episode_steps) & (left > 0)).any():
                raise EnvError(
                    f"env {faults.name!r}: an episode has not ended after {self._max_episode_steps:,} steps: limit it, "
                    "with wrappers=[lambda env: gymnasium.wrappers.TimeLimit(env, 1000)], or raise "
                    "max_episode_steps (--max-episode-steps)."
                )
            yield ended


def _checked_step(env: VectorEnv[Any, Any, Any], actions: Any) -> tuple[Any, ...]:
    obs, rewards, terminated, truncated, _ = env.step(actions)
    return obs, *check_step_columns(env.num_envs, rewards, terminated, truncated)


def with_queues(env: VectorEnv[Any, Any, Any], resets: list[EpisodeReset] | None) -> VectorEnv[Any, Any, Any]:
    """Return the env, whose sub-envs have the reset arguments of their episodes."""
    if resets is not None:
        for i, sub_env in enumerate(env.unwrapped.envs):  # type: ignore[attr-defined]
            sub_env.fill_queue(resets[i :: env.num_envs])
    return env


def acting_of(policy: Any, env: VectorEnv[Any, Any, Any], name: str, explore: bool) -> Acting:
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
        check_spaces_fit(policy.env_runner_group.module_specs[policy.modules.resolve_id()], *given, name)
        own = policy.acting_policy()
        if own.has_memory:
            return _remembering(partial(policy.compute_actions, explore=explore), own, env.num_envs)
        return lambda obs, *_: policy.compute_actions(obs, explore=explore)
    if not callable(policy):
        raise ConfigError(f"evaluate_policy: {policy!r:.80} is no policy, no algorithm and no function.")

    tree, action_tree = map(space_tree, given)

    def act(obs: Tree, *_: Any) -> Tree:
        if problem := mismatch(tree, obs, "observation", batch=(env.num_envs,)):  # policies check what they are given
            raise EnvError(f"env {name!r}: {problem}.")
        actions = [policy(map_tree(lambda leaf, i=i: leaf[i], obs)) for i in range(env.num_envs)]
        try:
            return map_tree(lambda _, *parts: np.asarray(parts), action_tree, *actions)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"evaluate_policy: {policy!r:.80} returned {actions[0]!r:.80}, which is no action of {given[1]}."
            ) from error

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
