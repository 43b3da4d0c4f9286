"""The state of a runner's envs as plain data, from which the envs of another process continue."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.plain import is_plain, is_same
from corral.core.seeding import get_global_rngs, get_seeds, make_seeds
from corral.envs.async_vector import AsyncVectorEnv
from corral.envs.env_host import EnvHost, next_seed, set_rngs
from corral.envs.env_state import check_env_state, continue_env, find_obstacle, get_env_state
from corral.envs.replay import LIMIT_S
from corral.envs.sync_vector import SyncVectorEnv
from corral.errors import CheckpointError

log = logging.getLogger("corral")


def _env_states(host: EnvHost) -> list[dict[str, Any]]:
    starts = host.env.starts() if isinstance(host.env, (SyncVectorEnv, AsyncVectorEnv)) else [None]
    states = host._each(partial(_get_env_state, is_async=host.is_async), starts)
    problems = {state["obstacle"]: state.pop("traceback") for state in states if "traceback" in state}
    for obstacle, traceback in problems.items():
        log.warning(
            "env %r will begin its episode again when the run is restored: %s\n%s", host.name, obstacle, traceback
        )
    return states


def get_host_state(host: EnvHost) -> dict[str, Any]:
    """Return the state from which the envs continue, with the seeds that come next, as plain data.

    `envs` has a state for each sub-env, or one for a vector env of its own; `None` if no env was reset so far.
    """
    envs = None if host.is_broken or host._reset_seed is not None else host._restarting or _env_states(host)
    return {
        "seeds": get_seeds(host._seeds),
        "reset_seed": host._reset_seed,
        "num_rows": host.num_rows,
        "restarts": host.restarts.get_state(),
        **_plain_env_config(host),
        "tasks": _plain_tasks(host),
        "num_episodes": host.get_num_episodes(),
        "same_step": host.is_same_step,
        "envs": envs,
    }


def _plain_env_config(host: EnvHost) -> dict[str, Any]:
    """Return `env_config` if it was changed, and warn of changed settings that a checkpoint cannot hold.

    `built_env_config` is the value before the change, if a checkpoint can hold it.
    """
    changed, before = host.changed_settings, host._built_with["env_config"]
    lost = [name for name, value in changed.items() if name != "env_config" or not is_plain(value)]
    if lost:
        log.warning(
            "env %r: %s was changed in a runner to a value that a checkpoint cannot hold: a restored runner has "
            "the setting of the config.",
            host.name,
            ", ".join(lost),
        )
    if "env_config" not in changed or "env_config" in lost:
        return {"env_config": None}
    built = {"built_env_config": before} if is_plain(before) else {}
    return {"env_config": changed["env_config"], **built}


def _plain_tasks(host: EnvHost) -> list[Any] | None:
    tasks = host.get_tasks()
    if tasks is None or is_plain(tasks):
        return tasks
    log.warning(
        "env %r: get_task() returned %s, which a checkpoint cannot hold: a restored env has its first task again.",
        host.name,
        type(tasks[0]).__name__,
    )
    return None


def find_obstacles(host: EnvHost, state: Mapping[str, Any], num_envs: int) -> list[str]:
    """Return for each sub-env why it cannot continue where its env of a state stood; else it restarts.

    The reason is `""` where nothing is in the way. If one of them cannot continue, all of them restart.

    Args:
        host: The host of the envs.
        state: The state.
        num_envs: Number of sub-envs of the runner of the state.
    """
    envs = state["envs"]
    reason = ""
    if envs is None or host.is_broken:
        reason = "no env was saved"
    elif num_envs != host.num_envs:
        reason = f"{num_envs} sub-envs were saved, and here are {host.num_envs}"
    elif len(envs) != (host.num_envs if host.has_sub_envs else 1):
        reason = "the vectorization is another one"
    elif state["same_step"] != host.is_same_step:
        reason = "the autoreset mode is another one"
    return [reason] * host.num_envs if reason else _per_sub_env(host, host._each(find_obstacle, envs))


def _per_sub_env(host: EnvHost, reasons: list[str]) -> list[str]:
    return reasons if host.has_sub_envs else reasons * host.num_envs


def check_host_state(host: EnvHost, state: Mapping[str, Any]) -> None:
    """Check that a state is whole, without changing anything; raise what the damaged part raises."""
    make_seeds(state["seeds"]).spawn(1)
    copy.copy(host.restarts).set_state(state["restarts"])
    int(state["num_rows"] + (state["reset_seed"] or 0) + sum(state.get("num_episodes") or ()))
    if state["tasks"] is not None and not state["tasks"]:
        raise CheckpointError(f"env {host.name!r}: the list of tasks in the state is empty.")
    if not isinstance(state.get("env_config"), dict | None):
        raise CheckpointError(f"env {host.name!r}: env_config in the state is {state['env_config']!r:.80}.")
    for env in state["envs"] or ():
        check_env_state(env)


def set_host_state(
    host: EnvHost, state: Mapping[str, Any], resets_next: NDArray[np.bool_], replays: Sequence[Any]
) -> list[str]:
    """Continue from a state of `get_host_state`; return for each sub-env what is in the way, see `find_obstacles`.

    Envs that do not continue restart at the next reset, with their generators where they were.

    Args:
        host: The host of the envs.
        state: The state.
        resets_next: Bool, one for each sub-env of the state: those that the next step only resets.
        replays: For each sub-env of the state what it plays again; see `continue_env`.

    Raises:
        EnvError: An env raised an exception in `reset`.
        Exception: Exception of `set_state` of an env.
    """
    host.get_tasks()
    env_config = find_env_config(state, host._built_with["env_config"])
    kept = {name: value for name, value in host.changed_settings.items() if name != "env_config"}
    if host.change_settings(kept if env_config is None else {**kept, "env_config": dict(env_config)}):
        host.make()
    obstacles = find_obstacles(host, state, len(resets_next))
    host.num_rows = int(state["num_rows"])
    host.restarts.set_state(state["restarts"])
    if state["tasks"] is not None:
        host.set_tasks(state["tasks"])
    host._seeds, host._reset_seed, host._restarting = make_seeds(state["seeds"]), None, None
    if state["envs"] is None:
        host._reset_seed = next_seed(host._seeds) if state["reset_seed"] is None else int(state["reset_seed"])
        obstacles = [""] * host.num_envs if state["reset_seed"] is not None else obstacles
    elif any(obstacles):
        host._restarting = list(state["envs"])
    else:
        obstacles = _continue(host, state, resets_next, replays)
    host.set_num_episodes(state.get("num_episodes"))
    return obstacles


def _continue(
    host: EnvHost, state: Mapping[str, Any], resets_next: NDArray[np.bool_], replays: Sequence[Any]
) -> list[str]:
    """Let all envs continue, or prepare all of them to restart; return for each sub-env what is in the way."""
    limit_s = host._config.worker_timeout_s  # of the call in which a runner restores its state
    deadline_s = time.monotonic() + (min(LIMIT_S, limit_s / 2) if isinstance(limit_s, (int, float)) else LIMIT_S)
    if not host.steps_one_by_one:
        host._reset_seed = next_seed(host._seeds)
        host.reset()  # so that wrappers and processes are ready
    try:
        given = zip(state["envs"], replays, strict=False)
        each_env = [(*each, next_seed(host._seeds), deadline_s) for each in given]
        obstacles = host._each(partial(_continue_env, is_async=host.is_async), each_env)
    except Exception as error:
        if not host.is_broken:
            raise
        obstacles = [f"its process failed when its episode was played again: {error}"] * host.num_envs
        host.recover()
    host._seeds = make_seeds(state["seeds"])  # envs that continue draw no seed
    if any(obstacles):
        host._restarting = list(state["envs"])
    elif isinstance(host.env, (SyncVectorEnv, AsyncVectorEnv)):
        host.env.continue_from([env.get("start") for env in state["envs"]], resets_next & (not host.is_same_step))
    if host.plays_again or host._reset_fn is not None:  # the episodes have had the tasks of their resets
        host.set_tasks(host._tasks)
    return _per_sub_env(host, obstacles)


def find_env_config(state: Mapping[str, Any], built_with: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `env_config` that was changed in the runner of a state, or `None` to leave the setting as it is.

    Args:
        state: State of an `EnvHost`.
        built_with: The `env_config` of the config of now. If it is not the one with which the runner of the state was
            built, the user has chosen another one, which holds.
    """
    changed: Mapping[str, Any] | None = state.get("env_config")
    if changed is None or is_same(state.get("built_env_config", built_with), built_with):
        return changed
    log.warning(
        "env_config=%s replaces the value %s to which the run that is restored had changed it in its runners.",
        built_with,
        changed,
    )
    return None


# Functions that are called in the process of a sub-env, which may be this one.


def _get_env_state(env: Any, start: Any, *, is_async: bool) -> dict[str, Any]:
    state = get_env_state(env, start)
    return {**state, "rngs": get_global_rngs()} if is_async else state


def _continue_env(env: Any, given: tuple[Any, ...], *, is_async: bool) -> str:
    obstacle = continue_env(env, *given)
    if is_async:
        set_rngs(given[0])
    return obstacle
