"""The process of a trial of `corral search`: it trains with each seed in turn, and tells the search its numbers.

The first seed is compared with the first seed of other trials after each round, and a trial that is pruned ends there.
So a poor trial costs a part of one seed, a process trains one run at a time and writes it as any other run, and all
trials are compared by the same seed. The other seeds train to their end; the value of the trial is the mean over all.

Messages to the search are lines of JSON on standard output, and its answers are lines on standard input. Everything
else that is printed goes to standard error, which is a file. When the input ends, so has the search, and this process
ends as after SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.algorithms.registry import config_from_dict
from corral.algorithms.stopping import criteria_from_file
from corral.core.import_places import import_from_working_directory
from corral.core.interrupts import ending_signals_raised, raise_if_ending
from corral.core.metrics.named_number import NamedNumber
from corral.core.metrics.result import flat_result, without_early_means
from corral.errors import ConfigError, CorralError
from corral.runs.loggers import Logger
from corral.runs.loggers.named import DEFAULT_NAMES
from corral.tools.cli.exit_status import EXIT_ERROR, interrupted_status, print_error, status_of
from corral.tools.cli.experiment import read_experiment
from corral.tools.cli.pool import LOOK_EVERY_S, end_with_input

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm

TRIAL_FILE = "experiment.yaml"
PRUNE = "prune"


class Channel:
    """Messages to the search, and its answers."""

    def __init__(self) -> None:
        """Take standard output for messages, and print to standard error from here on."""
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        end_with_input(self._answers.put)

    def send(self, **message: Any) -> None:
        """Send a message; a search that has ended reads none."""
        with contextlib.suppress(OSError):
            print(json.dumps(message), file=self._out, flush=True)

    def ask(self, **message: Any) -> str:
        """Send a message and return the answer."""
        self.send(**message)
        while True:
            raise_if_ending()
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=LOOK_EVERY_S)


class Rounds(Logger):
    """Notes the number that is compared, after each round of evaluation or, for other numbers, after each iteration.

    Attributes:
        value: Its latest value; NaN before the first one.
        is_pruned: Whether the search ended the trial.
        algorithm: The algorithm that trains.
    """

    algorithm: Algorithm

    def __init__(self, metric: str, channel: Channel | None, *, late_keys: bool) -> None:
        """Store what to note.

        Args:
            metric: Name of the number.
            channel: Where to ask after each round whether to continue; `None` asks nobody.
            late_keys: Whether callbacks may log keys that are missing from the first results.
        """
        self.value, self.is_pruned = math.nan, False
        self._channel, self._num_rounds = channel, 0
        self._of_rounds = metric.startswith("evaluation/")
        self._number = NamedNumber(metric, "search: metric", ConfigError, late_keys=late_keys)

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Do nothing: there is no file."""

    def log_result(self, result: dict[str, Any]) -> None:
        """Note the number of a result, and end the run if the search answers so."""
        flat = flat_result(without_early_means(result))
        if self._of_rounds and flat.get("evaluation/fresh") is False:
            return
        found = self._number.find(flat)
        if found is None or math.isnan(found):
            return
        self.value, self._num_rounds = found, self._num_rounds + 1
        if self._channel is not None and self._channel.ask(round=self._num_rounds, value=found) == PRUNE:
            self.is_pruned = True
            self.algorithm.stop_requested = "the search pruned the trial"


def run_trial(home: Path, metric: str, seeds: list[int], channel: Channel) -> None:
    """Train with each seed, and send the values, or that the trial was pruned.

    Raises:
        CorralError: A run failed, or its number was never measured.
    """
    values = []
    for place, seed in enumerate(seeds):
        settings = read_experiment(home / TRIAL_FILE)
        stop = criteria_from_file(settings.pop("stop"))
        config = config_from_dict(settings)
        config.seed = seed
        has_callbacks = bool(config.callbacks_class or config.callback_functions)
        rounds = Rounds(metric, None if place else channel, late_keys=has_callbacks)
        named = DEFAULT_NAMES if config.loggers is None else config.loggers
        with config.build() as rounds.algorithm:
            rounds.algorithm.fit(stop=stop, run_dir=home / f"seed-{seed}", loggers=[*named, rounds], progress=False)
        if rounds.is_pruned:
            channel.send(pruned=True)
            return
        if not math.isfinite(rounds.value):
            raise ConfigError(
                f"search: metric {metric!r} is {rounds.value} at the end of the run with seed {seed}: train longer, or "
                "evaluate more often."
            )
        values.append(rounds.value)
    channel.send(values=values)


def main() -> int:
    """Run the trial that the command line names: directory, metric and seeds; return the exit status."""
    home, metric, *seeds = sys.argv[1:]
    channel = Channel()
    import_from_working_directory()
    try:
        with ending_signals_raised():
            run_trial(Path(home), metric, [int(seed) for seed in seeds], channel)
    except KeyboardInterrupt as error:
        return interrupted_status(error)
    except CorralError as error:
        print_error(error)
        channel.send(failed=str(error))
        return status_of(error)
    except Exception as error:
        traceback.print_exc()
        channel.send(failed=f"{type(error).__name__}: {error}")
        return EXIT_ERROR
    return 0
