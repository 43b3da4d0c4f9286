"""The policy in the algorithm's own process, for `compute_actions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.envs.checks import mismatch
from corral.errors import ObservationError
from corral.exploration import RowDistribution, make_exploration
from corral.learners.learner_group import LearnerGroup
from corral.modules.inference import Inference
from corral.modules.module import DEFAULT_MODULE_ID
from corral.modules.spec import check_module

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig
    from corral.modules.spec import ModuleSpec


class DriverPolicy:
    """A copy of the module, and an exploration that chooses actions with it.

    Attributes:
        exploration: Exploration of the algorithm, which also learns from all rollouts.
    """

    def __init__(self, config: AlgorithmConfig, spec: ModuleSpec, num_envs: int) -> None:
        """Make and check the module, and make the exploration; `num_envs` is N of a runner.

        Raises:
            ConfigError: A method of the module returns another shape or dtype than it must.
        """
        module = spec.build()
        check_module(module)
        self._inference = Inference(module)
        self._version = -1
        self._spaces = space_tree(spec.observation_space)
        rng = np.random.default_rng(config.seed)
        self._row = RowDistribution(self._inference.module.distribution, rng)
        self.exploration = make_exploration(
            config,
            spec.action_space,
            model=self._inference.module,
            inference=self._inference,
            num_workers=config.num_env_runners,
            num_envs=num_envs,
            rng=rng,
        )

    def check_obs(self, obs: Tree, *, batch: tuple[int, ...] = ()) -> None:
        """Check one observation, or observations with the axes `batch` before the axes of the observation space.

        Raises:
            ObservationError: The nesting, a shape, a dtype or a value does not fit.
        """
        if problem := mismatch(self._spaces, obs, "observation", batch=batch):
            remedy = "" if batch else " (compute_single_action takes one observation, compute_actions takes a batch)"
            raise ObservationError(f"{problem}{remedy}.")

    def compute_actions(self, obs: Tree, learners: LearnerGroup, *, timestep: int, explore: bool) -> Any:
        """Return env actions `[B, ...]` for observations, a tree of `[B, ...]`, by the learners' weights."""
        shape = np.shape(next(iter(leaves(obs)), ()))
        self.check_obs(obs, batch=(shape[0] if shape else 1,))
        if self._version != learners.weights_version:
            self._inference.load_weights(learners.get_acting_weights()[DEFAULT_MODULE_ID])
            self._version = learners.weights_version
        row = self._row
        self._inference.begin_sample(explore, row.rng)
        row.obs = map_tree(lambda space, leaf: np.asarray(leaf, space.dtype), self._spaces, obs)
        row.inputs = self._inference(row.obs)
        actions, _ = self.exploration.get_exploration_action(
            action_distribution=row, timestep=timestep, explore=explore
        )
        return row.distribution.to_env(np.asarray(actions))

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return the state of the generator, and the noise that was drawn and not used yet."""
        return self._row.get_state()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the policy can continue from a state; raise what the damaged part raises."""
        self._row.check_state(state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`; the next call reads the weights of the learners again."""
        self._row.set_state(state)
        self._version = -1
