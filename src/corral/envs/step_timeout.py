"""The limit `env_step_timeout_s`: env calls that take longer are interrupted where they hang.

First stage: a timer of the system (SIGALRM), whose handler raises in the main thread from the very line that hangs. It
interrupts sleeps, blocking reads, waits for locks and loops in Python, and costs about one microsecond per call. Second
stage, for C code that never comes back, with or without the GIL: a watchdog ends the process, if the runner has one of
its own, and leaves the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import gymnasium as gym

from corral.engines.worker import CRASH_FD
from corral.errors import ConfigError, EnvTimeoutError

# Where frames belong to nobody's env: what an env calls there, and what calls it.
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_ENVS = Path(__file__).parent
_NOT_ENV_CODE = (str(_ENVS), str(_ENVS.parent / "runners"), str(Path(gym.__file__).parent))

T = TypeVar("T")


class StepOverdue(BaseException):
    """Raised inside the env's own code when its time is up, and never seen outside of a `StepTimer`.

    It is no `Exception`: an env that tries again after every `except Exception` would swallow it.
    """


class StepTimer:
    """Interrupts calls that take too long. Works in the main thread alone, which is where Python handles signals.

    The system's timer is not set again for every call, which would cost two system calls: it rings once in a while, and
    is set to the end of the call's time if that has not come.

    Args:
        timeout_s: Seconds that one call may take.
        limit: What to call the limit in messages.

    Attributes:
        timeout_s: The same.
        is_armed: Whether a call is under way.
        num_calls: How many were begun.
    """

    def __init__(self, timeout_s: float, limit: str = "env_step_timeout_s") -> None:
        """Note the limit; no signal is touched yet."""
        self.timeout_s = timeout_s
        self._limit = f"{limit}={timeout_s:g}"
        self._interval_s = min(max(timeout_s, 0.05), 1.0)
        self.is_armed = False
        self.num_calls = 0
        self._deadline_s = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over SIGALRM; afterwards the previous handler and timer are back.

        Raises:
            ConfigError: This is not the main thread.
        """
        require_signals()
        began_s = time.monotonic()
        previous_delay_s, previous_interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
        previous = signal.signal(signal.SIGALRM, self._ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
            yield
        finally:
            self.is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)
            if previous_delay_s:
                left_s = previous_delay_s - (time.monotonic() - began_s)
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3), previous_interval_s)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function, inside `installed`, and interrupt it when its time is up.

        Raises:
            EnvTimeoutError: It took too long; the message says where it was then, and the cause has the traceback.
        """
        try:
            try:
                self._arm()
                return function(*args, **kwargs)
            finally:
                self.is_armed = False
        except StepOverdue as overdue:
            self.is_armed = False  # the signal may have come just before the line that does so
            raise EnvTimeoutError(str(overdue)) from overdue

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the call that is under way do something that has no limit; afterwards it has the whole time again."""
        was_armed = self.is_armed
        self.is_armed = False
        try:
            yield
        finally:
            if was_armed:
                self._arm()

    def _arm(self) -> None:
        self.num_calls += 1
        self._deadline_s = time.monotonic() + self.timeout_s
        self.is_armed = True

    def _ring(self, _: int, frame: FrameType | None) -> None:
        left_s = self._deadline_s - time.monotonic() if self.is_armed else self.timeout_s
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))
            return
        # Again and again: code that catches everything may swallow the first.
        signal.setitimer(signal.ITIMER_REAL, self._interval_s)
        raise StepOverdue(f"took longer than {self._limit}{_place(frame)}")


def _place(frame: FrameType | None) -> str:
    """Return where the innermost frame of env code is, or the innermost one if there is no such."""
    found = innermost = frame
    while found is not None and not _is_env_code(found.f_code.co_filename):
        found = found.f_back
    found = found or innermost
    return "" if found is None else f"; it hung in {found.f_code.co_name} ({found.f_code.co_filename}:{found.f_lineno})"


def _is_env_code(path: str) -> bool:
    if path.startswith(("<frozen", *_NOT_ENV_CODE)):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "site-packages" in path


def require_signals() -> None:
    """Refuse a place where an env cannot be interrupted.

    Raises:
        ConfigError: This is not the main thread, or the system has no timers.
    """
    if not hasattr(signal, "setitimer"):
        raise ConfigError("env_step_timeout_s needs the interval timers of POSIX systems, which this one has not.")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "env_step_timeout_s cannot interrupt an env outside of the main thread, and this runner lives in thread "
            f"{threading.current_thread().name!r}: take num_env_runners>=1, which gives it a process of its own, or "
            "leave env_step_timeout_s unset."
        )


@contextmanager
def limited(timeout_s: float | None, limit: str = "env_step_timeout_s") -> Iterator[None]:
    """Give a block a time limit, in the main thread; elsewhere, and with `None`, it has none.

    Raises:
        EnvTimeoutError: The block took too long.
    """
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = StepTimer(timeout_s, limit)
    with timer.installed():
        try:
            timer._arm()
            yield
        except StepOverdue as overdue:
            raise EnvTimeoutError(str(overdue)) from overdue


@contextmanager
def sampling(timer: StepTimer | None, *, own_process: bool) -> Iterator[None]:
    """Prepare a timer for calls, with the watchdog as the second stage where the process may be ended."""
    with ExitStack() as stack:
        if timer is not None:
            stack.enter_context(timer.installed())
            if own_process:
                stack.enter_context(_watchdog(timer))
        yield


@contextmanager
def _watchdog(timer: StepTimer) -> Iterator[None]:
    """End the process, with the stacks of all threads, if a call outlives the timer's signals.

    The countdown runs in a thread of C code, which needs no GIL; a thread of Python's sets it back as long as calls
    come and go, so that the calls themselves pay nothing for it.
    """
    descriptor = int(os.environ.get(CRASH_FD, sys.__stderr__.fileno() if sys.__stderr__ else 2))
    stop = threading.Event()

    def set_back() -> None:
        faulthandler.dump_traceback_later(2 * timer.timeout_s + 1, exit=True, file=descriptor)

    def watch() -> None:
        seen = -1
        while not stop.wait(max(timer.timeout_s / 2, 0.01)):
            if not timer.is_armed or timer.num_calls != seen:
                seen = timer.num_calls
                set_back()

    set_back()
    thread = threading.Thread(target=watch, name="corral step watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
