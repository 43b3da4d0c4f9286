"""RLlib's modules: their base classes and specs."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.compat.rllib.distributions import distribution_class
from corral.compat.rllib.module_files import (
    OWN,
    check_files,
    read_weights,
    write_module,
)
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.paths import resolve_path
from corral.errors import ConfigError


@dataclass(frozen=True)
class RLModuleConfig:
    """The arguments of a module by the names of RLlib 2.10; see `RLModule`."""

    observation_space: Any = None
    action_space: Any = None
    inference_only: bool = False
    learner_only: bool = False
    model_config_dict: Any = None
    catalog_class: Any = None


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
        self.model_config = as_dict(model_config)
        self.catalog = None
        self.setup()

    def setup(self) -> None:
        """Make the layers."""

    @property
    def config(self) -> RLModuleConfig:
        """The arguments of the module, as modules of 2.10 read them."""
        return RLModuleConfig(
            self.observation_space, self.action_space, self.inference_only, self.learner_only, self.model_config
        )

    # Forward passes, from a dict of columns to a dict of columns.

    def forward_inference(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return outputs for acting without exploration, in evaluation mode."""
        return _evaluated(self, self._forward_inference, batch, settings)

    def forward_exploration(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return outputs for acting with exploration, in evaluation mode."""
        return _evaluated(self, self._forward_exploration, batch, settings)

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
        """Return the class of the distribution that losses use: the one of inference, if a subclass has no other."""
        return self.get_inference_action_dist_cls()

    def get_exploration_action_dist_cls(self) -> Any:
        """Return the class of the distribution that exploration samples from; see `get_train_action_dist_cls`."""
        return self.get_inference_action_dist_cls()

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

    def get_state(
        self, components: Any = None, *, inference_only: bool = False, **settings: Any
    ) -> dict[str, NDArray[Any]]:
        """Return the weights by name."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Set the weights by name."""

    def save_to_path(self, path: Any = None, **settings: Any) -> str:
        """Write the module, and return its directory; `None` is a new directory for temporary files."""
        check_files(settings)
        path = tempfile.mkdtemp(prefix="rl_module_") if path is None else path
        directory = resolve_path(path, "the module").absolute()
        weights = {f"{OWN}{name}": value for name, value in self.get_state().items()}
        model_config = {"rl_module_class": type(self), "rl_model_config": self.model_config}
        spaces = self.observation_space, self.action_space
        write_module(directory, _adapted().adapter_of(type(self)), model_config, *spaces, weights)
        return str(directory)

    def restore_from_path(self, path: Any, **settings: Any) -> None:
        """Set the weights to the ones in a directory of a module.

        Raises:
            CheckpointError: There is no such directory.
        """
        check_files(settings)
        self.set_state(read_weights(path, is_own=True))

    @classmethod
    def from_checkpoint(cls, path: Any, **settings: Any) -> Any:
        """Return the module in `learner_group/learner/rl_module/<module id>` of a checkpoint.

        Raises:
            CheckpointError: There is none.
        """
        check_files(settings)
        return _adapted().load_module(resolve_path(path, "the module"))


def _evaluated(
    module: Any, forward: Callable[..., dict[str, Any]], batch: Any, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a forward pass returns in evaluation mode: without dropout, and with fixed batch statistics."""
    if not getattr(module, "training", False):
        return forward(batch, **settings)
    module.eval()
    try:
        return forward(batch, **settings)
    finally:
        module.train()


class TorchRLModule(nn.Module, RLModule):
    """A module of torch layers."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Make the module; see `RLModule`."""
        nn.Module.__init__(self)
        RLModule.__init__(self, *args, **settings)

    def forward(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Return what `forward_train` returns."""
        return self.forward_train(batch, **settings)

    def get_state(
        self, components: Any = None, *, inference_only: bool = False, **settings: Any
    ) -> dict[str, NDArray[Any]]:
        names = self.get_non_inference_attributes() if inference_only and isinstance(self, InferenceOnlyAPI) else []
        left_out = tuple(f"{name}." for name in names)
        return {
            name: value.detach().cpu().numpy().copy()
            for name, value in self.state_dict().items()
            if not f"{name}.".startswith(left_out)
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
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


def as_dict(model_config: Any) -> dict[str, Any]:
    """Return settings of a module as a dict, also those in a `DefaultModelConfig`."""
    if dataclasses.is_dataclass(model_config) and not isinstance(model_config, type):
        return dataclasses.asdict(model_config)
    return dict(model_config or {})


def _adapted() -> Any:
    """Return the module `adapted_modules`, which needs this one."""
    return importlib.import_module(f"{__package__}.adapted_modules")


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

    @classmethod
    def from_module(cls, module: Any) -> Self:
        """Return a spec of modules like one that is there; they have weights of their own."""
        module = module.unwrapped()
        return cls(
            module_class=type(module),
            observation_space=module.observation_space,
            action_space=module.action_space,
            inference_only=module.inference_only,
            learner_only=module.learner_only,
            model_config=module.model_config,
        )

    def update(self, other: RLModuleSpec, override: bool = True) -> None:
        """Take what another spec has; with `override=False`, only where this one has nothing.

        Raises:
            ValueError: It is no spec of one module.
        """
        if not isinstance(other, RLModuleSpec):
            raise ValueError(f"RLModuleSpec.update: {other!r:.80} is no RLModuleSpec.")
        for each in dataclasses.fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.type != "bool":
                setattr(self, each.name, (theirs or mine) if override else (mine or theirs))
        if override:
            self.inference_only = other.inference_only or self.inference_only
            self.learner_only = other.learner_only and self.learner_only

    def as_multi_rl_module_spec(self) -> MultiRLModuleSpec:
        """Return a spec of one module with the id of the only one."""
        return MultiRLModuleSpec(rl_module_specs={DEFAULT_MODULE_ID: self})

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

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
            found = dataclasses.replace(
                found, load_state_path=resolve_path(self.load_state_path, "the module") / module_id
            )
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
        """Add specs; with `override=False`, a spec that is there takes what the other one has."""
        for module_id, spec in module_specs.items():
            if override or module_id not in self.rl_module_specs:
                self.rl_module_specs[module_id] = spec
            else:
                self.rl_module_specs[module_id].update(spec)

    def update(self, other: MultiRLModuleSpec | RLModuleSpec, override: bool = False) -> None:
        """Take the specs of another one, as `add_modules`; of one module, only what the specs here lack."""
        if isinstance(other, RLModuleSpec):
            for spec in self.rl_module_specs.values():
                spec.update(other, override=False)
            return
        self.add_modules(other.rl_module_specs, override=override)

    def as_multi_rl_module_spec(self) -> Self:
        """Return the spec itself."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def remove_modules(self, module_ids: Any) -> None:
        """Remove the specs of some modules, or of one."""
        for module_id in [module_ids] if isinstance(module_ids, str) else module_ids:
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

    def get_state(
        self, components: Any = None, *, not_components: Any = (), inference_only: bool = False, **settings: Any
    ) -> dict[str, Any]:
        """Return the weights by module id and name; `components` and `not_components` are ids of modules."""
        chosen = [components] if isinstance(components, str) else components
        left_out = [not_components] if isinstance(not_components, str) else not_components or ()
        return {
            module_id: module.get_state(inference_only=inference_only)
            for module_id, module in self._rl_modules.items()
            if (chosen is None or module_id in chosen) and module_id not in left_out
        }

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
