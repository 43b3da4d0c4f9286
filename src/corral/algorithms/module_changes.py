"""Adding, removing and loading modules while an algorithm trains: what leagues and self-play need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from corral.checkpoint import find_checkpoint, read_checkpoint
from corral.errors import CheckpointError, ConfigError
from corral.modules.heuristic import HeuristicModule
from corral.policies.description import described_statistics

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.config.config import AlgorithmConfig
    from corral.modules.module import Module
    from corral.modules.spec import ModuleSpec
    from corral.transforms.transform import State


def add_module(
    algorithm: Algorithm,
    module_id: str,
    settings: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any],
    copy_from: str | None,
    changes: Mapping[str, Any],
) -> Module:
    """Add a module to an algorithm; see `Algorithm.add_module`. `changes` are other settings of `multi_agent`."""
    config, weights = algorithm.config, None
    _check_multi_agent(algorithm)
    if module_id in algorithm.module_ids:
        raise ConfigError(f"add_module: there is a module {module_id!r} already: {algorithm.module_ids}.")
    by_module = dict(config.algorithm_config_overrides_per_module)
    if copy_from is not None:
        copy_from = algorithm.find_module_id(copy_from)
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
    specs = _specs_with(algorithm, changed)
    algorithm.use_modules(changed, algorithm.env_runner_group.module_specs)
    try:
        spec = specs[module_id]
        module = algorithm.make_module(module_id, spec)
        learning = None if isinstance(module, HeuristicModule) else algorithm.learning_spec(module_id)
        if weights is not None:
            there = {name: value.numpy() for name, value in module.state_dict().items()}
            _check_weights(module_id, there, weights, f"module {copy_from!r}")
    except BaseException:
        algorithm.use_modules(config, algorithm.env_runner_group.module_specs)
        raise
    algorithm.use_modules(changed, specs)
    algorithm.learner_group.add_module(module_id, spec, module, learning)
    if weights is not None:
        algorithm.learner_group.set_weights({module_id: weights})
        _use_statistics(algorithm, module_id, algorithm.get_transform_states().get(str(copy_from), {}))
    _finish(algorithm)
    return module


def remove_module(algorithm: Algorithm, module_id: str, changes: Mapping[str, Any]) -> None:
    """Remove a module from an algorithm; see `Algorithm.remove_module`."""
    config = algorithm.config
    _check_multi_agent(algorithm)
    module_id = algorithm.find_module_id(module_id)
    if len(algorithm.module_ids) == 1:
        raise ConfigError(f"remove_module: {module_id!r} is the only module, and the agents need one.")
    chosen, overrides = config.policies_to_train, config.algorithm_config_overrides_per_module
    if isinstance(chosen, (list, tuple)) and "policies_to_train" not in changes:
        changes = {**changes, "policies_to_train": [name for name in chosen if name != module_id]}
    changed = config.copy(
        policies={name: part for name, part in config.policies.items() if name != module_id},
        algorithm_config_overrides_per_module={name: part for name, part in overrides.items() if name != module_id},
        **changes,
    )
    changed.validate()
    algorithm.use_modules(changed, _specs_with(algorithm, changed))
    algorithm.learner_group.remove_module(module_id)
    _finish(algorithm)


def load_module_weights(algorithm: Algorithm, path: str | Path, module_id: str, from_module_id: str | None) -> None:
    """Load the weights of one module; see `Algorithm.load_module_weights`."""
    module_id = algorithm.find_module_id(module_id)
    checkpoint = read_checkpoint(find_checkpoint(path, prefer="best"), with_state=False)
    held = checkpoint.weights
    if from_module_id is None:
        from_module_id = module_id if module_id in held or len(held) != 1 else next(iter(held))
    if from_module_id not in held:
        raise CheckpointError(
            f"{checkpoint.path} has no module {from_module_id!r}, only {sorted(held)}: give from_module_id."
        )
    where = f"module {from_module_id!r} of {checkpoint.path}"
    _check_weights(module_id, algorithm.learner_group.get_weights()[module_id], held[from_module_id], where)
    pipeline, found = algorithm.get_pipeline(module_id), described_statistics(checkpoint.policies[from_module_id])
    state = {name: part for name, part in found.items() if pipeline is not None and name in pipeline.state}
    if pipeline is not None and state:
        pipeline.check_state({**pipeline.state, **state})
    algorithm.learner_group.set_weights({module_id: held[from_module_id]})
    _use_statistics(algorithm, module_id, state)
    algorithm.sync_weights()


def _use_statistics(algorithm: Algorithm, module_id: str, state: Mapping[str, State]) -> None:
    """Give the transforms of a module the statistics of others of the same names and shapes."""
    pipeline = algorithm.get_pipeline(module_id)
    if pipeline is not None and pipeline.state:
        fitting = {name: part for name, part in state.items() if name in pipeline.state}
        algorithm.set_transform_states({module_id: {**pipeline.state, **fitting}})


def _check_multi_agent(algorithm: Algorithm) -> None:
    if not algorithm.config.is_multi_agent:
        raise ConfigError(
            "modules can be added and removed where several agents have them: name the modules with "
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


def _finish(algorithm: Algorithm) -> None:
    algorithm.setup_modules()
    algorithm.reserve_metrics()
    algorithm.sync_weights()


def _check_weights(
    module_id: str, here: Mapping[str, NDArray[Any]], there: Mapping[str, NDArray[Any]], where: str
) -> None:
    """Refuse weights of other names or shapes.

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
