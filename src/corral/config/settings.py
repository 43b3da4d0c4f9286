"""The settings of a config, in typed groups: the only place for their names, types, defaults and meanings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from corral.core.familiar_names import ALIASES
from corral.core.ids import ALL_MODULES
from corral.core.settings import (
    Importable,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Probability,
    check_names,
    imported,
    same_value,
)


@dataclass(kw_only=True)
class EnvironmentSettings:
    """Settings of the env.

    Attributes:
        env: A Gymnasium id, a class, a factory `fn(env_config)`, or an import path `"package.module:Name"`.
        env_config: Settings of the env: keyword arguments for an id; for a class or factory, one `EnvContext` or
            keyword arguments.
        wrappers: Callables `fn(env) -> env`, applied to each sub-env; the first one is the innermost.
        env_task_fn: Function `fn(train_results, task_settable_env, env_ctx)`, called for each sub-env, in its process,
            after each iteration. It returns the task of the sub-env from the next reset on.
        env_reset_fn: Function of any of `episode_index`, `env_index`, `worker_index`, `training_iteration` and
            `env_context`, called before each reset of a sub-env, in its process. It returns a dict with any of `seed`,
            `options` and `task`, or `None`. Sub-envs are then stepped one by one.
        disable_env_checking: Whether to skip the check of spaces, reset and first step at the start.
        action_masks: Where the masks of legal actions are, for Discrete and MultiDiscrete actions. True: in Dict
            observations, under `action_mask`, if there is such a key. `"infos"`: in infos, under `action_mask`.
            `"method"`: the method `action_masks()` of the env. False: there are none.
        normalize_actions: Whether Box actions are in [-1, 1] in modules and episodes, and are mapped to finite bounds
            for the env, after clipping. Otherwise they have the units of the env everywhere.
        clip_actions: Whether Box actions that are not normalised are clipped to the bounds for the env.
    """

    env: Any = None
    env_config: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Importable] = field(default_factory=list)
    env_task_fn: Importable = None
    env_reset_fn: Importable = None
    disable_env_checking: bool = False
    action_masks: bool | Literal["infos", "method"] = True
    normalize_actions: bool = True
    clip_actions: bool = False

    @property
    def all_wrappers(self) -> list[Any]:
        """The wrappers of each sub-env: `wrappers`, and the one that puts action masks into observations."""
        if not isinstance(self.action_masks, str):
            return self.wrappers
        from corral.envs.action_masks import ActionMasks

        return [*self.wrappers, partial(ActionMasks, source=self.action_masks)]


def _transforms(value: Any) -> Any:
    from corral.transforms.settings import make_transforms

    return make_transforms(value)


Transforms = Annotated[list[Any], BeforeValidator(_transforms)]
"""Transforms, or what names them."""


@dataclass(kw_only=True)
class EnvRunnersSettings:
    """Settings of sampling.

    Attributes:
        num_env_runners: Number of runners that the engine runs; 0 embeds one runner in the algorithm.
        num_envs_per_env_runner: Number of sub-envs N in the vector env of each runner; `None` means the algorithm's
            default or, if a factory returns a ready vector env, the number of this vector env.
        rollout_fragment_length: Env steps of each sub-env in one `sample()` call, or `"auto"`. `"auto"` samples the
            train batch in one round, in equal parts per runner; for off-policy algorithms, whose batches come from a
            replay buffer, it is 1. With a number, the train batch of an on-policy algorithm has whole rounds of all
            runners, which may be up to a tenth more steps than asked for.
        vectorization: `"sync"`, `"async"` (one process per sub-env), or `"auto"`: the native vector env of the id if
            there is one with this autoreset mode, N > 1, and there is neither a wrapper, nor a listener of
            `on_sub_environment_created`, nor a callback of an episode that names `sub_environment`; otherwise sync.
        autoreset_mode: When a sub-env is reset whose episode ended: `"next_step"` or `"same_step"`.
        explore: Whether to explore; with False, the most likely or best actions are chosen.
        batch_mode: `"truncate_episodes"` ends a fragment when it is long enough; `"complete_episodes"` returns whole
            episodes only.
        sample_timeout_s: Seconds that a round waits for runners of the engine. The algorithm learns from the fragments
            that have arrived by then. Later fragments count in a later round; no fragment is dropped.
        straggler_factor: Ratio of durations above which a round does not wait for a runner that is slower than the
            others in several rounds; its fragments count when they arrive. `None` always waits for all runners. A
            round of complete episodes waits for all runners too.
        transforms: Transforms of observations and rewards between the env and the module, in order, such as
            `[FrameStack(4), NormalizeObservations()]`: instances or classes of `corral.Transform`, their names or
            import paths, or dicts with `type` and settings. See docs/transforms.md.
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
    transforms: Transforms = field(default_factory=list)
    num_cpus_per_env_runner: NonNegativeFloat = 1
    num_gpus_per_env_runner: NonNegativeFloat = 0
    custom_resources_per_env_runner: dict[str, NonNegativeFloat] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainingSettings:
    """Settings of learning. Algorithms add their own settings to this group.

    Attributes:
        lr: Learning rate, or a schedule over env steps.
        gamma: Discount per step.
        train_batch_size_per_learner: Number of env steps in the batch of one iteration, per learner.
        minibatch_size: Number of env steps in the minibatch of one gradient step, or with several agents of steps
            of the module; `None` means the whole batch.
        num_epochs: Number of passes over each batch.
        shuffle_batch_per_epoch: Whether each pass uses the batch in a new order.
        grad_clip: Limit for the gradients; `None` means no clipping.
        grad_clip_by: Quantity that is limited: `"global_norm"`, `"norm"` (of each parameter) or `"value"`.
        loss: Function `(module, batch, coefficients, default_loss)` used in place of the algorithm's loss; `None` means
            the algorithm's loss. It returns what to minimise, and what to report. `default_loss(module, batch,
            coefficients)` returns the same of the algorithm's loss, and a dict of the tensors that this loss computed.
        optimizer: `"adam"`, `"adamw"`, `"sgd"`, `"rmsprop"`, or a `torch.optim.Optimizer` class or its import path; or
            one for each group of parameters of the module, `{"actor": "adam", "critic": "sgd"}`.
        optimizer_config: Keyword arguments of the optimizer, except `lr`; if `optimizer` is given by group, also by
            group, `{"critic": {"momentum": 0.9}}`.
        lr_scheduler: Function that makes a torch learning-rate scheduler for an optimizer, such as
            `functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)`. It begins with `lr`, and steps after
            each update of the module. `None` means no scheduler.
    """

    lr: NonNegativeSchedule = 3e-4
    gamma: Probability = 0.99
    train_batch_size_per_learner: PositiveInt = 4096
    minibatch_size: PositiveInt | None = None
    num_epochs: PositiveInt = 1
    shuffle_batch_per_epoch: bool = True
    grad_clip: PositiveFloat | None = None
    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    loss: Importable = None
    optimizer: Any = "adam"
    optimizer_config: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: Importable = None


