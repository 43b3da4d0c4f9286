"""The layers of modules: layers that modules share, and layers that were replaced.

No optimizer and no runner would follow a layer or parameter that is replaced after the module was built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from corral.errors import ConfigError, nearest

SharedLayers = Mapping[str, Sequence[Sequence[str]]]
"""Groups of module ids by the path of the layers that the modules of each group share; see `MultiAgentSettings`."""


class ConstrainedLayer(nn.Module):
    """A layer whose weights must have a property, such as norm 1, which gradient steps do not keep."""

    def constrain(self) -> None:
        """Give the weights the property again; learners call it after each gradient step of the module."""
        raise TypeError(f"{type(self).__name__} must define constrain().")


CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Layers:
    """The layers and parameters of a module, as they were when this object was made."""

    def __init__(self, module: nn.Module) -> None:
        """Keep the module and what it holds now."""
        self._module = module
        self._held: list[dict[str, Any]] = [
            held
            for part in module.modules()
            for held in (part._modules, part._parameters)
            if held or isinstance(part, CONTAINERS)  # to leave out what is empty halves the time of `check_same`
        ]
        self._named = _named(module)
        self._ids = list(map(id, chain.from_iterable(map(dict.values, self._held))))
        self._kinds = {name: _kind(part) for name, part in self._named.items()}

    def check_same(self, module_id: str) -> None:
        """Check that the module still holds the same objects; cheap if it does.

        Args:
            module_id: Id of the module, for the message.

        Raises:
            ConfigError: A layer or parameter was replaced, added or removed.
        """
        if list(map(id, chain.from_iterable(map(dict.values, self._held)))) != self._ids:
            now = _named(self._module)
            names = {**self._named, **now}
            changed = [name for name in names if self._named.get(name) is not now.get(name)]
            self._refuse(f"module {module_id!r}", changed)

    def check_alike(self, where: str) -> None:
        """Check that layers have the same names and classes, and parameters the same names, shapes and dtypes.

        Args:
            where: Where they were changed, for the message.

        Raises:
            ConfigError: A layer or parameter has another kind, was added or was removed.
        """
        now = {name: _kind(part) for name, part in _named(self._module).items()}
        names = {**self._kinds, **now}
        if changed := [name for name in names if self._kinds.get(name) != now.get(name)]:
            self._refuse(where, changed)

    def _refuse(self, where: str, changed: Sequence[str]) -> NoReturn:
        parameters = [name for name in changed if isinstance(self._named.get(name), nn.Parameter)]
        raise ConfigError(
            f"{where}: {', '.join(parameters or changed)} of {type(self._module).__name__} was replaced, added or "
            "removed after the module was built. Optimizers and runners keep what the class built, so the change would "
            "not train or act. Build other layers in a class, with .rl_module(module_class=...); set weights in place, "
            "with `parameter.copy_(values)` under `torch.no_grad()`."
        )


def share_layers(module_id: str, module: nn.Module, others: Mapping[str, nn.Module], shared: SharedLayers) -> None:
    """Give a new module the parameters and buffers of the layers that it shares with other modules.

    Each module keeps layer objects of its own, with their hooks and their mode of training or evaluation; the tensors
    in them are the same. Target networks begin again as copies of the networks.

    Args:
        module_id: Id of the module.
        module: The module, before it has an optimizer.
        others: Modules that are there already, by module id.
        shared: The layers that modules share.

    Raises:
        ConfigError: A module has no such layers, or the layers are of other classes, shapes or dtypes.
    """
    given = False
    for path, groups in shared.items():
        for group in groups:
            if module_id not in group:
                continue
            layers = _layers_at(path, module_id, module)
            if (other := next((name for name in group if name in others), None)) is not None:
                _check_same_form(path, (module_id, layers), (other, _layers_at(path, other, others[other])))
                _take_tensors(module, layers, _layers_at(path, other, others[other]))
                given = True
    update_target = getattr(module, "update_target", None)
    if given and callable(update_target):  # the target was copied from layers that the module has no more
        with torch.no_grad():
            update_target(1.0)


def _layers_at(path: str, module_id: str, module: nn.Module) -> nn.Module:
    layers: nn.Module | None = dict(module.named_modules(remove_duplicate=False)).get(path)
    name = f"module {module_id!r} ({type(module).__name__})"
    if layers is None:
        children = [child for child, _ in module.named_children()]
        raise ConfigError(f"shared_layers: {name} has no layers {path!r}. {nearest(path, children)}")
    if not layers.state_dict():
        raise ConfigError(f"shared_layers: {path!r} of {name} has no parameters or buffers that could be shared.")
    return layers


def _check_same_form(path: str, here: tuple[str, nn.Module], there: tuple[str, nn.Module]) -> None:
    forms = []
    for _, layers in (here, there):
        buffers = dict(layers.named_buffers(remove_duplicate=False))
        forms.append({name: _kind(part) for name, part in {**_named(layers), **buffers}.items()})
    for name in (*forms[0], *forms[1]):
        if forms[0].get(name) != forms[1].get(name):
            where = f"{path}.{name}".rstrip(".")
            texts = [_described(form.get(name)) for form in forms]
            raise ConfigError(
                f"shared_layers: modules {here[0]!r} and {there[0]!r} cannot share {path!r}: {where} is {texts[0]} in "
                f"{here[0]!r} and {texts[1]} in {there[0]!r}. Give both the same model_config, or leave one out."
            )


def _described(kind: Any) -> str:
    if kind is None:
        return "missing"
    return kind.__name__ if isinstance(kind, type) else f"{list(kind[0])} {str(kind[1]).removeprefix('torch.')}"


def _take_tensors(module: nn.Module, layers: nn.Module, source: nn.Module) -> None:
    theirs = dict(source.named_parameters(remove_duplicate=False))
    given = {parameter: theirs[name] for name, parameter in layers.named_parameters(remove_duplicate=False)}
    for part in module.modules():  # all of them: a parameter of these layers may be tied to another place
        for name, parameter in part._parameters.items():
            if parameter in given:
                setattr(part, name, given[parameter])  # a recurrent layer keeps them in a list too, which this updates
    parts = dict(source.named_modules(remove_duplicate=False))
    for name, part in layers.named_modules(remove_duplicate=False):
        part._buffers = parts[name]._buffers  # a forward pass may assign a new tensor, which both layers then have


def _named(module: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_modules(remove_duplicate=False)),
    }


def _kind(part: nn.Module | Tensor) -> Any:
    return (part.shape, part.dtype) if isinstance(part, Tensor) else type(part)
