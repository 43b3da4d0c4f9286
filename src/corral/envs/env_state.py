"""The state of one env with its wrappers, as plain data, so that it can continue in another process.

An env, or a wrapper, that has `get_state()` and `set_state(state)` answers for itself and everything inside it, and the
state of Gymnasium's wrappers around it is known here, as the state of Gymnasium's own vector envs is. The episode of
any other env is played again, see `replay`.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from corral.core.plain import check_plain
from corral.core.seeding import check_bits
from corral.core.tree import copy_nested
from corral.envs.episode_resets import EpisodeResets
from corral.envs.mask_wrapper import ActionMasks
from corral.envs.masked_resets import MaskedResets
from corral.envs.multi_agent_env import AgentGroups
from corral.envs.pettingzoo_env import FromPettingZoo
from corral.envs.replay import (
    OVER_EPISODES,
    Start,
    as_begun,
    check_kept,
    check_start,
    keep,
    read_attributes,
    replay_episode,
    set_kept,
    write_attributes,
)
from corral.envs.seated_env import SeatedEnv
from corral.errors import CheckpointError

log = logging.getLogger("corral")
WRAPPERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("ClipAction", "ClipReward", "DiscretizeAction", "DiscretizeObservation", "DtypeObservation"),
            *("FilterObservation", "FlattenObservation", "GrayscaleObservation", "HumanRendering", "OrderEnforcing"),
            *("PassiveEnvChecker", "RepeatAction", "RescaleAction", "RescaleObservation", "ReshapeObservation"),
            *("ResizeObservation", "TransformAction", "TransformObservation", "TransformReward"),
        ),
        (),
    ),
    **dict.fromkeys(("ActionMasks", "AgentGroups", "EpisodeResets", "MaskedResets"), ()),
    **dict.fromkeys(("ParallelPettingZooEnv", "PettingZooEnv"), ()),
    "AtariPreprocessing": ("obs_buffer", "lives", "game_over"),
    "Autoreset": ("autoreset",),
    "DelayObservation": ("observation_queue",),
    "FrameStackObservation": ("obs_queue",),
    "MaxAndSkipObservation": ("_obs_buffer",),
    **OVER_EPISODES,
    "RecordEpisodeStatistics": ("episode_returns", "episode_lengths", *OVER_EPISODES["RecordEpisodeStatistics"]),
    "SeatedEnv": ("seat_state",),
    "StickyAction": ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
    "TimeAwareObservation": ("timesteps",),
    "TimeLimit": ("_elapsed_steps",),
}
"""Attributes that make up the state of Gymnasium's wrappers, and of Corral's, by the wrapper's name.

None of them is an argument of the wrapper: a new value in the config must hold.
"""
OWN_WRAPPERS = (ActionMasks, AgentGroups, EpisodeResets, FromPettingZoo, MaskedResets, SeatedEnv)
NATIVE = {
    "CartPoleVectorEnv": ("state", "steps", "prev_done"),
    **dict.fromkeys(("CartPoleJaxVectorEnv", "PendulumJaxVectorEnv"), ("state", "rng", "steps", "prev_done")),
}
"""Attributes that make up the state of Gymnasium's own vector envs, by class."""


# Saving.


def get_env_state(env: Any, start: Start | None = None) -> dict[str, Any]:
    """Return the state of an env or a vector env: copies of plain data. It never raises an exception.

    Args:
        env: The env, which has been reset.
        start: How the episode began, for an env that plays its episode again.

    Returns:
        `kept`, what `keep` returns now. Where the env answers for itself, its `state`, and `wrappers`, pairs of the
        name and the state of each wrapper around it, `None` where it is not known. For an env that plays its episode
        again, its `start`; see `as_begun`. If something is in the way, the `obstacle`, with a `traceback` where it was
        an exception.
    """
    state: dict[str, Any] = {}
    try:
        state["kept"] = keep(env)
        wrappers, holder = _split(env)
        if obstacle := getattr(env.unwrapped, "OBSTACLE", "") or _whole_obstacle(env):
            return {**state, "obstacle": obstacle}
        if holder is not None:
            state["wrappers"] = [[type(layer).__name__, _wrapper_state(layer)] for layer in wrappers]
            get, _ = _functions_of(holder)
            given = get()
            check_plain(given, f"get_state() of {type(holder).__name__}", CheckpointError)
            state["state"] = copy_nested(given)
        if plays_again(env):
            state["start"], obstacle = as_begun(env, start)
            return {**state, "obstacle": obstacle} if obstacle else state
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        kept = {"kept": state["kept"]} if "kept" in state else {}
        obstacle = f"its state could not be saved: {problem}"
        return {**kept, "obstacle": obstacle, "traceback": traceback.format_exc()}
    return state


