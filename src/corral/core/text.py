"""Text of clients, envs and files as it is shown: it moves no cursor, and looks like no line of ours."""

from __future__ import annotations

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
    return "".join(
        char if unicodedata.category(char) not in _UNSEEN else newline if char == "\n" else repr(char)[1:-1]
        for char in text
    )
