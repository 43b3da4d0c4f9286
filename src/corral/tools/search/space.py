"""The space of a search: which settings are searched, and between which values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.config.settings import GROUPS
from corral.errors import ConfigError, nearest

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

KINDS = ("log", "uniform", "int", "log_int", "choice")
PLACE = "search: space"
FORMS = "{log: [1e-5, 1e-2]}, {uniform: [0.9, 1.0]}, {int: [1, 10]}, {log_int: [16, 1024]} or {choice: [a, b, c]}"
_FLOAT_KINDS = {"int": "uniform", "log_int": "log"}
# Within the range, and no whole number, so that a setting that takes whole numbers only is found.
_INNER = 0.3819


@dataclass(frozen=True)
class Parameter:
    """A setting that is searched.

    Attributes:
        path: Path of the setting, such as `training.lr`.
        kind: One of `KINDS`.
        values: The lower and the upper end of the range, or for `"choice"` the values.
    """

    path: str
    kind: str
    values: tuple[Any, ...]

    @property
    def labels(self) -> dict[Any, Any]:
        """The values of a choice by what the study stores: numbers and texts, and of lists and dicts their JSON."""
        return {_label(value): value for value in self.values}

    def distribution(self) -> BaseDistribution:
        """Return the distribution for Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.kind == "choice":
            return CategoricalDistribution([*self.labels])
        low, high = self.values
        if self.kind.endswith("int"):
            return IntDistribution(low, high, log=self.kind == "log_int")
        return FloatDistribution(low, high, log=self.kind == "log")

    def value_of(self, stored: Any) -> Any:
        """Return the value of the setting for what the study stores."""
        return self.labels[stored] if self.kind == "choice" else stored

    def stored_values(self) -> Sequence[Any]:
        """Return all values of a choice or of whole numbers, as the study stores them."""
        return [*self.labels] if self.kind == "choice" else range(self.values[0], self.values[1] + 1)

    def examples(self) -> Iterator[Any]:
        """Yield values with which the setting must work: all of a choice, or both ends of a range and one inside."""
        yield from self.values
        if self.kind in ("log", "uniform"):
            low, high = self.values
            yield low + _INNER * (high - low)


def read_space(config: AlgorithmConfig, space: Mapping[Any, Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a space, after trying values of each in the config.

    Args:
        config: The config of the experiment.
        space: By name of a setting (`lr`, `training.lr`, `model_config.fcnet_hiddens`), one of the forms in `FORMS`.

    Raises:
        ConfigError: A setting does not exist or is named twice, a range is empty, or the config refuses a value. The
            message names the setting.
    """
    if not space:
        raise ConfigError(f"{PLACE}: there is no setting to search: name some, such as lr: {{log: [1e-5, 1e-2]}}.")
    parameters: list[Parameter] = []
    for name, form in space.items():
        path = _path_of(config, str(name))
        for other in parameters:
            if f"{path}.".startswith(f"{other.path}.") or f"{other.path}.".startswith(f"{path}."):
                raise ConfigError(f"{PLACE}: {name!r} and {other.path!r} name the same setting: keep one of them.")
        parameters.append(Parameter(path, *_read_form(f"{PLACE}: {name}", form)))
    _check_values(config, parameters)
    return tuple(parameters)


def with_values(config: AlgorithmConfig, values: Mapping[str, Any]) -> AlgorithmConfig:
    """Return a copy of a config with some settings, by path."""
    found = config.copy()
    for path, value in values.items():
        found.set_path(path, value)
    return found


def _path_of(config: AlgorithmConfig, name: str) -> str:
    """Return the path of a setting that is named with or without its group."""
    first = name.partition(".")[0]
    if first not in GROUPS:
        home = next((group for group, names in config.group_fields().items() if first in names), None)
        name = name if home is None else f"{home}.{name}"
    if name == "debugging.seed":
        raise ConfigError(
            f"{PLACE}: a seed is not a setting to search: num_seeds sets the number of seeds of each trial."
        )
    return name


def _read_form(place: str, form: Any) -> tuple[str, tuple[Any, ...]]:
    if not isinstance(form, Mapping) or len(form) != 1:
        raise ConfigError(f"{place}: expected {FORMS}, got {form!r:.100}.")
    [(kind, values)] = form.items()
    if kind not in KINDS:
        raise ConfigError(f"{place}: unknown kind {kind!r}. {nearest(kind, KINDS)}")
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"{place}: {kind} takes a list, got {values!r:.100}.")
    return kind, _choices(place, values) if kind == "choice" else _range(place, kind, values)


def _choices(place: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if len(values) < 2:
        raise ConfigError(f"{place}: a choice needs at least two values; one value belongs to the settings themselves.")
    labels = [_label(value) for value in values]
    if twice := [label for place_, label in enumerate(labels) if label in labels[:place_]]:
        raise ConfigError(f"{place}: {twice[0]!r} is among the values twice (True equals 1, and False 0).")
    return tuple(values)


def _label(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)


def _range(place: str, kind: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if len(values) != 2:
        raise ConfigError(f"{place}: {kind} takes two numbers, the lower and the upper end, got {values!r:.100}.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{place}: {value!r} is not a finite number.")
        if kind.endswith("int") and value != int(value):
            raise ConfigError(f"{place}: {value!r} is not a whole number: use {_FLOAT_KINDS[kind]!r}.")
    low, high = map(int, values) if kind.endswith("int") else map(float, values)
    if low >= high:
        raise ConfigError(f"{place}: the range is empty: {low} is not below {high}.")
    if kind.startswith("log") and low <= 0:
        raise ConfigError(f"{place}: a logarithm needs positive numbers, and the range begins at {low}.")
    return low, high


def _check_values(config: AlgorithmConfig, parameters: Sequence[Parameter]) -> None:
    """Try the examples of each parameter.

    A value may contradict another searched setting at one end of the range and not at the other one, so that it is
    refused only where it fails with both. An error that is there without the parameter too is not about its value.

    Raises:
        ConfigError: A value is refused.
    """
    ends = [{other.path: other.values[place] for other in parameters} for place in (0, -1)]
    of_others: list[ConfigError] = []
    for parameter in parameters:
        without = {path: value for path, value in ends[0].items() if path != parameter.path}
        for value in parameter.examples():
            refused = [error for values in ends if (error := _refusal(config, values | {parameter.path: value}))]
            if len(refused) == len(ends):
                if str(_refusal(config, without)) == str(refused[0]):
                    of_others.append(refused[0])
                    continue
                hint = ""
                if parameter.kind in ("log", "uniform") and value not in parameter.values:
                    hint = f" For whole numbers use {'log_int' if parameter.kind == 'log' else 'int'!r}."
                raise ConfigError(f"{PLACE}: {parameter.path}: {value!r} is refused: {refused[0]}{hint}")
    if of_others:  # of the experiment itself
        raise of_others[0]


def _refusal(config: AlgorithmConfig, values: Mapping[str, Any]) -> ConfigError | None:
    try:
        with_values(config, values).validate()
    except ConfigError as error:
        return error
    return None
