"""What a policy is built from, in types that JSON holds: its spaces, the class of its module, and the settings.

Checkpoints hold this description next to the weights, so that a policy is loaded without the env and the algorithm.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.core.settings import found_by_name, import_path, path_of
from corral.core.space_descriptions import describe_space, described_space
from corral.errors import CheckpointError, ConfigError
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.settings import BUILT_IN, describe_transform, make_transforms, settings_of
from corral.modules.transforms.transform import NO_STATE, State

# Module classes of the library, by their names in descriptions; other classes are named by their import paths.
MODULE_CLASSES = {
    "ActorCritic": "corral.modules.module",
    "QModule": "corral.modules.q_module",
    "RecurrentActorCritic": "corral.modules.recurrent",
    "RecurrentQModule": "corral.modules.recurrent_q_module",
    "RecurrentSACModule": "corral.modules.recurrent_sac_module",
    "RandomModule": "corral.modules.heuristic",
    "SACModule": "corral.modules.sac_module",
}


def policy_description(
    spec: ModuleSpec, *, pipeline: Pipeline | None = None, acts_by_module: bool = True
) -> dict[str, Any]:
    """Return the description of a policy, in types that JSON holds.

    Args:
        spec: Spec of its module.
        pipeline: Transforms of its observations, with their statistics.
        acts_by_module: Whether actions without exploration are the most likely actions of the module.

    Raises:
        CheckpointError: A space is of a type that Corral does not support.
    """
    from corral.runs.checkpoint.imports import (
        IMPORTED_IN_MODEL_CONFIG,  # here: what writes checkpoints imports this module
    )

    cls = spec.module_class
    paths = {
        name: path_of(value)
        for name in IMPORTED_IN_MODEL_CONFIG
        if inspect.isclass(value := spec.model_config.get(name)) and found_by_name(value)
    }
    settings = {**spec.model_config, **paths}
    unnamed = [name for name, value in settings.items() if not _is_plain(value)]
    own = MODULE_CLASSES.get(cls.__name__) == cls.__module__
    try:
        spaces = {name: describe_space(getattr(spec, name)) for name in ("observation_space", "action_space")}
    except ValueError as error:
        raise CheckpointError(f"the policy cannot be saved: {error}") from error
    transforms = {} if pipeline is None else {"transforms": describe_pipeline(pipeline)}
    if spec.critic_space is not None:
        spaces["critic_space"] = describe_space(spec.critic_space)
    return {
        **spaces,
        "module_class": cls.__name__ if own else path_of(cls),
        "model_config": {name: value for name, value in settings.items() if name not in unnamed},
        "unnamed": unnamed,
        "acts_by_module": acts_by_module,
        **transforms,
    }


def described_spec(
    description: Mapping[str, Any],
    *,
    module_class: type[Module] | None = None,
    model_config: Mapping[str, Any] | None = None,
    transforms: Sequence[Any] | None = None,
) -> ModuleSpec:
    """Return the spec of a description: the inverse of `policy_description`.

    Args:
        description: The description.
        module_class: Class of the module; `None` imports the class that the description names.
        model_config: Settings of the class that replace settings of the description.
        transforms: Transforms that replace the transforms of the description, and have their statistics.

    Raises:
        CheckpointError: The description is damaged, its class cannot be imported, a setting is missing, or the actions
            are not chosen by the module.
    """
    try:
        named, unnamed = dict(description["model_config"]), list(map(str, description["unnamed"]))
        name, acts_by_module = str(description["module_class"]), description["acts_by_module"] is True
        observation_space = described_space(description["observation_space"])
        action_space = described_space(description["action_space"])
        critic = description.get("critic_space")
        critic_space = None if critic is None else described_space(critic)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the description of the policy is damaged: {type(error).__name__}: {error}.") from error
    if not acts_by_module:
        raise CheckpointError(
            "the actions of this algorithm are not chosen by its module, but by its exploration, which a policy does "
            "not hold: load the algorithm with Algorithm.from_checkpoint, and call its compute_actions."
        )
    from corral.runs.checkpoint.imports import check_imports  # here: what writes checkpoints imports this module

    check_imports({"rl_module": {"model_config": named}}, "policies.json")
    settings = {**named, **(model_config or {})}
    if missing := [name for name in unnamed if name not in settings]:
        given = ", ".join(f"{name!r}: ..." for name in missing)
        raise CheckpointError(
            f"the module has settings that no file can hold ({', '.join(missing)}): give model_config={{{given}}}."
        )
    pipeline = described_pipeline(description, observation_space, action_space, transforms)
    cls = module_class or _class_named(name)
    return ModuleSpec(cls, observation_space, action_space, settings, pipeline=pipeline, critic_space=critic_space)


def _class_named(name: str) -> type[Module]:
    """Return a class of the library, or import a user's class by the rules of checkpoints."""
    from corral.runs.checkpoint.imports import check_import  # here: what writes checkpoints imports this module

    try:
        if name in MODULE_CLASSES:
            found = getattr(importlib.import_module(MODULE_CLASSES[name]), name)
        else:
            check_import(name, "module_class", "policies.json")
            found = import_path(name)
    except ConfigError as error:
        text = str(error).removesuffix(".")
        raise CheckpointError(f"the module class {text}. Or give the class: module_class=MyModule.") from error
    if not (inspect.isclass(found) and issubclass(found, Module)):
        raise CheckpointError(f"{name!r} is not a subclass of corral.Module.")
    cls: type[Module] = found
    return cls


