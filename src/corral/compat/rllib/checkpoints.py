"""Checkpoints in RLlib's tree: Corral's own, with the config of RLlib and a directory for each module.

`learner_group/learner/rl_module/<module id>` can be loaded alone. Loading runs no code from a checkpoint: classes and
functions are stored as import paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import load_file

from corral.algorithms.checkpoint import describe_algorithm
from corral.algorithms.pretrained import check_weights
from corral.compat.rllib.encoding import decode, encode
from corral.compat.rllib.module_files import MODULE_FILE, weights_file, write_module
from corral.core.paths import resolve_path
from corral.errors import CheckpointError
from corral.runs.checkpoint.directory import write_checkpoint

if TYPE_CHECKING:
    from corral.compat.rllib.algorithm import Algorithm
    from corral.compat.rllib.config import AlgorithmConfig

MODULES = Path("learner_group/learner/rl_module")
_CONFIG = "rllib_config.json"

_known: dict[str, AlgorithmConfig] = {}  # configs that this process saved; they may hold what no file can name


def save(algorithm: Algorithm, path: Path, *, is_free: bool = False) -> Path:
    """Write a checkpoint, and return its absolute path.

    Args:
        algorithm: The algorithm.
        path: The directory.
        is_free: Whether `check_free` has passed, and the script's class may have written files of its own since then.

    Raises:
        CheckpointError: The path holds something else, or a state cannot be saved.
        OSError: The files cannot be written.
    """
    native = algorithm.native
    saved = Path(str(write_checkpoint(path, **describe_algorithm(native), is_free=is_free)))
    config = {"algorithm": algorithm.ALGORITHM, "settings": encode(dict(algorithm.config.to_dict()))}
    (saved / _CONFIG).write_text(json.dumps(config, indent=1))
    write_modules(native, saved / MODULES)
    _known[str(saved)] = algorithm.config
    return saved


def write_modules(native: Any, directory: Path) -> None:
    """Write a directory for each module of Corral's algorithm."""
    weights = native.learner_group.get_weights()
    for module_id, spec in native.env_runner_group.module_specs.items():
        write_module(
            directory / module_id,
            spec.module_class,
            spec.model_config,
            spec.module_space,
            spec.action_space,
            weights.get(module_id, {}),
        )


def load_modules(native: Any, path: Any, component: str, modules: Path) -> None:
    """Load the weights of modules into Corral's algorithm.

    Args:
        native: The algorithm.
        path: Directory of the module, or with a directory for each module; with `rl_module` also a checkpoint.
        component: `modules`, or `rl_module`, for all modules in the directory, or `modules` with the id of one module.
        modules: The name of all modules together, as a path.

    Raises:
        CheckpointError: There is no such module, or it does not fit.
    """
    name, path = Path(component), resolve_path(path, "the module")
    if component == modules.name:
        name, path = modules, path / modules if (path / modules).is_dir() else path
    if name == modules:
        found = {file.parent.name: file.parent for file in sorted(path.glob(f"*/{MODULE_FILE}"))}
        if not found:
            weights_file(path)  # raises
    elif name.parent == modules:
        found = {name.name: path}
    else:
        raise CheckpointError(
            f"component={component!r}: Corral restores the whole, or {modules} and {modules}/<module id>."
        )
    for module_id, directory in found.items():
        file = weights_file(directory)
        here, there = native.learner_group.get_weights().get(module_id, {}), load_file(file)
        if there.keys() < here.keys():  # RLlib keeps the weights of layers that the file has not
            check_weights(module_id, {name: here[name] for name in there}, there, str(file))
            native.learner_group.set_weights({module_id: {**here, **there}})
            native.sync_weights()
        else:
            native.load_module_weights(file, module_id)


def load_config(path: Path, classes: Mapping[str, type[AlgorithmConfig]]) -> AlgorithmConfig:
    """Return the config of a checkpoint.

    Args:
        path: The checkpoint.
        classes: Config classes by name of the algorithm.

    Raises:
        CheckpointError: There is none, or it names what no checkpoint should.
        ConfigError: It holds a value that no file can name.
    """
    if (known := _known.get(str(path.absolute()))) is not None:
        return known.copy(copy_frozen=False)
    try:
        stored = json.loads((path / _CONFIG).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} holds no {_CONFIG}: it is no checkpoint of an algorithm of RLlib.") from error
    config = classes[stored["algorithm"]]()
    return config.update_from_dict(decode(stored["settings"], path))
