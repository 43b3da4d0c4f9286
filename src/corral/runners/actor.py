"""The modules in a runner, with all that chooses their actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.action_masks import MASK_KEY, first_illegal, first_without_choice, has_mask_key, legal_actions
from corral.core.ids import DEFAULT_MODULE_ID, AgentID
from corral.core.tree import Tree, copy_nested, map_tree
from corral.errors import ConfigError
from corral.exploration import RowDistribution, make_exploration
from corral.exploration.base import overrides_method
from corral.modules.distributions import module_action_space
from corral.modules.heuristic import HeuristicModule
from corral.modules.inference import Inference, RowStates
from corral.modules.transforms.rows import RowTransforms
from corral.runners.row_history import RowHistory

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout
    from corral.envs.env_host import EnvHost
    from corral.envs.seats import SeatBlock, Seats
    from corral.modules.spec import ModuleSpec
    from corral.runners.config import RunnerConfig
    from corral.runners.lanes import Lanes
    from corral.runners.requests import SampleMode

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
        num_rows: Number of observations for which actions are chosen at once: sub-envs, or lanes.
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
        self.module.drop_critic()
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

    def choose_in_lanes(self, lanes: Lanes, timestep: int, mode: SampleMode) -> Choices:
        """Return what `choose` returns, for the lanes that act; the rules of a `HeuristicModule` see only these."""
        obs, begins, acts = lanes.obs, lanes.begins, lanes.acts
        if self.is_heuristic and not mode.random_actions:
            return self._choose_by_rules(obs, begins, acts)
        self.row_distribution.acts = acts
        how: dict[str, Any] = {"timestep": timestep, "explore": mode.explore, "random_actions": mode.random_actions}
        actions, outputs, logp = self.choose(obs, begins, acts=acts, **how)
        return np.asarray(actions), outputs, logp

    def _choose_by_rules(self, obs: Tree, begins: NDArray[np.bool_], acts: NDArray[np.bool_]) -> Choices:
        """Return actions by rules; the actions of rows that do not act are zeros.

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
        before, self.num_rows = getattr(self, "exploration", None), num_rows
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


class Actors(dict[str, Actor]):
    """The actors of a runner by module id; with several agents also the seats that each of them may act for.

    Args:
        config: Config of the runner.
        host: Host of the envs.
        worker_index: Index of the runner.
        rng: Generator of the runner for all actions.

    Attributes:
        seats: Seats of the agents, if there are several.
        blocks: Block of seats with the agents of each module, by module id.
        configs: Settings of each module, by module id.
        agents_of: Agents that each module acts for, by module id, where trials of the mapping show them.
    """

    seats: Seats

    def __init__(self, config: RunnerConfig, host: EnvHost, worker_index: int, rng: np.random.Generator) -> None:
        """Keep the arguments; `make` makes the actors."""
        super().__init__()
        self._config, self._host, self._worker_index, self._rng = config, host, worker_index, rng
        self._has_several = config.is_multi_agent
        self.blocks: dict[str, SeatBlock] = {}
        self.configs: dict[str, RunnerConfig] = {}
        self.agents_of: dict[str, list[AgentID]] = {}

    def make(self, module_specs: Mapping[str, ModuleSpec]) -> None:
        """Make actors for modules that have none, and drop the actors of modules without a spec.

        A module for which the env has no agent gets no actor.

        Raises:
            ConfigError: A module or an exploration does not fit the spaces, or the mapping leads to no module.
        """
        config, host = self._config, self._host
        if not self._has_several:
            spec, action_space = module_specs[DEFAULT_MODULE_ID], host.env.single_action_space
            self[DEFAULT_MODULE_ID] = self._make_one(config, spec, action_space, host.num_envs)
            return
        from corral.runners.mapping import agents_of_modules, block_of_module

        self.seats = host.env.single_observation_space.seats  # type: ignore[attr-defined]
        agents_of, blocks, made = agents_of_modules(config, self.seats), dict[str, Any](), dict[str, Actor]()
        configs = {module_id: config.for_module(module_id) for module_id in module_specs}
        for module_id, spec in module_specs.items():
            block = self.blocks.get(module_id) or block_of_module(config, self.seats, module_id, agents_of[module_id])
            if block is None:  # no agent of this env has the module
                continue
            num_rows = host.num_envs * (len(agents_of[module_id]) or len(block.agents))
            blocks[module_id] = block
            made[module_id] = self.get(module_id) or self._make_one(
                configs[module_id], spec, spec.action_space, num_rows
            )
        self.clear()
        self.update(made)
        self.blocks, self.configs, self.agents_of = blocks, configs, agents_of

    def _make_one(self, config: RunnerConfig, spec: ModuleSpec, action_space: Any, num_rows: int) -> Actor:
        return Actor(
            config,
            spec,
            action_space=action_space,
            num_rows=num_rows,
            worker_index=self._worker_index,
            rng=self._rng,
        )

    def collect(self, get: Callable[[Actor], Any]) -> Any:
        """Return what `get` returns for the only actor, or by module id if there are several agents."""
        found = {module_id: get(actor) for module_id, actor in self.items()}
        return found if self._has_several else found[DEFAULT_MODULE_ID]

    def each(self, parts: Any) -> Iterator[tuple[Actor, Any]]:
        """Return each actor with its part of what `collect` returned; a module that is new has no part."""
        by_module = parts if self._has_several else {DEFAULT_MODULE_ID: parts}
        return ((actor, by_module[module_id]) for module_id, actor in self.items() if module_id in by_module)

    def get_metrics(self, timestep: int) -> dict[Any, float]:
        """Return the numbers of the explorations; with several agents by `("exploration", module_id, name)`."""
        if not self._has_several:
            return dict(self[DEFAULT_MODULE_ID].exploration.get_metrics(timestep))
        return {
            ("exploration", module_id, name): value
            for module_id, actor in self.items()
            if not actor.is_heuristic
            for name, value in actor.exploration.get_metrics(timestep).items()
        }

    def measure(self, rollout: Rollout) -> None:
        """Let the rollouts of the modules carry the statistics of their observations and rewards."""
        for module_id, part in rollout.by_module().items():
            self[module_id].measure(part)

    # Parts of the weights, as the algorithm sends them.

    def load_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Load weights by module id and parameter name."""
        for module_id, actor in self.items():
            if module_id in weights:  # else it was added a moment ago, and its weights follow
                actor.inference.load_weights(weights[module_id])

    def set_explorations(self, weights: Mapping[str, Any]) -> None:
        """Set the weights of the explorations."""
        for actor, arrays in self.each(weights):
            actor.exploration.set_weights(arrays)

    def set_transforms(self, states: Mapping[str, Any]) -> None:
        """Set the statistics of the transforms, by module id."""
        for module_id, part in states.items():
            actor = self.get(module_id)  # there is none if the module was removed
            if actor is not None and actor.transforms is not None:
                actor.transforms.set_state(part["state"], part["gamma"])
