"""Describes the machine and the libraries, for readers who would compare the numbers with their own."""

import json
import os
import platform
import subprocess
import time
from pathlib import Path

UNKNOWN = "unknown"
"""The commit of a measurement without git."""

_VERSIONS = """
import importlib.metadata, json, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = "not installed"
print(json.dumps(versions))
"""


def describe(own_python: str, rivals_python: str) -> dict[str, str]:
    """Returns the rows of the machine's table."""
    memory = _first_value(Path("/proc/meminfo"), "MemTotal").partition(" ")[0]
    return {
        "CPU": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown",
        "Cores": str(os.cpu_count()),
        "Memory": f"{int(memory) / 2**20:.0f} GiB" if memory.isdecimal() else "unknown",
        "System": f"{platform.system()} {platform.machine()}",
        "Corral's environment": versions(own_python, "corral", "numpy", "gymnasium", "torch", "ray"),
        "Rivals' environment": versions(rivals_python, "ray", "stable-baselines3", "numpy", "gymnasium", "torch"),
    }


def measured_commit(root: Path) -> str:
    """Returns the short hash of the commit that is checked out, or "unknown" without git.

    "with changes" is added if what is measured differs from the commit: the library, the examples or the measures.
    """
    try:
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", "src", "examples", "benchmarks/*.py")
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return f"{commit} with changes" if changes else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def busy_share(seconds: float = 0.5) -> float | None:
    """Watches the machine for a moment and returns the share of its cores' time that was in use.

    Taken before each run, when nothing of ours runs, it tells whether others were at work on the machine.
    """
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    if before is None or after is None or after[1] == before[1]:
        return None
    return 1.0 - (after[0] - before[0]) / (after[1] - before[1])


def _cpu_times() -> tuple[int, int] | None:
    """Returns the idle and the total time of all cores since the start, or None without Linux's /proc."""
    try:
        times = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    return times[3] + times[4], sum(times)


def _first_value(path: Path, key: str) -> str:
    """Returns the value of the first `key : value` line of a file, or nothing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(key))
    return next(values, "")


def versions(python: str, *names: str) -> str:
    """Returns the versions of an interpreter and some of its distributions, in words."""
    try:
        done = subprocess.run([python, "-c", _VERSIONS, *names], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "not available"
    return ", ".join(f"{name} {version}" for name, version in json.loads(done.stdout).items())
