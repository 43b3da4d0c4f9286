"""The learners of an algorithm behind one object, wherever they are."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.metrics.logger import MetricsLogger, check_metrics_state
from corral.core.metrics.timers import Timers
from corral.core.plain import check_parts
from corral.core.seeding import check_rng, get_global_rngs, set_global_rngs
from corral.core.tree import Tree
from corral.errors import CheckpointError, ConfigError, CorralError, WorkerDiedError
from corral.learners.learner import Learner
from corral.learners.losses import Batch, Loss
from corral.learners.remote_learners import RemoteLearners, Results, Weights, add_copy, collect, frozen_parameters
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.layers import SharedLayers
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec

log = logging.getLogger("corral")


@dataclass(frozen=True)
class PendingUpdate:
    """An update that was asked for.

    Attributes:
        result: Function that waits for the update, and returns what `LearnerGroup.update` returns, or raises what it
            raises; call it once. The weights of the update count from then on.
        futures: Futures of the learners' answers.
    """

    result: Callable[[], Results]
    futures: Sequence[Future[Any]]

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        return all(future.done() for future in self.futures)


class LearnerGroup:
    """Updates the modules and returns their weights with a version number.

    There is one learner in this process, which answers at once, or learners that an engine runs. Then the learner of
    this process only keeps a copy of the first one's weights, which stays when they end.

    Args:
        learner: The learner of this process.
        remote: The learners that an engine runs, with the same weights; the group ends them. `None` is none.

    Attributes:
        remote: The learners that an engine runs, or `None`.
        num_learners: Number of learners that take gradient steps.
        num_callback_errors: Exceptions in callbacks that `on_error="log"` kept from ending the run, up to the last
            collection of metrics.
        weights_version: Number of updates so far; 0 is the random initialisation.
        is_watched: Whether somebody may change weights by hand, so that `take_changes` compares them.
    """

    def __init__(self, learner: Learner, remote: RemoteLearners | None = None) -> None:
        """Keep the learners."""
        self._learner, self.remote = learner, remote
        self.num_learners = 1 if remote is None else len(remote.workers)
        self.weights_version = self.num_callback_errors = 0
        self.is_watched = False
        self._is_behind = False  # whether an engine's learners have weights that the copy here lacks
        self._noted: list[bytes] | None = None  # the weights of `weights_version`, while nothing learns
        self._spare_states: list[dict[str, Any]] = []  # of learners of a restored run, beyond the learners here

    @property
    def learner_here(self) -> Learner:
        """The learner of this process; a copy has the weights of the last update if an engine still has them."""
        if self._is_behind and self.remote is not None and self.remote.ended is None:
            with suppress(WorkerDiedError):
                self._learner.set_weights(self.remote.get_weights())
        self._is_behind = False
        return self._learner

    # Learning.

    def update(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> Results:
        """Take gradient steps, increase `weights_version`, and return the metrics; see `Learner.update`.

        Args:
            batches: Batches by module id.
            settings: Settings by module id; a module without an entry does not learn. `minibatch_size` is per learner.

        Returns:
            By module id, results as if one learner had taken the steps: means over all rows. A value that is not a
            number is the first learner's value.

        Raises:
            LossError: See `Learner.update`.
            WorkerDiedError: A worker died in this update, or the workers were ended by an earlier error.
        """
        if self.remote is not None:
            return self.update_async(batches, settings).result()
        try:
            return self._learner.update(batches, settings)
        finally:
            self.weights_version += 1  # after an error too: steps before it have changed the weights

    def update_async(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> PendingUpdate:
        """Ask for an update, and return it before it is done; the learner of this process takes it at once.

        With learners of an engine, what reads weights here gives the weights from before it until `result()` is called.
        Every update must be received, in the order in which the updates were asked for, and before modules or weights
        are changed in another way.

        Args:
            batches: As for `update`.
            settings: As for `update`.

        Raises:
            WorkerDiedError: The workers were ended by an earlier error.
        """
        if self.remote is not None:
            was_behind, self._is_behind = self._is_behind, True  # if an interrupt ends this in the middle
            try:
                futures, take = self.remote.begin_update(batches, settings)
            except BaseException:
                self.weights_version += 1
                raise
            self._is_behind = was_behind
            return PendingUpdate(partial(self._receive, take), futures)
        done: Future[tuple[Results, Weights]] = Future()
        try:
            done.set_result((self._learner.update(batches, settings), {}))
        except Exception as error:
            done.set_exception(error)
        return PendingUpdate(partial(self._receive, done.result), [done])

    def _receive(self, take: Callable[[], tuple[Results, Weights]]) -> Results:
        """Return the results of an update, and copy its weights."""
        self._is_behind = self.remote is not None
        try:
            results, weights = take()
            self._learner.set_weights(weights)
            self._is_behind = False
            return results
        finally:
            self.weights_version += 1  # after an error too: steps before it have changed the weights

    # Modules.

    @property
    def learning_ids(self) -> list[str]:
        """Ids of the modules that can learn: they have a loss and an optimizer."""
        return self.learner_here.learning_ids

    def group_sharing(self, module_ids: Iterable[str]) -> list[list[str]]:
        """Return module ids in groups: modules of a group share layers."""
        return self.learner_here.group_sharing(module_ids)

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
        self.learner_here.add_module(module_id, module, learning)
        self.weights_version += 1
        self.note_weights()
        if self.remote is not None:
            weights, frozen = self._learner.get_weights()[module_id], frozen_parameters(module)
            self._call_all(add_copy, module_id, spec, weights, frozen, learning, dict(shared_layers))

    def remove_module(self, module_id: str) -> None:
        """Remove a module from all learners, with the state of its optimizer, and increase `weights_version`."""
        self.learner_here.remove_module(module_id)
        self.weights_version += 1
        self.note_weights()
        if self.remote is not None:
            self._call_all(Learner.remove_module, module_id)

    def foreach_module(self, module_id: str, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn(module, *args)` on a module in every learner, for example to move targets or freeze parameters."""
        learner = self._learner
        if self.remote is not None:
            learner, self._is_behind = self.learner_here, True
            self._call_all(_apply, module_id, fn, *args)
        with torch.no_grad():
            fn(learner.modules[module_id], *args)
        self._is_behind = False

    def foreach_learner(self, fn: Callable[..., Any], *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Return `fn(learner, *args)` of every learner that takes gradient steps, and increase `weights_version`.

        The function may change the learners and their modules; all learners must end with the same weights.

        Args:
            fn: Function of a learner; with workers it must be picklable, and so must what it returns.
            *args: Its further arguments.
            each: One more argument for each learner, after the learner; `None` is none.
        """
        self._is_behind = self.remote is not None
        try:
            return self._call_each(fn, [((one,) if each else ()) + args for one in each or [None] * self.num_learners])
        finally:
            self.weights_version += 1

    # Reading.

    def values(self, module_id: str, obs: Tree, states: Tree = None) -> Any:
        """Return state values `[B]` of observations `[B, ...]`, and states `[B, ...]` if the module has memory."""
        return self.learner_here.values(module_id, obs, states)

    def add_critic_states(self, module_id: str, rollouts: Sequence[Any]) -> None:
        """Add the states of a central critic with memory to rollouts, as the module saw them."""
        for rollout in rollouts:
            self.learner_here.add_critic_states(module_id, rollout)

    def dist_inputs(self, module_id: str, batch: Batch) -> Any:
        """Return the outputs of the policy `[B, d]` for the observations of a batch."""
        return self.learner_here.dist_inputs(module_id, batch)

    def get_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the weights by module id and parameter name."""
        return self.learner_here.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Copy weights into all learners, by module id and parameter name, and increase `weights_version`.

        Raises:
            ConfigError: There is no such module, or its weights have other names or shapes; nothing is changed.
        """
        own = self.learner_here.get_weights()
        for module_id, arrays in weights.items():
            here = {name: np.shape(array) for name, array in own.get(module_id, {}).items()}
            there = {name: np.shape(array) for name, array in arrays.items()}
            if wrong := next((name for name in (*here, *there) if here.get(name) != there.get(name)), None):
                raise ConfigError(
                    f"set_weights: {wrong} of module {module_id!r} is {there.get(wrong, 'missing')} in what is given, "
                    f"and {here.get(wrong, 'missing')} here: give all weights of get_weights(), in their shapes."
                )
        if self.remote is not None:
            self._learner.set_weights(weights)
            self._is_behind = True
        self._call_all(Learner.set_weights, weights)
        self.weights_version += 1
        self.note_weights()
        self._is_behind = False

    def watch(self) -> None:
        """Notice what is changed by hand in the modules from now on."""
        self.is_watched = True
        self.note_weights()

    def note_weights(self) -> None:
        """Keep a copy of the weights if they are watched, after a change that increased `weights_version`."""
        if self.is_watched:
            self._noted = self._copy_weights()

    def forget_weights(self) -> None:
        """Drop the copy of the weights while updates change them."""
        self._noted = None

    def take_changes(self) -> bool:
        """Return whether watched weights were changed by hand; all learners then have them, in a new version."""
        has_ended = self.remote is not None and self.remote.ended is not None
        if has_ended or self._noted is None or self._copy_weights() == self._noted:
            return False
        self.set_weights(self.get_weights())
        return True

    def _copy_weights(self) -> list[bytes]:
        return [array.tobytes() for arrays in self.get_weights().values() for array in arrays.values()]

    def set_losses(self, losses: Mapping[str, Loss]) -> None:
        """Use other losses from the next update on, by module id."""
        self._call_all(Learner.set_losses, losses)

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the state: `Learner.get_state`, `by_learner` what each has for itself, `weights_version`.

        If the workers are gone, the state has the weights of the last update and optimizers that begin again, because
        the state of the optimizers was in the workers.
        """
        if self.remote is not None and self.remote.ended is not None:
            log.warning(
                "The learners have ended (%s): this state has the weights of the last update, but not the state of the "
                "optimizers.",
                self.remote.ended.rstrip("."),
            )
            own = {**self._learner.get_own_state(), "rngs": None}
            return {**self._learner.get_state(), "by_learner": [own], "weights_version": self.weights_version}
        arguments = [(rank == 0, self.remote is not None) for rank in range(self.num_learners)]
        states = self._call_each(_get_state, arguments)
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
        self.learner_here.check_state(state)
        if type(state["weights_version"]) is not int:
            raise CheckpointError(f"weights_version is {state['weights_version']!r:.80}, and not an integer.")
        for own in state["by_learner"]:
            check_parts(own, ("rng", "callbacks", "metrics", "rngs"), "a learner", CheckpointError)
            check_rng(self.learner_here.rng, own["rng"])
            check_metrics_state(own["metrics"])
            int(own["callbacks"]["num_errors"])

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `check_state` accepts; the number of learners may have been another one.

        A learner beyond the states of `by_learner` keeps its own. States beyond the learners wait until there is a
        learner for them again.

        Raises:
            CheckpointError: The state was saved with other modules or optimizers, or is damaged.
        """
        common = {name: state[name] for name in ("weights", "optimizers")}
        if self.remote is not None:
            self._learner.set_state(common)
        own = [*state["by_learner"], *[None] * self.num_learners][: self.num_learners]
        _raise_first(self._call_each(_set_state, [(common, each) for each in own]))
        self._spare_states = list(state["by_learner"][self.num_learners :])
        self.num_callback_errors = sum(each["callbacks"]["num_errors"] for each in own if each)
        self.weights_version = state["weights_version"]
        self.note_weights()

    def get_module(self, module_id: str) -> Module:
        """Return the module that is trained; with workers, this process's copy of it."""
        return self.learner_here.modules[module_id]

    def collect_metrics(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Collect what the learners' callbacks logged since the last call, under `learners`, and the time they took.

        The learner of this process logs into the metrics and timers of the algorithm itself. Callbacks run within the
        time of learning, and the callbacks of several learners run at the same time.
        """
        if self.remote is None:
            self.num_callback_errors = self._learner.callbacks.num_errors
            return
        collected = self._call_all(collect)
        self.num_callback_errors = sum(num_errors for _, _, num_errors in collected)
        timers.add(max((seconds for _, seconds, _ in collected), key=operator.itemgetter("callbacks")))
        metrics.aggregate([parts for parts, _, _ in collected], key="learners")

    def _call_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return `function(learner, *args)` of every learner that takes gradient steps."""
        return self._call_each(function, [args] * self.num_learners)

    def _call_each(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Return `function(learner, *args)` of every learner that takes gradient steps, each with its own arguments."""
        if self.remote is not None:
            return self.remote.call_each(function, arguments)
        return [function(self._learner, *args) for args in arguments]

    def stop(self) -> None:
        """End the engine's learners, if there are any; the modules can still be read."""
        if self.remote is not None:
            self.remote.stop()


def _apply(learner: Learner, module_id: str, fn: Callable[..., None], *args: Any) -> None:
    with torch.no_grad():
        fn(learner.modules[module_id], *args)


# An exception in a worker would end all workers, so these two return it.


def _get_state(learner: Learner, whole: bool, has_own_process: bool) -> Any:
    try:
        own = {**learner.get_own_state(), "rngs": get_global_rngs() if has_own_process else None}
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
