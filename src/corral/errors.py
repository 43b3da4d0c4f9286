"""The errors that Corral raises on bad input, and the nearest-match helper that their messages share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Self


class CorralError(Exception):
    """Base class of every error that Corral raises on purpose."""


class ConfigError(CorralError, ValueError):
    """A setting is unknown, has a value of the wrong type, or contradicts another setting."""


class MissingPackageError(ConfigError):
    """A package that a setting or a command needs is not installed; the message has the command that installs it."""


class UnknownAttributeError(CorralError, AttributeError):
    """A config or an algorithm has no such attribute; the message says what Corral calls it, or the nearest name."""

    def __init__(self, message: str | Callable[[], str]) -> None:
        """Store the message, or a function that makes it when it is read.

        `hasattr` reads no message, and the search for the nearest name takes longer than a short training iteration.
        """
        super().__init__()
        self._message = message

    def __str__(self) -> str:
        """Return the message."""
        if not isinstance(self._message, str):
            self._message = self._message()
        return self._message

    def __repr__(self) -> str:
        """Return the class with the message."""
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Travel to other processes with the message as text."""
        return type(self), (str(self),)


class EnvError(CorralError, RuntimeError):
    """An environment raised, or returned a value that its spaces do not allow."""


class EnvTimeoutError(EnvError, TimeoutError):
    """A `step` or `reset` took longer than `env_step_timeout_s`; the message says where the env hung."""


class ClientMessageError(CorralError, ValueError):
    """A client of the policy server sent what the protocol does not allow; `place` is the part of its message."""

    def __init__(self, place: str, problem: str) -> None:
        """Keep the place, and what is wrong there."""
        super().__init__(f"{place} {problem}.")
        self.place, self.problem = place, problem

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Travel to other processes whole."""
        return type(self), (self.place, self.problem)


class ObservationError(CorralError, ValueError):
    """An observation that was given to a policy does not fit the observation space; the message names the field."""


class ExportError(CorralError, RuntimeError):
    """A policy cannot be exported: torch cannot trace it, or traces something else, or no file can be written."""


class LossError(CorralError, ArithmeticError):
    """A loss became NaN or infinite, or is not what a loss must return; its gradient step was not taken."""


class CallbackError(CorralError, RuntimeError):
    """A callback raised; the message names the event, the callback and the episode, and the cause is the original."""


class ColumnError(CorralError, ValueError):
    """A value has another shape or dtype than its column, or a column is missing or does not fit the others."""


class SampleError(CorralError, ValueError):
    """A request for samples asks for nothing, for two things at once, or for a negative number."""


class WeightsError(CorralError, ValueError):
    """A part of the weights has no receiver in a runner; the message names the part."""


class EpisodeError(CorralError, ValueError):
    """An episode was built from parts that do not fit together, or stepped after its end."""


class DataError(CorralError, ValueError):
    """Recorded data cannot be read or written, or does not fit the spaces; the message names the file and the row."""


class StopCriterionError(CorralError, KeyError):
    """A stop criterion names a number that the result does not hold."""

    def __str__(self) -> str:
        """Return the message unchanged (`KeyError` would print its repr)."""
        return str(self.args[0])


class WorkerDiedError(CorralError, RuntimeError):
    """The process of a worker ended or was killed; the message says how, with its last output if it crashed."""


class SerializationError(CorralError, TypeError):
    """An object that must be sent to another process cannot be pickled; the message names the attribute."""


class CoordinationError(CorralError, RuntimeError):
    """A named actor does not exist, exists already, has no such method, or cannot be reached."""


class RunDirectoryError(CorralError, OSError):
    """The directory of a run cannot be written; the message names the directory."""


class ReportError(CorralError, OSError):
    """The file of a report or a plot cannot be written; the message names the file."""


class CheckpointError(CorralError, ValueError):
    """A checkpoint cannot be written, or is missing, damaged, or of another algorithm; the message names the file."""


class NotServedError(CorralError, ModuleNotFoundError):
    """A name or module of another library has no counterpart that scripts can import; the message says what to use."""


class InstallationError(CorralError, RuntimeError):
    """Names of another library cannot be served, because the library itself is imported already."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known name, or with all of them if none is near.

    Names of which the same end is missing are equally near, and the sentence has up to four of them.

    Args:
        name: What the user wrote.
        known: The names that would have been right.
    """
    names = sorted(known)
    found = sorted(_near(name, names))
    if not found:
        return f"Known names: {', '.join(names)}."
    alike = [full for near, full in found if near.lacks_end and near[:-1] == found[0][0][:-1]][:4]
    *others, last = [repr(full) for full in alike] or [repr(found[0][1])]
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that a user most likely meant, or `None` if none is near.

    A name is near if it differs in one letter, in a third of its letters if it is longer, or in a missing end. The last
    part of a path counts too: `episode_return_mean` finds `env_runners/episode_return_mean`. A name whose first word
    says what kind of thing it is, as `num_` and `set_` do, finds names of this kind only.

    Args:
        name: What the user wrote. A file may hold another key than a string, to which no name is near.
        known: The names that would have been right.
    """
    return min(_near(name, known), default=(None, None))[1]


