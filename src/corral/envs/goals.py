"""The rewards of an env for other goals, checked against the rewards that its steps give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.data.replay.hindsight import ACHIEVED, DESIRED, GOAL_KEYS, GoalFunction, GoalFunctions
from corral.envs.vector import EnvContext, env_name, make_one, resolve_env
from corral.errors import ConfigError, EnvError

NUM_CHECKED_STEPS = 10
"""Steps with random actions whose rewards are compared."""

SEED = 0

NEED = "replay_buffer_config: type='hindsight'"


def find_goal_functions(env: Any, context: EnvContext, wrappers: Any = ()) -> GoalFunctions:
    """Make an env, and return its functions of goals after comparing them with some steps.

    An env with goals has Dict observations with the keys `GOAL_KEYS`, and a method `compute_reward(achieved_goal,
    desired_goal, info)`. If it also has `compute_terminated`, goals decide when episodes terminate. The functions take
    many goals at once if the methods do; else they call them once for each. `info` is an empty dict.

    Args:
        env: Setting `env`.
        context: Config and indices.
        wrappers: Wrappers of the env; the first one is the innermost.

    Raises:
        ConfigError: The env has no goals, or a method is not what its steps do.
        EnvError: The env cannot be made, or raised an exception.
    """
    name, resolved = env_name(env), resolve_env(env)
    if getattr(resolved, "IS_EXTERNAL", False):
        raise ConfigError(
            f"{NEED} needs an env that can be made here, but env {name!r} runs in clients of a policy server."
        )
    made = make_one(resolved, name, context, wrappers)
    try:
        if not isinstance(made, gym.Env):
            raise ConfigError(f"{NEED} needs single envs, and env {name!r} is a ready vector env: give its sub-env.")
        return _functions_of(made, name)
    except BaseException:
        made.close()
        raise


def _functions_of(env: gym.Env[Any, Any], name: str) -> GoalFunctions:
    space = env.observation_space
    if not isinstance(space, spaces.Dict) or any(key not in space.spaces for key in GOAL_KEYS):
        raise ConfigError(
            f"{NEED} needs observations that are a Dict with the keys {', '.join(GOAL_KEYS)}, and env {name!r} has "
            f"{space}: use another type."
        )
    if not _may_replace(space[ACHIEVED], space[DESIRED]):
        raise ConfigError(
            f"{NEED} needs goals of one space, Box, Discrete, MultiDiscrete or MultiBinary, and env {name!r} has "
            f"{ACHIEVED} {space[ACHIEVED]} and {DESIRED} {space[DESIRED]}: give both the same."
        )
    methods = {each: _find_method(env, each) for each in ("compute_reward", "compute_terminated")}
    if not callable(methods["compute_reward"]):
        raise ConfigError(f"{NEED} needs a method compute_reward(achieved_goal, desired_goal, info) of env {name!r}.")
    try:
        achieved, desired, rewards, terminated = _take_steps(env)
    except Exception as error:
        raise EnvError(f"env {name!r} raised {type(error).__name__} in a step with a random action: {error}") from error
    found: dict[str, GoalFunction | None] = {"compute_terminated": None}
    for method, seen in (("compute_reward", rewards), ("compute_terminated", terminated)):
        if callable(function := methods[method]):
            found[method] = _checked(function, method, name, achieved, desired, seen)
    assert found["compute_reward"] is not None
    _check_reward_wrappers(env, name, float(found["compute_reward"](achieved[:1], achieved[:1])[0]))
    return GoalFunctions(found["compute_reward"], found["compute_terminated"], env.close)


def _may_replace(achieved: spaces.Space[Any], desired: spaces.Space[Any]) -> bool:
    """Return whether achieved goals may stand where desired goals do: in observations, and in the module."""
    if not (isinstance(achieved, spaces.Box) and isinstance(desired, spaces.Box)):
        return achieved == desired and isinstance(achieved, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    return achieved.shape == desired.shape and np.can_cast(achieved.dtype, desired.dtype, "same_kind")


def _find_method(env: gym.Env[Any, Any], method: str) -> Any:
    """Return a method of the outermost wrapper that has it, or of the env; `None` if there is none."""
    return env.get_wrapper_attr(method) if env.has_wrapper_attr(method) else None


def _check_reward_wrappers(env: gym.Env[Any, Any], name: str, reward: float) -> None:
    """Check that no wrapper changes the reward of a goal that is achieved, which random steps may not show.

    Raises:
        ConfigError: A wrapper changes it.
    """
    while isinstance(env, gym.Wrapper) and "compute_reward" not in dir(type(env)):
        changed = float(env.reward(reward)) if isinstance(env, gym.RewardWrapper) else reward
        if not np.isclose(changed, reward, rtol=1e-4, atol=1e-6):
            raise ConfigError(
                f"{NEED}: wrapper {type(env).__name__} of env {name!r} changes the reward of a goal that is achieved "
                f"from {reward} to {changed}: leave it out (transforms may change rewards), or give it a method "
                "compute_reward that does the same."
            )
        env = env.env


def _take_steps(env: gym.Env[Any, Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return achieved and desired goals, rewards and whether episodes terminated, of steps with random actions."""
    env.action_space.seed(SEED)
    env.reset(seed=SEED)
    found: list[tuple[Any, ...]] = []
    for _ in range(NUM_CHECKED_STEPS):
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        found.append((np.array(obs[ACHIEVED]), np.array(obs[DESIRED]), reward, terminated))
        if terminated or truncated:
            env.reset()
    achieved, desired, rewards, terminations = (np.stack(column) for column in zip(*found, strict=True))
    return achieved, desired, _flat(rewards, NUM_CHECKED_STEPS), _flat(terminations, NUM_CHECKED_STEPS)


