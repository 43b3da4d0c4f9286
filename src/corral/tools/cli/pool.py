"""A pool of processes that train, a few at a time: runs of `corral train --seeds`, and trials of `corral search`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from corral.core.interrupts import interruptible, interrupts_deferred, raise_if_ending
from corral.engines.own_commands import own_command
from corral.tools.cli.exit_status import interrupted_status

OUTPUT_FILE = "output.txt"
END_WITH_INPUT = "--end-with-input"
"""Option of `corral train` for processes of a pool: end as after SIGTERM, with a checkpoint, when the input ends."""

LOOK_EVERY_S = 0.5
# Seconds that a process has for its last checkpoint when the process that started it was killed.
ORPHAN_PATIENCE_S = 60.0


class TrainingProcess:
    """A process of the pool.

    Attributes:
        home: Directory, in which `output.txt` gets what the process prints.
        process: The process, after `start`.
    """

    def __init__(self, home: Path, command: Sequence[str]) -> None:
        """Store what to run."""
        self.home, self._command = home, [*command]
        self._output_begin = 0  # bytes of `output.txt` that earlier attempts wrote
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], **streams: Any) -> None:
        """Start the process, in a session of its own, so that Ctrl-C in the terminal reaches only this process.

        Args:
            environment: Its environment variables.
            **streams: `stdout`, if it does not belong into the file.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / OUTPUT_FILE).open("ab") as output:
            self._output_begin = output.tell()
            self.process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.PIPE,  # which ends with this process, however it ends
                stderr=output,
                start_new_session=True,
                **{"stdout": output, **streams},
            )

    @property
    def status(self) -> int | None:
        """Exit status, 128 plus the number of the signal that killed the process, or `None` until it has ended."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # an answer that was not read
            self.process.stdin.close()
        return code if code >= 0 else 128 - code

    def error_line(self) -> str:
        """Return the error that the process printed last, or `""`."""
        with (self.home / OUTPUT_FILE).open("rb") as output:
            output.seek(self._output_begin)
            text = output.read().decode(errors="replace")
        return next((line[8:] for line in reversed(text.splitlines()) if line.startswith("corral: ")), "")


P = TypeVar("P", bound=TrainingProcess)


class SeedRun(TrainingProcess):
    """The run of one seed, whose directory is `home`.

    Attributes:
        seed: The seed.
    """

    def __init__(self, seed: int, run_dir: Path, arguments: Sequence[str]) -> None:
        """Store what to run; `arguments` follow `corral train`."""
        super().__init__(run_dir, [*own_command("corral.tools.cli.main"), "train", END_WITH_INPUT, *arguments])
        self.seed = seed


def end_with_input(receive: Callable[[str], None] = lambda line: None) -> None:
    """End this process as SIGTERM does when standard input ends, which the process that started it holds open.

    If that takes longer than `ORPHAN_PATIENCE_S`, a second SIGTERM ends it at once: nobody else would.

    Args:
        receive: Function that is called with each line of the input, in a thread.
    """

    def read() -> None:
        text = b""
        with contextlib.suppress(OSError):
            while part := os.read(0, 1024):  # `sys.stdin` has a lock, which this thread would hold when Python ends
                *lines, text = (text + part).split(b"\n")
                for line in lines:
                    receive(line.decode())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_PATIENCE_S)  # a limit, not a wait for something: this thread ends with the process
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, name="end with input", daemon=True).start()


@interruptible
def run_pool(
    parallel: int,
    start_next: Callable[[], P | None],
    wait: Callable[[Sequence[P]], None],
    ended: Callable[[P], None],
    ending: Callable[[], None],
) -> int | None:
    """Run processes until there is none left, and return when they have ended.

    A signal that asks this process to end is passed on to them: they write checkpoints and end, and no others start. A
    second signal ends this process, and with it all of them.

    Args:
        parallel: Largest number at a time.
        start_next: Starts the next process, and returns it; `None` if there is none now.
        wait: Called with the processes that run, to wait for news of them, for half a second at most.
        ended: Called with each process that has ended by itself.
        ending: Called when the processes were sent a signal, before they are waited for.

    Returns:
        `None`, or the exit status of the signal that ended the processes.
    """
    running: list[P] = []
    try:
        while True:
            while len(running) < parallel:
                with interrupts_deferred():  # else a process could run that is not in the list
                    if (process := start_next()) is None:
                        break
                    running.append(process)
            if not running:
                return None
            raise_if_ending()
            wait(running)
            for process in [each for each in running if each.status is not None]:
                running.remove(process)
                ended(process)
    except KeyboardInterrupt as error:
        _end(running, getattr(error, "number", signal.SIGINT), ending)
        return interrupted_status(error)
    except BaseException:
        _end(running, signal.SIGTERM, ending)
        raise


def run_all(runs: Sequence[SeedRun], parallel: int, look: Callable[[], None], ending: Callable[[], None]) -> int | None:
    """Run all seeds in their order; see `run_pool`. `look` is called twice per second, and at the end."""
    environment, waiting = environment_of(min(parallel, max(1, len(runs)))), iter(runs)

    def start_next() -> SeedRun | None:
        if (run := next(waiting, None)) is not None:
            run.start(environment)
        return run

    def wait(running: Sequence[SeedRun]) -> None:
        look()
        _wait(running[0], LOOK_EVERY_S)

    status = run_pool(parallel, start_next, wait, lambda run: None, ending)
    if status is None:
        look()
    return status


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_of(parallel: int) -> dict[str, str]:
    """Return the environment of processes: several at a time have one thread each, unless the user says otherwise.

    A second thread waits in a loop between two ops, and so takes a core from another process.
    """
    environment = dict(os.environ)
    if parallel > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _wait(running: TrainingProcess, timeout_s: float | None) -> None:
    assert running.process is not None
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(timeout_s)


def _end(running: Sequence[TrainingProcess], number: int, ending: Callable[[], None]) -> None:
    """Send a signal to processes, and wait until they have ended."""
    for each in running:
        assert each.process is not None
        each.process.send_signal(number)
    ending()
    for each in running:
        _wait(each, None)
