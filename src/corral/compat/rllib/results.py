"""The keys of RLlib's results that Corral's do not have, also of the older stack."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

from corral.compat.rllib.result_names import add_names_of_learners, add_names_of_runners, other_names
from corral.core.metrics.result import EARLY_MEANS

_EPISODES = {
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "episode_len_mean": "episode_len_mean",
}


def add_rllib_keys(result: dict[str, Any], config: Any = None, algorithm: Any = None) -> dict[str, Any]:
    """Add RLlib's keys to a result of Corral, where they are not there yet, and return it.

    Args:
        result: The result; changed.
        config: RLlib's config, for `result["config"]`.
        algorithm: Algorithm of Corral, for the returns and lengths of the latest episodes in `result["hist_stats"]`.
    """
    now = time.time()
    iterations, seconds = (0, 0.0) if algorithm is None else algorithm.view.restored_at
    if algorithm is not None and not algorithm.config.samples:
        result["num_env_steps_sampled_lifetime"] = _steps_as_rllib_counts(algorithm)
    runners = result.get("env_runners") or {}
    add_names_of_runners(runners)
    add_names_of_learners(result.get("learners") or {}, algorithm, (result.get("runner_group") or {}).get("lag_mean"))
    episodes = _latest_episodes(algorithm)
    more: dict[str, Any] = {
        "done": False,
        "timestamp": int(now),
        "date": datetime.datetime.fromtimestamp(now).strftime("%Y-%m-%d_%H-%M-%S"),
        "pid": os.getpid(),
        "hostname": platform.node(),
        "node_ip": "127.0.0.1",
        "trial_id": "default",
        "iterations_since_restore": result.get("training_iteration", 0) - iterations,
        "time_since_restore": result.get("time_total_s", 0.0) - seconds,
        "num_training_step_calls_per_iteration": 1,
        "perf": {},
        "timesteps_total": result.get("num_env_steps_sampled_lifetime", 0),
        "agent_timesteps_total": sum((runners.get("num_agent_steps_sampled_lifetime") or {}).values()),
        "num_env_steps_sampled": result.get("num_env_steps_sampled_lifetime", 0),
        "episodes_total": runners.get("num_episodes_lifetime", 0),
        "sampler_results": {**_old_episode_keys(runners, episodes), **runners},
        "env_runner_group": {},
        "info": {"learner": _learner_stats(result.get("learners") or {})},
    }
    more |= _old_episode_keys(runners, episodes)
    for name, value in more.items():
        result.setdefault(name, value)
    if early := result.get(EARLY_MEANS):
        result[EARLY_MEANS] = list(dict.fromkeys([*early, *other_names(result, early)]))
    if config is not None:
        result["config"] = config.to_dict()
    evaluation = result.get("evaluation")
    if isinstance(evaluation, dict):
        played = evaluation.get("env_runners") or {}
        add_names_of_runners(played)
        old = _old_episode_keys(played, {old: played.get(new, []) for old, new in _PLAYED.items()})
        for name, value in {**old, "sampler_results": old}.items():
            evaluation.setdefault(name, value)
    return result


def _steps_as_rllib_counts(algorithm: Any) -> int:
    """Return the steps that RLlib counts as sampled: one batch in each iteration, whatever the number of updates."""
    steps: int = algorithm.num_env_steps_sampled_lifetime
    return steps // int(algorithm.recorded.num_updates_per_iteration)


_KINDS = ("mean", "min", "max")
_PLAYED = {"episode_reward": "episode_returns", "episode_lengths": "episode_lens"}


def _latest_episodes(algorithm: Any) -> dict[str, list[float]]:
    """Return the returns and lengths of the episodes over which the means are taken."""
    if algorithm is None:
        return {}
    keys = {"episode_reward": "episode_return_mean", "episode_lengths": "episode_len_mean"}
    return {old: algorithm.metrics.peek_values(("env_runners", new)) for old, new in keys.items()}


def _old_episode_keys(runners: dict[str, Any], episodes: dict[str, list[float]]) -> dict[str, Any]:
    """Return what the older stack reports of episodes, at the top of a result and of its `evaluation`."""
    return {
        **{old: runners[new] for old, new in _EPISODES.items() if new in runners},
        **{f"policy_reward_{kind}": runners.get(f"module_episode_return_{kind}", {}) for kind in _KINDS},
        "episodes_this_iter": runners.get("num_episodes", 0),
        "custom_metrics": runners.get("custom_metrics", {}),
        "hist_stats": {**episodes, **runners.get("hist_stats", {})},
    }


def _learner_stats(learners: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"learner_stats": numbers, "custom_metrics": numbers.get("custom_metrics", {})}
        for name, numbers in learners.items()
        if isinstance(numbers, dict)
    }


def add_missing(result: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the values of nested dicts to a result, where it has none of this name."""
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), dict):
            add_missing(result[name], value)
        else:
            result.setdefault(name, value)
