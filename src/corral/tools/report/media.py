"""Videos and images in the directories of runs, as data that a page can hold."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from corral.tools.report.runs import RunFiles

TYPES = {
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".gif": "image/gif",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
}
LEFT_OUT = ("checkpoints",)
MAX_FILES = 8
"""Number of files of a run that a page holds, the latest ones."""

MAX_BYTES = 40_000_000
"""Bytes of the files of all runs that a page holds."""


@dataclass(frozen=True)
class MediaFile:
    """A video or an image.

    Attributes:
        name: Path in the directory of the run.
        kind: `"video"` or `"image"`.
        url: Content, as a `data:` URL.
    """

    name: str
    kind: str
    url: str


@dataclass(frozen=True)
class RunMedia:
    """Videos and images of a run.

    Attributes:
        run_name: Name of the run.
        files: The files that the page holds, the latest of each folder first.
        num_left_out: Number of its other files.
    """

    run_name: str
    files: tuple[MediaFile, ...]
    num_left_out: int


def collect_media(runs: Sequence[RunFiles]) -> list[RunMedia]:
    """Return the videos and images of the runs that have any: up to 8 of each run, and 40 MB of all runs.

    Each run has an equal part of these bytes.

    Args:
        runs: The runs.
    """
    paths = {run.name: (run.path, _media_paths(run.path)) for run in runs}
    paths = {name: found for name, found in paths.items() if found[1]}
    return [_read(name, *found, MAX_BYTES // len(paths)) for name, found in paths.items()]


def _media_paths(run_dir: Path) -> list[Path]:
    """Return the videos and images of a run: the latest one of each folder, then the second latest, and so on.

    Names hold the number of the iteration or of the env steps, so the latest file has the last name.
    """
    by_folder = defaultdict(list)
    for path in sorted(run_dir.rglob("*"), reverse=True):
        if path.suffix.lower() in TYPES and path.relative_to(run_dir).parts[0] not in LEFT_OUT and path.is_file():
            by_folder[path.parent].append(path)
    return [path for same_place in zip_longest(*by_folder.values()) for path in same_place if path is not None]


def _read(name: str, run_dir: Path, paths: Sequence[Path], max_bytes: int) -> RunMedia:
    files: list[MediaFile] = []
    for path in paths:
        try:
            if len(files) == MAX_FILES or path.stat().st_size > max_bytes:
                continue
            content = path.read_bytes()
        except OSError:  # it was removed since, or belongs to somebody else
            continue
        max_bytes -= len(content)
        media_type = TYPES[path.suffix.lower()]
        url = f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
        files.append(MediaFile(path.relative_to(run_dir).as_posix(), media_type.partition("/")[0], url))
    return RunMedia(name, tuple(files), len(paths) - len(files))
