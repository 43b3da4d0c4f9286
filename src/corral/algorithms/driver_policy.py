"""The policy in the algorithm's own process, for `compute_actions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corral.core.action_masks import legal_actions
from corral.core.seeding import module_seed
from corral.core.tree import Tree
from corral.exploration import Exploration, RowDistribution, make_exploration
from corral.learners.learner_group import LearnerGroup
from corral.modules.distributions import FloatArray
from corral.modules.heuristic import HeuristicModule
from corral.modules.spec import check_module
from corral.runs.policies.policy import Policy

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.modules.spec import ModuleSpec


class DriverPolicy(Policy):
    """A policy with the newest weights of the learners, whose actions the algorithm's exploration chooses.

    Attributes:
        exploration: Exploration of the algorithm, which also learns from all rollouts of the module; `None` for a
            module without a network.
    """

    _CALLS = ("compute_single_action", "compute_actions")

    def __init__(self, config: AlgorithmConfig, module_id: str, spec: ModuleSpec, num_envs: int) -> None:
        """Make and check the module, and make the exploration.

        Args:
            config: Config of the module.
            module_id: Its id.
            spec: Its spec.
            num_envs: N of a runner.

        Raises:
            ConfigError: A method of the module returns another shape or dtype than it must.
        """
        module = spec.build()
        check_module(module)
        module.drop_critic()
        super().__init__(module, pipeline=spec.pipeline, seed=module_seed(config.seed, module_id))
        self._module_id = module_id
        self._version = -1
        self._timestep = 0
        self._row = RowDistribution(module.distribution, self._rng, module)
        self.exploration: Exploration | None = None
        if isinstance(module, HeuristicModule):
            return
        self.exploration = make_exploration(
            config,
            spec.action_space,
            model=module,
            inference=self._inference,
            num_workers=config.num_env_runners,
            num_envs=num_envs,
            rng=self._rng,
        )

    def read_weights(self, learners: LearnerGroup) -> None:
        """Read the learners' weights, if they have changed."""
        if self._version != learners.weights_version:
            self._inference.load_weights(learners.learner_here.get_acting_weights()[self._module_id])
            self._version = learners.weights_version

    def compute_actions(
        self, obs: Tree, states: Tree, learners: LearnerGroup, *, timestep: int, explore: bool
    ) -> tuple[Any, Tree]:
        """Return env actions `[B, ...]` and next states for trees of `[B, ...]`, by the learners' weights."""
        self.read_weights(learners)
        self._timestep = timestep
        return self.act(obs, states, explore=explore)

    def _choose(self, obs: Tree, inputs: FloatArray, explore: bool) -> Any:
        if self.exploration is None:
            return super()._choose(obs, inputs, explore)
        self._row.obs, self._row.inputs = obs, inputs
        self._row.legal = legal_actions(obs) if self.module.has_action_mask else None
        actions, _ = self.exploration.get_exploration_action(
            action_distribution=self._row, timestep=self._timestep, explore=explore
        )
        return actions

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
