"""The engine of an algorithm, which is chosen at once and made when it is first used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from corral.engines import engine_for, make_engine
from corral.engines.base import TRAITS, Engine, Resources, WorkerHandle
from corral.errors import ConfigError

# The files whose functions import the user's modules in a worker's process: they unpickle, or they call the factory.
_WORKER_FILES = {str(Path(__file__).with_name(name)) for name in ("worker.py", "ray_worker.py")}


class LazyEngine:
    """Engine that makes the chosen engine when it is first used; see `Engine` for the contract.

    An algorithm makes one lazy engine and gives it to all its groups of runners and learners. If the engine is never
    used, no process starts and no cluster is joined. `stop` also ends the workers that their groups did not end.

    Attributes:
        traits: Traits of the chosen engine; reading them starts nothing.
    """

    def __init__(self, setting: str) -> None:
        """Choose the engine for the setting `engine_name`."""
        self.traits = TRAITS[engine_for(setting)]
        self._engine: Engine | None = None
        self._handles: list[WorkerHandle] = []
        self._most_handles = 1  # before ended workers are left out
        self._lock = threading.RLock()  # evaluation runners may restart in a thread of their own

    @property
    def is_made(self) -> bool:
        """Whether the chosen engine is made, and not stopped since."""
        return self._engine is not None

    def _get(self) -> Engine:
        with self._lock:
            if self._engine is None:
                if self.traits.has_own_process:
                    refuse_in_import_of_worker()
                self._engine = make_engine(self.traits.name)
            return self._engine

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse workers that need more resources than there can be; for no workers, no engine is made.

        Raises:
            ConfigError: The resources do not suffice, or the engine is not installed.
        """
        if resources:
            self._get().require(resources)

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> WorkerHandle:
        """Start a worker, and return its handle; see `Engine.start`."""
        handle = self._get().start(factory, name=name, resources=resources)
        with self._lock:
            self._handles.append(handle)
            if len(self._handles) > self._most_handles:
                self._handles = self.running()
                self._most_handles = 2 * len(self._handles) + 1
        return handle

    def running(self) -> list[WorkerHandle]:
        """Return the handles of the workers that have not ended."""
        return [handle for handle in self._handles if handle.alive()]

    def put(self, value: Any) -> Any:
        """Return a value in a form for several calls; see `Engine.share`."""
        return self._get().put(value)

    def describe_available(self) -> str:
        """Return a sentence about the free resources."""
        return self._get().describe_available()

    def stop(self) -> None:
        """End the workers that still run, and stop the chosen engine, if it was made."""
        for handle in self.running():
            handle.kill()
        if self._engine is not None:
            self._engine.stop()
            self._engine = None


def refuse_in_import_of_worker() -> None:
    """Refuse to start workers from the top level of a module that a worker imports: its workers would import it too.

    Raises:
        ConfigError: The message names the module and the line.
    """
    frame: FrameType | None = sys._getframe(1)
    module: FrameType | None = None
    while frame is not None:
        if module is None and frame.f_code.co_name == "<module>":
            module = frame
        elif module is not None and frame.f_code.co_filename in _WORKER_FILES:
            raise ConfigError(
                f"a worker imports the module {module.f_globals.get('__name__')!r}, whose top level builds an "
                f"algorithm with workers ({module.f_code.co_filename}:{module.f_lineno}). These workers would import "
                'the module again, without end. Put the code that builds and trains under `if __name__ == "__main__":`.'
            )
        frame = frame.f_back
