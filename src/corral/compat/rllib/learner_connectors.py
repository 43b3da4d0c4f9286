"""Connectors of learners: called with the episodes of each sample, before returns are computed or replays are stored.

What they write to the rewards of episodes, and the columns that they add to the batch, go into the rollouts; from there
Corral takes both along to returns and losses.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from corral.callbacks.callback import Callback
from corral.compat.rllib import metrics, space_helpers
from corral.compat.rllib.adapted_modules import view_module
from corral.compat.rllib.connectors import is_transform, item_key
from corral.compat.rllib.constants import DEFAULT_MODULE_ID, Columns
from corral.compat.rllib.default_connectors import AddInfosFromEpisodesToTrainBatch, DefaultConnector
from corral.compat.rllib.episodes import COLUMNS
from corral.compat.rllib.learner_only import LearnerOnly
from corral.compat.rllib.modules import MultiRLModule
from corral.compat.rllib.pipelines import LearnerConnectorPipeline, learner_pipeline
from corral.core.tree import leaves, map_tree
from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError
from corral.modules.transforms.pipeline import Pipeline

_NATIVE = {**COLUMNS, Columns.TERMINATEDS: "terminated", Columns.TRUNCATEDS: "truncated"}
_UNCHANGED = (Columns.OBS, Columns.ACTIONS, *_NATIVE)
"""Columns of episodes that connectors may read and not change; Corral has them already."""


def make_pipeline(config: Any, algorithm: Any) -> LearnerConnectorPipeline | None:
    """Return the pipeline of learners, or `None` if it has only connectors that stand for what Corral does anyway.

    Args:
        config: RLlib's config.
        algorithm: Corral's algorithm.
    """
    learner_class = config.learner_class
    builds = getattr(learner_class, "build", None)
    has_own_build = builds is not None and not builds.__module__.startswith("corral.")
    if not config.ALGORITHM or (config.learner_connector is None and not has_own_build):
        return None
    first = algorithm.get_module(algorithm.module_ids[0])
    spaces = (None, None) if config.is_multi_agent else (first.observation_space, first.action_space)
    pipeline = learner_pipeline(config, *spaces)
    if has_own_build:
        pipeline = algorithm.learner_group.learner_here.view._learner_connector
    return pipeline if any(_acts(connector) for connector in pipeline.connectors) else None


def _acts(connector: Any) -> bool:
    """Return whether a connector does more than what Corral does anyway."""
    if is_transform(connector):
        if connector.to_transforms():
            name = type(connector).__name__
            raise ConfigError(f"learner_connector: put {name} into env_to_module_connector: learners see its results.")
        return False
    stands_for_more = type(connector).__name__ in ("AddNextObservationsFromEpisodesToTrainBatch", "ComputeReturnsToGo")
    if isinstance(connector, AddInfosFromEpisodesToTrainBatch):
        raise ConfigError(
            "learner_connector: AddInfosFromEpisodesToTrainBatch: a batch of Corral holds numbers: write a "
            "connector that adds the numbers in the infos that the loss needs."
        )
    return not isinstance(connector, DefaultConnector) or (
        stands_for_more and not connector._as_learner_connector  # the default one of DQN and SAC
    )


def _views(algorithm: Any) -> dict[str, Any]:
    return {module_id: view_module(algorithm.get_module(module_id)) for module_id in algorithm.module_ids}


@dataclass(frozen=True)
class _Chunk:
    """Where the steps of one agent in an episode, or chunk of one, are.

    Attributes:
        key: Key of its items in a column.
        module_id: Module of the agent.
        rollout: Rollout of the module.
        lane: Lane in it.
        start: First row.
        stop: Row after the last.
    """

    key: tuple[Any, ...]
    module_id: str
    rollout: Rollout
    lane: int
    start: int
    stop: int

    def read(self, name: str) -> Any:
        """Return the entries `[len, ...]` of a column."""
        return map_tree(lambda column: column[self.start : self.stop, self.lane], self.rollout.columns[name])

    def write(self, name: str, rows: Any) -> None:
        """Write the entries `[len, ...]` of a column."""
        self.rollout.columns[name][self.start : self.stop, self.lane] = rows


class LearnerConnectors:
    """Calls the connectors of learners in the process of the algorithm.

    Args:
        pipeline: The connectors.
        algorithm: Corral's algorithm.
    """

    def __init__(self, pipeline: LearnerConnectorPipeline, algorithm: Any) -> None:
        """Find the last connector to call."""
        self.pipeline, self._algorithm = pipeline, algorithm
        learner = getattr(algorithm.learner_group.learner_here, "view", None)
        self.learner_only = None if learner is None else LearnerOnly(learner)
        self._modules = MultiRLModule(_views(algorithm)) if learner is None else learner.module
        last = max(i for i, connector in enumerate(pipeline.connectors) if _acts(connector))
        self._called = pipeline.connectors[: last + 1]

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with what the connectors changed and added."""
        on_policy = bool(self._algorithm.config.ON_POLICY)
        sampled, rollouts = rollouts, [_writable(rollout, as_seen=on_policy) for rollout in rollouts]
        episodes, chunks = [], list[_Chunk]()
        for rollout in rollouts:
            for episode in rollout.episodes():
                episodes.append(episode)
                chunks += _chunks_of(rollout, episode)
        batch: dict[str, Any] = {}
        shared_data: dict[str, Any] = {}
        given = {"rl_module": self._modules, "metrics": _Metrics(self._algorithm.metrics)}
        for connector in self._called:
            batch = connector(batch=batch, episodes=episodes, explore=None, shared_data=shared_data, **given)
            if not isinstance(batch, dict):
                raise ConfigError(
                    f"learner_connector: {type(connector).__name__} returned {batch!r:.60}, not the batch."
                )
        if self.learner_only is not None:
            self._algorithm.log_learner_results(self.learner_only.learn(batch))
            batch = {name: part for name, part in batch.items() if name not in self.learner_only.modules}
        _write(batch, chunks, {chunk.module_id for chunk in chunks})
        for before, after in zip(sampled, rollouts, strict=True):
            _keep_env_rewards(before, after)
        return rollouts


