"""Recording: the complete episodes of rollouts, in files of a bounded number of rows."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.ids import DEFAULT_AGENT_ID
from corral.core.places import Place, place_of
from corral.core.tree import Tree, map_tree
from corral.data.episodes.rollout import Rollout
from corral.data.offline.episode_rows import EpisodeRows
from corral.data.offline.parquet import OWN_COLUMNS, Description, RecordedEpisode, import_pyarrow, write_episodes
from corral.data.offline.source import MINARI
from corral.errors import DataError

_FILE = re.compile(r"episodes-(\d{6,})-\w+\.parquet")

LaneKey = tuple[str, int, int, str]
"""Module id, index of the runner, index of the sub-env, and agent."""

ToEnv = Mapping[str, Callable[[Any], Tree]]
"""Function by module id that converts module actions to actions of the env."""


class Recorder:
    """Writes the complete episodes of rollouts to Parquet files in a directory.

    Episodes come in pieces, one per rollout. The pieces of an episode wait until it ends. Episodes that never end, and
    episodes that a failed sub-env or a reset of all envs cut off, are not written. Files that are there already stay:
    the numbers in the names of new files are higher.

    Attributes:
        num_steps_recorded: Steps of the episodes that were complete so far.
        num_episodes_recorded: These episodes; with several agents the episodes of agents.
        sum_of_returns: Sum of their rewards.
    """

    def __init__(
        self,
        path: str,
        description: Description,
        to_env: ToEnv,
        *,
        max_rows_per_file: int = 100_000,
        with_infos: bool = False,
        with_logp: bool = True,
    ) -> None:
        """Find the directory; nothing is written yet.

        Args:
            path: The directory, a URL, or `"minari:ID"`, a new Minari dataset.
            description: Spaces by module id, and names, for the metadata of the files.
            to_env: The functions of the modules that are recorded.
            max_rows_per_file: Rows after which a file is written; an episode is never split.
            with_infos: Whether infos are written, too.
            with_logp: Whether log-probabilities are written, where they are known.

        Raises:
            MissingPackageError: pyarrow is not installed.
            DataError: There is a file at the path, or the directory cannot be written.
        """
        import_pyarrow()
        self._description, self._to_env = description, dict(to_env)
        self._max_rows, self._with_infos, self._with_logp = max_rows_per_file, with_infos, with_logp
        self._token = uuid.uuid4().hex[:12]  # ids of episodes differ between recordings with one seed, too
        self._write = _writer(path, self._token)
        self._open: dict[LaneKey, tuple[tuple[str, int], list[EpisodeRows]]] = {}  # with the number of the episode
        self._complete: list[RecordedEpisode] = []  # in no file yet
        self._num_rows = 0  # of them
        self.num_steps_recorded = self.num_episodes_recorded = 0
        self.sum_of_returns = 0.0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Take the steps of rollouts, and write a file if the complete episodes have enough rows for one.

        Raises:
            DataError: The file cannot be written, such as on a full disk.
        """
        for rollout in rollouts:
            for module_id, part in rollout.by_module().items():
                if module_id in self._to_env:
                    self._take(module_id, part)
        if self._num_rows >= self._max_rows:
            self.flush()

    def use_modules(self, description: Description, to_env: ToEnv) -> None:
        """Record other modules from now on; episodes that are complete are written with the description of before."""
        self.flush()
        self._description, self._to_env = description, dict(to_env)

    def flush(self) -> None:
        """Write the complete episodes that are in no file yet, if there are any, to a file.

        Raises:
            DataError: The file cannot be written, such as on a full disk.
        """
        while self._complete:  # the episodes of each module have a file of their own
            module_id = self._complete[0].rows.module_id
            written = [episode for episode in self._complete if episode.rows.module_id == module_id]
            self._write(written, self._description.of_module(module_id))
            self._complete = [episode for episode in self._complete if episode.rows.module_id != module_id]
        self._num_rows = 0

    def close(self) -> None:
        """Write the complete episodes that are in no file yet, and forget the unfinished ones.

        Raises:
            DataError: The file cannot be written, such as on a full disk.
        """
        self.flush()
        self._open.clear()

    def _take(self, module_id: str, part: Rollout) -> None:
        """Take the steps of one module's rollout."""
        keys = _lane_keys(module_id, part)
        if not part.continues:
            for key in [key for key in self._open if key[:2] == (module_id, part.worker_index)]:
                del self._open[key]
        prefix = "" if part.carry is None else part.carry.id_prefix
        for lane, start, stop, count in part.spans():
            key, number = keys[lane], (prefix, count)
            num_before = 0 if start or part.carry is None else int(part.carry.lengths[lane])
            new: tuple[tuple[str, int], list[EpisodeRows]] = number, []
            begun, pieces = self._open.pop(key, new) if num_before else new
            if begun != number or sum(map(len, pieces)) != num_before:
                # Steps before these are not here: the recording began later, or a rollout did not arrive, such as a
                # fragment that was too old to be learned from.
                continue
            pieces.append(self._piece(module_id, part, lane, start, stop))
            if part.terminated[stop - 1, lane] or part.truncated[stop - 1, lane]:
                pieces.append(self._final_row(module_id, part, lane, stop - 1))
                self.complete_episode(EpisodeRows.join(pieces), key[3])
            else:
                self._open[key] = number, pieces

    def complete_episode(self, rows: EpisodeRows, agent_id: str) -> None:
        """Take a complete episode of an agent, with the row of its final observation."""
        self._complete.append(RecordedEpisode(rows, f"{self._token}{self.num_episodes_recorded:08x}", agent_id))
        self._num_rows += len(rows)
        self.num_steps_recorded += rows.num_steps
        self.num_episodes_recorded += 1
        self.sum_of_returns += float(rows.rewards.sum())

    @property
    def episode_return_mean(self) -> float:
        """Mean return of the recorded episodes; NaN if there are none."""
        return self.sum_of_returns / self.num_episodes_recorded if self.num_episodes_recorded else math.nan

    def _piece(self, module_id: str, part: Rollout, lane: int, start: int, stop: int) -> EpisodeRows:
        """Return the steps from `start` to `stop` of a lane; all arrays are copies, since rollouts are large."""
        rows = slice(start, stop)
        infos = {t - start: part.info_at(t, lane) for t in range(start, stop)} if self._with_infos else {}
        return EpisodeRows(
            obs=map_tree(lambda leaf: leaf[rows, lane].copy(), part.obs),
            actions=self._to_env[module_id](part.actions[rows, lane]),
            **{name: getattr(part, name)[rows, lane].copy() for name in ("rewards", "terminated", "truncated")},
            valid=np.ones(stop - start, np.bool_),
            module_id=module_id,
            added={name: column[rows, lane].copy() for name, column in self._added(part).items()},
            infos=infos,
        )

    def _added(self, part: Rollout) -> dict[str, Any]:
        """Return the other columns that are recorded: log-probabilities where known, and what user code added.

        Raises:
            DataError: User code added a column under a name that the files use.
        """
        if taken := sorted(part.added.keys() & {*OWN_COLUMNS, "next_obs", "logp"}):
            raise DataError(
                f"offline_data: a callback added the columns {taken}, and files of recorded data have other "
                "columns of these names: choose other names."
            )
        logp = part.columns.get("logp") if self._with_logp else None
        known = {} if logp is None or np.isnan(logp).all() else {"logp": logp}
        return {**known, **part.added}

    def _final_row(self, module_id: str, part: Rollout, lane: int, row: int) -> EpisodeRows:
        """Return the row of the observation that the last step of an episode led to."""
        no, rows = np.zeros(1, np.bool_), slice(row, row + 1)
        return EpisodeRows(
            obs=map_tree(lambda leaf: np.array(leaf)[None], part.next_obs_at(row, lane)),
            actions=map_tree(np.zeros_like, self._to_env[module_id](part.actions[rows, lane])),
            rewards=np.zeros(1),
            terminated=no,
            truncated=no,
            valid=no,
            module_id=module_id,
            added={name: np.zeros_like(column[rows, lane]) for name, column in self._added(part).items()},
            infos={0: part.next_info_at(row, lane)} if self._with_infos else {},
        )


