"""Seats: the fixed places of the agents of a multi-agent env in arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from corral.core.spaces import unsupported
from corral.envs.multi_agent_env import AgentID
from corral.errors import EnvError

ALL = "__all__"
COMMON = "__common__"


@dataclass(frozen=True)
class SeatBlock:
    """Agents with equal spaces, whose seats are next to each other.

    Attributes:
        name: Name of the block: `"block_0"`, `"block_1"`, and so on.
        agents: Ids of the agents in the order of their seats.
        observation_space: Observation space of each agent.
        action_space: Action space of each agent.
        start: First seat of the block.
        stop: Seat after the last one of the block.
    """

    name: str
    agents: tuple[AgentID, ...]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    start: int
    stop: int


@dataclass(frozen=True)
class Seats:
    """Seats of all possible agents of a multi-agent env.

    Attributes:
        agents: Ids of the agents in the order of their seats; A is their number.
        blocks: Blocks of agents with equal spaces, in the order of their seats.
    """

    agents: tuple[AgentID, ...]
    blocks: tuple[SeatBlock, ...]

    @classmethod
    def of(cls, env: gym.Env[Any, Any]) -> Seats:
        """Return the seats of a multi-agent env.

        Args:
            env: A `MultiAgentEnv`, or a wrapper around one.

        Raises:
            EnvError: There are no agents, an agent id is not allowed or occurs twice, or an agent has no space.
        """
        alike: list[tuple[spaces.Space[Any], spaces.Space[Any], list[AgentID]]] = []
        for agent in _possible_agents(env):
            observation_space, action_space = (_space(env, kind, agent) for kind in ("observation", "action"))
            if problem := unsupported(observation_space, action_space):
                raise EnvError(f"agent {agent!r}: {problem}")
            for block in alike:
                if block[0] == observation_space and block[1] == action_space:
                    block[2].append(agent)
                    break
            else:
                alike.append((observation_space, action_space, [agent]))
        blocks: list[SeatBlock] = []
        for observation_space, action_space, agents in alike:
            start = blocks[-1].stop if blocks else 0
            name, stop = f"block_{len(blocks)}", start + len(agents)
            blocks.append(SeatBlock(name, tuple(agents), observation_space, action_space, start, stop))
        return cls(tuple(agent for block in blocks for agent in block.agents), tuple(blocks))

    @property
    def action_space(self) -> spaces.Dict:
        """Action space of a seated env: for each block, actions of all its seats."""
        return spaces.Dict({block.name: batch_space(block.action_space, len(block.agents)) for block in self.blocks})


class SeatsSpace(spaces.Dict):
    """Observation space of a seated env: what all agents received in one step, in arrays by seat.

    With A seats, and B seats in a block, the keys are

    - `obs`: for each block by name the observations `[B, ...]` of its agents, blank where an agent has none;
    - `observed`: int8 `[A]`, whether the agent received an observation;
    - `rewards`: float64 `[A]`;
    - `terminated`, `truncated`: int8 `[A]`, whether the agent ended in this step.

    Attributes:
        seats: The seats.
    """

    def __init__(self, seats: Seats) -> None:
        """Make the spaces of the arrays."""
        num_seats = len(seats.agents)
        flags = ("observed", "terminated", "truncated")
        super().__init__(
            {
                "obs": spaces.Dict(
                    {block.name: batch_space(block.observation_space, len(block.agents)) for block in seats.blocks}
                ),
                "rewards": spaces.Box(-np.inf, np.inf, (num_seats,), np.float64),
                **{name: spaces.MultiBinary(num_seats) for name in flags},
            }
        )
        self.seats = seats


def _possible_agents(env: gym.Env[Any, Any]) -> list[AgentID]:
    """Return the ids of the agents of an env, from the first of its attributes that names agents."""
    spaces_by_agent = _attribute(env, "observation_spaces") or {}
    agents = list(_attribute(env, "possible_agents") or _attribute(env, "agents") or spaces_by_agent)
    shared = _attribute(env, "observation_space")
    if not agents and isinstance(shared, spaces.Dict):
        agents = list(shared.spaces)
    if not agents:
        raise EnvError("there are no agents: set possible_agents to the ids of all agents that may appear")
    for i, agent in enumerate(agents):
        if not isinstance(agent, (str, int)) or isinstance(agent, bool) or agent in (ALL, COMMON):
            raise EnvError(
                f"agent {agent!r}: an agent id must be a string or an integer, and not {ALL!r} or {COMMON!r}"
            )
        if agent in agents[:i]:
            raise EnvError(f"agent {agent!r} is in possible_agents twice")
    return agents


def _attribute(env: gym.Env[Any, Any], name: str) -> Any:
    """Return an attribute of the outermost layer that has it, or `None`; every wrapper has spaces of its own."""
    owner = env.unwrapped if name == "observation_space" else env
    return owner.get_wrapper_attr(name) if owner.has_wrapper_attr(name) else None


def _space(env: gym.Env[Any, Any], kind: str, agent: AgentID) -> spaces.Space[Any]:
    """Return the `"observation"` or `"action"` space of an agent, from the outermost layer that has such spaces."""
    layer: Any = env
    method, attribute = f"get_{kind}_space", f"{kind}_spaces"
    while isinstance(layer, gym.Wrapper) and not hasattr(layer, method) and not hasattr(layer, attribute):
        layer = layer.env
    try:
        found = getattr(layer, method)(agent) if hasattr(layer, method) else getattr(layer, attribute)[agent]
    except KeyError:
        found = None
    if not isinstance(found, spaces.Space):
        raise EnvError(
            f"agent {agent!r} has no {kind} space, but {found!r:.80}: set {attribute}[{agent!r}], or one {kind}_space "
            "that all agents share"
        )
    return found
