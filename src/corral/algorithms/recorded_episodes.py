"""The recorded episodes that an algorithm learns from: their spaces, their buffers by module, and their state."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.seeding import module_seed
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

    def __init__(self, config: AlgorithmConfig) -> None:
        """Open the data of a config; no episodes are read.

        Raises:
            DataError: There is no data, or it is damaged.
        """
        self._config = config
        self._source = open_source(config.input_)
        self.modules: dict[str, ModuleData] = {}
        self.num_updates = 0
        self.mean_abs_q: dict[str, float] = {}
        self._validation: dict[str, Batch] = {}

    def make_group(self, algorithm: Algorithm, config: AlgorithmConfig) -> EnvRunnerGroup:
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
        return EnvRunnerGroup(config, algorithm.engine, specs, algorithm.metrics, samples=False)

    def _spaces_of_data(self) -> Mapping[str, Any]:
        found = self._source.spaces
        is_one = len(found) == 1 and not self._config.is_multi_agent
        return {DEFAULT_MODULE_ID: next(iter(found.values()))} if is_one else found

    @property
    def num_updates_per_iteration(self) -> int:
        """Updates of each module in an iteration that learns from the data alone."""
        num_updates: int | None = self._config.num_updates_per_iteration  # type: ignore[attr-defined]
        if num_updates is not None:
            return num_updates
        num_steps = max((len(data.train) for data in self.modules.values()), default=0)
        return max(1, math.ceil(num_steps / self._config.total_train_batch_size))

    def set_modules(self, algorithm: Algorithm, add_columns: Callable[[str], AddColumns | None]) -> None:
        """Read the data of the modules that learn now and have none; forget the data of removed modules.

        Args:
            algorithm: The algorithm; transforms get the statistics of the data.
            add_columns: Function of a module id that returns what adds columns to its rollouts, or `None`.

        Raises:
            DataError: There are no episodes of a module, or an entry does not fit the spaces.
        """
        for module_id in self.modules.keys() - set(algorithm.module_ids):
            _close(self.modules.pop(module_id))
            self._validation.pop(module_id, None)
            self.mean_abs_q.pop(module_id, None)
        for module_id in filter(algorithm.modules.trains, algorithm.module_ids):
            if module_id not in self.modules:
                self.modules[module_id] = self._load(algorithm, module_id, add_columns(module_id))

    def _load(self, algorithm: Algorithm, module_id: str, add_columns: AddColumns | None) -> ModuleData:
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
        return ReplayBuffer(num_rows, directory=directory, seed=module_seed(self._config.seed, module_id))

    def validate(
        self,
        algorithm: Algorithm,
        module_id: str,
        draw: Callable[[ReplayBuffer, int], Batch],
        coefficients: Mapping[str, float],
        names: Collection[str],
    ) -> dict[str, float]:
        """Return the loss on the episodes for validation, in evaluation mode, and what it reports under some names.

        Args:
            algorithm: The algorithm.
            module_id: Id of the module.
            draw: Function that draws so many steps from a buffer; it is called once.
            coefficients: Coefficients of the loss.
            names: Names of numbers that the result has.
        """
        if module_id not in self._validation:
            buffer = self.modules[module_id].validation
            assert buffer is not None
            self._validation[module_id] = draw(buffer, min(len(buffer), MAX_VALIDATION_ROWS))
        with algorithm.timers.time("learning"):
            loss, batch = algorithm.modules.loss_of(module_id), self._validation[module_id]
            total, reported = evaluate_loss(algorithm, module_id, loss, batch, coefficients)
        parts = total.values() if isinstance(total, Mapping) else (total,)
        scalars = {name: float(value) for name, value in reported.items() if name in names and not value.ndim}
        return {
            "validation_loss": float(sum(parts)),
            **{f"validation_{name}": value for name, value in scalars.items()},
        }

    def note_values(self, module_id: str, result: dict[str, Any]) -> None:
        """Take the mean absolute value from the result of an update; a user's loss may not report it."""
        if "mean_abs_q" in result:
            self.mean_abs_q[module_id] = result.pop("mean_abs_q")
        else:
            self.mean_abs_q.pop(module_id, None)

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
