"""The group `search` of an experiment, and the whole search that it describes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

from corral.algorithms.config.config import AlgorithmConfig
from corral.algorithms.stopping import Criterion, StopCriteria
from corral.core.metrics.named_number import check_is_measured
from corral.core.settings import LARGEST_SEED, NonNegativeInt, OneOf, PositiveInt, parse_settings
from corral.errors import ConfigError
from corral.runs.loggers.run import plain
from corral.runs.loggers.run_summary import EVALUATED, TRAINED
from corral.tools.search.space import Parameter, read_space, with_values

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "hyperband", "successive_halving", "none")
LARGEST_GRID = 1000


@dataclass(kw_only=True)
class SearchSettings:
    """Settings of a search.

    Attributes:
        space: The settings that are searched, by name; see `read_space`.
        metric: Name of the number of the result that is compared; by default the mean return of evaluation rounds, or
            without them of training.
        mode: Whether the largest value is the best, `"max"`, or the smallest one, `"min"`.
        num_trials: Number of trials.
        num_seeds: Number of seeds with which each trial trains. The value of a trial is their mean.
        sampler: What chooses the values of a trial: `"tpe"` learns from the trials before, `"random"` does not, and
            `"grid"` tries all combinations of choices and whole numbers.
        pruner: What ends poor trials early: `"median"`, `"hyperband"`, `"successive_halving"` or `"none"`.
        num_startup_trials: Number of trials that `"tpe"` draws at random, and before which `"median"` ends none.
        num_warmup_rounds: Number of rounds of a trial after which `"median"` does not end it yet.
        seed: Seed of the sampler, and the first seed with which each trial trains; by default the experiment's
            `debugging.seed`, or 0.
    """

    space: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None
    mode: Annotated[str, AfterValidator(OneOf(("max", "min")))] = "max"
    num_trials: PositiveInt = 50
    num_seeds: PositiveInt = 1
    sampler: Annotated[str, AfterValidator(OneOf(SAMPLERS))] = "tpe"
    pruner: Annotated[str, AfterValidator(OneOf(PRUNERS))] = "median"
    num_startup_trials: NonNegativeInt = 10
    num_warmup_rounds: NonNegativeInt = 2
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class Search:
    """A search whose settings have been checked.

    Attributes:
        config: Config of the experiment, without the values that a trial sets.
        stop: Stop criteria of each run.
        settings: Settings of the search, with the metric.
        parameters: What is searched.
    """

    config: AlgorithmConfig
    stop: Mapping[str, Criterion]
    settings: SearchSettings
    parameters: tuple[Parameter, ...]

    @property
    def metric(self) -> str:
        """Name of the number that is compared."""
        assert self.settings.metric is not None
        return self.settings.metric

    @property
    def seeds(self) -> list[int]:
        """The seeds of each trial: the same ones, so that trials differ in their settings only."""
        return [self.settings.seed + place for place in range(self.settings.num_seeds)]

    def values_of(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a trial, by path, for what the study stores."""
        return {
            parameter.path: parameter.value_of(stored[parameter.path])
            for parameter in self.parameters
            if parameter.path in stored
        }

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations of a grid, as the study stores them."""
        columns = [parameter.stored_values() for parameter in self.parameters]
        paths = [parameter.path for parameter in self.parameters]
        return (dict(zip(paths, row, strict=True)) for row in itertools.product(*columns))

    def experiment(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return an experiment for `corral train --config`: what differs from the defaults, and the given values.

        Args:
            values: Settings by path, which the experiment has even where they are the defaults.
        """
        config = with_values(self.config, values)
        own, default = plain(config.to_dict()), plain(type(config)().to_dict())
        kept = {".".join(path.split(".")[:2]) for path in values}
        found: dict[str, Any] = {"algo": own.pop("algo")}
        for group, settings in own.items():
            changed = {
                name: value
                for name, value in settings.items()
                if value != default[group][name] or f"{group}.{name}" in kept
            }
            if changed:
                found[group] = changed
        return found | {"stop": StopCriteria(self.stop).plain()}

    def whole(self) -> dict[str, Any]:
        """Return the experiment with the group `search`, from which the search can be read again."""
        return self.experiment({}) | {"search": asdict(self.settings)}


def make_search(config: AlgorithmConfig, stop: Mapping[str, Criterion], group: Any) -> Search:
    """Return a search from the group `search` of an experiment.

    Args:
        config: Config of the experiment.
        stop: Its stop criteria.
        group: Settings by name; see `SearchSettings`.

    Raises:
        ConfigError: A setting is unknown or wrong, the space is, or the metric is never measured.
    """
    if not isinstance(group, Mapping):
        raise ConfigError(f"search: expected settings by name, such as 'space' and 'num_trials', got {group!r:.100}.")
    of_experiment = {} if config.seed is None else {"seed": config.seed}
    settings = parse_settings(SearchSettings, {**of_experiment, **group}, "search")
    if of_experiment:  # the files of trials name the seed with which they begin
        config = config.copy(seed=settings.seed)
    parameters = read_space(config, settings.space)
    StopCriteria(stop)
    first = with_values(config, {parameter.path: parameter.values[0] for parameter in parameters})
    if settings.metric is None:
        settings.metric = TRAINED if first.evaluation_interval is None else EVALUATED
    check_is_measured(settings.metric, "search: metric", first, ConfigError)
    if settings.seed + settings.num_seeds - 1 > LARGEST_SEED:
        raise ConfigError(f"search: seed={settings.seed}: a seed must be at most {LARGEST_SEED}.")
    if settings.sampler == "grid":
        ranges = [parameter.path for parameter in parameters if parameter.kind not in ("choice", "int")]
        if ranges:
            raise ConfigError(
                f"search: sampler 'grid' tries all values, and {ranges[0]} is a range of numbers without an end: give "
                "{choice: [...]} or {int: [low, high]}, or use the sampler 'tpe' or 'random'."
            )
        size = math.prod(len(parameter.stored_values()) for parameter in parameters)
        if size > LARGEST_GRID:
            raise ConfigError(
                f"search: the grid has {size:,} combinations, and at most {LARGEST_GRID:,} are tried: give fewer "
                "values, or use the sampler 'tpe' or 'random'."
            )
        settings.num_trials = min(settings.num_trials, size)
    return Search(config, stop, settings, parameters)
