"""The settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import BeforeValidator

from corral.core.settings import Importable, Need, NonNegativeInt, PositiveFloat, PositiveInt, check_called, same_value
from corral.engines import engine_for
from corral.engines.base import TRAITS
from corral.errors import ConfigError, MissingPackageError
from corral.runners.config import RunnerConfig


def _as_overrides(value: Any) -> Any:
    """Return the settings in which a config differs from the defaults of its class; other values unchanged."""
    if not isinstance(value, EvaluationSettings):  # every config is one
        return value
    default = type(value)()
    changed = {f.name: getattr(value, f.name) for f in fields(value)}
    return {name: found for name, found in changed.items() if not same_value(found, getattr(default, name))}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, range) else value


Overrides = Annotated[dict[str, Any], BeforeValidator(_as_overrides)]
"""Settings by name; for a config, those that differ from the defaults of its class."""
Seeds = Annotated[list[NonNegativeInt], BeforeValidator(_as_list)]
"""A list of seeds, or a range."""


@dataclass(kw_only=True)
class EvaluationSettings:
    """Settings of evaluation.

    An evaluation round plays episodes with the current weights in runners of its own, and reports their statistics as
    `result["evaluation"]`.

    Attributes:
        evaluation_interval: Iterations from one evaluation round to the next; `None` plays rounds only when
            `Algorithm.evaluate()` is called.
        evaluation_duration: Episodes or env steps of a round, over all evaluation runners. `"auto"` plays as long as
            training does; it needs `evaluation_parallel_to_training`.
        evaluation_duration_unit: What `evaluation_duration` counts; see docs/evaluation.md.
        evaluation_num_env_runners: Number of evaluation runners that the engine runs. With 0 one runner is embedded in
            the algorithm, or has a process of this machine if evaluation runs parallel to training.
        evaluation_parallel_to_training: Whether a round is played while an iteration trains, with the weights from
            before the iteration.
        evaluation_force_reset_envs_before_iteration: Whether a round of `"timesteps"` begins with a reset of all envs.
            Otherwise it continues the episodes that the last round left unfinished.
        evaluation_config: Settings that differ in evaluation runners, as `AlgorithmConfig.overrides` returns them, or a
            config, whose settings count where they differ from the defaults of its class; see docs/evaluation.md.
        custom_evaluation_function: Function `(algorithm, env_runner_group)` that is called in place of a round. It
            returns a dict of metrics, or `(metrics, env_steps, agent_steps)`.
        evaluation_sample_timeout_s: Seconds that a round may take, after which it ends with the complete episodes; with
            `"auto"`, seconds that a request to a runner may take.
        enable_async_evaluation: Whether free runners receive episodes in small pieces, one per sub-env at a time,
            instead of their whole part at once.
        on_evaluation_failure: Whether the round is skipped and reported, or the run ends, if all evaluation runners are
            dead or the embedded one raises.
        evaluation_seeds: Seeds of the episodes of each round, in order: a list or a range. A round then plays one
            episode for each seed. `None` draws new seeds.
        evaluation_tasks: Tasks of the episodes: a list, which is played in turn and reported by task, or `"training"`
            for the tasks of the training runners. `None` leaves each env its task.
        evaluation_num_videos: Number of episodes of each round that are recorded, the first ones; see
            docs/evaluation.md.
        in_evaluation: Whether runners with this config evaluate. Callbacks read this setting; Corral sets it.
    """

    evaluation_interval: PositiveInt | None = None
    evaluation_duration: PositiveInt | Literal["auto"] = 10
    evaluation_duration_unit: Literal["episodes", "timesteps"] = "episodes"
    evaluation_num_env_runners: NonNegativeInt = 0
    evaluation_parallel_to_training: Annotated[
        bool, Need("evaluation_interval: no round is played", lambda config: config.evaluation_interval is not None)
    ] = False
    evaluation_force_reset_envs_before_iteration: Annotated[
        bool,
        Need("evaluation_duration_unit='timesteps'", lambda config: config.evaluation_duration_unit == "timesteps"),
    ] = True
    evaluation_config: Overrides = field(default_factory=dict)
    custom_evaluation_function: Importable = None
    evaluation_sample_timeout_s: PositiveFloat = 120.0
    enable_async_evaluation: bool = False
    on_evaluation_failure: Literal["skip", "raise"] = "skip"
    evaluation_seeds: Seeds | None = None
    evaluation_tasks: list[Any] | Literal["training"] | None = None
    evaluation_num_videos: NonNegativeInt = 0
    in_evaluation: bool = False

    def check_settings(self: Any) -> None:
        """Refuse settings of evaluation that contradict each other or the other settings, or could have no effect.

        Raises:
            ConfigError: Names the settings and the remedy.
            MissingPackageError: Videos need a package that is not installed.
        """
        if self.in_evaluation:
            raise ConfigError("in_evaluation=True is set by the code that makes evaluation runners: leave it out.")
        _check_parallel(self)
        if self.custom_evaluation_function is not None:
            _check_custom_function(self)
        _check_reset_arguments(self)
        if self.evaluation_num_videos and find_spec("av") is None:
            raise MissingPackageError("evaluation_num_videos needs av: run `pip install 'corral[play]'`.")


class EvaluationConfig(RunnerConfig, Protocol):
    """What evaluation reads of a config, and what its runners are made from."""

    engine_name: Literal["auto", "local", "process", "ray"]
    evaluation_interval: int | None
    evaluation_duration: int | Literal["auto"]
    evaluation_duration_unit: Literal["episodes", "timesteps"]
    evaluation_num_env_runners: int
    evaluation_parallel_to_training: bool
    evaluation_force_reset_envs_before_iteration: bool
    evaluation_config: dict[str, Any]
    custom_evaluation_function: Any
    evaluation_sample_timeout_s: float
    enable_async_evaluation: bool
    on_evaluation_failure: Literal["skip", "raise"]
    evaluation_seeds: list[int] | None
    evaluation_tasks: list[Any] | Literal["training"] | None
    evaluation_num_videos: int

    def for_evaluation(self) -> Self:
        """Return a copy for evaluation runners."""


def _check_parallel(config: EvaluationConfig) -> None:
    """Refuse settings that contradict evaluation parallel to training."""
    is_local = not TRAITS[engine_for(config.engine_name)].has_own_process
    if config.evaluation_duration == "auto" and not config.evaluation_parallel_to_training:
        raise ConfigError(
            "evaluation_duration='auto' is as long as training takes, so it needs "
            "evaluation_parallel_to_training=True; or give a number of episodes or env steps."
        )
    if config.evaluation_parallel_to_training and is_local and config.for_evaluation().env_step_timeout_s is not None:
        raise ConfigError(
            "evaluation_parallel_to_training=True with engine_name='local' runs evaluation envs in a thread, where "
            "env_step_timeout_s cannot interrupt them: use engine_name='process', or leave env_step_timeout_s unset."
        )


def _check_reset_arguments(config: EvaluationConfig) -> None:
    """Refuse seeds and tasks of evaluation that no round could play."""
    duration, seeds = config.evaluation_duration, config.evaluation_seeds
    for name in ("evaluation_seeds", "evaluation_tasks", "evaluation_num_videos"):
        value = getattr(config, name)
        if value in (None, 0):
            continue
        if not value:
            raise ConfigError(f"{name} is empty: give at least one, or leave it out.")
        if config.evaluation_duration_unit == "timesteps":
            raise ConfigError(
                f"{name} needs whole episodes, but evaluation_duration_unit='timesteps' counts env steps: leave one "
                "of them out."
            )
    if seeds is not None and duration not in (len(seeds), EvaluationSettings.evaluation_duration):
        raise ConfigError(
            f"evaluation_duration={duration!r} contradicts {len(seeds)} evaluation_seeds, which are the seeds of one "
            "episode each: leave evaluation_duration out."
        )
    tasks, num_episodes = config.evaluation_tasks, duration if seeds is None else len(seeds)
    if isinstance(tasks, list) and isinstance(num_episodes, int) and num_episodes < len(tasks):
        raise ConfigError(
            f"a round of {num_episodes} episodes plays only the first {num_episodes} of {len(tasks)} evaluation_tasks: "
            "set evaluation_duration to a multiple of their number."
        )


def _check_custom_function(config: EvaluationConfig) -> None:
    name = "custom_evaluation_function"
    check_called(name, config.custom_evaluation_function, "algorithm", "env_runner_group", group="evaluation")
    for name in ("evaluation_seeds", "evaluation_tasks", "evaluation_num_videos"):
        if getattr(config, name):
            raise ConfigError(
                f"custom_evaluation_function chooses its episodes itself, so {name}={getattr(config, name)!r:.80} has "
                "no effect: leave one of them out."
            )
