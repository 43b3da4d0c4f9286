"""The loop of `corral search`: a process for each trial, a few at a time, whose numbers go to the study."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from corral.cli.exit_status import interrupted_status
from corral.cli.search_trial import PRUNE, TRIAL_FILE
from corral.cli.seed_processes import LOOK_EVERY_S, OUTPUT_FILE, end_processes, environment_of, error_line
from corral.core.interrupts import interruptible, interrupts_deferred, raise_if_ending
from corral.engines.own_commands import own_command
from corral.search.files import SEED_VALUES, TrialSummary, trial_dir, write_atomically, write_state
from corral.search.settings import Search
from corral.search.study import REASON, ask, is_interrupted

if TYPE_CHECKING:
    from optuna import Study, Trial

NUM_FAILURES = 3
"""Number of trials after which a search ends if all of them failed; more if more run at a time."""

Messages = queue.SimpleQueue[tuple["TrialProcess", dict[str, Any] | None]]


class TrialProcess:
    """The process of a trial.

    Attributes:
        trial: The trial of the study.
        home: Directory of the trial.
        process: The process.
        outcome: The last message, which says how the trial ended.
    """

    def __init__(self, trial: Trial, home: Path, search: Search, environment: Mapping[str, str], to: Messages) -> None:
        """Write the experiment of the trial, and start the process in a session of its own.

        Args:
            trial: The trial of the study.
            home: Directory of the trial.
            search: The search.
            environment: Environment variables of the process.
            to: Queue for its messages, and for `None` when it has ended.
        """
        self.trial, self.home, self.outcome = trial, home, dict[str, Any]()
        home.mkdir(parents=True, exist_ok=True)
        experiment = yaml.safe_dump(search.experiment(search.values_of(trial.params)), sort_keys=False)
        write_atomically(home / TRIAL_FILE, experiment)
        command = [*own_command("corral.cli.search_trial"), str(home), search.metric, *map(str, search.seeds)]
        with (home / OUTPUT_FILE).open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,  # which ends with this process, however it ends
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self.reader = threading.Thread(target=self._read, args=(to,), daemon=True)
        self.reader.start()

    def _read(self, to: Messages) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    to.put((self, json.loads(line)))
        self.process.wait()
        to.put((self, None))

    def answer(self, text: str) -> None:
        """Answer a message; a process that has ended reads nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """Close the input of the process, which has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # an answer that was not read
            self.process.stdin.close()

    def reason(self) -> str:
        """Return why a trial without an outcome failed."""
        if "failed" in self.outcome:
            return str(self.outcome["failed"])
        code = self.process.wait()
        ended = f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return error_line(self.home / OUTPUT_FILE) or f"{ended}; {self.home / OUTPUT_FILE} may say why"


class SearchLoop:
    """Runs trials until there are enough, or until the first ones have all failed.

    Args:
        search: The search.
        study: Its study.
        home: Its directory.
        parallel: Largest number of trials at a time.
        show: Called with the number of a trial that ended, and with all trials.
    """

    def __init__(
        self,
        search: Search,
        study: Study,
        home: Path,
        parallel: int,
        show: Callable[[int, list[TrialSummary]], None],
    ) -> None:
        self._search, self._study, self._home, self._parallel, self._show = search, study, home, parallel, show
        self._running: list[TrialProcess] = []
        self._messages: Messages = queue.SimpleQueue()
        self._num_failed, self._has_worked = 0, False

    @property
    def has_failed(self) -> bool:
        """Whether the search ends since all of its first trials failed: the fault is not in their values."""
        return not self._has_worked and self._num_failed >= max(NUM_FAILURES, self._parallel)

    @interruptible
    def run(self, ending: Callable[[], None]) -> int | None:
        """Run the trials, pass a signal that ends this process on to them, and return its exit status.

        Args:
            ending: Called when the trials were sent the signal, before they are waited for.

        Returns:
            `None`, or the exit status of the signal that ended the search.
        """
        try:
            self._start()
            while self._running:
                raise_if_ending()
                try:
                    self._receive(*self._messages.get(timeout=LOOK_EVERY_S))
                except queue.Empty:
                    self._find_ended()
                self._start()
        except KeyboardInterrupt as error:
            self._end(getattr(error, "number", signal.SIGINT), ending)
            return interrupted_status(error)
        except BaseException:
            self._end(signal.SIGTERM, ending)
            raise
        return None

    def _find_ended(self) -> None:
        """Take note of processes that ended while something that they started holds their output open."""
        for source in [source for source in self._running if source.process.poll() is not None]:
            source.reader.join(LOOK_EVERY_S)
            if source.reader.is_alive():
                self._receive(source, None)

    def _end(self, number: int, ending: Callable[[], None]) -> None:
        end_processes([source.process for source in self._running], number, ending)
        for source in self._running:
            source.close()

    def _start(self) -> None:
        """Start trials up to the numbers of trials at a time and in all; trials that were interrupted do not count."""
        if self.has_failed:
            return
        begun = self._study.get_trials(deepcopy=False)
        num_left = self._search.settings.num_trials
        num_left -= sum(trial.state.name != "WAITING" and not is_interrupted(trial) for trial in begun)
        environment = environment_of(self._parallel)
        for _ in range(min(num_left, self._parallel - len(self._running))):
            with interrupts_deferred():
                trial = ask(self._study, self._search)
                home = trial_dir(self._home, trial.number)
                self._running.append(TrialProcess(trial, home, self._search, environment, self._messages))

    def _receive(self, source: TrialProcess, message: dict[str, Any] | None) -> None:
        if source not in self._running:
            return
        if message is None:
            self._running.remove(source)
            source.close()
            self._tell(source)
        elif "round" in message:
            source.trial.report(message["value"], message["round"])
            source.answer(PRUNE if source.trial.should_prune() else "continue")
        else:
            source.outcome = message

    def _tell(self, source: TrialProcess) -> None:
        """Store how a trial ended, write the files, and show it."""
        from optuna.trial import TrialState

        trial, outcome = source.trial, source.outcome
        self._has_worked |= "values" in outcome or "pruned" in outcome
        if "values" in outcome:
            values = outcome["values"]
            trial.set_user_attr(SEED_VALUES, values)
            self._study.tell(trial, sum(values) / len(values))
        elif "pruned" in outcome:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._num_failed += 1
            trial.set_user_attr(REASON, source.reason())
            self._study.tell(trial, state=TrialState.FAIL)
        self._show(trial.number, write_state(self._home, self._study, self._search))
