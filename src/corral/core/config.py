"""The groups of settings that several rooms read."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from corral.core.settings import Need, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Config(Protocol):
    """What every room may read of a config.

    The groups of settings have no base; `AlgorithmConfig` is made of all of them. Each room says in a protocol what it
    reads of a config besides its own group, so that the room does not know the whole config.
    """

    ON_POLICY: ClassVar[bool]
    seed: int | None
    callbacks_class: list[Any]
    callback_functions: dict[str, list[Any]]
    on_error: Literal["raise", "log"]

    @property
    def samples(self) -> bool:
        """Whether the algorithm samples from an env."""

    @property
    def algo_name(self) -> str:
        """The name of the algorithm's class."""

    @property
    def origin(self) -> Any:
        """What this config was translated from."""

    def freeze(self, *, except_group: str | None = None) -> Self:
        """Refuse all further changes, except to one group if it is given, and return the config."""

    def copy(self, **changes: Any) -> Self:
        """Return an unfrozen copy, with settings changed by their plain names."""

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by group."""


@dataclass(kw_only=True)
class ExplorationSettings:
    """Settings of exploration; `.exploration(...)` also accepts `explore` of the group `env_runners`.

    Attributes:
        exploration_config: `type` (the name of a built-in type, an import path, or a `corral.Exploration` subclass) and
            the settings of this type; without `type`, settings of the algorithm's default type.
    """

    exploration_config: dict[str, Any] = field(default_factory=dict)

    DEFAULT_EXPLORATION: ClassVar[dict[str, Any]] = {"type": "StochasticSampling"}
    """The `exploration_config` used when the user gives none."""

    @property
    def default_exploration(self) -> dict[str, Any]:
        """The `exploration_config` used when the user gives none; it may depend on other settings."""
        return dict(self.DEFAULT_EXPLORATION)


def runs_env_runners(config: Any) -> bool:
    """Return whether the engine runs env runners of a config, for training or evaluation."""
    evaluates_in_process = config.evaluation_parallel_to_training and config.evaluation_interval is not None
    return bool(config.num_env_runners or config.evaluation_num_env_runners or evaluates_in_process)


def runs_workers(config: Any) -> bool:
    """Return whether the engine runs env runners or learners of a config."""
    return bool(config.num_learners) or runs_env_runners(config)


SAMPLES = Need("an algorithm that samples: this one learns from recorded data", attrgetter("samples"))
RUNS_ENV_RUNNERS = Need("env runners of the engine (num_env_runners, evaluation_num_env_runners)", runs_env_runners)
RUNS_WORKERS = Need("env runners or learners of the engine (num_env_runners, num_learners)", runs_workers)
STARTS_PROCESSES = Need(
    "env runners or learners of the engine, or vectorization='async'",
    lambda config: runs_workers(config) or config.vectorization == "async",
)


@dataclass(kw_only=True)
class FaultToleranceSettings:
    """Settings for failures of runners and envs.

    A runner fails when it is killed, raises, or hangs longer than `env_step_timeout_s` or `worker_timeout_s`. The env
    steps that the runner had not yet returned are lost, and counted. An exception in a callback is not a failure of the
    runner: see `on_error`.

    Attributes:
        restart_failed_env_runners: Whether a failed runner of the engine is replaced. If this and
            `ignore_env_runner_failures` are False, a failure ends the run with the original exception.
        ignore_env_runner_failures: Whether the run continues without failed runners that are not replaced, while one is
            left.
        max_num_env_runner_restarts: Largest number of replacements, over all runners of the group.
        num_consecutive_env_runner_failures_tolerance: Number of failures of one runner in a row after which it is no
            longer replaced.
        delay_between_env_runner_restarts_s: Seconds to wait before replacing a runner that failed twice in a row;
            doubled with each further failure, up to a minute.
        restart_failed_sub_environments: Whether a sub-env that raises or hangs is recreated; otherwise its runner
            fails. See docs/fault-tolerance.md.
        env_step_timeout_s: Seconds that one `step` or `reset` of a vector env may take; `None` waits forever.
        worker_timeout_s: Seconds that a runner or learner of the engine may take to answer one call; then it is killed
            and counts as failed. `"auto"` depends on the durations so far, see docs/fault-tolerance.md; `None` waits
            forever.
    """

    restart_failed_env_runners: Annotated[bool, RUNS_ENV_RUNNERS] = True
    ignore_env_runner_failures: Annotated[bool, RUNS_ENV_RUNNERS] = False
    max_num_env_runner_restarts: Annotated[NonNegativeInt, RUNS_ENV_RUNNERS] = 1000
    num_consecutive_env_runner_failures_tolerance: Annotated[PositiveInt, RUNS_ENV_RUNNERS] = 5
    delay_between_env_runner_restarts_s: Annotated[NonNegativeFloat, RUNS_ENV_RUNNERS] = 1.0
    restart_failed_sub_environments: bool = False
    env_step_timeout_s: PositiveFloat | None = None
    worker_timeout_s: Annotated[PositiveFloat | Literal["auto"] | None, RUNS_WORKERS] = "auto"


@dataclass(kw_only=True)
class DebuggingSettings:
    """Settings of the seed and of logging.

    Attributes:
        seed: Seed of all random numbers, and of the global generators of Python, NumPy and torch; with `None`,
            `build()` chooses a seed and stores it in the config of the algorithm.
        log_level: Level of the messages in `run.log`.
    """

    seed: NonNegativeInt | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


@dataclass(kw_only=True)
class EngineSettings:
    """Settings of the engine, which runs the runners and learners that are not embedded in the algorithm.

    Attributes:
        engine_name: `"local"` (in this process, one after another), `"process"` (processes on this machine), `"ray"`
            (actors of a Ray cluster), or `"auto"`: Ray if it is initialised in this process or RAY_ADDRESS is set,
            otherwise processes.
        start_timeout_s: Seconds within which runners and learners must start.
    """

    engine_name: Annotated[
        Literal["auto", "local", "process", "ray"],
        Need("env runners or learners that it runs (num_env_runners, num_learners)", runs_workers),
    ] = "auto"
    start_timeout_s: Annotated[PositiveFloat, STARTS_PROCESSES] = 120.0


class ExplorationConfig(Config, Protocol):
    """What explorations read of a config."""

    exploration_config: dict[str, Any]
    num_threads: int | Literal["auto"]

    @property
    def default_exploration(self) -> dict[str, Any]:
        """The `exploration_config` used when the user gives none."""
