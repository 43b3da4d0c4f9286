"""Signals that end a run: raised, and held back until a block ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from corral.core.interrupts import EndingSignal, ending_signals_raised, interrupts_deferred, name_of_interrupt


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
    with pytest.raises(EndingSignal) as caught, ending_signals_raised(), interrupts_deferred():
        signal.raise_signal(signal.SIGTERM)
        done.append("the rest of the block")
    assert done and caught.value.number == signal.SIGTERM


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


def test_each_interrupt_of_the_keyboard_is_raised() -> None:
    with pytest.raises(EndingSignal) as caught, ending_signals_raised():
        with pytest.raises(EndingSignal):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert name_of_interrupt(caught.value) == "Interrupted" == name_of_interrupt(KeyboardInterrupt())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_signals_raised():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
