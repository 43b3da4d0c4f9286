"""What a policy of a multi-agent config is made of, in RLlib's spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from corral.compat.rllib.constants import INPUT_ENV_SPACES
from corral.compat.rllib.helpers import NotProvided
from corral.envs.multi_agent_env import possible_agents


@dataclass
class PolicySpec:
    """Spaces and settings of one policy; `None` means that they are found from the env and the config.

    Attributes:
        policy_class: Policy class of the old API, which is refused; use `rl_module_spec`.
        observation_space: Space of the observations of the policy's agents.
        action_space: Space of the actions of the policy's agents.
        config: Settings of the algorithm that differ for this policy.
    """

    policy_class: Any = None
    observation_space: Any = None
    action_space: Any = None
    config: Any = None


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse values of `multi_agent` of another type, with RLlib's type of error.

    Raises:
        ValueError: Names the setting, and what it takes.
    """
    settings = {name: value for name, value in settings.items() if value is not NotProvided}
    policies = settings.get("policies")
    if policies is not None and not isinstance(policies, (Mapping, set, frozenset, list, tuple)):
        raise ValueError(
            f"multi_agent: policies={policies!r:.60} must be a dict by id of PolicySpecs or None, or a list of ids."
        )
    for module_id, spec in policies.items() if isinstance(policies, Mapping) else ():
        is_tuple = isinstance(spec, (list, tuple)) and len(spec) == 4
        if not (spec is None or is_tuple or isinstance(spec, Mapping) or hasattr(spec, "policy_class")):
            raise ValueError(
                f"multi_agent: policies: {module_id!r} is {spec!r:.60}, and must be a PolicySpec, None, or a tuple of "
                "class, observation space, action space and config."
            )
        own = getattr(spec, "config", None)
        if own is not None and not isinstance(own, Mapping) and not hasattr(own, "to_dict"):
            raise ValueError(f"multi_agent: policies: the config of {module_id!r} is {own!r:.60}, and must be a dict.")
    if (unit := settings.get("count_steps_by")) not in (None, "env_steps", "agent_steps"):
        raise ValueError(f"multi_agent: count_steps_by={unit!r:.60} must be 'env_steps' or 'agent_steps'.")
    mapping = settings.get("policy_mapping_fn")
    if mapping is not None and not callable(mapping):
        raise ValueError(f"multi_agent: policy_mapping_fn={mapping!r:.60} must be a function of an agent's id.")
    chosen = settings.get("policies_to_train")
    if isinstance(chosen, str) or not (chosen is None or callable(chosen) or hasattr(chosen, "__contains__")):
        raise ValueError(
            f"multi_agent: policies_to_train={chosen!r:.60} must be a list of ids, or a function of an id."
        )


def full_specs(
    policies: Any,
    mapping: Callable[..., str] | None,
    env: Any,
    spaces: Mapping[str, Any],
    policy_class: Any,
) -> dict[str, PolicySpec]:
    """Return a spec with spaces for each policy; see `AlgorithmConfig.get_multi_agent_setup`.

    Raises:
        ValueError: A policy has no spaces, or different ones for its agents.
    """
    given = policies if isinstance(policies, Mapping) else dict.fromkeys(policies)
    found = {}
    for policy_id, each in given.items():
        spec = PolicySpec(*each) if isinstance(each, (tuple, list)) else each or PolicySpec()
        spec = replace(spec, policy_class=spec.policy_class or policy_class)
        for i, name in enumerate(("observation_space", "action_space")):
            if getattr(spec, name) is None:
                space = spaces[policy_id][i] if policy_id in spaces else _space_of(env, name, policy_id, mapping)
                space = space or (spaces[INPUT_ENV_SPACES][i] if INPUT_ENV_SPACES in spaces else None)
                if space is None:
                    raise ValueError(
                        f"get_multi_agent_setup: {name} of {policy_id!r} is not known: give env or spaces."
                    )
                spec = replace(spec, **{name: space})
        found[policy_id] = spec
    return found


def _space_of(env: Any, name: str, policy_id: str, mapping: Callable[..., str] | None) -> Any:
    """Return the space of an env, or of its agents that are mapped to a policy."""
    inner = getattr(env, "unwrapped", env)
    if not hasattr(inner, f"get_{name}"):
        return getattr(env, f"single_{name}", getattr(env, name, None))
    of_agents = {agent: getattr(inner, f"get_{name}")(agent) for agent in possible_agents(env)}
    different = list(of_agents.values())
    if any(space != different[0] for space in different) and mapping is not None:
        different = [space for agent, space in of_agents.items() if mapping(agent, None, worker=None) == policy_id]
    if any(space != different[0] for space in different):
        raise ValueError(f"get_multi_agent_setup: agents that are mapped to {policy_id!r} have different spaces.")
    return different[0] if different else None
