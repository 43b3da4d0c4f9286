"""What a loss is: a function of a module and a batch, for torch, and perhaps for small nets in NumPy too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from corral.core.tree import Tree
from corral.modules.module import Module

Batch = dict[str, Tree]
"""Columns by name, each a tree of arrays or tensors `[B, ...]` of one length B."""

Loss = Callable[[Module, Batch, Mapping[str, float]], tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]]
"""`loss(module, minibatch, coefficients)` returns what to minimise, and scalars or columns `[B]` to report.

What to minimise is one scalar for all groups of parameters, or a mapping with one scalar per group, of which each group
gets the gradient of its own alone.
"""

ArrayLoss = Callable[[Module, Batch, Mapping[str, float]], tuple[Any, dict[str, Any]]]
"""The same of a minibatch of arrays, for a module with `array_networks`; it leaves gradients in the parameters."""


@dataclass(frozen=True)
class LossInTwoForms:
    """A loss for torch, and the same for small nets in NumPy, where torch's graph would cost more than the arithmetic.

    Attributes:
        loss: The loss.
        on_arrays: Its other form.
    """

    loss: Loss
    on_arrays: ArrayLoss

    def __call__(
        self, module: Module, batch: Batch, coefficients: Mapping[str, float]
    ) -> tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]:
        """Return the loss of a minibatch of tensors."""
        return self.loss(module, batch, coefficients)
