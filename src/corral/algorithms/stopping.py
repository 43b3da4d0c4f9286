"""Stop criteria: numbers of the result, and functions of it, at which a run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from corral.core.metrics.named_number import NamedNumber, always_grows
from corral.core.metrics.result import flat_result
from corral.core.metrics.summary import show_number
from corral.errors import ConfigError, StopCriterionError


@dataclass(frozen=True)
class Below:
    """A stop criterion that is met when the number is below a limit: `{"learners/.../entropy": Below(0.1)}`.

    Attributes:
        limit: The run ends when the number is smaller.
    """

    limit: float

    def __str__(self) -> str:
        return f"below {show_number(self.limit)}"


Criterion = float | Below | Callable[[dict[str, Any]], bool]
"""The smallest number that ends the run, a limit below which the number ends it, or a function of the whole result."""


def criteria_from_file(stop: Any) -> dict[str, float | Below]:
    """Return the stop criteria of a file or of the command line.

    Args:
        stop: By name, a number, or `{"below": number}`.

    Raises:
        ConfigError: It holds something else, such as the name of a function.
    """
    if not isinstance(stop, Mapping):
        raise ConfigError(f"'stop' must hold names and numbers, got {stop!r}.")
    return {str(name): _from_file(str(name), value) for name, value in stop.items()}


def _from_file(name: str, value: Any) -> float | Below:
    if isinstance(value, Mapping) and [*value] == ["below"]:
        return Below(float(_from_file(name, value["below"])))  # type: ignore[arg-type]
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        remedy = "; no file holds a function: give the stop criteria again" if "function" in str(value) else ""
        raise ConfigError(f"stop: {name} must be a number, got {value!r}{remedy}.") from None


class StopCriteria:
    """Numbers to reach or to fall below, and functions; the first criterion that is met stops the run.

    Attributes:
        criteria: The criteria by name.
    """

    def __init__(self, criteria: Mapping[str, Criterion] | Callable[..., bool], late_keys: bool = False) -> None:
        """Check and store the criteria.

        Args:
            criteria: By name, the smallest value that stops the run, or `Below(limit)`; see `NamedNumber` for names.
                Or a function `f(result) -> bool`, under any name; one function may be given alone.
            late_keys: Whether callbacks may log keys that are missing from the first results.

        Raises:
            StopCriterionError: There is no criterion, or a limit is not finite, so that the run would never end, or it
                is met by every result.
        """
        if callable(criteria):
            criteria = {getattr(criteria, "__name__", "function").strip("<>"): criteria}
        if not criteria:
            raise StopCriterionError("no stop criterion: give one such as episode_return_mean=450.")
        for name, criterion in criteria.items():
            _check(name, criterion)
        self.criteria = dict(criteria)
        self._numbers = {
            name: NamedNumber(name, "stop criterion", StopCriterionError, late_keys=late_keys) for name in criteria
        }

    @property
    def numbers(self) -> dict[str, NamedNumber]:
        """The numbers of the result that are criteria, by name."""
        return {name: self._numbers[name] for name, criterion in self.criteria.items() if not callable(criterion)}

    def met(self, result: dict[str, Any], *, whole: bool = True) -> str | None:
        """Return the first criterion that a result meets as text, or `None`.

        Args:
            result: The result of an iteration.
            whole: Whether all of it is there. Otherwise a function that raises an exception is not met.

        Raises:
            StopCriterionError: A name is not in the result, or a function raised or returned something else than a
                bool.
        """
        flat = flat_result(result)
        met = [self._text_if_met(name, criterion, result, flat, whole) for name, criterion in self.criteria.items()]
        return next((text for text in met if text is not None), None)

    def plain(self) -> dict[str, Any]:
        """Return the criteria in types that YAML has, as `criteria_from_file` reads them; functions become text."""
        return {name: _plain(criterion) for name, criterion in self.criteria.items()}

    def _text_if_met(
        self, name: str, criterion: Criterion, result: dict[str, Any], flat: Mapping[str, Any], whole: bool
    ) -> str | None:
        if callable(criterion):
            try:
                return f"{name}(result) is true" if _answer(name, criterion, result) else None
            except StopCriterionError:
                if whole:
                    raise
                return None  # it may need what is missing; the next iteration shows that
        value = self._numbers[name].find(flat)
        if value is None:
            return None
        if isinstance(criterion, Below):
            return f"{name}={show_number(value)} is {criterion}" if value < criterion.limit else None
        return f"{name}={show_number(value)} reached {show_number(criterion)}" if value >= criterion else None


def _check(name: str, criterion: Any) -> None:
    """Refuse a criterion that is never met, or always.

    Raises:
        StopCriterionError: Names the criterion.
    """
    limit = criterion.limit if isinstance(criterion, Below) else criterion
    if callable(limit):
        return
    if not isinstance(limit, Real) or isinstance(limit, bool):
        raise StopCriterionError(
            f"stop criterion {name!r} must be a number, Below(number) or a function, got {limit!r}."
        )
    if not math.isfinite(limit):
        raise StopCriterionError(f"stop criterion {name!r}: {limit} is never reached; give a finite number.")
    if always_grows(name) and (isinstance(criterion, Below) or limit <= 0):
        shown = criterion if isinstance(criterion, Below) else show_number(float(limit))
        raise StopCriterionError(
            f"stop criterion {name!r}: {shown} would end every run after its first iteration, since this number only "
            "grows from 0; give a positive number to reach."
        )


def _plain(criterion: Criterion) -> Any:
    if callable(criterion):
        return f"the function {criterion!r}"
    if isinstance(criterion, Below):
        return {"below": float(criterion.limit)}
    return criterion if type(criterion) is int else float(criterion)


def _answer(name: str, function: Callable[[dict[str, Any]], bool], result: dict[str, Any]) -> bool:
    try:
        answer = function(result)
    except Exception as error:
        raise StopCriterionError(f"stop criterion {name!r} raised {type(error).__name__}: {error}.") from error
    if not isinstance(answer, (bool, np.bool_)):
        raise StopCriterionError(f"stop criterion {name!r} must return True or False, got {answer!r}.")
    return bool(answer)
