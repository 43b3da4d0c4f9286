"""The learner: turns batches into gradient steps. It knows modules and columns, and no env."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.callbacks.dispatch import Dispatcher
from corral.core.columns import Columns
from corral.core.seeding import get_rng, set_rng
from corral.core.tree import Tree, map_tree, num_rows
from corral.errors import CallbackError, ColumnError, ConfigError, LossError
from corral.learners.distributed import Peers
from corral.learners.gradients import backward, clip_gradients, total_loss
from corral.learners.group_optimizers import GroupOptimizers, make_optimizer
from corral.learners.learner_state import check_learner_state, get_learner_state, set_learner_state
from corral.learners.losses import Batch, Loss, call_loss, compile_loss
from corral.learners.minibatches import Cuts, UpdateReport, loss_error, num_learned, shares_of_rows, unit_bounds
from corral.learners.numpy_q_learning import fast_form
from corral.learners.optimizers import ModuleOptimizer
from corral.learners.settings import LearningSpec, Stop, UpdateSettings
from corral.learners.sharing import group_sharing, shared_parameters, take_turns
from corral.metrics.logger import MetricsLogger
from corral.modules.distributions import module_action_space
from corral.modules.inference import ActingWeights
from corral.modules.layers import Layers
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.threads import num_threads_for, torch_threads

# Very large batches are evaluated in chunks of this many observations, to bound memory.
EVALUATION_CHUNK = 8192


class Learner:
    """Minibatch gradient steps on one or more modules, each with its own loss, optimizer and settings.

    Args:
        modules: Modules by module id. The learner moves them to the device and keeps them. Modules may have parameters
            in common.
        specs: Loss and optimizer by module id; a module without an entry does not learn.
        device: `"auto"` (CUDA when there is one), or a torch device name.
        num_threads: Intra-op threads, or `"auto"`: one for small nets.
        seed: Seed of the generator for shuffling.
        compile: Whether `torch.compile` compiles the losses.
        callbacks: Callbacks of the learner's events; `None` is none.
        peers: Learners that take every gradient step together with this one, or `None`.

    Attributes:
        modules: Modules by module id.
        device: Device of the modules.
        metrics: Logger passed to callbacks; aggregated into `result["learners"]`.
        rng: Generator for shuffling.
        callbacks_s: Seconds spent in callbacks since the attribute was set to 0.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        specs: Mapping[str, LearningSpec],
        *,
        device: str = "auto",
        num_threads: int | str = "auto",
        seed: int = 0,
        compile: bool = False,
        callbacks: Dispatcher | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Move the modules to the device and make an optimizer for each that learns.

        Raises:
            ConfigError: A spec names no module.
        """
        if unknown := sorted(specs.keys() - modules.keys()):
            raise ConfigError(f"learner: there are specs for modules {unknown}, and only modules {sorted(modules)}.")
        self.device = find_device(device)
        self.modules: dict[str, Module] = {}
        self._compile, self._num_threads_setting = compile, num_threads
        self._losses: dict[str, Loss] = {}
        self._optimizers: dict[str, ModuleOptimizer | GroupOptimizers] = {}
        self._layers: dict[str, Layers] = {}
        self._acting: dict[str, ActingWeights] = {}
        self._num_threads: dict[str, int | None] = {}
        self._shared: dict[str, set[nn.Parameter]] = {}
        for module_id, module in modules.items():
            self.add_module(module_id, module, specs.get(module_id))
        self.rng = np.random.default_rng(seed)
        self.metrics = MetricsLogger()
        self.callbacks = callbacks or Dispatcher([], {})
        self.callbacks_s = 0.0
        self.peers = peers

    def add_module(self, module_id: str, module: Module, spec: LearningSpec | None) -> None:
        """Move a module to the device and keep it; without a spec it does not learn."""
        module = module.to(self.device)
        if spec is not None:
            self._optimizers[module_id] = self.make_optimizer(module_id, module, spec)
            self.set_losses({module_id: spec.loss})
        self.modules[module_id] = module
        self._layers[module_id], self._acting[module_id] = Layers(module), ActingWeights(module)
        self._num_threads[module_id] = num_threads_for(module, self._num_threads_setting)
        self._find_shared()

    def make_optimizer(self, module_id: str, module: Module, spec: LearningSpec) -> ModuleOptimizer | GroupOptimizers:
        """Return the optimizer of a module that learns; a subclass may return `ready_optimizers(...)`.

        Args:
            module_id: Id of the module.
            module: The module, on the learner's device.
            spec: How the module learns.

        Raises:
            ConfigError: The spec names other groups of parameters, or an optimizer refuses the parameters.
        """
        return make_optimizer(module.parameter_groups(), spec)

    def remove_module(self, module_id: str) -> None:
        """Forget a module, with its loss and its optimizer."""
        parts = (self.modules, self._losses, self._optimizers, self._layers, self._acting, self._num_threads)
        for part in parts:
            part.pop(module_id, None)
        self._find_shared()

    def _find_shared(self) -> None:
        self._shared = shared_parameters(self.modules)
        for module_id, optimizer in self._optimizers.items():
            optimizer.keep_apart(self._shared.get(module_id, set()))

    def group_sharing(self, module_ids: Iterable[str]) -> list[list[str]]:
        """Return module ids in groups: modules of a group share parameters; see `corral.learners.sharing`."""
        return group_sharing(module_ids, self._shared)

    def torch_optimizer(self, module_id: str) -> torch.optim.Optimizer | None:
        """Return the optimizer of torch of a module; of several, the first."""
        return self._optimizers[module_id].torch_optimizer

    @property
    def learning_ids(self) -> list[str]:
        """Ids of the modules that have a loss and an optimizer."""
        return list(self._optimizers)

    def set_losses(self, losses: Mapping[str, Loss]) -> None:
        """Use other losses from the next update on, by module id.

        Raises:
            ConfigError: A module does not learn.
        """
        self._check_learns(losses)
        self._losses |= {module_id: compile_loss(loss) if self._compile else loss for module_id, loss in losses.items()}

    def _check_learns(self, by_module: Mapping[str, Any]) -> None:
        if unknown := sorted(by_module.keys() - self._optimizers.keys()):
            raise ConfigError(
                f"learner: module(s) {unknown} have no loss and optimizer, so they cannot learn; the modules that "
                f"learn are {sorted(self._optimizers)}."
            )

    def _fire(self, event: str, module_id: str, **arguments: Any) -> None:
        if not self.callbacks.subscribed(event):
            return
        start = time.perf_counter()
        self.callbacks.fire(
            event,
            learner=self,
            metrics_logger=self.metrics,
            policy_id=module_id,
            policy=self.modules[module_id],
            **arguments,
        )
        self.callbacks_s += time.perf_counter() - start

    def update(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> dict[str, dict[str, Any]]:
        """Take gradient steps on every module that has a batch and settings.

        Modules that share parameters take their steps in turn, one minibatch each; other modules one after another.

        Args:
            batches: Batches by module id; columns are NumPy arrays.
            settings: Settings by module id. A module without an entry does not learn, and its batch is not used.

        Returns:
            By module id: the loss's scalars and the norms of the gradients, averaged over the steps, and the columns
            that the loss reported, of the last epoch, as arrays `[B]` in the order of the batch.

        Raises:
            LossError: A batch is empty; or a loss or gradient is not finite: that step is not taken, and the weights
                stay finite; or a loss returns something else than `Loss` says, has no scalar for a group of parameters,
                or depends on no trainable parameter.
            ConfigError: A module with settings has no loss, or the settings name unknown groups of parameters, or a
                layer or parameter was replaced.
            ColumnError: A callback of `on_gradients` added or removed gradients, or changed their shape; or a loss
                asked for a column that the batch lacks.
            CallbackError: A callback raised, wrote an action outside the action space, or gave a result the name of a
                number that the learner reports.
        """
        self._check_learns(settings)
        results: dict[str, dict[str, Any]] = {}
        for group in self.group_sharing(module_id for module_id in batches if module_id in settings):
            shown = {module_id: self._show_batch(module_id, batches[module_id]) for module_id in group}
            with torch_threads(self._num_threads[group[0]]):
                reports = self.update_group({module_id: batch for module_id, (batch, _) in shown.items()}, settings)
            for module_id, metrics in reports.items():
                added = shown[module_id][1]
                if taken := sorted(metrics.keys() & added.keys()):
                    raise CallbackError(
                        f"on_learn_on_batch: a callback added {', '.join(map(repr, taken))} to `result`, and learners/"
                        f"{module_id} reports numbers of these names: choose other names."
                    )
                results[module_id] = metrics | added
                self._fire("on_update_end", module_id, result=results[module_id])
        return results

    def update_group(
        self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]
    ) -> dict[str, dict[str, Any]]:
        """Take the gradient steps on modules that share parameters, in turn; or on one module.

        A subclass may take them in another way. It then overrides `group_sharing` too, if modules without common
        parameters are to learn together.

        Args:
            batches: Batches of the modules by module id; columns are NumPy arrays.
            settings: Settings by module id, also of modules that are not in `batches`.

        Returns:
            By module id what the update reports, as `UpdateReport.results` returns it.
        """
        return take_turns(
            {
                module_id: self._update_module(module_id, batch, settings[module_id])
                for module_id, batch in batches.items()
            }
        )

    def _show_batch(self, module_id: str, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Fire `on_learn_on_batch`, and return the batch and the results as the callbacks left them.

        Raises:
            LossError: The batch is empty.
            CallbackError: A callback raised, or wrote an action outside the action space.
        """
        added: dict[str, Any] = {}
        if self.callbacks.subscribed("on_learn_on_batch"):
            columns = Columns(batch, num_rows(batch))
            self._fire("on_learn_on_batch", module_id, train_batch=columns, result=added)
            batch = columns.columns
            if "actions" in batch:
                space = module_action_space(self.modules[module_id].action_space)
                self.callbacks.check_actions(batch["actions"], space, "on_learn_on_batch")
        if not num_rows(batch):
            raise LossError(f"learners/{module_id}: the batch is empty. Did a callback set all of `valid` to False?")
        return batch, added

    def _update_module(
        self, module_id: str, batch: Batch, settings: UpdateSettings
    ) -> Generator[None, None, dict[str, Any]]:
        """Take the gradient steps of one module, yield after each of them, and return what they reported."""
        module, optimizer = self.modules[module_id], self._optimizers[module_id]
        self._layers[module_id].check_same(f"module {module_id!r}")
        optimizer.sync()
        size = num_learned(batch)
        sizes, num_units = self._gather_sizes(module_id, size, len(unit_bounds(batch)) - 1)
        num_minibatches = max(1, round(min(sizes) / settings.minibatch_size)) if settings.minibatch_size else 1
        num_minibatches = min(num_minibatches, num_units)
        num_gradient_steps = settings.num_epochs * num_minibatches
        settings.check_groups(optimizer.groups, num_gradient_steps)
        optimizer.set_lr(settings.lr)
        cuts = Cuts(batch, num_minibatches, self.rng if settings.shuffle else None)
        peers = self.peers if "sequence_starts" in batch else None
        report = UpdateReport(size, num_minibatches)
        if not module.training:  # `values` leaves it in evaluation mode
            module.train()
        compute_loss, batch = self._loss_and_columns(module_id, batch, num_gradient_steps)
        for epoch in range(settings.num_epochs):
            new_order, bounds = cuts.draw()
            order = None if new_order is None else torch.from_numpy(new_order).to(self.device)
            weights = shares_of_rows(cuts.sizes(new_order, bounds), sizes, peers)  # of this learner
            rows = batch if order is None else map_tree(lambda column, rows=order: column.index_select(0, rows), batch)
            for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
                minibatch = rows
                if num_minibatches > 1:
                    minibatch = map_tree(lambda column, a=start, b=stop: column[a:b], rows)
                loss, reported = compute_loss(module, minibatch, settings.coefficients)
                groups = settings.groups_at(report.num_steps + 1, optimizer.groups)
                total = total_loss(loss, groups)
                norms = self._compute_gradients(module_id, loss, total, groups, settings, weights[index])
                if not all(map(math.isfinite, norms.values())):
                    error = loss_error(module_id, epoch, index, total, reported, norms)
                    raise error if self.peers is None else self.peers.problems(error)
                optimizer.step(groups)
                report.add(total, reported, norms, order)
                if settings.after_step is not None:
                    with torch.no_grad():
                        settings.after_step(module, groups)
                    optimizer.sync()  # it may have frozen parameters, or replaced parameters and gradients
                yield
                if module_id in self._shared:
                    optimizer.sync()  # callbacks of another module's step may have done so with shared parameters
            if settings.stop is not None and self._asks_to_stop(settings.stop, report.epoch_means(), size):
                break
        if self.peers is not None:
            self.peers.copy_buffers(module)
        lrs = {f"{name}_optimizer_learning_rate": lr for name, lr in optimizer.lrs().items()}
        optimizer.end_update()
        return {**report.results(), **lrs}

    def _gather_sizes(self, module_id: str, size: int, num_units: int) -> tuple[list[int], int]:
        """Return the sizes of the batches of all learners, and the smallest number of rows or sequences of one.

        The learners must have the same trainable parameters.
        """
        if self.peers is None:
            return [size], num_units
        sizes, units, fingerprints = self.peers.gather(size, num_units, self._optimizers[module_id].fingerprint)
        if len(set(fingerprints)) > 1:
            raise LossError(
                f"learners/{module_id}: the learners have frozen different parameters. Change requires_grad in all of "
                "them, with learner_group.foreach_module or in a callback that runs in every learner."
            )
        return sizes, min(units)

    def _loss_and_columns(self, module_id: str, batch: Batch, num_gradient_steps: int) -> tuple[Any, Batch]:
        """Return the form of the loss that suits this update, and the batch as arrays or tensors for this form."""
        loss, optimizer = self._losses[module_id], self._optimizers[module_id].torch_optimizer
        fast = None
        if num_gradient_steps == 1 and optimizer is not None:
            fast = fast_form(loss, self.modules[module_id], optimizer, batch)
        if fast is not None:
            return fast, batch
        return partial(call_loss, loss, module_id), map_tree(self._to_device, batch)

    def _asks_to_stop(self, stop: Stop, means: Mapping[str, float], size: int) -> bool:
        """Return whether `stop` ends the epochs; with several learners, all of them get the first one's answer."""
        if self.peers is None:
            return stop(means)
        [answers] = self.peers.gather(int(stop(self.peers.average_scalars(means, size))))
        return bool(answers[0])

    def _compute_gradients(
        self, module_id: str, loss: Any, total: Any, groups: Collection[str], settings: UpdateSettings, weight: float
    ) -> dict[str, float]:
        """Compute the gradients of groups of parameters, average them over all learners, and clip them.

        Returns:
            The norms of the gradients by group, before clipping; NaN if a loss or gradient is not finite.
        """
        optimizer = self._optimizers[module_id]
        is_finite = math.isfinite(total.item())
        if is_finite and isinstance(total, Tensor):  # the form on arrays has computed the gradients already
            optimizer.zero_grad(groups)
            backward(loss, {name: optimizer.trainable[name] for name in groups}, module_id, len(optimizer.groups))
        if is_finite and self.callbacks.subscribed("on_gradients"):
            self._show_gradients(module_id, groups)
            optimizer.sync()  # the callback may have replaced gradients, or frozen parameters
        if self.peers is not None:
            steppable = [parameter for name in groups for parameter in optimizer.steppable[name]]
            is_finite = self.peers.average(steppable, weight, not is_finite)
        if not is_finite:
            return dict.fromkeys(groups or optimizer.groups, math.nan)
        clipped = optimizer.trainable if settings.grad_clip_by == "norm" else optimizer.steppable
        return {name: clip_gradients(clipped[name], settings.grad_clip, settings.grad_clip_by) for name in groups}

    def _show_gradients(self, module_id: str, groups: Collection[str]) -> None:
        """Fire `on_gradients`; gradients that a callback replaced in the dict are copied to the parameters."""
        optimizer = self._optimizers[module_id]
        moving = {id(p) for name in groups for p in optimizer.groups[name]}
        named = self.modules[module_id].named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None and id(p) in moving}
        shown = dict(gradients)
        self._fire("on_gradients", module_id, gradients=shown)
        if shown.keys() != gradients.keys():
            raise ColumnError(
                f"on_gradients: gradients were added or removed: {sorted(shown.keys() ^ gradients.keys())}."
            )
        for name, gradient in gradients.items():
            new = shown[name]
            if new is gradient:
                continue
            if not isinstance(new, Tensor) or new.shape != gradient.shape:
                was = getattr(new, "shape", type(new).__name__)
                raise ColumnError(f"on_gradients: {name!r} must be a tensor {tuple(gradient.shape)}, and is {was}.")
            gradient.copy_(new)

    def _to_device(self, column: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def values(self, module_id: str, obs: Tree, states: Tree = None) -> NDArray[np.float32]:
        """Return the module's state values, float32 `[B]`, for a tree of observations `[B, ...]`.

        Args:
            module_id: Id of the module.
            obs: Observations.
            states: For a module with memory, the states in which it sees them, a tree of `[B, ...]`.
        """
        inputs = {"obs": obs} if states is None else {"obs": obs, "states": states}
        return self._evaluate(module_id, lambda module, rows: module.value(*rows.values()), inputs)

    def dist_inputs(self, module_id: str, batch: Batch) -> NDArray[np.float32]:
        """Return the outputs of the module's policy, float32 `[B, d]`, for the observations of a batch."""
        if "sequence_starts" not in batch:
            return self._evaluate(module_id, lambda module, rows: module.policy(rows["obs"]), {"obs": batch["obs"]})
        inputs = {name: batch[name] for name in ("obs", "states", "sequence_starts")}
        return self._evaluate(module_id, lambda module, rows: module.policy_and_value(*module_inputs(rows))[0], inputs)

    def _evaluate(
        self, module_id: str, evaluate: Callable[[Module, Batch], Tensor], batch: Batch
    ) -> NDArray[np.float32]:
        """Return what a function of a module and columns returns, in evaluation mode and without gradients."""
        module, bounds, parts = self.modules[module_id].eval(), unit_bounds(batch), []
        size = len(bounds) - 1
        units = max(1, EVALUATION_CHUNK * size // max(1, num_rows(batch)))  # rows, or sequences
        with torch_threads(self._num_threads[module_id]), torch.inference_mode():
            for unit in range(0, max(1, size), units):
                start, stop = bounds[unit], bounds[min(unit + units, size)]
                chunk = map_tree(lambda column, a=start, b=stop: self._to_device(column[a:b]), batch)
                parts.append(evaluate(module, chunk).cpu().numpy())
        return np.concatenate(parts)

    def get_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the weights by module id and parameter name; on the CPU they are views: copy them before an update."""
        return {
            module_id: {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}
            for module_id, module in self.modules.items()
        }

    def get_acting_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return only the weights that runners need to act; on the CPU they are views: copy them before an update.

        Raises:
            ConfigError: A layer or parameter was replaced.
        """
        for module_id, layers in self._layers.items():
            layers.check_same(f"module {module_id!r}")
        return {module_id: self._acting[module_id].get() for module_id in self.modules}

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Copy weights into the modules, by module id and parameter name."""
        for module_id, arrays in weights.items():
            for name, value in self.modules[module_id].state_dict().items():
                value.copy_(torch.from_numpy(arrays[name]))

    def get_state(self) -> dict[str, Any]:
        """Return a copy of `weights` and `optimizers`, which all learners have in common."""
        return get_learner_state(self.modules, self._optimizers)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the learner can continue from a state, without changing anything; see `set_learner_state`."""
        check_learner_state(self.modules, self._optimizers, state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `set_learner_state`."""
        set_learner_state(self.modules, self._optimizers, state)

    def get_own_state(self) -> dict[str, Any]:
        """Return a copy of what this learner does not have in common with others: `rng`, `callbacks` and `metrics`."""
        return {
            "rng": get_rng(self.rng),
            "callbacks": self.callbacks.get_state(),
            "metrics": self.metrics.get_state(),
        }

    def set_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_own_state`."""
        set_rng(self.rng, state["rng"])
        self.callbacks.set_state(state["callbacks"])
        self.metrics.set_state(state["metrics"])


def find_device(device: str) -> torch.device:
    """Return a device by its name; `"auto"` is CUDA if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
