"""A tensor vector env with several agents as a vector env of seats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from corral.core.tree import Tree, map_tree
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.envs.seats import SeatBlock, Seats, SeatsSpace
from corral.envs.tensor_env import TensorEnvAdapter, as_arrays, to_array
from corral.errors import EnvError


class TensorAgentsAdapter(TensorEnvAdapter):
    """A tensor vector env with several agents; see `TensorEnvAdapter`.

    Its observations on the device are dicts of the blocks of seats, trees of `[N, B, ...]`, and so are its actions. As
    arrays, `step` returns the final observations where episodes ended, and `get_reset_obs` what the reset gave there.

    Args:
        env: The env, whose spaces are `Dict` spaces by agent.

    Attributes:
        seats: Seats of the agents.

    Raises:
        EnvError: An agent has no space, or its actions are a `Tuple` that Corral would join.
    """

    def __init__(self, env: Any) -> None:
        """Give the agents their seats."""
        super().__init__(env)
        agents: Any = MultiAgentEnv()
        agents.possible_agents = tuple(env.possible_agents)
        for name in ("observation_space", "action_space"):
            space = getattr(env, f"single_{name}")
            if not isinstance(space, spaces.Dict):
                raise EnvError(
                    f"single_{name} of an env with several agents must be a Dict space by agent, got {space}"
                )
            setattr(agents, name, space)
        self.seats = Seats.of(agents)
        if joined := [agent for block in self.seats.blocks if block.action_parts for agent in block.agents]:
            raise EnvError(f"agent {joined[0]!r}: the actions of a tensor vector env cannot be a Tuple of parts")
        self.single_observation_space = SeatsSpace(self.seats)
        self.single_action_space = self.seats.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._reset_obs: Tree = None

    # On the device.

    def reset_tensors(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, Any]:
        """Reset all sub-envs, and return the observations by block, and infos."""
        obs, infos = super().reset_tensors(seed, options)
        return self._by_block(obs), infos

    def step_tensors(self, actions: Tree) -> tuple[Tree, Any, Tensor, Tensor, Any, Tree]:
        """Step all sub-envs, with actions by block, and return what they give.

        Returns:
            Observations by block; rewards by block, `[N, B]`; `terminated` and `truncated` of the whole episodes,
            `[N]`; infos; and final observations by block, which count where an episode ended.
        """
        by_agent = {
            agent: map_tree(lambda leaf, place=place: leaf[:, place], actions[block.name])
            for block in self.seats.blocks
            for place, agent in enumerate(block.agents)
        }
        obs, rewards, *flags, infos, final = self._step(by_agent)
        # Some envs give flags by agent; an episode is over when it is over for all of them.
        terminated, truncated = (
            torch.stack([*flag.values()]).bool().all(0)
            if isinstance(flag, Mapping)
            else self.checked(name, flag).bool()
            for name, flag in zip(("terminated", "truncated"), flags, strict=True)
        )
        rewards = {agent: self.checked(f"rewards of agent {agent!r}", reward) for agent, reward in rewards.items()}
        final = None if final is None else self._by_block(final)
        return self._by_block(obs), self._by_block(rewards), terminated, truncated, infos, final

    def _by_block(self, by_agent: Any) -> dict[str, Tree]:
        return {block.name: _stack(block, by_agent) for block in self.seats.blocks}

    # As arrays.

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.reset_tensors(seed, options)
        self._latest = map_tree(to_array, obs)
        return self._seated(self._latest, np.ones(self.num_envs, np.bool_)), self.infos_as_arrays(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        on_device = map_tree(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(self.device), actions)
        obs, rewards, terminated, truncated, infos, final = self.step_tensors(on_device)
        flags = to_array(terminated), to_array(truncated)
        ends = flags[0] | flags[1]
        after = seen = map_tree(to_array, obs)
        self._reset_obs = after, ends
        if ends.any():  # where episodes ended, their last observations are seen

            def choose(leaf: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
                return np.where(ends.reshape(-1, *[1] * (leaf.ndim - 1)), last, leaf)

            seen = map_tree(choose, after, self._final_arrays(final))
        self._latest = after
        found = self._seated(seen, np.ones(self.num_envs, np.bool_))
        found["rewards"] = np.concatenate([to_array(rewards[each.name]) for each in self.seats.blocks], 1, dtype=float)
        return found, found["rewards"].sum(1), *flags, self.infos_as_arrays(infos)

    def infos_as_arrays(self, infos: Mapping[Any, Any]) -> dict[str, Any]:
        """Return infos as arrays, without final observations, as a seated env has them: of each agent, and common ones.

        An info of an agent is a dict under its id.
        """
        found: dict[Any, Any] = as_arrays(infos)
        finals: dict[str, Any] = {key: found.pop(key) for key in ("final_info", "_final_info") if key in found}
        if isinstance(finals.get("final_info"), Mapping):
            finals["final_info"] = self.infos_as_arrays(finals["final_info"])
        agents = {agent: found.pop(agent) for agent in self.seats.agents if isinstance(found.get(agent), Mapping)}
        return {**({"agents": agents, "common": found} if agents or found else {}), **finals}

    def get_reset_obs(self) -> dict[str, Any]:
        """Return what the seats received in the latest step from the resets of the sub-envs that had ended."""
        obs, ends = self._reset_obs
        return self._seated(obs, ends)

    def _seated(self, obs: Mapping[str, Tree], observed: NDArray[np.bool_]) -> dict[str, Any]:
        """Return observations by block, as arrays, as the seats of sub-envs receive them; see `SeatsSpace`."""
        shape = self.num_envs, len(self.seats.agents)
        flags = {name: np.zeros(shape, np.int8) for name in ("terminated", "truncated")}
        everyone = np.broadcast_to(observed[:, None], shape).astype(np.int8)
        return {"obs": obs, "observed": everyone, "rewards": np.zeros(shape), **flags}


def _stack(block: SeatBlock, by_agent: Mapping[Any, Tree]) -> Tree:
    """Return what the agents of a block have, trees of `[N, ...]`, as a tree of `[N, B, ...]`."""
    return map_tree(lambda *leaf: torch.stack(leaf, 1), *(by_agent[agent] for agent in block.agents))
