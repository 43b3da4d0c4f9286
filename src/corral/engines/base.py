"""The contract of an engine: start a stateful worker from a factory, and call its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Resources:
    """What one worker needs. Only an engine that places workers on machines looks at it.

    Attributes:
        num_cpus: CPUs; a fraction shares one.
        num_gpus: GPUs; a fraction shares one.
        custom: Others, by name.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)


class WorkerHandle(Protocol):
    """A running worker, wherever it runs. Its calls run one after another, in the order they were made."""

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the worker by name, or `method(worker, *args, **kwargs)`, and return at once.

        The future holds the result, or the exception with the worker's traceback as a note. It holds a
        `WorkerDiedError` if the worker died before or during the call, and what the factory raised if it did.

        Raises:
            SerializationError: Something that was given cannot be pickled.
        """

    def alive(self) -> bool:
        """Say whether the worker can still take calls."""

    def kill(self) -> None:
        """End the worker, and every process that it started, now; calls under way and further ones fail."""


class Engine(Protocol):
    """Starts workers.

    Attributes:
        name: As in the setting `engine_name`.
        own_process: Whether each worker has a process of its own.
    """

    name: str
    own_process: bool

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse more workers than can ever run.

        Raises:
            ConfigError: Says what was asked, and what there is.
        """

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> WorkerHandle:
        """Start a worker whose state is what `factory()` returns, and return before it has run.

        Args:
            factory: Goes to where the worker runs.
            name: For messages and process lists, such as `env runner 2`.
            resources: What the worker needs.

        Raises:
            SerializationError: The factory holds something that cannot be pickled; the attribute is named.
        """

    def share(self, value: Any) -> Any:
        """Prepare a value that several calls are given, as a positional argument: it is copied and packed once."""

    def describe_available(self) -> str:
        """Say what there is room for, for the message when workers do not start."""

    def stop(self) -> None:
        """End what the engine itself started, such as a Ray runtime; workers are ended by their handles."""
