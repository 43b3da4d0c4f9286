"""A pipeline: the transforms of one module in order, with the spaces between them and their statistics."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.spaces import SUPPORTED_LEAVES, module_observation_space, space_tree
from corral.core.tree import Tree, map_tree, named_leaves
from corral.errors import CheckpointError, ConfigError
from corral.transforms.moments import merge_moments
from corral.transforms.rewards import NormalizeRewards
from corral.transforms.transform import State, TemporalTransform, Transform

Finals = dict[tuple[int, int], Tree]
"""By (row, sub-env), final observations that a same-step autoreset overwrote in the columns."""


@dataclass(frozen=True)
class History:
    """What the temporal transforms of a pipeline need besides the columns of a rollout.

    Attributes:
        memories: Memory of each temporal transform before row 0.
        begins: Where episodes begin, bool `[T + 1, N]`.
        actions: Module actions of the steps before each row, `[T + 1, N, ...]`; `None` if no transform reads them.
        rewards: Rewards of these steps, `[T + 1, N]`, or `None`.
    """

    memories: tuple[Tree, ...]
    begins: NDArray[np.bool_]
    actions: NDArray[Any] | None = None
    rewards: NDArray[Any] | None = None


@dataclass(frozen=True)
class Pipeline:
    """The transforms of one module. Pipelines are never changed: new statistics make a new pipeline.

    Attributes:
        transforms: The transforms; the first one sees what the env gave.
        spaces: Space of the observations that each transform receives, and last the space of the module's observations.
        state: Statistics by transform, for those that have any: `{"0_NormalizeObservations": {...}}`.
    """

    transforms: tuple[Transform, ...]
    spaces: tuple[Space[Any], ...]
    state: Mapping[str, State]

    @classmethod
    def build(cls, transforms: Sequence[Transform], space: Space[Any], *, gamma: float = 1.0) -> Self | None:
        """Return the pipeline of transforms for observations of a space, or `None` if there are no transforms.

        Args:
            transforms: The transforms in order.
            space: Space of one observation of the env, see `module_observation_space`.
            gamma: Discount for `NormalizeRewards`.

        Raises:
            ConfigError: A transform does not fit the space, or returns something else than it should.
        """
        if not transforms:
            return None
        bound, found, state = list[Transform](), [space], dict[str, State]()
        for index, given in enumerate(transforms):
            transform = given.with_gamma(gamma) if isinstance(given, NormalizeRewards) else given
            transform = transform.with_space(found[-1])
            if initial := transform.initial_state(found[-1]):
                state[_name(index, transform)] = initial
                transform = transform.with_state(initial)
            found.append(_space_after(transform, found[-1]))
            bound.append(transform)
        return cls(tuple(bound), tuple(found), state)

    @property
    def observation_space(self) -> Space[Any]:
        """Space of the observations that the first transform receives."""
        return self.spaces[0]

    @property
    def module_space(self) -> Space[Any]:
        """Space of the observations that the module receives."""
        return self.spaces[-1]

    @property
    def is_temporal(self) -> bool:
        """Whether a transform needs earlier observations."""
        return any(isinstance(transform, TemporalTransform) for transform in self.transforms)

    @property
    def needs_actions(self) -> bool:
        """Whether a transform needs the actions and rewards of earlier steps."""
        return any(
            isinstance(transform, TemporalTransform) and transform.needs_actions for transform in self.transforms
        )

    @property
    def changes_rewards(self) -> bool:
        """Whether a transform changes rewards."""
        return any(type(each).transform_rewards is not Transform.transform_rewards for each in self.transforms)

    @property
    def discounts(self) -> set[float]:
        """Discounts of the returns that the statistics of transforms need."""
        return {each.discount for each in self.transforms if each.discount is not None}

    def only_changes_rewards(self, index: int) -> bool:
        """Return whether a transform leaves observations as they are, so that a policy needs it not."""
        cls = type(self.transforms[index])
        return cls.transform_obs is Transform.transform_obs and not issubclass(cls, TemporalTransform)

    # Statistics.

    @property
    def state_names(self) -> dict[int, str]:
        """Names of the transforms in `state`, by their indices."""
        names = {index: _name(index, each) for index, each in enumerate(self.transforms)}
        return {index: name for index, name in names.items() if name in self.state}

    def state_of(self, index: int) -> State:
        """Return the statistics of a transform; empty if it has none."""
        return self.state.get(_name(index, self.transforms[index]), {})

    def with_state(self, state: Mapping[str, State]) -> Self:
        """Return the same pipeline with other statistics."""
        transforms = tuple(
            each.with_state(state[_name(index, each)]) if _name(index, each) in state else each
            for index, each in enumerate(self.transforms)
        )
        return dataclasses.replace(self, transforms=transforms, state=dict(state))

    def check_state(self, state: Mapping[str, State]) -> None:
        """Check that statistics are of these transforms and this space.

        Raises:
            CheckpointError: They are not; the first one that differs is named.
        """
        for name in (*self.state, *state):
            here, there = self.state.get(name, {}), state.get(name, {})
            for key in (*here, *there):
                forms = [describe(np.asarray(part[key])) if key in part else "missing" for part in (here, there)]
                if forms[0] != forms[1]:
                    raise CheckpointError(
                        f"transforms: the statistics of {name.partition('_')[2]} do not fit: {key} is {forms[1]} "
                        f"there and {forms[0]} here. Give the transforms and the spaces with which they were measured."
                    )

    def merged(self, parts: Sequence[Mapping[str, State]]) -> Self:
        """Return the same pipeline with the statistics of fragments in addition to its own."""
        if not self.state or not parts:
            return self
        return self.with_state(
            {name: merge_moments([own, *(part[name] for part in parts)]) for name, own in self.state.items()}
        )

    def measure(
        self, obs: Tree, finals: Finals, history: History | None, valid: NDArray[np.bool_], returns: Mapping[float, Any]
    ) -> dict[str, State]:
        """Return the statistics of a fragment alone, by transform.

        Args:
            obs: Observations of the env, a tree of `[T + 1, N, ...]`.
            finals: Final observations.
            history: See `History`; `None` if no transform is temporal.
            valid: Which steps count, bool `[T, N]`.
            returns: Discounted sums of the rewards so far, float64 `[T, N]`, by discount.
        """
        found = {}
        for index, transform in enumerate(self.transforms):
            if (name := _name(index, transform)) in self.state:
                seen, _ = self._run(obs, {}, history, 0, index)
                steps = map_tree(lambda leaf: leaf[:-1][valid], seen)
                of_returns = np.zeros(0) if transform.discount is None else returns[transform.discount][valid]
                found[name] = transform.measure(steps, of_returns)
        return found

    # Rows, and columns.

    def rewards(self, rewards: NDArray[Any]) -> NDArray[Any]:
        """Return rewards of any shape as learning sees them."""
        for transform in self.transforms:
            rewards = transform.transform_rewards(rewards)
        return rewards

    def batch(self, obs: Tree) -> Tree:
        """Return observations of any pipeline without temporal transforms, a tree of `[B, ...]`, as the module sees."""
        return self._pointwise(obs, 0, len(self.transforms))

    def after_replay(self, obs: Tree) -> Tree:
        """Return observations `[B, ...]` from a replay buffer, which holds what `for_replay` returned."""
        return self._pointwise(obs, self.num_stored, len(self.transforms))

    @property
    def num_stored(self) -> int:
        """Number of transforms that are applied before observations are stored: up to the last temporal one."""
        return max((i + 1 for i, each in enumerate(self.transforms) if isinstance(each, TemporalTransform)), default=0)

    def for_module(self, obs: Tree, finals: Finals, history: History | None) -> tuple[Tree, Finals]:
        """Return the observations `[T + 1, N, ...]` of a rollout as the module sees them, and the final ones."""
        return self._run(obs, finals, history, 0, len(self.transforms))

    def for_replay(self, obs: Tree, finals: Finals, history: History | None) -> tuple[Tree, Finals]:
        """Return the observations `[T + 1, N, ...]` of a rollout as a replay buffer stores them."""
        return self._run(obs, finals, history, 0, self.num_stored)

    def initial_memories(self, action: NDArray[Any], num_envs: int) -> tuple[Tree, ...]:
        """Return the memory of each temporal transform, for N sub-envs in which no episode has begun."""
        return tuple(
            each.initial_memory(space, action, num_envs)
            for each, space in zip(self.transforms, self.spaces, strict=False)
            if isinstance(each, TemporalTransform)
        )

    def step(
        self,
        obs: Tree,
        memories: Sequence[Tree],
        begins: NDArray[np.bool_],
        actions: NDArray[Any] | None,
        rewards: NDArray[Any] | None,
    ) -> tuple[Tree, tuple[Tree, ...]]:
        """Return the observations of one row as the module sees them, and the memories for the next row.

        See `TemporalTransform.step` for the arguments.
        """
        found, rest = list[Tree](), iter(memories)
        for transform, space in zip(self.transforms, self.spaces[1:], strict=True):
            if isinstance(transform, TemporalTransform):
                obs, memory = transform.step(obs, next(rest), begins, actions, rewards)
                found.append(memory)
            else:
                obs = _as_space(transform, transform.transform_obs(obs), space)
        return obs, tuple(found)

    def _pointwise(self, obs: Tree, start: int, stop: int) -> Tree:
        for transform, space in zip(self.transforms[start:stop], self.spaces[start + 1 :], strict=False):
            obs = _as_space(transform, transform.transform_obs(obs), space)
        return obs

    def _run(self, obs: Tree, finals: Finals, history: History | None, start: int, stop: int) -> tuple[Tree, Finals]:
        """Return columns and final observations after the transforms `start` to `stop - 1`."""
        num_temporal = 0
        for index in range(start, stop):
            transform, space = self.transforms[index], self.spaces[index + 1]
            if isinstance(transform, TemporalTransform):
                assert history is not None
                memory = history.memories[num_temporal]
                num_temporal += 1
                obs, finals = _over_time(transform, space_tree(space), obs, finals, memory, history)
            else:
                obs, finals = _over_rows(transform, space, obs, finals)
        return obs, finals


def _name(index: int, transform: Transform) -> str:
    return f"{index}_{type(transform).__name__}"


def _over_rows(transform: Transform, space: Space[Any], obs: Tree, finals: Finals) -> tuple[Tree, Finals]:
    """Apply a pointwise transform to columns `[T + 1, N, ...]` and final observations."""
    if type(transform).transform_obs is Transform.transform_obs:
        return obs, finals
    first = next(leaf for _, leaf in named_leaves(obs))
    flat = map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), obs)
    flat = _as_space(transform, transform.transform_obs(flat), space)
    if finals:
        stacked = map_tree(lambda *leaf: np.stack(leaf), *finals.values())
        done = _as_space(transform, transform.transform_obs(stacked), space)
        finals = {key: map_tree(lambda leaf, i=i: leaf[i], done) for i, key in enumerate(finals)}
    return map_tree(lambda leaf: leaf.reshape(*first.shape[:2], *leaf.shape[1:]), flat), finals


def _over_time(
    transform: TemporalTransform, space: Tree, obs: Tree, finals: Finals, memory: Tree, history: History
) -> tuple[Tree, Finals]:
    """Apply a temporal transform to columns `[T + 1, N, ...]` and final observations, row after row."""
    num_rows, num_envs = history.begins.shape
    columns = map_tree(lambda leaf: np.empty((num_rows, num_envs, *leaf.shape), leaf.dtype), space)
    changed, by_row = Finals(), dict[int, list[int]]()
    for row, i in finals:
        by_row.setdefault(row, []).append(i)
    for t in range(num_rows):
        row = map_tree(lambda leaf, t=t: leaf[t], obs)
        steps = [None if part is None else part[t] for part in (history.actions, history.rewards)]
        for i in by_row.get(t - 1, ()):
            last = map_tree(np.copy, row)
            map_tree(lambda leaf, final, i=i: leaf.__setitem__(i, final), last, finals[t - 1, i])
            found, _ = transform.step(last, memory, np.zeros(num_envs, np.bool_), *steps)
            changed[t - 1, i] = map_tree(lambda leaf, i=i: leaf[i], found)
        found, memory = transform.step(row, memory, history.begins[t], *steps)
        map_tree(lambda column, leaf, t=t: column.__setitem__(t, leaf), columns, found)
    return columns, {key: changed[key] for key in finals}


def _as_space(transform: Transform, obs: Tree, space: Space[Any]) -> Tree:
    """Return observations `[B, ...]` with the dtypes of a space, after checking their shapes.

    Raises:
        ConfigError: The nesting or a shape differs.
    """
    if type(transform).__module__.startswith("corral.transforms."):
        return obs
    try:
        return map_tree(lambda leaf, got: _as_leaf(transform, leaf, got), space_tree(space), obs)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"transforms: {type(transform).__name__} returned observations that are nested differently than its space "
            f"{space}: {error!r}. Return the same parts each time."
        ) from error


def _as_leaf(transform: Transform, space: Any, got: Any) -> NDArray[Any]:
    array: NDArray[Any] = np.asarray(got)
    if array.shape[1:] != space.shape:
        raise ConfigError(
            f"transforms: {type(transform).__name__} returned {describe(array)} for {len(array)} observations, and its "
            f"space is {space}: return one entry of shape {list(space.shape)} for each observation."
        )
    return array.astype(space.dtype, copy=False)


# Spaces.


def _space_after(transform: Transform, space: Space[Any]) -> Space[Any]:
    """Return the space of the observations that a transform returns.

    Raises:
        ConfigError: The transform raised, or what it returned does not fit its space.
    """
    name, given = type(transform).__name__, transform.observation_space(space)
    if given is None and (
        isinstance(transform, TemporalTransform) or type(transform).transform_obs is Transform.transform_obs
    ):
        return space
    if given is not None:
        given = module_observation_space(given)
        if isinstance(transform, TemporalTransform) or type(transform).__module__.startswith("corral.transforms."):
            return given
    example = _example(space)
    try:
        found = transform.transform_obs(map_tree(np.copy, example))
    except Exception as error:
        raise ConfigError(
            f"transforms: {name}.transform_obs raised {type(error).__name__} for two observations of {space}: {error}"
        ) from error
    for path, leaf in named_leaves(found, "its result"):
        if np.ndim(leaf) < 1 or len(leaf) != 2 or np.asarray(leaf).dtype.kind not in "biuf":
            raise ConfigError(
                f"transforms: {name}.transform_obs must return arrays of numbers [B, ...] for B observations, and for "
                f"B = 2 {path} is {describe(np.asarray(leaf))}."
            )
    if given is not None:
        _as_space(transform, found, given)
        return given
    known = {path: (leaf, seen) for (path, leaf), (_, seen) in zip(
        named_leaves(space_tree(space)), named_leaves(example), strict=True
    )}  # fmt: skip
    return _space_of(found, "", known)


def _space_of(found: Tree, path: str, known: Mapping[str, tuple[Any, Any]]) -> Space[Any]:
    """Return the space of example observations; leaves that are as in the env's observations keep their spaces."""
    if isinstance(found, dict):
        return spaces.Dict(
            {key: _space_of(part, f"{path}/{key}" if path else str(key), known) for key, part in found.items()}
        )
    if isinstance(found, tuple):
        return spaces.Tuple([_space_of(part, f"{path}/{i}" if path else str(i), known) for i, part in enumerate(found)])
    array = np.asarray(found)
    if path in known and array.dtype == known[path][1].dtype and np.array_equal(array, known[path][1]):
        kept: Space[Any] = known[path][0]
        return kept
    if array.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, array.shape[1:], np.float32)
    if array.dtype.kind == "b":
        return spaces.MultiBinary(array.shape[1:])
    bounds = np.iinfo(array.dtype)
    return spaces.Box(bounds.min, bounds.max, array.shape[1:], array.dtype.type)


def _example(space: Space[Any]) -> Tree:
    """Return two observations of a space, the same at every call, as a tree of arrays `[2, ...]`."""
    space = copy.deepcopy(space)  # drawing changes the generator of a space
    space.seed(0)
    tree = space_tree(space)
    assert all(isinstance(leaf, SUPPORTED_LEAVES) for _, leaf in named_leaves(tree))
    return map_tree(
        lambda leaf, *draws: np.stack([np.asarray(draw, leaf.dtype) for draw in draws]),
        tree,
        space.sample(),
        space.sample(),
    )
