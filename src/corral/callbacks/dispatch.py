"""Which code runs at which event, resolved once when the algorithm, a runner or a learner is built."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from corral.callbacks.callback import EVENTS, Callback, Event, MultiCallbacks, overrides_event
from corral.errors import CallbackError, ConfigError, nearest

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig

log = logging.getLogger("corral")

BoundCall = tuple[Callable[..., Any], dict[str, Any]]
"""A callable and the keyword arguments that it asked for."""


class Dispatcher:
    """The subscribers of every event: classes in list order, then callables in list order.

    Args:
        classes: Subclasses of `Callback`, made anew here, or instances.
        functions: Callables by event name.
        on_error: `"raise"`, or `"log"`: an exception in a callback is logged, once for each event and callback, and
            counted, and the run goes on.

    Attributes:
        num_errors: Exceptions so far that `on_error="log"` kept from ending the run.
    """

    def __init__(
        self, classes: Sequence[Any], functions: Mapping[str, Sequence[Callable[..., Any]]], on_error: str = "raise"
    ) -> None:
        """Make the instances and resolve the subscribers."""
        self.num_errors = 0
        self._logs_errors = on_error == "log"
        self._logged: set[tuple[str, str]] = set()
        self.instances = [entry() if isinstance(entry, type) else entry for entry in single(classes)]
        self._subscribers: dict[str, list[tuple[Callable[..., Any], tuple[str, ...] | None]]] = {}
        for name, event in EVENTS.items():
            methods = [getattr(instance, name) for instance in self.instances if _handles(instance, name)]
            self._subscribers[name] = [
                (function, accepted_arguments(function, event)) for function in [*methods, *functions.get(name, ())]
            ]

    def subscribed(self, *events: str) -> bool:
        """Say whether anyone listens to one of these events; without a name, to any at all."""
        return any(self._subscribers[event] for event in events or EVENTS)

    def wanted(self, event: str, argument: str) -> bool:
        """Say whether a subscriber of an event takes an argument, by name or as one of all."""
        return any(names is None or argument in names for _, names in self._subscribers[event])

    def bind(self, event: str, arguments: Mapping[str, Any]) -> list[BoundCall]:
        """Pick each subscriber's arguments; done once for a run of calls that share them.

        `arguments` is kept, and asked for the episode when something is to be logged.

        Whoever makes the calls turns what they raise into a `callback_error`. With `on_error="log"` they raise nothing.
        """
        return [
            (
                partial(self._call_and_log, event, function, arguments) if self._logs_errors else function,
                {name: arguments[name] for name in (EVENTS[event].arguments if names is None else names)},
            )
            for function, names in self._subscribers[event]
        ]

    def fire(self, event: str, **arguments: Any) -> None:
        """Call the subscribers of an event in order.

        Raises:
            CallbackError: One of them raised.
        """
        for function, chosen in self.bind(event, arguments):
            try:
                function(**chosen)
            except Exception as error:
                raise callback_error(event, function, error, arguments.get("episode")) from error

    def _call_and_log(
        self, event: str, function: Callable[..., Any], known: Mapping[str, Any], /, **arguments: Any
    ) -> None:
        try:
            function(**arguments)
        except Exception as error:
            self.num_errors += 1
            name = callback_name(function)
            if (event, name) not in self._logged:
                self._logged.add((event, name))
                problem = callback_error(event, function, error, known.get("episode"))
                log.error("%s The run goes on; later errors of it are counted only.", problem, exc_info=error)


def callback_name(function: Callable[..., Any]) -> str:
    """Return what a user knows a callback by: its qualified name, and for a function where it stands."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Callback):
        return f"{type(owner).__name__}.{function.__name__}"
    name: str = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def callback_error(event: str, function: Callable[..., Any], error: Exception, episode: Any = None) -> CallbackError:
    """Return the error that says which callback raised at which event and episode; chain it to the original."""
    if isinstance(error, CallbackError):  # a callback called something that fires events of its own, such as sample()
        return error
    where = ""
    if episode is not None:
        where = f" Episode {episode.id_}, sub-env {episode.env_index}, step {episode.t}."
    problem = f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__
    return CallbackError(f"{event}: callback {callback_name(function)} raised {problem}.{where}")


def single(classes: Sequence[Any]) -> Iterator[Any]:
    """Yield classes and instances, with those that stand for several unfolded."""
    for entry in classes:
        cls = entry if isinstance(entry, type) else type(entry)
        if issubclass(cls, MultiCallbacks):
            yield from single(cls.callback_classes)
            if not any(overrides_event(cls, event) for event in EVENTS):
                continue
        yield entry


def _handles(instance: Any, event: str) -> bool:
    return overrides_event(type(instance), event) or event in getattr(instance, "__dict__", ())


def make_dispatcher(config: AlgorithmConfig) -> Dispatcher:
    """Return the callbacks of a config for one part of the algorithm; classes are made anew for each part."""
    return Dispatcher(config.callbacks_class, config.callback_functions, config.on_error)


def listens(classes: Sequence[Any], functions: Mapping[str, Sequence[Any]], event: str) -> bool:
    """Say whether one of these classes, instances and callables would be called at an event."""
    types = (entry if isinstance(entry, type) else type(entry) for entry in single(classes))
    return bool(functions.get(event)) or any(overrides_event(cls, event) for cls in types)


def accepted_arguments(function: Callable[..., Any], event: Event) -> tuple[str, ...] | None:
    """Return the names of an event's arguments that a callable takes; `None` stands for all of them (`**kwargs`).

    Raises:
        ConfigError: The callable requires a name that the event does not have, or its names cannot be found out.
    """
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{event.name}: {callback_name(function)} is a coroutine function, which nobody would await.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{event.name}: the arguments of {function!r} cannot be found out: {error}. Wrap it in a lambda."
        ) from error
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


def _check_constructor(cls: type) -> None:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"callbacks: {cls.__name__} is made without arguments, but its __init__ needs some ({error}): give an "
            "instance, or the arguments defaults."
        ) from error
    except ValueError:  # a class of C code, whose signature cannot be found out
        return


def check_callbacks(classes: Sequence[Any], functions: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what cannot be called, at the time it is given.

    Raises:
        ConfigError: An event is unknown, something is not callable, or takes an argument its event does not have.
    """
    for entry in single(classes):
        cls = entry if isinstance(entry, type) else type(entry)
        if isinstance(entry, type):
            _check_constructor(entry)
        overridden = [name for name in EVENTS if overrides_event(cls, name)]
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
