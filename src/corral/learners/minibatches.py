"""Cuts a batch into minibatches, and collects what the gradient steps on them report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.core.metrics.reducers import reduction_of_updates
from corral.core.sequences import rows_of_sequences, start_bounds
from corral.core.tree import num_rows
from corral.errors import LossError
from corral.learners.losses import Batch


def row_bounds(size: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts of about equal size in `size` rows: `num_parts + 1` row numbers."""
    bounds: list[int] = np.linspace(0, size, num_parts + 1).astype(int).tolist()
    return bounds


class Cuts:
    """How the units of a batch are cut into minibatches, in a new way in each epoch if they are shuffled.

    The rows of a unit stay together, and minibatches have about equal numbers of units. The column `unit_starts` marks
    the first row of each unit, bool `[B]`; without it each row is a unit.

    Args:
        batch: Columns `[B, ...]`, arrays or tensors.

    Attributes:
        bounds: Bounds of the units: `num_units + 1` row numbers.
        num_units: Number of units.
        size: Number of rows that the loss is the mean over: all rows, or of units those that the column `learns` marks,
            which leaves out the burn-in of sequences, and the observations after their steps.
        num_parts: Number of minibatches.
        drawn: What `draw` returned last.
    """

    drawn: tuple[NDArray[np.int64] | None, list[int]]

    def __init__(self, batch: Batch) -> None:
        """Find the units; there is one minibatch until `cut` says otherwise."""
        self.bounds: range | NDArray[np.int64]
        self._learns: NDArray[np.bool_] | None = None
        if "unit_starts" in batch:
            self.bounds, self._learns = start_bounds(batch["unit_starts"]), batch.get("learns")
        else:
            self.bounds = range(num_rows(batch) + 1)
        self.num_units = len(self.bounds) - 1
        self.size = int(self.bounds[-1] if self._learns is None else np.count_nonzero(self._learns))
        self.num_parts, self._parts = 1, [0, self.num_units]
        self._rng: np.random.Generator | None = None

    def cut(self, num_parts: int, rng: np.random.Generator | None) -> None:
        """Set the number of minibatches and the generator for shuffling; `None` takes the rows as they come."""
        self.num_parts, self._rng = num_parts, rng if num_parts > 1 else None
        self._parts = row_bounds(self.num_units, num_parts)

    def draw(self) -> tuple[NDArray[np.int64] | None, list[int]]:
        """Return the rows of the batch in the order of the next epoch, `None` for their own order, and the bounds.

        The bounds of the minibatches are `num_parts + 1` places in that order.
        """
        bounds = self.bounds
        if self._rng is None:
            self.drawn = None, [int(bounds[part]) for part in self._parts]
            return self.drawn
        order = self._rng.permutation(self.num_units)
        self.drawn = order, self._parts
        if not isinstance(bounds, range):
            ends = np.append(0, np.cumsum(np.diff(bounds)[order]))
            self.drawn = rows_of_sequences(bounds, order), ends[self._parts].tolist()
        return self.drawn

    def sizes(self) -> list[int]:
        """Return the size of each minibatch of the epoch that was drawn last, counted as `size` counts."""
        order, bounds = self.drawn
        ends = np.asarray(bounds)
        if self._learns is not None:
            ends = np.append(0, np.cumsum(self._learns if order is None else self._learns[order]))[ends]
        sizes: list[int] = np.diff(ends).tolist()
        return sizes


