"""What a logger is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Logger(ABC):
    """Writes results somewhere. Subclass it for a place of your own."""

    @abstractmethod
    def open(self, run_dir: Path) -> None:
        """Start a run whose directory is `run_dir`."""

    @abstractmethod
    def log_result(self, result: dict[str, Any]) -> None:
        """Write one result, so that it is kept whatever happens next."""

    def close(self) -> None:
        """End the run; called once, also after an error."""
        return
