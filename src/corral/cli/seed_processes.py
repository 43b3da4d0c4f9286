"""The processes of `corral train --seeds`: one `corral train` for each seed, a few at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from corral.cli.exit_status import interrupted_status
from corral.core.interrupts import interruptible, interrupts_deferred, raise_if_ending
from corral.engines.own_commands import own_command

OUTPUT_FILE = "output.txt"
END_WITH_INPUT = "--end-with-input"
"""Option of `corral train` for runs of this module: end as after SIGTERM, with a checkpoint, when the input ends."""

LOOK_EVERY_S = 0.5


class SeedRun:
    """The run of one seed.

    Attributes:
        seed: The seed.
        run_dir: Run directory.
        process: Its process, after `start`.
    """

    def __init__(self, seed: int, run_dir: Path, arguments: Sequence[str]) -> None:
        """Store what to run.

        Args:
            seed: The seed.
            run_dir: Run directory, to which `output.txt` is added with what the run prints.
            arguments: What follows `corral train`.
        """
        self.seed, self.run_dir, self._arguments = seed, run_dir, [*arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process, in a session of its own, so that Ctrl-C in the terminal reaches only this process."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / OUTPUT_FILE).open("ab") as output:
            self.process = subprocess.Popen(
                [*own_command("corral.cli.main"), "train", END_WITH_INPUT, *self._arguments],
                env=environment,
                stdin=subprocess.PIPE,  # which ends with this process, however it ends
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """Exit status, 128 plus the number of the signal that killed the process, or `None` until it has ended."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        assert self.process.stdin is not None
        self.process.stdin.close()
        return code if code >= 0 else 128 - code

    def error_line(self) -> str:
        """Return the error that the run printed last, or `""`."""
        return error_line(self.run_dir / OUTPUT_FILE)


def error_line(output: Path) -> str:
    """Return the error that a process printed last into a file, or `""`."""
    text = output.read_text(encoding="utf-8", errors="replace")
    return next((line[8:] for line in reversed(text.splitlines()) if line.startswith("corral: ")), "")


def end_with_input() -> None:
    """End this process as SIGTERM does when standard input ends, which the process that started it holds open."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):  # `sys.stdin` has a lock, which this thread would hold when Python ends
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with input", daemon=True).start()


@interruptible
def run_all(runs: Sequence[SeedRun], parallel: int, look: Callable[[], None], ending: Callable[[], None]) -> int | None:
    """Run all runs, and return when they have ended.

    A signal that asks this process to end is passed on to the runs, which write checkpoints and end; runs that have not
    started do not start. A second signal ends this process, and with it the runs.

    Args:
        runs: The runs, in the order in which they start.
        parallel: Largest number of runs at a time.
        look: Called twice per second.
        ending: Called when the runs were sent the signal, before they are waited for.

    Returns:
        `None`, or the exit status of the signal that ended the runs.
    """
    waiting, running = [*runs], list[SeedRun]()
    environment = environment_of(min(parallel, max(1, len(runs))))
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                with interrupts_deferred():
                    waiting[0].start(environment)
                    running.append(waiting.pop(0))
            raise_if_ending()
            look()
            _wait(_processes(running)[0], LOOK_EVERY_S)
            running = [run for run in running if run.status is None]
        look()
    except KeyboardInterrupt as error:
        end_processes(_processes(running), getattr(error, "number", signal.SIGINT), ending)
        return interrupted_status(error)
    except BaseException:
        end_processes(_processes(running), signal.SIGTERM, ending)
        raise
    return None


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_of(parallel: int) -> dict[str, str]:
    """Return the environment of the runs: several at a time have one thread each, unless the user says otherwise.

    A second thread waits in a loop between two ops, and so takes a core from another run.
    """
    environment = dict(os.environ)
    if parallel > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _processes(runs: Sequence[SeedRun]) -> list[subprocess.Popen[bytes]]:
    return [run.process for run in runs if run.process is not None]


def _wait(process: subprocess.Popen[bytes], timeout_s: float | None) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)


def end_processes(running: Sequence[subprocess.Popen[bytes]], number: int, ending: Callable[[], None]) -> None:
    """Send a signal to processes, and wait until they have ended.

    Args:
        running: The processes.
        number: Number of the signal.
        ending: Called when the processes were sent the signal.
    """
    for process in running:
        process.send_signal(number)
    ending()
    for process in running:
        _wait(process, None)