def _is_plain(value: Any) -> bool:
    """Return whether JSON holds a value; a tuple becomes a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


# Pipelines in the description of a policy.


def describe_pipeline(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return a pipeline with its statistics, in types that JSON holds.

    Transforms that only change rewards are left out. A transform whose settings no file can hold is described
    without them, and says so.
    """
    return [
        {
            "name": pipeline.names[index],
            "transform": describe_transform(transform),
            "unnamed": settings_of(transform) is None,
            "state": {
                key: array.tolist() for key, array in pipeline.state.get(pipeline.names[index], NO_STATE).items()
            },
        }
        for index, transform in enumerate(pipeline.transforms)
        if not pipeline.only_changes_rewards(index)
    ]


def described_statistics(description: Mapping[str, Any]) -> dict[str, State]:
    """Return the statistics of the transforms in the description of a policy, by name of the transform."""
    return {
        part["name"]: {key: np.array(value, np.float64) for key, value in part["state"].items()}
        for part in description.get("transforms", ())
        if part["state"]
    }


def described_pipeline(
    description: Mapping[str, Any],
    space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    given: Sequence[Any] | None = None,
) -> Pipeline | None:
    """Return the transforms in the description of a policy, with their statistics.

    Args:
        description: The description.
        space: Space of one observation of the env.
        action_space: Space of one action of the env.
        given: Transforms to use in place of those that the description names.

    Raises:
        CheckpointError: The description is damaged, or a class cannot be imported.
    """
    from corral.runs.checkpoint.imports import check_import  # here: what writes checkpoints imports this module

    try:
        parts = list(description.get("transforms", ()))
        settings = [part["transform"] for part in parts]
        if given is None:
            if unnamed := [str(part["transform"]["type"]) for part in parts if part["unnamed"]]:
                raise CheckpointError(
                    f"no file can hold the settings of the transforms {', '.join(unnamed)}: give transforms=[...]."
                )
            for each in settings:
                if each["type"] not in BUILT_IN:
                    check_import(each["type"], "transforms", "policies.json")
        transforms = make_transforms(settings if given is None else list(given))
        pipeline = Pipeline.build(transforms, space, action_space)
        if pipeline is None:
            return None
        state = described_statistics(description)
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the transforms cannot be made: {type(error).__name__}: {error}") from error
    observed = {name: each for name, each in pipeline.state.items() if name in state or given is None}
    dataclasses.replace(pipeline, state=observed).check_state(state)
    return pipeline.with_state({**pipeline.state, **state})
