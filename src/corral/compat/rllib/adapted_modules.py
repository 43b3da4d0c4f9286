"""The modules of Corral that call a module of RLlib, and the views of Corral's modules with RLlib's methods.

Their settings are `rl_module_class` and `rl_model_config`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import operator
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.compat.rllib.carried_actions import acts_alike, carried_outputs, names_distribution, own_distribution
from corral.compat.rllib.distributions import distribution_class
from corral.compat.rllib.encoding import decode, import_checked
from corral.compat.rllib.missing import find
from corral.compat.rllib.module_files import (
    MODULE_FILE,
    check_files,
    has_own_weights,
    own_weights,
    read_weights,
    weights_file,
    write_module,
)
from corral.compat.rllib.module_parts import ActorCriticEncoder, PolicyHead, ValueHead
from corral.compat.rllib.modules import (
    MultiRLModule,
    MultiRLModuleSpec,
    RLModule,
    RLModuleSpec,
    TorchRLModule,
    as_dict,
)
from corral.core.paths import resolve_path
from corral.core.space_descriptions import described_space
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError
from corral.modules.heuristic import HeuristicModule
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.networks import example_obs
from corral.modules.q_module import QModule

_OBS, _ACTIONS, _INPUTS, _VALUES = "obs", "actions", "action_dist_inputs", "vf_preds"
_EMBEDDINGS, _STATE_IN, _STATE_OUT = "embeddings", "state_in", "state_out"


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
        if not hasattr(self.rl_module, "compute_values"):
            raise ConfigError(
                f"{type(self.rl_module).__name__}.compute_values: the algorithm learns values, and the module lacks "
                "this method: derive the class from ValueFunctionAPI too, and define compute_values(batch, embeddings)."
            )
        values: Tensor = self.rl_module.compute_values({_OBS: fresh(obs)})
        return values

    def policy_and_value(
        self, obs: Tree, state: Tree = None, mask: Tensor | None = None, critic_obs: Tree = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values of one forward pass for learning."""
        batch = {_OBS: fresh(obs)}
        outputs = self.forward_train(batch)
        inputs = _inputs(self.rl_module, outputs)
        if self._carried is not None:
            inputs = self._carried.pad(inputs)
        if _VALUES in outputs:
            return inputs, outputs[_VALUES]
        return inputs, self.rl_module.compute_values(batch, embeddings=outputs.get(_EMBEDDINGS))

    def policy_for_learning(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> Tensor:
        """Return what `forward_train` returns as inputs of the distribution."""
        inputs = _inputs(self.rl_module, self.rl_module.forward_train({_OBS: fresh(obs)}))
        return inputs if self._carried is None else self._carried.pad(inputs)

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
        super().__init__(
            observation_space, action_space, {"max_seq_len": model_config["rl_model_config"].get("max_seq_len")}
        )
        self.rl_module = _build(model_config, observation_space, action_space)
        obs = map_tree(lambda leaf: leaf.unsqueeze(1), example_obs(observation_space))
        state = map_tree(lambda part: torch.stack([part, part]), self.initial_state())
        _refuse_own_distribution(self.rl_module, acts_alike(self.rl_module, {_OBS: obs, _STATE_IN: state}))

    def initial_state(self) -> Tree:
        return map_tree(torch.as_tensor, self.rl_module.get_initial_state())

    def policy(self, obs: Tree, state: Tree = None) -> Any:
        """Return inputs of the distribution, and the next state."""
        batch = {_OBS: map_tree(lambda leaf: leaf.unsqueeze(1), obs), _STATE_IN: state}
        outputs = self.rl_module.forward_exploration(batch)
        _refuse_actions(self.rl_module, outputs)
        return _inputs(self.rl_module, outputs).squeeze(1), outputs[_STATE_OUT]

    def value(self, obs: Tree, state: Tree = None) -> Tensor:
        batch = {_OBS: map_tree(lambda leaf: leaf.unsqueeze(1), obs), _STATE_IN: state}
        values: Tensor = self.rl_module.compute_values(batch)
        return values.squeeze(1)

    def policy_and_value(
        self, obs: Tree, state: Tree = None, mask: Tensor | None = None, critic_obs: Tree = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values for the steps of sequences that a mask selects."""
        assert mask is not None
        batch = {_OBS: fresh(obs), _STATE_IN: state}
        outputs = self.rl_module.forward_train(batch)
        values = self.rl_module.compute_values(batch, embeddings=outputs.get(_EMBEDDINGS))
        return _inputs(self.rl_module, outputs)[mask], values[mask]

    def policy_for_learning(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> Tensor:
        """Return inputs of the distribution for the steps of sequences that a mask selects."""
        outputs = self.rl_module.forward_train({_OBS: fresh(obs), _STATE_IN: state})
        return _inputs(self.rl_module, outputs)[mask]


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
        example = {self.module_id: {_OBS: example_obs(observation_space)}}
        _refuse_own_distribution(self.rl_module, acts_alike(self.multi, example, self.module_id))
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
        _refuse_actions(self.rl_module, outputs)
        return _inputs(self.rl_module, outputs)

    def value(self, obs: Tree) -> Tensor:
        values: Tensor = self.rl_module.compute_values({_OBS: fresh(obs)})
        return values

    def policy_and_value(
        self, obs: Tree, state: Tree = None, mask: Tensor | None = None, critic_obs: Tree = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs of the distribution and values."""
        outputs = self.multi.forward_train({self.module_id: {_OBS: fresh(obs)}})[self.module_id]
        values = outputs[_VALUES] if _VALUES in outputs else self.value(obs)
        return _inputs(self.rl_module, outputs), values

    def policy_for_learning(self, obs: Tree, state: Tree = None, mask: Tensor | None = None) -> Tensor:
        """Return what `forward_train` returns as inputs of the distribution."""
        return _inputs(self.rl_module, self.multi.forward_train({self.module_id: {_OBS: fresh(obs)}})[self.module_id])


class AdaptedRules(HeuristicModule):
    """Calls a module of RLlib without weights, which returns actions."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        """Build the module of RLlib."""
        super().__init__(observation_space, action_space, {})
        self.rl_module = _build(model_config, observation_space, action_space)

    def choose_actions(self, obs: Tree, rng: np.random.Generator) -> NDArray[Any]:
        """Return the actions of `forward_inference`."""
        return np.asarray(self.rl_module.forward_inference({_OBS: obs})[_ACTIONS])


def _refuse_own_distribution(module: Any, acts_alike: bool) -> None:
    if not acts_alike:
        raise ConfigError(
            f"{type(module).__name__}: forward_inference and forward_exploration return different {_INPUTS!r}, which "
            "is served for modules without memory and without parts in common with others: return the same."
        )
    if names_distribution(module, RLModule):
        raise ConfigError(
            f"{type(module).__name__}: action_dist_cls, or a method that names another class, is served for modules "
            "without memory and without parts in common with others: leave it out."
        )


def _refuse_actions(module: Any, outputs: Mapping[str, Any]) -> None:
    if _ACTIONS in outputs:
        raise ConfigError(
            f"{type(module).__name__}: a forward pass returned {_ACTIONS!r}: a module chooses its actions itself only "
            "without memory and without parts in common with others: leave them out of the outputs."
        )


def _inputs(module: Any, outputs: Mapping[str, Any]) -> Tensor:
    if _INPUTS not in outputs:
        raise ConfigError(f"{type(module).__name__}: a forward pass returned no {_INPUTS!r}, but {sorted(outputs)}.")
    inputs: Tensor = outputs[_INPUTS]
    return inputs


def loading_settings(spec: RLModuleSpec) -> dict[str, Any]:
    """Return Corral's `load_from` for the checkpoint of a module that a spec names.

    A module of a user may have more weights than the checkpoint, as in RLlib: these start as the class makes them.

    Raises:
        CheckpointError: `load_state_path` is no directory of a module.
    """
    if spec.load_state_path is None:
        return {}
    settings: dict[str, Any] = {"load_from": str(weights_file(spec.load_state_path))}
    return settings | ({"load_parts": names} if (names := own_weights(spec.load_state_path)) else {})


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
        "model_config": {"rl_module_class": cls, "rl_model_config": as_dict(spec.model_config)},
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
        spec: Corral's spec of the module, where it comes from there; otherwise `None`.
    """

    IS_DEFAULT = True
    inference_only = learner_only = False
    framework = "torch"

    def __init__(self, native: Module) -> None:
        """Keep the module."""
        self._native = native
        self.model_config: dict[str, Any] = {}
        self.spec: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self._native, "RLModule", name)

    config = RLModule.config

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

    def save_to_path(self, path: Any = None, **settings: Any) -> str:
        """Write the module, and return its directory; `None` is a new directory for temporary files."""
        check_files(settings)
        if self.spec is None:
            raise ConfigError("RLModule.save_to_path: use algo.get_module(module_id).save_to_path(path).")
        path = tempfile.mkdtemp(prefix="rl_module_") if path is None else path
        directory = resolve_path(path, "the module").absolute()
        spec, native = self.spec, self._native
        spaces = native.observation_space, native.action_space
        write_module(
            directory,
            spec.module_class,
            spec.model_config,
            *spaces,
            {name: value.cpu().numpy() for name, value in native.state_dict().items()},
        )
        return str(directory)

    def restore_from_path(self, path: Any, **settings: Any) -> None:
        """Set the weights to the ones in a directory of a module.

        Raises:
            CheckpointError: There is no such directory.
        """
        check_files(settings)
        self._native.load_state_dict(read_weights(path, is_own=False))


def view_module(native: Any) -> Any:
    """Return the module of RLlib for a module of Corral: the user's own one, or a view of a default module."""
    if isinstance(native, (AdaptedModule, AdaptedMemoryModule, AdaptedPart, AdaptedRules)):
        return native.rl_module
    return native.view_as(DefaultRLModule)


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
