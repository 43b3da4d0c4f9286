"""The state of one env with its wrappers, as plain data, so that it can continue in another process.

An env, or a wrapper, that has `get_state()` and `set_state(state)` answers for itself and everything inside it. The
state of wrappers of Gymnasium is known here. Other envs and wrappers are saved by their attributes, see `attributes`,
if a copy that continued from them took the same steps when the env was made. Where an attribute stands in the way, the
env restarts its episode, with its generator where it was.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from corral.core.plain import check_plain
from corral.core.seeding import check_bits, get_rng, set_rng
from corral.core.tree import copy_nested
from corral.envs.action_masks import ActionMasks
from corral.envs.attributes import ObstacleError, check_attributes, load_attributes, save_attributes
from corral.envs.episode_resets import EpisodeResets
from corral.envs.masked_resets import MaskedResets
from corral.envs.multi_agent_env import AgentGroups
from corral.envs.pettingzoo_env import FromPettingZoo
from corral.envs.seated_env import SeatedEnv
from corral.errors import CheckpointError

log = logging.getLogger("corral")
_STATISTICS = ("mean", "var", "count")
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
    **dict.fromkeys(("ActionMasks", "AgentGroups", "ParallelPettingZooEnv", "PettingZooEnv"), ()),
    "AtariPreprocessing": ("obs_buffer", "lives", "game_over"),
    "Autoreset": ("autoreset",),
    "DelayObservation": ("observation_queue",),
    **dict.fromkeys(("EpisodeResets", "MaskedResets"), ("num_episodes",)),
    "FrameStackObservation": ("obs_queue", "padding_value"),
    "MaxAndSkipObservation": ("_obs_buffer",),
    "NormalizeObservation": (*(f"obs_rms.{name}" for name in _STATISTICS), "_update_running_mean"),
    "NormalizeReward": (
        *(f"return_rms.{name}" for name in _STATISTICS),
        "discounted_reward",
        "_update_running_mean",
    ),
    "RecordEpisodeStatistics": (
        *("episode_count", "episode_returns", "episode_lengths"),
        *("time_queue", "return_queue", "length_queue"),
    ),
    "SeatedEnv": ("seat_state",),
    "StickyAction": ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
    "TimeAwareObservation": ("timesteps",),
    "TimeLimit": ("_elapsed_steps",),
}
"""Attributes that make up the state of Gymnasium's wrappers, and of Corral's, by the wrapper's name."""
OWN_WRAPPERS = (ActionMasks, AgentGroups, EpisodeResets, FromPettingZoo, MaskedResets, SeatedEnv)


def get_env_state(env: Any, name: str = "", obstacle: str = "") -> dict[str, Any]:
    """Return the state of an env or a vector env: copies of plain data.

    Args:
        env: The env, which has been reset.
        name: Name of the env, for errors.
        obstacle: Why attributes are not the state of this env, if that is known.

    Returns:
        `wrappers`, pairs of the name and the state of each wrapper, `None` where it is not known; `np_random`, the
        state of the env's generator or `None`; where the env answers for itself, `state`; the `attributes` of what
        else is around the state or in place of it; and where they cannot be saved, the `obstacle`.

    Raises:
        CheckpointError: `get_state` of the env raised, or returned something that is not plain data.
    """
    wrappers, holder = _split(env)
    generator = getattr(env.unwrapped, "_np_random", None)
    state: dict[str, Any] = {
        "wrappers": [[type(layer).__name__, _wrapper_state(layer)] for layer in wrappers],
        "np_random": get_rng(generator) if isinstance(generator, np.random.Generator) else None,
    }
    if own := getattr(env.unwrapped, "OBSTACLE", ""):
        return {**state, "obstacle": own}
    if chosen := _unknown_layers(state["wrappers"], holder):
        try:
            attributes = save_attributes([*_layers(env)], chosen)
            if obstacle:
                raise ObstacleError(obstacle)
            state["attributes"] = attributes
        except ObstacleError as error:
            return {**state, "obstacle": str(error)}
    if holder is not None:
        where = f"env {name!r}: get_state() of {type(holder).__name__}"
        try:
            given = holder.get_state()
        except Exception as error:
            raise CheckpointError(f"{where} raised {type(error).__name__}: {error}") from error
        check_plain(given, where, CheckpointError)
        state["state"] = copy_nested(given)
    return state


