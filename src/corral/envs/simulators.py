"""States of simulators that are not written in Python: MuJoCo's integration state, and the system state of ALE.

Nothing is imported here: an env that has a simulator has imported its package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_CONSTANT_PARTS = ("tex_", "mesh_", "hfield_", "skin_", "bvh_", "oct_", "flex_", "key_")
"""Beginnings of the names of the large parts of a model of MuJoCo, which are not saved: no env changes them."""


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__.partition(".")[0] in ("mujoco", "ale_py") else ""


def is_simulator(value: Any) -> bool:
    """Return whether a value is a simulator whose state can be read."""
    return _kind(value) in _KINDS


def get_state(value: Any) -> dict[str, Any]:
    """Return the state of a simulator as plain data."""
    kind = _kind(value)
    return {"kind": kind, **_KINDS[kind][0](value)}


def fits(value: Any, state: Mapping[str, Any]) -> bool:
    """Return whether a simulator can take a state."""
    return is_simulator(value) and _kind(value) == state["kind"] and _KINDS[state["kind"]][2](value, state)


def set_state(value: Any, state: Mapping[str, Any]) -> None:
    """Let a simulator continue from a state that fits."""
    _KINDS[state["kind"]][1](value, state)


def _arrays(value: Any) -> dict[str, Any]:
    names = [name for name in dir(value) if not name.startswith("_")]
    found = {name: getattr(value, name) for name in names}
    return {name: part for name, part in found.items() if isinstance(part, np.ndarray)}


def _arrays_fit(value: Any, state: Mapping[str, Any]) -> bool:
    here = _arrays(value)
    return all(name in here and here[name].shape == part.shape for name, part in state["arrays"].items())


def _set_arrays(value: Any, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        if array.size:
            getattr(value, name)[...] = array


# MuJoCo. What an env reads between two steps, such as the places of bodies, belongs to the step before, and cannot be
# computed from the integration state. So all results of that step are saved too, if their memory has a fixed size.


def _get_data(data: Any) -> dict[str, Any]:
    mujoco: Any = sys.modules["mujoco"]
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, spec), np.float64)
    mujoco.mj_getState(data.model, data, state, spec)
    first = data.qpos.ctypes.data
    fixed = {n: a.copy() for n, a in _arrays(data).items() if 0 <= a.ctypes.data - first < data.nbuffer}
    return {"integration": state, "arrays": fixed}


def _set_data(data: Any, state: Mapping[str, Any]) -> None:
    mujoco: Any = sys.modules["mujoco"]
    mujoco.mj_setState(data.model, data, state["integration"], mujoco.mjtState.mjSTATE_INTEGRATION)
    _set_arrays(data, state["arrays"])


def _get_model(model: Any) -> dict[str, Any]:
    arrays = {
        name: array.copy()
        for name, array in _arrays(model).items()
        if array.dtype.kind == "f" and not name.startswith(_CONSTANT_PARTS)
    }
    options = {name: getattr(model.opt, name) for name in dir(model.opt) if not name.startswith("_")}
    numbers = {name: value for name, value in options.items() if isinstance(value, (int, float))}
    return {"arrays": arrays, "numbers": numbers, "options": {n: a.copy() for n, a in _arrays(model.opt).items()}}


def _set_model(model: Any, state: Mapping[str, Any]) -> None:
    _set_arrays(model, state["arrays"])
    _set_arrays(model.opt, state["options"])
    for name, value in state["numbers"].items():
        setattr(model.opt, name, value)


# The Arcade Learning Environment.


def _get_game(game: Any) -> dict[str, Any]:
    return {"system": game.cloneState(include_rng=True).serialize()}


def _set_game(game: Any, state: Mapping[str, Any]) -> None:
    game.restoreState(sys.modules["ale_py"].ALEState(state["system"]))


_KINDS: dict[str, Any] = {
    "MjData": (_get_data, _set_data, _arrays_fit),
    "MjModel": (_get_model, _set_model, _arrays_fit),
    "ALEInterface": (_get_game, _set_game, lambda game, state: isinstance(state["system"], bytes)),
}
