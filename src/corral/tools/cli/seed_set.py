"""The directory of `corral train --seeds`: the experiment, one run directory per seed, and `seeds.json`."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corral.core.run_files import SEEDS_FILE
from corral.core.settings import LARGEST_SEED
from corral.errors import ConfigError, RunDirectoryError
from corral.runs.loggers.run_summary import RunNumbers, RunsSummary, last_numbers, summarize_numbers

MOST_SEEDS = 1000


@dataclass
class SeedSet:
    """Runs that differ in the seed only.

    Attributes:
        home: Directory of the set.
        seeds: Seeds, in the order in which the runs start.
        statuses: Exit status of each run that has ended, by seed.
    """

    home: Path
    seeds: list[int]
    statuses: dict[int, int] = field(default_factory=dict)

    def run_dir(self, seed: int) -> Path:
        """Return the run directory of a seed."""
        return self.home / f"seed-{seed}"

    @property
    def finished(self) -> list[int]:
        """The seeds whose runs met a stop criterion."""
        return [seed for seed in self.seeds if self.statuses.get(seed) == 0]

    def numbers(self) -> dict[int, RunNumbers]:
        """Return the latest numbers of each run, by seed."""
        return {seed: last_numbers(self.run_dir(seed)) for seed in self.seeds}

    def summary(self) -> RunsSummary:
        """Return the final returns of the finished runs, with mean, deviation and interval."""
        return summarize_numbers([last_numbers(self.run_dir(seed)) for seed in self.finished])

    def write(self) -> None:
        """Write `seeds.json`: the runs with their exit status and numbers, and the summary of the finished runs.

        Raises:
            RunDirectoryError: The file cannot be written.
        """
        runs = [
            {"seed": seed, "run": self.run_dir(seed).name, "exit_status": self.statuses.get(seed), **asdict(numbers)}
            for seed, numbers in self.numbers().items()
        ]
        summary = {"num_finished": len(self.finished), **asdict(self.summary())}
        text = json.dumps(_without_nan({"runs": runs, "summary": summary}), indent=1)
        path = self.home / SEEDS_FILE
        try:
            changed = path.with_name(f"{SEEDS_FILE}.new")
            changed.write_text(f"{text}\n", encoding="utf-8")
            os.replace(changed, path)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {error.strerror}.") from error


def is_set(path: Path) -> bool:
    """Return whether a directory is the directory of `corral train --seeds`."""
    return (path / SEEDS_FILE).is_file()


def read_set(home: Path) -> SeedSet:
    """Return the set in a directory.

    Raises:
        RunDirectoryError: The directory holds no set, or its file is damaged.
    """
    path = home / SEEDS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        seeds = [int(run["seed"]) for run in found["runs"]]
        statuses = {
            int(run["seed"]): int(run["exit_status"]) for run in found["runs"] if run["exit_status"] is not None
        }
        return SeedSet(home, seeds, statuses)
    except OSError as error:
        raise RunDirectoryError(
            f"{home} is not the directory of a run with --seeds: {error.strerror}: {path}."
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{path} is damaged: {type(error).__name__}: {error}.") from error


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a text such as `"0-4"` or `"0,3,7-9"`.

    Raises:
        ConfigError: The text is something else, names a seed twice or one that is too large, or names more than 1000.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ConfigError(f"--seeds {text!r}: expected numbers and ranges, such as 0-4 or 0,3,7-9.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"--seeds {text!r}: the range {part.strip()} ends before it begins.")
        if last > LARGEST_SEED:
            raise ConfigError(f"--seeds {text!r}: a seed must be at most {LARGEST_SEED}.")
        if len(seeds) + last - first >= MOST_SEEDS:
            raise ConfigError(f"--seeds {text!r}: more than {MOST_SEEDS} seeds.")
        seeds += range(first, last + 1)
    if twice := [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]:
        raise ConfigError(f"--seeds {text!r}: seed {twice[0]} is named twice.")
    return seeds


def _without_nan(value: Any) -> Any:
    """Return a value in which null takes the place of NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
