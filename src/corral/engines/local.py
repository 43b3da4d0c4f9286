"""The local engine: workers are objects in this process, and calls run at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from corral.engines.base import TRAITS, Resources, require_on_this_machine
from corral.engines.forks import forks_end_here
from corral.errors import WorkerDiedError


class LocalHandle:
    """Handle of a worker in this process."""

    def __init__(self, factory: Callable[[], Any], name: str) -> None:
        """Make the worker; an exception of the factory is kept for the futures of the calls."""
        self._name = name
        self._worker: Any = None
        self._problem: Exception | None = None
        try:
            self._worker = make_worker(factory)
        except Exception as error:
            self._problem = error

    def call(
        self, method: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Run the method now, and return a finished future with its result or its exception."""
        future: Future[Any] = Future()
        if self._problem is not None:
            future.set_exception(self._problem)
            return future
        try:
            future.set_result(call_method(self._worker, method, args, kwargs))
        except Exception as error:  # a KeyboardInterrupt is not caught: it is meant for this process
            future.set_exception(error)
        return future

    def alive(self) -> bool:
        """Return whether the worker was made and `kill` has not been called."""
        return self._problem is None

    def kill(self) -> None:
        """Delete the worker; later calls fail."""
        self._worker = None
        self._problem = self._problem or WorkerDiedError(f"{self._name} was ended.")


class LocalEngine:
    """Starts workers in this process, one after another."""

    traits = TRAITS["local"]

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse resources that this machine does not have; CPUs are not checked, because workers run in turn.

        Raises:
            ConfigError: The message says what was requested, and what there is.
        """
        require_on_this_machine(resources)

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> LocalHandle:
        """Make the worker now, and return its handle."""
        return LocalHandle(factory, name)

    def put(self, value: Any) -> Any:
        """Return a copy, so that later changes to the value have no effect."""
        return copy.deepcopy(value)

    def describe_available(self) -> str:
        """Return a sentence for messages; this engine never runs out of resources."""
        return "Runners of this engine start in turn, in this process."

    def stop(self) -> None:
        """Do nothing: no process was started."""


def make_worker(factory: Callable[[], Any]) -> Any:
    """Return the worker that a factory makes; all engines call this."""
    with forks_end_here():
        return factory()


def call_method(worker: Any, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a worker's method, given by name, or of `method(worker, ...)`; all engines call this."""
    with forks_end_here():
        if isinstance(method, str):
            return getattr(worker, method)(*args, **kwargs)
        return method(worker, *args, **kwargs)
