"""RLlib's default connectors: what each does to episodes and batches, where a connector of the user's comes after it.

Corral does the same without them. A pipeline lists them, so that user code can put connectors before and after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from corral.compat.rllib import space_helpers
from corral.compat.rllib.connectors import ConnectorV2
from corral.compat.rllib.constants import DEFAULT_MODULE_ID, Columns
from corral.compat.rllib.space_helpers import BatchedNdArray
from corral.core.tree import leaves, map_tree


class DefaultConnector(ConnectorV2):
    """Base of the default connectors.

    Args:
        input_observation_space: Space of the observations.
        input_action_space: Space of the actions.
        as_learner_connector: Whether the connector is in a learner's pipeline.
        multi_agent: Whether there are several agents.
        **settings: Not used.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        as_learner_connector: bool = False,
        multi_agent: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self._as_learner_connector, self._multi_agent = as_learner_connector, multi_agent

    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, explore: Any = None, **kwargs: Any) -> Any:
        """Return the batch as it is."""
        return batch

    def _add(self, batch: Any, episodes: Any, column: str, read: Any) -> Any:
        """Add a column to a batch, unless it has one: `read(episode)` is the entries `[len(episode), ...]`."""
        if column not in batch:
            for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
                self.add_n_batch_items(batch, column, read(episode), len(episode), episode)
        return batch


class AddObservationsFromEpisodesToBatch(DefaultConnector):
    """Adds the latest observations, or in learners all observations of steps, to the batch."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Add the column `obs`."""
        if self._as_learner_connector:
            return self._add(batch, episodes, Columns.OBS, lambda each: each.get_observations(slice(0, len(each))))
        if Columns.OBS not in batch:
            for episode in self.single_agent_episode_iterator(episodes):
                self.add_batch_item(batch, Columns.OBS, episode.get_observations(-1), episode)
        return batch


class AddColumnsFromEpisodesToTrainBatch(DefaultConnector):
    """Adds actions, rewards, ends and outputs of the module to the batch of a learner."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Add the columns that the batch lacks."""
        self._add(batch, episodes, Columns.ACTIONS, lambda each: each.get_actions())
        self._add(batch, episodes, Columns.REWARDS, lambda each: each.get_rewards())
        self._add(batch, episodes, Columns.TERMINATEDS, lambda each: _ends(each, each.is_terminated))
        self._add(batch, episodes, Columns.TRUNCATEDS, lambda each: _ends(each, each.is_truncated))
        names = {name for each in self.single_agent_episode_iterator(episodes, False) for name in _outputs(each)}
        for name in sorted(names - batch.keys()):
            self._add(batch, episodes, name, lambda each, name=name: each.get_extra_model_outputs(name))
        return batch


def _ends(episode: Any, flag: bool) -> Any:
    found = np.zeros(len(episode), np.bool_)
    found[-1:] = flag
    return found


def _outputs(episode: Any) -> Any:
    return episode.get_extra_model_outputs()


class AddNextObservationsFromEpisodesToTrainBatch(DefaultConnector):
    """Adds the observations that steps led to to the batch of a learner."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Add the column `new_obs`."""
        return self._add(batch, episodes, Columns.NEXT_OBS, lambda each: each.get_observations(slice(1, len(each) + 1)))


class AddInfosFromEpisodesToTrainBatch(DefaultConnector):
    """Adds the infos to the batch of a learner."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Add the column `infos`, a list of dicts."""
        return self._add(batch, episodes, Columns.INFOS, lambda each: list(each.get_infos(slice(0, len(each)))))


class ComputeReturnsToGo(DefaultConnector):
    """Adds the discounted sums of the rewards from each step to the end of its chunk.

    Args:
        gamma: Discount.
    """

    def __init__(self, input_observation_space: Any = None, input_action_space: Any = None, *, gamma: float) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Add the column `returns_to_go`."""
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            returns, total = np.zeros(len(episode), np.float32), 0.0
            for t in reversed(range(len(episode))):
                returns[t] = total = episode.get_rewards(t) + self.gamma * total
            self.add_n_batch_items(batch, Columns.RETURNS_TO_GO, returns, len(episode), episode)
        return batch


class AddOneTsToEpisodesAndTruncate(DefaultConnector):
    """Stands for the last observation of a chunk, whose value Corral's returns use without another time step."""


