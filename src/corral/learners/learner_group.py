"""The learners of an algorithm behind one object: one in this process, or several that an engine runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.interrupts import interrupts_deferred
from corral.core.plain import check_parts
from corral.core.seeding import check_rng, get_global_rngs, set_global_rngs
from corral.core.tree import Tree, map_tree, num_rows
from corral.engines.call_limits import CallLimits
from corral.errors import CheckpointError, CorralError, LossError, WorkerDiedError
from corral.learners.distributed import LostPeerError, backend_for, gpu_id
from corral.learners.learner import Learner
from corral.learners.losses import Batch, Loss
from corral.learners.minibatches import Cuts
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.metrics.logger import MetricsLogger, Parts, check_metrics_state
from corral.metrics.reduction_settings import reduction_of_updates
from corral.metrics.timers import Timers
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


class LearnerGroup:
    """Updates the modules and returns their weights with a version number.

    Without workers the learner of this process takes the gradient steps. With workers, each worker holds a learner that
    starts with the same weights, a batch is split into one shard of rows per worker, and the gradients of all workers
    are averaged. The learner of this process then only keeps a copy of the first worker's weights. A worker that fails
    ends all workers, because their weights would differ; no worker is restarted. The copy of the weights stays.

    Args:
        learner: The learner of this process.
        workers: Handles of workers that are `Learner`s; with more than one, each has its `peers`. The group ends them.
        host: Host where the workers find each other; `None` is the network address of the first worker's host.
        start_timeout_s: Seconds that the workers have to start.
        describe_available: Returns what there is room for, for the message when the workers do not start in time.
        limits: Time limits of the workers' calls; `None` is no limit.

    Attributes:
        weights_version: Number of updates so far; 0 is the random initialisation.

    Raises:
        CorralError: The workers did not start in time. Exceptions that workers raise while they start are raised
            unchanged.
    """

    def __init__(
        self,
        learner: Learner,
        workers: Sequence[WorkerHandle] = (),
        *,
        host: str | None = None,
        start_timeout_s: float = 120.0,
        describe_available: Callable[[], str] = str,
        limits: CallLimits | None = None,
    ) -> None:
        """Connect the workers."""
        self._learner = learner
        self._workers = list(workers)
        self._limits = limits or CallLimits(None)
        self._ended: str | None = None  # why the workers are gone
        self._is_behind = False  # whether the workers have weights that the copy here lacks, after an exception
        self._num_worker_callback_errors = 0
        self._spare_states: list[dict[str, Any]] = []  # of learners of a restored run, beyond the learners here
        self.weights_version = 0
        if workers:
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

    # Learning.

    def update(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> dict[str, dict[str, Any]]:
        """Take gradient steps and increase `weights_version`; see `Learner.update`.

        Args:
            batches: Batches by module id.
            settings: Settings by module id; a module without an entry does not learn. `minibatch_size` is per learner.

        Returns:
            By module id, results as if one learner had taken the steps: means over all rows. A value that is not a
            number is the first learner's value.

        Raises:
            LossError: See `Learner.update`; also if there are fewer rows than learners.
            WorkerDiedError: A worker died in this update, or the workers were ended by an earlier error.
        """
        try:
            if not self._workers:
                return self._learner.update(batches, settings)
            return self._update_workers({name: batches[name] for name in batches if name in settings}, settings)
        finally:
            self.weights_version += 1  # after an error too: steps before it have changed the weights

    def _update_workers(
        self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]
    ) -> dict[str, dict[str, Any]]:
        shards = split_batches(batches, len(self._workers))
        passes = sum(num_rows(batch) * settings[module_id].num_epochs for module_id, batch in batches.items())
        limit_s, start_s = self._limits.limit_s("row passes", passes), time.monotonic()
        self._is_behind = True
        arguments = [(shard, settings, rank == 0) for rank, shard in enumerate(shards)]
        answers = self._call_each(_update, arguments, limit_s)
        taken = [num_rows(batch) * answers[0][0][module_id]["num_epochs"] for module_id, batch in batches.items()]
        self._limits.note("row passes", sum(taken), time.monotonic() - start_s)
        self._learner.set_weights(answers[0][1])
        self._is_behind = False
        return {
            module_id: merge_results(
                [results[module_id] for results, _ in answers],
                [num_rows(shard[module_id]) for shard in shards],
                [Cuts(shard[module_id]).size for shard in shards],
            )
            for module_id in batches
        }

    # Modules.

    @property
    def learning_ids(self) -> list[str]:
        """Ids of the modules that can learn: they have a loss and an optimizer."""
        return self._learner.learning_ids

    def group_sharing(self, module_ids: Iterable[str]) -> list[list[str]]:
        """Return module ids in groups: modules of a group share layers."""
        return self._learner.group_sharing(module_ids)

    def add_module(
        self,
        module_id: str,
        spec: ModuleSpec,
        module: Module,
        learning: LearningSpec | None,
        shared_layers: SharedLayers = MappingProxyType({}),
    ) -> None:
        """Add a module to all learners, and increase `weights_version`.

        Args:
            module_id: Id that no other module has.
            spec: What the module is built from, for learners in other processes.
            module: The module, which the learner of this process keeps.
            learning: Its loss and its optimizer; `None` if it does not learn.
            shared_layers: Layers that modules share; the module shares them already.
        """
        self._current_learner().add_module(module_id, module, learning)
        if self._workers:
            weights = self._learner.get_weights()[module_id]
            frozen = frozen_parameters(module)
            self._call_all(_add_module, module_id, spec, weights, frozen, learning, dict(shared_layers))
        self.weights_version += 1

    def remove_module(self, module_id: str) -> None:
        """Remove a module from all learners, with the state of its optimizer, and increase `weights_version`."""
        self._current_learner().remove_module(module_id)
        if self._workers:
            self._call_all(Learner.remove_module, module_id)
        self.weights_version += 1

    def foreach_module(self, module_id: str, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn(module, *args)` on a module in every learner, for example to move targets or freeze parameters."""
        copy, self._is_behind = self._current_learner(), bool(self._workers)
        self._call_all(_apply, module_id, fn, *args)
        if self._workers:
            _apply(copy, module_id, fn, *args)
        self._is_behind = False

    @property
    def learner_here(self) -> Learner:
        """The learner of this process; with workers it only keeps a copy of their weights."""
        return self._learner

    @property
    def num_learners(self) -> int:
        """Number of learners that take gradient steps."""
        return max(1, len(self._workers))

    def foreach_learner(self, fn: Callable[..., Any], *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Return `fn(learner, *args)` of every learner that takes gradient steps, and increase `weights_version`.

        The function may change the learners and their modules; all learners must end with the same weights.

        Args:
            fn: Function of a learner; with workers it must be picklable, and so must what it returns.
            *args: Its further arguments.
            each: One more argument for each learner, after the learner; `None` is none.
        """
        self._is_behind = bool(self._workers)
        try:
            return self._call_each(fn, [((one,) if each else ()) + args for one in each or [None] * self.num_learners])
        finally:
            self.weights_version += 1

    # Reading.

    def _current_learner(self) -> Learner:
        """Return the learner of this process, with the weights of the last update if the workers still have them."""
        if self._is_behind and self._ended is None:
            with suppress(WorkerDiedError):
                call = self._workers[0].call("get_weights", timeout_s=self._limits.limit_s())
                [weights] = self._results([call])
                self._learner.set_weights(weights)
        self._is_behind = False
        return self._learner

    def values(self, module_id: str, obs: Tree, states: Tree = None) -> NDArray[np.float32]:
        """Return state values `[B]` of observations `[B, ...]`, and states `[B, ...]` if the module has memory."""
        return self._current_learner().values(module_id, obs, states)

    def dist_inputs(self, module_id: str, batch: Batch) -> NDArray[np.float32]:
        """Return the outputs of the policy `[B, d]` for the observations of a batch."""
        return self._current_learner().dist_inputs(module_id, batch)

    def get_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the weights by module id and parameter name."""
        return self._current_learner().get_weights()

    def get_acting_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return only the weights that runners need to act; see `Module.acting_weights`."""
        return self._current_learner().get_acting_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Copy weights into all learners, by module id and parameter name, and increase `weights_version`."""
        self._is_behind = bool(self._workers)
        self._call_all(Learner.set_weights, weights)
        self._learner.set_weights(weights)
        self._is_behind = False
        self.weights_version += 1

    def set_losses(self, losses: Mapping[str, Loss]) -> None:
        """Use other losses from the next update on, by module id."""
        self._call_all(Learner.set_losses, losses)

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state: `Learner.get_state`, `by_learner` what each has for itself, `weights_version`.

        If the workers are gone, the state has the weights of the last update and optimizers that begin again, because
        the state of the optimizers was in the workers.

        Raises:
            CheckpointError: A callback returned a state that is not plain data.
        """
        if self._ended is not None:
            log.warning(
                "The learners are gone (%s): this state has the weights of the last update, but not the state of the "
                "optimizers.",
                self._ended.rstrip("."),
            )
            own, common = self._learner.get_own_state(), self._learner.get_state()
            own["rngs"] = None
            return {**common, "by_learner": [own], "weights_version": self.weights_version}
        num_learners = max(1, len(self._workers))
        states = self._call_each(_get_state, [(rank == 0, bool(self._workers)) for rank in range(num_learners)])
        _raise_first(states)
        by_learner = [*(own for own, _ in states), *self._spare_states]
        return {**states[0][1], "by_learner": by_learner, "weights_version": self.weights_version}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the learners can continue from a state, without changing anything.

        Raises:
            CheckpointError: The state was saved with other modules or optimizers, or is damaged.
            Exception: What a damaged part raises.
        """
        check_parts(state, ("weights", "optimizers", "by_learner", "weights_version"), "the learners", CheckpointError)
        self._learner.check_state(state)
        if type(state["weights_version"]) is not int:
            raise CheckpointError(f"weights_version is {state['weights_version']!r:.80}, and not an integer.")
        for own in state["by_learner"]:
            check_parts(own, ("rng", "callbacks", "metrics", "rngs"), "a learner", CheckpointError)
            check_rng(self._learner.rng, own["rng"])
            check_metrics_state(own["metrics"])
            int(own["callbacks"]["num_errors"])

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `check_state` accepts; the number of learners may have been another one.

        A learner beyond the states of `by_learner` keeps its own. States beyond the learners wait until there is a
        learner for them again.

        Raises:
            CheckpointError: The state was saved with other modules or optimizers, or is damaged.
        """
        num_learners = max(1, len(self._workers))
        common = {name: state[name] for name in ("weights", "optimizers")}
        own = [*state["by_learner"], *[None] * num_learners][:num_learners]
        if self._workers:
            self._learner.set_state(common)
        _raise_first(self._call_each(_set_state, [(common, each) for each in own]))
        self._spare_states = list(state["by_learner"][num_learners:])
        if self._workers:
            self._num_worker_callback_errors = sum(each["callbacks"]["num_errors"] for each in own if each)
        self.weights_version = state["weights_version"]

    def get_module(self, module_id: str) -> Module:
        """Return the module that is trained; with workers, this process's copy of it."""
        return self._current_learner().modules[module_id]

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Aggregate what the learners' callbacks logged since the last call, under `learners`, and the time they took.

        Callbacks run within the time of learning, and the callbacks of several learners run at the same time.
        """
        collected = self._call_all(_collect)
        seconds = max(seconds for _, seconds, _ in collected)
        timers.add({"learning": -seconds, "callbacks": seconds})
        metrics.aggregate([parts for parts, _, _ in collected], key="learners")
        if self._workers:
            self._num_worker_callback_errors = sum(num_errors for _, _, num_errors in collected)

    @property
    def num_callback_errors(self) -> int:
        """Number of exceptions that `on_error="log"` kept from ending the run; for workers, at the last collection."""
        return self._learner.callbacks.num_errors + self._num_worker_callback_errors

    # Workers.

    def _call_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return `function(learner, *args)` of every learner that takes gradient steps."""
        return self._call_each(function, [args] * max(1, len(self._workers)))

    def _call_each(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]], limit_s: float | None = None
    ) -> list[Any]:
        """Return `function(learner, *args)` of every learner that takes gradient steps, each with its own arguments.

        `limit_s` is the seconds that a worker may take; `None` is the limit for calls whose duration is not known.
        """
        if not self._workers:
            return [function(self._learner, *args) for args in arguments]
        if self._ended is not None:
            raise WorkerDiedError(f"the learners are gone, and are not restarted: {self._ended}")
        timeout_s = limit_s or self._limits.limit_s()
        futures: list[Future[Any]] = []
        try:
            with interrupts_deferred():  # learners wait for each other: all of them get the call, or none
                for worker, args in zip(self._workers, arguments, strict=True):
                    futures.append(worker.call(function, *args, timeout_s=timeout_s))
        except BaseException as error:
            if 0 < len(futures) < len(self._workers):
                self._end(f"only some of them were called: {type(error).__name__}: {error}")
            raise
        return self._results(futures)

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
        if not self._workers:
            return
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


