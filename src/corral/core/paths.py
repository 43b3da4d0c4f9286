"""Where a path that a user gives leads: a place on this machine, with `~` expanded, or a URL."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import Any

from corral.errors import ConfigError

# A scheme has two letters at least, unlike a drive of Windows. A `Path` keeps one of the slashes of a URL.
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+(?:::[A-Za-z][\w+.-]+)*):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)


def resolve_location(path: str | os.PathLike[str]) -> Path | str:
    """Return a path of this machine, with `~` expanded, or the URL of another place.

    Args:
        path: What a user gave. `file://` leads to this machine. A URL may have been made a `Path`, which keeps only one
            of its slashes.

    Raises:
        ConfigError: The path begins with `~NAME`, and there is no such user.
    """
    text = os.fspath(path)
    if (url := _URL.fullmatch(text)) is not None:
        scheme, slashes, rest = url["scheme"], url["slashes"], url["rest"]
        if scheme not in ("file", "local"):
            return f"{scheme}://{rest}"
        text = rest if len(slashes) == 2 else f"/{rest}"
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text!r}: {error} Write the whole path.") from error


def resolve_path(path: Any, what: str) -> Path:
    """Return a path of this machine; see `resolve_location`.

    Args:
        path: What a user gave.
        what: What is stored there, for the message, such as `"the run directory"`.

    Raises:
        ConfigError: It is a URL, or no path.
    """
    if not isinstance(path, (str, PurePath)) and not hasattr(path, "__fspath__"):
        raise ConfigError(f"{what} must be a path, got {path!r:.80}.")
    found = resolve_location(path)
    if isinstance(found, str):
        raise ConfigError(
            f"{found}: {what} must be on this machine or on a drive that is mounted here: give such a path. Only "
            "checkpoints are written to and read from URLs, with save() and from_checkpoint()."
        )
    return found
