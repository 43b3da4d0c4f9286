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
        env_config: Settings of the env: keyword arguments for an id, or one `EnvContext` for a class or factory that
            takes it.
        wrappers: Callables `fn(env) -> env`, applied to every sub-env, the first one innermost.
        disable_env_checking: Whether to skip the check of spaces, reset and first step at the start.
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
        num_envs_per_env_runner: Sub-envs N of each runner's vector env; `None` is the algorithm's default, or
            the number of a factory that returns a ready vector env.
        rollout_fragment_length: Env steps of each sub-env in one `sample()` call, or `"auto"`. `"auto"` samples the
            train batch in one round, split evenly over the runners; for off-policy algorithms, whose batches come from
            a replay buffer, it is 1.
        vectorization: `"sync"`, `"async"` (one process per sub-env), or `"auto"`: the id's native vector env where
            it has one with this autoreset mode, N > 1, and there is neither a wrapper nor a listener of
            `on_sub_environment_created`; otherwise sync.
        autoreset_mode: `"next_step"` or `"same_step"`.
        explore: Whether to sample actions; False takes the most likely actions.
        batch_mode: `"truncate_episodes"` ends a fragment when it is long enough; `"complete_episodes"` returns whole
            episodes only.
        sample_timeout_s: Seconds that a round waits for runners of the engine. The algorithm learns from the fragments
            that have arrived by then; a later fragment counts in a later round, and none is dropped.
        straggler_factor: Ratio of durations above which a round does not wait for a runner that is slower than the
            others in several rounds; its fragments count when they arrive. `None` always waits for all runners. A
            round of complete episodes waits for all runners too.
        num_cpus_per_env_runner: CPUs that Ray reserves for each runner.
        num_gpus_per_env_runner: GPUs that Ray reserves for each runner; in processes on this machine the runners share
            the GPUs of the machine.
        custom_resources_per_env_runner: Other resources of a Ray cluster for each runner, by name; refused without Ray.
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
        gamma: Discount per step.
        train_batch_size_per_learner: Env steps of one iteration's batch.
        minibatch_size: Env steps in the minibatch of one gradient step; `None` is the whole batch.
        num_epochs: Passes over each batch.
        shuffle_batch_per_epoch: Whether each pass uses the batch in a new order.
        grad_clip: Limit for the gradients; `None` does not clip.
        grad_clip_by: What is limited: `"global_norm"`, `"norm"` (of each parameter) or `"value"`.
        optimizer: `"adam"`, `"adamw"`, `"sgd"`, `"rmsprop"`, or a `torch.optim.Optimizer` class or its import path.
        optimizer_config: Keyword arguments of the optimizer, except `lr`.
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
    """How to explore; `.exploration(...)` also takes `explore` of the group `env_runners`.

    Attributes:
        exploration_config: `type` (the name of a built-in type, an import path, or a `corral.Exploration` subclass) and
            its settings; without `type`, settings of the algorithm's default type.
    """

    exploration_config: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RLModuleSettings:
    """Which network to train.

    Attributes:
        module_class: A `corral.Module` subclass; `None` builds the default module from the spaces.
        model_config: Settings of the module; `corral.modules.module.ModelConfig` lists the settings of the default
            module.
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
        num_gpus_per_learner: GPUs that Ray reserves for each learner; in processes on this machine the learners share
            the GPUs of the machine.
        device: Torch device of the learners: `"auto"` (CUDA if available), or a device name.
        num_threads: Torch's intra-op threads while sampling and learning; `"auto"` is one thread for small nets, and
            torch's own choice for others.
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
        on_error: What happens when a callback raises: `"raise"` ends the run; `"log"` logs the exception, once per
            event and callback, and counts it in `fault_tolerance/num_callback_errors`.
    """

    callbacks_class: list[Importable] = field(default_factory=list)
    callback_functions: dict[str, list[Importable]] = field(default_factory=dict)
    on_error: Literal["raise", "log"] = "raise"


@dataclass(kw_only=True)
class EvaluationSettings:
    """How to evaluate, and whether runners with this config evaluate.

    Attributes:
        evaluation_config: Settings that differ in evaluation, as `AlgorithmConfig.overrides` returns them; see
            `for_evaluation`.
        in_evaluation: Whether runners with this config evaluate, rather than sample for training. Callbacks read it as
            `env_runner.config.in_evaluation`; the code that makes evaluation runners sets it.
    """

    evaluation_config: dict[str, Any] = field(default_factory=dict)
    in_evaluation: bool = False


@dataclass(kw_only=True)
class FaultToleranceSettings:
    """What happens when a runner or an env fails.

    A runner fails when it is killed, raises, or hangs longer than `env_step_timeout_s`. The steps that it sampled and
    did not yet return are lost, and counted. An exception in a callback is not a failure of the runner: see `on_error`.

    Attributes:
        restart_failed_env_runners: Whether a failed runner of the engine is replaced. Without it, and without
            `ignore_env_runner_failures`, a failure ends the run with the original exception.
        ignore_env_runner_failures: Whether the run continues without the runners that failed and are not replaced, as
            long as one is left.
        max_num_env_runner_restarts: Largest number of replacements, over all runners of the group.
        num_consecutive_env_runner_failures_tolerance: Failures of one runner in a row, without a fragment in between,
            after which the runner is no longer replaced.
        delay_between_env_runner_restarts_s: Seconds to wait before replacing a runner that failed twice in a row;
            doubled with each further failure, up to a minute. After its first failure a runner is replaced at once.
        restart_failed_sub_environments: Whether a sub-env that raises or hangs is recreated, instead of failing its
            runner. Its unfinished episode ends there and is not counted. Sub-envs of native vector envs cannot be
            recreated.
        env_step_timeout_s: Seconds that one `step` or `reset` of a vector env may take; `None` waits forever.
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
    """What an iteration is, and what its result holds.

    Attributes:
        metrics_num_episodes_for_smoothing: Number of latest episodes in `episode_return_mean` and similar metrics.
        min_time_s_per_iteration: Repeat the training step in one iteration until this many seconds have passed.
        min_sample_timesteps_per_iteration: Repeat the training step until this many env steps were sampled.
    """

    metrics_num_episodes_for_smoothing: PositiveInt = 100
    min_time_s_per_iteration: NonNegativeFloat = 0.0
    min_sample_timesteps_per_iteration: NonNegativeInt = 0


@dataclass(kw_only=True)
class DebuggingSettings:
    """How to make a run repeatable, and how much it logs.

    Attributes:
        seed: Seed of everything random; `None` picks a seed at build, which the resolved config then holds. Building
            also seeds the global generators of Python, NumPy and torch, for envs and modules that use them.
        log_level: Level of the messages in `run.log`.
    """

    seed: NonNegativeInt | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


@dataclass(kw_only=True)
class EngineSettings:
    """Where runners and learners run that are not embedded in the algorithm.

    Attributes:
        engine_name: `"local"` (in this process, one after another), `"process"` (processes on this machine), `"ray"`
            (actors of a Ray cluster), or `"auto"`: Ray if it is initialised in this process or RAY_ADDRESS is set,
            otherwise processes.
        start_timeout_s: Seconds within which runners and learners must start.
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