def _collect(learner: Learner) -> tuple[Parts, float, int]:
    seconds, learner.callbacks_s = learner.callbacks_s, 0.0
    return learner.metrics.take(), seconds, learner.callbacks.num_errors


# An exception in a worker would end all workers, so these two return it.


def _get_state(learner: Learner, whole: bool, own_process: bool) -> Any:
    try:
        own = {**learner.get_own_state(), "rngs": get_global_rngs() if own_process else None}
        return own, learner.get_state() if whole else {}
    except Exception as error:
        return CheckpointError(_described(error))


def _set_state(learner: Learner, common: Mapping[str, Any], own: Mapping[str, Any] | None) -> CheckpointError | None:
    try:
        learner.set_state(common)
        if own is not None:
            learner.set_own_state(own)
            if own["rngs"] is not None:
                set_global_rngs(own["rngs"])
    except Exception as error:
        return CheckpointError(_described(error))
    return None


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, CorralError) else f"{type(error).__name__}: {error}"


def _raise_first(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, CheckpointError):
            raise answer


def _gpu_id(learner: Learner) -> str | None:
    return gpu_id(learner.device)


def _call_peers(learner: Learner, method: str, *args: Any) -> Any:
    return None if learner.peers is None else getattr(learner.peers, method)(*args)


# Pure functions.


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
    """Split every batch into one shard of consecutive rows per learner; sizes differ by one row or sequence at most.

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
            unit = "sequence" if "sequence_starts" in batch else "row"
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
    """Merge what the learners report for one module: means over all rows, extremes, and concatenated columns.

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
