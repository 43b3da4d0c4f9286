"""Kills, stops, starves and disconnects the processes of small runs, and checks that nothing is lost, left or silent.

    make campaign

Every trial is a real run of the command line in a forked process, with one fault at a moment that the seed draws; the
same command then finishes what it left. Each result is written at once (campaign.jsonl), and trials in the file are not
repeated. `--trial N` repeats one trial and keeps its files; `--cells TEXT` chooses cells whose names hold the text. The
table in benchmarks/RELIABILITY.md is written from the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; a process with threads cannot be forked

from corral.algorithms.registry import config_class
from corral.tools.cli import main as _cli  # noqa: F401  # here, so that forks have it
from kill_matrix.cells import ENGINES, FAULTS, Cell, cells, schedule
from kill_matrix.driver import POINTS
from kill_matrix.trial import Reference, Setup, make_reference, run_seed, run_trial

HERE = Path(__file__).resolve().parent
RESULTS_FILE, PAGE = HERE / "campaign.jsonl", HERE / "RELIABILITY.md"
NUM_TRIALS = 1000
NUM_CPUS = {"ray": 4, "two nodes": 2}  # of each node
BEGIN, END = "<!-- Written by `make campaign`. -->", "<!-- End of what `make campaign` writes. -->"
Line = dict[str, Any]


def main() -> int:
    """Run the trials that are missing, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule and of all moments")
    parser.add_argument("--num-trials", type=int, default=NUM_TRIALS)
    parser.add_argument(
        "--cells", default="", help="text that the names of the cells hold; several separated by commas"
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="run trials of these only, separated by commas")
    parser.add_argument("--trial", type=int, help="repeat one trial of the schedule, and keep its files")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--output", type=Path, default=RESULTS_FILE)
    parser.add_argument("--page", type=Path, help="page whose table is written; none if a part was chosen")
    parser.add_argument("--home", type=Path, help="directory of the trials; those that fail stay there")
    parser.add_argument("--keep", action="store_true", help="keep the files of all trials")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    options = parser.parse_args()
    wanted = [cell for cell in cells() if any(part in cell.name for part in options.cells.split(","))]
    if options.list or not wanted:
        print("\n".join(cell.name for cell in wanted) or "no such cells")
        return int(not wanted)
    planned = list(enumerate(schedule(options.seed, options.num_trials, wanted)))
    home = options.home or Path(tempfile.mkdtemp(prefix="corral-campaign-"))
    home.mkdir(parents=True, exist_ok=True)
    if options.trial is not None:
        planned = [planned[options.trial]]
        options.output, options.keep = home / "one.jsonl", True
    engines = options.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engines {sorted(unknown)}: there are {list(ENGINES)}")
    lines = Campaign(options.seed, options.jobs, options.output, Setup(home, keeps=options.keep)).run(planned, engines)
    page = options.page or (PAGE if not options.cells and options.trial is None else None)
    if page is not None:
        write_page(page, lines)
    failures = [line for line in lines if line["problems"]]
    print(f"{len(lines)} trials, {len(failures)} failures. {home}")
    return int(bool(failures))


