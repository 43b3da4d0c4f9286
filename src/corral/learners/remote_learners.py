"""Learners that an engine runs: they take the same steps, on shards of each batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.interrupts import interrupts_deferred
from corral.core.metrics.logger import Parts
from corral.core.metrics.reducers import reduction_of_updates
from corral.core.tree import map_tree, num_rows
from corral.engines.call_limits import CallLimits
from corral.errors import CorralError, LossError, WorkerDiedError
from corral.learners.distributed import LostPeerError, backend_for, gpu_id
from corral.learners.learner import Learner
from corral.learners.losses import Batch
from corral.learners.minibatches import Cuts
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.layers import SharedLayers, share_layers
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec

if TYPE_CHECKING:
    from corral.engines.base import WorkerHandle

log = logging.getLogger("corral")

Results = dict[str, dict[str, Any]]
"""What an update reports, by module id."""

Weights = dict[str, dict[str, NDArray[Any]]]
"""Weights by module id and parameter name."""

# Results that are equal in all learners, because they take the same steps.
SAME_RESULTS = ("_optimizer_global_norm", "_optimizer_learning_rate", "num_gradient_steps", "num_epochs")
# Results that are summed: the rows of a gradient step are spread over all learners.
SUMMED_RESULTS = ("module_train_batch_size_mean",)

# An error that follows from another learner's error may arrive this many seconds before it.
GRACE_S = 5.0
STOP_S = 2.0


class RemoteLearners:
    """The learners that an engine runs, one in each worker: they are called together, and end together.

    A batch is split into one shard of rows per worker, and the gradients of all workers are averaged. A worker that
    fails ends all workers, because their weights would differ; no worker is restarted.

    Args:
        workers: Handles of workers that are `Learner`s; with more than one, each has its `peers`. They are ended here.
        host: Host where the workers find each other; `None` is the network address of the first worker's host.
        start_timeout_s: Seconds that the workers have to start.
        describe_available: Returns what there is room for, for the message when the workers do not start in time.
        limits: Time limits of the workers' calls; `None` is no limit.

    Attributes:
        workers: The handles.
        ended: Why the workers are gone; `None` if they are not.

    Raises:
        CorralError: The workers did not start in time. Exceptions that workers raise while they start are raised
            unchanged.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        *,
        host: str | None = None,
        start_timeout_s: float = 120.0,
        describe_available: Callable[[], str] = str,
        limits: CallLimits | None = None,
    ) -> None:
        """Connect the workers."""
        self.workers = list(workers)
        self._limits = limits or CallLimits(None)
        self.ended: str | None = None
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

        gpu_ids = call(self.workers, _gpu_id)
        if len(self.workers) > 1:
            [address] = call(self.workers[:1], _call_peers, "open", host, start_timeout_s)
            call(self.workers, _call_peers, "join", address, backend_for(gpu_ids), start_timeout_s)

    def begin_update(
        self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]
    ) -> tuple[list[Future[Any]], Callable[[], tuple[Results, Weights]]]:
        """Ask all workers for an update, each with a shard of the batches, and return the futures of their answers.

        Returns:
            The futures; and a function that waits for them, and returns the merged results and the weights after the
            update.

        Raises:
            WorkerDiedError: The workers were ended by an earlier error.
        """
        given = {name: batches[name] for name in batches if name in settings}
        shards = split_batches(given, len(self.workers))
        passes = sum(num_rows(batch) * settings[module_id].num_epochs for module_id, batch in given.items())
        start_s = time.monotonic()
        arguments = [(shard, settings, rank == 0) for rank, shard in enumerate(shards)]
        futures = self._begin_each(_update, arguments, self._limits.limit_s("row passes", passes))
        ends_s: list[float] = []
        futures[0].add_done_callback(lambda _: ends_s.append(time.monotonic()))

        def take() -> tuple[Results, Weights]:
            answers = self._results(futures)
            sizes = [{module_id: num_rows(batch) for module_id, batch in shard.items()} for shard in shards]
            epochs = {module_id: results["num_epochs"] for module_id, results in answers[0][0].items()}
            taken = sum(size * epochs[module_id] for shard in sizes for module_id, size in shard.items())
            self._limits.note("row passes", taken, max(ends_s, default=time.monotonic()) - start_s)
            merged = {}
            for module_id in epochs:
                # Where all learners had the whole batch, the first one's report is the report of all.
                stop = 1 if shards[-1][module_id] is given[module_id] else len(shards)
                merged[module_id] = merge_results(
                    [results[module_id] for results, _ in answers[:stop]],
                    [size[module_id] for size in sizes[:stop]],
                    [Cuts(shard[module_id]).size for shard in shards[:stop]],
                )
            return merged, answers[0][1]

        return futures, take

    def get_weights(self) -> Weights:
        """Return the weights of the first worker."""
        call = self.workers[0].call("get_weights", timeout_s=self._limits.limit_s())
        return dict(self._results([call])[0])

    def call_each(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Return `function(learner, *args)` of every worker, each with its own arguments."""
        return self._results(self._begin_each(function, arguments, self._limits.limit_s()))

    def _begin_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], timeout_s: float | None
    ) -> list[Future[Any]]:
        """Make a call to each worker, which may take `timeout_s`, and return the futures."""
        if self.ended is not None:
            raise WorkerDiedError(f"the learners have ended, and are not restarted: {self.ended}")
        futures: list[Future[Any]] = []
        try:
            with interrupts_deferred():  # learners wait for each other: all of them get the call, or none
                for worker, args in zip(self.workers, arguments, strict=True):
                    futures.append(worker.call(function, *args, timeout_s=timeout_s))
        except BaseException as error:
            if 0 < len(futures) < len(self.workers):
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
        if len(errors) < len(self.workers) or not all(isinstance(error, LossError) for error in errors):
            self._end(f"{type(cause).__name__}: {cause}")
        raise cause

    def _end(self, why: str) -> None:
        """End all workers now."""
        self.ended = self.ended or why
        with interrupts_deferred():
            for worker in self.workers:
                worker.kill()

    def stop(self) -> None:
        """End the workers."""
        try:
            if self.ended is None:
                wait([worker.call(_call_peers, "leave") for worker in self.workers], STOP_S)
        finally:
            self._end("the algorithm was stopped.")


# Functions that are called in the workers, with the worker's learner.


def _update(
    learner: Learner, batches: dict[str, Batch], settings: Mapping[str, UpdateSettings], with_weights: bool
) -> tuple[Results, Weights | None]:
    results = learner.update(batches, settings)
    return results, learner.get_weights() if with_weights else None


def collect(learner: Learner) -> tuple[Parts, dict[str, float], int]:
    """Return what a learner's callbacks logged since the last call, the seconds by part, and their errors so far."""
    return learner.metrics.take(), learner.timers.take(), learner.callbacks.num_errors


def add_copy(
    learner: Learner,
    module_id: str,
    spec: ModuleSpec,
    weights: Mapping[str, Any],
    frozen: Collection[str],
    learning: LearningSpec | None,
    shared_layers: SharedLayers,
) -> None:
    """Add a copy of a module that the learner of another process has, with its weights."""
    module = build_copy(spec, frozen)
    share_layers(module_id, module, learner.modules, shared_layers)
    learner.add_module(module_id, module, learning)
    learner.set_weights({module_id: weights})


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

    Of a batch with fewer units than learners, such as of an agent that rarely acts, each learner gets the whole: the
    mean of equal gradients is the gradient.

    Args:
        batches: Columns `[B, ...]` by module id.
        num_learners: Number of learners.
    """
    shards: list[dict[str, Batch]] = [{} for _ in range(num_learners)]
    for module_id, batch in batches.items():
        units = Cuts(batch).bounds
        size = len(units) - 1
        if size < num_learners:
            for shard in shards:
                shard[module_id] = batch
            continue
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
                (_plain(result[name]), size, weight)
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


def _plain(value: Any) -> Any:
    """Return a number for an array or a tensor without axes, which a callback may have added, and others unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
