"""Which code runs at which event, resolved once when the algorithm or a runner is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corral.callbacks.callback import EVENTS, Callback, Event
from corral.errors import ConfigError, nearest

BoundCall = tuple[Callable[..., Any], dict[str, Any]]
"""A callable and the keyword arguments that it asked for."""


class Dispatcher:
    """The subscribers of every event: classes in list order, then callables in list order.

    Args:
        classes: Subclasses of `Callback`, made anew here, or instances.
        functions: Callables by event name.
    """

    def __init__(self, classes: Sequence[Any], functions: Mapping[str, Sequence[Callable[..., Any]]]) -> None:
        """Make the instances and resolve the subscribers."""
        self.instances = [entry() if isinstance(entry, type) else entry for entry in classes]
        self._subscribers: dict[str, list[tuple[Callable[..., Any], tuple[str, ...] | None]]] = {}
        for name, event in EVENTS.items():
            methods = [getattr(instance, name) for instance in self.instances if _overrides(type(instance), name)]
            self._subscribers[name] = [
                (function, accepted_arguments(function, event)) for function in [*methods, *functions.get(name, ())]
            ]

    def subscribed(self, event: str) -> bool:
        """Say whether anyone listens to an event."""
        return bool(self._subscribers[event])

    def subscribed_any(self) -> bool:
        """Say whether anyone listens to anything."""
        return any(self._subscribers.values())

    def bind(self, event: str, arguments: Mapping[str, Any]) -> list[BoundCall]:
        """Pick each subscriber's arguments; done once for a run of calls that share them."""
        return [
            (function, {name: arguments[name] for name in (EVENTS[event].arguments if names is None else names)})
            for function, names in self._subscribers[event]
        ]

    def fire(self, event: str, **arguments: Any) -> None:
        """Call the subscribers of an event in order."""
        for function, chosen in self.bind(event, arguments):
            function(**chosen)


def _overrides(cls: type, event: str) -> bool:
    method = getattr(cls, event, None)
    return method is not None and method is not getattr(Callback, event)


def accepted_arguments(function: Callable[..., Any], event: Event) -> tuple[str, ...] | None:
    """Return the names of an event's arguments that a callable takes; `None` stands for all of them (`**kwargs`).

    Raises:
        ConfigError: The callable requires a name that the event does not have.
    """
    parameters = inspect.signature(function).parameters.values()
    names = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{event.name}: {function!r} takes {parameter.name!r} by position; arguments come by name."
            )
        if parameter.name in event.arguments:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"{event.name}: {getattr(function, '__name__', function)!r} takes {parameter.name!r}, which the event "
                f"does not have. {nearest(parameter.name, event.arguments)} It is given: {', '.join(event.arguments)}."
            )
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(names)


def check_callbacks(classes: Sequence[Any], functions: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what cannot be called, at the time it is given.

    Raises:
        ConfigError: An event is unknown, something is not callable, or takes an argument its event does not have.
    """
    for entry in classes:
        cls = entry if isinstance(entry, type) else type(entry)
        overridden = [name for name in EVENTS if _overrides(cls, name)]
        if not issubclass(cls, Callback) and not overridden:
            raise ConfigError(
                f"callbacks: expected a Callback subclass or instance, got {type(entry).__name__} {entry!r}."
            )
        for name in overridden:
            # Bound to the class in place of an instance, which there may not be yet: only the signature matters.
            accepted_arguments(inspect.getattr_static(cls, name).__get__(cls, cls), EVENTS[name])
    for name, callables in functions.items():
        if name not in EVENTS:
            raise ConfigError(f"callbacks: unknown event {name!r}. {nearest(name, EVENTS)}")
        for function in callables:
            if not callable(function):
                raise ConfigError(f"callbacks: {name} must be callable, got {type(function).__name__} {function!r}.")
            accepted_arguments(function, EVENTS[name])