def _checked(
    function: Callable[..., Any],
    method: str,
    name: str,
    achieved: NDArray[Any],
    desired: NDArray[Any],
    seen: NDArray[Any],
) -> GoalFunction:
    """Return a function of many goals, after comparing it with what steps gave.

    Raises:
        ConfigError: It raises an exception, or gives something else.
    """
    what = "reward" if method == "compute_reward" else "value of terminated"
    one_by_one = partial(_call_each, function)
    # Steps that achieve their goals are among them, which steps with random actions may not be.
    achieved, desired = np.concatenate([achieved, achieved]), np.concatenate([desired, achieved.astype(desired.dtype)])
    try:
        values = one_by_one(achieved, desired)
    except Exception as error:
        raise ConfigError(
            f"{NEED}: {method} of env {name!r} raised {type(error).__name__} with an empty info: {error}. A replay "
            "buffer keeps no infos: compute it from the goals alone."
        ) from error
    if values.shape != (len(achieved),) or values.dtype.kind not in "biuf":
        raise ConfigError(
            f"{NEED}: {method} of env {name!r} gives {describe(values[0])} for the goals of one step: return a number."
        )
    different = np.flatnonzero(~np.isclose(values[: len(seen)].astype(float), seen.astype(float), rtol=1e-4, atol=1e-6))
    if len(different):
        index = int(different[0])
        raise ConfigError(
            f"{NEED}: {method} of env {name!r} gives {values[index]} for the goals of a step whose {what} was "
            f"{seen[index]}. Both must be the same: leave out wrappers that change rewards (transforms may change "
            "them), and rewards that do not depend on goals."
        )
    # For two numbers of goals: a function of single goals may give an array that has the right shape by chance.
    takes_many = all(_gives(function, achieved[:size], desired[:size], values[:size]) for size in (len(values), 3))
    return (
        (lambda achieved, desired: _flat(function(achieved, desired, {}), len(achieved))) if takes_many else one_by_one
    )


def _gives(function: Callable[..., Any], achieved: NDArray[Any], desired: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Return whether a function of many goals at once gives what is expected."""
    try:
        found = _flat(function(achieved, desired, {}), len(expected))
        return found.shape == expected.shape and np.allclose(found.astype(float), expected.astype(float))
    except Exception:
        return False


def _call_each(function: Callable[..., Any], achieved: NDArray[Any], desired: NDArray[Any]) -> NDArray[Any]:
    return _flat([function(one, goal, {}) for one, goal in zip(achieved, desired, strict=True)], len(achieved))


def _flat(values: Any, size: int) -> NDArray[Any]:
    """Return values `[M]`, of which each may have axes of length 1, as array code for goals of one number leaves."""
    array = np.asarray(values)
    return array.reshape(size) if array.shape[:1] == (size,) and array.size == size else array
