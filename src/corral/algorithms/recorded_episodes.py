"""The recorded episodes that an algorithm learns from: their spaces and buffers, updates from them, their state."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.interrupts import interruptible
from corral.core.schedules import schedule_value
from corral.core.seeding import module_seed
from corral.core.tree import map_tree
from corral.data.offline.data import AddColumns, ModuleData, ModuleRows, load_module_data
from corral.data.offline.sources import open_source
from corral.data.replay import ReplayBuffer
from corral.errors import DataError
from corral.learners.losses import Batch, Loss
from corral.learners.update import to_tensors
from corral.runners.runner import EnvRunner
from corral.runners.runner_group import EnvRunnerGroup

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.config import AlgorithmConfig

log = logging.getLogger("corral")

MAX_VALIDATION_ROWS = 10_000
"""Rows of the validation episodes with which the loss is computed after each iteration."""


class RecordedEpisodes:
    """Recorded episodes by module.

    Attributes:
        modules: The episodes of each module that learns, by module id.
        num_updates: Updates of each module that an algorithm which samples later has made from the data alone.
        mean_abs_q: Mean absolute value of the latest batch, by module id, where recorded actions are imitated.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        """Open the data of an algorithm's config; no episodes are read.

        Raises:
            DataError: There is no data, or it is damaged.
        """
        self._algorithm: Any = algorithm
        self._source = open_source(algorithm.config.input_)
        self.modules: dict[str, ModuleData] = {}
        self.num_updates = 0
        self.mean_abs_q: dict[str, float] = {}
        self._validation: dict[str, Batch] = {}

    @property
    def _config(self) -> Any:
        return self._algorithm.config  # of now: `reconfigure` makes another one

    def make_group(self, config: AlgorithmConfig) -> EnvRunnerGroup:
        """Return a runner group without runners, for the spaces of the env, of the config, or of the data.

        Raises:
            EnvError: The env cannot be made.
            ConfigError: The spaces are not known.
        """
        if config.env is not None:
            runner = EnvRunner(config, makes_modules=False)
            try:
                specs = config.module_specs(*runner.describe_env()[:2])
            finally:
                runner.stop()
        else:
            given = config.observation_space, config.action_space
            specs = config.module_specs_of_spaces(
                self._spaces_of_data() if None in given else {DEFAULT_MODULE_ID: given}
            )
        config = config.copy(num_env_runners=0).freeze()
        algorithm = self._algorithm
        return EnvRunnerGroup(config, algorithm.engine, specs, algorithm.metrics, samples=False)

    def _spaces_of_data(self) -> Mapping[str, Any]:
        found = self._source.spaces
        is_one = len(found) == 1 and not self._config.is_multi_agent
        return {DEFAULT_MODULE_ID: next(iter(found.values()))} if is_one else found

    @property
    def num_updates_per_iteration(self) -> int:
        """Updates of each module in an iteration that learns from the data alone."""
        num_updates: int | None = self._config.num_updates_per_iteration
        if num_updates is not None:
            return num_updates
        num_steps = max((len(data.train) for data in self.modules.values()), default=0)
        return max(1, math.ceil(num_steps / int(self._config.total_train_batch_size)))

    def set_modules(self, add_columns: Callable[[str], AddColumns | None] = lambda module_id: None) -> None:
        """Read the data of the modules that learn now and have none; forget the data of removed modules.

        Transforms get the statistics of the data.

        Args:
            add_columns: Function of a module id that returns what adds columns to its rollouts, or `None`.

        Raises:
            DataError: There are no episodes of a module, or an entry does not fit the spaces.
        """
        algorithm = self._algorithm
        for module_id in self.modules.keys() - set(algorithm.module_ids):
            _close(self.modules.pop(module_id))
            self._validation.pop(module_id, None)
            self.mean_abs_q.pop(module_id, None)
        for module_id in filter(algorithm.modules.trains, algorithm.module_ids):
            if module_id not in self.modules:
                self.modules[module_id] = self._load(module_id, add_columns(module_id))

    def _load(self, module_id: str, add_columns: AddColumns | None) -> ModuleData:
        algorithm = self._algorithm
        record, spec = algorithm.modules[module_id], algorithm.env_runner_group.module_specs[module_id]
        start_s = time.perf_counter()
        rows = ModuleRows(self._source, self._id_in_data(module_id), spec, record.module.distribution)
        pipeline = record.policy.pipeline
        if pipeline is not None and pipeline.state:
            pipeline = record.policy.pipeline = rows.measure(pipeline)
        data = load_module_data(
            rows,
            pipeline,
            partial(self._make_buffer, module_id),
            add_columns=add_columns,
            validation_fraction=self._config.validation_fraction,
            seed=self._config.seed or 0,
        )
        log.info(
            "Module %r learns from %s episodes of %s steps, mean return %.1f; they were read in %.1f s.",
            *(module_id, f"{data.num_episodes:,}", f"{data.num_steps:,}", data.episode_return_mean),
            time.perf_counter() - start_s,
        )
        return data

    def _id_in_data(self, module_id: str) -> str:
        """Return the id that a module has in the data: with one module, whatever id the data has."""
        if self._config.is_multi_agent:
            return module_id
        known = (
            self._source.num_rows
            or self._source.spaces
            or dict.fromkeys(rows.module_id for rows in self._source.parts())
        )
        if len(known) > 1:
            raise DataError(
                f"offline_data: {self._source.name} holds episodes of the modules {list(known)}: name those to learn "
                "with multi_agent(policies=[...]), or give the files of one of them."
            )
        return next(iter(known), module_id)

    def _make_buffer(self, module_id: str, num_rows: int, is_validation: bool) -> ReplayBuffer:
        directory = None if is_validation else self._config.map_directory
        seed = [module_seed(self._config.seed, module_id)]
        if self._config.samples:  # the replay buffer has this seed, and would draw from the same places in step
            seed.append(3 + is_validation)
        return ReplayBuffer(num_rows, directory=directory, seed=seed)

    # Updates from the data alone.

    @interruptible
    def make_updates(
        self,
        num_updates: int,
        update: Callable[[Sequence[str]], dict[str, dict[str, Any]]],
        draw: Callable[[str, ReplayBuffer, int], Batch],
        coefficients: Callable[[str], Mapping[str, float]],
    ) -> dict[str, dict[str, Any]]:
        """Make the updates of an iteration, send the weights, and return the results by module id.

        With episodes for validation, the results of the last update have the loss on them, too.

        Args:
            num_updates: Number of updates.
            update: Function that makes one update of the modules with these ids.
            draw: Function of a module id that draws so many steps for validation from a buffer.
            coefficients: Function of a module id that returns the coefficients of the loss for validation.
        """
        algorithm = self._algorithm
        learning = list(filter(algorithm.modules.trains, self.modules))
        results: dict[str, dict[str, Any]] = {}
        for _ in range(num_updates if learning else 0):
            if results:
                algorithm.log_learner_results(results)
            results = update(learning)
        if self._config.validation_fraction:
            for module_id, found in results.items():
                found |= self._validate(module_id, draw, coefficients(module_id), found.keys())
        algorithm.sync_weights()
        return results

    def _validate(
        self,
        module_id: str,
        draw: Callable[[str, ReplayBuffer, int], Batch],
        coefficients: Mapping[str, float],
        names: Collection[str],
    ) -> dict[str, float]:
        """Return the loss on the episodes for validation, in evaluation mode, and what it reports under some names."""
        algorithm = self._algorithm
        if module_id not in self._validation:
            buffer = self.modules[module_id].validation
            assert buffer is not None
            self._validation[module_id] = draw(module_id, buffer, min(len(buffer), MAX_VALIDATION_ROWS))
        with algorithm.timers.time("learning"):
            loss, batch = algorithm.modules.loss_of(module_id), self._validation[module_id]
            total, reported = evaluate_loss(algorithm, module_id, loss, batch, coefficients)
        parts = total.values() if isinstance(total, Mapping) else (total,)
        scalars = {name: float(value) for name, value in reported.items() if name in names and not value.ndim}
        return {
            "validation_loss": float(sum(parts)),
            **{f"validation_{name}": value for name, value in scalars.items()},
        }

    # An algorithm with a replay buffer learns from the data alone at first, and then from batches of both.

    def sampling_has_begun(self) -> bool:
        """Return whether the updates from the data alone are over, and note it in `samples_now` of the sampler."""
        total = self._config.num_offline_updates
        begun = total is not None and self.num_updates >= total
        self._algorithm.sampler.samples_now = begun
        return begun

    def learn_alone(self) -> dict[str, dict[str, Any]]:
        """Make the updates of an iteration in which nothing is sampled, and return the results."""
        algorithm = self._algorithm
        if self._config.is_multi_agent:
            algorithm.setup_modules()  # `policies_to_train` may be a function
        num_updates, total = self.num_updates_per_iteration, self._config.num_offline_updates
        if total is not None:
            num_updates = min(num_updates, total - self.num_updates)
        results = self.make_updates(num_updates, self._learn_in_turn, self._draw_for_validation, self._weights_at_end)
        self.num_updates += num_updates
        return results

    def _learn_in_turn(self, module_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Make one update of each module."""
        algorithm, size = self._algorithm, self._config.total_train_batch_size
        if self._config.num_offline_updates is None:
            algorithm.num_env_steps_sampled_lifetime += size
        else:  # env steps stand still, and targets count the steps of the batches
            for module_id in module_ids:
                algorithm.count_for_target(module_id, size, 0)
        return {module_id: algorithm.learn(module_id) for module_id in module_ids}

    def _draw_for_validation(self, module_id: str, buffer: ReplayBuffer, size: int) -> Batch:
        """Return a batch for validation, with noise that neither depends on the training so far nor changes it."""
        algorithm = self._algorithm
        kept, algorithm._noise_rng = algorithm._noise_rng, np.random.default_rng([self._config.seed or 0, 2])
        try:
            batch = self._mark(module_id, algorithm._draw(module_id, buffer, size), np.ones(size, bool))
            prepared: Batch = algorithm.prepare_batch(module_id, batch)
            return prepared
        finally:
            algorithm._noise_rng = kept

    def _weights_at_end(self, module_id: str) -> dict[str, float]:
        return {**self._algorithm.VALIDATION_COEFFICIENTS, **self.imitation_coefficients(module_id, {})}

    def draw_mixed(self, module_id: str) -> tuple[Batch, NDArray[np.bool_]]:
        """Return a batch of sampled and recorded transitions, and which rows are recorded, bool `[B]`."""
        algorithm = self._algorithm
        config = algorithm.modules[module_id].config
        size = config.total_train_batch_size
        num_sampled = size - round(size * config.recorded_fraction) if algorithm.sampler.samples_now else 0
        data = self.modules[module_id].train
        if not num_sampled:
            batch, is_recorded = algorithm._draw(module_id, data), np.ones(size, bool)
        elif num_sampled == size:
            batch, is_recorded = algorithm._draw(module_id), np.zeros(size, bool)
        else:
            sampled = algorithm._draw(module_id, size=num_sampled)
            found = algorithm._draw(module_id, data, size - num_sampled)
            # Spread evenly, so that each of several learners, and each minibatch of rows in order, has its share.
            places = np.concatenate([np.arange(0.5, num) / num for num in (num_sampled, size - num_sampled)])
            order = places.argsort(kind="stable")
            batch = {
                name: map_tree(lambda *parts: np.concatenate(parts)[order], column, found[name])
                for name, column in sampled.items()
                if name in found
            }
            is_recorded = order >= num_sampled
        return self._mark(module_id, batch, is_recorded), is_recorded

    def _mark(self, module_id: str, batch: Batch, is_recorded: NDArray[np.bool_]) -> Batch:
        """Add the column `recorded` if recorded actions are imitated; see `with_imitation`."""
        if not self._algorithm.modules[module_id].config.imitation_coeff:
            return batch
        share = len(is_recorded) / max(1, int(np.count_nonzero(is_recorded)))
        return batch | {"recorded": np.where(is_recorded, np.float32(share), np.float32(0.0))}

    def imitation_coefficients(self, module_id: str, batch: Batch) -> dict[str, float]:
        """Return the weight of imitation in the next update, if there is any; the batch is the next one.

        If the policy seeks values, the setting is multiplied by the mean absolute value of the update before, and in
        the first update of its own batch: 0.4 is then TD3+BC with its alpha of 2.5 (Fujimoto and Gu 2021,
        arXiv:2106.06860, eqs. 3 and 5). If actions are chosen by their values themselves, nothing multiplies it.
        """
        algorithm = self._algorithm
        setting = algorithm.modules[module_id].config.imitation_coeff
        if not setting:
            return {}
        coeff = schedule_value(setting, algorithm.num_env_steps_sampled_lifetime)
        if not algorithm.SEEKS_VALUES:
            return {"imitation_coeff": coeff}
        if module_id not in self.mean_abs_q:
            coefficients = {**algorithm.VALIDATION_COEFFICIENTS, "imitation_coeff": 0.0}
            _, found = evaluate_loss(algorithm, module_id, algorithm.modules.loss_of(module_id), batch, coefficients)
            self.mean_abs_q[module_id] = float(found.get("mean_abs_q", 1.0))  # a user's loss may not report it
        return {"imitation_coeff": coeff * self.mean_abs_q[module_id]}

    def note_values(self, module_id: str, result: dict[str, Any]) -> None:
        """Take the mean absolute value from the result of an update; a user's loss may not report it."""
        if "mean_abs_q" in result:
            self.mean_abs_q[module_id] = result.pop("mean_abs_q")
        else:
            self.mean_abs_q.pop(module_id, None)

    # State, and the end.

    def get_state(self) -> dict[str, Any]:
        """Return the number of updates, and by module the generator of the draws and a fingerprint of the data."""
        modules = {
            module_id: {"rng": data.train.get_rng_state(), "fingerprint": data.fingerprint}
            for module_id, data in self.modules.items()
        }
        return {"num_updates": self.num_updates, "mean_abs_q": dict(self.mean_abs_q), "modules": modules}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, or from none of a run without data. With other data, a warning says so."""
        self.num_updates, self.mean_abs_q = state.get("num_updates", 0), dict(state.get("mean_abs_q", {}))
        for module_id, part in state.get("modules", {}).items():
            if module_id not in self.modules:
                continue
            data = self.modules[module_id]
            data.train.set_rng_state(part["rng"])
            if part["fingerprint"] != data.fingerprint:
                log.warning(
                    "The data of module %r has changed since the checkpoint: from %s to %s.",
                    *(module_id, part["fingerprint"], data.fingerprint),
                )

    def stop(self) -> None:
        """Release the memory of the data."""
        for data in self.modules.values():
            _close(data)


def _close(data: ModuleData) -> None:
    for buffer in (data.train, data.validation):
        if buffer is not None:
            buffer.close()


def evaluate_loss(
    algorithm: Algorithm, module_id: str, loss: Loss, batch: Batch, coefficients: Mapping[str, float]
) -> tuple[Any, dict[str, Any]]:
    """Return what a loss returns for a whole batch with the weights of now, in evaluation mode and without gradients.

    Args:
        algorithm: The algorithm.
        module_id: Id of the module.
        loss: The loss.
        batch: Columns `[B, ...]`, as the loss expects them.
        coefficients: Coefficients of the loss.
    """
    module = algorithm.learner_group.get_module(module_id)
    was_training, device = module.training, next(module.parameters()).device
    with torch.no_grad():
        module.eval()
        found = loss(module, to_tensors(batch, device), coefficients)
        module.train(was_training)
    return found
