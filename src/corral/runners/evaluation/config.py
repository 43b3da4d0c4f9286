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
        evaluation_interval: Iterations between two evaluation rounds: a round is played with the iterations for which
            `(iteration + 1) % evaluation_interval == 0`, counted from 0. `None` plays rounds only when
            `Algorithm.evaluate()` is called.
        evaluation_duration: Episodes or env steps of a round, over all evaluation runners; see
            `evaluation_duration_unit`. `"auto"` plays as long as training does, and counts the episodes that have
            ended; it needs `evaluation_parallel_to_training`.
        evaluation_duration_unit: `"episodes"` plays exactly as many episodes, whatever the number of runners.
            `"timesteps"` is rounded up to what the sub-envs of all runners divide. With `"auto"`, episodes that are
            under way when training ends may end within a fifth of a second; with `"timesteps"` the round ends at once.
        evaluation_num_env_runners: Number of evaluation runners that the engine runs. With 0 one runner is embedded in
            the algorithm, or if evaluation runs parallel to training, one runner has a process of this machine.
        evaluation_parallel_to_training: Whether a round is played while an iteration trains. Its weights are then those
            from before the iteration; otherwise the round comes after training, with the new weights.
        evaluation_force_reset_envs_before_iteration: Whether a round of `"timesteps"` begins with a reset of all envs.
            Otherwise it continues the episodes that the last round left unfinished, in which earlier weights played.
            Rounds of `"episodes"` always begin with a reset.
        evaluation_config: Settings that differ in evaluation runners, as `AlgorithmConfig.overrides` returns them, or a
            config, whose settings count where they differ from the defaults of its class. Evaluation runners act
            greedily unless `explore` or an `exploration_config` is among them, which is for all modules, and have at
            most one sub-env for each episode that they play unless `num_envs_per_env_runner` is.
        custom_evaluation_function: Function `(algorithm, env_runner_group)` that is called in place of a round. It
            returns a dict of metrics, or `(metrics, env_steps, agent_steps)`.
        evaluation_sample_timeout_s: Seconds that a whole round may take. Then the round ends with the episodes that are
            complete, and the result says `truncated`. With `"auto"`, seconds that a request to a runner may take.
        enable_async_evaluation: Whether episodes are given to the runners in small pieces, one per sub-env at a time,
            to whichever runner is free. Otherwise each runner is given its whole part at once.
        on_evaluation_failure: What happens if all evaluation runners are dead, or the embedded one raises: `"skip"`
            skips the round and reports it, `"raise"` ends the run.
        evaluation_seeds: Seeds with which the envs are reset for the episodes of each round, in order, for paired
            comparison: a list or a range. A round then plays one episode for each seed. `None` draws new seeds.
        evaluation_tasks: Tasks of the episodes: a list, which is played in turn and reported by task, or `"training"`
            for the tasks of the training runners. `None` leaves each env the task that it was made with.
        evaluation_num_videos: Number of episodes of each round that are recorded, the first ones: as mp4 files in the
            directory of the run, and as small copies in `result["evaluation"]["videos"]`. Evaluation envs are made with
            `render_mode="rgb_array"`, as a keyword argument or in their `env_config`.
        in_evaluation: Whether runners with this config evaluate instead of sampling for training. Callbacks read this
            setting as `env_runner.config.in_evaluation`; the code that makes evaluation runners sets it.
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
