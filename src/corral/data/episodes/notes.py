"""What episodes of one agent and of several have in common: notes of user code, and how they end and are cut."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

from corral.data.episodes.infos import check_sent
from corral.errors import EpisodeError, nearest

Notes = tuple[dict[str, Any], dict[str, list[Any]]]
"""What user code noted on an episode: its custom data, and its temporary data by name."""


class Noted:
    """Base of episodes: the notes of user code, which the chunks of an episode share, and how it ends and is cut.

    Attributes:
        id_: Id of the episode.
        notes: Custom data, and temporary data by name.
        is_terminated: Whether the last env step terminated the episode, for all agents.
        is_truncated: Whether the last env step truncated the episode, for all agents.
    """

    JOINS_CHUNKS: ClassVar[bool] = True
    """Whether an episode at its end answers for all of its chunks."""

    __slots__ = ()

    id_: str
    notes: Notes
    is_terminated: bool
    is_truncated: bool

    @property
    def is_done(self) -> bool:
        """Whether the episode was terminated or truncated."""
        return self.is_terminated or self.is_truncated

    def __getitem__(self, slice_: slice) -> Self:
        """Return `episode[start:stop]`; see `slice`."""
        if not isinstance(slice_, slice):
            raise EpisodeError(f"an episode is indexed by slices, such as episode[2:5], got {slice_!r}.")
        return self.slice(slice_)

    def _check_window(self, slice_: slice | None, lookback: int) -> None:
        """Refuse a slice with a step width or a negative lookback; without a slice, the chunk after the last."""
        if slice_ is None and self.is_done:
            raise EpisodeError(f"episode {self.id_} is over: no chunk comes next.")
        if slice_ is not None and slice_.step not in (None, 1):
            raise EpisodeError(f"a slice of an episode cannot have a step width, got {slice_}.")
        if lookback < 0:
            raise EpisodeError(f"len_lookback_buffer={lookback} cannot be negative.")

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> Self:
        """Return some of the env steps as an episode that owns its data."""
        raise NotImplementedError

    @property
    def t(self) -> int:
        """Env steps of the whole episode so far."""
        raise NotImplementedError

    def validate(self) -> None:
        """Check that the episode was reset."""
        raise NotImplementedError

    def _check_follows(self, other: Noted, t_started: int) -> None:
        """Refuse an episode that is not the next chunk of this one.

        Args:
            other: The episode.
            t_started: Env steps before it.
        """
        if other.id_ != self.id_:
            raise EpisodeError(f"a chunk of episode {other.id_} cannot be appended to episode {self.id_}.")
        if self.is_done:
            raise EpisodeError(f"episode {self.id_} is over: nothing comes after it.")
        self.validate()
        other.validate()
        if t_started != self.t:
            raise EpisodeError(
                f"episode {self.id_} continues at env step {self.t}, but the chunk begins at {t_started}."
            )

    def _take_notes(self, other: Noted) -> None:
        """Take the notes of the next chunk, whose lists begin with the values here."""
        custom, temporary = copy.deepcopy(other.notes)
        self.notes[0].update(custom)
        self.notes[1].update(temporary)

    def _describe_end(self) -> str:
        return "terminated" if self.is_terminated else "truncated" if self.is_truncated else "ongoing"

    def _plain_notes(self) -> dict[str, Any]:
        """Return copies of the notes, for the state of an episode."""
        custom, temporary = copy.deepcopy(self.notes)
        return {"custom_data": custom, "temporary_data": temporary}

    def _copied_notes(self) -> Notes:
        """Return a copy of the notes; lists of temporary data grow with the episode, so their entries are shared."""
        return copy.deepcopy(self.notes[0]), {name: [*values] for name, values in self.notes[1].items()}

    @property
    def custom_data(self) -> dict[str, Any]:
        """Dict for the notes of user code; the chunks of a runner's episode share it."""
        check_sent(self.notes[0])
        return self.notes[0]

    def add_temporary_timestep_data(self, key: str, value: Any) -> None:
        """Append a value to the list under a key, which is kept until the episode ends."""
        self.notes[1].setdefault(key, []).append(value)

    def get_temporary_timestep_data(self, key: str) -> list[Any]:
        """Return the values added with `add_temporary_timestep_data` in this episode, earlier chunks included.

        Raises:
            KeyError: No value was added under the key.
        """
        check_sent(known := self.notes[1])
        if key not in known:
            raise KeyError(f"episode {self.id_} has no temporary data {key!r}. {nearest(key, known)}")
        return known[key]


def find_lookback(len_lookback_buffer: int | str, num_steps: int) -> int:
    """Return how many of the given steps of an episode are its lookback: all of them for `"auto"`.

    Raises:
        EpisodeError: The argument is something else, or negative.
    """
    lookback = num_steps if len_lookback_buffer == "auto" else len_lookback_buffer
    if not isinstance(lookback, int) or lookback < 0:
        raise EpisodeError(f"len_lookback_buffer={lookback!r} must be 'auto' or an integer of at least 0.")
    return min(lookback, num_steps)
