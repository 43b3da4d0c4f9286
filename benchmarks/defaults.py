"""Compares what Corral and Stable-Baselines3 learn with their default settings, env by env, and writes a table.

    make defaults

The table (DEFAULTS.md) and every run (a JSON file next to it) are written after each run, so an interrupted comparison
keeps what it has. Runs in the file are not repeated; `--again corral` repeats the runs of one library.
What a run learns depends on its seed and not on the load of the machine.
"""

import argparse
import json
import statistics
import sys
from itertools import product
from pathlib import Path

from corral.core.comparisons import interquartile_mean
from corral.tools.search.files import write_atomically
from processes import run_script
from runs_of_seeds import Run, add_runs, judge

HERE = Path(__file__).resolve().parent
LIBRARIES = ("corral", "sb3")
TIMEOUT_SECONDS = 3600.0

# Env steps per run. Ten envs in all: classic control, Box2D and MuJoCo. DQN needs Discrete actions, SAC and TD3 a Box.
RUNS: dict[str, dict[str, int]] = {
    "PPO": {
        "CartPole-v1": 50_000,
        "Acrobot-v1": 100_000,
        "Pendulum-v1": 150_000,
        "LunarLander-v3": 200_000,
        "LunarLanderContinuous-v3": 200_000,
        "BipedalWalker-v3": 200_000,
        "InvertedDoublePendulum-v5": 100_000,
        "Hopper-v5": 200_000,
        "Walker2d-v5": 200_000,
        "HalfCheetah-v5": 200_000,
    },
    "DQN": {"CartPole-v1": 50_000, "Acrobot-v1": 50_000, "LunarLander-v3": 100_000},
    "SAC": {
        "Pendulum-v1": 8_000,
        "LunarLanderContinuous-v3": 20_000,
        "InvertedDoublePendulum-v5": 15_000,
        "Hopper-v5": 20_000,
        "HalfCheetah-v5": 20_000,
    },
    "TD3": {
        "Pendulum-v1": 8_000,
        "LunarLanderContinuous-v3": 20_000,
        "InvertedDoublePendulum-v5": 15_000,
        "Hopper-v5": 20_000,
        "HalfCheetah-v5": 20_000,
    },
}

# After 8,000 to 20,000 steps the returns of SAC and TD3 differ much from seed to seed.
NUM_SEEDS = {"PPO": 3, "DQN": 3, "SAC": 6, "TD3": 6}

INTRODUCTION = [
    "# What the default settings learn",
    "",
    "Written by `make defaults`. Both libraries train with their own defaults for the same number of env steps,",
    "on envs as Gymnasium makes them, with "
    f"{NUM_SEEDS['PPO']} seeds for PPO and DQN and {NUM_SEEDS['SAC']} for SAC and TD3.",
    "SAC and TD3 had seeds 0 to 2 at first. With these, SAC was below on Pendulum-v1 and",
    "LunarLanderContinuous-v3, and TD3 on Pendulum-v1 and HalfCheetah-v5. The defaults of SAC stayed. TD3 had",
    "a learning rate of 3e-4 and layers of 256 and 256, and has 1e-3 and layers of 400 and 300 as in its paper: chosen",
    "among several settings by their returns with seeds 0 to 2. Seeds 3 to 5 had no part in the choice.",
    "Corral's DQN was measured on a slower machine than Stable-Baselines3's, where it needs 1.6 times the CPU seconds.",
]


