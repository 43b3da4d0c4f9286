"""The whole state of a runner as plain data: what it needs to continue in another process as if nothing had happened.

The state from which a replacement of a failed runner continues is smaller, because it travels with every fragment; see
`EnvRunner.get_state`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.metrics.logger import check_metrics_state
from corral.core.plain import check_parts, check_plain, is_plain
from corral.core.seeding import (
    check_global_rngs,
    get_global_rngs,
    get_rng,
    get_seeds,
    id_prefix,
    runner_seeds,
    set_global_rngs,
)
from corral.core.tree import copy_nested
from corral.data.episodes.rollout import EpisodeCarry
from corral.envs.host_state import check_host_state, find_obstacles, get_host_state, set_host_state
from corral.errors import CheckpointError
from corral.exploration.state import check_exploration_state
from corral.runners.episode_events import EPISODE_EVENTS
from corral.runners.runner import EnvRunner, reserve_episode_metrics

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig

log = logging.getLogger("corral")

_NUMBERS = ("num_env_steps_sampled_lifetime", "num_env_steps_lost", "_timestep", "_last_num_rows", "_num_resets")
_PARTS = (
    *("numbers", "id_prefix", "env", "episodes", "actions", "weights_noise", "exploration", "metrics"),
    *("callbacks", "rngs"),
)
_CARRY = ("returns", "lengths", "counts")


def get_runner_state(runner: EnvRunner) -> dict[str, Any]:
    """Return the whole state of a runner without the weights, as copies of plain data.

    Raises:
        CheckpointError: A part of it is not plain data.
    """
    state = {
        "numbers": {name: getattr(runner, name) for name in _NUMBERS},
        "id_prefix": runner._id_prefix,
        "num_episodes_over": runner.num_episodes_over.tolist(),
        "env": get_host_state(runner.host),
        "episodes": None if runner._needs_reset else _get_episodes(runner),
        "actions": runner.actors.collect(lambda actor: actor.row_distribution.get_state()),
        "weights_noise": runner.actors.collect(lambda actor: actor.inference.get_noise()),
        "exploration": _get_explorations(runner),
        "metrics": runner.metrics.get_state(),
        "callbacks": runner.callbacks.get_state(),
        "rngs": get_global_rngs() if runner.has_own_process else None,
    }
    check_plain(state, f"runner {runner.worker_index}", CheckpointError)
    return state


def _get_explorations(runner: EnvRunner) -> Any:
    """Return the states of the explorations; if one raises or is not plain data, none, with a warning."""
    try:
        found = copy_nested(runner.actors.collect(lambda actor: actor.exploration.get_state()))
        check_plain(found, "get_state() of an exploration", CheckpointError)
    except Exception:
        log.warning("The checkpoint has no state of the exploration of runner %d.", runner.worker_index, exc_info=True)
        return {}
    return found


def make_runner_state(config: RunnerConfig, worker_index: int, num_restarts: int, known: Mapping[str, Any]) -> Any:
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

    def of_modules(part: Any) -> Any:
        return dict.fromkeys(config.module_ids, part) if config.is_multi_agent else part

    env = {"seeds": get_seeds(env_seeds), "reset_seed": None, "num_rows": 0, "envs": None}
    return {
        "numbers": {name: known.get(name, 0) for name in _NUMBERS},
        "id_prefix": id_prefix(id_seed),
        "num_episodes_over": known.get("num_episodes_over"),
        "env": {
            **env,
            "env_config": env_config if is_plain(env_config) else None,
            "tasks": tasks if is_plain(tasks) else None,
            "num_episodes": known.get("num_episodes"),
            "same_step": False,
            "restarts": {"num_restarts": 0, "latest": []},
        },
        "episodes": None,
        "actions": of_modules({"rng": get_rng(np.random.default_rng(noise_seed)), "noise": None}),
        "weights_noise": of_modules(None),
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
    for actor, part in runner.actors.each(state["exploration"]):
        check_exploration_state(actor.exploration, part)
    if not (isinstance(state["id_prefix"], str) and isinstance(state["callbacks"]["callbacks"], dict)):
        raise CheckpointError("the id_prefix or the callbacks of a runner are damaged.")
    int(state["callbacks"]["num_errors"])
    np.array(state.get("num_episodes_over") or [], np.int64)
    if state["rngs"] is not None:
        check_global_rngs(state["rngs"])
    for name in _NUMBERS:
        if type(state["numbers"][name]) is not int:
            raise CheckpointError(f"{name} of a runner is {state['numbers'][name]!r:.80}, and not an integer.")
    for actor, part in runner.actors.each(state["actions"]):
        actor.row_distribution.check_state(part)
    check_metrics_state(state["metrics"])
    check_host_state(runner.host, state["env"])
    episodes = state["episodes"]
    if episodes is not None and not any(find_obstacles(runner.host, state["env"], _count_envs(runner, state))):
        _check_episodes(runner, episodes)


def set_runner_state(runner: EnvRunner, state: Mapping[str, Any]) -> dict[str, Any]:
    """Let a runner continue from a state, and return which envs continue; the weights are sent separately.

    Returns:
        How many envs continue their episodes (`num_envs_continued`), how many restart (`num_envs_restarted`), and
        lists of their names, with what is in the way of each one that restarts (`continued`, `restarted`).

    Raises:
        Exception: What an env or a callback raised; a part of the state may be set then.
    """
    if runner.host.is_broken:
        runner.recover()
    episodes = state["episodes"]
    num_envs = _count_envs(runner, state)
    resetting = np.zeros(num_envs, np.bool_) if episodes is None else np.array(episodes["resetting"])
    replays = [None] * num_envs if episodes is None else runner.stepping.get_replays(episodes)
    obstacles = set_host_state(runner.host, state["env"], resetting, replays)
    for name, number in state["numbers"].items():
        setattr(runner, name, number)
    runner._id_prefix = state["id_prefix"]
    runner.set_num_episodes_over(state.get("num_episodes_over"))
    runner._needs_reset, runner.stepping.events = True, None
    if not any(obstacles) and episodes is not None:
        _set_episodes(runner, episodes)
    runner.metrics.set_state(state["metrics"])
    # The runner of the state may have had no logger of its own.
    reserve_episode_metrics(runner.metrics, runner.config.metrics_num_episodes_for_smoothing)
    runner.callbacks.set_state(state["callbacks"])
    for actor, part in runner.actors.each(state["weights_noise"]):
        actor.inference.set_noise(part)
    for actor, part in runner.actors.each(state["exploration"]):
        if part:
            actor.exploration.set_state(copy_nested(part))
    for actor, part in runner.actors.each(state["actions"]):
        actor.row_distribution.set_state(part)
    if runner.has_own_process and state["rngs"] is not None:
        set_global_rngs(state["rngs"])
    return _describe_envs(runner.worker_index, obstacles)


def _count_envs(runner: EnvRunner, state: Mapping[str, Any]) -> int:
    """Return the number of sub-envs of the runner of a state; where the state does not tell, the number of this one."""
    counts, episodes = state.get("num_episodes_over"), state["episodes"]
    if episodes is not None:
        return len(episodes["resetting"])
    return runner.num_envs if counts is None else len(counts)


def _describe_envs(worker_index: int, obstacles: list[str]) -> dict[str, Any]:
    """Return numbers and names of the sub-envs that continue and that restart; one of them lets all restart."""
    if any(obstacles):
        obstacles = [obstacle or "another sub-env of this runner cannot continue" for obstacle in obstacles]
    names, start = [], 0
    for obstacle, group in itertools.groupby(obstacles):
        stop = start + len(list(group))
        numbers = f"sub-env {start}" if stop == start + 1 else f"sub-envs {start} to {stop - 1}"
        names.append(f"runner {worker_index}, {numbers}{obstacle and ': '}{obstacle}")
        start = stop
    counts = (0, len(obstacles)) if any(obstacles) else (len(obstacles), 0)
    return {
        **dict(zip(("num_envs_continued", "num_envs_restarted"), counts, strict=True)),
        "continued": [] if any(obstacles) else names,
        "restarted": names if any(obstacles) else [],
    }


# Unfinished episodes.


def _get_episodes(runner: EnvRunner) -> dict[str, Any]:
    """Return the state of the episodes that the next rollout continues."""
    carry = runner._carry
    return {
        **runner.stepping.get_unfinished(),
        "resetting": runner._resets_next.copy(),
        **{name: getattr(carry, name).copy() for name in _CARRY},
        "ages_s": runner._last_time_s - carry.start_times_s,
        "id_prefix": carry.id_prefix,
        "events": None if runner.stepping.events is None else runner.stepping.events.get_state(),
    }


def _check_episodes(runner: EnvRunner, state: Mapping[str, Any]) -> None:
    for name, dtype in (("resetting", "bool"), ("returns", "float64"), ("lengths", "int64")):
        if state[name].shape != (runner.num_envs,) or state[name].dtype != dtype:
            raise CheckpointError(f"{name} of the episodes of a runner are {state[name].dtype}{state[name].shape}.")

    runner.stepping.check_unfinished(state)


def _set_episodes(runner: EnvRunner, state: Mapping[str, Any]) -> None:
    now = time.perf_counter()
    runner._needs_reset = False
    runner.stepping.set_unfinished(state)
    runner._resets_next = state["resetting"].copy()
    totals = {name: state[name].copy() for name in _CARRY}
    runner._carry = EpisodeCarry(**totals, start_times_s=now - state["ages_s"], id_prefix=state["id_prefix"])
    runner._last_time_s = now
    if state["events"] is not None and runner.callbacks.subscribed(*EPISODE_EVENTS):
        runner.stepping.events = events = runner.stepping.make_events(
            runner.callbacks, runner.metrics, runner.rl_module
        )
        events.set_state(state["events"], runner._carry, now)
