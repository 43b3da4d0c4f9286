"""The test at build whether the attributes of an env are all of its state: a copy must take the same next steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from corral.core.plain import is_same
from corral.core.seeding import get_global_rngs, set_global_rngs
from corral.envs.checks import legal_sample
from corral.envs.env_state import get_env_state, is_well_known, set_env_state
from corral.envs.sub_envs import close_quietly

_NUM_STEPS = 4


def find_lost_state(env: Any, make: Callable[[], Any]) -> str:
    """Return why an env cannot be saved by its attributes, or `""` if a copy took the same steps.

    The global generators stand where they were after that.

    Args:
        env: An env that is not used any more after its check.
        make: Function that makes another one.
    """
    if is_well_known(env):
        return ""
    rngs = get_global_rngs()
    try:
        return _compare(env, make)
    except Exception as error:  # the env may raise at any time
        return f"the test of its saved attributes raised {type(error).__name__}: {error}"
    finally:
        set_global_rngs(rngs)


def _compare(env: Any, make: Callable[[], Any]) -> str:
    obs, _ = env.reset(seed=1)
    first = _play(env, obs, seed=0, resets=False)
    state = get_env_state(env)
    if "attributes" not in state:
        return str(state.get("obstacle", ""))
    rngs = get_global_rngs()
    expected = _play(env, first[-1], seed=1, resets=True)
    other = make()
    try:
        other.reset(seed=2)
        problem = set_env_state(other, state)
        set_global_rngs(rngs)
        if problem or is_same(expected, _play(other, first[-1], seed=1, resets=True)):
            return problem
    finally:
        close_quietly(other)
    return "a copy with its saved attributes took other steps, so that a part of its state is in no attribute"


def _play(env: Any, obs: Any, seed: int, resets: bool) -> list[Any]:
    """Return what some steps return, with a reset in the middle; the last part is the last observation."""
    is_vector = isinstance(env, VectorEnv)
    observation_space, action_space = _spaces(env, is_vector)
    action_space.seed(seed)
    found: list[Any] = []
    for step in range(_NUM_STEPS):
        action = legal_sample(observation_space, action_space, action_space.sample(), obs, batch=is_vector)
        obs, reward, terminated, truncated, _ = env.step(action)
        obs = copy.deepcopy(obs)
        found.append([obs, np.array(reward), np.array(terminated), np.array(truncated)])
        if not is_vector and (terminated or truncated or (resets and step == _NUM_STEPS // 2)):
            obs = copy.deepcopy(env.reset()[0])
            found.append(obs)
    return [*found, obs]


def _spaces(env: Any, is_vector: bool) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return copies, so that the random streams of the env's own spaces do not change."""
    if is_vector:
        return env.single_observation_space, batch_space(copy.deepcopy(env.single_action_space), env.num_envs)
    return env.observation_space, copy.deepcopy(env.action_space)
