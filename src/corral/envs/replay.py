"""Episodes that continue in a new env: what is kept of them, and how a new env plays them again.

Nothing is read out of an env but its generators. When an episode begins, the states of the generators `np_random` are
noted, with the arguments of the reset, and what known parts keep over episodes: running statistics of Gymnasium's
wrappers, and the generator of ALE. A new env that is given these, is reset with the same arguments and takes the same
actions stands where the old one stood. The observation that it then returns, and its rewards, tell whether it does.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from corral.core.plain import is_plain
from corral.core.seeding import check_bits, get_rng
from corral.core.tree import Tree, copy_nested, leaves, map_tree
from corral.envs.episode_resets import EpisodeResets
from corral.envs.seated_env import SeatedEnv
from corral.envs.step_timeout import limited
from corral.envs.tasks import has_tasks, set_task, task_of
from corral.errors import EnvTimeoutError

MAX_STEPS = 10_000
"""Limit of the steps of an episode that is played again. A longer one begins again, and its actions are not kept."""

LIMIT_S = 60.0
"""Seconds in which the sub-envs of one runner play their episodes again, the sub-envs in processes at the same time."""

_OVERDUE = "the episodes of its runner could not be played again in time"
_STATISTICS = ("mean", "var", "count")
OVER_EPISODES: dict[str, tuple[str, ...]] = {
    "NormalizeObservation": (*(f"obs_rms.{name}" for name in _STATISTICS), "_update_running_mean"),
    "NormalizeReward": (
        *(f"return_rms.{name}" for name in _STATISTICS),
        "discounted_reward",
        "_update_running_mean",
    ),
    "RecordEpisodeStatistics": ("episode_count", "time_queue", "return_queue", "length_queue"),
}
"""Attributes that Gymnasium's wrappers keep over resets, by the wrapper's name."""

Start = dict[str, Any]
"""How an episode began: what `keep` returns before its reset, and `seed`, `options` and `task` of the reset."""


# What is kept.


def layers_of(env: Any) -> list[Any]:
    """Return an env, its wrappers and the envs inside it, from the outermost to the innermost, each once."""
    found: list[Any] = []
    waiting = [env]
    while waiting:
        layer = waiting.pop(0)
        if any(layer is one for one in found):
            continue
        found.append(layer)
        inside = getattr(layer, "__dict__", {})
        several = inside.get("envs")
        parts = [inside.get("env"), inside.get("aec_env"), *(several if isinstance(several, (list, tuple)) else ())]
        waiting = [*(part for part in parts if callable(getattr(type(part), "step", None))), *waiting]
    return found


def _holders(layers: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the attributes of each env that may have a generator, and the name of the generator in them."""
    # The property `np_random` of Gymnasium would make a generator where there is none.
    return [
        (vars(layer), "_np_random" if isinstance(layer, (gym.Env, VectorEnv)) else "np_random")
        for layer in layers
        if hasattr(layer, "__dict__") and not isinstance(layer, (gym.Wrapper, VectorWrapper))
    ]


def _lasting(layers: list[Any]) -> list[tuple[str, Any]]:
    """Return names and wrappers of those that keep something over episodes, which is known."""
    named = [(type(layer).__name__, layer) for layer in layers]
    return [
        (name, layer)
        for name, layer in named
        if name in OVER_EPISODES and type(layer).__module__.startswith("gymnasium.wrappers")
    ]


def _games(layers: list[Any]) -> list[Any]:
    """Return the emulators of Atari games, whose generator is their own; the one of a vector env gives no state."""
    games = [getattr(layer, "__dict__", {}).get("ale") for layer in layers]
    return [
        game for game in games if type(game).__module__.partition(".")[0] == "ale_py" and hasattr(game, "cloneState")
    ]


def keep(env: Any) -> dict[str, Any]:
    """Return what an env keeps over its resets, where it is known, as plain data.

    Returns:
        `generators`, states of the generators `np_random`, `None` where there is none yet; `wrappers`, pairs of a name
        and the values of its attributes; and `games`, states of the emulators of Atari.
    """
    layers = layers_of(env)
    return {
        "generators": [
            get_rng(found) if isinstance(found := attributes.get(name), np.random.Generator) else None
            for attributes, name in _holders(layers)
        ],
        "wrappers": [[name, read_attributes(layer, OVER_EPISODES[name])] for name, layer in _lasting(layers)],
        "games": [game.cloneState(include_rng=True).serialize() for game in _games(layers)],
    }


