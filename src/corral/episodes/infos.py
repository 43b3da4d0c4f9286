"""Infos as a vector env gives them: by key, an array over the sub-envs, and under `_key` a mask of those that have one.

They are kept as they come, one dict for each row, and turned into columns or into the dict of one sub-env on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.errors import EpisodeError

Infos = Mapping[str, Any]
"""Values `[N, ...]` by key, or nested such dicts, with masks bool `[N]` under `_key`."""

FINAL = ("final_obs", "final_info")
"""Keys under which same-step autoreset gives the data of the final step, whose place the reset took."""


class NotSent(dict[Any, Any]):
    """Takes the place of infos or notes that stayed in their runner; reading them is an error."""

    def check(self) -> None:
        """Refuse to be read.

        Raises:
            EpisodeError: Always; the message names the remedy.
        """
        raise EpisodeError(
            "the infos and the notes of callbacks stayed in the runner, because nobody was to read them here: ask for "
            "them with SampleRequest(..., with_infos=True), or set READS_INFOS = True in the class of the algorithm."
        )


def check_sent(found: Mapping[Any, Any]) -> None:
    """Refuse to read infos or notes that stayed in their runner."""
    if isinstance(found, NotSent):
        found.check()


def copied(infos: Infos) -> dict[str, Any]:
    """Return infos with copies of the arrays."""
    return {key: copied(value) if isinstance(value, Mapping) else np.array(value) for key, value in infos.items()}


def info_at(infos: Infos | None, env_index: int) -> dict[str, Any]:
    """Return the info dict of one sub-env, without `final_obs` and `final_info`."""
    found: dict[str, Any] = {}
    for key, value in (infos or {}).items():
        if key in FINAL or (key.startswith("_") and key[1:] in infos):  # type: ignore[operator]  # not None: it has items
            continue
        if _has(infos, key, env_index):
            found[key] = info_at(value, env_index) if isinstance(value, Mapping) else _entry(value, env_index)
    return found


def final_info_at(infos: Infos | None, env_index: int) -> dict[str, Any]:
    """Return the info of the step that ended an episode, where same-step autoreset put the info of the reset."""
    return info_at((infos or {}).get("final_info"), env_index)


def infos_of_one(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the info dict of a single env in the form that a vector env with one sub-env gives."""
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
    return value[env_index] if np.ndim(value) else value  # a value that is no array applies to all sub-envs


def _has(infos: Infos | None, key: str, env_index: int) -> bool:
    mask = (infos or {}).get(f"_{key}")
    return True if mask is None else bool(mask[env_index])


def values_of(infos: Infos, key: str | tuple[str, ...], num_envs: int) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    """Return the values `[N, ...]` under a key, and bool `[N]` of the sub-envs that have one; `None` without the key.

    Args:
        infos: Infos of a vector env.
        key: A key, or a tuple of keys for nested infos.
        num_envs: N.

    Raises:
        KeyError: The key leads to a group of infos, not to a value.
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