@dataclass(kw_only=True)
class ExplorationSettings:
    """Settings of exploration; `.exploration(...)` also accepts `explore` of the group `env_runners`.

    Attributes:
        exploration_config: `type` (the name of a built-in type, an import path, or a `corral.Exploration` subclass) and
            the settings of this type; without `type`, settings of the algorithm's default type.
    """

    exploration_config: dict[str, Any] = field(default_factory=dict)


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(kw_only=True)
class RLModuleSettings:
    """Settings of the network.

    Attributes:
        module_class: A `corral.Module` subclass; `None` means the default module, which is built for the spaces.
        model_config: Settings of the module; `corral.modules.module.ModelConfig` lists the settings of the default
            module.
        load_from: Weights that the module starts with: a checkpoint, a run, of which the best checkpoint is taken, or
            a file of weights, `.safetensors`, `.pt` or `.pth`.
        load_parts: Patterns of the names of the weights that are loaded, such as `policy_encoder.*`.
        freeze_parts: Patterns of the names of the parameters that do not learn, such as `policy_encoder.*`;
            `freeze` is another name of the setting.
    """

    module_class: Importable = None
    model_config: dict[str, Any] = field(default_factory=dict)
    load_from: Annotated[str | None, BeforeValidator(_path_text)] = None
    load_parts: list[str] = field(default_factory=lambda: ["*"])
    freeze_parts: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class LearnersSettings:
    """Settings of the learners.

    Attributes:
        num_learners: Number of learners that the engine runs. Each has a copy of the modules and a part of each batch;
            their gradients are averaged. 0 embeds one learner in the algorithm.
        num_cpus_per_learner: CPUs that Ray reserves for each learner.
        num_gpus_per_learner: GPUs that Ray reserves for each learner; in processes on this machine the learners share
            the GPUs of the machine.
        device: Torch device of the learners: `"auto"` (CUDA if available), or a device name.
        num_threads: Number of threads of torch's ops and of NumPy's matrix products during `train()`; `"auto"` means
            one thread for small nets, and the default of both libraries for others.
        learner_class: A subclass of `corral.learners.learner.Learner`, or a function of the same arguments that returns
            one; see docs/learners.md. `None` is `Learner`.
        compile: Whether `torch.compile` compiles the loss, which makes updates of large networks faster. The first
            updates take longer, up to a minute. A C++ compiler must be installed.
    """

    num_learners: NonNegativeInt = 0
    num_cpus_per_learner: NonNegativeFloat = 1
    num_gpus_per_learner: NonNegativeFloat = 0
    device: str = "auto"
    num_threads: PositiveInt | Literal["auto"] = "auto"
    learner_class: Importable = None
    compile: bool = False


