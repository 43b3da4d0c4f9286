"""Measures what Corral learns with its tuned settings, and writes a table, with the returns of the zoo.

    make tuned

Every run (tuned.json) and the table (TUNED.md) are written after each run, so an interrupted measurement keeps what it
has. Runs in the file are not repeated unless the settings changed. `--only` chooses envs or algorithms, such as
`--only PPO`, `--only DQN:CartPole-v1`; without it, all settings are measured, which takes days on two cores.
"""

import argparse
import hashlib
import json
import statistics
import sys
from itertools import product
from pathlib import Path

from corral.algorithms.tuned_settings import tuned_algorithms, tuned_settings
from corral.tools.search.files import write_atomically
from processes import run_script
from runs_of_seeds import Run, add_runs, show_iqm

HERE = Path(__file__).resolve().parent
RUNS_FILE, TABLE_FILE = HERE / "tuned.json", HERE / "TUNED.md"
SEEDS = range(5)
# The return of one episode of Pendulum depends on its start more than on the policy: the mean of 20 is off by 20.
GREEDY_EPISODES = 100
TIMEOUT_SECONDS = 12 * 3600.0

# Mean returns, and env steps in thousands, of benchmark.md of rl-baselines3-zoo (commit 0088472): one run per row. The
# envs of LunarLander have version v2 there, and MuJoCo envs version v3.
ZOO: dict[str, dict[str, tuple[float, int]]] = {
    "PPO": {
        "CartPole-v1": (500.0, 100),
        "MountainCar-v0": (-110.4, 1000),
        "Acrobot-v1": (-73.5, 1000),
        "Pendulum-v1": (-172.2, 100),
        "LunarLander-v3": (242.1, 1000),
        "LunarLanderContinuous-v3": (270.9, 1000),
        "BipedalWalker-v3": (213.3, 5000),
        "BipedalWalkerHardcore-v3": (122.4, 100_000),
        "HalfCheetah-v5": (5819.1, 1000),
        "Hopper-v5": (2410.4, 1000),
        "Walker2d-v5": (3478.8, 1000),
        "Ant-v5": (1327.2, 1000),
        "Swimmer-v5": (281.6, 1000),
    },
    "DQN": {
        "CartPole-v1": (500.0, 50),
        "MountainCar-v0": (-100.8, 120),
        "Acrobot-v1": (-76.6, 100),
        "LunarLander-v3": (154.4, 100),
    },
    "SAC": {
        "Pendulum-v1": (-157.0, 20),
        "MountainCarContinuous-v0": (94.7, 50),
        "LunarLanderContinuous-v3": (260.4, 500),
        "BipedalWalker-v3": (297.7, 500),
        "BipedalWalkerHardcore-v3": (4.4, 10_000),
        "HalfCheetah-v5": (9535.5, 1000),
        "Hopper-v5": (2325.5, 1000),
        "Walker2d-v5": (3863.2, 1000),
        "Ant-v5": (4615.8, 1000),
        "Humanoid-v5": (6232.3, 2000),
        "Swimmer-v5": (345.6, 1000),
    },
    "TD3": {
        "Pendulum-v1": (-151.9, 20),
        "MountainCarContinuous-v0": (93.5, 300),
        "LunarLanderContinuous-v3": (207.5, 300),
        "BipedalWalker-v3": (306.0, 1000),
        "HalfCheetah-v5": (9655.7, 1000),
        "Hopper-v5": (3606.4, 1000),
        "Walker2d-v5": (4717.8, 1000),
        "Ant-v5": (5813.3, 1000),
        "Humanoid-v5": (5566.7, 2000),
        "Swimmer-v5": (359.1, 1000),
    },
    # The zoo has none of them.
    "APPO": {},
    "IMPALA": {},
    "PQN": {},
}

INTRODUCTION = f"""\
# What the tuned settings learn

Written by `make tuned`. Corral trains with the settings of `corral train --tuned ENV --algo ALGO`, one run for each of
five seeds. A return is the mean of {GREEDY_EPISODES} episodes without exploration after training; the table has
the interquartile mean of the seeds with its 95% interval (Agarwal et al. 2021, arXiv:2108.13264), and each seed. *CPU*
is the mean of the CPU seconds of a run, on one thread.

A learning curve is the mean return of the latest 100 episodes of training, with exploration: a thin line for each seed,
and a thick one for their mean. `python docs/make_pictures.py` draws the curves.

*Zoo* is the return of the agent of [rl-baselines3-zoo](https://github.com/DLR-RM/rl-baselines3-zoo) for
Stable-Baselines3, as its `benchmark.md` reports it: one run, of which the best of several may have been kept, with the
env steps that it gives, and for LunarLander and MuJoCo on older versions of the envs. Some settings were not measured:
on two cores their runs take days.

Some settings were changed after seeds of this table had been seen, so their rows may be a little too good: PPO for Ant
(621.3 before, chosen with seed 0), for Swimmer (151.2, chosen with seeds 0 and 1), for HalfCheetah (seed 1 gave 747.8)
and for CartPole (476.0), and DQN for CartPole (two of five seeds ended below 150). TD3 for InvertedPendulum trains for
100,000 env steps, since three seeds with 20,000 and a learning rate of 1e-3 had returns of 66.9, 283.3 and 1,000.0, and
five seeds with 30,000 and 3e-4 had 183.0, 1,000.0, 1,000.0, 438.9 and 1,000.0."""


