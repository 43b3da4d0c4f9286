"""Signals that end a run: raised where only Corral's code sees them, and held back where half of the work is worse.

An exception that a handler raises into foreign code may be swallowed there: by an import with a fallback, or by C that
calls Python. So the handler only notes a signal, except where Corral waits for something. `EndingSignal` is raised by
the next call that an `interruptible` function makes, such as the loop over env steps, which costs nothing before there
is a signal; and by `raise_if_ending`, also if something has swallowed it all the same.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals with which terminals and job schedulers end a process."""

TOGETHER_S = 0.3
"""Signals within these seconds are one request: a closed terminal and `timeout` send several."""

PATIENCE_S = 2.0
"""Seconds after which a message says that something keeps the run from ending."""

NUDGE, NUDGE_EVERY_S = getattr(signal, "SIGURG", signal.SIGABRT), 0.05
"""A signal that nothing else uses, with which the main thread is asked to look again, and how often."""

_WAITS = frozenset(("concurrent", "multiprocessing", "queue", "selectors", "socket", "subprocess", "threading"))
"""Packages with which Corral waits for other threads and processes."""

_TRANSPARENT = _WAITS | {"corral", "contextlib"}
"""Packages whose code passes an interrupt on."""

_interruptible: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., Any])


def interruptible(function: F) -> F:
    """Let a signal that asks the process to end be raised by any call that a function makes; return the function.

    For loops and long reads that leave nothing half done between two calls.
    """
    _interruptible.add(function.__code__)
    return function


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


class _Request:
    """The request to end of one `ending_signals_raised` block.

    Attributes:
        base: Frame of the function that has the block.
        number: Number of the first signal, or `None`.
        was_raised: Whether its exception was raised.
        is_looking: Whether each call is looked at, to raise it at the right one.
        before_nudge: Handler of `NUDGE` before the signal.
    """

    def __init__(self, base: FrameType, at_once: bool) -> None:
        self.base: FrameType | None = base
        self.was_raised, self._at_once = False, at_once
        self.number: int | None = None
        self.is_looking = False
        self.before_nudge: Any = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, as its handler, and raise it if only Corral's code sees the exception."""
        if self.number is not None:
            return
        self.number = number
        self.before_nudge = signal.signal(NUDGE, self.nudge)
        if not _num_deferred and (self._at_once or (_package(frame) in _WAITS and self._is_own(frame))):
            self.throw()
        self.nudge(number, frame)

    def nudge(self, number: int, frame: FrameType | None) -> None:
        """Look at all calls from now on, unless a module is being imported, which that would make slow."""
        while frame is not None and frame is not self.base:
            if _package(frame) == "importlib":
                return
            frame = frame.f_back
        if not self.was_raised and sys.getprofile() is None:
            self.is_looking = True
            sys.setprofile(self._look)  # costs nothing before there is a signal

    def throw(self) -> None:
        """Raise the exception of the signal."""
        assert self.number is not None
        self.was_raised = True
        self.forget()
        raise EndingSignal(self.number)

    def forget(self) -> None:
        """Look at calls no longer."""
        self.is_looking = False
        if sys.getprofile() == self._look:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        """Raise the signal at a call of an interruptible function, before what it calls has begun."""
        caller = frame if event == "c_call" else frame.f_back if event == "call" else None
        if caller is not None and caller.f_code in _interruptible and not _num_deferred and self._is_own(caller):
            self.throw()

    def _is_own(self, frame: FrameType | None) -> bool:
        """Return whether all code between a frame and the block passes an interrupt on."""
        while frame is not None and frame is not self.base:
            # A training step of the user calls Corral's code and waits in it; `fit` looks again after it.
            passes_on = frame.f_code in _interruptible or frame.f_code.co_name == "training_step"
            if not passes_on and _package(frame) not in _TRANSPARENT:
                return False
            frame = frame.f_back
        return frame is not None


