"""Weights that a module starts with: loaded from another run or a file, by pattern, and frozen by pattern."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from corral.core.links import load_link
from corral.core.paths import resolve_location
from corral.errors import CheckpointError, ConfigError, nearest_name
from corral.modules.module import Module
from corral.modules.transforms.transform import State
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from corral.runs.policies.description import described_statistics

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.modules.transforms.pipeline import Pipeline

log = logging.getLogger("corral")

Weights = Mapping[str, NDArray[Any]]


def prepare_module(module: Module, module_id: str, config: AlgorithmConfig) -> Mapping[str, State]:
    """Load and freeze weights by the settings of a module, and return the statistics of the loaded transforms.

    Returns:
        The statistics of the transforms that saw the observations of the loaded weights, by name of the transform.

    Raises:
        CheckpointError: The weights cannot be read, or do not fit; the first one that differs is named.
        ConfigError: A pattern matches nothing.
    """
    statistics: Mapping[str, State] = {}
    if config.load_from is not None:
        source, weights, statistics = read_weights(config.load_from, module_id)
        here = {name: value.numpy() for name, value in module.state_dict().items()}
        chosen = {name: here[name] for name in _matching("load_parts", config.load_parts, here, module_id)}
        there = {name: array for name, array in weights.items() if _matches(name, config.load_parts)}
        check_weights(module_id, chosen, there, source)
        with torch.no_grad():
            for name, value in module.state_dict().items():
                if name in chosen:
                    value.copy_(torch.from_numpy(there[name].copy()))
            update_target: Any = getattr(module, "update_target", None)
            if update_target is not None and len(chosen) < len(here):
                update_target(1.0)  # targets of loaded parts start as copies, as in a new module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in _matching("freeze_parts", config.freeze_parts, parameters, module_id):
        parameters[name].requires_grad_(False)
    if config.freeze_parts and not any(parameter.requires_grad for parameter in parameters.values()):
        log.warning(
            "rl_module: freeze_parts=%s freezes every weight of module %r, which learns nothing.",
            list(config.freeze_parts),
            module_id,
        )
    return statistics


def fitting_statistics(pipeline: Pipeline | None, found: Mapping[str, State]) -> Mapping[str, State]:
    """Return the statistics of a pipeline, replaced by those that were found for transforms of the same names.

    Statistics of a transform that is not here mean that the weights expect other observations: a warning says so.

    Raises:
        CheckpointError: They are of observations of another shape.
    """
    own = {} if pipeline is None else pipeline.state
    if missing := sorted(found.keys() - own.keys()):
        log.warning(
            "the loaded weights were trained with the transforms %s, which this algorithm does not have: add them to "
            ".env_runners(transforms=[...]).",
            " and ".join(missing),
        )
    if pipeline is None:
        return {}
    merged = {name: found.get(name, state) for name, state in own.items()}
    pipeline.check_state(merged)
    return merged


def read_weights(
    location: str | Path, module_id: str, from_module_id: str | None = None
) -> tuple[str, Weights, Mapping[str, State]]:
    """Return what to call the weights in messages, the weights by name, and the statistics of the transforms.

    A file of weights alone has no statistics.

    Args:
        location: A checkpoint, a run, of which the best checkpoint is taken, or a file of one module's weights:
            `.safetensors`, `.pt` or `.pth` as `torch.save(module.state_dict(), file)` writes it, or `.zip` as
            Stable-Baselines3 writes it.
        module_id: Id of the module that gets the weights.
        from_module_id: Id of the module in the checkpoint; `None` is the same id, or the only one.

    Raises:
        CheckpointError: There is no such checkpoint, module or file, or the file holds something else.
    """
    path = resolve_location(location)
    if isinstance(path, Path) and path.suffix == ".zip":
        return str(path), load_link("sb3.files").read_sb3(path).weights, {}
    if isinstance(path, Path) and path.suffix in (".safetensors", ".pt", ".pth"):
        try:
            return str(path), load_file(path) if path.suffix == ".safetensors" else _load_state_dict(path), {}
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read as weights: {type(error).__name__}: {error}") from error
    checkpoint = read_checkpoint(find_checkpoint(location, prefer="best"), with_state=False)
    held = checkpoint.weights
    if from_module_id is None:
        from_module_id = module_id if module_id in held or len(held) != 1 else next(iter(held))
    if from_module_id not in held:
        raise CheckpointError(
            f"{checkpoint.path} has no module {from_module_id!r}, only {sorted(held)}: give from_module_id to "
            "load_module_weights; for load_from, save the weights of one module to a .safetensors file."
        )
    statistics = described_statistics(checkpoint.policies.get(from_module_id, {}))
    return f"module {from_module_id!r} of {checkpoint.path}", held[from_module_id], statistics


def _load_state_dict(path: Path) -> Weights:
    """Return the tensors of a file of torch; nothing else in it is loaded, and no code is run."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def check_weights(module_id: str, here: Weights, there: Weights, where: str) -> None:
    """Refuse weights of other names or shapes.

    Args:
        module_id: Id of the module that gets the weights.
        here: Weights of the module by name.
        there: Weights that it gets.
        where: Where these come from, for the message.

    Raises:
        CheckpointError: They do not fit; the first one that differs is named.
    """
    for name in (*here, *there):
        forms = [f"{part[name].dtype}{list(part[name].shape)}" if name in part else "missing" for part in (here, there)]
        if forms[0] != forms[1]:
            raise CheckpointError(
                f"the weights of {where} do not fit module {module_id!r}: {name} is {forms[1]} there and {forms[0]} "
                "here. Build the module with the same module_class, model_config and spaces."
            )


def _matching(setting: str, patterns: Sequence[str], names: Mapping[str, Any], module_id: str) -> list[str]:
    """Return the names that match a pattern.

    Raises:
        ConfigError: A pattern matches none of them.
    """
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            guess = nearest_name(pattern, names) or next(iter(names), "nothing")
            raise ConfigError(
                f"rl_module: {setting}={pattern!r} matches no weight of module {module_id!r}; its weights have names "
                f"such as {guess!r}, and a * stands for any part of a name."
            )
    return [name for name in names if _matches(name, patterns)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
