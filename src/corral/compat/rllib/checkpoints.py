"""Checkpoints in RLlib's tree: Corral's own, with the config of RLlib and a directory for each module.

`learner_group/learner/rl_module/<module id>` can be loaded alone. Loading runs no code from a checkpoint: classes and
functions are stored as import paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from corral.checkpoint.algorithm import describe_algorithm
from corral.checkpoint.directory import write_checkpoint
from corral.compat.rllib.encoding import decode, encode
from corral.compat.rllib.modules import MODULE_FILE, WEIGHTS_FILE
from corral.core.settings import path_of
from corral.core.space_descriptions import describe_space
from corral.errors import CheckpointError

if TYPE_CHECKING:
    from corral.compat.rllib.algorithm import Algorithm
    from corral.compat.rllib.config import AlgorithmConfig

MODULES = Path("learner_group/learner/rl_module")
_CONFIG = "rllib_config.json"

_known: dict[str, AlgorithmConfig] = {}  # configs that this process saved; they may hold what no file can name


def save(algorithm: Algorithm, path: Path) -> Path:
    """Write a checkpoint, and return its absolute path.

    Raises:
        CheckpointError: The path holds something else, or a state cannot be saved.
        OSError: The files cannot be written.
    """
    native = algorithm.native
    saved = Path(str(write_checkpoint(path, **describe_algorithm(native))))
    config = {"algorithm": algorithm.ALGORITHM, "settings": encode(dict(algorithm.config.to_dict()))}
    (saved / _CONFIG).write_text(json.dumps(config, indent=1))
    weights = native.learner_group.get_weights()
    for module_id, spec in native.env_runner_group.module_specs.items():
        directory = saved / MODULES / module_id
        directory.mkdir(parents=True, exist_ok=True)
        description = {
            "module_class": path_of(spec.module_class),
            "model_config": encode(dict(spec.model_config)),
            "observation_space": describe_space(spec.module_space),
            "action_space": describe_space(spec.action_space),
        }
        (directory / MODULE_FILE).write_text(json.dumps(description, indent=1))
        arrays = {name: np.ascontiguousarray(value) for name, value in weights.get(module_id, {}).items()}
        save_file(arrays, directory / WEIGHTS_FILE)
    _known[str(saved)] = algorithm.config
    return saved


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


def weights_file(path: Path) -> Path:
    """Return the file of weights in the directory of a module."""
    return path / WEIGHTS_FILE
