"""Measures Corral against its rivals and writes the results as a Markdown report.

Run it with Corral's interpreter from the root of the repository:

    python benchmarks/run.py --rivals-python .venv-bench/bin/python

The report (RESULTS.md) and every single run (results.json next to it) are written after each measure, so an
interrupted run keeps what it has; `--only` replaces just the measures that it names, and `--main` the main ones, with
two pairs each (`make bench-quick`).
"""

import argparse
import dataclasses
import datetime
import json
import shlex
import sys
from pathlib import Path

import machine
import report
from cases import MAIN, RIVALS, SCRIPTS, Case, select
from processes import Outcome, exit_on_signals, run_script

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEAST_PAIRS = 5
FEW_PAIRS = 2


def main() -> int:
    """Takes the measurements that the command line asks for; returns 1 if a run of Corral's failed."""
    arguments = _parse()
    exit_on_signals()
    raw_path = arguments.out.with_name(f"{arguments.out.stem.lower()}.json")
    results = report.from_json(json.loads(raw_path.read_text())) if raw_path.exists() else {}
    if arguments.render_only:
        arguments.out.write_text(report.render(results))
        return 0
    description = machine.describe(sys.executable, arguments.rivals_python)
    commit = machine.measured_commit(ROOT)
    failed = False
    for case in arguments.cases:
        result = report.CaseResult(
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            commit=commit,
            command=_shown_command(),
            quick=arguments.quick,
            machine=description,
            runs=measure(case, arguments.pairs, arguments.rivals_python, arguments.quick),
        )
        results[case.name] = result
        raw_path.write_text(json.dumps(report.to_json(results), indent=1) + "\n")
        arguments.out.write_text(report.render(results))
        failed |= any(run.system == "corral" and run.error is not None for run in result.runs)
    return int(failed)


def measure(case: Case, pairs: int, rivals_python: str, quick: bool) -> list[report.Run]:
    """Runs the systems of a case one after the other, for each pair in another order."""
    runs = []
    for pair in range(pairs):
        for system in rotated(case.systems, pair):
            python = rivals_python if system in RIVALS else sys.executable
            command = [python, str(HERE / SCRIPTS[system]), *case.arguments(pair, quick)]
            busy = machine.busy_share()
            run = to_run(case, pair, system, run_script(command, case.timeout, ROOT))
            run = dataclasses.replace(run, busy_before=busy)
            shown = "failed" if run.value is None else f"{run.value:,.{case.digits}f} {case.unit}"
            print(f"{case.name}: pair {pair + 1} of {pairs}, {system}: {shown}", file=sys.stderr, flush=True)
            runs.append(run)
    return runs


def rotated(systems: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Returns the systems with the first `by` of them moved to the end, so that each goes first in turn."""
    start = by % len(systems)
    return systems[start:] + systems[:start]


def to_run(case: Case, pair: int, system: str, outcome: Outcome) -> report.Run:
    """Takes a case's value out of what a script printed, or its CPU seconds where they are the value."""
    line = outcome.line
    if line is None:
        return report.Run(pair, system, None, False, {}, outcome.error)
    if case.value is not None:
        return report.Run(pair, system, float(line[case.value]), False, line, None)
    line |= {"clock": "CPU", "cpu_seconds": outcome.cpu_seconds, "wall_seconds": outcome.wall_seconds}
    return report.Run(pair, system, outcome.cpu_seconds, not line["reached"], line, None)


def _parse() -> argparse.Namespace:
    """Parses the command line and fills in what depends on other arguments."""
    parser = argparse.ArgumentParser(description="Measures Corral against its rivals.")
    rivals_python = ROOT / ".venv-bench" / "bin" / "python"
    parser.add_argument("--rivals-python", default=str(rivals_python), help="an interpreter with the rivals")
    parser.add_argument("--pairs", type=int, help=f"at least {LEAST_PAIRS} (or {FEW_PAIRS} with --main or --quick)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--main", action="store_const", dest="only", const=",".join(MAIN), help="the main measures")
    chosen.add_argument("--only", help="comma-separated measures, such as sampling,ppo or sampling_64")
    parser.add_argument("--out", type=Path, help="the report; the raw results go next to it")
    parser.add_argument("--quick", action="store_true", help="short runs that try the machinery")
    parser.add_argument("--render-only", action="store_true", help="rebuild the report from the raw results")
    arguments = parser.parse_args()
    is_main = arguments.only == ",".join(MAIN)
    least = FEW_PAIRS if arguments.quick or is_main else LEAST_PAIRS
    if arguments.pairs is None:
        arguments.pairs = least
    if arguments.pairs < least:
        parser.error(f"--pairs must be at least {least}")
    if arguments.out is None:
        arguments.out = HERE / ("RESULTS.quick.md" if arguments.quick else "RESULTS.md")
    try:
        arguments.cases = select(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _shown_command() -> str:
    """Returns the command line as a reader would type it, without this machine's folders."""
    words = ["python", "benchmarks/run.py"]
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        path = Path(value if equals else word)
        if path.is_absolute():
            shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "PATH"
            word = f"{option}={shown}" if equals else shown
        words.append(word)
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
