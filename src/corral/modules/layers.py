"""Notices layers and parameters of a module that were replaced, which no optimizer and no runner would follow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

from torch import nn

from corral.errors import ConfigError

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
        self._named, self._ids = _named(module), self._current_ids()
        self._kinds = {name: _kind(part) for name, part in self._named.items()}

    def _current_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._held))))

    def check_same(self, where: str) -> None:
        """Check that the module still holds the same objects; cheap if it does.

        Args:
            where: Where they were found, for the message.

        Raises:
            ConfigError: A layer or parameter was replaced, added or removed.
        """
        if self._current_ids() != self._ids:
            now = _named(self._module)
            names = {**self._named, **now}
            self._refuse(where, [name for name in names if self._named.get(name) is not now.get(name)])

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


def _named(module: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_modules(remove_duplicate=False)),
    }


def _kind(part: nn.Module | nn.Parameter) -> Any:
    return (part.shape, part.dtype) if isinstance(part, nn.Parameter) else type(part)
