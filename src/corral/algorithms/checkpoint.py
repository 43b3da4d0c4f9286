"""Checkpoints of algorithms: saving one, and building an algorithm from one."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import corral
from corral.algorithms.checkpoint_settings import call_with, config_of, of_script, unnamed
from corral.core.places import Location
from corral.core.settings import import_path, names_script, path_of
from corral.envs.vector import resolve_env
from corral.errors import CheckpointError, ConfigError
from corral.exploration.base import acts_by_module
from corral.learners.optimizer_settings import optimizer_class
from corral.modules.spec import weights_limited
from corral.runs.checkpoint.directory import Checkpoint, read_checkpoint, write_checkpoint
from corral.runs.checkpoint.finding import checkpoint_or_last_of_run
from corral.runs.checkpoint.imports import check_import
from corral.runs.checkpoint.large_arrays import join_arrays, split_arrays
from corral.runs.loggers.run import plain, run_name
from corral.runs.policies.description import policy_description

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.config import AlgorithmConfig

log = logging.getLogger("corral")

_warned: weakref.WeakSet[Algorithm] = weakref.WeakSet()

AlgorithmT = TypeVar("AlgorithmT", bound="Algorithm")


def save_algorithm(algorithm: Algorithm, path: Location | None) -> Location:
    """Write a checkpoint of an algorithm, and return where it is; see `Algorithm.save`."""
    if path is None:
        path = Path("checkpoints") / f"{run_name(algorithm.config)}-{algorithm.training_iteration}"
    described = describe_algorithm(algorithm)
    saved = write_checkpoint(path, **described)
    _say_what_is_missing(algorithm, described["metadata"]["unnamed"], of_script(described["config"]))
    return saved


def describe_algorithm(algorithm: Algorithm, *, with_buffer: bool = True) -> dict[str, Any]:
    """Return the arguments with which `write_checkpoint` saves the present state of an algorithm, also later.

    Args:
        algorithm: The algorithm.
        with_buffer: Whether the replay buffer is saved, if the algorithm has one and its settings say so.
    """
    config = algorithm.config
    with algorithm.large_arrays("shared" if with_buffer else "left_out"):
        state, arrays = split_arrays(algorithm.get_state())
    learners = dict(state["learners"])
    weights = learners.pop("weights")
    settings = plain(config.to_dict())
    return {
        "state": {**state, "learners": learners},
        "weights": weights,
        "config": settings,
        "policies": describe_policies(algorithm),
        "arrays": arrays,
        "metadata": {
            "corral_version": corral.__version__,
            "algo": settings["algo"],
            "algorithm_class": path_of(type(algorithm)),
            "training_iteration": algorithm.training_iteration,
            "num_env_steps_sampled_lifetime": algorithm.num_env_steps_sampled_lifetime,
            "unnamed": unnamed(config),
        },
    }


def describe_policies(algorithm: Algorithm) -> dict[str, dict[str, Any]]:
    """Return the descriptions of an algorithm's policies by module id."""
    explorations = algorithm.explorations
    return {
        module_id: policy_description(
            spec,
            pipeline=algorithm.get_pipeline(module_id),
            acts_by_module=module_id not in explorations or acts_by_module(explorations[module_id]),
        )
        for module_id, spec in algorithm.env_runner_group.module_specs.items()
    }


def _say_what_is_missing(algorithm: Algorithm, missing: dict[str, str], scripted: dict[str, str]) -> None:
    """Warn, once for an algorithm, of settings that `from_checkpoint` will not find in its checkpoints."""
    if (missing or scripted) and algorithm not in _warned:
        _warned.add(algorithm)
        values = [f"{place} ({text})" for place, text in {**missing, **scripted}.items()]
        where = "" if missing else " from another folder"
        log.warning(
            "Checkpoints of this run cannot name %s by import path: load them%s with %s.",
            ", ".join(values),
            where,
            call_with([*missing, *scripted]),
        )