def check_kept(kept: Mapping[str, Any]) -> None:
    """Check what `keep` returned, without an env; raise what the damaged part raises."""
    for state in kept["generators"]:
        if state is not None:
            check_bits(state)
    for name, values in kept["wrappers"]:
        if values.keys() != set(OVER_EPISODES[name]):
            raise KeyError(f"the state of the wrapper {name} has {sorted(values)}")
    if not all(isinstance(game, bytes) for game in kept["games"]):
        raise TypeError("the state of a game of Atari is not bytes")


def set_kept(env: Any, kept: Mapping[str, Any], *, with_games: bool = True) -> None:
    """Set what `keep` returned in another env; parts that this env does not have are left out.

    Args:
        env: The env, which has been reset.
        kept: What `keep` returned.
        with_games: Whether to set the emulators too, which are in the middle of an episode then.
    """
    layers = layers_of(env)
    for (attributes, name), state in zip(_holders(layers), kept["generators"], strict=False):
        if state is not None:
            _set_generator(attributes, name, state)
    saved = [(name, values) for name, values in kept["wrappers"]]
    for name, layer in _lasting(layers):
        place = next((i for i, (other, _) in enumerate(saved) if other == name), None)
        if place is not None:
            write_attributes(layer, saved.pop(place)[1])
    if with_games:
        for game, state in zip(_games(layers), kept["games"], strict=False):
            import ale_py  # the env has imported it

            game.restoreState(ale_py.ALEState(state))


def _set_generator(attributes: dict[str, Any], name: str, state: Mapping[str, Any]) -> None:
    """Set a generator in place, because other objects of the env may have it too; one of another kind is replaced."""
    here = attributes.get(name)
    if not isinstance(here, np.random.Generator) or type(here.bit_generator).__name__ != state["bit_generator"]:
        here = attributes[name] = np.random.Generator(getattr(np.random, state["bit_generator"])(0))
    bits: Any = here.bit_generator
    bits.state = state


