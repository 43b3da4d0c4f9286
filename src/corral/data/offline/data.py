"""Recorded episodes in replay buffers, as the module of an algorithm learns from them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.action_masks import first_illegal, has_mask, legal_actions
from corral.core.interrupts import interruptible, raise_if_ending
from corral.core.tree import Tree, leaves, map_tree
from corral.data.episodes.rollout import Rollout
from corral.data.offline.episode_rows import EpisodeRows, check_same_columns
from corral.data.offline.source import Source
from corral.data.replay import ReplayBuffer
from corral.errors import DataError
from corral.modules.distributions import ActionDistribution
from corral.modules.spec import ModuleSpec
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.rows import RowTransforms
from corral.modules.transforms.transform import State

log = logging.getLogger("corral")

_LANES = 128  # episodes that go through temporal transforms side by side

AddColumns = Callable[[Rollout], Mapping[str, NDArray[Any]]]
"""Function of a rollout of one lane, as the module learns from it, that returns more columns `[T, 1, ...]`."""


@dataclass
class ModuleData:
    """The recorded episodes of one module.

    Attributes:
        train: Buffer of the steps that are learned from.
        validation: Buffer of the steps of the other episodes, or `None`.
        num_episodes: Number of episodes, the ones for validation included.
        num_steps: Number of their steps.
        episode_return_mean: Mean of the sums of their rewards.
        fingerprint: Text that differs between other data, with high probability.
    """

    train: ReplayBuffer
    validation: ReplayBuffer | None
    num_episodes: int
    num_steps: int
    episode_return_mean: float
    fingerprint: str


@dataclass
class _Counts:
    """What the first look at all parts finds, or what they sum up to."""

    num_rows: int = 0
    num_parts: int = 0
    num_episodes: int = 0
    num_steps: int = 0
    num_jumps: int = 0
    sum_of_returns: float = 0.0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, rows: EpisodeRows) -> None:
        self.num_rows += len(rows)
        self.num_parts += 1
        self.num_episodes += rows.num_episodes
        self.num_steps += rows.num_steps
        self.num_jumps += rows.num_jumps
        self.sum_of_returns += float(rows.returns().sum())
        for column in (rows.rewards, rows.terminated, *leaves(rows.obs), *leaves(rows.actions)):
            self.digest.update(np.ascontiguousarray(column[:: max(1, len(rows) // 64)]).tobytes())


class ModuleRows:
    """The checked rows of one module in a source, in parts.

    Args:
        source: The recorded data.
        module_id: Id of the module in the data.
        spec: What the module is built from.
        distribution: Its distribution, which converts actions.
    """

    def __init__(self, source: Source, module_id: str, spec: ModuleSpec, distribution: ActionDistribution) -> None:
        """Keep what is given; nothing is read."""
        self.source, self._module_id, self._spec, self._distribution = source, module_id, spec, distribution

    @interruptible
    def parts(self) -> Iterator[EpisodeRows]:
        """Yield the parts.

        Raises:
            DataError: An entry does not fit the spaces, a mask forbids a recorded action, or parts have different
                columns.
        """
        first: EpisodeRows | None = None
        for rows in self.source.parts():
            raise_if_ending()
            if rows.module_id == self._module_id and len(rows):
                checked = rows.checked(self._spec.observation_space, self._spec.action_space)
                first = first or checked.take(slice(0, int(checked.starts[1]) if checked.num_episodes > 1 else None))
                check_same_columns(first, checked)
                self._check_masks(checked)
                yield checked

    def _check_masks(self, rows: EpisodeRows) -> None:
        """Refuse recorded actions that the mask of their observation forbids.

        No policy can imitate them: they are never chosen.
        """
        action_space = self._spec.action_space
        if not has_mask(self._spec.observation_space, action_space):
            return
        acting = np.flatnonzero(rows.valid)
        taken = map_tree(lambda leaf: leaf[acting], rows.obs)
        actions = rows.as_rollout(self._distribution).actions[acting, 0]
        if (first := first_illegal(legal_actions(taken), action_space, actions)) is not None:
            row = int(acting[first])
            raise rows.error(
                row, "actions", f"is {rows.actions[row]!s:.120}, which the mask of its observation forbids"
            )

    def as_rollout(self, rows: EpisodeRows, pipeline: Pipeline | None) -> Rollout:
        """Return rows as a rollout of one lane, with the observations that a replay buffer stores."""
        rollout = rows.as_rollout(self._distribution)
        if pipeline is not None:
            rollout.pipeline = pipeline
            if pipeline.num_stored:
                stored = _stored(rows, self._distribution, pipeline)
                rollout.columns["stored"] = map_tree(lambda leaf: leaf[:, None], stored)
        return rollout

    @interruptible
    def measure(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline with the statistics of all steps."""
        measured: list[Mapping[str, State]] = []
        for rows in self.parts():
            rollout = self.as_rollout(rows, pipeline)
            transforms = RowTransforms(pipeline, rollout.actions[0, 0], 1)
            measured.append(
                transforms.measure(
                    rollout.obs,
                    rollout.for_replay().obs,
                    rollout.rewards,
                    rollout.valid,
                    rollout.over,
                    continues=False,
                )
            )
        return pipeline.merged(measured)


