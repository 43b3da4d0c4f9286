"""The episode events of a runner whose episodes are played by clients of its policy server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.episodes.rollout import Rollout
from corral.episodes.served_rollout import ServedSteps
from corral.runners.episode_events import EpisodeEvents

if TYPE_CHECKING:
    from corral.runners.served_stepping import ServedLanes


class ServedEvents(EpisodeEvents):
    """Keeps an episode for each seat in which one is played.

    In a row, for each seat: a step fires step, and if it ended the episode, end; an episode that begins fires created
    and start. If the client left, nothing fires.
    """

    _continued = True  # whether the episodes read the rollout that is written now

    def create_all(self, rollout: Rollout) -> None:
        """Forget all episodes: those that begin from now on count."""
        self._enter(rollout)
        self._episodes = [None] * len(self._arguments)

    def start_all(self, rollout: Rollout) -> None:
        """Do nothing: an episode starts when its client says so."""

    def continue_all(self, rollout: Rollout, paused_s: float) -> None:
        """Continue the unfinished episodes as chunks in another rollout, `paused_s` seconds after the last one."""
        self._resumes = paused_s, self._rollout.row_times_s[-1] if len(self._rollout.row_times_s) else 0.0
        self._returns = self._enter(rollout).returns.tolist()
        self._continued = False

    def _continue_in(self, lanes: ServedLanes) -> None:
        """Let the episodes read the rollout of the lanes that is written now."""
        self._continued = True
        paused_s, last_time_s = self._resumes
        for seat, episode in enumerate(self._episodes):
            if episode is None:
                continue
            self._episodes[seat] = chunk = episode.continued_in(
                lanes.rollout, self._returns[seat], float(last_time_s), paused_s
            )
            self._put(seat, "episode", chunk)
            lanes.rollout.notes[0, seat] = chunk.notes
            if self._keeps_chunks and len(episode):
                self._chunks[seat].append(self._kept(episode))

    def fire(self, rollout: ServedSteps, row: int, lanes: ServedLanes, playing: NDArray[np.bool_] | None) -> None:
        """Fire the events of one row.

        Args:
            rollout: What happened in the seats.
            row: Row, which was just written.
            lanes: The lanes, whose rollout the episodes read.
            playing: Seats whose episodes are still wanted, bool `[N]`; `None` is all.
        """
        if not self._continued:
            self._continue_in(lanes)
        for seat in rollout.broken_in(row):
            if (episode := self._episodes[seat]) is not None:
                episode.end(False, False, lanes.clock_of(seat) - 1)
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
            # After the last step comes a row of the lane that holds the final observation.
            stop = lanes.clock_of(seat) - 1
            episode.end(bool(rollout.terminated[row, seat]), bool(rollout.truncated[row, seat]), stop)
            self._fire_end(seat)
            self._episodes[seat] = None
        for _, seat in (pair for pair in rollout.begun if pair[0] == row):
            self._create(seat, lanes.rollout)
            self._start(seat, lanes.clock_of(seat), lanes.rollout)

    def get_state(self) -> dict[str, Any]:
        """Return nothing: the episodes are in the clients, and end with this process."""
        return {}