def _package(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__")).partition(".")[0]


_request: _Request | None = None
_num_deferred = 0


def raise_if_ending() -> None:
    """Raise `EndingSignal` if a signal has asked this process to end; loops and long reads look here.

    It does nothing outside of an `ending_signals_raised` block, and in other threads.
    """
    if _request is None or _request.number is None or _num_deferred:
        return
    if threading.current_thread() is threading.main_thread():
        _request.throw()


@contextmanager
def ending_signals_raised(*, at_once: bool = False) -> Iterator[None]:
    """Raise `EndingSignal` after the first SIGINT, SIGTERM or SIGHUP in the `with` block, where nothing swallows it.

    With `at_once` it is raised wherever the signal arrives, for work of which a part is worth nothing. A second signal
    ends the process at once, with the exit status of the signal, also where the main thread never returns from
    foreign code. Signals that come within `TOGETHER_S` count as one. A signal that is ignored before, as SIGHUP is
    under `nohup`, stays ignored, and one that has a handler of the program keeps it. Only for the main thread of a
    program, such as the command line: a library leaves signals alone.

    SIGINT has this handler too, because Python ends itself by the signal, whatever status the program returns, if a
    plain `KeyboardInterrupt` has passed through an `exec` of text, which every import of a dataclass contains.
    """
    global _request
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number, handler in before.items() if handler in defaults}
    _request = request = _Request(sys._getframe(2), at_once)
    with _second_signal_ends(request, frozenset(before)):
        for number in before:
            signal.signal(number, request.note)
        try:
            yield
            if not request.was_raised:
                raise_if_ending()  # it came in the last step
        except Exception as error:  # it came before the error, and may have caused it, as in a child process
            if request.number is None or request.was_raised:
                raise
            raise EndingSignal(request.number) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            request.forget()
            if request.number is not None:
                signal.signal(NUDGE, request.before_nudge)
            request.base = _request = None


@contextmanager
def _second_signal_ends(request: _Request, numbers: frozenset[int]) -> Iterator[None]:
    """End this process at the second signal in the `with` block, from a thread that learns of signals at once."""
    _leave_pipe_in_forks()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reads, request, numbers), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)  # ends the thread, which closes the other end


@functools.cache
def _leave_pipe_in_forks() -> None:
    """Let forked processes write the signals that they get nowhere: this process would count them."""

    def forked() -> None:
        if _request is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forked)


def _watch(reads: int, request: _Request, numbers: frozenset[int]) -> None:
    """Count the signals that arrive at a pipe: the second one ends the process."""
    with open(reads, "rb", buffering=0) as pipe:
        signals = _signals(pipe, numbers)
        if next(signals, None) is None:
            return
        first_s = time.monotonic()
        while any(select.select([pipe], [], [], max(0.0, first_s + TOGETHER_S - time.monotonic()))):
            if not pipe.read(1):
                return  # the block has ended
        threading.Thread(target=_nudge_until_raised, args=(request,), name="signals", daemon=True).start()
        for number in signals:
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h")  # the display hides the cursor
            os._exit(128 + number)


def _signals(pipe: io.FileIO, numbers: frozenset[int]) -> Iterator[int]:
    """Yield the numbers of the signals that ask this process to end, as they arrive, until the block ends."""
    while number := pipe.read(1):
        if number[0] in numbers:
            yield number[0]


def _nudge_until_raised(request: _Request) -> None:
    """Let the main thread look again, and say after a while that something keeps the process from ending."""
    said_at_s = time.monotonic() + PATIENCE_S - TOGETHER_S
    while not request.was_raised and request.base is not None:
        time.sleep(NUDGE_EVERY_S)
        if not request.is_looking and request.number is not None and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(cast(int, threading.main_thread().ident), NUDGE)
        if time.monotonic() > said_at_s and not request.was_raised:
            said_at_s = math.inf
            with contextlib.suppress(OSError, ValueError, AttributeError):
                text = "ending as soon as what runs now returns. A second signal ends the process at once"
                os.write(sys.stderr.fileno(), f"corral: {text}, without another checkpoint.\n".encode())


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Handle a signal of `ENDING` that arrives inside the `with` block when the block ends.

    For short blocks that wait for nobody. It does nothing outside of the main thread, in which Python handles signals,
    and for signals that are not handled in Python.
    """
    global _num_deferred
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    if _request is not None:
        handlers = {number: handler for number, handler in handlers.items() if handler != _request.note}
    was_raised = _request is not None and _request.was_raised
    arrived: list[Any] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    _num_deferred += 1
    try:
        yield
    finally:
        _num_deferred -= 1
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            handlers[arrived[0][0]](*arrived[0])
        if _request is not None and not was_raised:
            raise_if_ending()
