"""Compares how long scripts of RLlib take, unchanged, on RLlib and on Corral.

    python benchmarks/unchanged_scripts.py --rivals-python .venv-bench/bin/python 'SCRIPT ARGS' 'SCRIPT ARGS' ...

Prints a table: the seconds from the start of the process to its end, which are medians of the rounds. In a round both
systems run each script once, one after the other. A script that does not end with exit code 0 is a failure.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import exit_on_signals, kill_session

TIMEOUT_SECONDS = 1800.0


def main() -> int:
    """Run all scripts and print the table; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="+", help="path of a script and its arguments, in one string")
    parser.add_argument("--corral-python", default=sys.executable, help="an interpreter with Corral")
    parser.add_argument("--rivals-python", required=True, help="an interpreter with RLlib")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    exit_on_signals()
    rivals, own = (str(Path(python).absolute()) for python in (options.rivals_python, options.corral_python))
    systems = {"RLlib": [rivals], "Corral": [own, "-m", "corral.compat.rllib"]}
    is_whole = True
    print(f"{os.cpu_count()} CPUs, {options.rounds} rounds\n")
    print("| Script | RLlib | Corral | times sooner |\n| --- | ---: | ---: | ---: |", flush=True)
    for script in options.scripts:
        path, *arguments = shlex.split(script)
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(options.rounds):
            for name, command in systems.items():
                taken = run_for_seconds([*command, str(Path(path).resolve()), *arguments])
                if taken is None:
                    print(f"{name}: {script} failed.", file=sys.stderr)
                    is_whole = False
                else:
                    seconds[name].append(taken)
        print(render_row(" ".join([Path(path).name, *arguments]), seconds), flush=True)
    return 0 if is_whole else 1


def run_for_seconds(command: list[str]) -> float | None:
    """Return the seconds that a command takes; `None` if it fails. Its output is shown then."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=directory, start_new_session=True
        )
        try:
            returncode = process.wait(TIMEOUT_SECONDS)
            seconds = time.perf_counter() - start
        except subprocess.TimeoutExpired:
            returncode = -1
        finally:
            kill_session(process.pid)
            process.wait()
        if returncode == 0:
            return seconds
        output.seek(0)
        print(output.read().decode(errors="replace")[-3000:], file=sys.stderr)
    return None


def render_row(name: str, seconds: dict[str, list[float]]) -> str:
    """Return a row of the table: medians, and the median of the ratios of rounds."""
    rllib, corral = seconds["RLlib"], seconds["Corral"]
    if not rllib or not corral:
        return f"| `{name}` | {'' if rllib else 'failed'} | {'' if corral else 'failed'} | |"
    ratio = statistics.median(a / b for a, b in zip(rllib, corral, strict=False))
    return f"| `{name}` | {statistics.median(rllib):.0f} s | {statistics.median(corral):.0f} s | {ratio:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
