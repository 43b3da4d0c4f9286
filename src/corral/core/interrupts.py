"""Signals that end a run: as exceptions, and held back where half of the work would be worse than none or all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals with which terminals and job schedulers end a process."""


class EndingSignal(KeyboardInterrupt):
    """A signal asks this process to end, as Ctrl-C does.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        """Store the number of the signal."""
        super().__init__(number)
        self.number = number


def name_of_interrupt(error: BaseException) -> str | None:
    """Return what an exception says about a run that it ends, or `None` if it is no interrupt."""
    if not isinstance(error, KeyboardInterrupt):
        return None
    number = getattr(error, "number", signal.SIGINT)
    return "Interrupted" if number == signal.SIGINT else f"Ended by {signal.Signals(number).name}"


@contextmanager
def ending_signals_raised() -> Iterator[None]:
    """Raise `EndingSignal` at each SIGINT and at the first SIGTERM or SIGHUP inside the `with` block.

    Further ones of SIGTERM and SIGHUP are ignored. A signal that is ignored before, as SIGHUP is under `nohup`, stays
    ignored, and one that has a handler of the program keeps it. Only for the main thread of a program, such as
    the command line: a library leaves signals alone.

    SIGINT has this handler too, because Python ends itself by the signal, whatever status the program returns, if a
    plain `KeyboardInterrupt` has passed through an `exec` of text, which every import of a dataclass contains.
    """
    before: dict[int, Any] = {}

    def end(number: int, frame: Any) -> None:
        if number != signal.SIGINT:
            for other in before.keys() - {signal.SIGINT}:
                signal.signal(other, signal.SIG_IGN)  # a closed terminal sends several
        raise EndingSignal(number)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in ENDING}
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: handler for number, handler in before.items() if handler in defaults}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Handle a signal of `ENDING` that arrives inside the `with` block when the block ends.

    For short blocks that wait for nobody. It does nothing outside of the main thread, in which Python handles signals,
    and for signals that are not handled in Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    arrived: list[Any] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            handlers[arrived[0][0]](*arrived[0])
