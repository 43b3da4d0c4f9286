"""The callbacks of each event, resolved once when the algorithm, a runner or a learner is built."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from numpy.typing import NDArray

from corral.callbacks.callback import EVENTS, Callback, Event, MultiCallbacks, overrides_event
from corral.core.familiar_names import familiar_table, meaning_of
from corral.core.plain import check_plain
from corral.core.spaces import first_outside
from corral.core.tree import copy_nested
from corral.errors import CallbackError, CheckpointError, ConfigError, nearest

if TYPE_CHECKING:
    from corral.core.config import Config

log = logging.getLogger("corral")

BoundCall = tuple[Callable[..., Any], dict[str, Any]]
"""A callable and the keyword arguments that it takes."""


class Dispatcher:
    """The subscribers of all events: classes in list order, then callables in list order.

    Args:
        classes: Subclasses of `Callback`, of which instances are made here, or instances.
        functions: Lists of callables by event name.
        on_error: `"raise"` or `"log"`. With `"log"` the run continues after an exception in a callback, which is
            counted, and logged once for each event and callback.

    Attributes:
        num_errors: Number of exceptions so far that did not end the run, because of `on_error="log"`.
        heard: Names of the events that have a subscriber; what fires often asks it instead of `fire`.
    """

    def __init__(
        self, classes: Sequence[Any], functions: Mapping[str, Sequence[Callable[..., Any]]], on_error: str = "raise"
    ) -> None:
        """Make the instances and resolve the subscribers."""
        self.num_errors = 0
        self._logs_errors = on_error == "log"
        self._logged: set[tuple[str, str]] = set()
        self.instances = [entry() if isinstance(entry, type) else entry for entry in single(classes)]
        for instance in self.instances:
            _refuse_unknown_events(instance)
        self._subscribers: dict[str, list[tuple[Callable[..., Any], tuple[str, ...] | None]]] = {}
        for name, event in EVENTS.items():
            methods = [getattr(instance, name) for instance in self.instances if _handles(instance, name)]
            self._subscribers[name] = [
                (function, accepted_arguments(function, event)) for function in [*methods, *functions.get(name, ())]
            ]
        self.heard = frozenset(name for name, subscribers in self._subscribers.items() if subscribers)

    def subscribed(self, *events: str) -> bool:
        """Return whether any of these events has a subscriber; without names, whether any event has one."""
        return not self.heard.isdisjoint(events or EVENTS)

    def wanted(self, event: str, argument: str) -> bool:
        """Return whether a subscriber of an event takes an argument, by name or through `**kwargs`."""
        return any(names is None or argument in names for _, names in self._subscribers[event])

    def names(self, event: str, argument: str) -> list[bool]:
        """Return for each subscriber of an event whether its signature names an argument, in the order of `bind`."""
        return [argument in inspect.signature(function).parameters for function, _ in self._subscribers[event]]

    def needs_sub_envs(self) -> bool:
        """Return whether a subscriber needs the sub-envs as objects in its process; see `needs_sub_env`."""
        return any(needs_sub_env(event, function) for event in EVENTS for function, _ in self._subscribers[event])

    def bind(self, event: str, arguments: Mapping[str, Any]) -> list[BoundCall]:
        """Return the subscribers of an event, each with the arguments that it takes, for one or many calls.

        The caller makes the calls and turns exceptions into a `callback_error`. With `on_error="log"` the calls raise
        nothing; `arguments` is then kept, because its `episode` is named in the log.
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
        if not self._subscribers[event]:
            return
        for function, chosen in self.bind(event, arguments):
            try:
                function(**chosen)
            except Exception as error:
                raise callback_error(event, function, error, arguments.get("episode")) from error

    def check_actions(self, actions: NDArray[Any], space: spaces.Space[Any], *events: str) -> None:
        """Refuse actions that callbacks of these events wrote and that no policy could have taken.

        Args:
            actions: Module actions `[..., *space.shape]` after the events.
            space: Space of one module action.
            events: Events whose callbacks may have written them, with at least one subscriber.

        Raises:
            CallbackError: An action is outside the space; the message names the callbacks.
        """
        index = first_outside(space, actions)
        if index is None:
            return
        heard = [event for event in events if self._subscribers[event]]
        names = [callback_name(function) for event in heard for function, _ in self._subscribers[event]]
        raise CallbackError(
            f"{', '.join(heard)}: callback {' or '.join(names)} wrote the action {actions[index].tolist()} at "
            f"{list(index)}, which is outside {space}."
        )

    # State.

    def get_state(self) -> dict[str, Any]:
        """Return the states of the callbacks that have `get_state` and `set_state`, by place, and the error count.

        A callback that raises, or returns something that is not plain data, is left out, with a warning.
        """
        states = {}
        for index, instance in self._stateful():
            name = type(instance).__name__
            try:
                state = instance.get_state()
                check_plain(state, f"callback {name}: get_state()", CheckpointError)
            except Exception as error:
                problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                log.warning("The checkpoint has no state of callback %s: %s", name, problem, exc_info=True)
            else:
                states[index] = [name, copy_nested(state)]
        return {"num_errors": self.num_errors, "callbacks": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Let the callbacks continue from a state of `get_state`; a callback that has another class now keeps its own.

        Callbacks of a class are found in their order if there are as many as in the state, else by place.

        Raises:
            Exception: Exception of `set_state` of a callback.
        """
        self.num_errors, saved = int(state["num_errors"]), state["callbacks"]
        names = {index: type(instance).__name__ for index, instance in self._stateful()}
        for index, instance in self._stateful():
            then = [place for place, (name, _) in saved.items() if name == names[index]]
            now = [place for place, name in names.items() if name == names[index]]
            place = then[now.index(index)] if len(then) == len(now) else index
            if place in then:
                instance.set_state(copy_nested(saved[place][1]))

    def _stateful(self) -> Iterator[tuple[int, Any]]:
        for index, instance in enumerate(self.instances):
            if callable(getattr(instance, "get_state", None)) and callable(getattr(instance, "set_state", None)):
                yield index, instance

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
                log.error(
                    "%s The run continues; later errors of this callback are only counted.", problem, exc_info=error
                )


def callback_name(function: Callable[..., Any]) -> str:
    """Return the qualified name of a callback, and for a function its file and line."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Callback):
        return f"{type(owner).__name__}.{function.__name__}"
    name: str = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def callback_error(event: str, function: Callable[..., Any], error: Exception, episode: Any = None) -> CallbackError:
    """Return the error that names the callback, the event and the episode; raise it from the original exception."""
    if isinstance(error, CallbackError):  # the callback called a method that fires events too, such as sample()
        return error
    where = ""
    if episode is not None:
        where = f" Episode {episode.id_}, sub-env {episode.env_index}, step {episode.t}."
    problem = f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__
    end = "" if problem.endswith("?") else "."
    return CallbackError(f"{event}: callback {callback_name(function)} raised {problem}{end}{where}")


def single(classes: Sequence[Any]) -> Iterator[Any]:
    """Yield classes and instances, and in place of a class that represents several, each of these."""
    for entry in classes:
        cls = entry if isinstance(entry, type) else type(entry)
        if issubclass(cls, MultiCallbacks):
            yield from single(cls.callback_classes)
            if not any(overrides_event(cls, event) for event in EVENTS):
                continue
        yield entry


def _handles(instance: Any, event: str) -> bool:
    return overrides_event(type(instance), event) or event in getattr(instance, "__dict__", ())


def make_dispatcher(config: Config) -> Dispatcher:
    """Return the callbacks of a config for one part of the algorithm, with its own instances of the classes."""
    return Dispatcher(config.callbacks_class, config.callback_functions, config.on_error)


def needs_sub_env(event: str, function: Callable[..., Any]) -> bool:
    """Return whether a callback of an event needs the sub-env as an object in its process.

    Callbacks of `on_sub_environment_created` do, and of other events those that name `sub_environment`. A callback that
    takes it only through `**kwargs` may receive `None`.
    """
    return event == "on_sub_environment_created" or "sub_environment" in inspect.signature(function).parameters


def events_with_sub_envs(classes: Sequence[Any], functions: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the events at which these classes, instances and callables need sub-envs; see `needs_sub_env`."""
    types = [entry if isinstance(entry, type) else type(entry) for entry in single(classes)]
    return [
        event
        for event in EVENTS
        if any(needs_sub_env(event, getattr(cls, event)) for cls in types if overrides_event(cls, event))
        or any(needs_sub_env(event, function) for function in functions.get(event, ()))
    ]


def accepted_arguments(function: Callable[..., Any], event: Event) -> tuple[str, ...] | None:
    """Return the names of the arguments of an event that a callable takes; `None` means all of them (`**kwargs`).

    Raises:
        ConfigError: The callable requires a name that the event does not have, or its signature is unknown.
    """
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{event.name}: {callback_name(function)} is a coroutine function, which would never be awaited: give a "
            "plain function."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{event.name}: the signature of {function!r} is unknown: {error}. Wrap it in a lambda."
        ) from error
    names = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{event.name}: {function!r} takes {parameter.name!r} by position, but arguments are given by name: "
                "wrap it in a lambda."
            )
        if parameter.name in event.arguments:
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            hint = meaning_of(parameter.name, "EVENT_ARGUMENTS", event.arguments, event.name)
            raise ConfigError(
                f"{event.name}: {getattr(function, '__name__', function)!r} takes {parameter.name!r}, which the event "
                f"does not have. {hint or nearest(parameter.name, event.arguments)} Its arguments are: "
                f"{', '.join(event.arguments)}."
            )
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(names)


def _check_constructor(cls: type) -> None:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"callbacks: {cls.__name__} is called without arguments, but its __init__ requires some ({error}): give "
            "an instance, or give the arguments defaults."
        ) from error
    except ValueError:  # a class written in C, whose signature is unknown
        return


def _refuse_unknown_events(entry: Any) -> None:
    """Refuse a class or an instance with a method that is named like an event, and that no event would call."""
    for name in dir(entry):
        if (name.startswith("on_") or name in familiar_table("EVENTS")) and name not in EVENTS:
            owner, method = (
                (entry if isinstance(entry, type) else type(entry)).__name__,
                inspect.getattr_static(entry, name),
            )
            if callable(method) or isinstance(method, classmethod):
                raise ConfigError(
                    f"callbacks: {owner}.{name} would never be called, because no event has this name. "
                    f"{_event_hint(name)} A method that is no event has a name without on_ in front."
                )


def _event_hint(name: str) -> str:
    return meaning_of(name, "EVENTS", EVENTS) or nearest(name, EVENTS)


def check_callbacks(classes: Sequence[Any], functions: Mapping[str, Sequence[Any]]) -> None:
    """Check callbacks when they are given.

    Raises:
        ConfigError: An event is unknown, a method of a class is named like an event and is none, a callback is not
            callable, or it takes an argument that its event does not have.
    """
    for entry in single(classes):
        cls = entry if isinstance(entry, type) else type(entry)
        if isinstance(entry, type):
            _check_constructor(entry)
        _refuse_unknown_events(entry)
        overridden = [name for name in EVENTS if overrides_event(cls, name)]
        if not issubclass(cls, Callback) and not overridden:
            raise ConfigError(
                f"callbacks: expected a Callback subclass or instance, got {type(entry).__name__} {entry!r}."
            )
        for name in overridden:
            # Bound to the class, as there may be no instance yet: only the signature matters.
            accepted_arguments(inspect.getattr_static(cls, name).__get__(cls, cls), EVENTS[name])
    for name, callables in functions.items():
        if name not in EVENTS:
            raise ConfigError(f"callbacks: unknown event {name!r}. {_event_hint(name)}")
        for function in callables:
            if not callable(function):
                raise ConfigError(f"callbacks: {name} must be callable, got {type(function).__name__} {function!r}.")
            accepted_arguments(function, EVENTS[name])
