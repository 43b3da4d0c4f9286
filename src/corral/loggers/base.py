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

    def resume(self, run_dir: Path, training_iteration: int, num_env_steps: int) -> None:
        """Continue a run whose directory is `run_dir`; by default `open(run_dir)`.

        Args:
            run_dir: Directory of the run, with what this logger wrote there before.
            training_iteration: Iteration from which the run continues; results of later ones are superseded.
            num_env_steps: `num_env_steps_sampled_lifetime` at that iteration.
        """
        self.open(run_dir)

    @abstractmethod
    def log_result(self, result: dict[str, Any]) -> None:
        """Write one result, so that it is kept however the run ends."""

    def close(self) -> None:
        """Close files and connections; called once, also after an error."""
        return
