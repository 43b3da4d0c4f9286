"""What user code notes on an episode, of one agent or of several."""

from __future__ import annotations

from typing import Any

from corral.episodes.infos import check_sent
from corral.errors import nearest

Notes = tuple[dict[str, Any], dict[str, list[Any]]]
"""What user code noted on an episode: its custom data, and its temporary data by name."""


class Noted:
    """Base of episodes: the notes of user code, which the chunks of an episode share.

    Attributes:
        id_: Id of the episode.
        notes: Custom data, and temporary data by name.
    """

    __slots__ = ()

    id_: str
    notes: Notes

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