def read_attributes(layer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return copies of attributes by name, which may be a path; queues are lists."""
    values = {name: operator.attrgetter(name)(layer) for name in names}
    return {name: copy_nested(list(value) if isinstance(value, deque) else value) for name, value in values.items()}


def write_attributes(layer: Any, values: Mapping[str, Any]) -> None:
    """Set attributes to what `read_attributes` returned; queues keep their own lengths."""
    for name, value in values.items():
        *path, last = name.split(".")
        owner = operator.attrgetter(".".join(path))(layer) if path else layer
        old, value = getattr(owner, last), copy_nested(value)
        setattr(owner, last, deque(value, old.maxlen) if isinstance(old, deque) else value)


def note_of(env: Any) -> Callable[[], Start]:
    """Return a function that notes how an episode begins; it is called before each reset."""
    layers = layers_of(env)
    holders = _holders(layers)
    if _lasting(layers) or _games(layers) or has_tasks(env):
        return lambda: {**keep(env), "task": copy_nested(task_of(env))}
    # Resets may be frequent, so that nothing is looked up here, and no function called.
    return lambda: {
        "generators": [
            found.bit_generator.state if isinstance(found := attributes.get(name), np.random.Generator) else None
            for attributes, name in holders
        ],
        "wrappers": [],
        "games": [],
        "task": None,
    }


def as_begun(env: Any, start: Start | None) -> tuple[Start | None, str]:
    """Return how the episode of an env began, with the arguments that its wrapper chose, or why it is not known."""
    if start is None:
        return None, "it was not reset by its vector env"
    start = {"seed": None, "options": None, **start}
    if isinstance(env, EpisodeResets) and env.chosen is not None:
        chosen = {"seed": env.chosen.seed, "options": env.chosen.options, "task": env.chosen.task}
        start |= {name: value for name, value in chosen.items() if value is not None}
    if start["options"] is not None:
        start["options"] = dict(start["options"])
    for name in ("options", "task"):
        if not is_plain(start[name]):
            return None, f"a checkpoint cannot hold the {name} of its reset, {start[name]!r:.80}"
    return start, ""


def check_start(start: Mapping[str, Any]) -> None:
    """Check how an episode began, without an env; raise what the damaged part raises."""
    check_kept(start)
    if not isinstance(start["seed"], int | None) or not isinstance(start["options"], dict | None):
        raise TypeError(f"the reset of an episode has seed {start['seed']!r:.80} and options {start['options']!r:.80}")
    _ = start["task"]


# A replay.


def replay_episode(env: Any, start: Mapping[str, Any], replay: Mapping[str, Any], deadline_s: float) -> str:
    """Let a new env play an episode again, and return why it does not stand where the old env stood, or `""`.

    Args:
        env: The env.
        start: How the episode began; see `as_begun`.
        replay: `actions`, a tree of `[K, ...]` in the units of the env; `obs`, the observation that the last one led
            to, as modules receive it, or with several agents the observations of the seats that act next, by block and
            place; `return`, the sum of the rewards; and `ended`, whether the last action ended the episode, so that the
            next step only resets the env.
        deadline_s: Clock reading (`time.monotonic`) at which it must be over.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return _OVERDUE
    try:
        with limited(left_s, "the limit of episodes that are played again"):
            return _replay(env.env if isinstance(env, EpisodeResets) else env, start, replay, deadline_s)
    except EnvTimeoutError:
        return _OVERDUE
    except Exception as error:
        return f"it raised {type(error).__name__} when its episode was played again: {error}"


def _replay(env: Any, start: Mapping[str, Any], replay: Mapping[str, Any], deadline_s: float) -> str:
    options = start["options"]
    if any(state is not None for state in start["generators"]) or start["games"]:
        set_task(env, copy_nested(start["task"]))
        env.reset(seed=0, options=copy_nested(options))  # makes the generators, which other parts of the env may share
    set_kept(env, start)
    set_task(env, copy_nested(start["task"]))
    obs, _ = env.reset(seed=start["seed"], options=copy_nested(options))
    actions, ended = replay["actions"], False
    total, size = 0.0, 0.0  # sums of the rewards, and of what they are without sign
    num_steps = len(leaves(actions)[0])
    for t in range(num_steps):
        if ended:
            return "its episode ended earlier when it was played again"
        if time.monotonic() > deadline_s:
            return _OVERDUE
        obs, reward, terminated, truncated, _ = env.step(map_tree(lambda leaf, t=t: leaf[t], actions))
        total, size = total + float(reward), size + abs(float(reward))
        ended = bool(terminated or truncated)
    if ended and not replay["ended"]:
        return "its episode ended earlier when it was played again"
    if not _is_same(env, obs, replay["obs"], replay["ended"]):
        return "the steps of its episode led to another observation when they were played again"
    # Rollouts add rewards in another order; of an episode that ended nothing continues.
    if not replay["ended"] and abs(total - replay["return"]) > 1e-5 * size:
        return "the steps of its episode gave other rewards when they were played again"
    return ""


def _is_same(env: Any, obs: Any, expected: Any, ended: bool) -> bool:
    seated = next((layer for layer in layers_of(env) if isinstance(layer, SeatedEnv)), None)
    if seated is None:
        return all(_equal_bits(*pair) for pair in _pairs(expected, obs))
    if ended:  # nobody acts on the observations
        return True
    starts = {block.name: block.start for block in seated.seats.blocks}
    acting = {starts[block] + place for block, place, _ in expected}
    if acting != set(np.flatnonzero(seated.acting).tolist()):
        return False
    return all(
        _equal_bits(leaf, here[place])
        for block, place, rows in expected
        for leaf, here in _pairs(rows, obs["obs"][block])
    )


def _pairs(expected: Tree, obs: Tree) -> Iterator[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    map_tree(lambda leaf, here: pairs.append((leaf, here)), expected, obs)
    yield from pairs


def _equal_bits(expected: Any, found: Any) -> bool:
    """Return whether an observation is the expected one to the bit, in the dtype that modules receive."""
    expected = np.asarray(expected)
    with np.errstate(all="ignore"):
        here = np.asarray(found).astype(expected.dtype)
    return bool(here.shape == expected.shape and here.tobytes() == expected.tobytes())
