"""RLlib's connectors: the base class of all, and the built-in ones, which stand for transforms of Corral."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.compat.rllib.space_helpers import BatchedNdArray
from corral.core.spaces import module_observation_space, space_tree
from corral.core.tree import map_tree
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.errors import ConfigError
from corral.modules.distributions import module_action_space
from corral.modules.transforms.observations import FlattenObservations as NativeFlatten
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.rows import RowTransforms
from corral.modules.transforms.temporal import FrameStack
from corral.modules.transforms.temporal import PrevActionsPrevRewards as NativePrevious
from corral.modules.transforms.transform import Transform


class ConnectorV2:
    """Base class of connectors: define `__call__`, and `recompute_output_observation_space` if the space changes.

    Attributes:
        agent_ids: Agents whose observations the connector changes; `None` is all.
    """

    agent_ids: Any = None

    def __init__(self, input_observation_space: Any = None, input_action_space: Any = None, **settings: Any) -> None:
        """Keep the spaces."""
        self._spaces: dict[str, Any] = {}
        self.input_action_space = input_action_space
        self.input_observation_space = input_observation_space

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Any,
        episodes: Any,
        explore: Any = None,
        shared_data: Any = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the batch, changed or not; the data of the episodes may be changed in place.

        Args:
            rl_module: The module, or with several agents all modules.
            batch: Columns so far.
            episodes: The episodes.
            explore: Whether actions explore.
            shared_data: What connectors of a pipeline tell each other.
            metrics: Logger for numbers to report.
            **kwargs: Not used.
        """
        raise ConfigError(f"{type(self).__name__} has no method __call__(*, rl_module, batch, episodes, ...).")

    # Spaces.

    @property
    def input_observation_space(self) -> Any:
        """Space of the observations before the connector."""
        return self.__dict__.setdefault("_spaces", {}).get("observation")

    @input_observation_space.setter
    def input_observation_space(self, space: Any) -> None:
        found = self.__dict__.setdefault("_spaces", {})
        found["observation"] = space
        if space is not None:
            found["new observation"] = self.recompute_output_observation_space(space, self.input_action_space)

    @property
    def input_action_space(self) -> Any:
        """Space of the actions before the connector."""
        return self.__dict__.setdefault("_spaces", {}).get("action")

    @input_action_space.setter
    def input_action_space(self, space: Any) -> None:
        found = self.__dict__.setdefault("_spaces", {})
        found["action"] = space
        if space is not None:
            found["new action"] = self.recompute_output_action_space(self.input_observation_space, space)

    @property
    def observation_space(self) -> Any:
        """Space of the observations behind the connector."""
        return self.__dict__.setdefault("_spaces", {}).get("new observation")

    @property
    def action_space(self) -> Any:
        """Space of the actions behind the connector."""
        return self.__dict__.setdefault("_spaces", {}).get("new action")

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return the space of observations behind the connector."""
        return self.input_observation_space

    def recompute_output_action_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return the space of actions behind the connector."""
        return self.input_action_space

    # State.

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return what the connector keeps between calls."""
        return {}

    def set_state(self, state: Any) -> None:
        """Continue from what `get_state` returned."""

    def reset_state(self) -> None:
        """Forget what the connector keeps."""

    def merge_states(self, states: Any) -> dict[str, Any]:
        """Return one state for the states of the same connector in several runners."""
        return {}

    # Helpers for `__call__`.

    @staticmethod
    def single_agent_episode_iterator(
        episodes: Sequence[Any], agents_that_stepped_only: bool = True, zip_with_batch_column: Any = None
    ) -> Iterator[Any]:
        """Yield the episode of each agent.

        Args:
            episodes: Episodes of one agent, or of several.
            agents_that_stepped_only: Whether to leave out agents without a new observation.
            zip_with_batch_column: Items of a column, as `add_batch_item` adds them, one of which is yielded with each
                episode.
        """
        places: dict[Any, int] = defaultdict(int)
        parts = [part for episode in episodes for part in _agent_parts(episode, agents_that_stepped_only)]
        if zip_with_batch_column is not None and isinstance(zip_with_batch_column, list):
            if len(zip_with_batch_column) != len(parts):
                raise ValueError(f"{len(zip_with_batch_column)} items for {len(parts)} episodes.")
            yield from zip(parts, zip_with_batch_column, strict=True)
            return
        for part in parts:
            if zip_with_batch_column is None:
                yield part
                continue
            key = item_key(part)
            items = zip_with_batch_column[key]
            if len(items) <= places[key]:
                raise ValueError(f"{len(items)} items for more steps of {key}.")
            yield part, items[places[key]]
            places[key] += 1

    @staticmethod
    def add_batch_item(batch: dict[str, Any], column: str, item_to_add: Any, single_agent_episode: Any = None) -> None:
        """Add one item to a column: by episode, by episode, agent and module, or without an episode to a list."""
        if single_agent_episode is None:
            batch.setdefault(column, []).append(item_to_add)
            return
        if single_agent_episode.module_id is not None and single_agent_episode.module_id in batch:
            raise ValueError(f"{column!r}: the batch is by module already; add items before AgentToModuleMapping.")
        batch.setdefault(column, {}).setdefault(item_key(single_agent_episode), []).append(item_to_add)

    @staticmethod
    def add_n_batch_items(
        batch: dict[str, Any], column: str, items_to_add: Any, num_items: int, single_agent_episode: Any = None
    ) -> None:
        """Add items to a column: a list of them, or arrays `[num_items, ...]`."""
        if not isinstance(items_to_add, list):
            tagged = map_tree(lambda leaf: np.asarray(leaf).view(BatchedNdArray), items_to_add)
            ConnectorV2.add_batch_item(batch, column, tagged, single_agent_episode)
            return
        if len(items_to_add) != num_items:
            raise ValueError(f"{column!r}: {len(items_to_add)} items were given, and num_items={num_items}.")
        for item in items_to_add:
            ConnectorV2.add_batch_item(batch, column, item, single_agent_episode)

    @staticmethod
    def foreach_batch_item_change_in_place(
        batch: dict[str, Any], column: str | Sequence[str], func: Callable[..., Any]
    ) -> None:
        """Replace the items of a column by `func(item, episode id, agent id, module id)`.

        With several columns, `func` gets a tuple of items, and returns one.
        """
        names = [column] if isinstance(column, str) else list(column)
        if missing := [name for name in names if batch.get(name) is None]:
            raise ValueError(f"the batch has no column {missing}; it has {list(batch)}.")
        first = batch[names[0]]
        groups = [(None, None, None)] if isinstance(first, list) else list(first)
        for key in groups:
            items = [batch[name] if isinstance(first, list) else batch[name][key] for name in names]
            ids = key if len(key) == 3 else (key[0], None, None)
            for i, given in enumerate(zip(*items, strict=False)):
                found = func(given[0] if isinstance(column, str) else given, *ids)
                for place, value in zip(items, [found] if isinstance(column, str) else found, strict=True):
                    place[i] = value

    @staticmethod
    def switch_batch_from_column_to_module_ids(batch: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return a batch by module and column for one by column and module."""
        found: dict[str, dict[str, Any]] = {}
        for column, by_module in batch.items():
            for module_id, data in by_module.items():
                found.setdefault(module_id, {})[column] = data
        return found

    def __str__(self, indentation: int = 0) -> str:
        return " " * indentation + type(self).__name__


