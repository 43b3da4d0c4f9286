"""What workers log: it travels with their answers, and is logged in the process that started them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

MAX_RECORDS = 1000
"""Number of records that one answer takes along; of more, only the number is logged."""

Record = tuple[str, int, float, str]
"""Name of the logger, level, time, and text with the traceback."""


class WorkerLog(logging.Handler):
    """Keeps what this process logs until the next answer of the worker takes it along.

    Attributes:
        records: What was logged since the last call of `take`.
    """

    def __init__(self) -> None:
        """Begin without records."""
        super().__init__()
        self._owner = os.getpid()
        self.records: list[Record] = []
        self._num_dropped = 0

    def install(self) -> None:
        """Handle all records of this process; what the process that started this one does not show is dropped there."""
        logging.getLogger().addHandler(self)
        logging.getLogger("corral").setLevel(logging.DEBUG)
        logging.captureWarnings(True)  # else they are printed, over the panel, and are in no file

    def take_over(self) -> None:
        """Handle all records of this process, which may be forked, in place of the handlers that it has inherited."""
        known = logging.Logger.manager.loggerDict.values()
        for logger in (logging.getLogger(), *(each for each in known if isinstance(each, logging.Logger))):
            logger.handlers = []  # not closed: they belong to the process that started this one
        self.install()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; a process that was forked from the worker, such as a sub-env's, prints it."""
        if os.getpid() != self._owner:
            if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)
        elif len(self.records) < MAX_RECORDS:
            name = "corral" if record.name == "py.warnings" else record.name  # so that run.log has warnings
            self.records.append((name, record.levelno, record.created, self.format(record).rstrip("\n")))
        else:
            self._num_dropped += 1

    def take(self) -> list[Record]:
        """Return the records since the last call."""
        self.acquire()
        try:
            records, self.records = self.records, []
            num_dropped, self._num_dropped = self._num_dropped, 0
        finally:
            self.release()
        if num_dropped:
            text = f"{num_dropped:,} more records were dropped, of one call."
            records.append(("corral", logging.WARNING, records[-1][2], text))
        return records


def log_records(records: Sequence[Record], name: str) -> None:
    """Log the records of a worker in this process, with the name of the worker in front."""
    for logger_name, level, created, text in records:
        logger = logging.getLogger(logger_name)
        if logger.isEnabledFor(level):
            record = logger.makeRecord(logger_name, level, "", 0, f"{name}: {text}", (), None)
            record.created = created
            logger.handle(record)
