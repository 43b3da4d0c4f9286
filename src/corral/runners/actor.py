"""A module in a runner, with all that chooses its actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from corral.exploration import RowDistribution, make_exploration
from corral.modules.distributions import module_action_space
from corral.modules.inference import Inference

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig
    from corral.modules.spec import ModuleSpec


class Actor:
    """A runner's own copy of a module, and the exploration that chooses actions with it.

    Attributes:
        module: The module.
        inference: Computes the outputs of the policy.
        distribution: Action distribution of the module.
        exploration: Chooses actions.
        row_distribution: What the exploration is given for one row.
        action_space: Space of one module action.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        spec: ModuleSpec,
        *,
        action_space: Any,
        num_rows: int,
        worker_index: int,
        rng: np.random.Generator,
    ) -> None:
        """Make the module and the exploration.

        Args:
            config: Settings of the module.
            spec: What the module is built from.
            action_space: Action space of one sub-env, or of one agent.
            num_rows: Number of observations for which actions are chosen at once: sub-envs, or lanes.
            worker_index: Index of the runner.
            rng: Generator of the runner for all actions.

        Raises:
            ConfigError: The module or the exploration does not fit the spaces.
        """
        self.module = spec.build()
        self.inference = Inference(self.module)
        self.distribution = self.module.distribution
        self.action_space = module_action_space(action_space)
        self._env_action_space, self._worker_index, self._rng = action_space, worker_index, rng
        self.row_distribution = RowDistribution(self.distribution, rng)
        self.make_exploration(config, num_rows)

    def make_exploration(self, config: AlgorithmConfig, num_rows: int) -> None:
        """Make the exploration, which begins anew, for `num_rows` observations at once."""
        self.exploration = make_exploration(
            config,
            self._env_action_space,
            model=self.module,
            inference=self.inference,
            num_workers=config.num_env_runners,
            worker_index=self._worker_index,
            num_envs=num_rows,
            rng=self._rng,
        )
