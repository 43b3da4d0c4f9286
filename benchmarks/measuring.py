"""What the measuring scripts share: their command line, their one line of output and their clocks.

Every script measures one thing in a fresh process and prints one JSON object. Libraries print to stdout as
they please (and so do the processes they start), so the real stdout is put aside before anything heavy is
imported. Nothing outside the standard library is imported here: the import times are measured on top of it.
"""

import argparse
import json
import os
import statistics
import sys
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

Fields = dict[str, Any]
Clock = Callable[[], float]
"""Returns seconds: `process_time` where all the work is done in one process, whatever else runs on the machine, and
`perf_counter` where processes work for each other."""

ENV = "CartPole-v1"
TARGET_RETURN = 450.0
# Env steps asked for in one sampling call, whatever the number of envs: the batch of the PPO measure.
STEPS_PER_SAMPLE = 2048
HIDDEN = [64, 64]
WIDE = [512, 512]
LSTM = 64  # width of the LSTM and of the hidden layer next to it
SEQUENCE = 20  # env steps
# Agents in each env where there are several.
NUM_AGENTS = 4
WARMUP_ITERATIONS = 2
# Env steps after which the return of TD3 is measured.
TD3_STEPS = 10_000
LOG_CALL = 'logger.log_value("x", 1.0, reduce="mean", window=50)'
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Options:
    """The command line of one measurement."""

    num_envs: int
    seconds: float
    seed: int
    cap: float
    engine: str = "process"


Measure = Callable[[Options], Fields]


def run_measure(system: str, measures: Mapping[str, Measure], finish: Callable[[], None] | None = None) -> None:
    """Runs the measure named on the command line and prints its JSON line.

    Args:
        system: The name of the measured system, as it appears in the results.
        measures: The measures this script knows.
        finish: Called after the line is out, so that tearing a library down is not part of its time.
    """
    parser = argparse.ArgumentParser(description=f"Takes one measurement of {system} and prints a JSON line.")
    parser.add_argument("measure", choices=sorted(measures))
    parser.add_argument("--num-envs", type=int, default=8, help="envs stepped together (sampling)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=300.0, help="seconds until time_to_450 gives up")
    parser.add_argument("--threads", type=int, help="of the numeric libraries, instead of their default")
    parser.add_argument("--engine", choices=("process", "ray"), default="process", help="what runs Corral's runners")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        # Read when NumPy and PyTorch are imported, which must be later: else NumPy takes a thread per core.
        if early := {"numpy", "torch"} & set(sys.modules):
            parser.error(f"--threads comes too late: {', '.join(early)} is imported with the measures")
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(arguments.threads)))
    options = Options(arguments.num_envs, arguments.seconds, arguments.seed, arguments.cap, arguments.engine)

    line_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        fields = measures[arguments.measure](options)
        line_out.write(json.dumps({"system": system, "measure": arguments.measure, **fields}) + "\n")
        line_out.close()
    finally:
        if finish is not None:
            finish()


def print_line(work: Callable[[], Fields]) -> None:
    """Prints what `work` returns as a JSON line; what libraries print to stdout goes to stderr."""
    line_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line_out.write(json.dumps(work()) + "\n")
    line_out.close()
    sys.stdout.flush()


def sampling_rate(sample: Callable[[], int], options: Options, clock: Clock = process_time) -> Fields:
    """Measures env steps per second of `sample`, which samples once and returns how many steps that were."""
    _run_for(sample, min(0.5, options.seconds), clock)
    seconds, steps = _run_for(sample, options.seconds, clock)
    return {"num_envs": options.num_envs, **_rate(steps, seconds, clock)}


def training_rate(train: Callable[[], int], options: Options, clock: Clock = process_time) -> Fields:
    """Measures trained env steps per second of `train`, which returns the steps of one whole iteration."""
    for _ in range(WARMUP_ITERATIONS):
        train()
    return _rate(*_run_for(train, options.seconds, clock)[::-1], clock)


def _rate(steps: int, seconds: float, clock: Clock) -> Fields:
    return {"env_steps_per_s": steps / seconds, "env_steps": steps, "clock": clock_name(clock)}


def clock_name(clock: Clock) -> str:
    """Returns what the report calls the seconds of a clock."""
    return "CPU" if clock is process_time else "wall"


def num_env_steps(result: Any) -> int:
    """Returns the env steps of a run so far."""
    return int(result["num_env_steps_sampled_lifetime"])


def num_agent_steps(result: Any) -> int:
    """Returns the steps of all agents of a run so far; RLlib counts them by agent."""
    steps = result["env_runners"]["num_agent_steps_sampled_lifetime"]
    return int(sum(steps.values()) if isinstance(steps, Mapping) else steps)


def trainer(algo: Any, count: Callable[[Any], int] = num_env_steps) -> Callable[[], int]:
    """Returns a function that does one iteration of an algorithm and says how many steps that were.

    Args:
        algo: An algorithm of Corral or RLlib.
        count: Returns the steps so far, given a result.
    """
    steps_before = 0

    def train() -> int:
        nonlocal steps_before
        lifetime = count(algo.train())
        steps, steps_before = lifetime - steps_before, lifetime
        return steps

    return train