class UpdateReport:
    """Collects what gradient steps report: scalars and norms, which are averaged, and columns by row.

    Args:
        size: Size of the batch, as `Cuts.size` counts.
        num_minibatches: Number of minibatches that it was cut into.

    Attributes:
        size: Size of the batch, as `Cuts.size` counts.
        num_steps: Number of gradient steps so far.
    """

    def __init__(self, size: int, num_minibatches: int) -> None:
        """Start without steps."""
        self.size, self._num_minibatches = size, num_minibatches
        self.num_steps = 0
        self._scalars: list[dict[str, Any]] = []
        self._norms: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}
        self._order: Tensor | None = None

    def add(self, loss: Any, reported: Mapping[str, Any], norms: Mapping[str, float], order: Tensor | None) -> None:
        """Add what one gradient step reported.

        Args:
            loss: The scalar that was minimised, a tensor or a NumPy number.
            reported: Scalars and columns, in tensors or arrays.
            norms: Norms of the gradients of the groups of parameters that moved.
            order: The order of the rows in this epoch; `None` if they were taken as they came.
        """
        scalars = {"total_loss": loss.detach() if isinstance(loss, Tensor) else loss}
        for name, value in reported.items():
            if not value.ndim:
                scalars[name] = value
        self._scalars.append(scalars)
        self.num_steps += 1
        for name, norm in norms.items():
            self._norms.setdefault(name, []).append(norm)
        if len(scalars) <= len(reported):
            for name in reported.keys() - scalars.keys():
                self._columns.setdefault(name, []).append(reported[name])
            self._order = order

    def epoch_means(self) -> dict[str, float]:
        """Return the scalars over the latest epoch, as `results` merges them."""
        return _merged(self._scalars[-self._num_minibatches :])

    def results(self) -> dict[str, Any]:
        """Return the scalars over all steps, and the columns of the latest epoch in the order of the batch.

        A scalar whose name ends in `_min` or `_max` is the extreme over the steps, any other the mean.
        """
        first = self._scalars[0]
        found = {name: value.item() for name, value in first.items()} if self.num_steps == 1 else _merged(self._scalars)
        for name, taken in self._norms.items():
            found[f"gradients_{name}_optimizer_global_norm"] = sum(taken) / len(taken)
        found["module_train_batch_size_mean"] = self.size / self._num_minibatches
        found["num_gradient_steps"] = float(self.num_steps)
        found["num_epochs"] = float(self.num_steps // self._num_minibatches)
        for name, steps in self._columns.items():
            parts = steps[-self._num_minibatches :]
            column = parts[0] if len(parts) == 1 else torch.cat(parts)
            if self._order is not None:
                column = torch.empty_like(column).index_copy_(0, self._order, column)
            found[name] = column.detach().cpu().numpy() if isinstance(column, Tensor) else column
        return found


def _merged(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each scalar over the steps that reported it: an extreme, or the mean."""
    order = list(steps[0])
    if all(list(step) == order for step in steps):
        table = torch.stack([value for step in steps for value in step.values()]).reshape(len(steps), -1)
        merged = dict(zip(order, table.mean(0).tolist(), strict=True))
        extremes = [(index, name) for index, name in enumerate(order) if reduction_of_updates(name) != "mean"]
        return merged | {name: _over_steps(name, table[:, index].tolist()) for index, name in extremes}
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _over_steps(name, [step[name].item() for step in steps if name in step]) for name in names}


def _over_steps(name: str, values: Sequence[float]) -> float:
    reduction = reduction_of_updates(name)
    if reduction == "mean":
        return sum(values) / len(values)
    return min(values) if reduction == "min" else max(values)


def loss_error(
    module_id: str,
    epoch: int,
    index: int,
    loss: Any,
    reported: Mapping[str, Any],
    norms: Mapping[str, float],
) -> LossError:
    """Return the error for a gradient step whose loss or gradient is not finite; it names the parts that are not."""
    parts = {name: value.item() for name, value in reported.items() if not value.ndim}
    if math.isfinite(loss.item()):
        parts |= {"gradient norm" if len(norms) == 1 else f"gradient norm of {name}": norms[name] for name in norms}
    culprits = [f"{name}={value}" for name, value in parts.items() if not math.isfinite(value)]
    return LossError(
        f"learners/{module_id}/total_loss is {loss.item()} in epoch {epoch}, minibatch {index} "
        f"({', '.join(culprits) or 'every part of it is finite'}). The step was not taken. "
        "Lower lr, set grad_clip, or look for very large rewards and observations."
    )
