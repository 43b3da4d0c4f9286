"""Text of clients, envs and files as it is shown: it moves no cursor, and looks like no line of ours."""

from __future__ import annotations

import logging
import unicodedata

_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of characters that control a terminal, change the direction of writing, or begin a line."""


def printable(text: str, *, newline: str = "\\n") -> str:
    r"""Return a text with its control characters as escapes such as `\x1b`.

    Args:
        text: The text.
        newline: What replaces a newline; `"\n    "` lets the other lines begin further to the right.
    """
    if text.isascii() and text.isprintable():
        return text
    found = {char for char in text if unicodedata.category(char) in _UNSEEN} - {"\t"}
    return text.translate({ord(char): newline if char == "\n" else repr(char)[1:-1] for char in found})


class LineFormatter(logging.Formatter):
    """Formats records of the log so that each begins at the left, and no text in it can look like another one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record, with its traceback if it has one; all lines after the first one begin with spaces."""
        return printable(super().format(record), newline="\n    ")
