"""A number of the results, found by the name that a user gave."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from corral.core.familiar_names import meaning_of
from corral.errors import CorralError, nearest

ALIASES = {"num_env_steps": "num_env_steps_sampled_lifetime", "time_s": "time_total_s"}
# A key that a callback logs may take a few iterations to appear for the first time.
LATE_KEY_ITERATIONS = 20


class NamedNumber:
    """A number of the results, by its name.

    A name is a path in the result (`env_runners/episode_return_mean`), a name at its top level (`training_iteration`),
    a name in `env_runners` (`episode_return_mean`), or a name in `ALIASES`.
    """

    def __init__(self, name: str, what: str, error: type[CorralError], *, late_keys: bool) -> None:
        """Store the name.

        Args:
            name: The name.
            what: Words for messages, such as "stop criterion".
            error: The error to raise.
            late_keys: Whether callbacks may log keys that are missing from the first results.
        """
        self._name, self._what, self._error = name, what, error
        self._num_results_left = LATE_KEY_ITERATIONS if late_keys else 1

    def check_known(self, flat: Mapping[str, Any]) -> None:
        """Refuse the name before there is a result, given all numbers of the results that are known then.

        Raises:
            CorralError: The name is not among them, or is no number; of the class that `__init__` received.
        """
        value = find_value(flat, self._name)
        if value is None:
            raise self._missing(flat)
        self._check_number(value)

    def find(self, flat: Mapping[str, Any]) -> float | None:
        """Return the number in a flat result, or `None` if it is missing from one of the first results.

        Raises:
            CorralError: The name is not in the result, or is no number; of the class that `__init__` received.
        """
        value = find_value(flat, self._name)
        if value is None:
            if self._name.startswith("evaluation/") and flat.get("evaluation/fresh") is False:
                return None  # what user code logs in evaluation comes with the first round
            self._num_results_left -= 1
            if self._num_results_left > 0:
                return None
            raise self._missing(flat)
        self._check_number(value)
        return float(value)

    def _missing(self, flat: Mapping[str, Any]) -> CorralError:
        numbers = [path for path, value in flat.items() if isinstance(value, Real)]
        hint = meaning_of(self._name, "RESULTS", flat) or nearest(self._name, [*numbers, *ALIASES])
        return self._error(f"{self._what} {self._name!r} does not appear in the result. {hint}")

    def _check_number(self, value: Any) -> None:
        if not isinstance(value, Real):
            raise self._error(f"{self._what} {self._name!r} is {value!r} in the result, which is not a number.")


def check_is_measured(name: str | None, what: str, config: Any, error: type[CorralError]) -> None:
    """Refuse the name of a number of evaluation if no round is played, and of training episodes if there are none.

    Raises:
        CorralError: The number is never measured; of the class `error`.
    """
    if config.evaluation_interval is None and name is not None and name.startswith("evaluation/"):
        raise error(
            f"{what} {name!r} does not appear in the result, because no evaluation round is played: set "
            "evaluation(evaluation_interval=...)."
        )
    path = "" if name is None else name.removeprefix("env_runners/")
    if not config.samples and config.origin is None and path.startswith(("episode_", "num_episodes")):
        raise error(
            f"{what} {name!r} is about training in an env, and {config.algo_name} learns from recorded data: name a "
            "number of evaluation, such as evaluation/env_runners/episode_return_mean, or training_iteration, or "
            "num_env_steps, which counts the steps that were learned from."
        )


def find_value(flat: Mapping[str, Any], name: str) -> Any:
    """Return the value of a flat result that a name means, or `None`; see `NamedNumber`."""
    path = ALIASES.get(name, name)
    return flat.get(path, flat.get(f"env_runners/{path}"))


def always_grows(name: str) -> bool:
    """Return whether a number of the result counts iterations, steps or seconds from 0."""
    path = ALIASES.get(name, name)
    return path in ("training_iteration", "time_total_s") or path.endswith("_lifetime")
