"""The interface of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Logger(ABC):
    """Writes results to a file or a service. Subclass it for a custom logger."""

    @abstractmethod
    def open(self, run_dir: Path) -> None:
        """Start a run whose directory is `run_dir`."""

    @abstractmethod
    def log_result(self, result: dict[str, Any]) -> None:
        """Write one result, so that it is kept however the run ends."""

    def close(self) -> None:
        """Close files and connections; called once, also after an error."""
        return
