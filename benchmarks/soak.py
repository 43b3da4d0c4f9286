"""Lets PPO, DQN and APPO run for hours while their runners fail, and measures whether anything grows.

    python benchmarks/soak.py --hours 2

Each algorithm has a process of its own, in which it trains on two runners that raise, hang and are killed at random.
Every 10 seconds this program notes memory, open files, threads and processes. After the first ten minutes, a line is
fitted to each of them: the slope per hour, with a 95% interval from a bootstrap of blocks of the residuals, because
neighbouring measurements are alike. The samples and the slopes are in soak.json, and a table is in
benchmarks/RELIABILITY.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kill_matrix.processes_of_trial import descendants, is_alive

HERE = Path(__file__).resolve().parent
RESULTS_FILE, PAGE = HERE / "soak.json", HERE / "RELIABILITY.md"
BEGIN, END = "<!-- Written by benchmarks/soak.py. -->", "<!-- End of what benchmarks/soak.py writes. -->"
ALGOS = ("PPO", "DQN", "APPO")
EVERY_S, WARM_UP_S = 10.0, 600.0
RATES = {"raise": 2e-4, "hang": 5e-5, "kill": 5e-5}
NUM_RESAMPLES = 2000
UNITS = {
    "driver_mib": "memory of the algorithm, MiB",
    "workers_mib": "memory of all its other processes, MiB",
    "open_files": "open files of the algorithm",
    "threads": "threads of the algorithm",
    "processes": "other processes",
}
"""What is measured, and what the table calls it."""
Samples = dict[str, list[float]]


def main() -> int:
    """Run, measure, and write the slopes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--algos", nargs="+", default=list(ALGOS), choices=ALGOS)
    parser.add_argument("--output", type=Path, default=RESULTS_FILE)
    parser.add_argument("--page", type=Path, help="page whose table is written; the default with the default output")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two measurements")
    parser.add_argument("--train", choices=ALGOS, help=argparse.SUPPRESS)  # in the process of an algorithm
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 3600 * options.hours
    if options.train is not None:
        train(options.train, options.home, seconds)
        return 0
    warm_up_s = min(WARM_UP_S, seconds / 4)
    found = soak(options.algos, seconds, options.every, warm_up_s)
    report = {"hours": options.hours, "warm_up_s": warm_up_s, "rates_per_step": RATES, "algos": found}
    options.output.write_text(json.dumps(report) + "\n", "utf-8")
    print(render(report))
    if died := {algo: part["status"] for algo, part in found.items() if part["status"]}:
        print(f"Ended before its time, with this status: {died}. The page is not written.", file=sys.stderr)
        return 1
    page = options.page or (PAGE if options.output == RESULTS_FILE else None)
    if page is not None:
        write_page(page, report)
    return 0


def train(algo: str, home: Path, seconds: float) -> None:
    """Train in this process, with faults, and write how many there were."""
    from corral.algorithms.registry import config_from_dict
    from kill_matrix.cells import Cell, settings

    cell = Cell(
        "raise", "sample", "runner", "process", "single", "async" if algo == "APPO" else "sync", algo, "survives"
    )
    record = home / "record"
    record.mkdir()
    given = settings(cell, 0, record, None)
    # Evaluation plays in this process, which an env that kills its process would end.
    in_evaluation = {name: rate for name, rate in RATES.items() if name != "kill"}
    for group, rates in ((given["environment"], RATES), (given["evaluation"]["evaluation_config"], in_evaluation)):
        group["env_config"] |= {"rates": rates, "step_s": 0.001, "keeps_record": False}
    given.pop("callbacks")
    given.pop("stop")
    given["environment"]["env_config"].pop("until")
    given["evaluation"]["evaluation_config"]["env_config"].pop("until")
    given.setdefault("reporting", {})["min_time_s_per_iteration"] = 1.0  # a result per second is enough
    given["checkpointing"] = {"checkpoint_every_s": 10.0}
    given["fault_tolerance"] |= {"max_num_env_runner_restarts": 10**9}
    end_s = time.monotonic() + seconds
    config = config_from_dict(given)
    with config.build() as algorithm:
        result = algorithm.fit(stop=lambda result: time.monotonic() > end_s, run_dir=home / "run", progress=False)
    health = {name: int(value) for name, value in result["fault_tolerance"].items()}
    health |= {name: int(result[name]) for name in ("training_iteration", "num_env_steps_sampled_lifetime")}
    (home / "health.json").write_text(json.dumps(health), "utf-8")


# Measuring.


