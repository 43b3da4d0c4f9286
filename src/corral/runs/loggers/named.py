"""Loggers by name, class, settings or import path, as a config, a file and the command line give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from corral.core.settings import import_path
from corral.errors import ConfigError, nearest
from corral.runs.loggers.base import Logger, check_methods

# Short name -> import path of the class. A module is imported when its logger is asked for.
NAMES = {
    "csv": "corral.runs.loggers.files:CSVLogger",
    "json": "corral.runs.loggers.files:JSONLinesLogger",
    "images": "corral.runs.loggers.images:ImageLogger",
    "tensorboard": "corral.runs.loggers.tensorboard:TensorBoardLogger",
    "wandb": "corral.runs.loggers.wandb:WandbLogger",
    "mlflow": "corral.runs.loggers.mlflow:MLflowLogger",
    "trackio": "corral.runs.loggers.trackio:TrackioLogger",
}
DEFAULT_NAMES = ("csv", "json")
# Files in a run directory -> short name of the logger that wrote there.
_WRITTEN = {
    "events.out.tfevents.*": "tensorboard",
    "images": "images",
    "wandb.json": "wandb",
    "mlflow.json": "mlflow",
    "trackio.json": "trackio",
}


def make_loggers(given: Sequence[Any], place: str = "loggers") -> list[Logger]:
    """Return loggers.

    Args:
        given: For each logger, its short name, the import path of its class, its class, an instance, or a dict with
            `type` (a name, a path or a class) and the settings of the class.
        place: Where they were given, for the message.

    Raises:
        ConfigError: A name is unknown, something is no logger, settings do not fit the class, two loggers write the
            same file, or an extra is missing.
    """
    _check_list(given, place)
    loggers = [make() for make in [_factory(entry, f"{place}[{index}]") for index, entry in enumerate(given)]]
    files = [name for logger in loggers if (name := getattr(logger, "file_name", None)) is not None]
    for name in files:
        if files.count(name) > 1:
            raise ConfigError(f"{place}: {files.count(name)} loggers write the file {name!r}: give each its file_name.")
    for logger in loggers:
        check_methods(logger)
    return loggers


def _check_list(given: Any, place: str) -> None:
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"{place}={given!r:.200} must be a list, such as ['csv', 'json'].")


def check_loggers(given: Sequence[Any] | None, place: str = "loggers") -> None:
    """Refuse what `make_loggers` cannot make, before anything is made; a missing extra is not found."""
    for index, entry in enumerate(given or ()):
        _factory(entry, f"{place}[{index}]")


def names_of(run_dir: Path | None) -> list[Any]:
    """Return the loggers of a run for which none are named: the default ones, and for a run that continues what it had.

    Args:
        run_dir: Directory of the run that continues; `None` is a new run.
    """
    found = [] if run_dir is None else [name for file, name in _WRITTEN.items() if any(run_dir.glob(file))]
    return [*DEFAULT_NAMES, *found]


def add_named(loggers: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return loggers as a config holds them, and the named ones whose classes are not among them.

    Raises:
        ConfigError: A name is unknown.
    """
    found = list(loggers)
    classes = {_class_in(entry, f"loggers[{index}]") for index, entry in enumerate(loggers)}
    for name in names:
        if (cls := _class_of(name, "--logger")) not in classes:
            classes.add(cls)
            found.append(name)
    return found


def _class_in(entry: Any, place: str) -> type[Logger]:
    if isinstance(entry, Logger):
        return type(entry)
    return _class_of(entry.get("type") if isinstance(entry, Mapping) else entry, place)


def _factory(entry: Any, place: str) -> Callable[[], Logger]:
    """Return what makes a logger, after all checks that need no instance."""
    if isinstance(entry, Logger):
        return lambda: entry
    settings = dict(entry) if isinstance(entry, Mapping) else {"type": entry}
    if "type" not in settings:
        raise ConfigError(f"{place}={entry!r:.200} has no 'type': name the logger, as in {{'type': 'wandb'}}.")
    cls = _class_of(settings.pop("type"), place)
    try:
        inspect.signature(cls).bind(**settings)
    except TypeError as error:
        names = [name for name in inspect.signature(cls).parameters]
        takes = f"takes {', '.join(names)}" if names else "takes no settings"
        raise ConfigError(f"{place}: {cls.__name__} {takes}, and was given {settings!r:.200}: {error}.") from None
    return partial(cls, **settings)


def _class_of(kind: Any, place: str) -> type[Logger]:
    cls = kind
    if isinstance(kind, str):
        path = NAMES.get(kind, kind)
        if ":" not in path and "." not in path:
            raise ConfigError(
                f"{place}: unknown logger {kind!r}. {nearest(kind, list(NAMES))} A logger of your own is named by the "
                "import path of its class, such as 'my_loggers:MyLogger'."
            )
        try:
            cls = import_path(path)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}.") from error
    if not (inspect.isclass(cls) and issubclass(cls, Logger)):
        raise ConfigError(
            f"{place}={kind!r:.200} is no logger: give a name, a subclass of "
            "corral.runs.loggers.Logger, or an instance."
        )
    return cls