def _unknown_layers(wrappers: Sequence[Any], holder: Any) -> list[int]:
    """Return the indices of the layers that are saved by their attributes: unknown wrappers, and a silent env."""
    unknown = [i for i, (_, values) in enumerate(wrappers) if values is None]
    return [*unknown, *([] if holder is not None else [len(wrappers)])]


def check_env_state(state: Mapping[str, Any]) -> None:
    """Check that the state of an env is whole, without an env; raise what the damaged part raises."""
    for name, values in state["wrappers"]:
        if values is not None and values.keys() != set(WRAPPERS[name]):
            raise CheckpointError(f"the state of the wrapper {name} has {sorted(values)}.")
    if state["np_random"] is not None:
        check_bits(state["np_random"])
    if "attributes" in state:
        check_attributes(state["attributes"])


def find_obstacle(env: Any, state: Mapping[str, Any]) -> str:
    """Return why an env cannot continue where the env of a state stood, or `""`: it may continue."""
    if "obstacle" in state:
        return str(state["obstacle"])
    wrappers, holder = _split(env)
    saved, here = [name for name, _ in state["wrappers"]], [type(layer).__name__ for layer in wrappers]
    if saved != here:
        return f"its wrappers were {saved} and are {here}"
    chosen = _unknown_layers([(None, _wrapper_state(layer)) for layer in wrappers], holder)
    if chosen != [i for i, _ in state.get("attributes", {"layers": []})["layers"]]:
        return "its attributes were not saved" if "attributes" not in state else "get_state and set_state are new here"
    return "" if ("state" in state) == (holder is not None) else "it has no get_state and set_state any more"


def is_well_known(env: Any) -> bool:
    """Return whether it is known without a test that an env can be saved, as envs of Gymnasium and Atari can."""
    wrappers, holder = _split(env)
    unknown = [layer for layer in wrappers if _wrapper_state(layer) is None]
    is_known = holder is not None or type([*_layers(env)][-1]).__module__.startswith(("gymnasium.envs.", "ale_py."))
    return is_known and not unknown


def continues(env: Any, state: Mapping[str, Any]) -> bool:
    """Return whether an env may continue where the env of a state stood; otherwise it restarts its episode."""
    return not find_obstacle(env, state)


def set_env_state(env: Any, state: Mapping[str, Any]) -> str:
    """Set an env that was just reset to a state that it may continue from; see `find_obstacle`.

    Returns:
        Why it cannot continue, if only its attributes after a reset show it; else `""`.
    """
    set_surroundings(env, state)
    if "attributes" in state:
        try:
            load_attributes([*_layers(env)], state["attributes"])
        except ObstacleError as error:
            return str(error)
    if "state" in state:
        _, holder = _split(env)
        assert holder is not None
        holder.set_state(copy_nested(state["state"]))
    set_surroundings(env, state)  # `set_state` may have reset the env, or drawn numbers
    return ""


def set_surroundings(env: Any, state: Mapping[str, Any]) -> None:
    """Set what an env keeps when it restarts its episode: its generator, and the state of known wrappers."""
    wrappers, _ = _split(env)
    if [name for name, _ in state["wrappers"]] == [type(layer).__name__ for layer in wrappers]:
        for layer, (_, values) in zip(wrappers, state["wrappers"], strict=True):
            _set_attributes(layer, values or {})
    generator = getattr(env.unwrapped, "np_random", None) if state["np_random"] is not None else None
    if isinstance(generator, np.random.Generator):
        set_rng(generator, state["np_random"])


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
        if callable(getattr(type(layer), "get_state", None)) and callable(getattr(type(layer), "set_state", None)):
            return outside, layer
        outside.append(layer)
    return outside[:-1], None


def _wrapper_state(layer: Any) -> dict[str, Any] | None:
    """Return the state of a wrapper, or `None` if the wrapper is not known."""
    is_known = isinstance(layer, OWN_WRAPPERS) or type(layer).__module__.startswith("gymnasium.wrappers")
    if not is_known or type(layer).__name__ not in WRAPPERS:
        return None
    try:
        values = {name: operator.attrgetter(name)(layer) for name in WRAPPERS[type(layer).__name__]}
    except AttributeError:  # another version of Gymnasium
        return None
    return {name: copy_nested(list(value) if isinstance(value, deque) else value) for name, value in values.items()}


def _set_attributes(layer: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        *path, last = name.split(".")
        owner = operator.attrgetter(".".join(path))(layer) if path else layer
        old, value = getattr(owner, last), copy_nested(value)
        setattr(owner, last, deque(value, old.maxlen) if isinstance(old, deque) else value)