def load_algorithm(path: Location, cls: type[AlgorithmT], settings: Mapping[str, Any]) -> AlgorithmT:
    """Return an algorithm built from a checkpoint's config and restored from its state.

    Args:
        path: The directory or the URL of the checkpoint, or of a run, of which it is the last one.
        cls: The class that `from_checkpoint` was called on. The algorithm is an instance of it.
        settings: Settings by name that replace the settings of the checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be read, `cls` is another algorithm, or the config names something that
            is not taken from a checkpoint.
        ConfigError: The config holds values that no file can name and that are not given, names a class that cannot be
            imported, or a setting is unknown or contradicts restoring.
    """
    checkpoint = read_checkpoint(checkpoint_or_last_of_run(path))
    if settings.get("load_from") is not None:
        raise ConfigError("from_checkpoint: load_from has no effect, since all weights come from the checkpoint.")
    config = _without_loading(config_of(checkpoint, settings))
    saved = {
        name: value
        for group in checkpoint.config.values()
        if isinstance(group, Mapping)
        for name, value in group.items()
    }
    first = set(config.algo_class.FIRST_SETTINGS)
    if (
        config.lr_scheduler is not None and saved.get("lr_scheduler") is not None
    ):  # it continues at the rate it has reached
        first.update(name for name in settings if name == "lr" or name.endswith("_lr"))
    for name in settings.keys() & first:
        if settings[name] != saved.get(name):
            warn_of_first_setting(name, settings[name])
    # The processes of runners and learners cannot import from this script, but they can be sent what is in it.
    if names_script(config.env):
        config.env = resolve_env(config.env)
    if names_script(config.optimizer):
        config.optimizer = optimizer_class(config.optimizer)
    algorithm_class = _class_to_build(checkpoint, config, cls)
    try:
        with weights_limited(checkpoint.weights):
            algorithm = algorithm_class(config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    try:
        algorithm._restore(checkpoint)
    except BaseException:
        algorithm.stop()
        raise
    return algorithm


def warn_of_first_setting(name: str, value: Any) -> None:
    """Warn of a setting that says how a run begins, and that was given for a run that continues."""
    log.warning(
        "%s=%s has no effect: it only sets how a run begins, and this run continues from a checkpoint.", name, value
    )


def _without_loading(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return a config whose modules load no other weights first: the checkpoint has theirs."""

    def left(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name not in ("load_from", "load_parts")}

    overrides = config.algorithm_config_overrides_per_module
    return config.copy(
        load_from=None,
        load_parts=["*"],
        policies={module_id: left(settings) for module_id, settings in config.policies.items()},
        algorithm_config_overrides_per_module={module_id: left(settings) for module_id, settings in overrides.items()},
    )


def _class_to_build(checkpoint: Checkpoint, config: AlgorithmConfig, cls: type[AlgorithmT]) -> type[AlgorithmT]:
    """Return `cls`, or the class that was saved if that is a subclass of `cls`."""
    # The saved class is imported only if nothing else leads to it: a class inside a function has no import path.
    known = {path_of(found): found for found in (config.algo_class, cls)}
    path = str(checkpoint.metadata.get("algorithm_class", path_of(config.algo_class)))
    try:
        if path not in known:
            check_import(path, "algo", checkpoint.path)
        saved = known[path] if path in known else import_path(path)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: the algorithm {error}.") from error
    if inspect.isclass(saved) and issubclass(cls, saved):
        return cls
    if inspect.isclass(saved) and issubclass(saved, cls):
        return saved
    raise CheckpointError(
        f"{checkpoint.path} is a checkpoint of {path}, and {cls.__name__} is neither this class nor related to it: "
        "call from_checkpoint on that class, or Algorithm.from_checkpoint."
    )


def algorithm_state(checkpoint: Checkpoint, cls: type[Algorithm]) -> dict[str, Any]:
    """Return the state for `Algorithm.set_state`.

    Args:
        checkpoint: The checkpoint of an algorithm.
        cls: The class of the algorithm that continues from it: the class that was saved, or a subclass.

    Raises:
        CheckpointError: The checkpoint is of another algorithm.
    """
    metadata = checkpoint.metadata
    # By the last name: a class that moved to another module is still the same algorithm.
    saved = str(metadata.get("algorithm_class", metadata.get("algo"))).rpartition(":")[2].rpartition(".")[2]
    if saved not in {base.__name__ for base in cls.__mro__}:
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of {saved}, and this is {cls.__name__}.")
    state = join_arrays(checkpoint.state, checkpoint.arrays)
    return {**state, "learners": {**state["learners"], "weights": checkpoint.weights}}