def _agent_parts(episode: Any, stepped_only: bool) -> list[Any]:
    if not isinstance(episode, MultiAgentEpisode):
        return [episode]
    stepped = episode.get_agents_that_stepped() if stepped_only else episode.agent_episodes
    return [part for agent, part in episode.agent_episodes.items() if agent in stepped]


def item_key(episode: Any) -> tuple[Any, ...]:
    """Return the key of the items of an episode in a column."""
    if episode.agent_id is None:
        return (episode.id_,)
    return episode.multi_agent_episode_id, episode.agent_id, episode.module_id


# Built-in ones.


class BuiltIn(ConnectorV2, ABC):
    """Base of the built-in connectors, which become transforms where they come last.

    Before a connector of the user's they are called, with one observation at a time. Then each runner has statistics of
    its own, which are merged after each iteration.
    """

    multi_agent = False

    @abstractmethod
    def to_transforms(self) -> list[Transform]:
        """Return the transforms of Corral that do the same."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        self._pipelines: dict[Any, Pipeline | None] = {}
        self._new: dict[Any, Pipeline] = {}  # with the statistics since the state was set
        self._rows: dict[str, RowTransforms] = {}
        if not self.multi_agent or input_action_space is None:
            return self._build(None, input_observation_space, input_action_space)
        return spaces.Dict(
            {
                agent: self._build(agent, space, input_action_space[agent])
                if self.agent_ids is None or agent in self.agent_ids
                else space
                for agent, space in input_observation_space.spaces.items()
            }
        )

    def _build(self, agent_id: Any, space: Any, action_space: Any) -> Any:
        transforms = self.to_transforms()
        if action_space is None:  # the spaces come one after the other
            return space
        built = Pipeline.build(transforms, module_observation_space(space), action_space)
        self._pipelines[agent_id] = built
        return space if built is None else built.module_space

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Change the latest observation of each episode."""
        for episode in self.single_agent_episode_iterator(episodes):
            agent_id = episode.agent_id if self.multi_agent else None
            if (pipeline := self._pipelines.get(agent_id)) is not None:
                episode.set_observations(new_data=self._transformed(episode, agent_id, pipeline), at_indices=-1)
        return batch

    def _transformed(self, episode: Any, agent_id: Any, pipeline: Pipeline) -> Any:
        space = self.input_action_space[agent_id] if self.multi_agent else self.input_action_space
        if (rows := self._rows.get(episode.id_)) is None:
            known: Any = module_action_space(space)
            rows = self._rows[episode.id_] = RowTransforms(pipeline, np.zeros(known.shape, known.dtype), 1)
        if len(episode):
            rows.note_step(
                np.asarray(episode.get_actions(-1))[None], np.atleast_1d(episode.get_rewards(-1)), slice(None)
            )
        leaves = map_tree(lambda space, leaf: np.asarray(leaf, space.dtype)[None], *_aligned(pipeline, episode))
        if pipeline.state:  # before, as in RLlib: by the first observation alone, the second one has no scale
            measured = [pipeline.measure(leaves, leaves, {})]
            self._new[agent_id] = self._new.get(agent_id, _empty(pipeline)).merged(measured)
            self._pipelines[agent_id] = pipeline = pipeline.merged(measured)
        rows.pipeline = pipeline
        found = rows(leaves, np.array([episode.t == 0]))
        if episode.is_done:
            del self._rows[episode.id_]
        return map_tree(lambda leaf: leaf[0], found)

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return the statistics by agent, and the part of them that is new since the state was set."""
        found = [(agent_id, dict(pipeline.state)) for agent_id, pipeline in self._known() if pipeline.state]
        new = [(agent_id, dict(pipeline.state)) for agent_id, pipeline in self._new.items()] if found else []
        return {"statistics": found, "new": new} if found else {}

    def set_state(self, state: Any) -> None:
        self._new = {}
        for agent_id, statistics in state.get("statistics", ()):
            pipeline = self._pipelines.get(agent_id)
            if pipeline is not None:
                self._pipelines[agent_id] = pipeline.with_state(statistics)

    def reset_state(self) -> None:
        self.input_observation_space = self.input_observation_space

    def _known(self) -> list[tuple[Any, Pipeline]]:
        pipelines = self.__dict__.get("_pipelines", {})
        return [(agent_id, pipeline) for agent_id, pipeline in pipelines.items() if pipeline is not None]


def _empty(pipeline: Pipeline) -> Pipeline:
    """Return a pipeline without statistics so far."""
    pairs = zip(pipeline.names, pipeline.transforms, pipeline.spaces, strict=False)
    return pipeline.with_state(
        {name: each.initial_state(space) for name, each, space in pairs if name in pipeline.state}
    )


def _aligned(pipeline: Pipeline, episode: Any) -> tuple[Any, Any]:
    """Return the space of the latest observation of an episode as a tree, and the observation."""
    return space_tree(pipeline.observation_space), episode.get_observations(-1)


class FlattenObservations(BuiltIn):
    """Joins all parts of an observation into one vector.

    Args:
        input_observation_space: Space of the observations.
        input_action_space: Space of the actions.
        multi_agent: Whether observations are by agent; Corral applies transforms to each agent alone.
        agent_ids: Agents whose observations are flattened; `None` is all.
        keys_to_remove: Keys of Dict observations to leave out.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        multi_agent: bool = False,
        agent_ids: Collection[Any] | None = None,
        keys_to_remove: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        self.multi_agent, self.agent_ids, self.keys_to_remove = multi_agent, agent_ids, tuple(keys_to_remove or ())
        super().__init__(input_observation_space, input_action_space)

    def to_transforms(self) -> list[Transform]:
        return [NativeFlatten(left_out=self.keys_to_remove)]


