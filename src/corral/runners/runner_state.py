"""The whole state of a runner as plain data: what it needs to continue in another process as if nothing had happened.

The state from which a replacement of a failed runner continues is smaller, because it travels with every fragment; see
`EnvRunner.get_state`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.plain import check_parts, is_plain
from corral.core.seeding import (
    check_global_rngs,
    get_global_rngs,
    get_rng,
    get_seeds,
    id_prefix,
    runner_seeds,
    set_global_rngs,
)
from corral.core.tree import copy_nested, map_tree
from corral.episodes.infos import Infos
from corral.episodes.rollout import EpisodeCarry
from corral.errors import CheckpointError
from corral.exploration.state import check_exploration_state, keep_exploration
from corral.metrics.logger import check_metrics_state
from corral.runners.episode_events import EPISODE_EVENTS

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig
    from corral.runners.runner import EnvRunner

_NUMBERS = ("num_env_steps_sampled_lifetime", "num_env_steps_lost", "_timestep", "_last_num_rows", "_num_resets")
_PARTS = (
    *("numbers", "id_prefix", "env", "episodes", "actions", "weights_noise", "exploration", "metrics"),
    *("callbacks", "rngs"),
)
_CARRY = ("returns", "lengths", "counts")


def get_runner_state(runner: EnvRunner) -> dict[str, Any]:
    """Return the whole state of a runner without the weights, as copies of plain data.

    Raises:
        CheckpointError: An env or a callback returned a state that is not plain data.
    """
    return {
        "numbers": {name: getattr(runner, name) for name in _NUMBERS},
        "id_prefix": runner._id_prefix,
        "env": runner.host.get_state(),
        "episodes": None if runner._needs_reset else _get_episodes(runner),
        "actions": runner._row_distribution.get_state(),
        "weights_noise": runner.inference.get_noise(),
        "exploration": copy_nested(runner.exploration.get_state()),
        "metrics": runner.metrics.get_state(),
        "callbacks": runner._callbacks.get_state(),
        "rngs": get_global_rngs() if runner.own_process else None,
    }


def make_runner_state(config: AlgorithmConfig, worker_index: int, num_restarts: int, known: Mapping[str, Any]) -> Any:
    """Return the state of a runner that could not tell its own: it continues as its replacement would.

    Args:
        config: Config of the runner.
        worker_index: Index of the runner.
        num_restarts: How many runners the replacement replaces.
        known: State from which the replacement continues; see `EnvRunner.get_state`.
    """
    env_seeds, noise_seed, id_seed, _ = runner_seeds(config.seed or 0, worker_index, num_restarts, config.in_evaluation)
    exploration = known.get("exploration", {})
    tasks, env_config = known.get("tasks"), known.get("environment", {}).get("env_config")
    env = {"seeds": get_seeds(env_seeds), "reset_seed": None, "num_rows": 0, "envs": None}
    return {
        "numbers": {name: known.get(name, 0) for name in _NUMBERS},
        "id_prefix": id_prefix(id_seed),
        "env": {
            **env,
            "env_config": env_config if is_plain(env_config) else None,
            "tasks": tasks if is_plain(tasks) else None,
            "num_episodes": known.get("num_episodes"),
            "same_step": False,
            "restarts": {"num_restarts": 0, "latest": []},
        },
        "episodes": None,
        "actions": {"rng": get_rng(np.random.default_rng(noise_seed)), "noise": None},
        "weights_noise": None,
        "exploration": exploration if is_plain(exploration) else {},
        "metrics": {"period_s": 0.0, "keys": []},
        "callbacks": {"num_errors": 0, "callbacks": {}},
        "rngs": None,
    }


def check_runner_state(runner: EnvRunner, state: Mapping[str, Any]) -> None:
    """Check that a runner can take a state, without changing anything.

    Raises:
        CheckpointError: It cannot.
        Exception: The state is damaged: what the first use of the damaged part raised.
    """
    check_parts(state, _PARTS, "a runner", CheckpointError)
    check_exploration_state(runner.exploration, state["exploration"])
    if not (isinstance(state["id_prefix"], str) and isinstance(state["callbacks"]["callbacks"], dict)):
        raise CheckpointError("the id_prefix or the callbacks of a runner are damaged.")
    int(state["callbacks"]["num_errors"])
    if state["rngs"] is not None:
        check_global_rngs(state["rngs"])
    for name in _NUMBERS:
        if type(state["numbers"][name]) is not int:
            raise CheckpointError(f"{name} of a runner is {state['numbers'][name]!r:.80}, and not an integer.")
    runner._row_distribution.check_state(state["actions"])
    check_metrics_state(state["metrics"])
    runner.host.check_state(state["env"])
    if not runner.host.is_broken and runner.host.continues(state["env"]) and state["episodes"] is not None:
        _check_episodes(runner, state["episodes"])


def set_runner_state(runner: EnvRunner, state: Mapping[str, Any]) -> dict[str, int]:
    """Let a runner continue from a state that `check_runner_state` accepted; the weights come on their own way.

    Returns:
        How many envs continue their episodes (`num_envs_continued`), and how many restart (`num_envs_restarted`).

    Raises:
        Exception: What an env or a callback raised. `undo_runner_state` then returns to the state before.
    """
    runner._undo = _make_undo(runner)
    if runner.host.is_broken:
        runner.recover()
    now_resetting = runner._resetting
    episodes, num_envs = state["episodes"], runner.num_envs
    resetting = np.zeros(num_envs, np.bool_) if episodes is None else np.array(episodes["resetting"])
    are_continued = runner.host.set_state(state["env"], (resetting, now_resetting))
    for name, number in state["numbers"].items():
        setattr(runner, name, number)
    runner._id_prefix = state["id_prefix"]
    runner._needs_reset, runner._events = True, None
    if are_continued and episodes is not None:
        _set_episodes(runner, episodes)
    runner.metrics.set_state(state["metrics"])
    runner._callbacks.set_state(state["callbacks"])
    runner.inference.set_noise(state["weights_noise"])
    if state["exploration"]:
        runner.exploration.set_state(copy_nested(state["exploration"]))
    runner._row_distribution.set_state(state["actions"])
    if runner.own_process and state["rngs"] is not None:
        set_global_rngs(state["rngs"])
    return {"num_envs_continued": num_envs * are_continued, "num_envs_restarted": num_envs * (not are_continued)}


def undo_runner_state(runner: EnvRunner) -> None:
    """Return to the state before the last `set_runner_state`, if there was one since the last call."""
    undo, runner._undo = runner._undo, lambda: None
    undo()


def _make_undo(runner: EnvRunner) -> Callable[[], None]:
    """Return a function that undoes `set_runner_state`, which replaces attributes and changes no object of before."""
    attributes = [(part, dict(vars(part))) for part in (runner, runner.metrics)]
    undo_exploration, actions = keep_exploration(runner.exploration), runner._row_distribution.get_state()
    callbacks, noise, rngs = runner._callbacks.get_state(), runner.inference.get_noise(), get_global_rngs()

    def undo() -> None:
        runner.host.undo()
        for part, before in attributes:
            vars(part).update(before)
        runner._callbacks.set_state(callbacks)
        runner.inference.set_noise(noise)
        undo_exploration()
        runner._row_distribution.set_state(actions)
        if runner.own_process:
            set_global_rngs(rngs)

    return undo


# Unfinished episodes.


def _get_episodes(runner: EnvRunner) -> dict[str, Any]:
    """Return the state of the episodes that the next rollout continues."""
    carry, infos = runner._carry, runner._last_infos
    known_infos = None if infos is None else [infos.of_lanes, infos.final]
    return {
        "obs": map_tree(np.copy, runner._last_obs),
        "resetting": runner._resetting.copy(),
        "begins": runner._begins.copy(),
        **{name: getattr(carry, name).copy() for name in _CARRY},
        "ages_s": runner._last_time_s - carry.start_times_s,
        "id_prefix": carry.id_prefix,
        "infos": copy_nested(known_infos) if is_plain(known_infos) else None,
        "events": None if runner._events is None else runner._events.get_state(),
    }


def _check_episodes(runner: EnvRunner, state: Mapping[str, Any]) -> None:
    for name, dtype in (("resetting", "bool"), ("begins", "bool"), ("returns", "float64"), ("lengths", "int64")):
        if state[name].shape != (runner.num_envs,) or state[name].dtype != dtype:
            raise CheckpointError(f"{name} of the episodes of a runner are {state[name].dtype}{state[name].shape}.")

    def check(space: Any, leaf: Any) -> None:
        if leaf.shape != (runner.num_envs, *space.shape) or leaf.dtype != space.dtype:
            raise CheckpointError(f"the last observations of a runner are {leaf.dtype}{leaf.shape}.")

    map_tree(check, runner.host.space, state["obs"])


def _set_episodes(runner: EnvRunner, state: Mapping[str, Any]) -> None:
    now = time.perf_counter()
    runner._needs_reset = False
    runner._last_obs = map_tree(np.copy, state["obs"])
    runner._resetting, runner._begins = state["resetting"].copy(), state["begins"].copy()
    totals = {name: state[name].copy() for name in _CARRY}
    runner._carry = EpisodeCarry(**totals, start_times_s=now - state["ages_s"], id_prefix=state["id_prefix"])
    runner._last_time_s = now
    runner._last_infos = None if state["infos"] is None else Infos(*copy_nested(state["infos"]))
    if state["events"] is not None and runner._callbacks.subscribed(*EPISODE_EVENTS):
        runner._events = runner.make_events()
        runner._events.set_state(state["events"], runner._carry, now)
