"""The measures of Corral with several runners, which `corral_side.py` takes."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import corral_config
import measuring
import ray_runtime
from measuring import Fields, Options

# Env steps that each runner is asked for in a round where an env step takes 200 microseconds.
SCALING_STEPS = 2000
# The same where it takes a millisecond; and how many rounds of one group are counted in a turn.
STRAGGLER_STEPS = 200
STRAGGLER_ROUNDS = 8
STEADY_AFTER_ROUNDS = 5
# Policy and value nets with two layers of this width each have about a million parameters on CartPole.
MILLION_HIDDEN = [704, 704]
NUM_SYNCS = 50
WARMUP_SYNCS = 5


def group_sampling(options: Options) -> Fields:
    """Env steps per second that two runners of an engine bring to this process."""
    _start_runtime(options.engine)
    config = corral_config.config(options, options.num_envs).env_runners(num_env_runners=2).engine(options.engine)
    with config.build() as algo:
        sample = _sampler(algo.env_runner_group, measuring.STEPS_PER_SAMPLE)

        def count() -> int:
            return sum(rollout.num_env_steps for rollout in sample())

        return measuring.sampling_rate(count, options, perf_counter)


def group_ppo(options: Options) -> Fields:
    """Trained env steps per second of PPO with two runners of an engine."""
    _start_runtime(options.engine)
    config = corral_config.ppo_config(options).env_runners(num_env_runners=2).engine(options.engine)
    with config.build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options, perf_counter)


def scaling(options: Options) -> Fields:
    """How many times the env steps per second of one process runner two of them take."""
    with _group(_timed(options, 1, 200e-6, spins=True)) as one, _group(_timed(options, 2, 200e-6, spins=True)) as two:

        def counted(group: Any, num_runners: int) -> Callable[[], int]:
            sample = _sampler(group, num_runners * SCALING_STEPS)
            return lambda: sum(rollout.num_env_steps for rollout in sample())

        return measuring.relative_rate(counted(two, 2), counted(one, 1), options, perf_counter)


def straggler(options: Options) -> Fields:
    """Percent of their throughput that two of three runners lose when the third is ten times slower.

    The groups take turns of several rounds. The first round of a turn is not counted: the slow runner could finish
    its late fragment while the other group had its turn.
    """
    equal_config = _timed(options, 3, 1e-3)
    slow_config = _timed(options, 3, 1e-3, slow_runner=1)
    with _group(equal_config) as equal, _group(slow_config) as slow:
        samplers = {name: _sampler(group, 3 * STRAGGLER_STEPS) for name, group in (("equal", equal), ("slow", slow))}
        for sample in samplers.values():
            for _ in range(STEADY_AFTER_ROUNDS):
                sample()
        steps = {name: {1: 0, 2: 0, 3: 0} for name in samplers}
        seconds = dict.fromkeys(samplers, 0.0)
        start, turns = perf_counter(), 0
        while turns < 1 or perf_counter() - start < options.seconds:
            for name in sorted(samplers, reverse=bool(turns % 2)):
                seconds[name] += _count_rounds(samplers[name], steps[name])
            turns += 1
    of_fast = {name: (steps[name][2] + steps[name][3]) / seconds[name] for name in samplers}
    of_first = {name: steps[name][1] / seconds[name] for name in samplers}
    return {
        "percent": 100 * (1 - of_fast["slow"] / of_fast["equal"]),
        "env_steps_per_s_of_runners_2_and_3": of_fast,
        "env_steps_per_s_of_runner_1": of_first,
        "turns": turns,
    }


def _count_rounds(sample: Callable[[], list[Any]], steps: dict[int, int]) -> float:
    """Takes a turn, adds the env steps of its rounds by runner, and returns the seconds that they took."""
    sample()
    start = perf_counter()
    for _ in range(STRAGGLER_ROUNDS):
        for rollout in sample():
            steps[int(rollout.obs[0, 0, 0])] += rollout.num_env_steps
    return perf_counter() - start


def process_start(options: Options) -> Fields:
    """Seconds of the start of two process runners, and how much of that two imports of torch at once take."""
    import corral.engines.process  # noqa: F401

    config = _runners_to_start(options, "process")
    seconds = _in_turn(
        options,
        {"start": lambda: _seconds_to_start(config), "import": _seconds_to_import_torch},
    )
    return {
        "seconds": seconds["start"],
        "seconds_import_torch": seconds["import"],
        "percent_import_torch": 100 * seconds["import"] / seconds["start"],
    }


def ray_start(options: Options) -> Fields:
    """Seconds that the Ray engine's start takes beyond `ray.init` alone and the process engine's start."""
    ray_runtime.silence()
    import corral.engines.process
    import corral.engines.ray  # noqa: F401

    alone: Fields = {}
    process_config, ray_config = (_runners_to_start(options, engine) for engine in ("process", "ray"))

    def start_ray_alone() -> float:
        alone.update(_ray_alone())
        return float(alone["init_s"])

    seconds = _in_turn(
        options,
        {
            "ray_init": start_ray_alone,
            "process_engine": lambda: _seconds_to_start(process_config),
            "ray_engine": lambda: _seconds_to_start(ray_config),
        },
    )
    return {
        "seconds": seconds["ray_engine"] - seconds["ray_init"] - seconds["process_engine"],
        "seconds_ray_engine": seconds["ray_engine"],
        "seconds_process_engine": seconds["process_engine"],
        "seconds_ray_init": seconds["ray_init"],
        "seconds_ray_init_and_two_empty_actors": alone["two_actors_s"],
    }


def weight_sync(options: Options) -> Fields:
    """Milliseconds until two process runners have new weights of a module of a million parameters."""
    config = (
        corral_config.config(options, options.num_envs)
        .env_runners(num_env_runners=2)
        .engine("process")
        .rl_module(model_config={"fcnet_hiddens": MILLION_HIDDEN, "vf_share_layers": False})
    )
    with config.build() as algo:
        group, weights = algo.env_runner_group, algo.learner_group.get_weights()
        arrays = [array for of_module in weights.values() for array in of_module.values()]
        milliseconds = []
        for version in range(1, WARMUP_SYNCS + NUM_SYNCS + 1):
            start = perf_counter()
            group.sync_weights({"modules": weights}, version)
            # A runner takes one call after another, so that its answer says that it has the weights.
            answers = group.foreach_env_runner("ping")
            milliseconds.append(1e3 * (perf_counter() - start))
            assert answers == [True, True]
        states = group.foreach_env_runner("get_state")
    assert [state["weights_version"] for state in states] == [WARMUP_SYNCS + NUM_SYNCS] * 2
    counted = milliseconds[WARMUP_SYNCS:]
    lower, median, upper = statistics.quantiles(counted, n=4)
    return {
        "ms": median,
        "ms_quartiles": [lower, upper],
        "ms_most": max(counted),
        "syncs": len(counted),
        "parameters": sum(array.size for array in arrays),
        "bytes": sum(array.nbytes for array in arrays),
    }


def _start_runtime(engine: str) -> None:
    """Starts Ray if it is the engine, with the settings that RLlib gets it with."""
    if engine == "ray":
        ray_runtime.silence()
        ray_runtime.start()


def _timed(options: Options, num_env_runners: int, step_s: float, **env_config: Any) -> Any:
    """Returns a config of process runners with one timed env each."""
    from timed_env import TimedEnv

    env_config = {"step_s": step_s, "spins": False, **env_config}
    config = corral_config.config(options, num_envs=1).environment(TimedEnv, env_config=env_config)
    return config.env_runners(num_env_runners=num_env_runners).engine("process")


@contextmanager
def _group(config: Any) -> Iterator[Any]:
    """Starts a group of runners on an engine of its own, and ends both."""
    from corral.engines.lazy import LazyEngine
    from corral.runners.runner_group import EnvRunnerGroup

    engine = LazyEngine(config.engine_name)
    group = EnvRunnerGroup(config.freeze(), engine)
    try:
        yield group
    finally:
        group.stop()
        engine.stop()


def _sampler(group: Any, num_timesteps: int) -> Callable[[], list[Any]]:
    """Returns a function that samples once and collects the runners' metrics, as training does."""
    from corral.core.metrics.logger import MetricsLogger
    from corral.core.metrics.timers import Timers
    from corral.runners.requests import SampleRequest

    metrics, timers, request = MetricsLogger(), Timers(), SampleRequest(num_timesteps=num_timesteps)

    def sample() -> list[Any]:
        rollouts: list[Any] = group.sample(request, timers)
        group.collect_metrics(metrics, timers)
        metrics.reduce()
        return rollouts

    return sample


