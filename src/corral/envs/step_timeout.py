"""The limits of env calls: `env_step_timeout_s` for one call, and the time limit of a sample for all of its calls.

The first stage is a timer of the system (SIGALRM). Its handler raises an exception in the main thread, at the line that
hangs. It interrupts sleeps, blocking reads, waits for locks and loops in Python, and costs about one microsecond per
call. The second stage is for C code that never returns, with or without the GIL: if the runner has its own process, a
watchdog writes the stacks of all threads and ends the process.
"""

from __future__ import annotations

import faulthandler
import math
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

# Paths of code that is not part of an env: libraries that an env calls, and code that calls the env.
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_ENVS = Path(__file__).parent
_HAS_TIMERS = hasattr(signal, "setitimer")
_NOT_ENV_CODE = (str(_ENVS), str(_ENVS.parent / "runners"), str(Path(gym.__file__).parent))

# Seconds between two interruptions of calls that continue after the time of their sample was over.
_OVERDUE_INTERVAL_S = 0.1

T = TypeVar("T")


class StepOverdue(BaseException):
    """Raised inside the code of the env when its time is over; it never leaves a `StepTimer`.

    It is not an `Exception`, because an env with `except Exception` would catch it and continue.
    """


class SampleOverdue(BaseException):
    """Raised inside the code of the env when the time of the whole sample is over; the runner then ends the sample."""


class StepTimer:
    """Interrupts calls that take too long. It works only in the main thread, in which Python handles signals.

    The timer of the system is not set for each call, which would cost two system calls. It fires from time to time; if
    the current call still has time left, the timer is set to the deadline of this call.

    Args:
        timeout_s: Seconds that one call may take.
        limit: Name of the limit in messages.

    Attributes:
        timeout_s: Seconds that one call may take; infinity is no limit.
        sample_deadline_s: Clock reading (`time.monotonic`) after which any call raises `SampleOverdue`.
        is_armed: Whether a call is running.
        num_calls: Number of calls that have begun.
    """

    def __init__(self, timeout_s: float, limit: str = "env_step_timeout_s") -> None:
        """Keep the limit; the signal handler is not changed yet."""
        self.timeout_s = timeout_s
        self.sample_deadline_s = math.inf
        self._limit = f"{limit}={timeout_s:g}"
        self._interval_s = min(max(timeout_s, 0.05), 1.0)
        self.is_armed = False
        self.num_calls = 0
        self._is_installed = False
        self._deadline_s = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Use SIGALRM inside the `with` block; afterwards restore the previous handler and timer.

        Raises:
            ConfigError: This is not the main thread.
        """
        require_signals()
        began_s = time.monotonic()
        previous_delay_s, previous_interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
        previous = signal.signal(signal.SIGALRM, self._ring)
        try:
            try:
                self._is_installed = True
                signal.setitimer(signal.ITIMER_REAL, self._next_ring_s())
                yield
            finally:
                self.is_armed = False  # until here, the handler may raise
        finally:
            # A signal may come now. Its handler must not set the timer again: the timer would ring after the previous
            # handler is back, and that may be the one that ends the process.
            self._is_installed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)
            outer = getattr(previous, "__self__", None)
            self._is_installed = outer is self
            if previous_delay_s or isinstance(outer, StepTimer):  # the outer timer may just have rung
                left_s = previous_delay_s - (time.monotonic() - began_s)
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3), previous_interval_s)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return the result of a function, called inside `installed`, and interrupt it when its time is over.

        Raises:
            EnvTimeoutError: The function took too long; the message names the line that ran, and the cause has the
                traceback.
        """
        try:
            try:
                self._arm()
                return function(*args, **kwargs)
            finally:
                self.is_armed = False
        except StepOverdue as overdue:
            self.is_armed = False  # the signal may have come just before `is_armed = False` above
            raise EnvTimeoutError(str(overdue)) from overdue

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the limit of the running call; afterwards the call has its whole time again."""
        was_armed = self.is_armed
        self.is_armed = False
        try:
            yield
        finally:
            if was_armed:
                self._arm()

    def _arm(self) -> None:
        self.num_calls += 1
        self._deadline_s = min(time.monotonic() + self.timeout_s, self.sample_deadline_s)
        self.is_armed = True

    def _next_ring_s(self) -> float:
        """Return the seconds until the earliest time at which a call that begins now or later may be overdue."""
        left_s = self.sample_deadline_s - time.monotonic()
        return min(self.timeout_s, left_s if left_s > 0 else _OVERDUE_INTERVAL_S)

    def _ring(self, _: int, frame: FrameType | None) -> None:
        if not self._is_installed:
            return
        left_s = self._deadline_s - time.monotonic() if self.is_armed else self._next_ring_s()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))
            return
        # Fire again and again, because code that catches all exceptions may catch the first one.
        if self._deadline_s == self.sample_deadline_s:
            signal.setitimer(signal.ITIMER_REAL, _OVERDUE_INTERVAL_S)
            raise SampleOverdue
        signal.setitimer(signal.ITIMER_REAL, self._interval_s)
        raise StepOverdue(f"took longer than {self._limit}{_place(frame)}")


def _place(frame: FrameType | None) -> str:
    """Return the place of the innermost frame in the code of an env, or of the innermost frame if there is none."""
    found = innermost = frame
    while found is not None and not _is_env_code(found.f_code.co_filename):
        found = found.f_back
    found = found or innermost
    return "" if found is None else f"; it hung in {found.f_code.co_name} ({found.f_code.co_filename}:{found.f_lineno})"


def _is_env_code(path: str) -> bool:
    if path.startswith(("<frozen", *_NOT_ENV_CODE)):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "site-packages" in path


def can_interrupt() -> bool:
    """Return whether env calls can be interrupted here: in the main thread, if the system has timers."""
    return _HAS_TIMERS and threading.current_thread() is threading.main_thread()


def require_signals() -> None:
    """Raise an error if an env cannot be interrupted here.

    Raises:
        ConfigError: This is not the main thread, or the system has no timers.
    """
    if not _HAS_TIMERS:
        raise ConfigError("env_step_timeout_s needs the interval timers of POSIX, which this system does not have.")
    if not can_interrupt():
        raise ConfigError(
            "env_step_timeout_s cannot interrupt an env outside of the main thread, and this runner is in thread "
            f"{threading.current_thread().name!r}: set num_env_runners>=1, so that runners have their own processes, "
            "or leave env_step_timeout_s unset."
        )


@contextmanager
def limited(timeout_s: float | None, limit: str = "env_step_timeout_s") -> Iterator[None]:
    """Limit the time of a `with` block in the main thread; in other threads, and with `None`, there is no limit.

    Raises:
        EnvTimeoutError: The block took too long.
    """
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = StepTimer(timeout_s, limit)
    try:
        with timer.installed():
            timer._arm()
            yield
    except StepOverdue as overdue:
        raise EnvTimeoutError(str(overdue)) from overdue


@contextmanager
def sampling(timer: StepTimer, *, has_own_process: bool) -> Iterator[None]:
    """Prepare a timer; if `has_own_process`, a limit per call starts the watchdog, which may end the process."""
    with ExitStack() as stack:
        stack.enter_context(timer.installed())
        if has_own_process and timer.timeout_s < math.inf:
            stack.enter_context(_watchdog(timer))
        yield


@contextmanager
def _watchdog(timer: StepTimer) -> Iterator[None]:
    """Write the stacks of all threads and end the process if a call does not react to the timer.

    The countdown runs in a thread of C code, which does not need the GIL. A Python thread restarts the countdown as
    long as calls begin and end, so that the calls themselves have no cost.
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
