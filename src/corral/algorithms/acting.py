"""Acting with the modules of an algorithm in its own process, with the weights of now."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.tree import Tree, map_tree
from corral.errors import ConfigError
from corral.runners.mapping import begin_mapping
from corral.runs.policies.agent_policies import AgentPolicies

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.driver_policy import DriverPolicy


class Acting:
    """Chooses actions with the policies of an algorithm's modules."""

    def __init__(self, algorithm: Algorithm) -> None:
        """Store the algorithm."""
        self._algorithm = algorithm

    def compute_actions(
        self, obs: Tree, state: Tree, explore: bool | None, module_id: str | None, policy_id: str | None
    ) -> Any:
        """Return the env actions for observations; see `Algorithm.compute_actions`."""
        algorithm = self._algorithm
        module_id = algorithm.modules.resolve_id(module_id, policy_id)
        policy = algorithm.modules[module_id].policy
        if policy.has_memory != (state is not None):
            missing = "has memory: give state=, which begins an episode as acting_policy().initial_states(B)"
            raise ConfigError(
                f"compute_actions: module {module_id!r} {missing if policy.has_memory else 'has no memory'}, and "
                f"{'no ' if state is None else ''}state was given."
            )
        algorithm.weights.take_changed()
        actions, state = policy.compute_actions(
            obs,
            state,
            algorithm.learner_group,
            timestep=algorithm.num_env_steps_sampled_lifetime,
            explore=algorithm.config.explore if explore is None else explore,
        )
        return (actions, state) if policy.has_memory else actions

    def compute_single_action(
        self, obs: Tree, state: Tree, explore: bool | None, module_id: str | None, policy_id: str | None
    ) -> Any:
        """Return the env action for one observation; see `Algorithm.compute_single_action`."""
        algorithm = self._algorithm
        module_id = algorithm.modules.resolve_id(module_id, policy_id)
        algorithm.modules[module_id].policy.check_obs(obs)
        batch = map_tree(lambda leaf: np.asarray(leaf)[None], obs)
        states = None if state is None else map_tree(lambda leaf: np.asarray(leaf)[None], state)
        found = algorithm.compute_actions(batch, state=states, explore=explore, module_id=module_id)
        return map_tree(lambda leaf: leaf[0], found)

    def policy(self, module_id: str | None) -> DriverPolicy:
        """Return the policy of a module with the weights of now; see `Algorithm.acting_policy`."""
        algorithm = self._algorithm
        policy = algorithm.modules[algorithm.modules.resolve_id(module_id)].policy
        algorithm.weights.take_changed()
        policy.read_weights(algorithm.learner_group)
        return policy

    def agent_policies(self) -> AgentPolicies:
        """Return the policies of several agents with their mapping, which choose actions as `compute_actions` does."""
        policies = {
            module_id: SimpleNamespace(
                observation_space=spec.observation_space,
                action_space=spec.action_space,
                has_memory=(policy := self._algorithm.modules[module_id].policy).has_memory,
                initial_states=policy.initial_states,
                continued=policy.continued,
                act=partial(self._act, module_id),
            )
            for module_id, spec in self._algorithm.env_runner_group.module_specs.items()
        }
        return AgentPolicies(policies, begin_mapping(self._algorithm.config))

    def _act(self, module_id: str, obs: Tree, states: Tree, *, explore: bool) -> tuple[Any, Tree]:
        found = self._algorithm.compute_actions(obs, state=states, explore=explore, module_id=module_id)
        return found if states is not None else (found, None)
