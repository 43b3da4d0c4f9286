"""Ctrl-C that is held back until a block ends."""

from __future__ import annotations

import signal
import threading

import pytest

from corral.core.interrupts import interrupts_deferred


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
