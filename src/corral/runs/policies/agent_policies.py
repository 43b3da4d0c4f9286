"""The policies of several agents in the arrays of a seated env, to evaluate and to show what modules do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.spaces import module_observation_space, space_kinds
from corral.core.tree import Tree, map_tree
from corral.envs.seats import Seats, SeatsSpace
from corral.errors import ConfigError


class AgentPolicies:
    """Policies by module id, which choose the actions of the agents that are mapped to them.

    `policies` holds them.

    Args:
        policies: Policies by module id, with what `Policy` has: `observation_space`, `action_space`, `has_memory`,
            `initial_states(num_rows)`, `continued(states, rewards=)` and `act(obs, states, explore=)`.
        begin_episode: Function that is called for each episode, and returns the function from the id of an agent to the
            id of its module in this episode.
    """

    def __init__(self, policies: Mapping[str, Any], begin_episode: Callable[[], Callable[[AgentID], str]]) -> None:
        """Keep the policies."""
        self.policies, self._begin_episode = dict(policies), begin_episode
        self._module_for: dict[int, Callable[[AgentID], str]] = {}  # by sub-env
        self._states: dict[tuple[str, int, int], Tree] = {}  # by module, sub-env and seat, in the current episodes
        self._rewards: NDArray[np.float64] | None = None  # since the latest action of each seat, [N, A]

    def find_seats(self, observation_space: spaces.Space[Any], name: str) -> Seats:
        """Return the seats of an env, as the space of its observations has them.

        Raises:
            ConfigError: The env has one agent.
        """
        if not isinstance(observation_space, SeatsSpace):
            raise ConfigError(
                f"the modules {[*self.policies]} are policies of several agents, and env {name!r} has one agent: give "
                "the env with which they were trained, or one policy, load_policy(path, module_id=...)."
            )
        return observation_space.seats

    def batch(self, seats: Seats, obs: Any, begins: NDArray[np.bool_], *, explore: bool = False) -> dict[str, Any]:
        """Return the actions of all seats of N sub-envs, arrays `[N, B, ...]` by block.

        Args:
            seats: The seats.
            obs: Observations of the seats, see `SeatsSpace`, with N in front.
            begins: Whether the observation is the first one of an episode, bool `[N]`.
            explore: Whether the policies explore.

        Raises:
            ConfigError: The mapping leads to no module, or to a module of other spaces.
        """
        for i in np.flatnonzero(begins).tolist():
            self._module_for[i] = self._begin_episode()
            self._states = {lane: states for lane, states in self._states.items() if lane[1] != i}
        if self._rewards is None or self._rewards.shape != obs["rewards"].shape:
            self._rewards = np.zeros(obs["rewards"].shape)
        self._rewards += obs["rewards"]
        self._rewards[begins] = 0.0
        actions: dict[str, Any] = create_empty_array(seats.action_space, len(begins), np.zeros)  # type: ignore[assignment]
        acts = (obs["observed"] != 0) & (obs["terminated"] == 0) & (obs["truncated"] == 0)
        for block in seats.blocks:
            chosen: dict[str, list[tuple[int, int]]] = {}
            for i, place in np.argwhere(acts[:, block.start : block.stop]).tolist():
                chosen.setdefault(self._module_for[i](block.agents[place]), []).append((i, place))
            for module_id, lanes in chosen.items():
                policy = self.policies[module_id]
                _check_fit(module_id, policy, block.observation_space, block.action_space, block.agents[lanes[0][1]])
                index = tuple(np.array(lanes).T)
                own: Tree = map_tree(lambda leaf, index=index: leaf[index], obs["obs"][block.name])
                seats_of_lanes = [(module_id, i, block.start + place) for i, place in lanes]
                chosen_actions = self._act(policy, own, seats_of_lanes, explore)
                map_tree(
                    lambda column, part, index=index: column.__setitem__(index, part),
                    actions[block.name],
                    chosen_actions,
                )
        return actions

    def _act(self, policy: Any, obs: Tree, lanes: list[tuple[str, int, int]], explore: bool) -> Any:
        """Return the actions of some seats, and keep their states if the policy has memory."""
        if not policy.has_memory:
            return policy.act(obs, None, explore=explore)[0]
        initial = policy.initial_states(1)
        states = map_tree(lambda *rows: np.concatenate(rows), *(self._states.get(lane, initial) for lane in lanes))
        assert self._rewards is not None
        index = tuple(np.array([lane[1:] for lane in lanes]).T)
        states = policy.continued(states, rewards=self._rewards[index])
        self._rewards[index] = 0.0
        actions, states = policy.act(obs, states, explore=explore)
        for row, lane in enumerate(lanes):
            self._states[lane] = map_tree(lambda leaf, row=row: leaf[row : row + 1], states)
        return actions


def refuse_several_agents(observation_space: spaces.Space[Any], name: str) -> None:
    """Refuse an env of several agents where there is one policy.

    Raises:
        ConfigError: The env has several agents.
    """
    if isinstance(observation_space, SeatsSpace):
        raise ConfigError(
            f"env {name!r} has several agents, which one policy cannot play: give the algorithm, or run `corral "
            "evaluate` or `corral play` with the run."
        )


def _check_fit(module_id: str, policy: Any, observation_space: Any, action_space: Any, agent: Any) -> None:
    given = module_observation_space(observation_space)
    if space_kinds(policy.observation_space) != space_kinds(given) or policy.action_space != action_space:
        raise ConfigError(
            f"module {module_id!r} is made for {policy.observation_space} and {policy.action_space}, and agent "
            f"{agent!r} has {given} and {action_space}: give the env with which it was trained."
        )
