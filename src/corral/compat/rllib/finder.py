"""The finder that answers every import of `ray.rllib` and of what is below it.

Served modules are made when they are imported, and their names are imported when they are first used: a script that
imports `PPOConfig` loads what PPO needs, and nothing else. The rest of `ray` stays what is installed; if nothing is, a
stub serves the part that scripts need (see `ray_stub.py`).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from corral.compat.rllib.ray_stub import StubFinder
from corral.compat.rllib.table import (
    EXTRA,
    FROM_RAY,
    MODULES,
    MOVED,
    entries,
    home_module,
    is_served,
    open_homes,
    public_names,
    why_not_served,
)
from corral.compat.rllib.tune_hook import hook_tune
from corral.errors import InstallationError, NotServedError, UnknownAttributeError, nearest_name

ROOT = "ray.rllib"
SETUP = "corral.compat.rllib:install"
RAY_HOOK = "corral.compat.rllib.ray_hook.add_setup"


class ServedModule(ModuleType):
    """A module at a path of RLlib, whose names are objects of Corral."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # what `from module import *` imports
            return [known for known in dir(self) if not known.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _find(_below_root(self.__name__), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        module = _below_root(self.__name__)
        found = [name for home in open_homes(module) for name in public_names(home_module(home))]
        return sorted({*super().__dir__(), *entries(module), *found})


class _ForwardedModule(ModuleType):
    """A module at the path that it has in an older version; the names are in the module of today."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{ROOT}.{_moved(_below_root(self.__name__))}"), name)


class RLlibFinder(MetaPathFinder, Loader):
    """Finds the modules of `ray.rllib`: served ones, and examples in the files of the installed Ray.

    Raises:
        NotServedError: There is no such module or name; the message says what it belongs to, and what to use instead.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        module = _below_root(fullname)
        if is_served(module):
            spec = ModuleSpec(fullname, self, is_package=True)
            spec.submodule_search_locations = []
            return spec
        if (moved := _moved(module)) is not None:
            _ray_file(moved)
            return ModuleSpec(fullname, self, is_package=True)
        if any(module == known or module.startswith(f"{known}.") for known in FROM_RAY):
            return _file_spec(fullname, _ray_file(module))
        parent, _, name = module.rpartition(".")
        raise _not_served(parent, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        served = is_served(_below_root(spec.name))
        return (ServedModule if served else _ForwardedModule)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are found when they are used."""


def install() -> None:
    """Serve `ray.rllib` in this process, in the workers of Corral, and in Ray's workers.

    Call it before the first import of `ray.rllib`, and before `ray.init`. A second call does nothing.

    Raises:
        InstallationError: RLlib itself is imported already.
    """
    if any(isinstance(finder, RLlibFinder) for finder in sys.meta_path):
        return
    if ROOT in sys.modules:
        raise InstallationError(
            f"{ROOT} is imported already, from {getattr(sys.modules[ROOT], '__file__', 'its own files')}: call "
            "corral.compat.rllib.install() before the first import of ray.rllib, in a new process or notebook kernel."
        )
    sys.meta_path.insert(0, RLlibFinder())
    sys.meta_path.append(StubFinder())  # asked only for what no other finder knows
    hook_tune()
    _install_in_workers()


def _install_in_workers() -> None:
    """Let workers install the finder before they unpickle anything.

    Processes of Corral's engines call what `CORRAL_WORKER_SETUP` names. Ray asks its own variable in `ray.init`, also
    when the script or Tune calls it.
    """
    setups = [name for name in os.environ.get("CORRAL_WORKER_SETUP", "").split(",") if name]
    if SETUP not in setups:
        os.environ["CORRAL_WORKER_SETUP"] = ",".join([*setups, SETUP])
    os.environ.setdefault("RAY_RUNTIME_ENV_HOOK", RAY_HOOK)


def _find(module: str, name: str) -> Any:
    """Return the object that a name of a served module stands for."""
    home, original = entries(module).get(name, (None, name))
    if home is None:
        for candidate in open_homes(module):
            found = home_module(candidate)
            if name in public_names(found):
                return getattr(found, name)
        raise UnknownAttributeError(str(_not_served(module, name)))
    try:
        return getattr(home_module(home), original)
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{home}":
            raise
        raise _not_served(module, name) from None


def _not_served(module: str, name: str) -> NotServedError:
    """Return the error for a name of a module, or for a module below it."""
    path = f"{module}.{name}".strip(".")
    where = f"{ROOT}.{module}".rstrip(".")
    if name in entries(module):
        hint = "It belongs to a part that is not built."
    elif not (hint := why_not_served(path)):
        known = {*dir(importlib.import_module(where)), *MODULES} if module in MODULES else MODULES
        near = nearest_name(name, known) or nearest_name(path, MODULES)
        hint = f"Did you mean {near!r}?" if near else "No served name is like it."
    # The error has no module name: the import system would replace the message of one that has.
    return NotServedError(f"{where} has no {name!r} in Corral. {hint}")


def _below_root(fullname: str) -> str:
    return fullname.removeprefix(ROOT).removeprefix(".")


def _moved(module: str) -> str | None:
    """Return where a module of an older version is now, or `None` if it has not moved."""
    for old in sorted(MOVED, key=len, reverse=True):
        if module == old or module.startswith(f"{old}."):
            return MOVED[old] + module.removeprefix(old)
    return None


def _ray_file(module: str) -> Path:
    """Return the file of a module in the installed Ray.

    Raises:
        NotServedError: Ray is not installed, or has no such file.
    """
    if module not in FROM_RAY and why_not_served(module):
        raise _not_served(*module.rpartition(".")[::2])
    places = [Path(place, "rllib", *module.split(".")) for place in sys.modules["ray"].__path__]
    if not places:
        raise NotServedError(f"{ROOT}.{module} is loaded from the files of Ray, which is not installed: {EXTRA}.")
    for place in places:
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.exists():
                return file
        if place.is_dir():
            return place
    raise NotServedError(f"{ROOT}.{module} is loaded from the files of Ray, and the installed Ray has no {places[0]}.")


def _file_spec(fullname: str, file: Path) -> ModuleSpec | None:
    if file.is_dir():  # a directory without __init__.py
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(file)]
        return spec
    is_package = file.name == "__init__.py"
    places = [str(file.parent)] if is_package else None
    return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=places)