def _writable(rollout: Rollout, *, as_seen: bool) -> Rollout:
    """Return a rollout whose rewards can be written to; `as_seen` with the observations that the module saw."""
    if isinstance(rollout, MultiAgentRollout):
        whole = rollout.with_modules({})
        whole.set_modules({name: _writable(part, as_seen=as_seen) for name, part in rollout.modules.items()})
        return whole
    found = copy.copy(rollout.transformed() if as_seen else rollout)
    rewards = found.rewards.copy() if _pipeline_of_rewards(found) is None else rollout.transformed().rewards
    found.columns = {**found.columns, "rewards": rewards}
    return found


def _pipeline_of_rewards(rollout: Rollout) -> Pipeline | None:
    """Return the transforms of rewards that are not applied yet, or `None` if there are none."""
    pipeline = rollout.reward_pipeline or rollout.pipeline
    return None if rollout.pipeline is None or pipeline is None or not pipeline.changes_rewards else pipeline


def _keep_env_rewards(before: Rollout, after: Rollout) -> None:
    """Keep rewards of the env, which transforms change when replays are drawn, apart from what connectors changed."""
    for given, part in zip(before.by_module().values(), after.by_module().values(), strict=True):
        if (pipeline := _pipeline_of_rewards(part)) is not None:
            part.intrinsic_rewards = part.rewards - pipeline.rewards(given.rewards)
            part.columns["rewards"] = given.rewards


def _chunks_of(rollout: Rollout, episode: Any) -> Iterator[_Chunk]:
    for part in getattr(episode, "agent_episodes", {None: episode}).values():
        (start, lane), module_id = part.place, part.module_id or DEFAULT_MODULE_ID
        yield _Chunk(item_key(part), module_id, rollout.by_module()[module_id], lane, start, start + len(part))


# From the batch back to the rollouts.


def _write(batch: Mapping[str, Any], chunks: Sequence[_Chunk], module_ids: set[str]) -> None:
    """Write the columns of a batch into the rollouts; Corral's own columns must not have changed."""
    for name, column in batch.items():
        if name in module_ids and isinstance(column, Mapping):
            of_module = _in_order([chunk for chunk in chunks if chunk.module_id == name])
            for inner, rows in column.items():
                _write_column(inner, _split(inner, rows, of_module))
        elif isinstance(column, Mapping) and all(isinstance(key, tuple) for key in column):
            of_keys = {key: [chunk for chunk in chunks if chunk.key == key] for key in column}
            _write_column(name, [part for key, items in column.items() for part in _split(name, items, of_keys[key])])
        else:
            _write_column(name, _split(name, column, _in_order(chunks)))


