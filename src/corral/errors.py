"""The errors that Corral raises on bad input, and the nearest-match helper that their messages share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class CorralError(Exception):
    """Base of every error that Corral raises on purpose."""


class ConfigError(CorralError, ValueError):
    """A setting is unknown, has a value of the wrong type, or contradicts another setting."""


class EnvError(CorralError, RuntimeError):
    """An environment raised, or gave something that its spaces do not allow."""


class EnvTimeoutError(EnvError, TimeoutError):
    """A `step` or `reset` took longer than `env_step_timeout_s`; the message says where it hung."""


class LossError(CorralError, ArithmeticError):
    """A loss became NaN or infinite; the step that it would have made was not taken."""


class CallbackError(CorralError, RuntimeError):
    """A callback raised; the message names the event, the callback and the episode, and the cause is the original."""


class ColumnError(CorralError, ValueError):
    """A column was given another shape or dtype than it has, or one that does not fit the others."""


class SampleError(CorralError, ValueError):
    """A request for samples asks for nothing, for two things at once, or for a negative number."""


class WeightsError(CorralError, ValueError):
    """A part of the weights has no receiver in a runner; the message names the part."""


class EpisodeError(CorralError, ValueError):
    """An episode was put together from parts that do not fit, or stepped when it could not be."""


class StopCriterionError(CorralError, KeyError):
    """A stop criterion names a number that the result does not hold."""

    def __str__(self) -> str:
        """Return the message as it is (`KeyError` would print its repr)."""
        return str(self.args[0])


class WorkerDiedError(CorralError, RuntimeError):
    """A worker's process ended, or was ended; the message says how, with the last it wrote if it crashed."""


class SerializationError(CorralError, TypeError):
    """Something that has to go to another process cannot be pickled; the message names the attribute."""


class CoordinationError(CorralError, RuntimeError):
    """A named actor does not exist, exists already, has no such method, or cannot be reached."""


class CheckpointError(CorralError, ValueError):
    """A checkpoint cannot be written, or is missing, damaged, or of something else; the message names the file."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known name, or with all of them if none is near.

    Args:
        name: What the user wrote.
        known: The names that would have been right.
    """
    names = sorted(known)
    # A flat search by the last part too: `episode_return_mean` finds `env_runners/episode_return_mean`.
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or [
        full for full in names if re.split("[/.]", full)[-1] == re.split("[/.]", name)[-1]
    ]
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known names: {', '.join(names)}."


class SubEnvError(CorralError):
    """One sub-env of a vector env failed; the runner turns this into an `EnvError` that says when.

    Attributes:
        env_index: Which sub-env.
        method: `"reset"` or `"step"`.
    """

    def __init__(self, env_index: int, method: str, problem: str) -> None:
        """Say which sub-env failed in which method, and how."""
        super().__init__(env_index, method, problem)
        self.env_index, self.method, self.problem = env_index, method, problem

    def __str__(self) -> str:
        """Return the problem as a sentence."""
        return f"sub-env {self.env_index} failed in {self.method}(): {self.problem}"
