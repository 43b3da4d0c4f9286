"""PettingZoo's envs as multi-agent envs (https://pettingzoo.farama.org, arXiv:2009.14471)."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym

from corral.core.ids import AgentID
from corral.envs.multi_agent_env import ALL, MultiAgentEnv
from corral.errors import EnvError


class FromPettingZoo(MultiAgentEnv):
    """Base of the two kinds of PettingZoo's envs as multi-agent envs. Other attributes are the env's own ones.

    The episode ends when the env has no agents any more.

    Args:
        env: The env.

    Attributes:
        env: The env.

    Raises:
        EnvError: The env has no `possible_agents`.
    """

    def __init__(self, env: Any) -> None:
        """Find the agents and their spaces."""
        super().__init__()
        self.env = env
        if not hasattr(env, "possible_agents"):
            raise EnvError(
                f"PettingZoo's {type(env).__name__} has no possible_agents, and without a list of all agents there "
                "are no arrays of fixed shapes for them"
            )
        self.possible_agents = list(env.possible_agents)
        self.observation_spaces = {agent: env.observation_space(agent) for agent in self.possible_agents}
        self.action_spaces = {agent: env.action_space(agent) for agent in self.possible_agents}
        self.metadata, self.render_mode = env.metadata, getattr(env, "render_mode", None)

    def render(self) -> Any:
        """Return what the env renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)


class ParallelPettingZooEnv(FromPettingZoo):
    """A `ParallelEnv` of PettingZoo, whose agents act together, as a multi-agent env; see `FromPettingZoo`."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        found: tuple[dict[Any, Any], dict[Any, Any]] = self.env.reset(seed=seed, options=options)
        self.agents = self.env.agents
        return found

    def step(  # type: ignore[override]
        self, action_dict: dict[Any, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
        """Step the env with the actions of all live agents; see `MultiAgentEnv.step`."""
        found: tuple[dict[Any, Any], ...] = self.env.step(action_dict)
        self.agents = self.env.agents
        return _with_all(found, has_ended=not self.agents)


class PettingZooEnv(FromPettingZoo):
    """An `AECEnv` of PettingZoo, whose agents act in turn, as a multi-agent env; see `FromPettingZoo`.

    One step is the action of one agent. The step's observation is for the agent whose turn is next, with its rewards
    since its last turn. Agents that have ended are observed with their ends, and removed from the env, as PettingZoo
    asks for, by the action `None`.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        self.env.reset(seed=seed, options=options)
        obs, _, _, _, infos = self._see_agents()
        return obs, infos

    def step(  # type: ignore[override]
        self, action_dict: dict[Any, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
        """Step the env with the action of the agent whose turn it is; see `MultiAgentEnv.step`."""
        self.env.step(action_dict[self.env.agent_selection])
        found = self._see_agents()
        return _with_all(found, has_ended=not self.agents)

    def _see_agents(self) -> tuple[dict[Any, Any], ...]:
        """Return what agents receive up to the next one that can act, and remove the agents that have ended."""
        found: tuple[dict[Any, Any], ...] = ({}, {}, {}, {}, {})
        while self.env.agents:
            agent: AgentID = self.env.agent_selection
            last = self.env.last()
            for part, value in zip(found, last, strict=True):
                part[agent] = value
            if last[0] is None:  # some envs show nothing to an agent that has ended
                del found[0][agent]
            if not (last[2] or last[3]):
                break
            self.env.step(None)
        self.agents = self.env.agents
        return found


def _with_all(
    found: tuple[dict[Any, Any], ...], *, has_ended: bool
) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
    """Return what the agents received in a step, with the flags of the whole env."""
    obs, rewards, terminateds, truncateds, infos = found
    is_terminated = any(terminateds.values())
    all_terminated, all_truncated = has_ended and is_terminated, has_ended and not is_terminated
    return obs, rewards, {**terminateds, ALL: all_terminated}, {**truncateds, ALL: all_truncated}, infos


def from_pettingzoo(made: Any) -> Any:
    """Return an env of PettingZoo as a multi-agent env, and anything else unchanged.

    A wrapper that shows an env of PettingZoo as an env of one agent is an env of Gymnasium, and stays one.
    """
    package = sys.modules.get("pettingzoo")  # not imported here: before its import there are no such envs
    if package is None or isinstance(made, gym.Env):
        return made
    if isinstance(made, package.ParallelEnv):
        return ParallelPettingZooEnv(made)
    return PettingZooEnv(made) if isinstance(made, package.AECEnv) else made
