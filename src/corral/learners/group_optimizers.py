"""Optimizers of one module: one for all its groups of parameters, or one of its own for each group."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from corral.errors import ConfigError
from corral.learners.optimizers import ModuleOptimizer, check_disjoint
from corral.learners.settings import LearningSpec
from corral.modules.module import Module


def make_optimizer(groups: Mapping[str, list[nn.Parameter]], spec: LearningSpec) -> ModuleOptimizer | GroupOptimizers:
    """Return the optimizer of a module with these groups of parameters.

    Raises:
        ConfigError: The spec names other groups, or an optimizer refuses the parameters.
    """
    classes, configs = spec.optimizer_class, spec.optimizer_config
    if not isinstance(classes, Mapping):
        return ModuleOptimizer(groups, classes, configs, spec.lr_scheduler)
    if classes.keys() != groups.keys():
        raise ConfigError(
            f"optimizer: it names the groups of parameters {sorted(classes)}, and `parameter_groups` of the module "
            f"names {sorted(groups)}: give an optimizer for each group."
        )
    return GroupOptimizers(
        {
            name: ModuleOptimizer({name: group}, classes[name], configs.get(name, {}), spec.lr_scheduler)
            for name, group in groups.items()
        }
    )


def make_named_optimizer(name: str, module: Module, spec: LearningSpec) -> ModuleOptimizer:
    """Return the optimizer of a further loss; all its parameters are one group, named like the loss.

    Raises:
        ConfigError: The optimizer refuses the parameters.
    """
    parameters = module.parameters() if spec.parameters is None else spec.parameters(module)
    assert not isinstance(spec.optimizer_class, Mapping)
    return ModuleOptimizer({name: parameters}, spec.optimizer_class, spec.optimizer_config, spec.lr_scheduler)


class GroupOptimizers:
    """One `ModuleOptimizer` for each group of parameters, in the place of one for all groups.

    Attributes:
        groups: All parameters, by group.
        trainable: Parameters with `requires_grad`, by group.
        steppable: The tensors that the optimizers step, by group.
        torch_optimizer: The optimizer of torch of the first group; `None` without groups.
        fingerprint: Checksum of which parameters are trainable.
        made_for: Names of the optimizers and shapes of all parameters, as plain data.
    """

    def __init__(self, optimizers: Mapping[str, ModuleOptimizer]) -> None:
        """Keep the optimizers, by group.

        Raises:
            ConfigError: A parameter is in two groups.
        """
        self._optimizers = dict(optimizers)
        self.groups = {name: optimizer.groups[name] for name, optimizer in optimizers.items()}
        check_disjoint(self.groups)
        self.torch_optimizer = next((each.torch_optimizer for each in optimizers.values()), None)

    @property
    def trainable(self) -> dict[str, list[nn.Parameter]]:
        return {name: optimizer.trainable[name] for name, optimizer in self._optimizers.items()}

    @property
    def steppable(self) -> dict[str, list[nn.Parameter]]:
        return {name: optimizer.steppable[name] for name, optimizer in self._optimizers.items()}

    @property
    def fingerprint(self) -> int:
        return zlib.crc32(repr([optimizer.fingerprint for optimizer in self._optimizers.values()]).encode())

    @property
    def made_for(self) -> list[Any]:
        parts = {name: optimizer.made_for for name, optimizer in self._optimizers.items()}
        names = ", ".join(f"{kind} for {name!r}" for name, (kind, _) in parts.items())
        return [names, [shape for _, shapes in parts.values() for shape in shapes]]

    def sync(self) -> None:
        """Apply what happened to the parameters since the last call; see `ModuleOptimizer.sync`."""
        for optimizer in self._optimizers.values():
            optimizer.sync()

    def keep_apart(self, parameters: set[nn.Parameter]) -> None:
        """Join these parameters in no vector from now on; see `ModuleOptimizer.keep_apart`."""
        for optimizer in self._optimizers.values():
            optimizer.keep_apart(parameters)

    def set_lr(self, lr: float | Mapping[str, float]) -> None:
        """Set the learning rate of all groups, or one per group."""
        for name, optimizer in self._optimizers.items():
            optimizer.set_lr(lr[name] if isinstance(lr, Mapping) else lr)

    def zero_grad(self, names: Iterable[str] | None = None) -> None:
        """Set the gradients of groups to zero in place, of all groups by default."""
        for name in self._optimizers if names is None else names:
            self._optimizers[name].zero_grad()

    def step(self, names: Collection[str] | None = None) -> None:
        """Step the parameters of groups, of all groups by default; other parameters and their state stay."""
        for name in self._optimizers if names is None else names:
            self._optimizers[name].step()

    def end_update(self) -> dict[str, float]:
        """Return the learning rate of each group in this update; schedulers of groups that moved set the next ones."""
        return {name: optimizer.end_update()[name] for name, optimizer in self._optimizers.items()}

    # State, with the parameters numbered through all groups.

    def _offsets(self) -> dict[str, int]:
        offsets, start = {}, 0
        for name, group in self.groups.items():
            offsets[name] = start
            start += len(group)
        return offsets

    def state_dict(self) -> dict[str, Any]:
        """Return `{"state": {index of a parameter: state}, "groups": what else each optimizer keeps}`."""
        states: dict[int, Any] = {}
        others: dict[str, Any] = {}
        for name, start in self._offsets().items():
            others[name] = dict(self._optimizers[name].state_dict())
            states |= {start + index: state for index, state in others[name].pop("state").items()}
        return {"state": states, "groups": others}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the settings of these optimizers stay."""
        for name, start in self._offsets().items():
            stop = start + len(self.groups[name])
            states = {index - start: state for index, state in state_dict["state"].items() if start <= index < stop}
            self._optimizers[name].load_state_dict({**state_dict["groups"][name], "state": states})

    def describe_state(self, describe: Callable[[Any], str]) -> list[dict[str, str]] | None:
        """Return what the state of each parameter looks like after a step; see `ModuleOptimizer.describe_state`."""
        found: list[dict[str, str]] = []
        for optimizer in self._optimizers.values():
            if (part := optimizer.describe_state(describe)) is None:
                return None
            found += part
        return found
