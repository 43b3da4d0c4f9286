"""RLlib's modules: its base classes and specs, and the modules of Corral that call them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn

from corral.compat.rllib.encoding import decode, import_checked
from corral.core.space_descriptions import described_space
from corral.core.tree import Tree, map_tree
from corral.errors import CheckpointError, ConfigError
from corral.modules.heuristic import HeuristicModule
from corral.modules.module import Module

MODULE_FILE, WEIGHTS_FILE = "module.json", "module_state.safetensors"
"""Files of a module in a checkpoint."""

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
    """Mixin of modules that compute their own loss, which are refused."""


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
            self.observation_space,
            self.action_space,
            inference_only=self.inference_only,
            learner_only=self.learner_only,
            model_config=self.model_config,
        )


@dataclass
class MultiRLModuleSpec:
    """Describes the modules of several agents.

    Attributes:
        multi_rl_module_class: Class of all modules together; only `None`, or `MultiRLModule`.
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
        if self.multi_rl_module_class not in (None, MultiRLModule):
            raise ConfigError(
                f"MultiRLModuleSpec: multi_rl_module_class={self.multi_rl_module_class!r} is not served: modules of "
                "several agents are separate in Corral; share layers with the setting shared_layers."
            )
        if self.load_state_path is not None:
            raise ConfigError("MultiRLModuleSpec: load_state_path is not served: use Corral's `load_from`.")

    def spec_of(self, module_id: str) -> RLModuleSpec:
        """Return the spec of a module."""
        if isinstance(self.rl_module_specs, RLModuleSpec):
            return self.rl_module_specs
        found: RLModuleSpec = self.rl_module_specs.get(module_id) or RLModuleSpec()
        return found


class MultiRLModule:
    """Modules by id.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Keep the modules."""
        self._modules = dict(modules or {})

    def __getitem__(self, module_id: str) -> Any:
        """Return a module."""
        return self._modules[module_id]

    def __contains__(self, module_id: str) -> bool:
        """Return whether there is a module of this id."""
        return module_id in self._modules

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids."""
        return iter(self._modules)

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self._modules)

    def keys(self) -> Any:
        """Return the ids."""
        return self._modules.keys()

    def values(self) -> Any:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> Any:
        """Return pairs of ids and modules."""
        return self._modules.items()

    def get(self, module_id: str, default: Any = None) -> Any:
        """Return a module, or a default."""
        return self._modules.get(module_id, default)

    def foreach_module(self, func: Any, **settings: Any) -> list[Any]:
        """Return `func(module_id, module)` for each module."""
        return [func(module_id, module, **settings) for module_id, module in self._modules.items()]


# The modules of Corral that call a module of RLlib. Their settings are `rl_module_class` and `rl_model_config`.


def _build(settings: Mapping[str, Any], observation_space: Any, action_space: Any) -> Any:
    return settings["rl_module_class"](observation_space, action_space, model_config=settings["rl_model_config"])


class AdaptedModule(Module):
    """Calls a module of RLlib without memory."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(observation_space, action_space, model_config)
        self.rl_module = _build(model_config, observation_space, action_space)

    def policy(self, obs: Tree) -> Tensor:
        """Return what `forward_exploration` returns as inputs of the distribution."""
        return _inputs(self.rl_module, self.rl_module.forward_exploration({_OBS: obs}))

    def value(self, obs: Tree) -> Tensor:
        """Return what `compute_values` returns."""
        values: Tensor = self.rl_module.compute_values({_OBS: obs})
        return values

    def policy_and_value(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values of one forward pass for learning."""
        batch = {_OBS: obs}
        outputs = self.rl_module.forward_train(batch)
        if _VALUES in outputs:
            return _inputs(self.rl_module, outputs), outputs[_VALUES]
        return _inputs(self.rl_module, outputs), self.rl_module.compute_values(
            batch, embeddings=outputs.get(_EMBEDDINGS)
        )


class AdaptedMemoryModule(Module):
    """Calls a module of RLlib with memory; observations have an axis of time."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(
            observation_space, action_space, {"max_seq_len": model_config["rl_model_config"].get("max_seq_len")}
        )
        self.rl_module = _build(model_config, observation_space, action_space)

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
        batch = {_OBS: obs, _STATE_IN: state}
        outputs = self.rl_module.forward_train(batch)
        values = self.rl_module.compute_values(batch, embeddings=outputs.get(_EMBEDDINGS))
        return _inputs(self.rl_module, outputs)[mask], values[mask]


