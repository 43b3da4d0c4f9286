"""The local engine: workers are objects in this process, and a call runs at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from corral.engines.base import TRAITS, Resources, require_on_this_machine
from corral.errors import WorkerDiedError


class LocalHandle:
    """A worker in this process."""

    def __init__(self, factory: Callable[[], Any], name: str) -> None:
        """Make the worker; what the factory raises is kept for the calls."""
        self._name = name
        self._worker: Any = None
        self._problem: Exception | None = None
        try:
            self._worker = factory()
        except Exception as error:
            self._problem = error

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the method now and return a finished future; what the method raised is in the future too."""
        future: Future[Any] = Future()
        if self._problem is not None:
            future.set_exception(self._problem)
            return future
        try:
            future.set_result(call_method(self._worker, method, args, kwargs))
        except Exception as error:  # an interrupt goes straight through: it is meant for this process
            future.set_exception(error)
        return future

    def alive(self) -> bool:
        """Return whether the worker was made and `kill` has not been called."""
        return self._problem is None

    def kill(self) -> None:
        """Drop the worker."""
        self._worker = None
        self._problem = self._problem or WorkerDiedError(f"{self._name} was ended.")


class LocalEngine:
    """Starts workers in this process, one after another."""

    traits = TRAITS["local"]

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse resources that this machine does not have; cores do not matter, because workers take turns."""
        require_on_this_machine(resources)

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> LocalHandle:
        """Make the worker here and now."""
        return LocalHandle(factory, name)

    def share(self, value: Any) -> Any:
        """Return a copy, so that later changes of the value do not matter."""
        return copy.deepcopy(value)

    def describe_available(self) -> str:
        """Return a sentence: there is always room."""
        return "Runners of this engine start in turn, in this process."

    def stop(self) -> None:
        """Do nothing: no process was started."""


def call_method(worker: Any, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a worker's method by name, or a function with the worker; every engine's worker ends up here."""
    if isinstance(method, str):
        return getattr(worker, method)(*args, **kwargs)
    return method(worker, *args, **kwargs)
