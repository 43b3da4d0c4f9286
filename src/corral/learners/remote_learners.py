"""Learners that an engine runs, behind one object: they take the same steps, on shards of each batch."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.interrupts import interrupts_deferred
from corral.core.metrics.logger import MetricsLogger, Parts
from corral.core.metrics.reduction_settings import reduction_of_updates
from corral.core.metrics.timers import Timers
from corral.core.tree import map_tree, num_rows
from corral.engines.call_limits import CallLimits
from corral.errors import CorralError, LossError, WorkerDiedError
from corral.learners.distributed import LostPeerError, backend_for, gpu_id
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup, PendingUpdate, Results
from corral.learners.losses import Batch
from corral.learners.minibatches import Cuts
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.layers import SharedLayers, share_layers
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec

if TYPE_CHECKING:
    from corral.engines.base import WorkerHandle

log = logging.getLogger("corral")

# Results that are equal in all learners, because they take the same steps.
SAME_RESULTS = ("_optimizer_global_norm", "_optimizer_learning_rate", "num_gradient_steps", "num_epochs")
# Results that are summed: the rows of a gradient step are spread over all learners.
SUMMED_RESULTS = ("module_train_batch_size_mean",)

# An error that follows from another learner's error may arrive this many seconds before it.
GRACE_S = 5.0
STOP_S = 2.0


class RemoteLearnerGroup(LearnerGroup):
    """The group of learners that an engine runs, one in each worker.

    Each worker holds a learner that starts with the same weights, a batch is split into one shard of rows per worker,
    and the gradients of all workers are averaged. The learner of this process only keeps a copy of the first worker's
    weights. A worker that fails ends all workers, because their weights would differ; no worker is restarted. The copy
    of the weights stays.

    Args:
        learner: The learner of this process.
        workers: Handles of workers that are `Learner`s; with more than one, each has its `peers`. The group ends them.
        host: Host where the workers find each other; `None` is the network address of the first worker's host.
        start_timeout_s: Seconds that the workers have to start.
        describe_available: Returns what there is room for, for the message when the workers do not start in time.
        limits: Time limits of the workers' calls; `None` is no limit.

    Raises:
        CorralError: The workers did not start in time. Exceptions that workers raise while they start are raised
            unchanged.
    """

    _own_processes: ClassVar[bool] = True

    def __init__(
        self,
        learner: Learner,
        workers: Sequence[WorkerHandle],
        *,
        host: str | None = None,
        start_timeout_s: float = 120.0,
        describe_available: Callable[[], str] = str,
        limits: CallLimits | None = None,
    ) -> None:
        """Connect the workers."""
        super().__init__(learner)
        self._workers = list(workers)
        self.num_learners = len(self._workers)
        self._limits = limits or CallLimits(None)
        self._ended: str | None = None  # why the workers are gone
        self._is_behind = False  # whether the workers have weights that the copy here lacks, after an exception
        try:
            self._connect(host, start_timeout_s, describe_available)
        except BaseException:
            self._end("they could not start.")
            raise

    def _connect(self, host: str | None, start_timeout_s: float, describe_available: Callable[[], str]) -> None:
        deadline = time.monotonic() + start_timeout_s

        def call(workers: Sequence[WorkerHandle], *args: Any) -> list[Any]:
            futures = [worker.call(*args) for worker in workers]
            wait(futures, max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
            late = [f"learner {index}" for index, future in enumerate(futures, 1) if not future.done()]
            if late and not _errors(futures):
                raise CorralError(
                    f"{', '.join(late)} did not start within start_timeout_s={start_timeout_s}. {describe_available()}"
                )
            return self._results(futures)

        gpu_ids = call(self._workers, _gpu_id)
        if len(self._workers) > 1:
            [address] = call(self._workers[:1], _call_peers, "open", host, start_timeout_s)
            call(self._workers, _call_peers, "join", address, backend_for(gpu_ids), start_timeout_s)

    @property
    def learner_here(self) -> Learner:
        """The copy in this process, with the weights of the last update if the workers still have them."""
        if self._is_behind and self._ended is None:
            with suppress(WorkerDiedError):
                call = self._workers[0].call("get_weights", timeout_s=self._limits.limit_s())
                [weights] = self._results([call])
                self._copy.set_weights(weights)
        self._is_behind = False
        return self._copy

    @learner_here.setter
    def learner_here(self, learner: Learner) -> None:
        self._copy = learner

    # Learning.

    def update(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> Results:
        """Take gradient steps, and return the metrics; see `LearnerGroup.update`."""
        return self.update_async(batches, settings).result()

    def update_async(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> PendingUpdate:
        """Ask all workers for an update, and return it as pending; see `LearnerGroup.update_async`."""
        try:
            given = {name: batches[name] for name in batches if name in settings}
            shards = split_batches(given, len(self._workers))
            passes = sum(num_rows(batch) * settings[module_id].num_epochs for module_id, batch in given.items())
            was_behind, self._is_behind = self._is_behind, True  # if an interrupt ends this in the middle
            start_s = time.monotonic()
            arguments = [(shard, settings, rank == 0) for rank, shard in enumerate(shards)]
            futures = self._begin_each(_update, arguments, self._limits.limit_s("row passes", passes))
            self._is_behind = was_behind
        except BaseException:
            self.weights_version += 1
            raise
        ends_s: list[float] = []
        futures[0].add_done_callback(lambda _: ends_s.append(time.monotonic()))
        return PendingUpdate(partial(self._take_update, futures, shards, start_s, ends_s), futures)

    def _take_update(
        self, futures: list[Future[Any]], shards: list[dict[str, Batch]], start_s: float, ends_s: list[float]
    ) -> Results:
        """Return the results of an update, and copy its weights; see `update_async`."""
        self._is_behind = True
        try:
            answers = self._results(futures)
            sizes = [{module_id: num_rows(batch) for module_id, batch in shard.items()} for shard in shards]
            epochs = {module_id: results["num_epochs"] for module_id, results in answers[0][0].items()}
            taken = sum(size * epochs[module_id] for shard in sizes for module_id, size in shard.items())
            self._limits.note("row passes", taken, max(ends_s, default=time.monotonic()) - start_s)
            self._copy.set_weights(answers[0][1])
            self._is_behind = False
        finally:
            self.weights_version += 1  # after an error too: steps before it have changed the weights
        return {
            module_id: merge_results(
                [results[module_id] for results, _ in answers],
                [size[module_id] for size in sizes],
                [Cuts(shard[module_id]).size for shard in shards],
            )
            for module_id in epochs
        }

    # Modules.

    def add_module(
        self,
        module_id: str,
        spec: ModuleSpec,
        module: Module,
        learning: LearningSpec | None,
        shared_layers: SharedLayers = MappingProxyType({}),
    ) -> None:
        """Add a module to all learners; see `LearnerGroup.add_module`."""
        super().add_module(module_id, spec, module, learning, shared_layers)
        weights = self._copy.get_weights()[module_id]
        frozen = frozen_parameters(module)
        self._call_all(_add_module, module_id, spec, weights, frozen, learning, dict(shared_layers))

    def remove_module(self, module_id: str) -> None:
        """Remove a module from all learners; see `LearnerGroup.remove_module`."""
        super().remove_module(module_id)
        self._call_all(Learner.remove_module, module_id)

    def foreach_module(self, module_id: str, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn(module, *args)` on a module in every learner; see `LearnerGroup.foreach_module`."""
        copy, self._is_behind = self.learner_here, True
        self._call_all(_apply, module_id, fn, *args)
        _apply(copy, module_id, fn, *args)
        self._is_behind = False

    def foreach_learner(self, fn: Callable[..., Any], *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Return `fn(learner, *args)` of every learner; see `LearnerGroup.foreach_learner`."""
        self._is_behind = True
        return super().foreach_learner(fn, *args, each=each)

    # Weights and state.

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Copy weights into all learners; see `LearnerGroup.set_weights`."""
        self._copy.set_weights(weights)
        self._is_behind = True
        super().set_weights(weights)
        self._is_behind = False

    def take_changes(self) -> bool:
        """Send weights that were changed by hand to the workers; see `LearnerGroup.take_changes`."""
        return self._ended is None and super().take_changes()

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state; see `LearnerGroup.get_state`."""
        if self._ended is None:
            return super().get_state()
        log.warning(
            "The learners have ended (%s): this state has the weights of the last update, but not the state of the "
            "optimizers.",
            self._ended.rstrip("."),
        )
        own, common = self._copy.get_own_state(), self._copy.get_state()
        own["rngs"] = None
        return {**common, "by_learner": [own], "weights_version": self.weights_version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `LearnerGroup.set_state`."""
        self._copy.set_state({name: state[name] for name in ("weights", "optimizers")})
        super().set_state(state)

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Collect what the learners' callbacks logged; see `LearnerGroup.collect_metrics`."""
        collected = self._call_all(_collect)
        self.num_callback_errors = sum(num_errors for _, _, num_errors in collected)
        timers.add(max((seconds for _, seconds, _ in collected), key=operator.itemgetter("callbacks")))
        metrics.aggregate([parts for parts, _, _ in collected], key="learners")

    # Workers.

    def _call_each(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return self._results(self._begin_each(function, arguments, self._limits.limit_s()))

    def _begin_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], timeout_s: float | None
    ) -> list[Future[Any]]:
        """Make a call to each worker, which may take `timeout_s`, and return the futures."""
        if self._ended is not None:
            raise WorkerDiedError(f"the learners have ended, and are not restarted: {self._ended}")
        futures: list[Future[Any]] = []
        try:
            with interrupts_deferred():  # learners wait for each other: all of them get the call, or none
                for worker, args in zip(self._workers, arguments, strict=True):
                    futures.append(worker.call(function, *args, timeout_s=timeout_s))
        except BaseException as error:
            if 0 < len(futures) < len(self._workers):
                self._end(f"only some of them were called: {type(error).__name__}: {error}")
            raise
        return futures

    def _results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Return the results of one call to several workers.

        A failure ends all workers, unless all of them raised the same `LossError`, which leaves them in step. If there
        are several errors, the one that caused the others is raised.
        """
        _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        errors, deadline = _errors(futures), time.monotonic() + GRACE_S
        while waiting and all(isinstance(error, (LossError, LostPeerError)) for error in errors):
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            _, waiting = wait(waiting, left_s, return_when=FIRST_EXCEPTION)
            errors = _errors(futures)
        if not errors:
            return [future.result() for future in futures]
        cause = min(errors, key=lambda error: isinstance(error, LostPeerError))
        if len(errors) < len(self._workers) or not all(isinstance(error, LossError) for error in errors):
            self._end(f"{type(cause).__name__}: {cause}")
        raise cause

    def _end(self, why: str) -> None:
        """End all workers now."""
        self._ended = self._ended or why
        with interrupts_deferred():
            for worker in self._workers:
                worker.kill()

    def stop(self) -> None:
        """End the workers; the modules can still be read."""
        try:
            if self._ended is None:
                wait([worker.call(_call_peers, "leave") for worker in self._workers], STOP_S)
        finally:
            self._end("the algorithm was stopped.")


# Functions that are called in the workers, with the worker's learner.


def _update(
    learner: Learner, batches: dict[str, Batch], settings: Mapping[str, UpdateSettings], with_weights: bool
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, NDArray[Any]]] | None]:
    results = learner.update(batches, settings)
    return results, learner.get_weights() if with_weights else None


def _collect(learner: Learner) -> tuple[Parts, dict[str, float], int]:
    return learner.metrics.take(), learner.timers.take(), learner.callbacks.num_errors


def _add_module(
    learner: Learner,
    module_id: str,
    spec: ModuleSpec,
    weights: Mapping[str, Any],
    frozen: Collection[str],
    learning: LearningSpec | None,
    shared_layers: SharedLayers,
) -> None:
    module = build_copy(spec, frozen)
    share_layers(module_id, module, learner.modules, shared_layers)
    learner.add_module(module_id, module, learning)
    learner.set_weights({module_id: weights})


def _apply(learner: Learner, module_id: str, fn: Callable[..., None], *args: Any) -> None:
    with torch.no_grad():
        fn(learner.modules[module_id], *args)


def _gpu_id(learner: Learner) -> str | None:
    return gpu_id(learner.device)


def _call_peers(learner: Learner, method: str, *args: Any) -> Any:
    return None if learner.peers is None else getattr(learner.peers, method)(*args)


def frozen_parameters(module: Module) -> set[str]:
    """Return the names of the parameters that do not require gradients."""
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def build_copy(spec: ModuleSpec, frozen: Collection[str]) -> Module:
    """Return a module of a spec, with the parameters frozen that are frozen in another copy."""
    module = spec.build()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)  # on_create_policy may have frozen some
    return module


def _errors(futures: Sequence[Future[Any]]) -> list[BaseException]:
    errors = [future.exception() for future in futures if future.done()]
    return [error for error in errors if error is not None]


def split_batches(batches: Mapping[str, Batch], num_learners: int) -> list[dict[str, Batch]]:
    """Return one shard of consecutive rows of every batch per learner; sizes differ by at most one unit.

    Args:
        batches: Columns `[B, ...]` by module id.
        num_learners: Number of learners.

    Raises:
        LossError: A batch has fewer rows than there are learners.
    """
    shards: list[dict[str, Batch]] = [{} for _ in range(num_learners)]
    for module_id, batch in batches.items():
        units = Cuts(batch).bounds
        size = len(units) - 1
        if size < num_learners:
            unit = "unit" if "unit_starts" in batch else "row"
            raise LossError(
                f"learners/{module_id}: the batch has {size} {unit}(s) for num_learners={num_learners}. "
                "Did a callback set `valid` to False?"
            )
        starts = [
            units[rank * (size // num_learners) + min(rank, size % num_learners)] for rank in range(num_learners + 1)
        ]
        for shard, start, stop in zip(shards, starts, starts[1:], strict=False):
            shard[module_id] = map_tree(lambda column, a=start, b=stop: column[a:b], batch)
    return shards


def merge_results(
    results: Sequence[Mapping[str, Any]], num_rows: Sequence[int], num_learned: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the merged metrics of one module: means over all rows, extremes, and concatenated columns.

    Args:
        results: Results of each learner; a name may be missing in some.
        num_rows: Rows of each learner's shard.
        num_learned: Rows of each learner's shard that its means are over; `None` is all of them.
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for result in results for name in result):
        values, rows, weights = zip(
            *(
                (result[name], size, weight)
                for result, size, weight in zip(results, num_rows, num_learned or num_rows, strict=True)
                if name in result
            ),
            strict=True,
        )
        if all(isinstance(value, np.ndarray) and len(value) == size for value, size in zip(values, rows, strict=True)):
            merged[name] = np.concatenate(values)  # a column: the shards are in the order of the batch
        elif name.endswith(SAME_RESULTS) or not all(isinstance(value, Real) for value in values):
            merged[name] = values[0]
        elif name in SUMMED_RESULTS:
            merged[name] = float(sum(values))
        elif (reduce := reduction_of_updates(name)) != "mean":
            merged[name] = float((np.fmin if reduce == "min" else np.fmax).reduce(values))
        else:
            merged[name] = float(np.average(values, weights=weights))
    return merged
