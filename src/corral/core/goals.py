"""What envs with goals compute for goals that were not theirs, for hindsight experience replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
GOAL_KEYS = ("observation", ACHIEVED, DESIRED)
"""Keys of the observations of envs with goals."""

GoalFunction = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""Function of achieved goals and desired goals, both `[M, ...]`, that returns numbers `[M]`."""


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class GoalFunctions:
    """The functions of an env.

    Attributes:
        rewards_of: Rewards of steps that led to achieved goals where other goals were desired, float `[M]`.
        terminates: Whether these steps terminate their episodes, bool `[M]`; `None` if goals do not decide that.
        close: Called when the functions are not needed any more.
    """

    rewards_of: GoalFunction
    terminates: GoalFunction | None = None
    close: Callable[[], None] = _do_nothing