def soak(algos: Sequence[str], seconds: float, every_s: float, warm_up_s: float) -> dict[str, Any]:
    """Run all algorithms side by side, and return samples, slopes and faults of each."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="corral-soak-") as name:
        homes = {algo: Path(name) / algo for algo in algos}
        processes = {algo: start(algo, home, seconds) for algo, home in homes.items()}
        samples: dict[str, Samples] = {algo: {key: [] for key in ("seconds", *UNITS)} for algo in algos}
        began_s = time.monotonic()
        try:
            while time.monotonic() - began_s < seconds:
                time.sleep(every_s)
                for algo, process in processes.items():
                    if process.poll() is None:
                        note(samples[algo], process.pid, time.monotonic() - began_s)
            for algo, process in processes.items():
                process.wait(300.0)
                file = homes[algo] / "health.json"
                found[algo] = {
                    "status": process.returncode,
                    "health": json.loads(file.read_text("utf-8")) if file.exists() else {},
                    "slopes": slopes(samples[algo], warm_up_s),
                    "samples": samples[algo],
                }
        finally:
            for process in processes.values():
                end(process)
    return found


def start(algo: str, home: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Start the process of an algorithm."""
    home.mkdir()
    command = [sys.executable, str(Path(__file__).resolve()), "--train", algo, "--home", str(home)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--hours", str(seconds / 3600)], env=environment, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, with what it started."""
    if process.poll() is None:
        for pid in (*descendants(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def note(samples: Samples, pid: int, seconds: float) -> None:
    """Measure a process and its descendants; a process that ends meanwhile does not count."""
    others = descendants(pid)
    with contextlib.suppress(OSError):
        now = {
            "seconds": round(seconds, 1),
            "driver_mib": memory_mib(pid),
            "workers_mib": round(sum(memory_mib(other) for other in others if is_alive(other)), 1),
            "open_files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "processes": len(others),
        }
        for name, value in now.items():
            samples[name].append(value)


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB; 0 if it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return 0.0


# Slopes.


def slopes(samples: Samples, warm_up_s: float) -> dict[str, list[float]]:
    """Return slope per hour, lower and upper end of its 95% interval, and mean, of each measurement."""
    seconds = np.array(samples["seconds"], np.float64)
    late = seconds >= warm_up_s
    found = {}
    for name in UNITS:
        values = np.array(samples[name], np.float64)[late]
        if len(values) < 4:
            continue
        low, high = interval_of_slope(seconds[late] / 3600, values)
        found[name] = [float(part) for part in (slope(seconds[late] / 3600, values), low, high, values.mean())]
    return found


def slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the slope of the line with the smallest squared errors."""
    centred = x - x.mean()
    return float(centred @ (y - y.mean()) / (centred @ centred))


def interval_of_slope(x: NDArray[np.float64], y: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """Return the 95% interval of a slope, by a bootstrap of moving blocks of a tenth of the residuals each."""
    fitted = y.mean() + slope(x, y) * (x - x.mean())
    residuals, size = y - fitted, max(1, len(y) // 10)
    rng, found = np.random.default_rng(seed), []
    for _ in range(NUM_RESAMPLES):
        begins = rng.integers(0, len(y) - size + 1, -(-len(y) // size))
        drawn = np.concatenate([residuals[begin : begin + size] for begin in begins])[: len(y)]
        found.append(slope(x, fitted + drawn))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


# The page.


def render(report: dict[str, Any]) -> str:
    """Return the table of slopes, and how many faults there were."""
    rows = [["measurement", *report["algos"]], ["---"] * (1 + len(report["algos"]))]
    for name, title in UNITS.items():
        cells = []
        for part in report["algos"].values():
            found = part["slopes"].get(name)
            cells.append("" if found is None else "{:+.2f} ({:+.2f} to {:+.2f}), mean {:.0f}".format(*found))
        rows.append([title, *cells])
    for name, title in (
        ("num_env_runner_failures", "failures of runners"),
        ("num_remote_worker_restarts", "restarts of runners"),
        ("training_iteration", "iterations"),
        ("num_env_steps_sampled_lifetime", "env steps"),
    ):
        rows.append([title, *(f"{part['health'].get(name, 0):,}" for part in report["algos"].values())])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return (
        f"{report['hours']:g} hours; slopes per hour after the first {report['warm_up_s'] / 60:.0f} minutes.\n\n{table}"
    )


def write_page(page: Path, report: dict[str, Any]) -> None:
    """Write the table between its two marks."""
    before, mark, rest = page.read_text("utf-8").partition(BEGIN)
    if not mark:
        raise SystemExit(f"{page} has no {BEGIN}")
    page.write_text(f"{before}{BEGIN}\n\n{render(report)}\n\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
