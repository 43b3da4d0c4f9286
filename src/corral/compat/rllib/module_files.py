"""Files of one module of RLlib, in the form that the checkpoints of algorithms have for each of their modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from corral.compat.rllib.encoding import encode
from corral.core.paths import resolve_path
from corral.core.settings import path_of
from corral.core.space_descriptions import describe_space
from corral.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODULE_FILE, WEIGHTS_FILE = "module.json", "module_state.safetensors"
"""Files of a module in a checkpoint."""

OWN = "rl_module."
"""What the names of the weights of a user's module begin with in a checkpoint."""


def write_module(
    path: Path,
    module_class: type,
    model_config: Mapping[str, Any],
    observation_space: Any,
    action_space: Any,
    weights: Mapping[str, NDArray[Any]],
) -> None:
    """Write the files of a module.

    Args:
        path: The directory, which is made.
        module_class: Class of Corral's module.
        model_config: Settings of Corral's module.
        observation_space: Space of one observation.
        action_space: Space of one action.
        weights: Weights by name.
    """
    path.mkdir(parents=True, exist_ok=True)
    description = {
        "module_class": path_of(module_class),
        "model_config": encode(dict(model_config)),
        "observation_space": describe_space(observation_space),
        "action_space": describe_space(action_space),
    }
    (path / MODULE_FILE).write_text(json.dumps(description, indent=1))
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, path / WEIGHTS_FILE)


def check_files(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of RLlib that say what to write, or to which filesystem, and that files here do not follow.

    Args:
        settings: Arguments by name.

    Raises:
        ConfigError: There is a `state`, or a `filesystem` that is not the one of this machine.
    """
    filesystem = settings.get("filesystem")
    if filesystem is not None and getattr(filesystem, "type_name", None) != "local":
        raise ConfigError(f"filesystem={filesystem!r:.80}: give a path of this machine, or of a drive mounted here.")
    if settings.get("state") is not None:
        raise ConfigError("state=...: the own state is written: leave it out, or call set_state(state) before.")


def weights_file(path: Any) -> Path:
    """Return the file of weights in the directory of a module, or in one that holds the only module of an algorithm.

    Raises:
        CheckpointError: There is none, or there are several modules.
    """
    directory = resolve_path(path, "the module")
    file = directory / WEIGHTS_FILE
    if not file.is_file():
        inside = sorted(directory.glob(f"*/{WEIGHTS_FILE}"))
        if len(inside) == 1:
            return inside[0]
        if inside:
            names = ", ".join(found.parent.name for found in inside)
            raise CheckpointError(f"{path} holds several modules: add the id of one of them, {names}.")
        raise CheckpointError(
            f"{path} holds no module: give the directory learner_group/learner/rl_module/<module id> of a checkpoint, "
            "or the directory that save_to_path() of a module wrote. Checkpoints that RLlib wrote are not read."
        )
    return file


def read_weights(path: Any, *, is_own: bool) -> dict[str, torch.Tensor]:
    """Return the weights in the directory of a module by name.

    Args:
        path: The directory.
        is_own: Whether they are for a module of a user.

    Raises:
        CheckpointError: There is no such directory.
    """
    found = load_file(weights_file(path))
    return {name.removeprefix(OWN) if is_own else name: torch.from_numpy(value) for name, value in found.items()}


def has_own_weights(path: Any) -> bool:
    """Return whether a directory holds weights that `save_to_path` of a module of a user's wrote; `None` holds none."""
    return path is not None and bool(own_weights(path))


def own_weights(path: Any) -> list[str]:
    """Return the names of weights of a user's module in a directory."""
    with safe_open(weights_file(path), framework="numpy") as file:
        return [name for name in file.keys() if name.startswith(OWN)]