@dataclass(kw_only=True)
class CallbacksSettings:
    """Settings of callbacks, which are functions that run at events; set by `.callbacks(...)`.

    Attributes:
        callbacks_class: `Callback` subclasses or instances, in order.
        callback_functions: Lists of callables by event name, in order.
        on_error: What happens when a callback raises: `"raise"` ends the run; `"log"` logs the exception, once per
            event and callback, and counts it in `fault_tolerance/num_callback_errors`.
    """

    callbacks_class: list[Importable] = field(default_factory=list)
    callback_functions: dict[str, list[Importable]] = field(default_factory=dict)
    on_error: Literal["raise", "log"] = "raise"


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
            `evaluation_duration_unit`. `"auto"` plays as long as training does, and at least one episode in each
            sub-env; it needs `evaluation_parallel_to_training`.
        evaluation_duration_unit: `"episodes"` plays exactly as many episodes, whatever the number of runners.
            `"timesteps"` is rounded up to what the sub-envs of all runners divide.
        evaluation_num_env_runners: Number of evaluation runners that the engine runs. With 0 one runner is embedded in
            the algorithm, or if evaluation runs parallel to training, one runner has a process of this machine.
        evaluation_parallel_to_training: Whether a round is played while an iteration trains. Its weights are then those
            from before the iteration; otherwise the round comes after training, with the new weights.
        evaluation_force_reset_envs_before_iteration: Whether a round of `"timesteps"` begins with a reset of all envs.
            Otherwise it continues the episodes that the last round left unfinished, in which earlier weights played.
            Rounds of `"episodes"` always begin with a reset.
        evaluation_config: Settings that differ in evaluation runners, as `AlgorithmConfig.overrides` returns them, or a
            config, whose settings count where they differ from the defaults of its class.
        custom_evaluation_function: Function `(algorithm, env_runner_group)` that is called in place of a round. It
            returns a dict of metrics, or `(metrics, env_steps, agent_steps)`.
        evaluation_sample_timeout_s: Seconds that a whole round may take. Then the round ends with the episodes that are
            complete, and the result says `truncated`. With `"auto"`, seconds that training waits for the round.
        enable_async_evaluation: Whether episodes are given to the runners in small pieces, one per sub-env at a time,
            to whichever runner is free. Otherwise each runner is given its whole share at once.
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
    evaluation_parallel_to_training: bool = False
    evaluation_force_reset_envs_before_iteration: bool = True
    evaluation_config: Overrides = field(default_factory=dict)
    custom_evaluation_function: Importable = None
    evaluation_sample_timeout_s: PositiveFloat = 120.0
    enable_async_evaluation: bool = False
    on_evaluation_failure: Literal["skip", "raise"] = "skip"
    evaluation_seeds: Seeds | None = None
    evaluation_tasks: list[Any] | Literal["training"] | None = None
    evaluation_num_videos: NonNegativeInt = 0
    in_evaluation: bool = False


_POLICY_SETTINGS = (*(each.name for each in fields(RLModuleSettings)), "observation_space", "action_space")


def _policies(value: Any) -> Any:
    """Return settings by module id from what a user may give: ids alone, or ids with settings or `None`."""
    if isinstance(value, str):
        raise ValueError(f"{value!r} is one id: give a set or a dict of ids, such as {{{value!r}}}")
    if not isinstance(value, (Mapping, Set, list, tuple)):
        raise ValueError("give a set or a list of module ids, or a dict of settings by module id")
    if not isinstance(value, Mapping):
        value = dict.fromkeys(sorted(value, key=str) if isinstance(value, Set) else value)
    found: dict[str, dict[str, Any]] = {}
    for module_id, settings in value.items():
        if not isinstance(module_id, str) or not module_id or "/" in module_id or module_id == ALL_MODULES:
            raise ValueError(f"{module_id!r} is no module id: ids are strings without a slash, not {ALL_MODULES!r}")
        if not isinstance(settings, Mapping | None):
            raise ValueError(
                f"policy {module_id!r} must have a dict with any of {', '.join(_POLICY_SETTINGS)}, or None, and has "
                f"{settings!r:.80}"
            )
        own = {ALIASES["rl_module"].get(name, name): part for name, part in (settings or {}).items()}
        check_names(f"policies: {module_id!r}", own, _POLICY_SETTINGS)
        found[module_id] = {name: _policy_setting(name, part) for name, part in own.items()}
    return found


