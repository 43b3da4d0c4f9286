"""RLlib's modules: its base classes and specs, and the modules of Corral that call them."""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.compat.rllib.carried_actions import carried_outputs, own_distribution
from corral.compat.rllib.distributions import distribution_class
from corral.compat.rllib.encoding import decode, import_checked
from corral.compat.rllib.module_files import (
    MODULE_FILE,
    OWN,
    has_own_weights,
    read_weights,
    weights_file,
    write_module,
)
from corral.compat.rllib.module_parts import ActorCriticEncoder, PolicyHead, ValueHead
from corral.core.space_descriptions import described_space
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError
from corral.modules.heuristic import HeuristicModule
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.q_module import QModule
from corral.modules.spec import example_obs

_OBS, _ACTIONS, _INPUTS, _VALUES = "obs", "actions", "action_dist_inputs", "vf_preds"
_EMBEDDINGS, _STATE_IN, _STATE_OUT = "embeddings", "state_in", "state_out"


class RLModule:
    """Base class of RLlib's modules: define `setup`, and `_forward` or the three special forms of it.

    Args:
        observation_space: Space of one observation.
        action_space: Space of one action.
        inference_only: Whether parts that only learning needs may be left out.
        learner_only: Whether the module exists in learners only.
        model_config: Settings of the module.
        catalog_class: Not used.

    Attributes:
        model_config: The settings, a dict.
    """

    framework = "torch"
    action_dist_cls: Any = None
    """Class of the distribution over actions; `None` is the class for the action space."""

    def __init__(
        self,
        observation_space: Any = None,
        action_space: Any = None,
        *,
        inference_only: bool = False,
        learner_only: bool = False,
        model_config: Any = None,
        catalog_class: Any = None,
        **settings: Any,
    ) -> None:
        """Keep the arguments, and call `setup`."""
        if not isinstance(self, nn.Module):
            super().__init__()
        self.observation_space, self.action_space = observation_space, action_space
        self.inference_only, self.learner_only = inference_only, learner_only
        self.model_config = _as_dict(model_config)
        self.catalog = None
        self.setup()

    def setup(self) -> None:
        """Make the layers."""

    # Forward passes, from a dict of columns to a dict of columns.

    def forward_inference(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return outputs for acting without exploration."""
        return self._forward_inference(batch, **settings)

    def forward_exploration(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return outputs for acting with exploration."""
        return self._forward_exploration(batch, **settings)

    def forward_train(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return outputs for learning."""
        return self._forward_train(batch, **settings)

    def _forward(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        raise ConfigError(f"{type(self).__name__} has no method _forward(batch) -> dict.")

    def _forward_inference(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return self._forward(batch, **settings)

    def _forward_exploration(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return self._forward(batch, **settings)

    def _forward_train(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return self._forward(batch, **settings)

    def _default_input_specs(self) -> list[Any]:
        """Return nothing: Corral does not check the columns of batches."""
        return []

    input_specs_inference = input_specs_exploration = input_specs_train = _default_input_specs
    output_specs_inference = output_specs_exploration = output_specs_train = _default_input_specs

    # Distributions.

    def get_train_action_dist_cls(self) -> Any:
        """Return the class of the distribution that losses use."""
        return self.action_dist_cls or distribution_class(self.action_space)

    def get_exploration_action_dist_cls(self) -> Any:
        """Return the class of the distribution that exploration samples from."""
        return self.action_dist_cls or distribution_class(self.action_space)

    def get_inference_action_dist_cls(self) -> Any:
        """Return the class of the distribution that inference acts by."""
        return self.action_dist_cls or distribution_class(self.action_space)

    # Memory.

    def get_initial_state(self) -> Any:
        """Return the state before an episode; empty without memory."""
        return {}

    def is_stateful(self) -> bool:
        """Return whether the module has memory."""
        return bool(self.get_initial_state())

    # State.

    def unwrapped(self) -> Self:
        """Return the module itself."""
        return self

    def get_state(self, *args: Any, inference_only: bool = False, **settings: Any) -> dict[str, NDArray[Any]]:
        """Return the weights by name."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the weights by name."""

    def save_to_path(self, path: Any = None, **settings: Any) -> str:
        """Write the module, and return its directory; `None` is a new directory for temporary files."""
        directory = Path(tempfile.mkdtemp(prefix="rl_module_") if path is None else path).absolute()
        weights = {f"{OWN}{name}": value for name, value in self.get_state().items()}
        model_config = {"rl_module_class": type(self), "rl_model_config": self.model_config}
        spaces = self.observation_space, self.action_space
        write_module(directory, adapter_of(type(self)), model_config, *spaces, weights)
        return str(directory)

    def restore_from_path(self, path: Any, **settings: Any) -> None:
        """Set the weights to the ones in a directory of a module.

        Raises:
            CheckpointError: There is no such directory.
        """
        self.set_state(read_weights(path, is_own=True))

    @classmethod
    def from_checkpoint(cls, path: Any, **settings: Any) -> Any:
        """Return the module in `learner_group/learner/rl_module/<module id>` of a checkpoint.

        Raises:
            CheckpointError: There is none.
        """
        return load_module(Path(path))


class TorchRLModule(nn.Module, RLModule):
    """A module of torch layers."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make the module; see `RLModule`."""
        nn.Module.__init__(self)
        RLModule.__init__(self, *args, **settings)

    def forward(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return what `forward_train` returns."""
        return self.forward_train(batch, **settings)

    def get_state(self, *args: Any, inference_only: bool = False, **settings: Any) -> dict[str, NDArray[Any]]:
        """Return the weights by name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.state_dict().items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the weights by name."""
        self.load_state_dict({name: torch.as_tensor(np.asarray(value)) for name, value in state.items()})

    def compile(self, *args: Any, **settings: Any) -> None:
        """Do nothing: Corral compiles losses, with `torch_compile_learner`."""


class ValueFunctionAPI:
    """Mixin of modules with values."""

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return values `[B]` of observations."""
        raise ConfigError(f"{type(self).__name__} has no method compute_values(batch, embeddings=None).")


class InferenceOnlyAPI:
    """Mixin of modules that leave out layers in runners, which Corral keeps."""

    def get_non_inference_attributes(self) -> list[str]:
        """Return the names of layers that only learning needs."""
        return []


class TargetNetworkAPI:
    """Mixin of modules with target networks; Corral's default modules make their own."""

    def make_target_networks(self) -> None:
        """Make the target networks."""

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        """Return pairs of networks and their target networks."""
        return []

    def forward_target(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return outputs of the target networks."""
        return {}


class SelfSupervisedLossAPI:
    """Mixin of modules that compute their own loss."""

    def compute_self_supervised_loss(
        self, *, learner: Any, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the loss of a minibatch, in place of the learner's."""
        raise ConfigError(f"{type(self).__name__} has no method compute_self_supervised_loss(*, learner, ...).")


class QNetAPI:
    """Mixin of modules with action values."""

    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return action values of observations."""
        raise ConfigError(f"{type(self).__name__} has no method compute_q_values(batch).")


def _as_dict(model_config: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(model_config) and not isinstance(model_config, type):
        return dataclasses.asdict(model_config)
    return dict(model_config or {})


# Specs.


@dataclass
class RLModuleSpec:
    """Describes a module.

    Attributes:
        module_class: The class; `None` is the default module.
        observation_space: Space of one observation; `None` is the space of the env.
        action_space: Space of one action; `None` is the space of the env.
        inference_only: Whether the module only acts.
        learner_only: Whether the module exists in learners only.
        model_config: Settings of the module, a dict or a `DefaultModelConfig`.
        catalog_class: Not used; only `None`.
        load_state_path: Checkpoint of the weights that the module starts with.
    """

    module_class: Any = None
    observation_space: Any = None
    action_space: Any = None
    inference_only: bool = False
    learner_only: bool = False
    model_config: Any = None
    catalog_class: Any = None
    load_state_path: Any = None
    model_config_dict: Any = None

    def __post_init__(self) -> None:
        """Take the older name of the settings."""
        if self.model_config is None and self.model_config_dict is not None:
            self.model_config = self.model_config_dict

    def build(self) -> Any:
        """Return the module."""
        if self.module_class is None:
            raise ConfigError("RLModuleSpec.build: give module_class.")
        return self.module_class(
            observation_space=self.observation_space,
            action_space=self.action_space,
            inference_only=self.inference_only,
            learner_only=self.learner_only,
            model_config=self.model_config,
        )


@dataclass
class MultiRLModuleSpec:
    """Describes the modules of several agents.

    Attributes:
        multi_rl_module_class: Class of all modules together.
        rl_module_specs: Specs by module id, or one for all modules.
    """

    multi_rl_module_class: Any = None
    observation_space: Any = None
    action_space: Any = None
    inference_only: bool | None = None
    model_config: Any = None
    rl_module_specs: Any = field(default_factory=dict)
    load_state_path: Any = None
    modules_to_load: Any = None
    module_specs: Any = None

    def __post_init__(self) -> None:
        """Take the older name of the specs."""
        if self.module_specs is not None and not self.rl_module_specs:
            self.rl_module_specs = self.module_specs
        self.module_specs = self.rl_module_specs

    def spec_of(self, module_id: str) -> RLModuleSpec:
        """Return the spec of a module, with where its first weights are."""
        given = self.rl_module_specs
        found: RLModuleSpec = given if isinstance(given, RLModuleSpec) else given.get(module_id) or RLModuleSpec()
        chosen = self.modules_to_load is None or module_id in self.modules_to_load
        if self.load_state_path is not None and chosen and found.load_state_path is None:
            found = dataclasses.replace(found, load_state_path=Path(self.load_state_path) / module_id)
        return found

    @property
    def is_joint(self) -> bool:
        """Whether the modules are parts of one class of the user's."""
        return self.multi_rl_module_class not in (None, MultiRLModule)

    def build(self, module_id: str | None = None) -> Any:
        """Return all modules, or one."""
        if module_id is not None:
            return self.spec_of(module_id).build()
        return (self.multi_rl_module_class or MultiRLModule)(
            observation_space=self.observation_space,
            action_space=self.action_space,
            inference_only=bool(self.inference_only),
            model_config=self.model_config,
            rl_module_specs=self.rl_module_specs,
        )

    def add_modules(self, module_specs: Mapping[str, RLModuleSpec], override: bool = True) -> None:
        """Add specs."""
        self.rl_module_specs.update(module_specs)

    def remove_modules(self, module_ids: Any) -> None:
        """Remove specs."""
        for module_id in module_ids:
            self.rl_module_specs.pop(module_id, None)

    def __contains__(self, module_id: object) -> bool:
        """Return whether there is a spec for a module."""
        return module_id in self.rl_module_specs

    def __getitem__(self, module_id: str) -> RLModuleSpec:
        """Return the spec of a module."""
        return self.spec_of(module_id)


def multi_rl_module_spec(
    *,
    given: Any,
    default: Any,
    of_modules: RLModuleSpec | None,
    policies: Mapping[str, Any],
    spaces: Mapping[str, Any],
    env: Any,
    inference_only: bool,
) -> MultiRLModuleSpec:
    """Return one spec for all modules, with their spaces.

    Args:
        given: The spec in the config, or `None`.
        default: The spec of the algorithm.
        of_modules: Spec of the modules for which there is none.
        policies: What describes each policy by module id: `None`, a tuple, a `PolicySpec`, or a dict of settings.
        spaces: Pairs of spaces by module id.
        env: Env that has the spaces that are not known otherwise, or `None`.
        inference_only: Whether modules only act.

    Raises:
        ConfigError: There is no spec for a module.
    """
    spec = default if given is None else given
    whole, own, fallback = MultiRLModuleSpec(), dict[str, RLModuleSpec](), of_modules
    if isinstance(spec, RLModuleSpec):
        fallback = fallback or spec
    else:
        whole, parts = spec, spec.rl_module_specs
        own = dict(parts) if isinstance(parts, Mapping) else {}
        for each in (parts, default):
            fallback = fallback or (each if isinstance(each, RLModuleSpec) else None)
    found = {}
    for module_id in dict.fromkeys((*policies, *own)):
        part = own.get(module_id) or fallback
        if part is None:
            raise ConfigError(
                f"get_multi_rl_module_spec: no spec for the module {module_id!r}: give single_agent_rl_module_spec."
            )
        if part.learner_only and inference_only:
            continue
        in_policy = policies.get(module_id)
        in_policy = in_policy[1:3] if isinstance(in_policy, (tuple, list)) else in_policy
        pairs: dict[str, Any] = {
            name: (
                getattr(part, name)
                or (in_policy[i] if isinstance(in_policy, (tuple, list)) else getattr(in_policy, name, None))
                or (spaces[module_id][i] if module_id in spaces else None)
                or getattr(env, f"single_{name}", getattr(env, name, None))
            )
            for i, name in enumerate(("observation_space", "action_space"))
        }
        cls = part.module_class or getattr(default, "module_class", None)
        found[module_id] = dataclasses.replace(part, module_class=cls, inference_only=inference_only, **pairs)
    return dataclasses.replace(
        whole,
        multi_rl_module_class=whole.multi_rl_module_class or MultiRLModule,
        inference_only=inference_only,
        rl_module_specs=found,
        module_specs=found,
    )


class MultiRLModule(RLModule):
    """Modules by id. A subclass may give them parts in common, in `setup` and the forward passes.

    Args:
        modules: Modules that are there already.
        rl_module_specs: Specs of the modules that `setup` builds, by id.
        model_config: Settings of a subclass.
        **settings: As for `RLModule`.

    Attributes:
        rl_module_specs: The specs.
    """

    def __init__(
        self,
        modules: Mapping[str, Any] | None = None,
        *,
        rl_module_specs: Mapping[str, RLModuleSpec] | None = None,
        **settings: Any,
    ) -> None:
        """Build the modules."""
        self.rl_module_specs = dict(rl_module_specs or {})
        self._rl_modules: dict[str, Any] = dict(modules or {})
        super().__init__(**settings)

    def setup(self) -> None:
        """Build the modules of the specs."""
        for module_id, spec in self.rl_module_specs.items():
            self._rl_modules[module_id] = spec.build()

    def _run(self, name: str, batch: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        return {
            module_id: getattr(self._rl_modules[module_id], name)(part, **settings) for module_id, part in batch.items()
        }

    def _forward_inference(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return self._run("forward_inference", batch, **settings)

    def _forward_exploration(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return self._run("forward_exploration", batch, **settings)

    def _forward_train(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return self._run("forward_train", batch, **settings)

    def get_initial_state(self) -> Any:
        """Return the states before an episode by module id."""
        return {module_id: module.get_initial_state() for module_id, module in self._rl_modules.items()}

    def is_stateful(self) -> bool:
        """Return whether a module has memory."""
        return any(module.is_stateful() for module in self._rl_modules.values())

    def as_multi_rl_module(self) -> MultiRLModule:
        """Return the object itself."""
        return self

    def add_module(self, module_id: str, module: Any, *, override: bool = False) -> None:
        """Add a module.

        Raises:
            ValueError: There is one of this id.
        """
        if module_id in self._rl_modules and not override:
            raise ValueError(f"there is a module {module_id!r} already: use override=True to replace it.")
        self._rl_modules[module_id] = module

    def remove_module(self, module_id: str, *, raise_err_if_not_found: bool = True) -> None:
        """Remove a module.

        Raises:
            KeyError: There is none of this id.
        """
        if raise_err_if_not_found or module_id in self._rl_modules:
            del self._rl_modules[module_id]

    def get_state(self, *args: Any, inference_only: bool = False, **settings: Any) -> dict[str, Any]:
        """Return the weights by module id and name."""
        return {module_id: module.get_state() for module_id, module in self._rl_modules.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the weights by module id and name."""
        for module_id, part in state.items():
            self._rl_modules[module_id].set_state(part)

    def parameters(self, *args: Any) -> Iterator[nn.Parameter]:
        """Yield the parameters of all modules, each once."""
        found = {id(each): each for module in self._rl_modules.values() for each in module.parameters()}
        yield from found.values()

    # A mapping.

    def __getitem__(self, module_id: str) -> Any:
        """Return a module."""
        return self._rl_modules[module_id]

    def __contains__(self, module_id: object) -> bool:
        """Return whether there is a module of this id."""
        return module_id in self._rl_modules

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids."""
        return iter(self._rl_modules)

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self._rl_modules)

    def keys(self) -> Any:
        """Return the ids."""
        return self._rl_modules.keys()

    def values(self) -> Any:
        """Return the modules."""
        return self._rl_modules.values()

    def items(self) -> Any:
        """Return pairs of ids and modules."""
        return self._rl_modules.items()

    def get(self, module_id: str, default: Any = None) -> Any:
        """Return a module, or a default."""
        return self._rl_modules.get(module_id, default)

    def foreach_module(self, func: Any, *, return_dict: bool = False, **settings: Any) -> Any:
        """Return `func(module_id, module)` for each module."""
        found = {name: func(name, module.unwrapped(), **settings) for name, module in self._rl_modules.items()}
        return found if return_dict else list(found.values())


# The modules of Corral that call a module of RLlib. Their settings are `rl_module_class` and `rl_model_config`.


def _build(settings: Mapping[str, Any], observation_space: Any, action_space: Any) -> Any:
    return settings["rl_module_class"](
        observation_space=observation_space, action_space=action_space, model_config=settings["rl_model_config"]
    )


def fresh(obs: Tree) -> Tree:
    """Return the tree with dicts of its own, because forward passes of users take entries out of them."""
    return map_tree(lambda leaf: leaf, obs)


class AdaptedModule(Module):
    """Calls a module of RLlib without memory."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(observation_space, action_space, model_config)
        self.rl_module = _build(model_config, observation_space, action_space)
        self._writes_to_batch: bool | None = None
        self._carried = own_distribution(self.rl_module, RLModule, {_OBS: example_obs(observation_space)})
        if self._carried is not None:
            self.distribution = self._carried

    def policy(self, obs: Tree) -> Tensor:
        """Return what `forward_exploration` returns as inputs of the distribution."""
        if self._carried is not None:
            return carried_outputs(self.rl_module, self._carried, ({_OBS: fresh(obs)}, {_OBS: fresh(obs)}))
        return _inputs(self.rl_module, self.rl_module.forward_exploration({_OBS: fresh(obs)}))

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Yield what is checked of a new module; values only if it has them, because own algorithms need none."""
        if hasattr(self.rl_module, "compute_values"):
            yield from super().outputs(obs)
        else:
            yield "policy(obs)", self.policy(obs), (self.distribution.num_inputs,)

    def value(self, obs: Tree) -> Tensor:
        """Return what `compute_values` returns."""
        if not hasattr(self.rl_module, "compute_values"):
            raise ConfigError(
                f"{type(self.rl_module).__name__}.compute_values: the algorithm learns values, and the module lacks "
                "this method: derive the class from ValueFunctionAPI too, and define compute_values(batch, embeddings)."
            )
        values: Tensor = self.rl_module.compute_values({_OBS: fresh(obs)})
        return values

    def policy_and_value(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values of one forward pass for learning."""
        batch = {_OBS: fresh(obs)}
        outputs = self.forward_train(batch)
        inputs = _inputs(self.rl_module, outputs)
        if self._carried is not None:
            inputs = self._carried.pad(inputs)
        if _VALUES in outputs:
            return inputs, outputs[_VALUES]
        return inputs, self.rl_module.compute_values(batch, embeddings=outputs.get(_EMBEDDINGS))

    def forward_train(self, batch: dict[str, Any]) -> Any:
        """Return what `forward_train` returns for a batch.

        In RLlib a learner calls `compute_values` with the batch first, and what this writes into the batch is there in
        the forward pass. Modules whose `compute_values` writes into the batch find it so here, too.
        """
        compute_values = getattr(self.rl_module, "compute_values", None)
        if self._writes_to_batch is None and compute_values is not None:
            probe = {**batch, _OBS: fresh(batch[_OBS])}
            before = dict(probe)
            with torch.no_grad():
                compute_values(probe)
            self._writes_to_batch = probe.keys() != before.keys() or probe[_OBS] is not before[_OBS]
        if self._writes_to_batch:
            with torch.no_grad():
                compute_values(batch)  # type: ignore[misc]
        return self.rl_module.forward_train(batch)


class AdaptedMemoryModule(Module):
    """Calls a module of RLlib with memory; observations have an axis of time."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(
            observation_space, action_space, {"max_seq_len": model_config["rl_model_config"].get("max_seq_len")}
        )
        self.rl_module = _build(model_config, observation_space, action_space)
        _refuse_own_distribution(self.rl_module)

    def initial_state(self) -> Tree:
        """Return the initial state."""
        return map_tree(torch.as_tensor, self.rl_module.get_initial_state())

    def policy(self, obs: Tree, state: Tree = None) -> Any:
        """Return inputs of the distribution, and the next state."""
        batch = {_OBS: map_tree(lambda leaf: leaf.unsqueeze(1), obs), _STATE_IN: state}
        outputs = self.rl_module.forward_exploration(batch)
        return _inputs(self.rl_module, outputs).squeeze(1), outputs[_STATE_OUT]

    def value(self, obs: Tree, state: Tree = None) -> Tensor:
        """Return values."""
        batch = {_OBS: map_tree(lambda leaf: leaf.unsqueeze(1), obs), _STATE_IN: state}
        values: Tensor = self.rl_module.compute_values(batch)
        return values.squeeze(1)

    def policy_and_value(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values for the steps of sequences that a mask selects."""
        assert mask is not None
        batch = {_OBS: fresh(obs), _STATE_IN: state}
        outputs = self.rl_module.forward_train(batch)
        values = self.rl_module.compute_values(batch, embeddings=outputs.get(_EMBEDDINGS))
        return _inputs(self.rl_module, outputs)[mask], values[mask]


class AdaptedPart(Module):
    """Calls one of several modules of RLlib that have parts in common; it holds all of them."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build all modules of RLlib; specs without spaces get the spaces of this one."""
        super().__init__(observation_space, action_space, {})
        self.module_id: str = model_config["rl_module_id"]
        spec: MultiRLModuleSpec = copy.copy(model_config["rl_multi_spec"])
        spec.rl_module_specs = {
            module_id: dataclasses.replace(
                each,
                observation_space=each.observation_space or observation_space,
                action_space=each.action_space or action_space,
            )
            for module_id, each in spec.rl_module_specs.items()
        }
        self.multi = spec.build()
        if self.multi.is_stateful():
            raise ConfigError(f"{type(self.multi).__name__}: parts with memory are not served: give modules alone.")
        _refuse_own_distribution(self.rl_module)
        self.parts = nn.ModuleDict({name: part for name, part in self.multi.items() if isinstance(part, nn.Module)})
        if isinstance(self.multi, nn.Module):
            self.whole = self.multi

    @property
    def rl_module(self) -> Any:
        """The module of RLlib for this id."""
        return self.multi[self.module_id]

    def policy(self, obs: Tree) -> Tensor:
        """Return what `forward_exploration` returns as inputs of the distribution."""
        outputs = self.multi.forward_exploration({self.module_id: {_OBS: fresh(obs)}})[self.module_id]
        return _inputs(self.rl_module, outputs)

    def value(self, obs: Tree) -> Tensor:
        """Return what `compute_values` returns."""
        values: Tensor = self.rl_module.compute_values({_OBS: fresh(obs)})
        return values

    def policy_and_value(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values."""
        outputs = self.multi.forward_train({self.module_id: {_OBS: fresh(obs)}})[self.module_id]
        values = outputs[_VALUES] if _VALUES in outputs else self.value(obs)
        return _inputs(self.rl_module, outputs), values


class AdaptedRules(HeuristicModule):
    """Calls a module of RLlib without weights, which returns actions."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(observation_space, action_space, {})
        self.rl_module = _build(model_config, observation_space, action_space)

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return the actions of `forward_inference`."""
        return np.asarray(self.rl_module.forward_inference({_OBS: obs})[_ACTIONS])


def _refuse_own_distribution(module: Any) -> None:
    if module.action_dist_cls is not None:
        raise ConfigError(
            f"{type(module).__name__}: action_dist_cls is served for modules without memory and without parts in "
            "common with others: leave it out."
        )


def _inputs(module: Any, outputs: Mapping[str, Any]) -> Tensor:
    if _INPUTS not in outputs:
        raise ConfigError(f"{type(module).__name__}: a forward pass returned no {_INPUTS!r}, but {sorted(outputs)}.")
    inputs: Tensor = outputs[_INPUTS]
    return inputs


def loading_settings(spec: RLModuleSpec) -> dict[str, Any]:
    """Return Corral's `load_from` for the checkpoint of a module that a spec names.

    Raises:
        CheckpointError: `load_state_path` is no directory of a module.
    """
    return {} if spec.load_state_path is None else {"load_from": str(weights_file(spec.load_state_path))}


def to_module_settings(spec: RLModuleSpec) -> dict[str, Any] | None:
    """Return Corral's `module_class` and `model_config` for a spec; `None` for the default module.

    Raises:
        ConfigError: The class is no module, or a part of the spec is not served.
    """
    cls = spec.module_class
    if spec.catalog_class is not None and not vars(spec.catalog_class).get("IS_DEFAULT", False):
        raise ConfigError(
            f"RLModuleSpec: catalog_class={spec.catalog_class!r:.80}: catalogs of your own are not served: write an "
            "RLModule."
        )
    if cls is None or cls is DefaultRLModule:
        return None
    if vars(cls).get("IS_DEFAULT", False) and not has_own_weights(spec.load_state_path):
        return None
    if not (isinstance(cls, type) and issubclass(cls, RLModule)):
        raise ConfigError(f"RLModuleSpec: module_class={cls!r} is no RLModule.")
    return {
        "module_class": adapter_of(cls),
        "model_config": {"rl_module_class": cls, "rl_model_config": _as_dict(spec.model_config)},
    }


def adapter_of(cls: type) -> type[Module]:
    """Return the module of Corral that calls a class of modules."""
    if not issubclass(cls, nn.Module):
        return AdaptedRules
    has_memory = cls.get_initial_state is not RLModule.get_initial_state  # type: ignore[attr-defined]
    return AdaptedMemoryModule if has_memory else AdaptedModule


class DefaultRLModule:
    """A view of a default module of Corral, with RLlib's methods.

    Args:
        native: The module.

    Attributes:
        model_config: RLlib's settings of the module, where it comes from `Algorithm.get_module`.
    """

    IS_DEFAULT = True
    inference_only = learner_only = False
    framework = "torch"

    def __init__(self, native: Module) -> None:
        """Keep the module."""
        self._native = native
        self.model_config: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._native, name)

    def unwrapped(self) -> Self:
        """Return the view itself."""
        return self

    # Parts.

    @cached_property
    def encoder(self) -> ActorCriticEncoder:
        """The encoders of observations."""
        return ActorCriticEncoder(self._native)

    @cached_property
    def pi(self) -> PolicyHead:
        """The layers of the policy."""
        return PolicyHead(self._native)

    @cached_property
    def vf(self) -> ValueHead:
        """The layers of the values."""
        return ValueHead(self._native)

    # Forward passes.

    def forward_inference(self, batch: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Return the inputs of the distribution, with memory also `state_out`, and of a Q-network the best `actions`.

        With memory, observations may be sequences `[B, T, ...]`, as RLlib has them, or one step, `[B, ...]`.
        """
        with torch.no_grad():
            obs = map_tree(torch.as_tensor, batch[_OBS])
            if self._native.has_memory():
                return self._follow(obs, map_tree(torch.as_tensor, batch[_STATE_IN]))
            outputs = self._native.policy(obs)
            return {_INPUTS: outputs, _ACTIONS: outputs.argmax(-1)} if self._has_q_values else {_INPUTS: outputs}

    @property
    def _has_q_values(self) -> bool:
        return isinstance(self._native, QModule)

    def _follow(self, obs: Tree, state: Tree) -> dict[str, Any]:
        """Return the outputs for steps that follow each other, and the state after them."""
        native: Any = self._native
        one_step = native.observation_space.shape is None or (
            leaves(obs)[0].ndim == len(native.observation_space.shape) + 1
        )
        steps = []
        for t in range(1 if one_step else leaves(obs)[0].shape[1]):
            step = obs if one_step else map_tree(operator.itemgetter((slice(None), t)), obs)
            outputs, state = native.policy(step, state)
            steps.append(outputs)
        found = steps[0] if one_step else torch.stack(steps, 1)
        actions = {_ACTIONS: found.argmax(-1)} if self._has_q_values else {}
        return {_INPUTS: found, _STATE_OUT: state, **actions}

    forward_exploration = forward_inference

    def forward_train(self, batch: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Return the inputs of the distribution, and values."""
        inputs, values = self._native.policy_and_value(*module_inputs(batch))
        return {_INPUTS: inputs, _VALUES: values}

    def __call__(self, batch: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Return what `forward_train` returns."""
        return self.forward_train(batch, **settings)

    def compute_values(self, batch: Mapping[str, Any], embeddings: Any = None) -> Tensor:
        """Return values `[B]`."""
        return self._native.value(batch[_OBS])

    @property
    def action_dist_cls(self) -> Any:
        """Class of the distribution over actions."""
        return distribution_class(self._native.action_space)

    def get_train_action_dist_cls(self) -> Any:
        """Return the class of the distribution over actions."""
        return self.action_dist_cls

    get_exploration_action_dist_cls = get_inference_action_dist_cls = get_train_action_dist_cls

    def get_initial_state(self) -> Any:
        """Return the state before an episode; empty without memory."""
        return self._native.initial_state() if self._native.has_memory() else {}

    def is_stateful(self) -> bool:
        """Return whether the module has memory."""
        return self._native.has_memory()

    get_state = TorchRLModule.get_state
    set_state = TorchRLModule.set_state

    def restore_from_path(self, path: Any, **settings: Any) -> None:
        """Set the weights to the ones in a directory of a module.

        Raises:
            CheckpointError: There is no such directory.
        """
        self._native.load_state_dict(read_weights(path, is_own=False))


def view_module(native: Any) -> Any:
    """Return the module of RLlib for a module of Corral: the user's own one, or a view of a default module."""
    if isinstance(native, (AdaptedModule, AdaptedMemoryModule, AdaptedPart, AdaptedRules)):
        return native.rl_module
    if (view := vars(native).get("_rllib_view")) is None:
        view = vars(native)["_rllib_view"] = DefaultRLModule(native)
    return view


def joint_view(modules: Mapping[str, Any]) -> MultiRLModule:
    """Return the `MultiRLModule` for modules of Corral: the user's own one, or their views by id."""
    for native in modules.values():
        if isinstance(native, AdaptedPart):
            found: MultiRLModule = native.multi
            return found
    return MultiRLModule({module_id: view_module(native) for module_id, native in modules.items()})


def load_module(path: Path) -> Any:
    """Return the module in a directory of a checkpoint, or all modules if it has a directory for each.

    Raises:
        CheckpointError: There is none, or it names what no checkpoint should.
    """
    try:
        description = json.loads((path / MODULE_FILE).read_text())
    except FileNotFoundError:
        parts = {each.parent.name: load_module(each.parent) for each in sorted(path.glob(f"*/{MODULE_FILE}"))}
        if not parts:
            weights_file(path)  # raises
        return MultiRLModule(parts)
    module = import_checked(description["module_class"], path)(
        described_space(description["observation_space"]),
        described_space(description["action_space"]),
        decode(description["model_config"], path),
    )
    module.load_state_dict(read_weights(path, is_own=False))
    return view_module(module)