def main() -> int:
    """Run what is missing, write the table after each run; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corral-python", default=sys.executable, help="an interpreter with Corral, Box2D and MuJoCo")
    parser.add_argument("--sb3-python", default=sys.executable, help="an interpreter with Stable-Baselines3 and both")
    parser.add_argument("--only", help="comma-separated algorithms")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each has one thread")
    parser.add_argument("--again", choices=LIBRARIES, help="repeat the runs of this library")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.NAME=VALUE", help="settings of Corral's")
    parser.add_argument("--out", type=Path, default=HERE / "DEFAULTS.md", help="the table; the runs go next to it")
    options = parser.parse_args()
    raw_path = options.out.with_name(f"{options.out.stem.lower()}.json")
    runs: list[Run] = json.loads(raw_path.read_text()) if raw_path.exists() else []
    algos = options.only.split(",") if options.only else list(RUNS)
    if options.again:
        runs = [run for run in runs if run["library"] != options.again or run["algo"] not in algos]
    done = {key(run) for run in runs}
    wanted = [
        (library, algo, env, seed)
        for algo in algos
        for env, library in product(RUNS[algo], LIBRARIES)
        for seed in range(NUM_SEEDS[algo])
        if (library, algo, env, seed) not in done
    ]
    wanted.sort(key=lambda job: (algos.index(job[1]), job[3]))  # all envs with one seed, then with the next one
    pythons = {"corral": options.corral_python, "sb3": options.sb3_python}

    def keep() -> None:
        runs.sort(key=key)
        write_atomically(raw_path, json.dumps(runs, indent=1) + "\n")
        write_atomically(options.out, render(runs))

    jobs = [(*job, RUNS[job[1]][job[2]], pythons[job[0]], options.set) for job in wanted]
    failed = add_runs(train, jobs, options.jobs, runs, keep)
    write_atomically(options.out, render(runs))
    return int(failed)


def key(run: Run) -> tuple[str, str, str, int]:
    """Return what tells runs apart."""
    return run["library"], run["algo"], run["env"], run["seed"]


def train(library: str, algo: str, env: str, seed: int, num_steps: int, python: str, settings: list[str]) -> Run:
    """Run one training in a process of its own and return its fields, or an `error`."""
    command = [python, str(HERE / "learning_side.py"), library, algo, env]
    command += ["--seed", str(seed), "--steps", str(num_steps)]
    if library == "corral":
        command += [word for setting in settings for word in ("--set", setting)]
    outcome = run_script(command, TIMEOUT_SECONDS, HERE.parent)
    if outcome.line is None:
        return {"library": library, "algo": algo, "env": env, "seed": seed, "error": outcome.error}
    return outcome.line


def render(runs: list[Run]) -> str:
    """Return the page with one table per algorithm."""
    lines = [
        *INTRODUCTION,
        "A cell holds the interquartile mean and, in brackets, each seed; with three seeds that is the mean.",
        "*Training* is the mean return of the last 100 episodes of training; *greedy* is the mean return of 20",
        "episodes without exploration after training; *CPU* is the mean of the CPU seconds of training. Corral is",
        "*better* or *below* if the 95% interval of the probability that one of its runs has a higher greedy return",
        "than one of Stable-Baselines3's (Agarwal et al. 2021, arXiv:2108.13264) is above or below a half, and",
        "otherwise *as good*; the number is this probability. What a run learns does not depend on the load of the",
        "machine; its CPU seconds depend on it a little. A row with fewer seeds is not complete: no verdict is given.",
    ]
    for algo, steps in RUNS.items():
        rows = []
        for env, num_steps in steps.items():
            by_key = {key(run): run for run in runs}
            wanted = range(NUM_SEEDS[algo])
            seeds = [seed for seed in wanted if all((library, algo, env, seed) in by_key for library in LIBRARIES)]
            if not seeds:
                continue
            of = {library: [by_key[library, algo, env, seed] for seed in seeds] for library in LIBRARIES}
            cells = [
                show([run[f"{kind}_return"] for run in of[library]])
                for kind in ("training", "greedy")
                for library in LIBRARIES
            ]
            cpu = " / ".join(f"{statistics.mean(run['cpu_seconds'] for run in of[lib]):,.0f}" for lib in LIBRARIES)
            verdict = judge(*([run["greedy_return"] for run in of[library]] for library in LIBRARIES))
            if len(seeds) < len(wanted):
                verdict = f"{len(seeds)} of {len(wanted)} seeds"
            rows.append(f"| {env} | {num_steps:,} | {' | '.join(cells)} | {cpu} | {verdict} |")
        if rows:
            lines += ["", f"## {algo}", ""]
            lines.append("| Env | Env steps | Corral training | SB3 training | Corral greedy | SB3 greedy | CPU s | |")
            lines += ["| --- | ---: | --- | --- | --- | --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def show(values: list[float]) -> str:
    """Return the interquartile mean and each value."""
    return f"{interquartile_mean(values):,.0f} ({', '.join(f'{value:,.0f}' for value in values)})"


if __name__ == "__main__":
    sys.exit(main())
