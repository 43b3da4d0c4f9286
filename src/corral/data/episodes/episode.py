"""Episodes: views of one lane of a runner's columns, or built by hand over columns that they own.

The data of an episode are entries: one for each of its steps, and one more in `obs`. A row is an index of the columns.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from gymnasium import spaces

from corral.core.tree import Tree, copy_nested, leaves, map_tree
from corral.data.episodes.html import episode_html
from corral.data.episodes.infos import NotSent, check_sent
from corral.data.episodes.lookback import Indices, Positions, Reading, Writing, one_hot, overwrite, pick, positions
from corral.data.episodes.notes import Noted, Notes, find_lookback
from corral.data.episodes.step_columns import NO_OUTPUTS, STANDARD_COLUMNS, StepColumns
from corral.errors import EpisodeError, nearest

if TYPE_CHECKING:
    from corral.core.ids import AgentID

_STEP_COLUMNS = ("actions", "rewards")
_AGENT_STATE = ("agent_id", "module_id", "multi_agent_episode_id")
_PLAIN_STATE = ("id_", "env_index", "t_started", "return_before", "is_terminated", "is_truncated")


class SingleAgentEpisode(Noted):
    """One episode of one sub-env, or a chunk of it.

    A runner's episodes hold no data. They read the columns of the rollout and grow as the columns are written; what is
    written through them is in the columns. An episode that spans several `sample()` calls appears as chunks with the
    same `id_`: `len`, the getters and slices refer to the chunk, `t` and `get_return()` to the whole episode. In
    `on_episode_end` all of them refer to the whole episode, and what is written to steps of earlier chunks is dropped;
    a listener that names `prev_episode_chunks` receives the last chunk. Large columns of earlier chunks, such as
    images, are kept only for listeners that take `prev_episode_chunks`, by name or with `**kwargs`.

    An episode built by hand owns its data, and so does one made by `slice`, `cut`, `concat_episode` or `from_state`.

    Getters take an int, a slice, a sequence of ints, or nothing for the whole chunk. Index 0 is the first step of the
    chunk. Negative indices count from the end, or with `neg_index_as_lookback=True` from the start back into the
    lookback buffer, which holds steps from before the chunk. Slices stop at the ends of the data and ints outside raise
    `IndexError`; with `fill=` both are padded.

    Attributes:
        id_: Id, the same for all chunks of an episode, and different for every episode of a run.
        env_index: Index of the sub-env, which is the lane of a runner's episode with a single agent; 0 for an episode
            built by hand.
        t_started: Env steps of the episode before this chunk.
        return_before: Sum of rewards before this chunk.
        owns_data: Whether the episode has its own data; False for a view of a runner's columns.
        is_terminated: Whether the last step terminated the episode.
        is_truncated: Whether the last step truncated the episode.
        notes: `custom_data` and the temporary data; the chunks of a runner's episode share them.
        observation_space: Space of one observation, if known.
        action_space: Space of one module action, if known.
        agent_id: Id of the agent, if the episode is the part of one agent in an episode of several.
        module_id: Id of the module that chooses the actions of this agent.
        multi_agent_episode_id: Id of this episode of several, which is the same for all of its agents.
    """

    __slots__ = (
        "_columns",
        "_earlier",
        "_first",
        "_lane",
        "_last",
        "_last_time_s",
        "_start",
        "_start_time_s",
        "_stop",
        "action_space",
        "agent_id",
        "env_index",
        "id_",
        "is_terminated",
        "is_truncated",
        "module_id",
        "multi_agent_episode_id",
        "notes",
        "observation_space",
        "owns_data",
        "return_before",
        "t_started",
    )

    observation_space: spaces.Space[Any] | None
    action_space: spaces.Space[Any] | None
    agent_id: AgentID | None
    module_id: str | None
    multi_agent_episode_id: str | None

    # Construction.

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Sequence[Tree] | None = None,
        infos: Sequence[Mapping[str, Any]] | None = None,
        actions: Sequence[Any] | None = None,
        rewards: Sequence[float] | None = None,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Sequence[Any]] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | str = "auto",
        agent_id: AgentID | None = None,
        module_id: str | None = None,
        multi_agent_episode_id: str | None = None,
    ) -> None:
        """Build an episode by hand, from the steps so far or without steps.

        Args:
            id_: Id; `None` makes a new one.
            observations: Observations, one more than actions.
            infos: Info dicts, one for each observation, or `None`.
            actions: Action of each step.
            rewards: Reward of each step.
            observation_space: Space of one observation.
            action_space: Space of one action.
            terminated: Whether the last step terminated the episode.
            truncated: Whether the last step truncated the episode.
            extra_model_outputs: Further outputs of the module by name, one entry for each step.
            t_started: Env steps before the chunk, the lookback included; `None` is 0.
            len_lookback_buffer: Number of the first steps that are from before this chunk, at most all of them;
                `"auto"` is all of them.
            agent_id: Id of the agent; `None` is the only one.
            module_id: Id of the module of the agent.
            multi_agent_episode_id: Id of the `MultiAgentEpisode` of which this is the part of one agent.

        Raises:
            EpisodeError: The lengths do not fit together.
        """
        self._clear(id_ or uuid.uuid4().hex, 0, StepColumns({}))
        self.agent_id, self.module_id, self.multi_agent_episode_id = agent_id, module_id, multi_agent_episode_id
        self.observation_space, self.action_space = observation_space, action_space
        self.is_terminated, self.is_truncated = bool(terminated), bool(truncated)
        self.t_started = t_started or 0
        self._check_outputs(extra_model_outputs)
        given = {"obs": observations, "actions": actions, "rewards": rewards, **(extra_model_outputs or {})}
        columns = _stack_steps(given, infos)
        num_steps = len(columns["rewards"]) if columns else 0
        if self.is_done and not num_steps:
            raise EpisodeError("an episode without a step cannot be terminated or truncated.")
        lookback = find_lookback(len_lookback_buffer, num_steps)
        if columns:
            self._adopt(columns, infos or (), lookback)

    def _check_outputs(self, extra_model_outputs: Mapping[str, Any] | None) -> None:
        if taken := sorted(NO_OUTPUTS.intersection(extra_model_outputs or ())):
            raise EpisodeError(f"extra_model_outputs cannot be named {taken}: an episode has columns of these names.")

    def _clear(self, id_: str, lane: int, columns: StepColumns) -> None:
        self.id_, self.env_index = id_, lane
        self._columns, self._lane, self.owns_data = columns, lane, False
        self.t_started = 0
        self.is_terminated = self.is_truncated = False
        self.notes: Notes = ({}, {})
        self.observation_space = self.action_space = None
        self.agent_id = self.module_id = self.multi_agent_episode_id = None
        # The chunks before and the last one, of an episode that answers for all of them.
        self._earlier: tuple[Self, ...] = ()
        self._last: Self | None = None
        self._first = 0  # row of the oldest step, lookback included
        self._start: int | None = None  # row of index 0
        self._stop: int | None = None  # row past the last; None follows the columns as they grow
        self.return_before = 0.0
        self._start_time_s = self._last_time_s = 0.0

    def _adopt(self, columns: Mapping[str, Tree], infos: Sequence[Mapping[str, Any]], lookback: int) -> None:
        """Own columns `[len, ...]`, observations `[len + 1, ...]`, where `len` includes the lookback."""
        self._columns = StepColumns.one_lane(columns, infos)
        self.owns_data, self._lane = True, 0
        self._first, self._start, self._stop = 0, lookback, None

    def _all_columns(self) -> dict[str, Tree]:
        """Return views of all columns by name, lookback included: `[len, ...]`, `obs` `[len + 1, ...]`."""
        names = ("obs", *_STEP_COLUMNS, *self._extra_names)
        return {name: self._all(name) for name in names if name in self._columns}

    def _infos(self, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        """Return info dicts by position, lookback included: one for each observation."""
        num_infos = self._num_entries("obs")
        return [self._info_at(position, num_infos, None) for position in range(num_infos)[start:stop]]

    def _own_data(self) -> None:
        """Copy the data out of a runner's columns, so that the episode can grow; nothing to do if it owns its data."""
        if not self.owns_data and self._start is not None:
            self._last_time_s = self._start_time_s + self.get_duration_s()
            columns = {name: map_tree(np.copy, column) for name, column in self._all_columns().items()}
            self._adopt(columns, self._infos(), self.len_lookback)

    # Views, made and moved on by runners.

    @classmethod
    def view(cls, id_: str, lane: int, columns: StepColumns) -> Self:
        """Return a view of one lane of columns that has not started; see `start`."""
        episode = cls.__new__(cls)
        episode._clear(id_, lane, columns)
        episode.observation_space, episode.action_space = columns.observation_space, columns.action_space
        return episode

    def start(self, row: int, now_s: float) -> None:
        """Start the view at the row that holds the observation of the reset.

        Args:
            row: The row.
            now_s: Clock reading at the reset.
        """
        self._start = self._first = row
        self._start_time_s = self._last_time_s = now_s

    def end(self, terminated: bool, truncated: bool, stop: int) -> None:
        """End the view: say whether its last env step ended the episode, and the row after that step."""
        self.is_terminated, self.is_truncated, self._stop = terminated, truncated, stop

    def continue_from(self, t_started: int, return_before: float) -> None:
        """Set the env steps and the sum of rewards before this chunk."""
        self.t_started, self.return_before = t_started, return_before

    def continued_in(
        self, columns: StepColumns, return_before: float, last_time_s: float, paused_s: float = 0.0
    ) -> Self:
        """Return the next chunk, which starts with row 0 of other columns; this one is complete.

        Args:
            columns: The next columns, with the same lanes.
            return_before: Sum of rewards of the episode so far.
            last_time_s: Clock reading at the end of this chunk's columns.
            paused_s: Seconds from then until the next chunk, which do not count in the duration.
        """
        chunk = self.view(self.id_, self.env_index, columns)  # also if user code made this chunk own its data
        chunk.notes = self.notes
        for name in _AGENT_STATE:
            setattr(chunk, name, getattr(self, name))
        if self._start is not None:
            self._stop = self._end
            chunk._start = 0
            chunk._start_time_s, chunk._last_time_s = self._start_time_s + paused_s, last_time_s + paused_s
            chunk.continue_from(self.t, return_before)
        return chunk

    def without_large_columns(self, kept: StepColumns) -> Self:
        """Return this complete chunk over small columns, so that it does not keep its rollout."""
        chunk = copy.copy(self)
        chunk._columns = kept
        return chunk

    def joined(self, earlier: Sequence[Self]) -> Self:
        """Return the episode, whose last chunk this is, as one that answers for the chunks before it too."""
        whole = copy.copy(self)
        whole._earlier, whole._last = tuple(earlier), self
        whole.continue_from(earlier[0].t_started, earlier[0].return_before)
        return whole

    @property
    def _last_chunk(self) -> Self:
        return self if self._last is None else self._last

    @property
    def _num_earlier(self) -> int:
        """Number of steps in the chunks before."""
        return sum(map(len, self._earlier)) if self._earlier else 0

    # Steps added by hand.

    def add_env_reset(self, observation: Tree, infos: Mapping[str, Any] | None = None) -> None:
        """Start an episode built by hand with the observation and the info of a reset.

        Raises:
            EpisodeError: The episode has started already.
        """
        if self._start is not None:
            raise EpisodeError(f"episode {self.id_} was reset already, and has {self.t} steps.")
        self._adopt(_stack_steps({"obs": [observation]}, None), [infos or {}], 0)
        self._start_time_s = self._last_time_s = time.perf_counter()

    def add_env_step(
        self,
        observation: Tree,
        action: Any,
        reward: float,
        infos: Mapping[str, Any] | None = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one step; a runner's episode becomes one that owns its data.

        Args:
            observation: Observation that the step led to.
            action: Action of the step.
            reward: Reward of the step.
            infos: Info dict of the step.
            terminated: Whether the step terminated the episode.
            truncated: Whether the step truncated the episode.
            extra_model_outputs: Further outputs of the module by name; the same names in every step.

        Raises:
            EpisodeError: The episode was not reset or is over, or the names or shapes differ from the steps before.
        """
        if self._start is None or self.is_done:
            why = "is over" if self.is_done else "was not reset"
            raise EpisodeError(f"episode {self.id_} {why}: no step can be added.")
        self._check_outputs(extra_model_outputs)
        self._own_data()
        step = {"actions": action, "rewards": reward, **(extra_model_outputs or {})}
        try:
            self._columns.append_step(observation, step, infos)
        except (ValueError, TypeError, KeyError) as error:
            raise EpisodeError(f"episode {self.id_}, step {self.t}: {error}") from error
        self._last_time_s = time.perf_counter()
        self.is_terminated, self.is_truncated = bool(terminated), bool(truncated)

    # State.

    @property
    def is_reset(self) -> bool:
        """Whether the reset that starts the episode has happened."""
        return self._start is not None

    @property
    def t(self) -> int:
        """Env steps of the whole episode so far."""
        return self.t_started + len(self)

    @property
    def len_lookback(self) -> int:
        """Number of steps in the lookback buffer."""
        return 0 if self._start is None else self._start - self._first

    @property
    def place(self) -> tuple[int, int]:
        """First row and lane of this chunk in its columns."""
        return self._start or 0, self._lane

    def __len__(self) -> int:
        """Return the number of env steps in this chunk, or at its end in the episode, without the lookback."""
        return 0 if self._start is None else self._end - self._start + self._num_earlier

    @property
    def _end(self) -> int:
        return self._columns.num_rows_of(self._lane) if self._stop is None else self._stop

    def get_return(self) -> float:
        """Return the sum of rewards of the whole episode so far, earlier chunks included."""
        return self.whole_return()

    def whole_return(self) -> float:
        """Return what `get_return` returns, also of a class whose `get_return` counts something else."""
        if not len(self):
            return self.return_before
        if self._earlier:
            return self.return_before + float(self._all("rewards").sum())
        return self.return_before + float(self._columns.rewards[self._start : self._end, self._lane].sum())

    def get_duration_s(self) -> float:
        """Return the seconds from the reset to the latest step; 0 if the episode was built from data.

        The time between two `sample()` calls, in which the learner may work, does not count.
        """
        last = self._last_time_s
        if not self.owns_data and len(self) and "row_times_s" in self._columns:
            last = self._columns.time_at(self._end - 1, self._lane)
        return last - self._start_time_s

    def validate(self) -> None:
        """Check that the episode was reset.

        Raises:
            EpisodeError: The episode was not reset.
        """
        if self._start is None:
            raise EpisodeError(f"episode {self.id_} was not reset, so it has no observation.")

    # Getters.

    def get_observations(
        self, indices: Indices = None, *, one_hot_discrete: bool = False, **how: Unpack[Reading]
    ) -> Tree:
        """Return all observations `[len + 1, ...]`, or the observations at `indices`; -1 is the latest.

        Args:
            indices: See the class.
            one_hot_discrete: Whether Discrete and MultiDiscrete parts are returned as one-hot vectors.
            **how: `neg_index_as_lookback`, see the class, and `fill`, the value of all elements of an observation
                outside the data.
        """
        data = self._all("obs")
        if one_hot_discrete:
            data = one_hot(data, self.observation_space, "observation_space")
        return self._pick(data, indices, **how)

    def get_actions(self, indices: Indices = None, *, one_hot_discrete: bool = False, **how: Unpack[Reading]) -> Any:
        """Return all module actions `[len, ...]`, or the actions at `indices`; see `get_observations`."""
        data = self._all("actions")
        if one_hot_discrete:
            data = one_hot(data, self.action_space, "action_space")
        return self._pick(data, indices, **how)

    def get_rewards(self, indices: Indices = None, **how: Unpack[Reading]) -> Any:
        """Return all rewards, float64 `[len]`, or the rewards at `indices`; see `get_observations`."""
        return self._pick(self._all("rewards"), indices, **how)

    def get_extra_model_outputs(self, key: str | None = None, indices: Indices = None, **how: Unpack[Reading]) -> Any:
        """Return the outputs of the module other than actions: all of them, `[len, ...]`, or those at `indices`.

        Args:
            key: Name of one output; `None` returns a dict of all outputs. A runner's episodes have `dist_inputs`, the
                columns that user code added, and once the rollout is complete `logp`.
            indices: See the class.
            **how: See `get_observations`.

        Raises:
            KeyError: There is no output of this name.
        """
        names = self._extra_names
        if key is None:
            return {name: self._pick(self._all(name), indices, **how) for name in names}
        if key not in names:
            raise KeyError(f"episode {self.id_} has no extra model output {key!r}. {nearest(key, names)}")
        return self._pick(self._all(key), indices, **how)

    def get_infos(self, indices: Indices = None, **how: Unpack[Reading]) -> Any:
        """Return the list of all `len + 1` info dicts, the first from the reset, or the info dicts at `indices`.

        A runner keeps infos only if a callback listens to one of its events. See `get_observations`.
        """
        check_sent(self._columns.info_rows)
        num_infos, fill = self._num_entries("obs"), how.get("fill")
        where = self._positions(indices, num_infos, **how)
        if isinstance(where, int):
            return self._info_at(where, num_infos, fill)
        found = range(num_infos)[where] if isinstance(where, slice) else where.tolist()
        return [self._info_at(index, num_infos, fill) for index in found]

    def _info_at(self, position: int, num_infos: int, fill: Any) -> Any:
        if not 0 <= position < num_infos:
            if fill is None:
                raise IndexError(f"index out of range: there are {num_infos} infos, lookback included.")
            return fill
        for chunk in self._earlier:
            if position < len(chunk):
                return chunk._info_at(chunk.len_lookback + position, chunk._num_entries("obs"), fill)
            position, num_infos = position - len(chunk), num_infos - len(chunk)
        if position == num_infos - 1 and len(self):  # the info of the last step, even if a reset took its place
            return self._columns.next_info_at(self._first + position - 1, self._lane)
        return self._columns.info_at(self._first + position, self._lane)

    @property
    def _extra_names(self) -> list[str]:
        """Names of the extra model outputs."""
        return [name for name in self._columns.columns if name not in NO_OUTPUTS]

    def _num_entries(self, name: str) -> int:
        """Return how many entries a column has for this chunk, lookback included."""
        return 0 if self._start is None else self._end - self._first + (name == "obs") + self._num_earlier

    def _all(self, name: str) -> Tree:
        """Return a column of this chunk, lookback included: a view, or a copy with a final observation kept apart."""
        if self._earlier:
            parts = [chunk._entries_before_next(name) for chunk in self._earlier]
            return map_tree(lambda *leaf: np.concatenate(leaf), *parts, self._last_chunk._all(name))
        if self._start is None:
            if name == "obs":
                raise IndexError(f"episode {self.id_} has not been reset yet: it holds no observation.")
            return np.zeros(0)
        if name not in self._columns:
            if len(self):
                raise EpisodeError(
                    f"episode {self.id_}: {name!r} of its earlier chunks was not kept, because it is large or was "
                    "added later. The argument prev_episode_chunks of on_episode_end, or **kwargs, keeps all of these "
                    "chunks."
                )
            return np.zeros(0)  # built by hand, and without a step
        stop = self._first + self._num_entries(name)
        data = map_tree(lambda column: column[self._first : stop, self._lane], self._columns[name])
        if name == "obs" and (final := self._final_obs()) is not None:
            data = map_tree(lambda column, leaf: np.concatenate([column[:-1], leaf[None]]), data, final)
        return data

    def _entries_before_next(self, name: str) -> Tree:
        """Return a column of an earlier chunk, without the lookback and the observation that begins the next one."""
        start = self.len_lookback
        return map_tree(lambda column: column[start : start + len(self)], self._all(name))

    def _final_obs(self) -> Tree:
        """Return the observation that the last step led to, if it was kept apart from `obs`."""
        last = self._first + self._num_entries("actions") - 1
        # Without a step, the row before belongs to the previous episode.
        return self._columns.final_obs.get((last, self._lane)) if last >= self._first else None

    def _pick(self, data: Tree, indices: Indices, **how: Unpack[Reading]) -> Any:
        return pick(data, self._positions(indices, len(leaves(data)[0]), **how), how.get("fill"))

    def _positions(
        self, indices: Indices, num_entries: int, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Positions:
        lookback, clip = self.len_lookback, fill is None
        return positions(indices, num_entries, lookback, neg_index_as_lookback=neg_index_as_lookback, clip=clip)

    # Setters.

    def set_observations(self, *, new_data: Tree, **where: Unpack[Writing]) -> None:
        """Overwrite all observations of the chunk, or those at `at_indices`; a runner's episode writes the columns.

        Args:
            new_data: One observation for each index, `[K, ...]`; a single one for an int.
            **where: `at_indices` and `neg_index_as_lookback`, see the class.

        Raises:
            IndexError: The new data have another size than the data they replace, or an index is outside.
        """
        self._overwrite("obs", new_data, **where)

    def set_actions(self, *, new_data: Any, **where: Unpack[Writing]) -> None:
        """Overwrite module actions; see `set_observations`."""
        self._overwrite("actions", new_data, **where)

    def set_rewards(self, *, new_data: Any, **where: Unpack[Writing]) -> None:
        """Overwrite rewards; see `set_observations`."""
        self._overwrite("rewards", new_data, **where)

    def set_extra_model_outputs(self, *, key: str, new_data: Any, **where: Unpack[Writing]) -> None:
        """Overwrite an extra model output, or add one: a new key without `at_indices`. See `set_observations`.

        Args:
            key: Name of the output.
            new_data: One entry per index, `[len, ...]`; for a new key, one per step of the episode.
            **where: `at_indices`, which entries to overwrite, and `neg_index_as_lookback`, see the class.

        Raises:
            KeyError: There is no such output, and `at_indices` is given.
            EpisodeError: The new key is a column that exists only after sampling, and the episode is sampled.
            IndexError: A new output has not one entry per step.
        """
        if key not in self._extra_names:
            if where.get("at_indices") is not None:
                raise KeyError(
                    f"episode {self.id_} has no extra model output {key!r}. {nearest(key, self._extra_names)}"
                )
            self._check_outputs({key: new_data})
            if key in STANDARD_COLUMNS and not self.owns_data:
                raise EpisodeError(f"{key!r} is not known before the rollout is complete: set it in on_sample_end.")
            if len(new_data) != len(self):
                raise IndexError(f"{key!r} has {len(new_data)} entries for {len(self)} steps.")
            if self._earlier:
                last = self._last_chunk
                return last.set_extra_model_outputs(key=key, new_data=new_data[len(self) - len(last) :])
            self._columns.add_column(key, np.asarray(new_data))
        self._overwrite(key, new_data, **where)

    def _overwrite(
        self, name: str, new_data: Tree, *, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        data = self._all(name)
        num_entries = self._num_entries(name)
        where = positions(at_indices, num_entries, self.len_lookback, neg_index_as_lookback=neg_index_as_lookback)
        overwrite(data, where, new_data)
        if self._earlier:  # `data` was a copy; what was in other rollouts is learned from already
            last = self._last_chunk
            kept_entries = last._num_entries(name)
            return last._overwrite(name, map_tree(lambda leaf: leaf[-kept_entries:], data))
        final = self._final_obs() if name == "obs" else None
        if final is not None:  # `data` was a copy, with the final observation at its end
            kept = self._columns[name]
            map_tree(lambda leaf, last: np.copyto(leaf, last[-1]), final, data)
            stop = self._first + num_entries - 1
            map_tree(lambda leaf, new: np.copyto(leaf[self._first : stop, self._lane], new[:-1]), kept, data)

    # Parts of episodes, and episodes of parts.

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> Self:
        """Return some of the steps as an episode that owns its data; its return counts only these steps.

        Args:
            slice_: Slice of the steps of this chunk, without a step width; it stops at the ends of the chunk.
            len_lookback_buffer: Number of steps before the slice to keep as its lookback, at most as many as there are;
                `None` keeps as many as this episode has.

        Raises:
            EpisodeError: The slice has a step width, the episode was not reset, or the lookback is negative.
        """
        lookback = self.len_lookback
        kept = lookback if len_lookback_buffer is None else len_lookback_buffer
        self._check_window(slice_, kept)
        self.validate()
        start, stop, _ = slice_.indices(len(self))
        stop = max(start, stop)
        part = self._part(max(0, lookback + start - kept), lookback + start, lookback + stop)
        part.t_started = self.t_started + start
        if stop == len(self):
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        return part

    def _part(self, first: int, start: int, stop: int) -> Self:
        """Return the steps from `start` to `stop` as an episode, with the steps from `first` on as lookback.

        All three count from the oldest step that this episode holds, lookback included.
        """
        part = type(self)(self.id_, observation_space=self.observation_space, action_space=self.action_space)
        columns = {
            name: map_tree(lambda leaf, extra=name == "obs": leaf[first : stop + extra].copy(), column)
            for name, column in self._all_columns().items()
        }
        part._adopt(columns, self._infos(first, stop + 1), start - first)
        if isinstance(self._columns.info_rows, NotSent):
            part._columns.info_rows = self._columns.info_rows
        part.env_index = self.env_index
        for name in _AGENT_STATE:
            setattr(part, name, getattr(self, name))
        part.notes = self._copied_notes()
        return part

    def cut(self, len_lookback_buffer: int = 0) -> Self:
        """Return the chunk that comes next: the same id, no steps yet, the last observation and info.

        Args:
            len_lookback_buffer: Number of the last steps of this chunk that the next one keeps as its lookback, at most
                as many as there are.

        Raises:
            EpisodeError: The episode is over, or the lookback is negative.
        """
        self._check_window(None, len_lookback_buffer)
        if not self.is_reset:
            return self.from_state(self.get_state())
        stop = self.len_lookback + len(self)
        chunk = self._part(max(0, stop - len_lookback_buffer), stop, stop)
        chunk.continue_from(self.t, self.whole_return())
        return chunk

    def concat_episode(self, other: SingleAgentEpisode) -> None:
        """Append the next chunk of the same episode; this episode then owns its data.

        Raises:
            EpisodeError: The chunks have different ids, do not follow one another, or this episode is over.
        """
        other = other._last_chunk
        self._check_follows(other, other.t_started)
        mine, theirs, skip = self._all_columns(), other._all_columns(), other.len_lookback
        # The first observation of the chunk is the last one here. The chunk's info of it may say more, and is kept.
        if not all(leaves(map_tree(lambda a, b: np.array_equal(a[-1], b[skip]), mine["obs"], theirs["obs"]))):
            raise EpisodeError(
                f"the last observation of episode {self.id_} differs from the first observation of the chunk."
            )
        if len(other):
            if len(mine["rewards"]) and not (self.owns_data and other.owns_data):
                shared = mine.keys() & theirs.keys()  # a complete rollout has more columns than one being written
                mine, theirs = ({name: part[name] for name in shared} for part in (mine, theirs))
            if len(mine["rewards"]) and mine.keys() != theirs.keys():
                raise EpisodeError(f"episode {self.id_} has {sorted(mine)} at each step, the chunk {sorted(theirs)}.")
            columns = {}
            for name, column in theirs.items():
                new = map_tree(lambda leaf, start=skip + (name == "obs"): leaf[start:].copy(), column)
                columns[name] = map_tree(lambda *both: np.concatenate(both), mine[name], new) if name in mine else new
            self._adopt(columns, [*self._infos()[:-1], *other._infos(skip)], self.len_lookback)
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self._take_notes(other)

    def get_state(self) -> dict[str, Any]:
        """Return all but the spaces as dicts, lists, numbers, strings and arrays; `custom_data` is copied as it is."""
        state = {name: getattr(self, name) for name in _PLAIN_STATE}
        if self.agent_id is not None:
            state |= {name: getattr(self, name) for name in _AGENT_STATE}
        if self.is_reset:
            state["columns"] = {name: map_tree(np.copy, column) for name, column in self._all_columns().items()}
            state["infos"] = self._infos()
            state["len_lookback"] = self.len_lookback
        return state | self._plain_notes()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return an episode with a state that `get_state` returned; it owns its data."""
        of_agent: dict[str, Any] = {name: state.get(name) for name in _AGENT_STATE}
        episode = cls(state["id_"], **of_agent)
        if "columns" in state:
            columns = {name: map_tree(np.copy, column) for name, column in state["columns"].items()}
            episode._adopt(columns, copy_nested(state["infos"]), state["len_lookback"])
        for name in _PLAIN_STATE:
            setattr(episode, name, state[name])
        episode.notes = (copy.deepcopy(state["custom_data"]), copy.deepcopy(state["temporary_data"]))
        return episode

    def __repr__(self) -> str:
        """Return the id, the sub-env, the number of steps and the state."""
        return f"SingleAgentEpisode({self.id_}, env_index={self.env_index}, t={self.t}, {self._describe_end()})"

    def _repr_html_(self) -> str:
        """Return a table of the steps and, where there are any, frames, for a notebook."""
        return episode_html(self)


def _stack_steps(given: Mapping[str, Sequence[Any] | None], infos: Sequence[Any] | None) -> dict[str, Tree]:
    """Return the columns of given steps, as `StepColumns.one_lane` takes them.

    Args:
        given: `obs`, `actions`, `rewards` and extra outputs: one entry for each step, one more in `obs`.
        infos: One info dict for each observation, or `None`.

    Returns:
        Columns `[len, ...]`, `obs` `[len + 1, ...]`; no columns without an observation.

    Raises:
        EpisodeError: The lengths do not fit together.
    """
    lengths = {name: 0 if values is None else len(values) for name, values in given.items()}
    num_steps = lengths.get("actions", 0)
    fit = all(length == num_steps for name, length in lengths.items() if name != "obs")
    if not fit or (lengths["obs"] != num_steps + 1 and any(lengths.values())):
        raise EpisodeError(
            "an episode of n steps needs n actions, rewards and extra outputs, and n + 1 observations; got "
            f"{', '.join(f'{length} {name}' for name, length in lengths.items())}."
        )
    if infos is not None and len(infos) != lengths["obs"]:
        raise EpisodeError(f"an episode needs one info per observation; got {len(infos)} for {lengths['obs']}.")
    if not lengths["obs"]:
        return {}
    columns = {name: _stack(name, values) for name, values in given.items() if values is not None and len(values)}
    columns["rewards"] = np.array(columns.get("rewards", ()), np.float64)
    return columns


def _stack(name: str, values: Sequence[Tree]) -> Tree:
    try:
        return map_tree(lambda *leaf: np.stack([np.asarray(part) for part in leaf]), *values)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EpisodeError(f"the entries of {name!r} differ in shape or nesting: {error}") from error