class _Near(NamedTuple):
    """How near a known name is; the smallest one is the nearest."""

    distance: int
    is_part: bool
    lacks_end: bool
    parent_distance: int
    length: int


def _near(name: object, known: Iterable[str]) -> Iterator[tuple[_Near, str]]:
    """Yield the known names that are near, and how near they are."""
    if not isinstance(name, str):
        return
    parent = name.removesuffix(_last_part(name))
    kind = _kind(name)
    for full in known:
        if kind and _kind(full) != kind:
            continue
        found = _distance(parent, full.removesuffix(_last_part(full))) if parent else 0
        parent_distance = len(full) if found is None else found
        for is_part, written, meant in ((False, name, full), (True, _last_part(name), _last_part(full))):
            written, meant = written.casefold(), meant.casefold()
            if (distance := _distance(written, meant)) is not None:
                yield _Near(distance, is_part, False, parent_distance, len(full)), full
            # Without its last words, as in `episode_retrun` for `episode_return_mean`.
            for end in range(len(meant) // 2, len(meant)):
                if meant[end] == "_" and (distance := _distance(written, meant[:end])) is not None:
                    yield _Near(distance + meant.count("_", end), is_part, True, parent_distance, len(full)), full


_KINDS = ("num", "is", "has", "get", "set", "add", "remove", "on", "min", "max", "eval", "evaluation")
"""First words of names that say what kind of thing the rest is; no other kind was meant."""


def _kind(path: str) -> str:
    """Return the word with which a name says what kind of thing it is, or `""`."""
    word, separator, _ = _last_part(path).casefold().partition("_")
    return word[:4] if separator and word in _KINDS else ""


def _last_part(path: str) -> str:
    return re.split("[/.]", path)[-1]


def _distance(written: str, meant: str) -> int | None:
    """Return the letters to insert, remove, replace or swap between two words, or `None` if there are too many."""
    shorter, longer = sorted((len(written), len(meant)))
    if (written.startswith(meant) or meant.startswith(written)) and 2 * shorter >= longer:
        return longer - shorter
    limit = max(1, longer // 3)
    if longer - shorter > limit or shorter < 2:
        return None
    before: list[int] = []
    row = list(range(len(meant) + 1))
    for i, letter in enumerate(written, 1):
        before, above, row = row, before, [i]
        for j, other in enumerate(meant, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if min(i, j) > 1 and letter == meant[j - 2] and written[i - 2] == other:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1] if row[-1] <= limit else None


class SubEnvError(CorralError):
    """One sub-env of a vector env failed; the runner turns this into an `EnvError` that names the step.

    Attributes:
        env_index: Index of the sub-env.
        method: Method that failed: `"reset"` or `"step"`.
    """

    def __init__(self, env_index: int, method: str, problem: str) -> None:
        """Store which sub-env failed in which method, and the problem."""
        super().__init__(env_index, method, problem)
        self.env_index, self.method, self.problem = env_index, method, problem

    def __str__(self) -> str:
        """Return the problem as a sentence."""
        return f"sub-env {self.env_index} failed in {self.method}(): {self.problem}"