def train_until_target(train: Callable[[], tuple[float, int]], options: Options) -> Fields:
    """Trains until the mean episode return reaches the target or the cap has passed.

    `train` does one iteration and returns the library's own running mean and its lifetime env steps. The CPU
    seconds that count are taken by the caller of this script: of this process and all that it started, until the line.
    """
    start = perf_counter()
    while True:
        mean, steps = train()
        reached = mean >= TARGET_RETURN
        if reached or perf_counter() - start > options.cap:
            # JSON has no NaN: a mean without a finished episode is left out.
            shown = round(mean, 2) if mean == mean else None
            return {
                "reached": reached,
                "episode_return_mean": shown,
                "env_steps": steps,
                "seed": options.seed,
            }


def time_import(do_import: Callable[[], object]) -> Fields:
    """Times an import statement, and says whether it brought torch in."""
    start = process_time()
    do_import()
    seconds = process_time() - start
    return {"seconds": seconds, "torch_imported": "torch" in sys.modules, "clock": clock_name(process_time)}


def callback_cost(
    without: Callable[[], int],
    subscribed: Callable[[], int],
    plain_call: Callable[[], object],
    options: Options,
) -> Fields:
    """Measures what a subscribed no-op costs per env step beyond the Python call itself.

    Both samplers take turns, one sampling call each, and swap who goes first, so that a drift of the machine
    falls on both alike; the median over the turns leaves out the turns that something disturbed.

    Args:
        without: Samples once with no subscriber and returns the env steps.
        subscribed: The same with the no-op subscribed to `on_episode_step`.
        plain_call: Calls the no-op once with the same keyword arguments.
        options: The command line; `seconds` is the time for all turns.
    """
    for sampler in (without, subscribed):
        _run_for(sampler, min(0.5, options.seconds), process_time)
    differences: list[float] = []
    start = process_time()
    while len(differences) < 8 or process_time() - start < options.seconds:
        turn = (without, subscribed) if len(differences) % 2 == 0 else (subscribed, without)
        costs = {sampler: _seconds_per_step(sampler, process_time) for sampler in turn}
        differences.append(1e6 * (costs[subscribed] - costs[without]))
    lower, median, upper = statistics.quantiles(differences, n=4)
    # `plain_call` is wrapped in a function without arguments; the cost of such a call is taken off.
    number = 200_000
    wrapped = min(timeit.repeat(plain_call, timer=process_time, number=number, repeat=5))
    wrapper = min(timeit.repeat(lambda: None, timer=process_time, number=number, repeat=5))
    call = 1e6 * (wrapped - wrapper) / number
    return {
        "us_per_call": median - call,
        "us_difference": median,
        "us_difference_quartiles": [lower, upper],
        "us_python_call": call,
        "turns": len(differences),
        "clock": clock_name(process_time),
    }


def relative_rate(
    sample: Callable[[], int], baseline: Callable[[], int], options: Options, clock: Clock = process_time
) -> Fields:
    """Measures how many times the env steps per second of another sampler one takes.

    Both take turns of one sampling call each, and swap who goes first; the value is the median over the turns of the
    ratio within a turn.

    Args:
        sample: Samples once and returns the env steps.
        baseline: What it is compared with.
        options: The command line; `seconds` is the time for all turns.
        clock: Measures the seconds.
    """
    samplers = (sample, baseline)
    for sampler in samplers:
        sampler()
    ratios: list[float] = []
    start = clock()
    while len(ratios) < 4 or clock() - start < options.seconds:
        turn = samplers if len(ratios) % 2 == 0 else samplers[::-1]
        costs = {sampler: _seconds_per_step(sampler, clock) for sampler in turn}
        ratios.append(costs[baseline] / costs[sample])
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return {"times": median, "times_quartiles": [lower, upper], "turns": len(ratios), "clock": clock_name(clock)}


def call_time(call: str, names: Mapping[str, Any], options: Options) -> Fields:
    """Measures microseconds of one call, over so many that work put off from one to a later one is in it.

    Args:
        call: A Python expression.
        names: The names in it.
        options: The command line; `seconds` is the time for all repeats.
    """
    timer = timeit.Timer(call, timer=process_time, globals=dict(names))
    number, _ = timer.autorange()  # takes at least 0.2 s
    repeats: list[float] = []
    start = process_time()
    while len(repeats) < 5 or process_time() - start < options.seconds:
        repeats.append(1e6 * timer.timeit(number) / number)
    return {
        "us_per_call": statistics.median(repeats),
        "us_range": [min(repeats), max(repeats)],
        "calls": number * len(repeats),
        "clock": clock_name(process_time),
    }


def _run_for(work: Callable[[], int], seconds: float, clock: Clock) -> tuple[float, int]:
    """Calls `work` until the time has passed and returns the time taken and the sum of what it returned."""
    steps = 0
    start = clock()
    while True:
        steps += work()
        elapsed = clock() - start
        if elapsed >= seconds:
            return elapsed, steps


def _seconds_per_step(work: Callable[[], int], clock: Clock) -> float:
    """Calls `work` once and returns the seconds that each of its env steps took."""
    start = clock()
    steps = work()
    return (clock() - start) / steps
