"""Adding, removing and loading modules while an algorithm trains: what leagues and self-play need."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from corral.algorithms.algorithm_state import NOT_RESTORED
from corral.algorithms.pretrained import Weights, check_weights, fitting_statistics, read_weights
from corral.errors import CheckpointError, ConfigError
from corral.modules.heuristic import HeuristicModule
from corral.runs.checkpoint import Checkpoint
from corral.runs.checkpoint.imports import check_imports
from corral.runs.loggers.run import plain

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.config import AlgorithmConfig
    from corral.modules.layers import SharedLayers
    from corral.modules.module import Module
    from corral.modules.spec import ModuleSpec

log = logging.getLogger("corral")


def add_module(
    algorithm: Algorithm,
    module_id: str,
    settings: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any],
    copy_from: str | None,
    changes: Mapping[str, Any],
) -> Module:
    """Add a module, and return it; see `Algorithm.add_module`. `changes` are other settings of `multi_agent`."""
    config, weights = algorithm.config, None
    _check_multi_agent(algorithm)
    if module_id in algorithm.module_ids:
        raise ConfigError(f"add_module: there is a module {module_id!r} already: {algorithm.module_ids}.")
    by_module = dict(config.algorithm_config_overrides_per_module)
    if copy_from is not None:
        copy_from = algorithm.modules.resolve_id(copy_from)
        spec = algorithm.env_runner_group.module_specs[copy_from]
        spaces = {"observation_space": spec.observation_space, "action_space": spec.action_space}
        settings = {**spaces, **config.policies[copy_from], **settings}
        overrides = {**by_module.get(copy_from, {}), **overrides}
        weights = {name: array.copy() for name, array in algorithm.learner_group.get_weights()[copy_from].items()}
    changed = config.copy(
        policies={**config.policies, module_id: dict(settings)},
        algorithm_config_overrides_per_module={**by_module, **({module_id: dict(overrides)} if overrides else {})},
        **changes,
    )
    changed.validate()
    _check_sharing(config, changed, module_id, copy_from)
    return _use_modules(algorithm, changed, {} if weights is None else {module_id: (weights, copy_from)})[module_id]


def remove_module(algorithm: Algorithm, module_id: str, changes: Mapping[str, Any]) -> None:
    """Remove a module from an algorithm; see `Algorithm.remove_module`."""
    config = algorithm.config
    _check_multi_agent(algorithm)
    module_id = algorithm.modules.resolve_id(module_id)
    if len(algorithm.module_ids) == 1:
        raise ConfigError(f"remove_module: {module_id!r} is the only module, and the agents need one.")
    chosen, overrides = config.policies_to_train, config.algorithm_config_overrides_per_module
    if isinstance(chosen, (list, tuple)) and "policies_to_train" not in changes:
        changes = {**changes, "policies_to_train": [name for name in chosen if name != module_id]}
    changed = config.copy(
        policies={name: part for name, part in config.policies.items() if name != module_id},
        algorithm_config_overrides_per_module={name: part for name, part in overrides.items() if name != module_id},
        shared_layers=_shared_among(config.shared_layers, set(config.policies) - {module_id}),
        **changes,
    )
    _use_modules(algorithm, changed)


def use_modules_of(algorithm: Algorithm, checkpoint: Checkpoint) -> None:
    """Let an algorithm have the modules of a checkpoint, such as a league's, of which it then takes the state.

    Modules that the algorithm has keep its settings. Other modules have the settings of the checkpoint, whose
    `policy_mapping_fn` and `policies_to_train` apply then, if a file can hold them.

    Raises:
        CheckpointError: A module cannot be made from what the checkpoint says.
    """
    saved = checkpoint.config.get("multi_agent") or {}
    held = saved.get("policies") or {}
    if not algorithm.config.is_multi_agent or not held or held.keys() == set(algorithm.module_ids):
        return
    try:
        changed = _config_with_modules(algorithm.config, checkpoint, saved)
        changed.validate()
        _specs_with(algorithm, changed)
    except ConfigError as error:
        raise CheckpointError(
            f"{checkpoint.path} has modules {sorted(held)}, here are {sorted(algorithm.module_ids)}, and the missing "
            f"ones cannot be made: {error} Build the algorithm with the modules of the checkpoint, "
            ".multi_agent(policies={...}), before it is restored."
        ) from error
    algorithm.report.restored = dict(NOT_RESTORED)
    _use_modules(algorithm, changed)


def _config_with_modules(config: AlgorithmConfig, checkpoint: Checkpoint, saved: Mapping[str, Any]) -> AlgorithmConfig:
    """Return a config with the modules of a checkpoint, whose settings of `multi_agent` are given."""
    unnamed = checkpoint.metadata.get("unnamed") or {}
    places = [place for place in unnamed if place.startswith("multi_agent.policies.")]
    if lost := [place for place in places if place.split(".")[2] not in config.policies]:
        raise ConfigError(f"no file can hold {', '.join(f'{place} ({unnamed[place]})' for place in lost)}.")
    changes: dict[str, Any] = {}
    for name in ("policies", "algorithm_config_overrides_per_module"):
        own = getattr(config, name)
        parts = {module_id: own.get(module_id, part) for module_id, part in saved.get(name, {}).items()}
        changes[name] = {module_id: part for module_id, part in parts.items() if module_id in saved["policies"]}
    changes["shared_layers"] = saved.get("shared_layers") or {}
    staying = config.policies.keys() & changes["policies"].keys()
    here, there = (_shared_among(shared, staying) for shared in (config.shared_layers, changes["shared_layers"]))
    if here != there:
        raise ConfigError(f"shared_layers of built modules cannot change from {here} to {there} of the checkpoint.")
    present = plain(config.to_dict())["multi_agent"]
    for name in ("policy_mapping_fn", "policies_to_train"):
        if saved.get(name) == present[name]:
            continue
        if any(place.startswith(f"multi_agent.{name}") for place in unnamed):
            log.warning(
                "%s: no file can hold %s of this run, so the algorithm uses the one of its own config. A callback can "
                "set another one, for example with add_module in on_checkpoint_loaded.",
                checkpoint.path,
                name,
            )
        else:
            changes[name] = saved.get(name)
    check_imports({"multi_agent": changes}, checkpoint.path)
    return config.copy(**changes)


def _use_modules(
    algorithm: Algorithm,
    changed: AlgorithmConfig,
    weights: Mapping[str, tuple[Weights, str | None]] = MappingProxyType({}),
) -> dict[str, Module]:
    """Make the modules of a config that are missing everywhere, and remove the others; if it fails, nothing changes.

    Args:
        algorithm: The algorithm.
        changed: Its config, with other modules.
        weights: First weights of new modules, and which module they are from; statistics of transforms go with them.

    Returns:
        The new modules by id.
    """
    changed.validate()
    config, present, specs = algorithm.config, algorithm.env_runner_group.module_specs, _specs_with(algorithm, changed)
    algorithm._use_modules(changed, present)
    try:
        made: dict[str, Module] = {}
        statistics: dict[str, Mapping[str, Any]] = {}
        there = {module_id: algorithm.learner_group.get_module(module_id) for module_id in present}
        for module_id in [name for name in specs if name not in present]:
            made[module_id] = algorithm.modules.make(module_id, specs[module_id], there | made)
        learning = {
            module_id: None if isinstance(module, HeuristicModule) else algorithm.learning_spec(module_id)
            for module_id, module in made.items()
        }
        for module_id, (arrays, source) in weights.items():
            own = {name: value.numpy() for name, value in made[module_id].state_dict().items()}
            check_weights(module_id, own, arrays, f"module {source!r}")
            found = algorithm.modules.get_transform_states().get(str(source), {})
            statistics[module_id] = fitting_statistics(algorithm.get_pipeline(module_id), found)
    except BaseException:
        algorithm._use_modules(config, present)
        raise
    for module_id in made:  # an earlier module of this id played other episodes
        if (returns := algorithm.metrics.find(f"env_runners/module_episode_return_mean/{module_id}")) is not None:
            returns.forget()
    algorithm._use_modules(changed, specs)
    for module_id in present.keys() - specs.keys():
        algorithm.learner_group.remove_module(module_id)
    for module_id, module in made.items():
        algorithm.learner_group.add_module(
            module_id, specs[module_id], module, learning[module_id], changed.shared_layers
        )
    algorithm.learner_group.set_weights({module_id: arrays for module_id, (arrays, _) in weights.items()})
    algorithm.modules.set_transform_states(statistics)
    try:
        algorithm.setup_modules()
    except BaseException:
        if present.keys() <= specs.keys() != present.keys():  # such as without recorded data for a new module
            _use_modules(algorithm, config)
        raise
    algorithm.report.reserve_metrics()
    algorithm.sync_weights()
    return made


def load_module_weights(algorithm: Algorithm, path: str | Path, module_id: str, from_module_id: str | None) -> None:
    """Load the weights of one module; see `Algorithm.load_module_weights`."""
    module_id = algorithm.modules.resolve_id(module_id)
    where, weights, found = read_weights(path, module_id, from_module_id)
    check_weights(module_id, algorithm.learner_group.get_weights()[module_id], weights, where)
    statistics = fitting_statistics(algorithm.get_pipeline(module_id), found)
    for layers, groups in algorithm.config.shared_layers.items():
        for group in groups:
            if module_id in group:
                log.warning(
                    "load_module_weights: module %r shares %r with %s, so these modules have the weights of %s, too.",
                    *(module_id, layers, [name for name in group if name != module_id], where),
                )
    algorithm.learner_group.set_weights({module_id: weights})
    algorithm.modules.set_transform_states({module_id: statistics})
    algorithm.sync_weights()


def _shared_among(shared_layers: SharedLayers, module_ids: Collection[str]) -> dict[str, list[list[str]]]:
    """Return the part of the setting `shared_layers` that is about some modules; a module alone shares nothing."""
    found = {}
    for path, groups in shared_layers.items():
        left = [[name for name in group if name in module_ids] for group in groups]
        if left := [group for group in left if len(set(group)) > 1]:
            found[path] = left
    return found


def _check_sharing(config: AlgorithmConfig, changed: AlgorithmConfig, module_id: str, copy_from: str | None) -> None:
    """Refuse to share other layers of modules that were built already, and copies of other layers than the shared."""
    if _shared_among(changed.shared_layers, config.policies) != config.shared_layers:
        raise ConfigError(
            f"add_module: shared_layers={changed.shared_layers} differs from {config.shared_layers} in more than the "
            f"new module {module_id!r}, and the other modules are built already: add only {module_id!r} to it."
        )
    for path, groups in changed.shared_layers.items():
        for group in groups:
            if copy_from is not None and module_id in group and copy_from not in group:
                raise ConfigError(
                    f"add_module: the layers {path!r} of copy_from={copy_from!r} differ from the layers that "
                    f"{module_id!r} would share with {[name for name in group if name != module_id]}: leave out "
                    "copy_from or shared_layers."
                )


def _check_multi_agent(algorithm: Algorithm) -> None:
    if not algorithm.config.is_multi_agent:
        raise ConfigError(
            "modules can be added and removed only with several agents: name the modules with "
            ".multi_agent(policies={...}) before building."
        )


def _specs_with(algorithm: Algorithm, changed: AlgorithmConfig) -> dict[str, ModuleSpec]:
    """Return the specs of the modules of a config, whose mappings and spaces fit; see `EnvRunnerGroup.specs_with`."""
    if "policy_mapping_fn" in changed.evaluation_config:
        try:
            algorithm.env_runner_group.specs_with(changed.for_evaluation())
        except ConfigError as error:
            raise ConfigError(f"evaluation_config: {error}") from error
    return algorithm.env_runner_group.specs_with(changed)