class MeanStdFilter(BuiltIn):
    """Normalises observations by their running mean and deviation.

    Args:
        input_observation_space: Space of the observations.
        input_action_space: Space of the actions.
        multi_agent: Whether observations are by agent.
        de_mean_to_zero: Whether the mean is subtracted.
        de_std_to_one: Whether observations are divided by the deviation.
        clip_by_value: Largest absolute value, or `None`.
        update_stats: Whether statistics change; only True.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        multi_agent: bool = False,
        de_mean_to_zero: bool = True,
        de_std_to_one: bool = True,
        clip_by_value: float | None = 10.0,
        update_stats: bool = True,
        **settings: Any,
    ) -> None:
        self.multi_agent = multi_agent
        self.de_mean_to_zero, self.de_std_to_one = de_mean_to_zero, de_std_to_one
        self.clip_by_value, self.update_stats = clip_by_value, update_stats
        super().__init__(input_observation_space, input_action_space)

    def to_transforms(self) -> list[Transform]:
        if not self.update_stats:
            raise ConfigError(
                "MeanStdFilter: update_stats=False is not in Corral: evaluation changes no statistics; leave it out."
            )
        return [NormalizeObservations(clip=self.clip_by_value, center=self.de_mean_to_zero, scale=self.de_std_to_one)]

    def merge_states(self, states: Any) -> dict[str, Any]:
        """Return the statistics of all runners together; what they began with is the same, and counts once.

        A runner that was restarted began without statistics.
        """
        for agent_id, pipeline in self._known():
            pairs = [(dict(state.get("statistics", ())), dict(state.get("new", ()))) for state in states]
            known = [(whole[agent_id], new.get(agent_id)) for whole, new in pairs if agent_id in whole]
            if known:
                known.sort(key=lambda pair: _count(pair[0]) - _count(pair[1]), reverse=True)
                (whole, _), *others = known
                self._pipelines[agent_id] = pipeline.with_state(whole).merged([new for _, new in others if new])
        self._new = {}
        return self.get_state()


def _count(statistics: Mapping[str, Any] | None) -> float:
    return sum(float(each["count"]) for each in (statistics or {}).values())


class FrameStackingEnvToModule(BuiltIn):
    """Stacks the latest observations.

    Args:
        input_observation_space: Space of the observations.
        input_action_space: Space of the actions.
        num_frames: Number of observations.
        multi_agent: Whether observations are by agent.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        num_frames: int = 1,
        multi_agent: bool = False,
        **settings: Any,
    ) -> None:
        self.num_frames, self.multi_agent = num_frames, multi_agent
        super().__init__(input_observation_space, input_action_space)

    def to_transforms(self) -> list[Transform]:
        return [FrameStack(self.num_frames)] if self.num_frames > 1 else []