class Campaign:
    """Runs trials side by side, each in a forked process.

    Args:
        seed: Seed of the schedule.
        jobs: Trials at a time; trials on Ray run alone.
        output: File of the results.
        setup: What all trials share.
    """

    def __init__(self, seed: int, jobs: int, output: Path, setup: Setup) -> None:
        """Read the results that are there."""
        self.seed, self.jobs, self.output, self.setup, self.home = seed, jobs, output, setup, setup.home
        self.lines = [json.loads(text) for text in output.read_text("utf-8").splitlines()] if output.exists() else []
        self.lines = [line for line in self.lines if line["seed"] == seed]
        self.references: dict[tuple[str, int], Reference] = {}
        self.running: dict[int, Path] = {}
        for name in ("PPO", "DQN", "APPO"):
            _ = config_class(name)().algo_class  # which imports it
        for point in (point for points in POINTS.values() for point in points):
            importlib.import_module(point.partition(":")[0])

    def run(self, planned: Sequence[tuple[int, Cell]], engines: Sequence[str] = ENGINES) -> list[Line]:
        """Run the trials of these engines of which there is no result, and return all results."""
        done = {(line["trial"], line["cell"]) for line in self.lines}
        missing = [(number, cell) for number, cell in planned if (number, cell.name) not in done]
        for engine in engines:
            of_engine = [(number, cell) for number, cell in missing if cell.engine == engine]
            if of_engine:
                self.run_engine(engine, of_engine)
        names = {(number, cell.name) for number, cell in planned}
        return [line for line in self.lines if (line["trial"], line["cell"]) in names]

    def run_engine(self, engine: str, planned: Sequence[tuple[int, Cell]]) -> None:
        """Run the trials of one engine."""
        jobs, host = self.jobs, None
        self.setup.environment, self.setup.change_nodes = {}, None
        if engine in NUM_CPUS:
            jobs, host = 1, Host(NUM_CPUS[engine])
            self.setup.environment, self.setup.change_nodes = {"RAY_ADDRESS": host.address}, host.ask
        try:
            for number, cell in planned:
                if engine == "two nodes" and host is not None:
                    host.ask("add")
                reference = self.reference(cell, number)
                while len(self.running) >= jobs:
                    self.take_one()
                self.start(number, cell, reference)
                if jobs == 1:
                    self.take_one()
                if engine == "two nodes" and host is not None:
                    host.ask("remove")
            while self.running:
                self.take_one()
        finally:
            if host is not None:
                host.stop()

    def reference(self, cell: Cell, number: int) -> Reference:
        """Return the undisturbed run of a trial, which is made once."""
        seed = run_seed(cell, number)
        key = cell.config_name, seed
        if key not in self.references:
            file = self.home / f"reference-{len(self.references)}.json"
            self.fork(lambda: file.write_text(json.dumps(make_reference(cell, seed, self.setup)), "utf-8"), wait=True)
            if not file.exists():
                raise SystemExit(f"the undisturbed run of {cell.config_name} failed")
            self.references[key] = Reference(json.loads(file.read_text("utf-8")))
        return self.references[key]

    def start(self, number: int, cell: Cell, reference: Reference) -> None:
        """Fork a process that runs a trial."""
        file = self.home / f"trial-{number}.json"

        def work() -> None:
            line = run_trial(cell, number, self.seed, self.setup, reference)
            file.write_text(json.dumps({"seed": self.seed, **line}), "utf-8")

        self.running[self.fork(work)] = file

    @staticmethod
    def fork(work: Any, wait: bool = False) -> int:
        """Fork a process that calls a function, and return its id."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                work()
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        if wait:
            os.waitpid(pid, 0)
        return pid

    def take_one(self) -> None:
        """Wait for the end of a trial, and write its result."""
        pid = 0
        while not pid:
            for candidate in self.running:
                if pid := os.waitpid(candidate, os.WNOHANG)[0]:
                    break
            else:
                time.sleep(0.02)
        file = self.running.pop(pid)
        line = json.loads(file.read_text("utf-8"))
        file.unlink()
        self.lines.append(line)
        with self.output.open("a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")
        for problem in line["problems"]:
            print(f"trial {line['trial']} ({line['cell']}, {line['happened']}): {problem}", file=sys.stderr, flush=True)


class Host:
    """A program with a Ray cluster."""

    def __init__(self, num_cpus: int) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "kill_matrix" / "ray_host.py"), str(num_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def ask(self, what: str) -> None:
        """Add or remove the second node."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def stop(self) -> None:
        """End the cluster."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60.0)


# The page.


def write_page(page: Path, lines: Sequence[Line]) -> None:
    """Write the table between its two marks."""
    before, mark, rest = page.read_text("utf-8").partition(BEGIN)
    if not mark:
        raise SystemExit(f"{page} has no {BEGIN}")
    page.write_text(f"{before}{BEGIN}\n\n{render(lines)}\n\n{END}{rest.partition(END)[2]}", "utf-8")


def render(lines: Sequence[Line]) -> str:
    """Return the table of trials, failures and upper bounds, by fault and engine."""
    trials = Counter((line["fault"], line["engine"]) for line in lines)
    failures = Counter((line["fault"], line["engine"]) for line in lines if line["problems"])
    engines = [engine for engine in ENGINES if any(key[1] == engine for key in trials)]
    rows = [["fault", *engines, "all"], ["---"] * (len(engines) + 2)]
    for fault in dict.fromkeys(FAULTS.values()):
        if any(key[0] == fault for key in trials):
            rows.append([fault, *(_cell(trials, failures, [(fault, engine)]) for engine in engines)])
            rows[-1].append(_cell(trials, failures, [(fault, engine) for engine in engines]))
    rows.append(["all", *(_cell(trials, failures, [key for key in trials if key[1] == name]) for name in engines)])
    rows[-1].append(_cell(trials, failures, list(trials)))
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    num_cells = len({line["cell"] for line in lines})
    return f"{len(lines):,} trials of {num_cells:,} cells.\n\n{table}"


def _cell(trials: Counter[Any], failures: Counter[Any], keys: Sequence[Any]) -> str:
    """Return trials, failures and the upper bound of the probability of a failure, with 95% confidence."""
    number, failed = sum(trials[key] for key in keys), sum(failures[key] for key in keys)
    if not number:
        return ""
    if failed:
        return f"{number:,}, **{failed} failed**"
    return f"{number:,}, < {min(1.0, 3 / number):.1%}"


if __name__ == "__main__":
    sys.exit(main())