class AdaptedRules(HeuristicModule):
    """Calls a module of RLlib without weights, which returns actions."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(observation_space, action_space, {})
        self.rl_module = _build(model_config, observation_space, action_space)

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return the actions of `forward_inference`."""
        return np.asarray(self.rl_module.forward_inference({_OBS: obs})[_ACTIONS])


def _inputs(module: Any, outputs: Mapping[str, Any]) -> Tensor:
    if _INPUTS not in outputs:
        raise ConfigError(f"{type(module).__name__}: a forward pass returned no {_INPUTS!r}, but {sorted(outputs)}.")
    inputs: Tensor = outputs[_INPUTS]
    return inputs


def to_module_settings(spec: RLModuleSpec) -> dict[str, Any] | None:
    """Return Corral's `module_class` and `model_config` for a spec; `None` for the default module.

    Raises:
        ConfigError: The class is no module, or a part of the spec is not served.
    """
    cls = spec.module_class
    if spec.load_state_path is not None:
        raise ConfigError("RLModuleSpec: load_state_path is not served: use Corral's `load_from`.")
    if spec.catalog_class is not None:
        raise ConfigError("RLModuleSpec: catalogs are not served: write an RLModule.")
    if cls is None or getattr(cls, "IS_DEFAULT", False):
        return None
    if not (isinstance(cls, type) and issubclass(cls, RLModule)):
        raise ConfigError(f"RLModuleSpec: module_class={cls!r} is no RLModule.")
    if issubclass(cls, SelfSupervisedLossAPI):
        raise ConfigError(f"{cls.__name__}: SelfSupervisedLossAPI is not served: add the loss in a learner class.")
    if not issubclass(cls, nn.Module):
        adapter: type[Module] = AdaptedRules
    elif cls.get_initial_state is not RLModule.get_initial_state:
        adapter = AdaptedMemoryModule
    else:
        adapter = AdaptedModule
    return {
        "module_class": adapter,
        "model_config": {"rl_module_class": cls, "rl_model_config": _as_dict(spec.model_config)},
    }


class DefaultRLModule:
    """A view of a default module of Corral, with RLlib's methods.

    Args:
        native: The module.
    """

    IS_DEFAULT = True

    def __init__(self, native: Module) -> None:
        """Keep the module."""
        self._native = native

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._native, name)

    def forward_inference(self, batch: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """Return the inputs of the distribution."""
        with torch.no_grad():
            obs = map_tree(torch.as_tensor, batch[_OBS])
            if self._native.has_memory():
                outputs, state = self._native.policy(obs, batch[_STATE_IN])  # type: ignore[call-arg]
                return {_INPUTS: outputs, _STATE_OUT: state}
            return {_INPUTS: self._native.policy(obs)}

    forward_exploration = forward_inference

    def compute_values(self, batch: Mapping[str, Any], embeddings: Any = None) -> Tensor:
        """Return values `[B]`."""
        return self._native.value(batch[_OBS])

    def get_initial_state(self) -> Any:
        """Return the state before an episode; empty without memory."""
        return self._native.initial_state() if self._native.has_memory() else {}

    def is_stateful(self) -> bool:
        """Return whether the module has memory."""
        return self._native.has_memory()

    get_state = TorchRLModule.get_state
    set_state = TorchRLModule.set_state


PPOTorchRLModule = DefaultPPOTorchRLModule = DefaultRLModule


def view_module(native: Any) -> Any:
    """Return the module of RLlib for a module of Corral: the user's own one, or a view of a default module."""
    if isinstance(native, (AdaptedModule, AdaptedMemoryModule, AdaptedRules)):
        return native.rl_module
    if (view := vars(native).get("_rllib_view")) is None:
        view = vars(native)["_rllib_view"] = DefaultRLModule(native)
    return view


def load_module(path: Path) -> Any:
    """Return the module in a directory of a checkpoint.

    Raises:
        CheckpointError: There is none, or it names what no checkpoint should.
    """
    try:
        description = json.loads((path / MODULE_FILE).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} holds no module: give the directory learner_group/learner/rl_module/<module id> of a checkpoint."
        ) from error
    module = import_checked(description["module_class"], path)(
        described_space(description["observation_space"]),
        described_space(description["action_space"]),
        decode(description["model_config"], path),
    )
    module.load_state_dict({name: torch.from_numpy(value) for name, value in load_file(path / WEIGHTS_FILE).items()})
    return view_module(module)