@interruptible
def load_module_data(
    rows: ModuleRows,
    pipeline: Pipeline | None,
    make_buffer: Callable[[int, bool], ReplayBuffer],
    *,
    add_columns: AddColumns | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> ModuleData:
    """Return recorded episodes, read into buffers.

    Args:
        rows: The rows of the module.
        pipeline: Its transforms with their statistics, or `None`.
        make_buffer: Function that returns an empty buffer for so many rows; the flag says whether for validation.
        add_columns: Function that returns more columns of each rollout, which batches then have; `None` adds none.
        validation_fraction: Fraction of the episodes that are put into another buffer.
        seed: Seed of the choice of these episodes.

    Raises:
        DataError: There are no episodes for learning or for validation, or an entry does not fit.
    """
    counts, known = _Counts(), (rows.source.num_rows or {}).get(rows._module_id)
    if known is None:
        for part in rows.parts():
            counts.add(part)
        known, counts = counts.num_rows, _Counts()
    if not known:
        raise DataError(f"offline_data: {rows.source.name} holds no episodes of module {rows._module_id!r}.")
    buffers = {kind: make_buffer(known, kind) for kind in ((False, True) if validation_fraction else (False,))}
    offset = float(np.random.default_rng(seed).random())
    for part in rows.parts():
        for is_validation, chosen in _split(part, counts.num_episodes, validation_fraction, offset):
            rollout = rows.as_rollout(chosen, pipeline)
            if add_columns is not None:
                for name, column in add_columns(rollout.transformed()).items():
                    rollout[name] = column
            buffers[is_validation].add(rollout.for_replay())
        counts.add(part)
    _check_all_read(rows.source.name, known, counts, buffers, validation_fraction)
    if counts.num_jumps:
        log.warning(
            "offline_data: in %s, %s of %s steps are followed by a step that begins in another observation than their "
            "'next_obs', and no flag ends an episode there: each of them counts as the last step of a truncated "
            "episode. Returns, frame stacks and memory reach no further. If the data has whole episodes, put their "
            "steps in order, and mark each end with 'terminated' or 'truncated'.",
            *(rows.source.name, f"{counts.num_jumps:,}", f"{counts.num_steps:,}"),
        )
    return ModuleData(
        buffers[False],
        buffers.get(True),
        counts.num_episodes,
        counts.num_steps,
        counts.sum_of_returns / counts.num_episodes,
        f"{counts.num_episodes} episodes, {counts.num_steps} steps, {counts.digest.hexdigest()[:16]}",
    )


def _check_all_read(
    name: str, known: int, counts: _Counts, buffers: Mapping[bool, ReplayBuffer], fraction: float
) -> None:
    """Refuse data that changed while it was read, and a split that leaves nothing.

    Raises:
        DataError: Rows are missing, or a buffer is empty.
    """
    if counts.num_rows != known:
        raise DataError(
            f"offline_data: {name} gave {known} rows when they were counted, and {counts.num_rows} when "
            "they were read: data must be the same each time, and must not be written while it is read."
        )
    for is_validation, buffer in buffers.items():
        if not len(buffer):
            what = "validation" if is_validation else "learning"
            raise DataError(
                f"offline_data: validation_fraction={fraction} leaves none of {counts.num_episodes} "
                f"episodes in {name} for {what}: change it."
            )


def _split(rows: EpisodeRows, num_before: int, fraction: float, offset: float) -> Iterator[tuple[bool, EpisodeRows]]:
    """Yield the episodes for learning, and those for validation, which are evenly spread over all episodes."""
    if not fraction:
        yield False, rows
        return
    numbers = num_before + np.arange(rows.num_episodes + 1)
    marks = np.floor(numbers * fraction + offset)
    is_validation = marks[1:] > marks[:-1]
    of_rows = is_validation[rows.episode_indices]
    for chosen in (False, True):
        if (is_validation == chosen).any():
            yield chosen, rows.take(of_rows == chosen)


def _stored(rows: EpisodeRows, distribution: ActionDistribution, pipeline: Pipeline) -> Tree:
    """Return observations after the last temporal transform, a tree of `[R, ...]`, for episodes from their start."""
    actions = rows.module_actions(distribution)
    starts, ends = rows.starts, np.flatnonzero(~rows.valid) + 1
    order = np.argsort(starts - ends, kind="stable")  # long episodes first, so that a block has similar lengths
    stored: Tree = None
    for block in np.array_split(order, -(-len(order) // _LANES)):
        lengths = (ends - starts)[block]
        transforms = RowTransforms(pipeline, actions[0], len(block))
        begins = np.ones(len(block), np.bool_)
        for t in range(int(lengths.max())):
            at = np.minimum(starts[block] + t, ends[block] - 1)
            transforms(map_tree(lambda leaf, at=at: leaf[at], rows.obs), begins)
            alive = t < lengths
            if stored is None:
                stored = map_tree(lambda leaf: np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype), transforms.stored)
            map_tree(
                lambda column, leaf, at=at, alive=alive: column.__setitem__(at[alive], leaf[alive]),
                stored,
                transforms.stored,
            )
            transforms.note_step(actions[at], rows.rewards[at], slice(None))
            begins = np.zeros(len(block), np.bool_)
    return stored


def returns_to_go(rollout: Rollout, gamma: float) -> dict[str, NDArray[Any]]:
    """Return the columns that say what followed each step of whole episodes in one lane.

    Args:
        rollout: Rollout `[T, 1]`, as the module learns from it.
        gamma: Discount per step.

    Returns:
        `returns`, float32 `[T, 1]`, the discounted sum of the rewards to the end of the episode;
        `bootstrap_discounts`, float32 `[T, 1]`, gamma to the power of the steps to the end where the episode was
        truncated, and 0 where it terminated; and `steps_to_end`, int32 `[T, 1]`, the number of these steps.
    """
    valid, ended = rollout.valid[:, 0], (rollout.terminated | rollout.truncated)[:, 0]
    size = len(valid)
    lasts = np.flatnonzero(ended)
    last_of_row = lasts[np.minimum(np.searchsorted(lasts, np.arange(size)), len(lasts) - 1)]
    steps = np.where(valid, last_of_row - np.arange(size) + 1, 0)
    returns = np.zeros(size)
    running = 0.0
    rewards = rollout.rewards[:, 0]
    for t in range(size - 1, -1, -1):
        running = float(rewards[t]) + (0.0 if ended[t] else gamma * running) if valid[t] else 0.0
        returns[t] = running
    discounts = np.where(valid & rollout.truncated[last_of_row, 0], float(gamma) ** steps, 0.0)
    return {
        "returns": returns.astype(np.float32)[:, None],
        "bootstrap_discounts": discounts.astype(np.float32)[:, None],
        "steps_to_end": steps.astype(np.int32)[:, None],
    }
