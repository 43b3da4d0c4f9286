"""The engine of an algorithm: it is chosen at once, and made when something first runs on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corral.engines import engine_for, make_engine
from corral.engines.base import TRAITS, Engine, Resources, WorkerHandle


class LazyEngine:
    """Makes an engine when something first runs on it; see `Engine` for the contract.

    An algorithm makes one and hands it to all its groups of runners and learners. If nothing ever runs on it, no
    process starts and no cluster is joined.

    Attributes:
        traits: Traits of the chosen engine; asking for them starts nothing.
    """

    def __init__(self, setting: str) -> None:
        """Choose the engine that the setting `engine_name` means."""
        self.traits = TRAITS[engine_for(setting)]
        self._engine: Engine | None = None

    @property
    def is_made(self) -> bool:
        """Whether something ran on it since it was made or stopped."""
        return self._engine is not None

    def _get(self) -> Engine:
        if self._engine is None:
            self._engine = make_engine(self.traits.name)
        return self._engine

    def require(self, resources: Sequence[Resources]) -> None:
        """Refuse more workers than can ever run; no workers need no engine.

        Raises:
            ConfigError: Says what was asked, and what there is; or the engine is not installed.
        """
        if resources:
            self._get().require(resources)

    def start(
        self, factory: Callable[[], Any], *, name: str = "worker", resources: Resources | None = None
    ) -> WorkerHandle:
        """Start a worker; see `Engine.start`."""
        return self._get().start(factory, name=name, resources=resources)

    def share(self, value: Any) -> Any:
        """Prepare a value that several calls are given; see `Engine.share`."""
        return self._get().share(value)

    def describe_available(self) -> str:
        """Return a sentence about what there is room for."""
        return self._get().describe_available()

    def stop(self) -> None:
        """End what the engine itself started, if it was made."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
