"""Rollouts: the columns of one `sample()` call, written in place. Row t holds time step t of all sub-envs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import describe, empty_column
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.tree import Tree, map_tree
from corral.data.episodes.episode import SingleAgentEpisode
from corral.data.episodes.infos import NotSent, check_sent, stacked, value_at
from corral.data.episodes.notes import Notes
from corral.data.episodes.step_columns import STANDARD_COLUMNS, StepColumns, column_attribute
from corral.errors import ColumnError

if TYPE_CHECKING:
    from corral.modules.distributions import ActionDistribution
    from corral.modules.transforms.pipeline import Pipeline
    from corral.modules.transforms.transform import State


class Rollout(StepColumns):
    """The columns of one `sample()` call, with time T on axis 0 and the N sub-envs on axis 1.

    The columns are allocated once for each `sample()` call, and runners never write into them again after `sample()`
    has returned: a rollout that is kept keeps its data. In `on_sample_end` and before, user code may write into
    columns, replace them by others of the same shape and dtype (`rollout.rewards = ...`), and add columns `[T, N, ...]`
    (`rollout["bonus"] = ...`), which the batch then holds too.

    Attributes:
        obs: Tree of `[T + 1, N, ...]`: row t is what the action of row t saw, row T what the last step led to.
        actions: Module actions `[T, N, ...]`; see `ActionDistribution.to_env`.
        rewards: float64 `[T, N]`.
        terminated: bool `[T, N]`.
        truncated: bool `[T, N]`.
        valid: bool `[T, N]`; False where no step counts: next-step autoreset only reset the sub-env, the sub-env failed
            and was recreated, or the step is not part of the requested episodes.
        dist_inputs: float32 `[T, N, D]`, the policy's outputs.
        logp: float32 `[T, N]`, log-probability of the actions; filled when the rollout is complete.
        row_times_s: float64 `[T]`, clock readings at the end of each row; `[T, N]` where sub-envs have clocks of their
            own.
        states: For a module with memory, a tree of `[T + 1, N, ...]`: row t is the state in which the module saw the
            observation of row t.
        critic_obs: For a central critic, a tree of `[T + 1, L, ...]`: what it sees where the module sees `obs`.
        final_states: By (row, sub-env) as in `final_obs`, the state in which the final observation would be seen.
        columns: All columns by name, the columns that user code added included.
        final_obs: By (row, sub-env) of a step that ended its episode, the final observation that `obs` does not hold
            because a same-step autoreset overwrote it; in the order of time.
        info_rows: By row of `obs`, the infos that came with it, as the sub-envs gave them. Kept only if a callback
            listens to an event of the runner.
        observation_space: Space of one observation, if known.
        action_space: Space of one module action, if known.
        host: Rewards and flags on the host, once the rollout is complete, if the columns are on a device; else `None`.
        notes: By (first row, sub-env) of an episode or chunk, the notes of callbacks on it. The episodes themselves are
            not kept, because they would keep the rollout.
        carry: Totals of the unfinished episodes when the rollout began, or `None` if no runner made the rollout.
        episode_class: Class of the episodes that `episodes` makes; of a runner's rollouts the setting `episode_class`.
        weights_version: Version of the weights that chose the actions.
        worker_index: Index of the runner that made the rollout.
        written: Where clients of a policy server play the envs, the rollout that is handed out, which episodes read.
            Rows of this one are then exchanges of messages, and its column `stepped`, bool `[T, N]`, says in which of
            them a sub-env took a step that counts. `None` for any other rollout.
        continues: Whether row 0 continues where the runner's previous rollout stopped; False after a reset of all envs.
        broken: Row and sub-env of each step that failed, in the order of time. The sub-env was recreated there. Its
            episode ended before that row, neither terminated nor truncated, and another begins with the next row.
        same_step: Whether the vector env resets a sub-env in the step that ends its episode, not in the row after it.
        begins_with_reset: Sub-envs that row 0 only resets, bool `[N]`; `None` is none of them.
        pipeline: Transforms with the statistics that were used when the actions were chosen; `None` if the module saw
            `obs` itself.
        reward_pipeline: Transforms with the newest statistics, which are used for the rewards; `None` is `pipeline`.
        intrinsic_rewards: Rewards that explorations added to rewards that transforms change, float64 `[T, N]`;
            `transformed` adds them after the transforms. `None` if there are none, and in the runners.
        stored: For a pipeline that stacks frames or looks back otherwise, a tree of `[T + 1, N, ...]`: `obs` after the
            last such transform.
        final_stored: By (row, sub-env) as in `final_obs`, the final observation after the last such transform.
        measured: Statistics of the observations and rewards of this rollout, by transform.
        num_rows: Rows written so far; T once the rollout is complete.
        num_env_steps: Env steps taken, once the rollout is complete: the number of valid entries, before any callback
            changed `valid`.
    """

    terminated = column_attribute("terminated")
    truncated = column_attribute("truncated")
    valid = column_attribute("valid")
    dist_inputs = column_attribute("dist_inputs")
    logp = column_attribute("logp")
    row_times_s = column_attribute("row_times_s")
    states = column_attribute("states")
    stored = column_attribute("stored")

    __slots__ = (
        *("begins_with_reset", "broken", "carry", "continues", "episode_class", "final_states", "final_stored"),
        *(
            "host",
            "intrinsic_rewards",
            "measured",
            "notes",
            "num_env_steps",
            "pipeline",
            "reward_pipeline",
            "same_step",
        ),
        *("weights_version", "worker_index", "written"),
    )

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take columns with room for as many rows as `rewards` has."""
        super().__init__(columns, num_rows=num_rows)
        self.carry: EpisodeCarry | None = None
        self.episode_class: type[Any] = SingleAgentEpisode
        self.weights_version = 0
        self.worker_index = 0
        self.written: Any = None
        self.continues = False
        self.num_env_steps = 0
        self.host: Rollout | None = None
        self.final_states: dict[tuple[int, int], Tree] = {}
        self.notes: dict[tuple[int, int], Notes] = {}
        self.broken: list[tuple[int, int]] = []
        self.same_step = False
        self.begins_with_reset: NDArray[np.bool_] | None = None
        self.pipeline: Pipeline | None = None
        self.reward_pipeline: Pipeline | None = None
        self.intrinsic_rewards: NDArray[np.float64] | None = None
        self.final_stored: dict[tuple[int, int], Tree] = {}
        self.measured: Mapping[str, State] = {}

    @classmethod
    def allocate(cls, num_rows: int, num_envs: int, space: Tree, distribution: ActionDistribution) -> Rollout:
        """Return a rollout with uninitialised columns for `num_rows` rows.

        Args:
            num_rows: Rows that fit.
            num_envs: N.
            space: Tree of observation spaces, see `space_tree`.
            distribution: Gives the shapes and dtypes of actions and policy outputs.
        """
        shape = (num_rows, num_envs)
        return cls(
            {
                "obs": map_tree(lambda leaf: np.empty((num_rows + 1, num_envs, *leaf.shape), leaf.dtype), space),
                "actions": np.empty((*shape, *distribution.action_shape), distribution.action_dtype),
                # Not by `outcomes`: an off-policy algorithm makes a rollout for every few env steps.
                "rewards": np.empty(shape),
                **{name: np.empty(shape, np.bool_) for name in ("terminated", "truncated", "valid")},
                "dist_inputs": np.empty((*shape, distribution.num_inputs), np.float32),
                "row_times_s": np.empty(num_rows),
            }
        )

    # Columns.

    def __iter__(self) -> Iterator[SingleAgentEpisode]:
        """Iterate over the episodes, see `episodes`. Note that `len` is the number of rows."""
        return iter(self.episodes())

    @property
    def added(self) -> dict[str, NDArray[Any]]:
        """Columns that user code added, by name."""
        return {name: column for name, column in self.columns.items() if name not in STANDARD_COLUMNS}

    def with_added(self, computed: dict[str, Tree]) -> dict[str, Tree]:
        """Return computed columns `[T, N, ...]` together with the columns that user code added.

        Where both have a column of one name, the added values replace the computed values wherever they are not NaN.

        Raises:
            ColumnError: An added column has another shape than the computed column of its name, or holds no floats.
        """
        merged = dict(computed)
        for name, column in self.added.items():
            if name not in computed:
                merged[name] = column
                continue
            if column.shape != computed[name].shape or column.dtype.kind != "f":
                raise ColumnError(
                    f"column {name!r} was added as {describe(column)}, and the algorithm computes it as "
                    f"{describe(computed[name])}: give it this shape, as floats, with NaN to keep the computed value."
                )
            merged[name] = np.where(np.isnan(column), computed[name], column).astype(computed[name].dtype)
        return merged

    @property
    def num_envs(self) -> int:
        """Number of sub-envs N: the lanes of a rollout of single-agent envs."""
        num_envs: int = self.rewards.shape[1]
        return num_envs

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether a step terminated or truncated its episode, bool `[T, N]`. Return computations need both columns."""
        done: NDArray[np.bool_] = self.terminated | self.truncated
        return done

    def resets_in(self, row: int) -> NDArray[np.bool_]:
        """Return the sub-envs that a row only resets, bool `[N]`; the row after the last one is the next rollout's."""
        if row == 0 and self.begins_with_reset is not None:
            return self.begins_with_reset
        if row == 0 or self.same_step:
            return np.zeros(self.rewards.shape[1], np.bool_)
        resets: NDArray[np.bool_] = self.terminated[row - 1] | self.truncated[row - 1]
        return resets

    def steps_from(self, row: int) -> NDArray[np.bool_]:
        """Return where a step was taken in the rows from `row` on that are written, bool `[K, N]`.

        No step was taken where a row only reset the sub-env, where a sub-env failed, and where a client reported none.
        """
        stop = self.num_rows
        if self.written is not None:
            return np.array(self.columns["stepped"][row:stop])
        steps = np.ones((stop - row, self.rewards.shape[1]), np.bool_)
        if stop > row:
            steps[0] = ~self.resets_in(row)
            if not self.same_step:  # not `done`, since the columns may have room for very many rows
                steps[1:] = ~(self.terminated[row : stop - 1] | self.truncated[row : stop - 1])
            for failed_row, i in self.broken:
                if row <= failed_row < stop:
                    steps[failed_row - row, i] = False
        return steps

    def unfinished_in(self, row: int) -> NDArray[np.bool_]:
        """Return where an episode continues after a valid step in a row that is written, bool `[N]`."""
        unfinished: NDArray[np.bool_] = self.valid[row] & ~(self.terminated[row] | self.truncated[row])
        return unfinished

    def drop_episode(self, row: int, lane: int) -> None:
        """Mark the steps of the episode that broke in a row as not valid."""
        over = np.flatnonzero(self.done[:row, lane])  # an earlier one that broke is not valid already
        self.valid[over[-1] + 1 if len(over) else 0 : row, lane] = False

    def broken_in(self, row: int) -> list[int]:
        """Return the sub-envs that failed in a row."""
        return [i for failed_row, i in self.broken if failed_row == row] if self.broken else []

    @property
    def over(self) -> NDArray[np.bool_]:
        """Whether the episode was over after a row, bool `[T, N]`: a valid step ended it, or its sub-env failed there.

        Where a sub-env failed no step was taken, so that the row is not valid.
        """
        over: NDArray[np.bool_] = (self.terminated | self.truncated) & self.valid
        if self.broken:
            over[tuple(zip(*self.broken, strict=True))] = True
        return over

    def by_module(self) -> dict[str, Rollout]:
        """Return the rollouts of the modules, by module id: with a single agent, this one."""
        return {DEFAULT_MODULE_ID: self}

    def to_arrays(self) -> Rollout:
        """Return the rollout with arrays as columns, which are arrays already."""
        return self

    def take_facts(self, other: Rollout) -> None:
        """Take all that another rollout says of itself in addition to its columns; `host` is `None`."""
        for name in (*Rollout.__slots__, "action_space", "observation_space", "info_rows"):
            setattr(self, name, getattr(other, name))
        self.host = None

    def set_logp(self, row: int, logp: Any) -> None:
        """Set the log-probability `[N]` of the actions of a row, if it differs from the policy's distribution."""
        if "logp" not in self.columns:
            self.columns["logp"] = empty_column(np.dtype(np.float32), self.rewards.shape)
        self.columns["logp"][row] = logp

    def without_infos(self) -> Rollout:
        """Return the rollout without infos and notes of callbacks, which may be large; the columns are shared."""
        bare = copy.copy(self)
        bare.info_rows, bare.notes = NotSent(), NotSent()
        return bare

    # Episodes.

    def info_column(self, key: str | tuple[str, ...], default: float = float("nan")) -> NDArray[Any]:
        """Return the value under a key in the info of each step, `[T, N, ...]`.

        Args:
            key: A key of the infos, or a tuple of keys for nested infos.
            default: Value for steps whose info has no such key.

        Returns:
            Numbers if all values are numbers or arrays of one shape; else an array `[T, N]` of objects.

        Raises:
            KeyError: The key leads to a group of infos, not to a value.
        """
        check_sent(self.info_rows)
        keys = (key,) if isinstance(key, str) else key
        found = [(row, n, value) for row, n, info in self.step_infos() for value in value_at(info, keys)]
        if not found:
            return np.full((self.num_rows, self.num_envs), default)
        rows, envs, values = zip(*found, strict=True)
        entries = stacked(list(values), default)
        column = np.full((self.num_rows, self.num_envs, *entries.shape[1:]), default, entries.dtype)
        column[rows, envs] = entries
        return column

    def step_infos(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield row, lane and info of the steps that may have one."""
        for row, infos in self.info_rows.items():
            if row > 0:  # row 0 came with a reset, or with the last step of the rollout before
                yield from ((row - 1, n, infos.of_step(n)) for n in infos.of_lanes if self.valid[row - 1, n])

    def episodes(self) -> list[Any]:
        """Return views of the episodes, or chunks of them, in this complete rollout: by sub-env, then by time.

        They are `SingleAgentEpisode`s, or `MultiAgentEpisode`s in a rollout of env steps of several agents. Each has
        the notes that callbacks made on it in `custom_data`. Notes made now are there in the next call, too.
        """
        return [episode for _, episode in self.chunks()]

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Return lane, first row, row after the last and number of earlier episodes of each episode or chunk here.

        They are in the order of lanes, then of time.
        """
        valid = self.valid
        linked = np.zeros_like(valid)  # whether a row continues the episode of the row before it
        linked[1:] = valid[:-1] & ~self.done[:-1] & valid[1:]
        last = valid.copy()
        last[:-1] &= ~linked[1:]
        ended, carry = np.cumsum(self.over, axis=0), self._begun()
        firsts, lasts = np.argwhere((valid & ~linked).T).tolist(), np.argwhere(last.T).tolist()
        return [
            (n, start, stop + 1, int(carry.counts[n]) + (int(ended[start - 1, n]) if start else 0))
            for (n, start), (_, stop) in zip(firsts, lasts, strict=True)
        ]

    def _begun(self) -> EpisodeCarry:
        """Return the totals of the unfinished episodes when the rollout began."""
        return self.carry or EpisodeCarry.fresh(self.num_envs, 0.0)

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes as `episodes` does, each in a pair with its first row."""
        carry, found = self._begun(), []
        for n, start, stop, count in self.spans():
            episode = self._view(episode_id(carry.id_prefix, n, count), n)
            unsent = isinstance(self.notes, NotSent)
            episode.notes = (NotSent(), NotSent()) if unsent else self.notes.setdefault((start, n), episode.notes)
            episode.start(start, self.time_at(start - 1, n) if start else float(carry.start_times_s[n]))
            if start == 0:
                episode.continue_from(int(carry.lengths[n]), float(carry.returns[n]))
            episode.end(bool(self.terminated[stop - 1, n]), bool(self.truncated[stop - 1, n]), stop)
            found.append((start, episode))
        return found

    def _view(self, id_: str, env_index: int) -> Any:
        """Return a view of one sub-env that has not started."""
        return self.episode_class.view(id_, env_index, self)

    # Batches.

    @property
    def module_obs(self) -> Tree:
        """The observations as the module saw them, a tree of `[T + 1, N, ...]`: `obs` after the transforms."""
        return self.transformed().obs

    def transformed(self) -> Rollout:
        """Return the rollout with observations and rewards as the module learns from them: after the transforms.

        The other columns are shared. Without transforms it is this rollout.
        """
        if self.pipeline is None:
            return self
        seen, pipeline = self.for_replay(), self.pipeline
        finals = {}
        if seen.final_obs:
            rows = pipeline.from_stored(map_tree(lambda *leaf: np.stack(leaf), *seen.final_obs.values()))
            finals = {key: map_tree(lambda leaf, i=i: leaf[i], rows) for i, key in enumerate(seen.final_obs)}
        seen = self._with_obs(pipeline.columns_from_stored(seen.obs), finals)
        seen.observation_space = pipeline.module_space
        if pipeline.changes_rewards:
            seen.columns["rewards"] = (self.reward_pipeline or pipeline).rewards(self.rewards)
        if self.intrinsic_rewards is not None:
            seen.columns["rewards"] = seen.rewards + self.intrinsic_rewards
        return seen

    def for_module(self) -> Rollout:
        """Return `transformed()`, which had this name before."""
        return self.transformed()

    def for_replay(self) -> Rollout:
        """Return the rollout with observations as a replay buffer stores them: after the last temporal transform."""
        return self._with_obs(self.stored, self.final_stored) if "stored" in self.columns else self

    def _with_obs(self, obs: Tree, final_obs: dict[tuple[int, int], Tree]) -> Rollout:
        other = copy.copy(self)
        other.columns = {**{name: column for name, column in self.columns.items() if name != "stored"}, "obs": obs}
        other.final_obs, other.final_stored, other.pipeline = final_obs, {}, None
        return other

    def separate_rewards(self, env_rewards: NDArray[np.float64]) -> None:
        """Keep the rewards of the env, and what was added to them since then as `intrinsic_rewards`.

        Args:
            env_rewards: The rewards before, `[T, N]`.
        """
        self.intrinsic_rewards = self.rewards - env_rewards
        self.columns["rewards"] = env_rewards

    def compute_values(self, value_fn: Callable[..., NDArray[np.float32]]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the values that return computations need.

        Args:
            value_fn: Maps observations (tree of `[B, ...]`), or what a central critic sees, and states (tree of
                `[B, ...]`) if the module has memory, to values `[B]`.

        Returns:
            V(s_t), and V of the observation that step t led to, both `[T, N]`.
        """
        shape = (self.num_rows + 1, self.rewards.shape[1])
        obs = self.columns.get("critic_obs", self.obs)
        inputs = (obs, self.states) if "states" in self else (obs,)
        values = value_fn(*map_tree(lambda column: column.reshape(-1, *column.shape[2:]), inputs)).reshape(shape)
        next_values = values[1:]
        if self.final_obs:
            next_values = next_values.copy()
            rows, envs = zip(*self.final_obs, strict=True)
            finals = (self.final_obs, self.final_states) if self.final_states else (self.final_obs,)
            stacked_finals = [map_tree(lambda *leaf: np.stack(leaf), *of_steps.values()) for of_steps in finals]
            next_values[rows, envs] = value_fn(*stacked_finals)
        return values[:-1], next_values

    def latest_steps(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the row of the latest step of each lane, and whether the lane has taken one there, `[L]` each."""
        rows = np.full(self.num_lanes, self.num_rows - 1)
        return rows, self.valid[-1] if self.num_rows else np.zeros(self.num_lanes, np.bool_)

    def valid_rows(self, column: Tree, *, by_lane: bool = False) -> Tree:
        """Return the valid steps of a column `[T, N, ...]` as `[B, ...]`, in the order of time, or of lanes first."""
        if by_lane:
            return map_tree(lambda leaf: leaf.swapaxes(0, 1)[self.valid.T], column)
        if self.valid.all():
            return map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), column)
        return map_tree(lambda leaf: leaf[self.valid], column)


def group_by_module(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Return the rollouts of each module, by module id, in the order in which they are given."""
    found: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        for module_id, part in rollout.by_module().items():
            found.setdefault(module_id, []).append(part)
    return found


def level_added_columns(rollouts: Sequence[Rollout]) -> None:
    """Add to every rollout the columns that user code added to any of them; a column added here has no values.

    Raises:
        ColumnError: Two rollouts have columns of one name whose entries differ in shape.
    """
    for name, column in {name: column for rollout in rollouts for name, column in rollout.added.items()}.items():
        for rollout in rollouts:
            if name not in rollout:
                rollout.add_column(name, column[0])
            if rollout[name].shape[2:] != column.shape[2:]:
                raise ColumnError(
                    f"column {name!r} was added as {describe(column)} to one rollout, and as "
                    f"{describe(rollout[name])} to another: entries must have the same shape in all of them."
                )


@dataclass
class EpisodeCarry:
    """Totals of the unfinished episodes of a runner between two rollouts, all `[N]`.

    Attributes:
        returns: Sums of rewards so far.
        lengths: Env steps so far.
        start_times_s: Clock readings at the start of the episodes, moved on by the time between two rollouts.
        counts: Number of earlier episodes of the sub-env since the last reset of all envs.
        id_prefix: Prefix of the ids of episodes; it changes with each reset of all envs.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    start_times_s: NDArray[np.float64]
    counts: NDArray[np.int64]
    id_prefix: str = ""

    @classmethod
    def fresh(cls, num_envs: int, now_s: float, id_prefix: str = "") -> EpisodeCarry:
        """Return the carry of episodes that start now."""
        zeros = np.zeros(num_envs, np.int64)
        return cls(np.zeros(num_envs), zeros, np.full(num_envs, now_s), zeros.copy(), id_prefix)


def episode_id(prefix: str, env_index: int, count: int) -> str:
    """Return the id of the episode of a sub-env that comes after `count` others."""
    return f"{prefix}{env_index:04x}{count:08x}"


@dataclass(frozen=True)
class EpisodeStatistics:
    """Statistics of the episodes that ended in a rollout, in the order of their ends, all `[K]`.

    Attributes:
        returns: Sums of rewards.
        lengths: Env steps.
        durations_s: Seconds from the reset to the last step, without the time between two `sample()` calls.
        env_indices: Indices of the sub-envs.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    durations_s: NDArray[np.float64]
    env_indices: NDArray[np.int64]


NO_EPISODES = EpisodeStatistics(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))


def episode_statistics(rollout: Rollout, carry: EpisodeCarry) -> tuple[EpisodeStatistics, EpisodeCarry]:
    """Return statistics of the episodes that ended in a rollout, computed from whole columns.

    Args:
        rollout: A complete rollout.
        carry: Totals of the unfinished episodes when the rollout began.

    Returns:
        The statistics, and the totals of the episodes that are unfinished when the rollout ends.
    """
    valid, over = rollout.valid, rollout.over
    rewards = np.where(valid, rollout.rewards, 0.0)
    if rollout.num_rows:  # where row 0 was only a reset, the episode began there
        begins = ~(valid[0] | over[0]) & (carry.lengths == 0)
        carry = replace(carry, start_times_s=np.where(begins, rollout.row_times_s[0], carry.start_times_s))
    if not over.any():
        carry = replace(carry, returns=carry.returns + rewards.sum(0), lengths=carry.lengths + valid.sum(0))
        return NO_EPISODES, carry
    lengths = np.cumsum(valid, axis=0) + carry.lengths
    envs, rows = np.nonzero(over.T)  # by env, then by time
    # The rewards of each episode are added up alone: differences of sums over several would lose what is small next to
    # the rewards of the others. Per env there is one part for each end, and one for the rows after the last end.
    by_env, is_first = (np.zeros((rollout.num_envs, rollout.num_rows + 1), dtype) for dtype in (np.float64, np.bool_))
    by_env[:, :-1], is_first[:, 0] = rewards.T, True
    is_first[envs, rows + 1] = True
    returns, counts = np.add.reduceat(by_env.reshape(-1), np.flatnonzero(is_first)), is_first.sum(1)
    lasts = np.cumsum(counts) - 1
    returns[lasts + 1 - counts] += carry.returns
    end_times = rollout.row_times_s[rows]
    # The next episode begins in the next row if that row is only a reset, else in the same row.
    next_rows = np.minimum(rows + 1, rollout.num_rows - 1)
    is_reset = ~(valid | over)[next_rows, envs]
    begin_times = rollout.row_times_s[np.where(is_reset, next_rows, rows)]
    first_of_env = np.ones(len(envs), np.bool_)
    first_of_env[1:] = envs[1:] != envs[:-1]

    def since_last_end(totals: NDArray[Any], start: Any, starts: NDArray[Any]) -> NDArray[Any]:
        passed = totals.copy()
        passed[1:] -= starts[:-1]
        passed[first_of_env] = (totals - start)[first_of_env]
        return passed[order]

    order = np.argsort(rows, kind="stable")  # back to the order of time
    order = order[valid[rows, envs][order]]  # without the episodes of sub-envs that failed
    statistics = EpisodeStatistics(
        np.delete(returns, lasts)[order],
        since_last_end(lengths[rows, envs], 0, lengths[rows, envs]),
        since_last_end(end_times, carry.start_times_s[envs], begin_times),
        envs[order],
    )
    left = replace(
        carry,
        returns=returns[lasts],
        lengths=lengths[-1].copy(),
        start_times_s=carry.start_times_s.copy(),
        counts=carry.counts + counts - 1,
    )
    # With repeated indices the last assignment counts, which is the latest end of each sub-env.
    at_end_lengths = np.zeros(rollout.num_envs, np.int64)
    at_end_lengths[envs] = lengths[rows, envs]
    left.lengths -= at_end_lengths
    left.start_times_s[envs] = begin_times
    return statistics, left