class GeneralAdvantageEstimation(DefaultConnector):
    """Stands for the advantages, which Corral computes when the connectors are done."""

    def __init__(
        self, input_observation_space: Any = None, input_action_space: Any = None, *, gamma: float, lambda_: float
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma, self.lambda_ = gamma, lambda_


class AddStatesFromEpisodesToBatch(DefaultConnector):
    """Stands for the states of a module with memory, which Corral keeps."""


class AddTimeDimToBatchAndZeroPad(DefaultConnector):
    """Stands for the sequences of a module with memory, which Corral makes."""


class WriteObservationsToEpisodes(DefaultConnector):
    """Writes the observations of the batch back into the episodes."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Set the latest observation of each episode."""
        column = batch[Columns.OBS]
        for episode, obs in self.single_agent_episode_iterator(episodes, zip_with_batch_column=column):
            episode.set_observations(new_data=obs, at_indices=-1)
        return batch


class AgentToModuleMapping(DefaultConnector):
    """Turns columns by agent into columns by module."""

    def __call__(self, *, batch: Any, shared_data: Any = None, **kwargs: Any) -> Any:
        """Return a batch of columns by module."""
        by_module: dict[str, dict[str, Any]] = {}
        for column, by_agent in batch.items():
            for (_, _, module_id), items in by_agent.items():
                by_module.setdefault(module_id, {}).setdefault(column, []).extend(items)
        return by_module


class BatchIndividualItems(DefaultConnector):
    """Joins the items of each column into arrays."""

    def __call__(self, *, rl_module: Any, batch: Any, **kwargs: Any) -> Any:
        """Return the batch of arrays; in learners it is by module."""
        if self._multi_agent:
            return {
                module_id: {name: _joined(column) for name, column in part.items()} for module_id, part in batch.items()
            }
        found = {name: _joined(column) for name, column in batch.items()}
        return {DEFAULT_MODULE_ID: found} if hasattr(rl_module, "keys") else found


def _joined(column: Any) -> Any:
    if isinstance(column, dict):
        column = [item for items in column.values() for item in items]
    if not isinstance(column, list) or (column and isinstance(column[0], dict) and not leaves(column[0])):
        return column
    return space_helpers.batch(column, individual_items_already_have_batch_dim="auto")


class NumpyToTensor(DefaultConnector):
    """Turns arrays into tensors."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        """Return the batch of tensors."""
        return _mapped(_to_tensor, batch)


class TensorToNumpy(DefaultConnector):
    """Turns tensors into arrays."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        """Return the batch of arrays."""
        return _mapped(_to_array, batch)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _mapped(function, part) for name, part in value.items()}
    return map_tree(function, value) if isinstance(value, tuple) else function(value)


def _to_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype == object:
        return value
    array = np.array(value.view(np.ndarray) if isinstance(value, BatchedNdArray) else value)
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def _to_array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


class GetActions(DefaultConnector):
    """Draws actions from the outputs of the module, if the batch has none."""

    def __call__(self, *, rl_module: Any, batch: Any, explore: Any = None, **kwargs: Any) -> Any:
        """Add `actions` and `action_logp`."""
        if Columns.ACTIONS in batch or Columns.ACTION_DIST_INPUTS not in batch:
            return batch
        kind = rl_module.get_exploration_action_dist_cls() if explore else rl_module.get_inference_action_dist_cls()
        distribution = kind.from_logits(batch[Columns.ACTION_DIST_INPUTS])
        if not explore:
            distribution = distribution.to_deterministic()
        batch[Columns.ACTIONS] = distribution.sample()
        if explore:
            batch[Columns.ACTION_LOGP] = distribution.logp(batch[Columns.ACTIONS])
        return batch


class UnBatchToIndividualItems(DefaultConnector):
    """Turns arrays into lists of items by episode."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Return the batch of lists."""
        found: dict[str, Any] = {}
        for name, column in batch.items():
            items = space_helpers.unbatch(column)
            for episode, item in zip(episodes, items, strict=True):
                self.add_batch_item(found, name, item, episode)
        return found


class ModuleToAgentUnmapping(DefaultConnector):
    """Stands for the way from modules to agents, which Corral's runner knows."""


class RemoveSingleTsTimeRankFromBatch(DefaultConnector):
    """Stands for the axis of time, which Corral's runner does not add."""


class NormalizeAndClipActions(DefaultConnector):
    """Stretches actions from [-1, 1] to the bounds of the space, or clips them.

    Args:
        normalize_actions: Whether to stretch them.
        clip_actions: Whether to clip them.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        normalize_actions: bool = False,
        clip_actions: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.normalize_actions, self.clip_actions = normalize_actions, clip_actions

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        """Add the column `actions_for_env`."""
        if not (self.normalize_actions or self.clip_actions):
            return batch
        change = space_helpers.unsquash_action if self.normalize_actions else space_helpers.clip_action

        def convert(action: Any, episode_id: Any, agent_id: Any, module_id: Any) -> Any:
            space = self.input_action_space if agent_id is None else self.input_action_space[agent_id]
            return change(action, space)

        batch[Columns.ACTIONS_FOR_ENV] = map_items(list, batch[Columns.ACTIONS])
        self.foreach_batch_item_change_in_place(batch, Columns.ACTIONS_FOR_ENV, convert)
        return batch


def map_items(function: Any, column: Any) -> Any:
    """Return a column with `function(items)` in place of each list of items."""
    return {key: function(items) for key, items in column.items()} if isinstance(column, dict) else function(column)


class ListifyDataForVectorEnv(DefaultConnector):
    """Turns items by episode into one list per column; of several agents into dicts by agent."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        """Return the batch of lists."""
        found: dict[str, Any] = {}
        for name, column in batch.items():
            if not isinstance(column, dict):
                found[name] = column
            elif all(len(key) == 1 for key in column):
                found[name] = [item for items in column.values() for item in items]
            else:
                by_episode: dict[Any, dict[Any, Any]] = {episode.id_: {} for episode in episodes}
                for (episode_id, agent_id, _), items in column.items():
                    by_episode[episode_id][agent_id] = items[-1]
                found[name] = list(by_episode.values())
        return found


# The default connectors of each pipeline, in order.


def env_to_module(config: Any) -> list[ConnectorV2]:
    """Return the default connectors from env to module."""
    mapping = [AgentToModuleMapping()] if config.is_multi_agent else []
    return [
        AddObservationsFromEpisodesToBatch(),
        AddTimeDimToBatchAndZeroPad(),
        AddStatesFromEpisodesToBatch(),
        *mapping,
        BatchIndividualItems(multi_agent=config.is_multi_agent),
        NumpyToTensor(),
    ]


def module_to_env(config: Any) -> tuple[list[ConnectorV2], list[ConnectorV2]]:
    """Return the default connectors from module to env: those before the user's, and those after them."""
    mapping = [ModuleToAgentUnmapping()] if config.is_multi_agent else []
    before: list[ConnectorV2] = [
        GetActions(),
        TensorToNumpy(),
        UnBatchToIndividualItems(),
        *mapping,
        RemoveSingleTsTimeRankFromBatch(),
    ]
    clip = NormalizeAndClipActions(normalize_actions=config.normalize_actions, clip_actions=config.clip_actions)
    return before, [clip, ListifyDataForVectorEnv()]


def learner(config: Any) -> tuple[list[ConnectorV2], list[ConnectorV2]]:
    """Return the default connectors of learners: those before the user's, and those after them."""
    mapping = [AgentToModuleMapping(as_learner_connector=True)] if config.is_multi_agent else []
    is_ppo, is_off_policy = config.ALGORITHM == "PPO", config.ALGORITHM in ("DQN", "SAC", "TQC", "CQL", "IQL")
    returns = [GeneralAdvantageEstimation(gamma=config.gamma, lambda_=config.lambda_)] if is_ppo else []
    return ([AddOneTsToEpisodesAndTruncate()] if is_ppo else []), [
        AddObservationsFromEpisodesToBatch(as_learner_connector=True),
        *([AddNextObservationsFromEpisodesToTrainBatch(as_learner_connector=True)] if is_off_policy else []),
        AddColumnsFromEpisodesToTrainBatch(as_learner_connector=True),
        AddTimeDimToBatchAndZeroPad(as_learner_connector=True),
        AddStatesFromEpisodesToBatch(as_learner_connector=True),
        *mapping,
        BatchIndividualItems(multi_agent=config.is_multi_agent),
        NumpyToTensor(as_learner_connector=True),
        *returns,
    ]
