"""The two functions in which most example scripts of RLlib begin and end: their options, and the experiment."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.compat.rllib.constants import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)
from corral.compat.rllib.helpers import convert_numpy_to_python_primitives
from corral.compat.rllib.table import EXTRA
from corral.core.metrics.result import without_early_means
from corral.errors import ConfigError

log = logging.getLogger("corral")

TRAINING_ITERATION = "training_iteration"
RETURN = f"{ENV_RUNNER_RESULTS}/{EPISODE_RETURN_MEAN}"
REPORT_COLUMNS = {
    TRAINING_ITERATION: "iter",
    "time_total_s": "total time (s)",
    NUM_ENV_STEPS_SAMPLED_LIFETIME: "ts",
}


# Options: name, default, and the keyword arguments of `add_argument`.
def _options(default_reward: float, default_iters: int, default_timesteps: int) -> dict[str, dict[str, Any]]:
    number, fraction, switch = {"type": int}, {"type": float}, {"action": "store_true"}
    hidden = {**switch, "help": argparse.SUPPRESS}
    return {
        "algo": {"default": "PPO", "help": "name of the algorithm"},
        "framework": {"choices": ["tf", "tf2", "torch"], "default": "torch", "help": "only torch is there"},
        "env": {"help": "id of the env, if the script sets none"},
        "num-env-runners": {**number, "help": "number of env runners in processes of their own; 0: in this process"},
        "num-envs-per-env-runner": {**number, "help": "number of sub-envs of each env runner"},
        "num-agents": {**number, "default": 0, "help": "number of agents; 0: a single-agent env"},
        "evaluation-num-env-runners": {**number, "default": 0, "help": "number of env runners for evaluation"},
        "evaluation-interval": {**number, "default": 0, "help": "iterations between evaluations; 0: none"},
        "evaluation-duration": {"type": _duration, "default": 10, "help": "units per evaluation, or 'auto'"},
        "evaluation-duration-unit": {"choices": ["episodes", "timesteps"], "default": "episodes"},
        "evaluation-parallel-to-training": {**switch, "help": "evaluate while training continues"},
        "output": {"help": "directory for the sampled episodes"},
        "log-level": {"choices": ["INFO", "DEBUG", "WARN", "ERROR"], "help": "level of the log"},
        "no-tune": {**switch, "help": "train in this process, without Ray Tune"},
        "num-samples": {**number, "default": 1, "help": "number of Tune trials for each set of settings"},
        "max-concurrent-trials": {**number, "help": "number of Tune trials at the same time"},
        "verbose": {**number, "default": 2, "help": "how much Tune prints: 0 to 2"},
        "checkpoint-freq": {**number, "default": 0, "help": "iterations between Tune's checkpoints; 0: none"},
        "checkpoint-at-end": {**switch, "help": "let Tune write a checkpoint at the end"},
        "tune-max-report-freq": {**number, "default": 5, "help": "seconds between Tune's reports"},
        "wandb-key": {"help": "key of Weights & Biases, with Tune"},
        "wandb-project": {"help": "project of Weights & Biases"},
        "wandb-run-name": {"help": "name of the run for Weights & Biases"},
        "stop-reward": {**fraction, "default": default_reward, "help": "mean return at which training stops"},
        "stop-iters": {**number, "default": default_iters, "help": "iterations after which training stops"},
        "stop-timesteps": {**number, "default": default_timesteps, "help": "env steps after which training stops"},
        "as-test": {**switch, "help": "fail if the return is not reached"},
        "as-release-test": {**switch, "help": "as --as-test, and write a summary to $TEST_OUTPUT_JSON"},
        "num-learners": {**number, "help": "number of learners; 0: in this process"},
        "num-cpus-per-learner": {**fraction, "help": "CPUs of each learner"},
        "num-gpus-per-learner": {**fraction, "help": "GPUs of each learner"},
        "num-aggregator-actors-per-learner": {**number, "help": "actors that collect batches, for APPO"},
        "num-cpus": {**number, "default": 0, "help": "CPUs for ray.init; 0: all"},
        "num-gpus": {**number, "help": "GPUs in the old API"},
        "old-api-stack": {**switch, "help": "use the old API, which is refused"},
        "enable-new-api-stack": hidden,
        "local-mode": hidden,
    }


def _duration(text: str) -> int | str:
    return text if text == "auto" else int(text)


def add_rllib_example_script_args(
    parser: argparse.ArgumentParser | None = None,
    default_reward: float = 100.0,
    default_iters: int = 200,
    default_timesteps: int = 100000,
) -> argparse.ArgumentParser:
    """Add the options of RLlib's example scripts to a parser, and return the parser.

    Args:
        parser: The parser; `None` makes one.
        default_reward: Default of `--stop-reward`.
        default_iters: Default of `--stop-iters`.
        default_timesteps: Default of `--stop-timesteps`.
    """
    parser = parser or argparse.ArgumentParser()
    for name, settings in _options(default_reward, default_iters, default_timesteps).items():
        parser.add_argument(f"--{name}", **settings)
    for group in (parser, *parser._action_groups):
        group.conflict_handler = "resolve"  # a script may have an option that later versions of RLlib added here
    return parser


def run_rllib_example_script_experiment(
    base_config: Any,
    args: argparse.Namespace | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    success_metric: Mapping[str, float] | None = None,
    trainable: Any = None,
    tune_callbacks: list[Any] | None = None,
    keep_config: bool = False,
    keep_ray_up: bool = False,
    scheduler: Any = None,
    progress_reporter: Any = None,
) -> Any:
    """Train an algorithm until a stop criterion, in this process or with Ray Tune, and return the results.

    Args:
        base_config: Config of the algorithm; the options change it.
        args: Options; `None` reads them from the command line. Options that a script does not define have their
            defaults.
        stop: Smallest values at which training stops, by path in the result, such as
            `{"env_runners/episode_return_mean": 450}`. By default `--stop-reward`, `--stop-timesteps`, `--stop-iters`.
        success_metric: With `--as-test`, the path in the result and the value that must be reached. By default the
            return in `stop`.
        trainable: Class or function for Tune; `None` means the config's algorithm.
        tune_callbacks: Callbacks for Tune.
        keep_config: Whether the options leave the config unchanged.
        keep_ray_up: Whether Ray keeps running afterwards.
        scheduler: Tune's scheduler of trials.
        progress_reporter: Tune's reporter.

    Returns:
        The last result of `train()`; with Tune, its `ResultGrid`.

    Raises:
        ConfigError: An option is not there, or contradicts another one.
        ValueError: With `--as-test`, the success metric was not reached.
    """
    parsed = add_rllib_example_script_args().parse_args(None if args is None else [])
    args = parsed if args is None else argparse.Namespace(**{**vars(parsed), **vars(args)})
    stop = {**_default_stop(args)} if stop is None else {**stop}
    if args.local_mode:
        log.warning("local_mode has no effect: with num_env_runners=0, all runs in this process.")
    if not keep_config:
        _apply(base_config, args)
    uses_tune = not args.no_tune and _tune_is_installed()
    if not (uses_tune or args.no_tune):
        log.warning("Ray is not installed, so training runs without Tune, as with --no-tune. For Tune: %s.", EXTRA)
    key, value = next(iter((success_metric or _default_metric(stop, args)).items()))
    started = time.monotonic()
    try:
        if uses_tune:
            run_config = {"stop": stop, "callbacks": _with_wandb(tune_callbacks, base_config, args)}
            run_config["progress_reporter"] = progress_reporter or _reporter(base_config, args)
            results = _tune(trainable or base_config.algo_class, base_config, args, run_config, scheduler)
            frame = results.get_dataframe()
            best = max(frame[key]) if key in frame else float("nan")
        else:
            results, best = _train(base_config, stop, args, key)
    finally:
        if not keep_ray_up and (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
    if args.as_test or args.as_release_test:
        _judge(key, value, best, args, time.monotonic() - started, results)
    return results


def should_stop(stop: Mapping[str, float], results: Mapping[str, Any], keep_ray_up: bool = False) -> bool:
    """Return whether a result fulfils a stop criterion, and print the criterion; early means fulfil none.

    Args:
        stop: Smallest values, by path in the result, such as `"env_runners/episode_return_mean"`.
        results: A result of `train()`.
        keep_ray_up: Whether Ray keeps running if a criterion is fulfilled.
    """
    results = without_early_means(results)
    for key, threshold in stop.items():
        if _number(results, key) >= threshold:
            print(f"Stop criterion ({key}={threshold}) fulfilled!")
            if not keep_ray_up and (ray := sys.modules.get("ray")) is not None:
                ray.shutdown()
            return True
    return False


def check_learning_achieved(
    tune_results: Any, min_value: float, evaluation: bool | None = None, metric: str = RETURN
) -> None:
    """Check that a trial of Tune reached a value.

    Args:
        tune_results: The `ResultGrid` of `tune.Tuner.fit`.
        min_value: Value that at least one trial must reach.
        evaluation: Whether the evaluation's value counts; by default if there is one.
        metric: Path of the value in the result.

    Raises:
        ValueError: No trial reached the value.
    """
    frame = tune_results.get_dataframe()
    in_evaluation = f"{EVALUATION_RESULTS}/{metric}"
    if evaluation is None:
        evaluation = in_evaluation in frame
    if not (best := max(frame[in_evaluation if evaluation else metric])) >= min_value:
        raise ValueError(f"{metric} did not reach {min_value}: the best value is {best}.")
    print(f"`{metric}` of {min_value} reached! ok")


def _default_stop(args: argparse.Namespace) -> dict[str, float]:
    return {
        RETURN: args.stop_reward,
        f"{ENV_RUNNER_RESULTS}/{NUM_ENV_STEPS_SAMPLED_LIFETIME}": args.stop_timesteps,
        TRAINING_ITERATION: args.stop_iters,
    }


def _default_metric(stop: Mapping[str, float], args: argparse.Namespace) -> dict[str, float]:
    found = [key for key in (f"{EVALUATION_RESULTS}/{RETURN}", RETURN) if key in stop]
    return {found[0]: stop[found[0]]} if found else {RETURN: args.stop_reward}


def _number(result: Any, path: str) -> float:
    """Return the number at a path of a result; NaN if there is none."""
    for part in path.split("/"):
        result = result.get(part.strip()) if isinstance(result, Mapping) else None
    is_number = isinstance(result, (int, float, np.number))
    return float(result) if is_number else float("nan")


def _apply(config: Any, args: argparse.Namespace) -> None:
    """Change a config as the options say; an option that is `None` leaves the config as it is."""
    if args.framework != "torch":
        config.framework(args.framework)
    if args.env is not None and config.env is None:
        config.environment(args.env)
    if args.old_api_stack:
        config.api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    if args.num_gpus:
        raise ConfigError("--num-gpus belongs to the old API: use --num-gpus-per-learner and --num-learners.")
    for setter, names in (
        (config.env_runners, ("num_env_runners", "num_envs_per_env_runner")),
        (
            config.learners,
            ("num_learners", "num_cpus_per_learner", "num_gpus_per_learner", "num_aggregator_actors_per_learner"),
        ),
    ):
        if given := {name: getattr(args, name) for name in names if getattr(args, name) is not None}:
            setter(**given)
    if args.evaluation_interval > 0:
        config.evaluation(
            **{name: value for name, value in vars(args).items() if name in _EVALUATION_OPTIONS},
        )
    if args.log_level is not None:
        config.debugging(log_level="WARNING" if args.log_level == "WARN" else args.log_level)
    if args.output is not None:
        config.offline_data(output=args.output)


_EVALUATION_OPTIONS = (
    "evaluation_num_env_runners",
    "evaluation_interval",
    "evaluation_duration",
    "evaluation_duration_unit",
    "evaluation_parallel_to_training",
)


def _train(
    config: Any, stop: Mapping[str, float], args: argparse.Namespace, metric: str
) -> tuple[dict[str, Any], float]:
    """Train in this process until a stop criterion, and print a line per iteration.

    Returns:
        The last result, and the largest value of the metric; NaN if it had none.
    """
    algorithm = getattr(config, "build_algo", config.build)()
    result: dict[str, Any] = {}
    best = float("nan")
    try:
        for i in range(int(stop.get(TRAINING_ITERATION, args.stop_iters))):
            result = algorithm.train()
            line = f"iter={i} R={_number(result, RETURN)}"
            if ENV_RUNNER_RESULTS in (result.get(EVALUATION_RESULTS) or {}):
                line += f" R(eval)={_number(result, f'{EVALUATION_RESULTS}/{RETURN}')}"
            print(line, flush=True)
            best = float(np.fmax(best, _number(without_early_means(result), metric)))
            if should_stop(stop, result, keep_ray_up=True):
                break
    finally:
        algorithm.stop()
    return result, best


def _judge(key: str, value: float, best: float, args: argparse.Namespace, time_taken_s: float, results: Any) -> None:
    """Say whether the success metric was reached, and raise if it was not."""
    has_passed = best >= value
    if has_passed:
        print(f"`{key}` of {value} reached! ok")
    if args.as_release_test:
        summary = {
            "time_taken": time_taken_s,
            "last_update": time.time(),
            "stats": {name: part for name, part in results.items() if name != "config"} if args.no_tune else {},
            "passed": [has_passed],
            "not_passed": [not has_passed],
            "success_metric": key,
            "best_value": best,
            "target_value": value,
        }
        path = os.environ.get("TEST_OUTPUT_JSON", "/tmp/release_test_out.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(convert_numpy_to_python_primitives(summary), file, default=str)
    if not has_passed:
        raise ValueError(f"`{key}` of {value} not reached! Best value reached is {best}")


# Ray Tune.


def _tune_is_installed() -> bool:
    try:
        return importlib.util.find_spec("ray.tune.tuner") is not None
    except ImportError:
        return False


def _tune(trainable: Any, config: Any, args: argparse.Namespace, run_config: dict[str, Any], scheduler: Any) -> Any:
    """Run the trials, and return Tune's `ResultGrid`."""
    import ray
    from ray import train, tune

    place = tune if hasattr(tune, "RunConfig") else train  # where older versions of Ray have these classes
    ray.init(num_cpus=args.num_cpus or None, ignore_reinit_error=True)
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # Tune's newer output takes no progress reporter
    tuner = tune.Tuner(
        trainable,
        param_space=config,
        run_config=place.RunConfig(
            failure_config=place.FailureConfig(max_failures=0, fail_fast="raise"),
            verbose=1 if args.as_test or args.as_release_test else args.verbose,
            checkpoint_config=place.CheckpointConfig(
                checkpoint_frequency=args.checkpoint_freq, checkpoint_at_end=args.checkpoint_at_end
            ),
            **run_config,
        ),
        tune_config=tune.TuneConfig(
            num_samples=args.num_samples, max_concurrent_trials=args.max_concurrent_trials, scheduler=scheduler
        ),
    )
    return tuner.fit()


