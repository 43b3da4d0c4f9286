"""What the report and the plot share: the file that they write, and the packages that they need."""

from __future__ import annotations

import os
from pathlib import Path

from corral.errors import MissingPackageError, ReportError


def write_file(path: Path, content: bytes) -> Path:
    """Write a file under another name and move it into place, and return its path.

    Raises:
        ReportError: It cannot be written.
    """
    if path.is_dir():
        raise ReportError(f"{path} cannot be written: it is a directory; name a file.")
    unfinished = path.with_name(f"{path.name}.new")
    try:
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}; name another file.") from error
    return path


def missing_package(what: str, error: ImportError) -> MissingPackageError:
    """Return the error for a package that is not installed.

    Args:
        what: What needs it, such as `"a report"`.
        error: The error of the import.
    """
    return MissingPackageError(f"{what} needs the packages of an extra ({error}): pip install 'corral[report]'")
