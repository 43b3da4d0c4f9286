"""How many CPUs each process of Corral keeps busy when it may have one thread."""

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import measuring
from measuring import Fields, Options

# Wide enough that a library with several threads would use them.
WIDTH = 256
STEPS_PER_ITERATION = 200
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_per_wall(options: Options) -> Fields:
    """CPU seconds per wall second of the busiest process: all algorithms, embedded and in worker processes."""
    ratios: dict[str, float] = {}
    for algo_name in ("PPO", "DQN", "SAC"):
        for where, num_workers in (("embedded", 0), ("workers", 2)):
            with _config(algo_name, num_workers, options).build() as algo:
                train = measuring.trainer(algo)
                train(), train()
                before, start = _cpu_seconds(), perf_counter()
                while perf_counter() - start < options.seconds:
                    train()
                wall, after = perf_counter() - start, _cpu_seconds()
                used = [after[pid] - before[pid] for pid in before.keys() & after.keys()]
                ratios[f"{algo_name}_{where}"] = max(used) / wall
    return {"cpus": max(ratios.values()), **ratios}


def _config(algo_name: str, num_workers: int, options: Options) -> Any:
    from corral.algorithms.registry import config_class

    config = (
        config_class(algo_name)()
        .environment("CartPole-v1" if algo_name == "DQN" else "Pendulum-v1")
        .rl_module(model_config={"fcnet_hiddens": [WIDTH, WIDTH]})
        .env_runners(num_env_runners=num_workers)
        # Learners have two CPUs each, so that `num_threads` alone limits their threads.
        .learners(num_learners=num_workers, num_threads=1, num_cpus_per_learner=2)
        .engine("process")
        .debugging(seed=options.seed)
    )
    if algo_name != "PPO":
        config = config.training(num_steps_sampled_before_learning_starts=STEPS_PER_ITERATION)
        config = config.reporting(min_sample_timesteps_per_iteration=STEPS_PER_ITERATION)
    return config


def _cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds so far of this process and of all processes below it, by process id."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    family = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return {pid: seconds[pid] for pid in family}
