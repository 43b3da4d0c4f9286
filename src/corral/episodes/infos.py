"""Infos as a vector env gives them: by key, an array over the sub-envs and beside it `_key`, which says who has one.

They are kept as they come, a dict for each row, and turned into columns or into one sub-env's dict when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Infos = Mapping[str, Any]
"""Values `[N, ...]` by key, or nested such dicts, with masks bool `[N]` under `_key`."""

FINAL = ("final_obs", "final_info")
"""Keys that same-step autoreset uses for what the reset took the place of."""


def copied(infos: Infos) -> dict[str, Any]:
    """Return infos with arrays of their own."""
    return {key: copied(value) if isinstance(value, Mapping) else np.array(value) for key, value in infos.items()}


def info_at(infos: Infos | None, env_index: int) -> dict[str, Any]:
    """Return one sub-env's info dict, without `final_obs` and `final_info`."""
    found: dict[str, Any] = {}
    for key, value in (infos or {}).items():
        if key in FINAL or (key.startswith("_") and key[1:] in infos):  # type: ignore[operator]  # not None: it has items
            continue
        if _has(infos, key, env_index):
            found[key] = info_at(value, env_index) if isinstance(value, Mapping) else _entry(value, env_index)
    return found


def final_info_at(infos: Infos | None, env_index: int) -> dict[str, Any]:
    """Return the info of a step that ended its episode, in whose place same-step autoreset put that of the reset."""
    return info_at((infos or {}).get("final_info"), env_index)


def infos_of_one(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the info of a single env in the form of a vector env of one."""
    infos: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, Mapping):
            infos[key] = infos_of_one(value)
        else:
            infos[key] = np.empty(1, object)
            infos[key][0] = value
        infos[f"_{key}"] = np.ones(1, np.bool_)
    return infos


def _entry(value: Any, env_index: int) -> Any:
    return value[env_index] if np.ndim(value) else value  # what is no array over the sub-envs is everyone's


def _has(infos: Infos | None, key: str, env_index: int) -> bool:
    mask = (infos or {}).get(f"_{key}")
    return True if mask is None else bool(mask[env_index])


def values_of(infos: Infos, key: str | tuple[str, ...], num_envs: int) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    """Return the values `[N, ...]` under a key, or a tuple of keys for nested infos, and who has one, bool `[N]`.

    Raises:
        KeyError: There is a group of infos under the key.
    """
    value: Any = infos
    mask: Any = True
    for name in (key,) if isinstance(key, str) else key:
        if not isinstance(value, Mapping) or name not in value:
            return None
        mask = mask & value.get(f"_{name}", np.True_)
        value = value[name]
    if isinstance(value, Mapping):
        raise KeyError(f"infos hold {sorted(value)} under {key!r}: ask for one of them, as a tuple of keys.")
    values = np.asarray(value) if np.ndim(value) else np.full(num_envs, value)
    return values, np.broadcast_to(mask, num_envs)
