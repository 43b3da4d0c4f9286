"""Numbers of a result under the names that they have on RLlib's new stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.core.ids import ALL_MODULES, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID

_LIFETIME = "_lifetime"


def add_names_of_runners(runners: dict[str, Any]) -> None:
    """Add numbers by agent and module, and names that were in use until 2.50, to the group `env_runners`.

    Args:
        runners: The group; changed.
    """
    if "agent_episode_return_mean" not in runners and "module_episode_return_mean" not in runners:
        _add_only_agent(runners)
    for kind in ("agent", "module"):
        if (returns := runners.get(f"{kind}_episode_return_mean")) is not None:
            runners.setdefault(f"{kind}_episode_returns_mean", returns)
    for kind in ("mean", "min", "max"):
        if (name := f"episode_return_{kind}") in runners:
            runners.setdefault(f"episode_reward_{kind}", runners[name])


def _add_only_agent(runners: dict[str, Any]) -> None:
    """Add what RLlib reports of the one agent and module of a single-agent env."""
    ids = {"agent": DEFAULT_AGENT_ID, "module": DEFAULT_MODULE_ID}
    for kind, identity in ids.items():
        if "episode_return_mean" in runners:
            runners[f"{kind}_episode_return_mean"] = {identity: runners["episode_return_mean"]}
        for end in ("", _LIFETIME):
            steps = runners.get(f"num_env_steps_sampled{end}")
            if steps is not None:
                runners.setdefault(f"num_{kind}_steps_sampled{end}", {identity: steps})


def add_names_of_learners(learners: Mapping[str, Any]) -> None:
    """Add names of losses and counts of modules to the group `learners`.

    Args:
        learners: The group, whose parts are changed.
    """
    modules = {name: part for name, part in learners.items() if name != ALL_MODULES and isinstance(part, dict)}
    for numbers in modules.values():
        if "mean_kl" in numbers:
            numbers.setdefault("mean_kl_loss", numbers["mean_kl"])
        if "qf_mean" in numbers and "total_loss" in numbers:  # the loss of a Q-network is the only one that it has
            numbers.setdefault("qf_loss", numbers["total_loss"])
    if len(modules) == 1:
        (numbers,) = modules.values()
        for end in ("", _LIFETIME):
            steps = (learners.get(ALL_MODULES) or {}).get(f"num_module_steps_trained{end}")
            if steps is not None:
                numbers.setdefault(f"num_module_steps_trained{end}", steps)
