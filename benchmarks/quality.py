"""A leaderboard: the env steps and CPU seconds that algorithms need to a return, of Corral and of Stable-Baselines3.

    make quality
    make quality ONLY="Pendulum-v1"

Every run (quality.json) and the table (QUALITY.md) are written after each run, so an interrupted measurement keeps what
it has, and the next one continues. Runs in the file are not repeated unless the settings of their row or their env
changed. A new row or env is one more entry in `quality_rows.py`.
"""

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from corral.core.comparisons import interquartile_mean
from corral.tools.search.files import write_atomically
from processes import run_script
from quality_rows import NUM_SEEDS, ROWS, TASKS, Row, Task
from runs_of_seeds import Run, add_runs, show_iqm

HERE = Path(__file__).resolve().parent
RUNS_FILE, TABLE_FILE = HERE / "quality.json", HERE / "QUALITY.md"
TIMEOUT_SECONDS = 6 * 3600.0

INTRODUCTION = """\
# Env steps and CPU seconds to a return

Written by `make quality`, which anyone can repeat; `benchmarks/quality_rows.py` has the envs and the rows. One run
for each of {num_seeds} seeds, on one thread. During training the policy is evaluated at equal distances, by 10
episodes without exploration, whose time does not count, and after the last env step by 20.

*Reached* is how many runs had an evaluation at or above the return in the heading. *Env steps* and *CPU s* are the
medians over the seeds of when that first happened; a run that never got there counts as later than all others. *Last*
is the interquartile mean of the last evaluations with its 95% interval (Agarwal et al. 2021, arXiv:2108.13264), and
*best* the interquartile mean of the best evaluation of each run, which is also the luckiest: chance makes it better
than *last* for a policy that stays as it is. What a run learns does not depend on the load of the machine; its CPU
seconds depend on it a little. A row names the commit of Corral, or the version of the other library, and the day of its
latest run. Rows are listed when all of their seeds are measured. The rows of Corral's DQN, and of SAC on
InvertedDoublePendulum, are from a slower machine, on which they need 1.6 times the CPU seconds.
"""