def _policy_setting(name: str, value: Any) -> Any:
    """Return a setting of a module: a class that a string names, and a space that a file describes."""
    if name == "module_class":
        return imported(value)
    if name == "load_from":
        return _path_text(value)
    if not (name.endswith("_space") and isinstance(value, dict)):  # a `Dict` space is a `Mapping` too
        return value
    from corral.core.space_descriptions import described_space  # here: it imports gymnasium

    return described_space(value)


def _to_train(value: Any) -> Any:
    value = imported(value) if isinstance(value, str) and ":" in value else value
    if isinstance(value, str):
        raise ValueError(f"{value!r} is one id: give a list of ids, such as [{value!r}]")
    if not (value is None or callable(value) or isinstance(value, (Set, list, tuple))):
        raise ValueError("give a list of module ids, or a function (module_id)")
    return sorted(value, key=str) if isinstance(value, Set) else value


def _sharing(value: Any) -> Any:
    """Return lists of module ids by path from what a user may give: by path, the ids of one group or several groups."""
    if not isinstance(value, Mapping):
        raise ValueError('give a dict of module ids by the path of the layers, such as {"encoder": ["left", "right"]}')
    found: dict[str, list[list[str]]] = {}
    for path, given in value.items():
        if not isinstance(path, str) or not path:
            raise ValueError(f"{path!r} is no path of layers, such as 'encoder' or 'q.encoder'")
        if not isinstance(given, (Set, list, tuple)):
            raise ValueError(f"{path!r} must have a list of module ids, or a list of such lists, and has {given!r:.80}")
        groups = [given] if all(isinstance(part, str) for part in given) else given
        found[path] = [sorted(group) if isinstance(group, Set) else list(group) for group in groups]
    return found


@dataclass(kw_only=True)
class MultiAgentSettings:
    """Settings of several agents.

    Attributes:
        policies: The modules that choose actions: a set or list of module ids, or a dict of settings by module id, any
            of `module_class`, `model_config`, `observation_space` and `action_space`. What is not given is as in the
            whole config, and the spaces are the spaces of the agents. Empty if there is one agent.
        policy_mapping_fn: Function `(agent_id, episode)` that returns the id of the module that chooses the actions of
            an agent, called once in each episode, when the agent is first observed. It may also take `worker`, which
            is the runner. `None` needs no function: with one module all agents share it; with several, each agent has
            the module whose id is the agent's.
        policies_to_train: Ids of the modules that learn, or a function `(module_id)` that says whether a module does.
            `None` is all modules that have weights.
        count_steps_by: What the batch sizes of training count: `"env_steps"`, in which several agents may act, or
            `"agent_steps"`.
        algorithm_config_overrides_per_module: Settings of `.training(...)` and `.exploration(...)`, and `transforms`,
            that differ for a module, by module id, as in `{"main": {"lr": 1e-4}}`.
        shared_layers: Layers that modules have in common: ids of modules by the path of the layers in the modules, as
            in `{"encoder": ["left", "right"]}`, or several lists of ids for one path. The layers begin as in the module
            that is built first, in the order of `policies`.
    """

    policies: Annotated[dict[str, dict[str, Any]], BeforeValidator(_policies)] = field(default_factory=dict)
    policy_mapping_fn: Importable = None
    policies_to_train: Annotated[Any, BeforeValidator(_to_train)] = None
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    algorithm_config_overrides_per_module: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared_layers: Annotated[dict[str, list[list[str]]], BeforeValidator(_sharing)] = field(default_factory=dict)