def plays_again(env: Any) -> bool:
    """Return whether a new env must play the episode of this env again to stand where it stands."""
    wrappers, holder = _split(env)
    return holder is None or any(_wrapper_state(layer) is None for layer in wrappers)


def _whole_obstacle(env: Any) -> str:
    """Return why a vector env that steps only as a whole cannot continue, or `""`."""
    if not isinstance(env, VectorEnv) or not plays_again(env):
        return ""
    return f"{type(env.unwrapped).__name__} steps all its sub-envs at once, and has no get_state and set_state"


def check_env_state(state: Mapping[str, Any]) -> None:
    """Check that the state of an env is whole, without an env; raise what the damaged part raises."""
    for name, values in state.get("wrappers", []):
        # Older checkpoints have more attributes.
        if values is not None and not set(WRAPPERS[name]) <= values.keys():
            raise CheckpointError(f"the state of the wrapper {name} has {sorted(values)}.")
    if state.get("np_random") is not None:
        check_bits(state["np_random"])
    if "kept" in state:
        check_kept(state["kept"])
    if state.get("start") is not None:
        check_start(state["start"])


# Continuing.


def find_obstacle(env: Any, state: Mapping[str, Any]) -> str:
    """Return why an env cannot continue where the env of a state stood, or `""`: it may continue."""
    obstacle = state.get("obstacle") or getattr(env.unwrapped, "OBSTACLE", "") or _whole_obstacle(env)
    if obstacle:
        return str(obstacle)
    wrappers, holder = _split(env)
    if plays_again(env):
        if state.get("start") is None:
            was_asked = "state" in state
            return "it has no get_state and set_state any more" if was_asked else "its actions were not saved"
    else:
        saved, here = [name for name, _ in state.get("wrappers", [])], [type(layer).__name__ for layer in wrappers]
        if "state" in state and saved != here:
            return f"its wrappers were {saved} and are {here}"
        if any(values is None for _, values in state.get("wrappers", [])):
            return "the state of one of its wrappers was not saved"
    is_answered = "state" in state or holder is None
    return "" if is_answered else "its state was not saved"


def continue_env(env: Any, state: Mapping[str, Any], replay: Any, seed: int, deadline_s: float) -> str:
    """Let an env continue where the env of a state stood, and return why it cannot, or `""`.

    Args:
        env: An env that was just made.
        state: State of `get_env_state`.
        replay: What it plays again; see `replay_episode`. `None` is nothing, because its next step begins an episode,
            and a text is the reason why it is not known.
        seed: Seed of the reset before `set_state`.
        deadline_s: Clock reading at which episodes must have been played again.

    Raises:
        Exception: What `set_state` of the env raised.
    """
    if obstacle := find_obstacle(env, state):
        return obstacle
    _, holder = _split(env)
    if plays_again(env) and replay is not None:
        if isinstance(replay, str):
            return replay
        if obstacle := replay_episode(env, state["start"], replay, deadline_s):
            return obstacle
        if holder is None and keep(env)["generators"] != state["kept"]["generators"]:
            return "it drew other random numbers when its episode was played again"
    elif not isinstance(env, VectorEnv):
        (env.env if isinstance(env, EpisodeResets) else env).reset(seed=seed)
    if holder is not None:
        set_env_state(env, state)
    else:
        set_kept(env, state["kept"], with_games=replay is None)
    return ""


def set_env_state(env: Any, state: Mapping[str, Any]) -> None:
    """Set an env that was just reset and answers for itself to a state that it may continue from."""
    wrappers, holder = _split(env)
    set_, surroundings = _functions_of(holder)[1], state.get("wrappers", [])
    set_(copy_nested(state["state"]))
    if [name for name, _ in surroundings] == [type(layer).__name__ for layer in wrappers]:
        for layer, (name, values) in zip(wrappers, surroundings, strict=True):
            if values is not None:
                write_attributes(layer, {key: values[key] for key in WRAPPERS[name]})
    set_surroundings(env, state)  # last, because `set_state` may have reset the env, or drawn numbers


