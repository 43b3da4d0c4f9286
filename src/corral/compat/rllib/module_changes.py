"""Adds and removes modules of a running algorithm, and sets their weights, by RLlib's names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.algorithms.pretrained import check_weights
from corral.compat.rllib.adapted_modules import view_module
from corral.compat.rllib.modules import MultiRLModuleSpec, RLModuleSpec, TorchRLModule
from corral.compat.rllib.native import algorithm_name, settings_of_policy, to_settings, to_train
from corral.compat.rllib.policies import PolicySpec
from corral.compat.rllib.runners import EnvRunner
from corral.errors import CheckpointError, ConfigError


def add_module(algorithm: Any, module_id: str, spec: RLModuleSpec | None, overrides: Any, **changes: Any) -> None:
    """Add a module to the learners and runners of an algorithm; its config names it from then on.

    Args:
        algorithm: The view of the algorithm.
        module_id: Id that no other module has.
        spec: What describes the module; `None` is the default module.
        overrides: Settings in which it differs from the algorithm, by name; `None` are none.
        **changes: `policy_mapping_fn` and `policies_to_train`; `None` keeps the present one.

    Raises:
        ConfigError: The algorithm has one agent, the id is taken, or a setting is wrong. Nothing was changed.
    """
    changed = _with_specs(algorithm.config)
    changed.policies[module_id] = PolicySpec()
    changed.rl_module_spec.rl_module_specs[module_id] = spec or RLModuleSpec()
    if overrides:
        by_module = {**changed.algorithm_config_overrides_per_module, module_id: dict(overrides)}
        changed.algorithm_config_overrides_per_module = by_module
    given = _given(changes)
    name = algorithm_name(changed)
    policy, differs = settings_of_policy(changed, module_id, name, to_settings(changed, name))
    first_weights = policy.pop("load_from", None)
    policy.pop("load_parts", None)
    algorithm.native.add_module(module_id, **policy, overrides=differs, **_to_native(given))
    _use(algorithm, changed, given)
    if first_weights is not None:
        algorithm.native.load_module_weights(first_weights, module_id)


def remove_module(algorithm: Any, module_id: str, **changes: Any) -> None:
    """Remove a module from the learners and runners of an algorithm, and from its config; see `add_module`.

    Raises:
        ConfigError: There is no such module, or agents are mapped to it. Nothing was changed.
    """
    changed, given = _with_specs(algorithm.config), _given(changes)
    algorithm.native.remove_module(module_id, **_to_native(given))
    for part in (changed.policies, changed.rl_module_spec.rl_module_specs):
        part.pop(module_id, None)
    _use(algorithm, changed, given)


def _given(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _to_native(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_train(value) if name == "policies_to_train" else value for name, value in given.items()}


def _with_specs(config: Any) -> Any:
    """Return a copy of a config that has a dict of policies, and a spec for each module."""
    changed, spec = config.copy(copy_frozen=False), config.rl_module_spec
    if isinstance(spec, MultiRLModuleSpec) and spec.is_joint:
        raise ConfigError(
            f"{spec.multi_rl_module_class.__name__}: its modules are parts of one class, so they stay the same."
        )
    policies = config.policies
    changed.policies = dict(policies) if isinstance(policies, Mapping) else {name: PolicySpec() for name in policies}
    whole = spec if isinstance(spec, MultiRLModuleSpec) else MultiRLModuleSpec()
    each = spec if isinstance(spec, RLModuleSpec) else RLModuleSpec(model_config=config.model_config)
    parts = whole.rl_module_specs if isinstance(whole.rl_module_specs, Mapping) else {}
    if isinstance(whole.rl_module_specs, RLModuleSpec):
        each = whole.rl_module_specs
    specs = {name: parts.get(name, each) for name in changed.policies}
    changed.rl_module_spec = dataclasses.replace(whole, rl_module_specs=specs, module_specs=None)
    return changed


def _use(algorithm: Any, changed: Any, given: Mapping[str, Any]) -> None:
    """Show the changed config as the one of the algorithm, its runners and its learner."""
    for name, value in given.items():
        setattr(changed, name, value)
    native = algorithm.native
    algorithm.config = changed.freeze()
    native.config.with_origin(changed)
    for group in (algorithm.env_runner_group, algorithm.eval_env_runner_group):
        if group is not None:
            group.foreach_env_runner(functools.partial(_use_config, config=changed))
    if (learner := algorithm.learner_group._learner) is not None:
        learner.config = changed


def _use_config(runner: EnvRunner, config: Any) -> None:
    runner.use_config(config)


def module_states(native: Any, module_ids: Any = None) -> dict[str, dict[str, Any]]:
    """Return the weights of modules by id and by the names that RLlib's modules give them."""
    return {name: view_module(native.get_module(name)).get_state() for name in module_ids or native.module_ids}


def set_module_states(native: Any, states: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Set the weights of modules in all learners and runners.

    Args:
        native: Corral's algorithm.
        states: Weights by module id and by the names that RLlib's modules give them.
        where: What was called, for the message.

    Raises:
        CheckpointError: There is no such module, or the weights do not fit; nothing was changed.
    """
    weights = {}
    for module_id, state in states.items():
        if module_id not in native.module_ids:
            raise CheckpointError(f"{where}: there is no module {module_id!r}, but {native.module_ids}.")
        module = native.get_module(module_id)
        view, state = view_module(module), {name: np.asarray(value) for name, value in state.items()}
        if type(view).get_state is TorchRLModule.get_state:
            check_weights(module_id, view.get_state(), state, where)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        try:
            view.set_state(state)
            weights[module_id] = {name: value.cpu().numpy().copy() for name, value in module.state_dict().items()}
        finally:
            module.load_state_dict(before)
    native.learner_group.set_weights(weights)
    native.sync_weights()
