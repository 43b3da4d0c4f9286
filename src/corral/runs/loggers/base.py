"""The interface of loggers."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from corral.errors import ConfigError, MissingPackageError

# Arguments of the methods, as a subclass must take them.
_ARGUMENTS = {
    "open": ("run_dir", "config"),
    "resume": ("run_dir", "config", "training_iteration", "num_env_steps"),
}


class Logger(ABC):
    """Writes results to a file or a service. Subclass it for a custom logger.

    Attributes:
        is_service: Whether the results go to a service. What its methods raise then gives a warning and does not end
            the run, except for a `ConfigError`.
    """

    is_service: ClassVar[bool] = False

    @abstractmethod
    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Start a run.

        Args:
            run_dir: Directory of the run.
            config: Settings by group, and `algo`, in types that YAML has, as in the config.yaml of the run.
        """

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Continue a run; by default `open(run_dir, config)`.

        Args:
            run_dir: Directory of the run, with what this logger wrote there before.
            config: Settings by group, as for `open`; some may have changed.
            training_iteration: Iteration from which the run continues; results of later ones are superseded.
            num_env_steps: `num_env_steps_sampled_lifetime` at that iteration.
        """
        self.open(run_dir, config)

    @abstractmethod
    def log_result(self, result: dict[str, Any]) -> None:
        """Write one result, so that it is kept however the run ends."""

    def close(self) -> None:
        """Close files and connections; called once, also after an error."""
        return

    def __repr__(self) -> str:
        """Return the name of the class; the text does not change between runs."""
        return f"<{type(self).__name__}>"


def check_methods(logger: Logger) -> None:
    """Refuse a logger whose methods take other arguments.

    Raises:
        ConfigError: The message names the method, and how to write it.
    """
    for name, arguments in _ARGUMENTS.items():
        try:
            inspect.signature(getattr(logger, name)).bind(*arguments)
        except TypeError:
            wanted = ", ".join(arguments)
            raise ConfigError(
                f"{type(logger).__name__}.{name} must take ({wanted}), since loggers receive the config too: write "
                f"`def {name}(self, {wanted})`."
            ) from None


def require(logger: str, extra: str, *modules: str) -> None:
    """Import the modules that a logger needs.

    Args:
        logger: Class of the logger, for the message.
        extra: Extra of Corral that installs the modules.
        *modules: Names of the modules.

    Raises:
        MissingPackageError: One of them cannot be imported.
    """
    try:
        for name in modules:
            importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{logger} needs packages that cannot be imported ({error}): pip install 'corral[{extra}]'"
        ) from error