def set_surroundings(env: Any, state: Mapping[str, Any]) -> None:
    """Set what an env keeps when it begins its episode again: its generators, and statistics of its wrappers."""
    if "kept" in state:
        set_kept(env, state["kept"], with_games=True)
        return
    if "np_random" not in state:  # nothing of the env could be saved
        return
    # Checkpoints of before episodes were played again.
    wrappers = [
        [name, {key: values[key] for key in OVER_EPISODES[name]}]
        for name, values in state["wrappers"]
        if values is not None and name in OVER_EPISODES
    ]
    set_kept(env, {"generators": [], "wrappers": wrappers, "games": []})
    generator = getattr(env.unwrapped, "np_random", None) if state["np_random"] is not None else None
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        if bits.state["bit_generator"] == state["np_random"]["bit_generator"]:
            bits.state = state["np_random"]


def warn_of_statistics(env: Any, name: str) -> None:
    """Warn of wrappers that normalize by running statistics, which a new env begins without.

    Args:
        env: An env that was just made, to measure or to show a policy.
        name: Name of the env.
    """
    if normalizing := normalizing_wrappers(env):
        log.warning(
            "env %r: %s begins without the statistics of training, so observations or returns differ from training. "
            "Make an env whose wrappers have these statistics, and give it to corral.evaluate_policy.",
            name,
            " and ".join(normalizing),
        )


def normalizing_wrappers(env: Any) -> list[str]:
    """Return the names of wrappers of one env that normalize by running statistics of this env alone."""
    found = [type(layer).__name__ for layer in _layers(env)]
    return [wrapper for wrapper in found if wrapper in ("NormalizeObservation", "NormalizeReward")]


def warn_of_own_statistics(env: VectorEnv[Any, Any, Any], name: str) -> None:
    """Warn of wrappers with which every sub-env normalizes by statistics of its own while training.

    Args:
        env: The vector env of a runner.
        name: Name of the env.
    """
    found = normalizing_wrappers(next(iter(getattr(env.unwrapped, "envs", ())), env))
    if found:
        ours = ", ".join(f"{wrapper}s()" for wrapper in found)
        log.warning(
            "env %r: with the wrapper %s each of the %d sub-envs normalizes by statistics of its own, which neither "
            "evaluation nor a loaded policy has. Use .env_runners(transforms=[%s]), whose statistics are shared, saved "
            "and frozen in evaluation.",
            name,
            " and ".join(found),
            env.num_envs,
            ours,
        )


def _layers(env: Any) -> Iterator[Any]:
    while True:
        yield env
        if not isinstance(env, (gym.Wrapper, VectorWrapper, FromPettingZoo)):
            return
        env = env.env


def _split(env: Any) -> tuple[Sequence[Any], Any]:
    """Return the wrappers, from the outermost to the innermost, around the layer that answers for all inside it.

    Without such a layer all wrappers are returned, and `None`.
    """
    outside: list[Any] = []
    for layer in _layers(env):
        has_both = all(callable(getattr(type(layer), name, None)) for name in ("get_state", "set_state"))
        if has_both or _is_native(layer):
            return outside, layer
        outside.append(layer)
    return outside[:-1], None


def _functions_of(holder: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return the functions that get and set the state of a layer that answers for itself."""
    if not _is_native(holder):
        return holder.get_state, holder.set_state
    names = NATIVE[type(holder).__name__]

    def get() -> dict[str, Any]:
        return {name: np.array(getattr(holder, name)) for name in names}

    def set_(state: Mapping[str, Any]) -> None:
        for name in names:
            is_array = isinstance(getattr(holder, name), np.ndarray)
            setattr(holder, name, state[name] if is_array else sys.modules["jax"].numpy.asarray(state[name]))

    return get, set_


def _is_native(layer: Any) -> bool:
    return type(layer).__name__ in NATIVE and type(layer).__module__.startswith("gymnasium.envs.")


def _wrapper_state(layer: Any) -> dict[str, Any] | None:
    """Return the state of a wrapper, or `None` if the wrapper is not known."""
    is_known = isinstance(layer, OWN_WRAPPERS) or type(layer).__module__.startswith("gymnasium.wrappers")
    if not is_known or type(layer).__name__ not in WRAPPERS:
        return None
    try:
        return read_attributes(layer, WRAPPERS[type(layer).__name__])
    except AttributeError:  # another version of Gymnasium
        return None
