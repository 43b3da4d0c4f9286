"""The episode events of a runner whose episodes are played by clients of its policy server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.episodes.rollout import Rollout
from corral.episodes.served_rollout import ServedSteps
from corral.runners.episode_events import EpisodeEvents

if TYPE_CHECKING:
    from corral.runners.served_stepping import ServedStepping


class ServedEvents(EpisodeEvents):
    """Keeps an episode for each seat in which one is played.

    In a row, for each seat: a step fires step, and if it ended the episode, end; an episode that begins fires created
    and start. If the client left, nothing fires.
    """

    def __init__(self, stepping: ServedStepping) -> None:
        """Bind the arguments that never change."""
        super().__init__(stepping.runner)
        self._served = stepping

    def create_all(self, rollout: Rollout) -> None:
        """Forget all episodes: those that begin from now on count."""
        self._enter(rollout)
        self._episodes = [None] * len(self._arguments)

    def start_all(self, rollout: Rollout) -> None:
        """Do nothing: an episode starts when its client says so."""

    def continue_all(self, rollout: Rollout, paused_s: float) -> None:
        """Continue the unfinished episodes as chunks in another rollout, `paused_s` seconds after the last one."""
        before, written = self._rollout.row_times_s, self._served.written
        last_time_s = float(before[-1]) if len(before) else 0.0
        returns = self._enter(rollout).returns.tolist()
        for seat, episode in enumerate(self._episodes):
            if episode is None:
                continue
            self._episodes[seat] = chunk = episode.continued_in(written, returns[seat], last_time_s, paused_s)
            self._put(seat, "episode", chunk)
            written.notes[0, seat] = chunk.notes
            if self._keeps_chunks and len(episode):
                self._chunks[seat].append(self._kept(episode))

    def fire_steps(self, rollout: ServedSteps, row: int, playing: NDArray[np.bool_] | None) -> None:
        """Fire the events of the steps of one row.

        Args:
            rollout: What happened in the seats.
            row: Row, in which the steps were just written.
            playing: Seats whose episodes are still wanted, bool `[N]`; `None` is all.
        """
        broken, written = rollout.broken_in(row), self._served.written
        self._note_agents(broken)
        for seat in broken:
            if (episode := self._episodes[seat]) is not None:
                episode.end(False, False, written.num_rows_of(seat) - 1)
                self._episodes[seat] = None
            self._counts[seat] += 1
        counted = rollout["stepped"][row] & rollout["counted"][row]
        done = rollout.terminated[row] | rollout.truncated[row]
        for seat in np.flatnonzero(counted).tolist():
            if (episode := self._episodes[seat]) is None or not (playing is None or playing[seat]):
                continue
            if not done[seat]:
                if self._every_row:
                    self._fire("on_episode_step", seat)
                continue
            # After the last step comes a row of the seat that holds the final observation.
            stop = written.num_rows_of(seat) - 1
            episode.end(bool(rollout.terminated[row, seat]), bool(rollout.truncated[row, seat]), stop)
            self._fire_end(seat)
            self._episodes[seat] = None

    def fire_begun(self, rollout: ServedSteps, row: int) -> None:
        """Fire the events of the episodes that begin in a row; see `fire_steps`."""
        written = self._served.written
        begun = [seat for begun_row, seat in rollout.begun if begun_row == row]
        for seat in begun:
            self._create(seat, written)
        self._note_agents(())
        for seat in begun:
            self._start(seat, written.num_rows_of(seat), written)

    def _note_agents(self, broken: Sequence[int]) -> None:
        """Note which agents take part, except in seats whose clients left; one agent always does."""

    def get_state(self) -> dict[str, Any]:
        """Return nothing: the episodes are in the clients, and end with this process."""
        return {}
