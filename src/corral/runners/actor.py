"""A module in a runner, with all that chooses its actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.action_masks import MASK_KEY, first_illegal, first_without_choice, has_mask_key, legal_actions
from corral.core.tree import Tree, copy_nested, map_tree
from corral.errors import ConfigError
from corral.exploration import RowDistribution, make_exploration
from corral.exploration.base import overrides_method
from corral.modules.distributions import module_action_space
from corral.modules.heuristic import HeuristicModule
from corral.modules.inference import Inference, RowStates
from corral.runners.row_history import RowHistory
from corral.transforms.rows import RowTransforms

if TYPE_CHECKING:
    from corral.episodes.rollout import Rollout
    from corral.modules.spec import ModuleSpec
    from corral.runners.config import RunnerConfig

Choices = tuple[Any, NDArray[np.float32], Any]


class Actor:
    """A runner's own copy of a module, and the exploration that chooses actions with it.

    Attributes:
        module: The module.
        is_heuristic: Whether the module chooses actions by rules, without exploration.
        has_action_mask: Whether observations hold a mask of legal actions.
        inference: Computes the outputs of the policy.
        distribution: Action distribution of the module.
        exploration: Chooses actions.
        sees_samples: Whether the exploration takes complete rollouts.
        memory: States of the rows of a module with memory; `None` for other modules.
        row_distribution: What the exploration is given for one row.
        action_space: Space of one module action.
        transforms: Transforms of the module in use, or `None`.
        history: What both remember of the rows.
    """

    def __init__(
        self,
        config: RunnerConfig,
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
        self.module: Any = spec.build()
        self.inference = Inference(self.module)
        self.is_heuristic = isinstance(self.module, HeuristicModule)
        self.has_action_mask = self.module.has_action_mask
        self.distribution = self.module.distribution
        self.action_space = module_action_space(action_space)
        self._env_action_space, self._worker_index, self._rng = action_space, worker_index, rng
        self.row_distribution = RowDistribution(self.distribution, rng, self.module)
        self.memory = RowStates(self.module, num_rows) if self.module.has_memory() else None
        self.transforms: RowTransforms | None = None
        if spec.pipeline is not None:
            action = np.zeros(self.distribution.action_shape, self.distribution.action_dtype)
            self.transforms = RowTransforms(spec.pipeline, action, num_rows)
        self.history = RowHistory(self.memory, self.transforms)
        self.make_exploration(config, num_rows)

    def first_without_choice(self, obs: Tree, acts: NDArray[np.bool_]) -> int | None:
        """Return the first row that acts, of those in `acts`, and whose mask has no legal action; or `None`.

        Args:
            obs: Observations as the env gave them, a tree of `[B, ...]`.
            acts: Which rows act, bool `[B]`.
        """
        if not (self.has_action_mask and has_mask_key(obs)):  # transforms may add or remove a mask
            return None
        return first_without_choice(legal_actions(obs), self._env_action_space, acts)

    def choose_by_rules(self, obs: Tree, begins: NDArray[np.bool_], acts: NDArray[np.bool_]) -> Choices:
        """Return what `choose` returns; the rules of a `HeuristicModule` see the observations of rows that act.

        Args:
            obs: Observations, a tree of `[B, ...]`.
            begins: Where episodes begin, bool `[B]`.
            acts: Which rows act, bool `[B]`; the actions of the others are zeros.

        Raises:
            ConfigError: The actions do not fit the action space.
        """
        assert isinstance(self.module, HeuristicModule)
        if self.transforms is not None:
            obs = self.transforms(obs, begins, acts)
        chosen = self.module.checked_actions(map_tree(lambda leaf: leaf[acts], obs), self._rng)
        actions = np.zeros((len(acts), *chosen.shape[1:]), chosen.dtype)
        actions[acts] = chosen
        return actions, self._no_outputs, np.zeros(len(acts))

    def choose(
        self,
        obs: Tree,
        begins: NDArray[np.bool_],
        *,
        timestep: int,
        explore: bool,
        random_actions: bool,
        acts: NDArray[np.bool_] | None = None,
    ) -> Choices:
        """Return module actions, outputs of the policy, and log-probabilities where the outputs do not give them.

        Args:
            obs: Observations, a tree of `[B, ...]`; B is the number of rows that the exploration was made for.
            begins: Where episodes begin, bool `[B]`.
            timestep: Env steps of all runners so far.
            explore: Whether to explore.
            random_actions: Whether to draw actions uniformly from the action space instead.
            acts: Which rows act, bool `[B]`; `None` is all of them.

        Returns:
            Actions `[B, ...]`, outputs float32 `[B, D]`, and `None` or log-probabilities `[B]`.

        Raises:
            ConfigError: A custom exploration chose an illegal action.
        """
        row = self.row_distribution
        if self.transforms is not None:
            obs = self.transforms(obs, begins, acts)
        if self._sees_begins and not random_actions:
            self.exploration.begin_episodes(begins, timestep=timestep, explore=explore)
        row.obs = obs
        if self.memory is None:
            row.inputs = self._no_outputs if self.is_heuristic else self.inference(obs)
        else:
            self.memory.begin(begins)
            row.inputs = self.memory.step(self.inference, obs)
        if self.has_action_mask:
            row.legal = legal_actions(obs)
        if random_actions:
            return row.random(), row.inputs, None
        actions, logp = self.exploration.get_exploration_action(
            action_distribution=row, timestep=timestep, explore=explore
        )
        if self.has_action_mask:
            self._check_legal(actions, row)
        return actions, row.inputs, logp

    def _check_legal(self, actions: Any, row: RowDistribution) -> None:
        assert row.legal is not None
        if (index := first_illegal(row.legal, self.action_space, np.asarray(actions))) is not None:
            raise ConfigError(
                f"exploration_config: {type(self.exploration).__name__} chose the action "
                f"{np.asarray(actions)[index].tolist()}, which {MASK_KEY} does not allow: choose among "
                "action_distribution.legal, or use its sample(), mode() and random()."
            )

    def measure(self, rollout: Rollout) -> None:
        """Let a rollout carry the statistics of its observations and rewards, which the algorithm merges."""
        if self.transforms is not None:
            host = rollout if rollout.host is None else rollout.host
            rollout.measured = self.transforms.measure(
                rollout.obs,
                rollout.stored if "stored" in rollout else rollout.obs,
                host.rewards,
                host.valid,
                host.over,
                continues=rollout.continues,
            )

    def make_exploration(self, config: RunnerConfig, num_rows: int) -> None:
        """Make an exploration for `num_rows` observations at once, which continues from the state of the one before."""
        before = getattr(self, "exploration", None)
        self._no_outputs = np.zeros((num_rows, self.distribution.num_inputs), np.float32)
        if self.is_heuristic:  # the rules explore by themselves, in actions that the configured type may not fit
            config = config.copy(exploration_config={"type": "StochasticSampling"})
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
        self._sees_begins = overrides_method(self.exploration, "begin_episodes")
        self.sees_samples = overrides_method(self.exploration, "end_sample")
        if before is not None:
            if state := before.get_state():
                self.exploration.set_state(copy_nested(state))
            if weights := before.get_weights():
                self.exploration.set_weights(weights)
