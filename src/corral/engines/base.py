"""The contract of an engine: start a stateful worker from a factory, and call its methods."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


class WorkerHandle(Protocol):
    """A running worker, wherever it runs."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the worker; the future holds its result or its exception."""

    def alive(self) -> bool:
        """Say whether the worker can still take calls."""

    def kill(self) -> None:
        """End the worker; further calls fail."""


class Engine(Protocol):
    """Starts workers."""

    name: str

    def start(self, factory: Callable[[], Any]) -> WorkerHandle:
        """Start a worker whose state is what `factory()` returns; the factory must be picklable."""