def _runners_to_start(options: Options, engine: str) -> Any:
    """Returns the config of the two runners whose start is measured."""
    return corral_config.config(options, options.num_envs).env_runners(num_env_runners=2).engine(engine)


def _seconds_to_start(config: Any) -> float:
    """Returns the seconds from nothing until all runners of a group have answered, and ends them."""
    start = perf_counter()
    with _group(config) as group:
        answers = group.foreach_env_runner("ping")
        seconds = perf_counter() - start
    assert answers == [True, True]
    return seconds


def _seconds_to_import_torch() -> float:
    """Returns the seconds that two fresh processes at once take to have imported torch."""
    # They end at once, so that the interpreter's tidying up is not part of it.
    command = [sys.executable, "-P", "-c", "import os, torch; os._exit(0)"]
    start = perf_counter()
    processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(2)]
    codes = [process.wait() for process in processes]
    seconds = perf_counter() - start
    assert codes == [0, 0]
    return seconds


def _ray_alone() -> Fields:
    """Returns what a fresh process measures of Ray's own start."""
    script = Path(__file__).with_name("ray_alone.py")
    done = subprocess.run(
        [sys.executable, os.fspath(script), "start"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    fields: Fields = json.loads(done.stdout)
    return fields


def _in_turn(options: Options, parts: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Measures several parts one after the other, another one first from pair to pair."""
    names = list(parts)
    first = options.seed % len(names)
    return {name: parts[name]() for name in names[first:] + names[:first]}
