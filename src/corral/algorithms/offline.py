"""What algorithms that learn from recorded data alone share: their settings and their training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.recorded_episodes import RecordedEpisodes
from corral.core.schedules import schedule_value
from corral.core.settings import PositiveInt
from corral.core.tree import map_tree
from corral.data.episodes.rollout import Rollout
from corral.data.offline.data import AddColumns, ModuleData
from corral.data.replay import ReplayBuffer
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings


@dataclass(kw_only=True)
class OfflineConfig(AlgorithmConfig):
    """Settings of algorithms that learn from recorded data alone.

    An env is only needed for evaluation rounds, and for the spaces if the data does not say them. The steps of the
    batches that are drawn from the data count as env steps, in results, schedules and stop criteria.

    Attributes:
        num_updates_per_iteration: Updates of each module in an iteration, each from a batch of
            `train_batch_size_per_learner` steps that are drawn evenly from all steps. `None` is as many as it takes to
            draw as many steps as there are.
    """

    ON_POLICY: ClassVar[bool] = False
    SAMPLES_BATCHES: ClassVar[bool] = False
    LEARNS_FROM_DATA: ClassVar[bool] = True

    min_sample_timesteps_per_iteration: int = 0
    train_batch_size_per_learner: int = 256
    num_updates_per_iteration: PositiveInt | None = 1000

    @property
    def samples(self) -> bool:
        """False."""
        return False


class OfflineAlgorithm(Algorithm):
    """An algorithm that learns from recorded episodes.

    Subclasses define `make_loss`, and may override `add_columns`, `prepare_batch`, `coefficients` and `note_results`.
    """

    config: OfflineConfig
    recorded: RecordedEpisodes

    def setup(self) -> None:
        """Read the data of the modules that learn.

        Raises:
            DataError: There are no episodes of a module, or an entry does not fit the spaces.
        """
        self.setup_modules()

    def setup_modules(self) -> None:
        """Read the data of each module that learns now and has none; forget the data of removed modules."""
        self.recorded.set_modules(self._make_add_columns)

    def _make_add_columns(self, module_id: str) -> AddColumns:
        return partial(self.add_columns, self.modules[module_id].config)

    @property
    def data(self) -> dict[str, ModuleData]:
        """Recorded episodes by module id, for the modules that learn."""
        return self.recorded.modules

    # What a subclass may override.

    def add_columns(self, config: OfflineConfig, rollout: Rollout) -> Mapping[str, Any]:
        """Return more columns `[T, 1, ...]` of recorded episodes, which batches then have.

        Args:
            config: Config of the module.
            rollout: Whole episodes, one after the other in one lane, as the module learns from them.
        """
        return {}

    def prepare_batch(self, module_id: str, batch: Batch, buffer: ReplayBuffer) -> Batch:
        """Return a batch of steps that were drawn from a buffer in the form that the loss expects."""
        return batch

    def coefficients(self, module_id: str) -> dict[str, float]:
        """Return the coefficients of the loss of a module for the next update."""
        return {}

    def note_results(self, module_id: str, results: dict[str, Any]) -> None:
        """Take what the loss of an update reported, and what was not learned yet when `coefficients` was called."""

    # The training step.

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Take the updates of an iteration, and return the metrics, with the loss on the episodes for validation."""
        if self.config.is_multi_agent:
            self.setup_modules()  # `policies_to_train` may be a function
        num_updates = self.recorded.num_updates_per_iteration
        return self.recorded.make_updates(num_updates, self._update, self._draw, self.coefficients)

    def _update(self, learning: Sequence[str]) -> dict[str, dict[str, Any]]:
        with self.timers.time("returns"):
            batches = {module_id: self._draw(module_id, self.data[module_id].train) for module_id in learning}
        settings = {module_id: self._settings(module_id) for module_id in batches}
        with self.timers.time("learning"):
            results = self.learner_group.update(batches, settings)
        self.num_env_steps_sampled_lifetime += self.config.total_train_batch_size
        for module_id, found in results.items():
            self.note_results(module_id, found)
        return results

    def _settings(self, module_id: str) -> UpdateSettings:
        config = self.modules[module_id].config
        return UpdateSettings.from_config(
            config,
            lr=schedule_value(config.lr, self.num_env_steps_sampled_lifetime),
            coefficients=self.coefficients(module_id),
            timestep=self.num_env_steps_sampled_lifetime,
        )

    def _draw(self, module_id: str, buffer: ReplayBuffer, size: int | None = None) -> Batch:
        """Return steps from a buffer, or sequences if the module has memory, as the module sees them."""
        record = self.modules[module_id]
        config = record.config
        size = config.total_train_batch_size if size is None else size
        if record.has_memory:
            batch = record.draw_sequences(buffer, size)
            steps = batch["learns"] | batch["burns_in"]  # without the rows of the observations after the last steps
            batch = map_tree(lambda column: column[steps], batch)
        elif record.shows_batches:
            batch = buffer.sample(size, gamma=config.gamma)
        else:
            batch = buffer.sample_steps(size)
        return self.prepare_batch(module_id, record.transform_stored(batch), buffer)
