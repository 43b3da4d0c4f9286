"""The loop of `corral search`: a process for each trial, a few at a time, whose numbers go to the study."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from corral.engines.own_commands import own_command
from corral.tools.cli.pool import LOOK_EVERY_S, OUTPUT_FILE, TrainingProcess, environment_of, run_pool
from corral.tools.cli.search_trial import PRUNE, TRIAL_FILE
from corral.tools.search.files import SEED_VALUES, TrialSummary, trial_dir, write_atomically, write_state
from corral.tools.search.settings import Search
from corral.tools.search.study import REASON, ask, is_interrupted

if TYPE_CHECKING:
    from optuna import Study, Trial

NUM_FAILURES = 3
"""Number of trials after which a search ends if all of them failed; more if more run at a time."""

Messages = queue.SimpleQueue[tuple["TrialProcess", dict[str, Any] | None]]


class TrialProcess(TrainingProcess):
    """The process of a trial.

    Attributes:
        trial: The trial of the study.
        outcome: The last message, which says how the trial ended.
    """

    def __init__(self, trial: Trial, home: Path, search: Search, environment: Mapping[str, str], to: Messages) -> None:
        """Write the experiment of the trial, and start the process.

        Args:
            trial: The trial of the study.
            home: Directory of the trial.
            search: The search.
            environment: Environment variables of the process.
            to: Queue for its messages, and for `None` when it has ended.
        """
        command = [*own_command("corral.tools.cli.search_trial"), str(home), search.metric, *map(str, search.seeds)]
        super().__init__(home, command)
        self.trial, self.outcome = trial, dict[str, Any]()
        home.mkdir(parents=True, exist_ok=True)
        experiment = yaml.safe_dump(search.experiment(search.values_of(trial.params)), sort_keys=False)
        write_atomically(home / TRIAL_FILE, experiment)
        self.start(environment, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, args=(to,), daemon=True)
        self._reader.start()

    def _read(self, to: Messages) -> None:
        assert self.process is not None and self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    to.put((self, json.loads(line)))
        self.process.wait()
        to.put((self, None))

    def answer(self, text: str) -> None:
        """Answer a message; a process that has ended reads nothing."""
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # its input may be closed
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def wait_for_messages(self) -> None:
        """Wait until all messages of the ended process are in the queue; what it started may hold its output open."""
        self._reader.join(LOOK_EVERY_S)

    def reason(self) -> str:
        """Return why a trial without an outcome failed."""
        if "failed" in self.outcome:
            return str(self.outcome["failed"])
        assert self.process is not None
        code = self.process.wait()
        ended = f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return self.error_line() or f"{ended}; {self.home / OUTPUT_FILE} may say why"


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
        self._messages: Messages = queue.SimpleQueue()
        self._num_failed, self._has_worked = 0, False

    @property
    def has_failed(self) -> bool:
        """Whether the search ends since all of its first trials failed: the fault is not in their values."""
        return not self._has_worked and self._num_failed >= max(NUM_FAILURES, self._parallel)

    def run(self, ending: Callable[[], None]) -> int | None:
        """Run the trials, and return what `run_pool` returns.

        Args:
            ending: Called when the trials were sent a signal, before they are waited for.
        """
        return run_pool(self._parallel, self._start_next, self._wait, self._tell, ending)

    def _start_next(self) -> TrialProcess | None:
        """Start the next trial, if there are not enough in all; trials that were interrupted do not count."""
        begun = self._study.get_trials(deepcopy=False)
        num_begun = sum(trial.state.name != "WAITING" and not is_interrupted(trial) for trial in begun)
        if self.has_failed or num_begun >= self._search.settings.num_trials:
            return None
        trial = ask(self._study, self._search)
        home = trial_dir(self._home, trial.number)
        return TrialProcess(trial, home, self._search, environment_of(self._parallel), self._messages)

    def _wait(self, running: Sequence[TrialProcess]) -> None:
        """Receive all messages that there are; if there is none, wait for one."""
        with contextlib.suppress(queue.Empty):
            self._receive(*self._messages.get(timeout=LOOK_EVERY_S))
        self._receive_all()

    def _receive_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._receive(*self._messages.get_nowait())

    def _receive(self, source: TrialProcess, message: dict[str, Any] | None) -> None:
        if message is not None and "round" in message:
            source.trial.report(message["value"], message["round"])
            source.answer(PRUNE if source.trial.should_prune() else "continue")
        elif message is not None:
            source.outcome = message

    def _tell(self, source: TrialProcess) -> None:
        """Store how a trial ended, write the files, and show it."""
        from optuna.trial import TrialState

        source.wait_for_messages()
        self._receive_all()
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
