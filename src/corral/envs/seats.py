"""Seats: the fixed places of the agents of a multi-agent env in arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from corral.core.ids import AgentID
from corral.core.spaces import join_action_spaces, unsupported
from corral.envs.multi_agent_env import agent_space, possible_agents
from corral.errors import EnvError


@dataclass(frozen=True)
class SeatBlock:
    """Agents with equal spaces, whose seats are next to each other.

    Attributes:
        name: Name of the block: `"block_0"`, `"block_1"`, and so on.
        agents: Ids of the agents in the order of their seats.
        observation_space: Observation space of each agent.
        action_space: Action space of each agent; a `Tuple` space of parts of one kind is joined to a plain one.
        action_parts: Spaces of the parts of an action, where the space was joined; otherwise empty.
        start: First seat of the block.
        stop: Seat after the last one of the block.
    """

    name: str
    agents: tuple[AgentID, ...]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    action_parts: tuple[spaces.Space[Any], ...]
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
        for agent in possible_agents(env):
            observation_space, action_space = (agent_space(env, kind, agent) for kind in ("observation", "action"))
            if problem := unsupported(observation_space, _joined(action_space)):
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
            joined = _joined(action_space)
            is_joined = isinstance(action_space, spaces.Tuple) and joined is not action_space
            parts = tuple(action_space.spaces) if is_joined else ()  # type: ignore[attr-defined]
            blocks.append(SeatBlock(name, tuple(agents), observation_space, joined, parts, start, stop))
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


def _joined(action_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return a `Tuple` space of actions as a plain space where its parts are alike, and any other space unchanged."""
    if not isinstance(action_space, spaces.Tuple):
        return action_space
    return join_action_spaces(action_space.spaces) or action_space
