"""Signals that end a run: raised, and held back until a block ends."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from corral.core.interrupts import (
    NUDGE,
    EndingSignal,
    ending_signals_raised,
    interruptible,
    interrupts_deferred,
    name_of_interrupt,
    raise_if_ending,
)

DEADLINE_S = 60.0


def test_an_interrupt_comes_when_the_block_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_of_a_block_that_raises_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        raise OSError("in the block")
    assert isinstance(caught.value.__context__, OSError)


def test_an_exception_alone_stays_as_it_is() -> None:
    with pytest.raises(OSError, match="in the block"), interrupts_deferred():
        raise OSError("in the block")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_run_the_block_as_it_is() -> None:
    done: list[str] = []

    def work() -> None:
        with interrupts_deferred():
            done.append("work")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["work"]


@pytest.fixture
def default_handlers() -> Iterator[None]:
    """Give the signals the handlers that a new process has; Ray sets others in the process that starts it."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_handlers")
def test_the_other_ending_signals_are_held_back_too() -> None:
    done = []
    with pytest.raises(EndingSignal) as caught, ending_signals_raised():
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            done.append("the rest of the block")
        pytest.fail("it was held back after the block too")
    assert done and caught.value.number == signal.SIGTERM
    assert signal.getsignal(NUDGE) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_ending_signal_is_raised_and_later_ones_are_ignored(number: signal.Signals) -> None:
    with pytest.raises(EndingSignal) as caught, ending_signals_raised():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.number == number
    assert name_of_interrupt(caught.value) == f"Ended by {number.name}"
    assert signal.getsignal(number) is signal.SIG_DFL


@interruptible
def count_to(number: int, swallow: Callable[[], None], counted: list[int]) -> None:
    for index in range(number):
        swallow()
        counted.append(index)


def interrupt_in_foreign_code() -> None:
    """Swallow every exception of a callback of C, as some libraries do."""
    connection = sqlite3.connect(":memory:")
    connection.create_function("interrupt", 0, lambda: signal.raise_signal(signal.SIGINT))
    with contextlib.suppress(BaseException):
        connection.execute("select interrupt()").fetchall()


def test_an_interrupt_in_foreign_code_is_raised_in_the_loop_around_it() -> None:
    counted: list[int] = []
    with pytest.raises(EndingSignal) as caught, ending_signals_raised():
        count_to(3, interrupt_in_foreign_code, counted)
    assert counted == []
    assert name_of_interrupt(caught.value) == "Interrupted" == name_of_interrupt(KeyboardInterrupt())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and sys.getprofile() is None


def test_an_interrupt_is_raised_in_a_loop_that_a_training_step_of_the_user_called() -> None:
    counted: list[int] = []

    def training_step() -> None:
        count_to(3, interrupt_in_foreign_code, counted)

    with pytest.raises(EndingSignal), ending_signals_raised():
        training_step()
    assert counted == []


def test_an_interrupt_is_not_raised_into_foreign_code_that_called_a_loop() -> None:
    inner: list[int] = []
    outer: list[int] = []
    once = iter([interrupt_in_foreign_code])

    def swallow() -> None:
        with contextlib.suppress(BaseException):
            count_to(3, lambda: next(once, int)(), inner)

    with pytest.raises(EndingSignal), ending_signals_raised():
        count_to(1, swallow, outer)
    assert (inner, outer) == ([0, 1, 2], [])


def test_an_interrupt_that_is_swallowed_all_the_same_is_raised_at_the_next_look() -> None:
    with pytest.raises(EndingSignal), ending_signals_raised():
        with contextlib.suppress(KeyboardInterrupt):
            count_to(1, interrupt_in_foreign_code, [])
        raise_if_ending()
        pytest.fail("the interrupt was lost")


def test_an_interrupt_in_the_last_step_or_before_an_error_is_not_lost() -> None:
    with pytest.raises(EndingSignal), ending_signals_raised():
        interrupt_in_foreign_code()
    with pytest.raises(EndingSignal) as caught, ending_signals_raised():
        interrupt_in_foreign_code()
        raise OSError("the simulator was interrupted too")
    assert isinstance(caught.value.__cause__, OSError)


def test_an_interrupt_wakes_a_wait() -> None:
    main = threading.main_thread().ident
    assert main is not None
    waits_for = Future[None]()
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(EndingSignal), ending_signals_raised():
        waits_for.result(DEADLINE_S)
        pytest.fail("nothing woke it")


def test_signals_of_forked_processes_are_not_counted_here() -> None:
    """As those with which a vector env ends the processes of its sub-envs: a second signal ends this process."""
    script = """
import os, signal
from corral.core.interrupts import ending_signals_raised
with ending_signals_raised():
    process = os.fork()
    if not process:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    print(os.waitpid(process, 0)[1])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_signals_raised():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
