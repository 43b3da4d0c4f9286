"""The keys of RLlib's results that Corral's do not have, also of the older stack."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

_EPISODES = {
    "episode_reward_mean": "episode_return_mean",
    "episode_reward_min": "episode_return_min",
    "episode_reward_max": "episode_return_max",
    "episode_len_mean": "episode_len_mean",
}


def add_rllib_keys(result: dict[str, Any], config: Any = None) -> dict[str, Any]:
    """Add RLlib's keys to a result of Corral, where they are not there yet, and return it.

    Args:
        result: The result; changed.
        config: RLlib's config, for `result["config"]`.
    """
    now = time.time()
    runners = result.get("env_runners") or {}
    more: dict[str, Any] = {
        "done": False,
        "timestamp": int(now),
        "date": datetime.datetime.fromtimestamp(now).strftime("%Y-%m-%d_%H-%M-%S"),
        "pid": os.getpid(),
        "hostname": platform.node(),
        "node_ip": "127.0.0.1",
        "trial_id": "default",
        "iterations_since_restore": result.get("training_iteration", 0),
        "time_since_restore": result.get("time_total_s", 0.0),
        "num_training_step_calls_per_iteration": 1,
        "perf": {},
        "timesteps_total": result.get("num_env_steps_sampled_lifetime", 0),
        "agent_timesteps_total": result.get("num_env_steps_sampled_lifetime", 0),
        "num_env_steps_sampled": result.get("num_env_steps_sampled_lifetime", 0),
        "episodes_total": runners.get("num_episodes_lifetime", 0),
        "episodes_this_iter": runners.get("num_episodes", 0),
        "custom_metrics": runners.get("custom_metrics", {}),
        "sampler_results": runners,
        "env_runner_group": {},
        "info": {"learner": _learner_stats(result.get("learners") or {})},
    }
    more |= _old_episode_keys(runners)
    for name, value in more.items():
        result.setdefault(name, value)
    if config is not None:
        result["config"] = config.to_dict()
    for numbers in (result.get("learners") or {}).values():
        if isinstance(numbers, dict) and "mean_kl" in numbers:
            numbers.setdefault("mean_kl_loss", numbers["mean_kl"])
    evaluation = result.get("evaluation")
    if isinstance(evaluation, dict):
        for name, value in _old_episode_keys(evaluation.get("env_runners") or {}).items():
            evaluation.setdefault(name, value)
    return result


def _old_episode_keys(runners: dict[str, Any]) -> dict[str, Any]:
    return {old: runners[new] for old, new in _EPISODES.items() if new in runners}


def _learner_stats(learners: dict[str, Any]) -> dict[str, Any]:
    return {name: {"learner_stats": numbers} for name, numbers in learners.items() if isinstance(numbers, dict)}


def add_missing(result: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the values of nested dicts to a result, where it has none of this name."""
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), dict):
            add_missing(result[name], value)
        else:
            result.setdefault(name, value)
