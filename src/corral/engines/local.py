"""The local engine: workers are objects in this process, and a call runs at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class LocalHandle:
    """A worker in this process."""

    def __init__(self, worker: Any) -> None:
        """Hold the worker."""
        self._worker = worker

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the method now and return a finished future; what the method raised is in the future too."""
        future: Future[Any] = Future()
        try:
            if self._worker is None:
                raise RuntimeError("this worker was killed")
            future.set_result(getattr(self._worker, method)(*args, **kwargs))
        except Exception as error:  # an interrupt goes straight through: it is meant for this process
            future.set_exception(error)
        return future

    def alive(self) -> bool:
        """Say whether `kill` has not been called."""
        return self._worker is not None

    def kill(self) -> None:
        """Drop the worker."""
        self._worker = None


class LocalEngine:
    """Starts workers in this process, one after another."""

    name = "local"

    def start(self, factory: Callable[[], Any]) -> LocalHandle:
        """Make the worker here and now."""
        return LocalHandle(factory())
