"""Envs with several agents: dicts by agent id in place of single values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from corral.core.ids import COMMON, AgentID
from corral.envs.step_checks import FLAG_TYPES, is_number
from corral.errors import EnvError

ALL = "__all__"
"""Key in both dicts of flags: whether the episode has ended for all agents."""


class MultiAgentEnv(gym.Env[Any, Any]):
    """Env with several agents, whose observations, actions, rewards and flags are dicts by agent id.

    Agents may act together or in turn, begin to act in the middle of an episode, and end before the others. The agents
    in the observations of a `reset` or `step` act in the next step, except the agents that have ended.

    A subclass sets `possible_agents` and the spaces, in one of three ways: dicts `observation_spaces` and
    `action_spaces` by agent id, `Dict` spaces `observation_space` and `action_space` by agent id, or one
    `observation_space` and one `action_space` that all agents share.

    Attributes:
        possible_agents: Ids of all agents that may ever appear, strings or integers. The default is `agents`.
        agents: Ids of the agents that are in the env at present. Corral does not read it after the env was made.
        observation_spaces: Observation space of each agent.
        action_spaces: Action space of each agent.
        observation_space: Observation space of all agents, or a `Dict` of the observation spaces by agent id.
        action_space: Action space of all agents, or a `Dict` of the action spaces by agent id.
    """

    possible_agents: Sequence[AgentID] = ()
    agents: Sequence[AgentID] = ()
    observation_spaces: Mapping[Any, gym.Space[Any]] | None = None
    action_spaces: Mapping[Any, gym.Space[Any]] | None = None
    observation_space: Any = None
    action_space: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode, and return observations and infos by agent id.

        Args:
            seed: Seed of the env's generator, or `None` to continue with the generator.
            options: Options of the env.

        Returns:
            Observations of the agents that act first, and infos, both by agent id. The key `"__common__"` of the infos
            is for the info of no agent in particular; `episode.get_infos()` has it under the same key.
        """
        super().reset(seed=seed, options=options)
        return {}, {}

    def step(  # type: ignore[override]
        self, action_dict: dict[Any, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
        """Step the env, and return observations, rewards, two dicts of flags, and infos, by agent id.

        Returns:
            Five dicts by agent id: observations of the agents that act next, and of agents that ended; rewards, also
            of agents that did not act; whether agents have terminated; whether they were truncated; infos. The key
            `"__all__"` of both dicts of flags tells whether the episode has ended for all agents.
        """
        raise TypeError(f"{type(self).__name__} must define step(action_dict).")

    def get_observation_space(self, agent_id: AgentID) -> gym.Space[Any] | None:
        """Return the observation space of an agent, or `None` if it has none."""
        return _space_of(agent_id, self, self.observation_spaces, self.observation_space)

    def get_action_space(self, agent_id: AgentID) -> gym.Space[Any] | None:
        """Return the action space of an agent, or `None` if it has none."""
        return _space_of(agent_id, self, self.action_spaces, self.action_space)

    def with_agent_groups(
        self,
        groups: Mapping[AgentID, Sequence[AgentID]],
        obs_space: gym.Space[Any] | None = None,
        act_space: gym.Space[Any] | None = None,
    ) -> AgentGroups:
        """Return this env with groups of agents that act as one agent; see `AgentGroups`."""
        return AgentGroups(self, groups, obs_space, act_space)

    @property
    def num_agents(self) -> int:
        """Number of agents that are in the env at present."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Number of agents that may ever appear."""
        return len(self.possible_agents)


class AgentGroups(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper of a multi-agent env in which each group of agents is one agent.

    The observation of a group is a tuple of the observations of its members, and its action a tuple of their actions.
    Its reward is the sum of their rewards. Its info has the rewards of the members under `"_group_rewards"`, and their
    infos under `"_group_info"`. Agents outside all groups stay as they are. The members of a group are observed
    together and end together.

    Args:
        env: The env.
        groups: Ids of the members of each group by id of the group, which becomes the id of an agent.
        obs_space: Observation space of each group; the default is a `Tuple` of the spaces of its members.
        act_space: Action space of each group; the default is a `Tuple` of the spaces of its members.

    Attributes:
        possible_agents: Ids of the groups, then of the agents outside all groups.
        observation_spaces: Observation space of each of these agents.
        action_spaces: Action space of each of these agents.

    Raises:
        EnvError: A member is unknown or in two groups, a group is empty, or it has the id of another agent. `reset` and
            `step` raise it if a member of a group is missing.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        groups: Mapping[AgentID, Sequence[AgentID]],
        obs_space: gym.Space[Any] | None = None,
        act_space: gym.Space[Any] | None = None,
    ) -> None:
        """Find the agents and their spaces."""
        super().__init__(env)
        self.groups = {group: tuple(members) for group, members in groups.items()}
        agents = possible_agents(env)
        self._group_of: dict[AgentID, AgentID] = {}
        for group, members in self.groups.items():
            for member in members:
                if member not in agents or member in self._group_of:
                    where = "in two groups" if member in self._group_of else f"not in possible_agents {agents!r:.200}"
                    raise EnvError(f"group {group!r} has agent {member!r}, which is {where}")
                self._group_of[member] = group
        single = [agent for agent in agents if agent not in self._group_of]
        for group, members in self.groups.items():
            if not members or group in single:
                raise EnvError(f"group {group!r} has " + ("the id of an agent" if members else "no members"))
        self.possible_agents = [*self.groups, *single]
        spaces: list[dict[AgentID, gym.Space[Any]]] = []
        for kind, given in (("observation", obs_space), ("action", act_space)):
            one = {agent: agent_space(env, kind, agent) for agent in agents}
            of_groups = {
                group: given or gym.spaces.Tuple([one[member] for member in members])
                for group, members in self.groups.items()
            }
            spaces.append({agent: of_groups.get(agent) or one[agent] for agent in self.possible_agents})
        self.observation_spaces, self.action_spaces = spaces
        if obs_space is not None:
            self.observation_space = obs_space
        if act_space is not None:
            self.action_space = act_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode; see `MultiAgentEnv.reset`."""
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._join(self._whole(obs), tuple), self._join(infos, _group_info)

    def step(self, action: dict[Any, Any]) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
        """Step the env with the actions of groups and single agents; see `MultiAgentEnv.step`."""
        actions: dict[AgentID, Any] = {}
        for agent, value in action.items():
            members = self.groups.get(agent)
            actions.update({agent: value} if members is None else zip(members, value, strict=True))
        returned: Any = self.env.step(actions)
        obs, rewards, terminateds, truncateds, infos = returned
        both = terminateds, truncateds
        self._whole([m for m in self._group_of if any(type(f.get(m)) in FLAG_TYPES and f[m] for f in both)])
        infos = self._join(infos, _group_info)
        for group, values in self._join(rewards, list).items():
            if group in self.groups:
                infos.setdefault(group, {})["_group_rewards"] = values
        return (
            self._join(self._whole(obs), tuple),
            self._join(rewards, _sum_rewards),
            self._join(terminateds, _any_flag),
            self._join(truncateds, _any_flag),
            infos,
        )

    def _whole(self, items: Any) -> Any:
        """Return items, after a check that no member of a group is missing in them.

        Raises:
            EnvError: A member is missing.
        """
        for group, members in self.groups.items():
            missing = [member for member in members if member not in items]
            if missing and len(missing) < len(members):
                raise EnvError(
                    f"group {group!r}: agent {missing[0]!r} was not observed, or did not end, together with the others"
                )
        return items

    def _join(self, items: dict[Any, Any], join: Callable[[list[Any]], Any]) -> dict[Any, Any]:
        """Return items with one item for each group, made from a list of the items of its members."""
        joined = {agent: item for agent, item in items.items() if agent not in self._group_of}
        for group, members in self.groups.items():
            if parts := [items[member] for member in members if member in items]:
                joined[group] = join(parts)
        return joined


# What does not fit stays as it is in the item of the group, so that the check of the whole step names it.


def _sum_rewards(rewards: list[Any]) -> Any:
    return sum(rewards) if all(map(is_number, rewards)) else rewards


def _any_flag(flags: list[Any]) -> Any:
    return any(flags) if FLAG_TYPES.issuperset(map(type, flags)) else flags


def _group_info(infos: list[Any]) -> dict[str, Any]:
    return {"_group_info": infos}


def possible_agents(env: gym.Env[Any, Any]) -> list[AgentID]:
    """Return the ids of the agents of a multi-agent env, from the first of its attributes that names agents.

    Raises:
        EnvError: There are no agents, or an id is not allowed or occurs twice.
    """
    shared = getattr(env.unwrapped, "observation_space", None)
    # RLlib's envs of before 2.40 name their agents in `_agent_ids`.
    named = [_attribute(env, name) for name in ("possible_agents", "agents", "observation_spaces", "_agent_ids")]
    named.append(shared.spaces if isinstance(shared, gym.spaces.Dict) else ())
    found: Any = next((ids for ids in named if ids is not None and len(ids)), ())
    # A set of strings has another order in each process, and workers agree on the order of agents.
    agents = sorted(found, key=str) if isinstance(found, (set, frozenset)) else list(found)
    if not agents:
        raise EnvError("there are no agents: set possible_agents to the ids of all agents that may appear")
    for i, agent in enumerate(agents):
        if not isinstance(agent, (str, int)) or isinstance(agent, bool) or agent in (ALL, COMMON):
            raise EnvError(
                f"agent {agent!r}: an agent id must be a string or an integer, and not {ALL!r} or {COMMON!r}"
            )
        if str(agent) in map(str, agents[:i]):
            raise EnvError(f"agent {agent!r} is in possible_agents twice, as a string or an integer")
    return agents


def _attribute(env: gym.Env[Any, Any], name: str) -> Any:
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None


def agent_space(env: gym.Env[Any, Any], kind: str, agent: AgentID) -> gym.Space[Any]:
    """Return the `"observation"` or `"action"` space of an agent, from the outermost layer that has such spaces.

    Raises:
        EnvError: The agent has no space.
    """
    layer: Any = env
    method, attribute = f"get_{kind}_space", f"{kind}_spaces"
    while isinstance(layer, gym.Wrapper) and not hasattr(layer, method) and not hasattr(layer, attribute):
        layer = layer.env
    try:
        found = getattr(layer, method)(agent) if hasattr(layer, method) else getattr(layer, attribute)[agent]
    except KeyError:
        found = None
    if not isinstance(found, gym.Space):
        raise EnvError(
            f"agent {agent!r} has no {kind} space, but {found!r:.80}: set {attribute}[{agent!r}], add {agent!r} to the "
            f"Dict {kind}_space, or set one {kind}_space that all agents share"
        )
    return found


def _space_of(
    agent_id: AgentID,
    env: MultiAgentEnv,
    spaces: Mapping[Any, gym.Space[Any]] | None,
    shared: gym.Space[Any] | None,
) -> gym.Space[Any] | None:
    if (
        spaces is None
        and isinstance(shared, gym.spaces.Dict)
        and not shared.spaces.keys().isdisjoint(possible_agents(env))
    ):
        spaces = shared.spaces  # by agent, else all agents share the Dict
    return shared if spaces is None else spaces.get(agent_id)