def main() -> int:
    """Run what is missing, write the table after each run; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="algorithms, or ALGO:ENV")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each has one thread")
    options = parser.parse_args()
    cells = [(algo, env) for env, algos in tuned_algorithms().items() for algo in algos if algo in ZOO]
    if options.only:
        known = {name for algo, env in cells for name in (algo, f"{algo}:{env}")}
        if unknown := sorted({*options.only} - known):
            parser.error(f"--only: there are no tuned settings of {', '.join(unknown)}")
        cells = [(algo, env) for algo, env in cells if {algo, f"{algo}:{env}"} & {*options.only}]
    runs: list[Run] = json.loads(RUNS_FILE.read_text()) if RUNS_FILE.exists() else []
    runs = [run for run in runs if run["settings"] == fingerprint(run["algo"], run["env"])]
    done = {(run["algo"], run["env"], run["seed"]) for run in runs}
    wanted = [(*cell, seed) for seed, cell in product(range(options.seeds), cells) if (*cell, seed) not in done]

    def keep() -> None:
        runs.sort(key=lambda run: (run["algo"], run["env"], run["seed"]))
        write_atomically(RUNS_FILE, "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
        write_atomically(TABLE_FILE, render(runs))

    failed = add_runs(train, wanted, options.jobs, runs, keep)
    write_atomically(TABLE_FILE, render(runs))
    return int(failed)


def fingerprint(algo: str, env: str) -> str:
    """Return a text that changes with the tuned settings of an env."""
    try:
        settings = tuned_settings(env, algo)
    except ValueError:  # they were removed
        return ""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def train(algo: str, env: str, seed: int) -> Run:
    """Run one training in a process of its own and return its fields, or an `error`."""
    num_steps = tuned_settings(env, algo)["stop"]["num_env_steps"]
    command = [sys.executable, str(HERE / "learning_side.py"), "corral", algo, env, "--tuned", "--seed", str(seed)]
    command += ["--steps", str(num_steps), "--episodes", str(GREEDY_EPISODES)]
    outcome = run_script(command, TIMEOUT_SECONDS, HERE.parent)
    if outcome.line is None:
        return {"algo": algo, "env": env, "seed": seed, "error": outcome.error}
    return {**outcome.line, "settings": fingerprint(algo, env)}


def render(runs: list[Run]) -> str:
    """Return the page with one table per algorithm and a row per env, also for settings that were not measured."""
    lines = [INTRODUCTION]
    for algo in ZOO:
        lines += ["", f"## {algo}", ""]
        if (HERE.parent / (picture := f"docs/images/tuned-{algo.lower()}.svg")).exists():
            lines += [f"![Learning curves of {algo}](../{picture})", ""]
        lines += ["| Env | Env steps | Return | Each seed | Zoo (its env steps) | CPU s |"]
        lines += ["| --- | ---: | ---: | --- | ---: | ---: |"]
        for env, algos in tuned_algorithms().items():
            if algo in algos:
                found = [run for run in runs if (run["algo"], run["env"]) == (algo, env)]
                lines.append("| " + " | ".join(row(algo, env, found)) + " |")
    return "\n".join(lines) + "\n"


def row(algo: str, env: str, runs: list[Run]) -> list[str]:
    """Return the cells of a row: what the runs with the tuned settings of an env learned."""
    num_steps = tuned_settings(env, algo)["stop"]["num_env_steps"]
    zoo, zoo_steps = ZOO[algo].get(env, (None, 0))
    shown = "" if zoo is None else f"{zoo:,.1f} ({zoo_steps * 1000:,})"
    if not runs:
        return [env, f"{num_steps:,}", "not measured", "", shown, ""]
    returns = [run["greedy_return"] for run in runs]
    mean = show_iqm(returns, digits=1)
    if len(returns) < len(SEEDS):
        mean += f", {len(returns)} of {len(SEEDS)} seeds"
    each = ", ".join(f"{value:,.1f}" for value in returns)
    cpu_seconds = statistics.mean(run["cpu_seconds"] for run in runs)
    return [env, f"{num_steps:,}", mean, each, shown, f"{cpu_seconds:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