class FrameStackingLearner(FrameStackingEnvToModule):
    """The learner's part of stacking, which Corral does with the other part."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return the space itself: observations are stacked already."""
        return input_observation_space

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        """Change nothing."""
        return batch

    def to_transforms(self) -> list[Transform]:
        """Return no transforms."""
        return []


class PrevActionsPrevRewards(BuiltIn):
    """Adds the latest actions and rewards to observations.

    Args:
        input_observation_space: Space of the observations.
        input_action_space: Space of the actions.
        multi_agent: Whether observations are by agent.
        n_prev_actions: Number of actions.
        n_prev_rewards: Number of rewards.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        multi_agent: bool = False,
        n_prev_actions: int = 1,
        n_prev_rewards: int = 1,
        **settings: Any,
    ) -> None:
        self.multi_agent, self.n_prev_actions, self.n_prev_rewards = multi_agent, n_prev_actions, n_prev_rewards
        super().__init__(input_observation_space, input_action_space)

    def to_transforms(self) -> list[Transform]:
        return [NativePrevious(num_actions=self.n_prev_actions, num_rewards=self.n_prev_rewards)]


def is_transform(connector: ConnectorV2) -> bool:
    """Return whether a connector is a built-in one whose methods the user did not override."""
    cls = type(connector)
    return isinstance(connector, BuiltIn) and cls.__module__ == __name__


def to_transforms(
    connectors: Sequence[ConnectorV2], module_id: str | None = None, mapping: Callable[..., str] | None = None
) -> list[Transform]:
    """Return the transforms of built-in connectors.

    Args:
        connectors: The connectors.
        module_id: Leave out connectors of agents that do not have this module; `None` keeps all.
        mapping: Function `(agent_id, episode)` that returns the module of an agent.
    """
    transforms: list[Transform] = []
    for connector in connectors:
        agents = connector.agent_ids if module_id is not None and mapping is not None else None
        if agents is None or any(mapping(agent, None) == module_id for agent in agents):  # type: ignore[misc]
            assert isinstance(connector, BuiltIn)
            transforms += connector.to_transforms()
    return transforms
