"""What algorithms that learn from recorded data alone share: their settings, their data and their training step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from corral.algorithms.algorithm import Algorithm
from corral.algorithms.algorithm_state import restoring, set_algorithm_state
from corral.config.config import AlgorithmConfig
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.paths import resolve_path
from corral.core.schedules import schedule_value
from corral.core.seeding import module_seed
from corral.core.settings import Need, PositiveInt
from corral.core.tree import map_tree
from corral.episodes.rollout import Rollout
from corral.errors import ConfigError, DataError
from corral.learners.losses import Batch
from corral.learners.settings import UpdateSettings
from corral.learners.update import to_tensors
from corral.offline.data import ModuleData, ModuleRows, load_module_data
from corral.offline.source import Source
from corral.offline.sources import open_source
from corral.replay import ReplayBuffer
from corral.runners.no_runners import NoRunners, describe_env
from corral.runners.runner_group import EnvRunnerGroup

log = logging.getLogger("corral")

MAX_VALIDATION_ROWS = 10_000
"""Rows of the validation episodes with which the loss is computed after each iteration."""

_NO_SAMPLING = Need("an algorithm that samples: this one learns from recorded data", lambda config: False)


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
    NEEDS_ENV: ClassVar[bool] = False

    min_sample_timesteps_per_iteration: int = 0
    train_batch_size_per_learner: int = 256
    num_updates_per_iteration: PositiveInt | None = 1000

    NEEDS: ClassVar[Mapping[str, Need]] = dict.fromkeys(
        (
            *("num_env_runners", "rollout_fragment_length", "batch_mode", "sample_timeout_s", "straggler_factor"),
            *("sample_async", "max_lag", "on_lag", "env_task_fn"),
        ),
        _NO_SAMPLING,
    )

    def validate(self) -> None:
        """Refuse contradictions; see `AlgorithmConfig.validate`."""
        if self.input_ is None:
            raise ConfigError(
                f"offline_data: {self.algo_name} learns from recorded data, and none was given: call "
                ".offline_data(input_='path/of/the/data'), or give --data PATH on the command line."
            )
        if self.map_directory is not None and not resolve_path(self.map_directory, "map_directory").is_dir():
            raise ConfigError(
                f"offline_data: map_directory={self.map_directory!r} is not a directory: make it first, on a disk with "
                "space for all columns."
            )
        if self.env is None and (self.evaluation_interval is not None and "env" not in self.evaluation_config):
            raise ConfigError(
                "evaluation_interval: evaluation rounds play in an env, and none was given: call .environment(...), or "
                "leave it out."
            )
        super().validate()
        if self.output is not None:
            raise ConfigError(
                f"offline_data: output={self.output!r}: {self.algo_name} samples nothing that could be recorded: leave "
                "it out. `corral record RUN` records episodes of a policy."
            )


class OfflineAlgorithm(Algorithm):
    """An algorithm that learns from recorded episodes.

    Subclasses define `make_loss`, and may override `add_columns`, `prepare_batch`, `coefficients` and `note_results`.

    Attributes:
        data: Recorded episodes by module id, for the modules that learn.
    """

    config: OfflineConfig

    def make_env_runner_group(self, config: AlgorithmConfig) -> EnvRunnerGroup:
        """Return a group without runners, for the spaces of the env, of the config, or of the data.

        Raises:
            DataError: There is no data, or it is damaged.
            ConfigError: The spaces are not known.
        """
        self._source: Source = open_source(self.config.input_)
        if config.env is not None:
            specs = describe_env(config)
        else:
            given = config.observation_space, config.action_space
            specs = config.module_specs_of_spaces(
                self._spaces_of_data() if None in given else {DEFAULT_MODULE_ID: given}
            )
        return NoRunners(config, self.engine, specs, self.metrics)

    def _spaces_of_data(self) -> Mapping[str, Any]:
        found = self._source.spaces
        return (
            found if self.config.is_multi_agent or len(found) != 1 else {DEFAULT_MODULE_ID: next(iter(found.values()))}
        )

    def setup(self) -> None:
        """Read the data of the modules that learn.

        Raises:
            DataError: There are no episodes of a module, or an entry does not fit the spaces.
        """
        self.data: dict[str, ModuleData] = {}
        self._validation: dict[str, Batch] = {}
        self.setup_modules()

    def setup_modules(self) -> None:
        """Read the data of each module that learns now and has none; forget the data of removed modules."""
        for module_id in self.data.keys() - set(self.module_ids):
            self._close(self.data.pop(module_id))
            self._validation.pop(module_id, None)
        for module_id in filter(self.trains, self.module_ids):
            if module_id not in self.data:
                self.data[module_id] = self._load(module_id)

    def _load(self, module_id: str) -> ModuleData:
        record, spec = self.records[module_id], self.env_runner_group.module_specs[module_id]
        config, start_s = record.config, time.perf_counter()
        rows = ModuleRows(self._source, self._id_in_data(module_id), spec, record.module.distribution)
        pipeline = record.policy.pipeline
        if pipeline is not None and pipeline.state:
            pipeline = record.policy.pipeline = rows.measure(pipeline)
        data = load_module_data(
            rows,
            pipeline,
            partial(self._make_buffer, module_id),
            add_columns=partial(self.add_columns, config),
            validation_fraction=self.config.validation_fraction,
            seed=self.config.seed or 0,
        )
        log.info(
            "Module %r learns from %s episodes of %s steps, mean return %.1f; they were read in %.1f s.",
            *(module_id, f"{data.num_episodes:,}", f"{data.num_steps:,}", data.episode_return_mean),
            time.perf_counter() - start_s,
        )
        return data

    def _id_in_data(self, module_id: str) -> str:
        """Return the id that a module has in the data: with one module, whatever id the data has."""
        if self.config.is_multi_agent:
            return module_id
        known = self._source.num_rows or dict.fromkeys(rows.module_id for rows in self._source.parts())
        if len(known) > 1:
            raise DataError(
                f"offline_data: {self._source.name} holds episodes of the modules {list(known)}: name those to learn "
                "with multi_agent(policies=[...]), or give the files of one of them."
            )
        return next(iter(known), module_id)

    def _make_buffer(self, module_id: str, num_rows: int, is_validation: bool) -> ReplayBuffer:
        directory = None if is_validation else self.config.map_directory
        return ReplayBuffer(num_rows, directory=directory, seed=module_seed(self.config.seed, module_id))

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

    @property
    def num_updates_per_iteration(self) -> int:
        """Updates of each module in an iteration."""
        if self.config.num_updates_per_iteration is not None:
            return self.config.num_updates_per_iteration
        num_steps = max(len(data.train) for data in self.data.values())
        return math.ceil(num_steps / self.config.total_train_batch_size)

    def training_step(self) -> dict[str, dict[str, Any]]:
        """Take the updates of an iteration, then compute the loss on the episodes for validation."""
        if self.config.is_multi_agent:
            self.setup_modules()  # `policies_to_train` may be a function
        learning = list(filter(self.trains, self.data))
        results: dict[str, dict[str, Any]] = {}
        for _ in range(self.num_updates_per_iteration if learning else 0):
            if results:
                self.log_learner_results(results)
            results = self._update(learning)
        if self.config.validation_fraction:
            for module_id in results:
                results[module_id] |= self._validate(module_id, results[module_id].keys())
        self.sync_weights()
        return results

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
        config = self.records[module_id].config
        return UpdateSettings.from_config(
            config,
            lr=schedule_value(config.lr, self.num_env_steps_sampled_lifetime),
            coefficients=self.coefficients(module_id),
            timestep=self.num_env_steps_sampled_lifetime,
        )

    def _draw(self, module_id: str, buffer: ReplayBuffer, size: int | None = None) -> Batch:
        """Return steps from a buffer, or sequences if the module has memory, as the module sees them."""
        record = self.records[module_id]
        config, pipeline = record.config, record.policy.pipeline
        size = config.total_train_batch_size if size is None else size
        if record.has_memory:
            batch = record.draw_sequences(buffer, size)
            steps = batch["learns"] | batch["burns_in"]  # without the rows of the observations after the last steps
            batch = map_tree(lambda column: column[steps], batch)
        elif self.shows_batches(config):
            batch = buffer.sample(size, gamma=config.gamma)
        else:
            batch = buffer.sample_steps(size)
        if pipeline is not None:
            batch |= {name: pipeline.from_stored(batch[name]) for name in ("obs", "next_obs") if name in batch}
        return self.prepare_batch(module_id, batch, buffer)

    def _validate(self, module_id: str, names: Collection[str]) -> dict[str, float]:
        """Return what the loss reports under some names for the episodes for validation, in evaluation mode."""
        if module_id not in self._validation:
            buffer = self.data[module_id].validation
            assert buffer is not None
            self._validation[module_id] = self._draw(module_id, buffer, min(len(buffer), MAX_VALIDATION_ROWS))
        module, loss = self.learner_group.get_module(module_id), self.loss_of(module_id)
        was_training, device = module.training, next(module.parameters()).device
        with self.timers.time("learning"), torch.no_grad():
            module.eval()
            total, reported = loss(
                module, to_tensors(self._validation[module_id], device), self.coefficients(module_id)
            )
            module.train(was_training)
        parts = total.values() if isinstance(total, Mapping) else (total,)
        scalars = {name: float(value) for name, value in reported.items() if name in names and not value.ndim}
        return {
            "validation_loss": float(sum(parts)),
            **{f"validation_{name}": value for name, value in scalars.items()},
        }

    # State, and the end.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state; of the data it has the position: the generator of the draws."""
        state = super().get_state()
        state["data"] = {
            module_id: {"rng": data.train.get_rng_state(), "fingerprint": data.fingerprint}
            for module_id, data in self.data.items()
        }
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `Algorithm.set_state`. With other data, a warning says so."""
        with restoring(self):
            saved = {module_id: part for module_id, part in state.get("data", {}).items() if module_id in self.data}
            set_rngs = [
                partial(self.data[module_id].train.set_rng_state, part["rng"]) for module_id, part in saved.items()
            ]
            set_algorithm_state(self, state, set_rngs)
            for module_id, part in saved.items():
                if part["fingerprint"] != self.data[module_id].fingerprint:
                    log.warning(
                        "Module %r learned from other data before (%s) than now (%s).",
                        *(module_id, part["fingerprint"], self.data[module_id].fingerprint),
                    )

    def stop(self) -> None:
        """End all workers, and release the memory of the data."""
        super().stop()
        for data in getattr(self, "data", {}).values():  # building may have failed before it
            self._close(data)

    @staticmethod
    def _close(data: ModuleData) -> None:
        for buffer in (data.train, data.validation):
            if buffer is not None:
                buffer.close()