def _reporter(config: Any, args: argparse.Namespace) -> Any:
    """Return a reporter that shows iteration, time, env steps and returns, also of each policy if there are agents."""
    from ray import tune

    columns = dict(REPORT_COLUMNS)
    columns[RETURN] = "combined return" if args.num_agents else "episode return mean"
    for policy in config.policies if args.num_agents else ():
        columns[f"{ENV_RUNNER_RESULTS}/module_episode_returns_mean/{policy}"] = f"return {policy}"
    every_s = 30 if args.as_test or args.as_release_test else args.tune_max_report_freq
    return tune.CLIReporter(metric_columns=columns, max_report_frequency=every_s)


def _with_wandb(callbacks: Sequence[Any] | None, config: Any, args: argparse.Namespace) -> list[Any]:
    """Return the callbacks for Tune, with a logger to Weights & Biases if there is a key."""
    key = args.wandb_key or os.environ.get("WANDB_API_KEY")
    if not key:
        return list(callbacks or [])
    from ray.air.integrations.wandb import WandbLoggerCallback

    name = re.sub(r"\W+", "-", f"{args.algo}-{config.env}".lower())
    named = {"name": args.wandb_run_name} if args.wandb_run_name else {}
    logger = WandbLoggerCallback(api_key=key, project=args.wandb_project or name, upload_checkpoints=True, **named)
    return [*(callbacks or []), logger]
