"""Infos: the info dicts of the lanes that a row of observations came with, exactly as the sub-envs gave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import copy_nested
from corral.errors import EpisodeError

FINAL = ("final_obs", "final_info")
"""Keys under which same-step autoreset gives the data of the final step, whose place the reset took."""


@dataclass(slots=True)
class Infos:
    """Info dicts of one row, by lane; a lane without an info has an empty one.

    Attributes:
        of_lanes: Infos that came with the observations.
        final: Infos of steps that ended an episode, where same-step autoreset put the info of the reset in `of_lanes`.
    """

    of_lanes: dict[int, dict[str, Any]]
    final: dict[int, dict[str, Any]] = field(default_factory=dict)

    def at(self, lane: int) -> Any:
        """Return the info dict that came with the observation of a lane."""
        return copy_info(self.of_lanes.get(lane, {}))

    def of_step(self, lane: int) -> Any:
        """Return the info dict that the step of a lane gave."""
        return copy_info(self.final.get(lane, self.of_lanes.get(lane, {})))


def copy_info(info: Any) -> Any:
    """Return a copy of an info dict; infos of another type, which episodes built by hand may have, stay as they are."""
    return dict(info) if isinstance(info, Mapping) else info


def has_info(info: Any) -> bool:
    """Return whether an info says something: it is not `None`, and no empty dict."""
    return bool(info) if isinstance(info, Mapping) else info is not None


class NotSent(dict[Any, Any]):
    """Takes the place of infos or notes that stayed in their runner; reading them is an error."""

    def check(self) -> None:
        """Refuse to be read.

        Raises:
            EpisodeError: Always; the message names the remedy.
        """
        raise EpisodeError(
            "infos and notes of callbacks stay in the runner unless they are asked for: ask for them with "
            "SampleRequest(..., with_infos=True), or set READS_INFOS = True in the class of the algorithm."
        )


def check_sent(found: Mapping[Any, Any]) -> None:
    """Refuse to read infos or notes that stayed in their runner."""
    if isinstance(found, NotSent):
        found.check()


def split_infos(
    by_env: Mapping[int, Mapping[str, Any]], ended: NDArray[np.bool_] | None = None, *, are_of_steps: bool = False
) -> Infos:
    """Return copies of the infos of a vector env, which may use its dicts and arrays again.

    Args:
        by_env: Infos by index of the sub-env.
        ended: Sub-envs that same-step autoreset has reset, bool `[N]`.
        are_of_steps: Whether infos without a `final_info` are of the step that ended the episode, not of the reset.
    """
    infos = Infos({i: copy_nested(dict(info)) for i, info in by_env.items()})
    for i in () if ended is None else np.flatnonzero(ended).tolist():
        given = infos.of_lanes.get(i, {})
        others = {key: value for key, value in given.items() if key not in FINAL}
        of_step = others if are_of_steps else {}
        infos.final[i] = given.get("final_info", of_step)
        infos.of_lanes[i] = {} if infos.final[i] is others else others
    return infos


def value_at(info: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Return a tuple of the value under nested keys of an info dict, or an empty tuple if there is none.

    Raises:
        KeyError: The keys lead to a group of infos, not to a value.
    """
    value: Any = info
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return ()
        value = value[key]
    if isinstance(value, Mapping):
        raise KeyError(f"infos hold {sorted(value, key=str)} under {keys}: ask for one of them, as a tuple of keys.")
    return (value,)


def stacked(values: list[Any], default: Any) -> NDArray[Any]:
    """Return values `[B]` as an array `[B, ...]`, of a dtype that can hold the default too.

    Numbers, and arrays of one shape, give an array of numbers. Anything else gives an array of objects.
    """
    try:
        array = np.array([*values, np.broadcast_to(default, np.shape(values[0]))])
    except ValueError:  # entries of several shapes
        array = np.empty(0, object)
    if array.dtype.kind in "biufc":
        return array[:-1]
    objects = np.empty(len(values), object)
    for index, value in enumerate(values):
        objects[index] = value
    return objects
