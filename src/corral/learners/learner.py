"""The learner: turns batches into gradient steps. It knows modules and columns, and no environment."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.callbacks.dispatch import Dispatcher
from corral.core.columns import Columns
from corral.core.tree import Tree, map_tree, num_rows
from corral.errors import ColumnError, LossError
from corral.learners.acting_weights import ActingWeights
from corral.learners.distributed import Peers
from corral.learners.learner_state import get_learner_state, set_learner_state
from corral.learners.losses import Batch, Loss, compile_loss
from corral.learners.minibatches import UpdateReport, loss_error, row_bounds, shares_of_rows
from corral.learners.numpy_q_learning import fast_form
from corral.learners.optimizers import (
    bind_parameters,
    bound_parameters,
    clip_gradients,
    make_optimizer,
    optimizer_settings,
)
from corral.metrics.logger import MetricsLogger
from corral.modules.module import Module
from corral.modules.threads import num_threads_for, torch_threads

# Values of very large batches are computed in pieces of this many observations, to bound memory.
VALUES_CHUNK = 8192


class Learner:
    """Minibatch gradient steps on one or more modules, each with an optimizer of its own.

    Args:
        modules: By module id. The learner moves them to the device and keeps them.
        loss: The algorithm's loss, a pure function.
        optimizer_class: A `torch.optim.Optimizer`, called with the parameters and `optimizer_config`.
        optimizer_config: Its keyword arguments, apart from `lr`, which every update gives.
        grad_clip: Limit of the gradients, or `None`.
        grad_clip_by: `"global_norm"` (over a group of parameters), `"norm"` (each parameter's) or `"value"`.
        device: `"auto"` (CUDA when there is one), or a torch device name.
        num_threads: Intra-op threads, or `"auto"`: one for small nets.
        seed: Of the shuffling.
        compile: Whether `torch.compile` compiles the loss.
        callbacks: Who listens to the learner's events; `None` is nobody.
        peers: Learners that take every gradient step together with this one, or `None`.

    Attributes:
        modules: By module id.
        device: Where they are.
        metrics: The logger that callbacks get; aggregated into `result["learners"]`.
        rng: Of the shuffling.
        callbacks_s: Seconds in callbacks since somebody set it to 0.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        loss: Loss,
        *,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_config: Mapping[str, Any] | None = None,
        grad_clip: float | None = None,
        grad_clip_by: str = "global_norm",
        device: str = "auto",
        num_threads: int | str = "auto",
        seed: int = 0,
        compile: bool = False,
        callbacks: Dispatcher | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Move the modules to the device and make an optimizer for each."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.modules = {module_id: module.to(self.device) for module_id, module in modules.items()}
        self._compile = compile
        self.set_loss(loss, grad_clip, grad_clip_by)
        self._optimizer_settings = settings = optimizer_settings(optimizer_class, optimizer_config or {})
        self._trainable = {
            module_id: {
                name: [parameter for parameter in group if parameter.requires_grad]
                for name, group in module.parameter_groups().items()
            }
            for module_id, module in self.modules.items()
        }
        self._optimizers = {
            module_id: make_optimizer(groups.values(), optimizer_class, settings)
            for module_id, groups in self._trainable.items()
        }
        self._bound = {
            module_id: bound_parameters(itertools.chain.from_iterable(groups.values()))
            for module_id, groups in self._trainable.items()
        }
        self._acting = {module_id: ActingWeights(module) for module_id, module in self.modules.items()}
        self._num_threads = {
            module_id: num_threads_for(module, num_threads) for module_id, module in self.modules.items()
        }
        self.rng = np.random.default_rng(seed)
        self.metrics = MetricsLogger()
        self.callbacks = callbacks or Dispatcher([], {})
        self.callbacks_s = 0.0
        self.peers = peers

    def set_loss(self, loss: Loss, grad_clip: float | None, grad_clip_by: str) -> None:
        """Use another loss, and clip otherwise, from the next update on."""
        self._loss = compile_loss(loss) if self._compile else loss
        self._grad_clip, self._grad_clip_by = grad_clip, grad_clip_by

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

    def update(
        self,
        batches: Mapping[str, Batch],
        *,
        lr: float | Mapping[str, float],
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle: bool = True,
        coefficients: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Take gradient steps on every module that has a batch.

        Args:
            batches: By module id; columns are NumPy arrays.
            lr: Learning rate of this update, or one for each of the modules' groups of parameters.
            num_epochs: Passes over each batch.
            minibatch_size: Rows of one step, or `None` for the whole batch. A batch that it does not divide is cut
                into equal parts of about this size, so that no row is dropped and no step sees only a few rows.
            shuffle: Whether each epoch takes the rows in a new order.
            coefficients: By module id, handed to the loss.

        Returns:
            By module id: the loss's scalars and the gradients' norms, averaged over the steps, and the columns that it
            reported, of the last epoch, as arrays `[B]` in the order of the batch.

        Raises:
            LossError: A batch is empty, or a loss or gradient is not finite: that step is not taken, and the weights
                stay finite.
            ColumnError: A callback of `on_gradients` left other gradients than it was given.
            CallbackError: A callback raised.
        """
        results: dict[str, dict[str, Any]] = {}
        for module_id, batch in batches.items():
            added: dict[str, Any] = {}
            if self.callbacks.subscribed("on_learn_on_batch"):
                columns = Columns(batch, num_rows(batch))
                self._fire("on_learn_on_batch", module_id, train_batch=columns, result=added)
                batch = columns.columns
            if not num_rows(batch):
                raise LossError(
                    f"learners/{module_id}: the batch is empty. Did a callback set all of `valid` to False?"
                )
            with torch_threads(self._num_threads[module_id]):
                metrics = self._update_module(
                    module_id,
                    batch,
                    lr=lr,
                    num_epochs=num_epochs,
                    minibatch_size=minibatch_size,
                    shuffle=shuffle,
                    coefficients=(coefficients or {}).get(module_id, {}),
                )
            results[module_id] = metrics | added
            self._fire("on_update_end", module_id, result=results[module_id])
        return results

    def _update_module(
        self,
        module_id: str,
        batch: Batch,
        *,
        lr: float | Mapping[str, float],
        num_epochs: int,
        minibatch_size: int | None,
        shuffle: bool,
        coefficients: Mapping[str, float],
    ) -> dict[str, Any]:
        module, groups = self.modules[module_id], self._groups(module_id)
        for name, group in groups.items():
            group["lr"] = lr[name] if isinstance(lr, Mapping) else lr
        clipped = {name: group["params"] for name, group in groups.items()}
        if self._grad_clip_by == "norm":  # of each parameter, and not of the vectors that hold them
            clipped = self._trainable[module_id]
        parameters = list(itertools.chain.from_iterable(clipped.values()))
        size = num_rows(batch)
        sizes = [size] if self.peers is None else self.peers.gather(size)
        num_minibatches = max(1, round(min(sizes) / minibatch_size)) if minibatch_size else 1
        bounds = row_bounds(size, num_minibatches)
        weights = shares_of_rows(bounds, sizes)  # of this learner in each gradient step
        report = UpdateReport(size, num_minibatches)
        if not module.training:  # as it was left by `values`
            module.train()
        compute_loss, batch = self._loss_and_columns(module_id, batch, num_epochs * num_minibatches)
        for epoch in range(num_epochs):
            order = self._order(size) if shuffle and num_minibatches > 1 else None
            rows = batch if order is None else map_tree(lambda column, rows=order: column.index_select(0, rows), batch)
            for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
                minibatch = rows
                if num_minibatches > 1:
                    minibatch = map_tree(lambda column, a=start, b=stop: column[a:b], rows)
                loss, reported = compute_loss(module, minibatch, coefficients)
                norms = dict.fromkeys(groups, math.nan)
                if self._compute_gradients(module_id, loss, parameters, weights[index]):
                    norms = {
                        name: clip_gradients(group, self._grad_clip, self._grad_clip_by)
                        for name, group in clipped.items()
                    }
                if not all(map(math.isfinite, norms.values())):
                    error = loss_error(module_id, epoch, index, loss, reported, norms)
                    raise error if self.peers is None else self.peers.problems(error)
                self._optimizers[module_id].step()
                report.add(loss, reported, norms, order)
        if self.peers is not None:
            self.peers.copy_buffers(module)
        lrs = {f"{name}_optimizer_learning_rate": group["lr"] for name, group in groups.items()}
        return {**report.results(), **lrs}

    def _loss_and_columns(self, module_id: str, batch: Batch, num_gradient_steps: int) -> tuple[Any, Batch]:
        """Return the form of the loss that suits this update, and the batch as arrays or tensors for it."""
        fast = fast_form(self._loss, self.modules[module_id], self._optimizers[module_id], batch, num_gradient_steps)
        return (self._loss, map_tree(self._to_device, batch)) if fast is None else (fast, batch)

    def _groups(self, module_id: str) -> dict[str, dict[str, Any]]:
        """Return the optimizer's groups by name."""
        return dict(zip(self._trainable[module_id], self._optimizers[module_id].param_groups, strict=True))

    def _compute_gradients(self, module_id: str, loss: Any, parameters: Sequence[nn.Parameter], weight: float) -> bool:
        """Leave gradients in the parameters, those of all learners; say whether the losses are finite."""
        is_finite = math.isfinite(loss.item())
        if is_finite and isinstance(loss, Tensor):  # on arrays, the gradients are there
            bind_parameters(self._bound[module_id])
            for parameter in parameters:  # in place: a module's gradients are views of a vector's
                if parameter.grad is not None:
                    parameter.grad.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
        if is_finite and self.callbacks.subscribed("on_gradients"):
            self._show_gradients(module_id)
        bind_parameters(self._bound[module_id])
        return is_finite if self.peers is None else self.peers.average(parameters, weight, not is_finite)

    def _show_gradients(self, module_id: str) -> None:
        """Fire `on_gradients`; a gradient that was replaced in the dict, and not in place, counts too."""
        named = self.modules[module_id].named_parameters()
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        shown = dict(gradients)
        self._fire("on_gradients", module_id, gradients=shown)
        if shown.keys() != gradients.keys():
            raise ColumnError(
                f"on_gradients: gradients were added or taken away: {sorted(shown.keys() ^ gradients.keys())}."
            )
        for name, gradient in gradients.items():
            new = shown[name]
            if new is gradient:
                continue
            if not isinstance(new, Tensor) or new.shape != gradient.shape:
                was = getattr(new, "shape", type(new).__name__)
                raise ColumnError(f"on_gradients: {name!r} is a tensor {tuple(gradient.shape)}, and was given {was}.")
            gradient.copy_(new)

    def _order(self, size: int) -> Tensor:
        return torch.from_numpy(self.rng.permutation(size)).to(self.device)

    def _to_device(self, column: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def values(self, module_id: str, obs: Tree) -> NDArray[np.float32]:
        """Return the module's state values of a tree of observations `[B, ...]`, float32 `[B]`."""
        module = self.modules[module_id].eval()
        size = num_rows(obs)
        parts = []
        with torch_threads(self._num_threads[module_id]), torch.inference_mode():
            for start in range(0, size, VALUES_CHUNK):
                chunk = map_tree(lambda column, a=start: self._to_device(column[a : a + VALUES_CHUNK]), obs)
                parts.append(module.value(chunk).cpu().numpy())
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def get_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the weights by module id and parameter name; on the CPU they are views, to be copied at once."""
        return {
            module_id: {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}
            for module_id, module in self.modules.items()
        }

    def get_acting_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return what acting needs of the weights, likewise."""
        return {module_id: self._acting[module_id].get() for module_id in self.modules}

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Copy weights in, by module id and parameter name."""
        for module_id, arrays in weights.items():
            for name, value in self.modules[module_id].state_dict().items():
                value.copy_(torch.from_numpy(arrays[name]))

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what updates go on from, but for `rng`: `weights` and `optimizers`."""
        return get_learner_state(self.modules, self._optimizers)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where the learner of this state was; see `set_learner_state`."""
        set_learner_state(self.modules, self._optimizers, state, self._optimizer_settings)