def _lane_keys(module_id: str, part: Rollout) -> list[LaneKey]:
    agents = getattr(part, "lane_agents", None)  # with several agents, a lane is the seat of one of them
    if agents is None:
        return [(module_id, part.worker_index, lane, DEFAULT_AGENT_ID) for lane in range(part.num_envs)]
    envs = part.lane_envs.tolist()  # type: ignore[attr-defined]
    return [(module_id, part.worker_index, env, str(agent)) for env, agent in zip(envs, agents, strict=True)]


def _writer(path: str, token: str) -> Callable[[Sequence[RecordedEpisode], Description], None]:
    """Return what writes the episodes of one module to a path; see `Recorder`."""
    if path.startswith(MINARI):
        from corral.data.offline.minari_data import MinariWriter

        return MinariWriter(path.removeprefix(MINARI)).write
    if not path:
        raise DataError("offline_data: the output is an empty text: give a directory for the recorded episodes.")
    place = place_of(path)
    if isinstance(place.location, Path):
        _check_writable(place.location)
    return partial(_write_file, place, token)


def _check_writable(path: Path) -> None:
    """Refuse a directory that cannot be made or written, before there is anything to lose."""
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise DataError(f"{there} is a file: give a directory for the recorded episodes.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"{there} cannot be written: give another directory for the recorded episodes.")


def _write_file(place: Place, token: str, episodes: Sequence[RecordedEpisode], description: Description) -> None:
    """Write a file with the next number in the directory.

    Other processes may write to the directory at the same time and find the same number, so that the name has a text
    that is the writer's own.
    """
    number = 1 + max((int(found[1]) for name in place.names() if (found := _FILE.match(name))), default=0)
    write_episodes(place, f"episodes-{number:06d}-{token}.parquet", episodes, description)
