"""What a logger of a service keeps in the run directory, so that a run that continues is the same run there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from corral.core.run_files import SEEDS_FILE


def name_of_run(run_dir: Path) -> str:
    """Return the name of a run for a service: its directory, after the directory of its set of seeds."""
    path = run_dir.absolute()
    return f"{path.parent.name}-{path.name}" if (path.parent / SEEDS_FILE).exists() else path.name


def keep(path: Path, values: Mapping[str, str]) -> None:
    """Write texts by name, such as the id of a run, into a file of the run directory."""
    path.write_text(json.dumps(dict(values)) + "\n", encoding="utf-8")


def kept(path: Path) -> dict[str, str]:
    """Return the texts that `keep` wrote; empty if there is no such file, or if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