@dataclass(kw_only=True)
class FaultToleranceSettings:
    """Settings for failures of runners and envs.

    A runner fails when it is killed, raises, or hangs longer than `env_step_timeout_s` or `worker_timeout_s`. The env
    steps that the runner had not yet returned are lost, and counted. An exception in a callback is not a failure of the
    runner: see `on_error`.

    Attributes:
        restart_failed_env_runners: Whether a failed runner of the engine is replaced. If both this setting and
            `ignore_env_runner_failures` are False, a failure ends the run with the original exception.
        ignore_env_runner_failures: Whether the run continues without failed runners that are not replaced, as long as
            at least one runner is left.
        max_num_env_runner_restarts: Largest number of replacements, over all runners of the group.
        num_consecutive_env_runner_failures_tolerance: Number of failures of one runner in a row, without a fragment in
            between, after which the runner is no longer replaced.
        delay_between_env_runner_restarts_s: Seconds to wait before replacing a runner that failed twice in a row;
            doubled with each further failure, up to a minute. After its first failure a runner is replaced at once.
        restart_failed_sub_environments: Whether a sub-env that raises or hangs is recreated; otherwise its runner
            fails. The unfinished episode of the sub-env ends and is not counted. Sub-envs of native vector envs cannot
            be recreated.
        env_step_timeout_s: Seconds that one `step` or `reset` of a vector env may take; `None` waits forever.
        worker_timeout_s: Seconds that a runner or learner of the engine may take to answer one call, such as a request
            for a fragment. A worker that takes longer hangs or is stopped: it is killed and counts as failed. `"auto"`
            is ten times as long per env step as the slowest fragment or update so far, and at least 5 minutes; for the
            first fragments and updates, and for other calls, it is an hour. `None` waits forever.
    """

    restart_failed_env_runners: bool = True
    ignore_env_runner_failures: bool = False
    max_num_env_runner_restarts: NonNegativeInt = 1000
    num_consecutive_env_runner_failures_tolerance: PositiveInt = 5
    delay_between_env_runner_restarts_s: NonNegativeFloat = 1.0
    restart_failed_sub_environments: bool = False
    env_step_timeout_s: PositiveFloat | None = None
    worker_timeout_s: PositiveFloat | Literal["auto"] | None = "auto"


@dataclass(kw_only=True)
class ReportingSettings:
    """Settings of iterations, their results, and the loggers that write them.

    Attributes:
        metrics_num_episodes_for_smoothing: Number of latest episodes in `episode_return_mean` and similar metrics.
        min_time_s_per_iteration: Seconds for which an iteration repeats the training step at least.
        min_sample_timesteps_per_iteration: Number of env steps until which an iteration repeats the training step.
        loggers: What writes each result, in `fit` and in a loop of your own around `train()`: for each logger a short
            name (`csv`, `json`, `images`, `tensorboard`, `wandb`, `mlflow`, `trackio`), a class or its import path, an
            instance, or a dict with `type` and the settings of the class. `None` is `csv` and `json` in `fit` and on
            the command line, and nothing in a loop of your own.
    """

    metrics_num_episodes_for_smoothing: PositiveInt = 100
    min_time_s_per_iteration: NonNegativeFloat = 0.0
    min_sample_timesteps_per_iteration: NonNegativeInt = 0
    loggers: list[Any] | None = None


@dataclass(kw_only=True)
class CheckpointingSettings:
    """Settings of the checkpoints that `fit` and the command line keep in the directory of a run.

    Attributes:
        checkpoint_every_s: Seconds between two checkpoints; `None` writes none by time. None is written by time before
            50 times the duration of the last one has passed, so that writing takes at most 2% of the time.
        checkpoint_every_iterations: Iterations between two checkpoints, whatever time writing takes; `None` writes none
            by iterations.
        num_checkpoints_kept: Number of latest checkpoints that stay in the directory. One is also written at the end of
            the run, however it ends. 0 writes none of these.
        best_checkpoint_metric: Number of the result by which the best checkpoint is chosen; `None` keeps no best one.
            `"auto"` is `"evaluation/env_runners/episode_return_mean"` if `evaluation_interval` is set without a custom
            function, else `"env_runners/episode_return_mean"`. Of evaluation, only complete rounds count.
        best_checkpoint_mode: Whether the largest or the smallest number is the best.
    """

    checkpoint_every_s: PositiveFloat | None = 60.0
    checkpoint_every_iterations: PositiveInt | None = None
    num_checkpoints_kept: NonNegativeInt = 2
    best_checkpoint_metric: str | None = "auto"
    best_checkpoint_mode: Literal["max", "min"] = "max"


@dataclass(kw_only=True)
class DebuggingSettings:
    """Settings of the seed and of logging.

    Attributes:
        seed: Seed of all random numbers; with `None`, `build()` chooses a seed and stores it in the config of the
            algorithm. Building also seeds the global generators of Python, NumPy and torch, for envs and modules that
            use them.
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
    "multi_agent": MultiAgentSettings,
    "fault_tolerance": FaultToleranceSettings,
    "reporting": ReportingSettings,
    "checkpointing": CheckpointingSettings,
    "debugging": DebuggingSettings,
    "engine": EngineSettings,
}

# Settings that the setter of their group also accepts without a name: `.environment("CartPole-v1")`.
MAIN_SETTINGS = {"environment": "env", "rl_module": "module_class", "engine": "engine_name"}
