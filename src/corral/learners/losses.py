"""The types of losses, and their compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from corral.core.tree import Tree
from corral.errors import LossError
from corral.modules.module import Module

Batch = dict[str, Tree]
"""Columns by name, each a tree of arrays or tensors `[B, ...]` of one length B."""

Loss = Callable[[Module, Batch, Mapping[str, float]], tuple[Tensor | Mapping[str, Tensor], dict[str, Tensor]]]
"""`loss(module, minibatch, coefficients)` returns what to minimise, and scalars or columns `[B]` to report.

What to minimise is one scalar for all groups of parameters, or a mapping with one scalar per group, of which each group
gets the gradient of its own alone.
"""


def compile_loss(loss: Loss) -> Loss:
    """Return a loss that `torch.compile` compiles when it is first called; the module and its weights stay as they are.

    Raises:
        LossError: Raised by the returned function if the compilation fails.
    """
    compiled: Callable[..., Any] | None = None

    def call(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = torch.compile(loss)  # not earlier: it imports torch's compiler, which takes two seconds
        try:
            return compiled(module, batch, coefficients)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).strip().partition("\n\n")[0].split())  # what follows is advice on debugging
            raise LossError(
                f"learners: torch.compile failed on the loss: {reason} ({type(error).__name__}). It needs a C++ "
                "compiler such as gcc. Leave compile=True out of .learners(...) to train without compilation."
            ) from error

    return call