def main() -> int:
    """Run what is missing, write the table after each run; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help='envs, or ENV:ROW, such as "Hopper-v5:Corral SAC"')
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each has one thread")
    parser.add_argument("--sb3-python", default=sys.executable, help="an interpreter with Stable-Baselines3")
    options = parser.parse_args()
    cells = [(env, row) for env, rows in ROWS.items() for row in rows]
    if options.only:
        known = {name for env, row in cells for name in (env, f"{env}:{row.name}")}
        if unknown := sorted({*options.only} - known):
            parser.error(f"--only: there are no rows {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        cells = [(env, row) for env, row in cells if {env, f"{env}:{row.name}"} & {*options.only}]
    runs = read_runs()
    done = {(run["env"], run["row"], run["seed"]) for run in runs}
    wanted = [(*cell, seed) for seed in range(options.seeds) for cell in cells]
    wanted = [(env, row, seed) for env, row, seed in wanted if (env, row.name, seed) not in done]
    pythons = {"corral": sys.executable, "sb3": options.sb3_python}

    def keep() -> None:
        runs.sort(key=lambda run: (run["env"], run["row"], run["seed"]))
        write_atomically(RUNS_FILE, "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
        write_atomically(TABLE_FILE, render(runs))

    jobs = [(env, row, seed, pythons[row.library]) for env, row, seed in wanted]
    failed = add_runs(train, jobs, options.jobs, runs, keep)
    write_atomically(TABLE_FILE, render(runs))
    return int(failed)


def read_runs() -> list[Run]:
    """Return the runs in the file whose row and env are as they were."""
    runs: list[Run] = json.loads(RUNS_FILE.read_text()) if RUNS_FILE.exists() else []
    now = {(env, row.name): fingerprint(TASKS[env], row) for env, rows in ROWS.items() for row in rows}
    return [run for run in runs if run["fingerprint"] == now.get((run["env"], run["row"]))]


def fingerprint(task: Task, row: Row) -> str:
    """Return a text that changes with the settings of a row and the length of its runs, but not with the threshold."""
    settings = {**asdict(row), "num_steps": task.num_steps, "every": task.every}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def train(env: str, row: Row, seed: int, python: str) -> Run:
    """Run one training in a process of its own and return its fields, or an `error`."""
    command = [python, str(HERE / "quality_side.py"), env, row.name, "--seed", str(seed)]
    commit = commit_of_this_tree() if row.library == "corral" else ""
    outcome = run_script(command, TIMEOUT_SECONDS, HERE.parent)
    if outcome.line is None:
        return {"env": env, "row": row.name, "seed": seed, "error": outcome.error}
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return {**outcome.line, "commit": commit, "day": day, "fingerprint": fingerprint(TASKS[env], row)}


def commit_of_this_tree() -> str:
    """Return the short id of the commit, with `+` if `src` has other changes; empty outside a repository."""
    found = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=HERE, capture_output=True, text=True)
    changes = subprocess.run(
        ["git", "status", "--porcelain", "--", str(HERE.parent / "src")], cwd=HERE, capture_output=True, text=True
    )
    return found.stdout.strip() + "+" * bool(changes.stdout.strip())


def render(runs: list[Run]) -> str:
    """Return the page: a table per env, of the rows whose seeds are all measured, and the settings of these rows."""
    lines, listed = [INTRODUCTION.format(num_seeds=NUM_SEEDS)], dict[str, Row]()
    for env, rows in ROWS.items():
        task, cells = TASKS[env], []
        for row in rows:
            own = [run for run in runs if (run["env"], run["row"]) == (env, row.name)]
            if len(own) >= NUM_SEEDS:
                cells.append(cells_of(row, own, task))
                listed[row.name] = row
        if not cells:
            continue
        aim = f"{task.threshold:,g}% of episodes at the goal" if task.has_goals else f"{task.threshold:,g}"
        lines += [f"## {env.rpartition(':')[2]}: {aim} within {task.num_steps:,} env steps", ""]
        lines += ["| | reached | env steps | CPU s | last | best | version | day |"]
        lines += ["| --- | ---: | ---: | ---: | --- | ---: | --- | --- |"]
        lines += ["| " + " | ".join(texts) + " |" for _, texts in sorted(cells, key=lambda pair: pair[0])]
        lines.append("")
    lines += ["## Settings", "", "What differs from the defaults of the library:", ""]
    for name, row in listed.items():
        settings = ", ".join(f"`{path}={value!r}`" for path, value in row.settings.items())
        lines.append(f"- {name}: {settings or 'nothing'}.")
    return "\n".join(lines) + "\n"


def cells_of(row: Row, runs: list[Run], task: Task) -> tuple[tuple[float, float], list[str]]:
    """Return by what a row is sorted, and its cells."""
    found = [reached(run["points"], task.threshold) for run in runs]
    steps, seconds = (statistics.median_high(each) for each in zip(*found, strict=True))
    last = [run["points"][-1][2] for run in runs]
    best = interquartile_mean([max(point[2] for point in run["points"]) for run in runs])
    newest = max(runs, key=lambda run: run["day"])
    texts = [
        row.name,
        f"{sum(steps < math.inf for steps, _ in found)} of {len(runs)}",
        f"{steps:,}" if steps < math.inf else "later",
        f"{seconds:,.0f}" if seconds < math.inf else "later",
        show_iqm(last),
        f"{best:,.0f}",
        newest["commit"] or newest["version"],
        newest["day"],
    ]
    return (steps, -interquartile_mean(last)), texts


def reached(points: list[list[float]], threshold: float) -> tuple[float, float]:
    """Return env steps and CPU seconds of the first evaluation at or above a return; infinity without one."""
    return next(((steps, seconds) for steps, seconds, value in points if value >= threshold), (math.inf, math.inf))


if __name__ == "__main__":
    sys.exit(main())
