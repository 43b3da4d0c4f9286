"""The settings of a config in typed groups: names, types, defaults and meaning in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from corral.core.settings import (
    Importable,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Probability,
)


@dataclass(kw_only=True)
class EnvironmentSettings:
    """What to train on.

    Attributes:
        env: A Gymnasium id, a class, a factory `fn(env_config)`, or an import path `"package.module:Name"`.
        env_config: Reaches the env: keyword arguments of an id, one `EnvContext` for a class or factory that takes it.
        wrappers: Callables `fn(env) -> env`, put around every sub-env, the first one innermost.
        disable_env_checking: Skip the check of spaces, reset and first step at start.
    """

    env: Any = None
    env_config: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Importable] = field(default_factory=list)
    disable_env_checking: bool = False


@dataclass(kw_only=True)
class EnvRunnersSettings:
    """How to sample.

    Attributes:
        num_env_runners: Runners that the engine runs; 0 embeds one runner in the algorithm.
        num_envs_per_env_runner: Sub-envs N of each runner's vector env; `None` is the algorithm's default, or that
            of a factory that returns a ready vector env.
        rollout_fragment_length: Env steps of each sub-env in one `sample()` call, or `"auto"` to sample the train batch
            in one round, split evenly over the runners; off-policy, where batches come from a replay buffer, 1.
        vectorization: `"sync"`, `"async"` (a process for each sub-env), or `"auto"`: the id's native vector env where
            it has one with this autoreset mode, N > 1, and neither a wrapper nor a listener of
            `on_sub_environment_created` forbids it; else sync.
        autoreset_mode: `"next_step"` or `"same_step"`.
        explore: Whether to sample actions; False takes the most likely ones.
        batch_mode: `"truncate_episodes"` cuts fragments wherever they are long enough; `"complete_episodes"` hands over
            whole episodes only.
        sample_timeout_s: Seconds that a round waits for runners of the engine. What has arrived by then is learned
            from; a fragment that comes later counts in a later round, and none is dropped.
        straggler_factor: A runner that is so many times slower than the others, round after round, is not waited for
            any more: its fragments count when they arrive. `None` waits for all, always. Complete episodes are waited
            for too.
        num_cpus_per_env_runner: CPUs that Ray reserves for each runner.
        num_gpus_per_env_runner: GPUs, likewise; in processes of this machine runners share those that it has.
        custom_resources_per_env_runner: Other resources of a Ray cluster, by name; refused without Ray.
    """

    num_env_runners: NonNegativeInt = 0
    num_envs_per_env_runner: PositiveInt | None = None
    rollout_fragment_length: PositiveInt | Literal["auto"] = "auto"
    vectorization: Literal["auto", "sync", "async"] = "auto"
    autoreset_mode: Literal["next_step", "same_step"] = "next_step"
    explore: bool = True
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    sample_timeout_s: PositiveFloat = 60.0
    straggler_factor: Annotated[float, Field(ge=1)] | None = 3.0
    num_cpus_per_env_runner: NonNegativeFloat = 1
    num_gpus_per_env_runner: NonNegativeFloat = 0
    custom_resources_per_env_runner: dict[str, NonNegativeFloat] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainingSettings:
    """How to learn. Algorithms add their own settings to this group.

    Attributes:
        lr: Learning rate, or a schedule over env steps.
        gamma: Discount a step.
        train_batch_size_per_learner: Env steps of one iteration's batch.
        minibatch_size: Steps of one gradient step; `None` is the whole batch.
        num_epochs: Passes over each batch.
        shuffle_batch_per_epoch: Whether each pass takes the batch in a new order.
        grad_clip: Limit of the gradients; `None` clips nothing.
        grad_clip_by: `"global_norm"`, `"norm"` (of each parameter) or `"value"`.
        optimizer: `"adam"`, `"adamw"`, `"sgd"`, `"rmsprop"`, or a `torch.optim.Optimizer` class or its import path.
        optimizer_config: Its keyword arguments, apart from `lr`.
    """

    lr: NonNegativeSchedule = 3e-4
    gamma: Probability = 0.99
    train_batch_size_per_learner: PositiveInt = 4096
    minibatch_size: PositiveInt | None = None
    num_epochs: PositiveInt = 1
    shuffle_batch_per_epoch: bool = True
    grad_clip: PositiveFloat | None = None
    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    optimizer: Any = "adam"
    optimizer_config: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ExplorationSettings:
    """How to explore; `.exploration(...)` takes `explore` of the group `env_runners` too.

    Attributes:
        exploration_config: `type` (the name of a built-in type, an import path, or a `corral.Exploration` subclass) and
            its settings; without `type`, settings of the algorithm's default.
    """

    exploration_config: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RLModuleSettings:
    """Which network.

    Attributes:
        module_class: A `corral.Module` subclass; `None` builds the default module from the spaces.
        model_config: Its settings; those of the default module are listed in `corral.modules.module.ModelConfig`.
    """

    module_class: Importable = None
    model_config: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class LearnersSettings:
    """Where to learn.

    Attributes:
        num_learners: Learners that the engine runs, each with a copy of the modules and a share of every batch; their
            gradients are averaged. 0 embeds one learner in the algorithm.
        num_cpus_per_learner: CPUs that Ray reserves for each learner.
        num_gpus_per_learner: GPUs, likewise; in processes of this machine learners share those that it has.
        device: `"auto"` (CUDA when there is one), or a torch device name.
        num_threads: Torch's intra-op threads while sampling and learning; `"auto"` is one for small nets, and
            torch's own choice otherwise.
        compile: Whether `torch.compile` compiles the loss, which makes updates of large networks faster. The first
            updates take longer, up to a minute. A C++ compiler must be installed.
    """

    num_learners: NonNegativeInt = 0
    num_cpus_per_learner: NonNegativeFloat = 1
    num_gpus_per_learner: NonNegativeFloat = 0
    device: str = "auto"
    num_threads: PositiveInt | Literal["auto"] = "auto"
    compile: bool = False


@dataclass(kw_only=True)
class CallbacksSettings:
    """Code to run at events; filled by `.callbacks(...)`.

    Attributes:
        callbacks_class: `Callback` subclasses or instances, in order.
        callback_functions: Lists of callables by event name, in order.
        on_error: What an exception in a callback does: `"raise"` ends the run; with `"log"` it is logged, once for each
            event and callback, and counted in `fault_tolerance/num_callback_errors`.
    """

    callbacks_class: list[Importable] = field(default_factory=list)
    callback_functions: dict[str, list[Importable]] = field(default_factory=dict)
    on_error: Literal["raise", "log"] = "raise"


@dataclass(kw_only=True)
class EvaluationSettings:
    """How to evaluate, and what the runners of this config are for.

    Attributes:
        evaluation_config: Settings that differ in evaluation, as `AlgorithmConfig.overrides` returns them; see
            `for_evaluation`.
        in_evaluation: Whether they evaluate, rather than collect steps to train on. Callbacks read it as
            `env_runner.config.in_evaluation`; it is set by whoever makes evaluation runners.
    """

    evaluation_config: dict[str, Any] = field(default_factory=dict)
    in_evaluation: bool = False


@dataclass(kw_only=True)
class FaultToleranceSettings:
    """What happens when a runner or an env fails.

    A runner fails when it is killed, raises, or hangs longer than `env_step_timeout_s`; what it had sampled and not
    yet handed over is lost, and counted. An exception in a callback is no such failure: see `on_error`.

    Attributes:
        restart_failed_env_runners: Whether a failed runner of the engine is replaced. Without it, and without
            `ignore_env_runner_failures`, a failure ends the run with the original exception.
        ignore_env_runner_failures: Whether the run goes on without the runners that failed and are not replaced, as
            long as one is left.
        max_num_env_runner_restarts: Replacements in all, over all runners of the group.
        num_consecutive_env_runner_failures_tolerance: Failures of one runner in a row, without a fragment in between,
            after which it is not replaced any more.
        delay_between_env_runner_restarts_s: Seconds before a runner is replaced that failed twice in a row; doubled
            with each further failure, up to a minute. The first failure is mended at once.
        restart_failed_sub_environments: Whether a sub-env that raises or hangs is made anew, rather than failing its
            runner. Its unfinished episode is cut off where it was and not counted. Native vector envs have no
            sub-envs that could be made anew.
        env_step_timeout_s: Seconds that one `step` or `reset` of a vector env may take; `None` waits for ever.
    """

    restart_failed_env_runners: bool = True
    ignore_env_runner_failures: bool = False
    max_num_env_runner_restarts: NonNegativeInt = 1000
    num_consecutive_env_runner_failures_tolerance: PositiveInt = 5
    delay_between_env_runner_restarts_s: NonNegativeFloat = 1.0
    restart_failed_sub_environments: bool = False
    env_step_timeout_s: PositiveFloat | None = None


@dataclass(kw_only=True)
class ReportingSettings:
    """What an iteration is and what it reports.

    Attributes:
        metrics_num_episodes_for_smoothing: Latest episodes that count in `episode_return_mean` and its like.
        min_time_s_per_iteration: Repeat the training step in one iteration until this many seconds have passed.
        min_sample_timesteps_per_iteration: The same, until this many env steps were sampled.
    """

    metrics_num_episodes_for_smoothing: PositiveInt = 100
    min_time_s_per_iteration: NonNegativeFloat = 0.0
    min_sample_timesteps_per_iteration: NonNegativeInt = 0


@dataclass(kw_only=True)
class DebuggingSettings:
    """How to make a run repeatable and talkative.

    Attributes:
        seed: Of everything random; `None` picks one at build, which the resolved config then holds. Building seeds
            Python's, NumPy's and torch's global generators too, for envs and modules that use them.
        log_level: Of `run.log`.
    """

    seed: NonNegativeInt | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


@dataclass(kw_only=True)
class EngineSettings:
    """Where runners and learners besides the embedded ones run.

    Attributes:
        engine_name: `"local"` (in this process, one after another), `"process"` (processes on this machine), `"ray"`
            (actors of a Ray cluster), or `"auto"`: Ray if it is initialised in this process or RAY_ADDRESS is set, else
            processes.
        start_timeout_s: Seconds that runners and learners have to start.
    """

    engine_name: Literal["auto", "local", "process", "ray"] = "auto"
    start_timeout_s: PositiveFloat = 120.0


GROUPS: dict[str, type] = {
    "environment": EnvironmentSettings,
    "env_runners": EnvRunnersSettings,
    "training": TrainingSettings,
    "exploration": ExplorationSettings,
    "rl_module": RLModuleSettings,
    "learners": LearnersSettings,
    "callbacks": CallbacksSettings,
    "evaluation": EvaluationSettings,
    "fault_tolerance": FaultToleranceSettings,
    "reporting": ReportingSettings,
    "debugging": DebuggingSettings,
    "engine": EngineSettings,
}

# Settings that the setter of their group also takes without a name: `.environment("CartPole-v1")`.
MAIN_SETTINGS = {"environment": "env", "rl_module": "module_class", "engine": "engine_name"}
