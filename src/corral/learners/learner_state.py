"""The weights and optimizers of a learner as plain data and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.errors import CheckpointError
from corral.learners.group_optimizers import GroupOptimizers
from corral.learners.optimizers import ModuleOptimizer

Modules = Mapping[str, nn.Module]
Optimizers = Mapping[str, ModuleOptimizer] | Mapping[str, ModuleOptimizer | GroupOptimizers]


def get_learner_state(modules: Modules, optimizers: Optimizers) -> dict[str, Any]:
    """Return copies of the weights, by module id and parameter name, and of each optimizer's state and description."""
    return {
        "weights": {name: _map(_to_array, dict(module.state_dict())) for name, module in modules.items()},
        "optimizers": {
            name: {"made_for": optimizer.made_for, "state": _map(_to_array, optimizer.state_dict())}
            for name, optimizer in optimizers.items()
        },
    }


def set_learner_state(modules: Modules, optimizers: Optimizers, state: Mapping[str, Any]) -> None:
    """Load a state that `get_learner_state` returned; modules and parameters stay the same objects.

    Parameters are frozen or trainable as they are here, whatever they were when the state was saved.

    Args:
        modules: Modules by module id.
        optimizers: Optimizers by module id; a module that does not learn has none.
        state: Weights, and optimizer state such as Adam's moments.

    Raises:
        CheckpointError: The state was saved with other modules or optimizers, or is damaged; nothing was changed.
    """
    check_learner_state(modules, optimizers, state)
    for module_id, module in modules.items():
        module.load_state_dict(_map(_to_tensor, state["weights"][module_id]))
    for module_id, optimizer in optimizers.items():
        optimizer.load_state_dict(_map(_to_tensor, state["optimizers"][module_id]["state"]))


def check_learner_state(modules: Modules, optimizers: Optimizers, state: Mapping[str, Any]) -> None:
    """Check that modules and optimizers can load a state, without changing anything; see `set_learner_state`."""
    _check_weights(modules, state["weights"])
    for module_id, optimizer in optimizers.items():
        saved = state["optimizers"].get(module_id, {})
        _check_optimizer(module_id, saved.get("made_for"), optimizer.made_for)
        _check_moments(module_id, saved["state"]["state"], optimizer)


def _check_weights(modules: Modules, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
    if weights.keys() != modules.keys():
        raise CheckpointError(f"the state has modules {sorted(weights)}, and there are {sorted(modules)} here.")
    for module_id, module in modules.items():
        here = {name: _form_of(value) for name, value in module.state_dict().items()}
        there = {name: _form_of(value) for name, value in weights[module_id].items()}
        for name in (*here, *there):
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"learners/{module_id}: the weights do not fit the module: {name} is "
                    f"{there.get(name, 'missing')} in the state and {here.get(name, 'missing')} here. Build it with "
                    "the module_class, model_config and env that it was saved with."
                )
    held: dict[Tensor, tuple[str, str]] = {}
    for module_id, module in modules.items():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            other_id, other_name = held.setdefault(value, (module_id, name))
            own = weights[module_id]
            if name in own and own[name].tobytes() != weights[other_id][other_name].tobytes():
                raise CheckpointError(
                    f"learners/{module_id}: {name} is shared with {other_name} of module {other_id!r} here, and the "
                    "state has different weights for them: it was saved without these shared_layers."
                )


def _form_of(value: Any) -> str:
    """Return shape and dtype of a tensor or an array in words, and for another value its type."""
    if not isinstance(value, (Tensor, np.ndarray)):
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _check_optimizer(module_id: str, there: list[Any] | None, here: list[Any]) -> None:
    if there is None:
        raise CheckpointError(
            f"learners/{module_id}: the state has no optimizer for this module, which learns here: it was saved by an "
            "algorithm in which the module did not learn."
        )
    if there != here:
        raise CheckpointError(
            f"learners/{module_id}: the state was saved by {there[0]} on parameters of shapes {there[1]}, and here is "
            f"{here[0]} on {here[1]}: build the algorithm with the optimizer and module that it was saved with."
        )


def _check_moments(
    module_id: str, moments: Mapping[int, Mapping[str, Any]], optimizer: ModuleOptimizer | GroupOptimizers
) -> None:
    """Compare the state of each parameter with what a step of such an optimizer would make."""
    expected = optimizer.describe_state(_form_of) if moments else None
    if expected is None:
        return
    for index, found in moments.items():
        here = expected[index] if isinstance(index, int) and 0 <= index < len(expected) else {}
        there = {name: _form_of(value) for name, value in found.items()}
        for name in (*here, *there):
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"learners/{module_id}: the state of the optimizer is damaged: {name} of parameter {index} is "
                    f"{there.get(name, 'missing')}, and must be {here.get(name, 'missing')}."
                )


def _map(convert: Any, value: Any) -> Any:
    """Convert the leaves of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _map(convert, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(convert, part) for part in value)
    return convert(value)


def _to_array(value: Any) -> Any:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value


def _to_tensor(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, np.ndarray) else value