def _in_order(chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Return chunks with the chunks of one episode next to each other, as batches have them."""
    by_key: dict[Any, list[_Chunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.key, []).append(chunk)
    return [chunk for group in by_key.values() for chunk in group]


def _split(name: str, items: Any, chunks: Sequence[_Chunk]) -> list[tuple[_Chunk, Any]]:
    """Return the entries `[len, ...]` of each chunk.

    Raises:
        ConfigError: Their number is not the number of steps.
    """
    if isinstance(items, list):
        items = space_helpers.batch(items, individual_items_already_have_batch_dim="auto")
    rows = map_tree(_as_array, items)
    ends = np.cumsum([0, *(chunk.stop - chunk.start for chunk in chunks)])
    if any(len(leaf) != ends[-1] for leaf in leaves(rows)):
        raise ConfigError(
            f"learner_connector: the column {name!r} has {len(leaves(rows)[0])} items for {ends[-1]} steps: add one "
            "for each step of each episode."
        )
    parts = itertools.pairwise(ends)
    return [
        (chunk, map_tree(lambda leaf, a=a, b=b: leaf[a:b], rows)) for chunk, (a, b) in zip(chunks, parts, strict=True)
    ]


def _as_array(leaf: Any) -> Any:
    array = leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _write_column(name: str, parts: Sequence[tuple[_Chunk, Any]]) -> None:
    native = _NATIVE.get(name, name)
    # One dtype for all episodes: the numbers of one may be integers, and of another floats.
    dtypes = {rows.dtype for _, rows in parts if isinstance(rows, np.ndarray)}
    blank = _as_array(np.empty(0, np.result_type(*dtypes or [np.float32])))
    for chunk, rows in parts:
        if name in _UNCHANGED:
            _check_unchanged(name, chunk.read(native), rows)
        elif name == Columns.REWARDS:
            if not np.array_equal(chunk.read(name).astype(np.float32), rows):
                chunk.write(name, rows)
        else:
            if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "biuf":
                raise ConfigError(f"learner_connector: the column {name!r} holds no arrays of numbers.")
            if native not in chunk.rollout:
                chunk.rollout.add_column(native, rows.astype(blank.dtype))
            chunk.write(native, rows)


def _check_unchanged(name: str, before: Any, after: Any) -> None:
    """Refuse another observation, action, or output of the module.

    Raises:
        ConfigError: A connector changed the column.
    """
    pairs = zip(leaves(before), leaves(after), strict=True)
    if not all(one.shape == other.shape and np.allclose(one, other, equal_nan=True) for one, other in pairs):
        raise ConfigError(
            f"learner_connector: a connector changed the column {name!r}, with which actions were chosen: change "
            "observations in env_to_module_connector, or add a column of another name."
        )


class _Metrics:
    """Logs under `learners` in the result.

    Args:
        logger: Logger of the algorithm.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = metrics.as_rllib(logger)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._logger, name)

    def log_value(self, key: Any, value: Any, **settings: Any) -> None:
        """Log a value."""
        self._logger.log_value(("learners", *(key if isinstance(key, tuple) else (key,))), value, **settings)


class LearnerConnectorEvents(Callback):
    """Keeps the state of the connectors of learners in checkpoints."""

    def __init__(self) -> None:
        """Know no connectors yet."""
        self._connectors: LearnerConnectors | None = None

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Find the connectors."""
        self._connectors = algorithm.learner_connectors

    def get_state(self) -> dict[str, Any]:
        """Return the states of the connectors, and of the modules that only learners have."""
        found = self._connectors
        if found is None:
            return {}
        modules = {} if found.learner_only is None else found.learner_only.get_state()
        return {"connectors": found.pipeline.get_state(), "modules": modules}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from states."""
        if self._connectors is not None and state:
            self._connectors.pipeline.set_state(state["connectors"])
            if self._connectors.learner_only is not None:
                self._connectors.learner_only.set_state(state["modules"])
