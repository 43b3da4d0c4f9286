"""What `run.log` says about a run: warnings and errors, and how the run ended."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

MAX_ENTRIES, MAX_LINES = 20, 60
"""Number of the latest warnings and errors that are kept, and of the lines of each one."""

NOT_ENDED = "has not ended, or its process was killed"
_ENTRY = re.compile(r"^(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S* (?P<level>[A-Z]+) (?P<name>\S+): (?P<text>.*)$")
_ENDINGS = ("Run finished.", "Run failed.", "Run interrupted.", "Run ended by ")
_LEVELS = ("WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class LogEntry:
    """A warning or an error.

    Attributes:
        time: Local time, as in the file.
        level: `"WARNING"`, `"ERROR"` or `"CRITICAL"`.
        text: Message, with the lines of a traceback.
    """

    time: str
    level: str
    text: str


@dataclass(frozen=True)
class RunLog:
    """What the log of a run says.

    Attributes:
        ending: How the run ended, such as `"finished"`; empty if the log does not say it.
        num_continued: How many times the run was continued.
        counts: Number of entries of each level from warnings upwards.
        entries: The latest 20 of them.
    """

    ending: str = ""
    num_continued: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    entries: tuple[LogEntry, ...] = ()


def read_log(path: Path, problems: list[str]) -> RunLog:
    """Return what a log says; a file that cannot be read becomes a problem, and a missing one an empty log.

    Args:
        path: The file.
        problems: Sentences about damaged files, to which one may be added.
    """
    ending, num_continued, counts = "", 0, Counter[str]()
    entries: deque[tuple[str, str, list[str]]] = deque(maxlen=MAX_ENTRIES)
    lines: list[str] | None = None  # of the last entry, if it is a warning or an error
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                match = _ENTRY.match(line)
                if match is None:
                    if lines is not None and len(lines) < MAX_LINES:
                        lines.append(line.rstrip("\n"))
                    continue
                level, text = match["level"], match["text"]
                lines = None
                if match["name"] == "corral" and text.startswith("Run "):
                    ending = _ending(text, ending)
                    num_continued += " continues from iteration " in text
                if level in _LEVELS:
                    counts[level] += 1
                    lines = [text]
                    entries.append((match["time"], level, lines))
    except FileNotFoundError:
        return RunLog()
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}.")
    kept = tuple(LogEntry(time, level, "\n".join(text)) for time, level, text in entries)
    return RunLog(ending, num_continued, tuple(counts.items()), kept)


def _ending(text: str, before: str) -> str:
    """Return how a run ended after a line that begins with "Run"; a line may begin or continue it too."""
    if text.startswith("Run in "):
        return NOT_ENDED
    return text.removeprefix("Run ").rstrip(".") if text.startswith(_ENDINGS) else before
