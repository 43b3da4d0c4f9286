"""Finding a checkpoint in the directory of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from corral.core.places import Location, Place, place_of
from corral.core.run_files import SEEDS_FILE
from corral.errors import CheckpointError
from corral.runs.checkpoint.directory import METADATA, open_listed, read_consistently, why_none

log = logging.getLogger("corral")

CHECKPOINTS, BEST = "checkpoints", "best"
NONE_YET = "none-yet"
"""File in the directory of checkpoints that says that the first ones could not be written."""


def find_checkpoint(path: Location, prefer: Literal["last", "best"] = "last") -> Location:
    """Return the absolute path or the URL of a checkpoint.

    Args:
        path: A checkpoint, which is the answer, a run directory, or its directory `checkpoints`.
        prefer: `"last"` is the complete checkpoint with the most iterations, without the best one unless there is no
            other one; `"best"` is the best one, and the last if there is none, or with a warning
            if it is damaged.

    Raises:
        CheckpointError: There is no complete checkpoint.
    """
    place = place_of(path)
    try:
        return _found(place, prefer)
    except CheckpointError:
        raise
    except Exception as error:  # each file system has its own errors
        raise CheckpointError(f"{place.location} cannot be searched: {error}.") from error


def checkpoint_or_last_of_run(path: Location) -> Location:
    """Return a path, or where the last checkpoint is if the path is the directory of a run; see `find_checkpoint`."""
    place = place_of(path)
    is_run = place.exists(CHECKPOINTS) and not place.exists(METADATA)
    return find_checkpoint(path) if is_run else path


def _found(place: Place, prefer: Literal["last", "best"]) -> Location:
    if place.exists(METADATA):
        return place.location
    home = place.child(CHECKPOINTS) if place.exists(CHECKPOINTS) else place
    problems: list[str] = []
    found = dict(_whole(home, problems))
    best = found.pop(BEST, None)
    if best is not None and (prefer == "best" or not found):
        return home.child(BEST).location
    if not found and place.exists(SEEDS_FILE):
        run = next((name for name in place.names() if name.startswith("seed-")), "seed-0")
        raise CheckpointError(
            f"{place.location} holds the runs of several seeds: name one of them, such as {place.child(run).location}."
        )
    if not found and (runs := [name for name in place.names() if place.child(name).exists(CHECKPOINTS)]):
        raise CheckpointError(
            f"{place.location} holds the runs {', '.join(runs[:10])}{', ...' if len(runs) > 10 else ''}: name one of "
            f"them, such as {place.child(runs[-1]).location}."
        )
    if not found:
        raise CheckpointError(
            f"{place.location} holds no complete checkpoint: {'; '.join(problems) or why_none(place)}."
        )
    if prefer == "best" and home.child(BEST).exists(METADATA):
        log.warning("The best checkpoint is damaged, so the last one is used: %s.", "; ".join(problems))
    return home.child(max(found, key=lambda name: (_iteration(found[name]), name))).location


def _whole(home: Place, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and metadata of the checkpoints whose files are all there, with their sizes; collect what is wrong."""
    for name in home.names():
        child = home.child(name)
        if not child.exists(METADATA):
            continue
        try:
            yield name, read_consistently(child, partial(_check_sizes, child))
        except CheckpointError as error:
            problems.append(str(error).removesuffix("."))


def _check_sizes(place: Place, metadata: dict[str, Any]) -> dict[str, Any]:
    for file, entry in metadata["files"].items():
        with open_listed(place, f"{metadata['data']}/{file}", entry["num_bytes"]):
            pass
    return metadata


def _iteration(metadata: dict[str, Any]) -> int:
    iteration = metadata.get("training_iteration")
    return iteration if isinstance(iteration, int) else -1
