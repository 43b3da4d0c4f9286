"""A pipeline: the transforms of one module in order, with the spaces between them and their statistics."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray
from torch import Tensor

from corral.core.columns import describe
from corral.core.spaces import SUPPORTED_LEAVES, blank_array, module_observation_space, space_tree
from corral.core.tree import Tree, leaves, map_tree, named_leaves
from corral.errors import CheckpointError, ConfigError
from corral.modules.transforms.moments import merge_moments
from corral.modules.transforms.rewards import NormalizeRewards
from corral.modules.transforms.temporal import module_actions
from corral.modules.transforms.transform import State, TemporalTransform, Transform

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pipeline:
    """The transforms of one module. Pipelines are never changed: new statistics make a new pipeline.

    Attributes:
        transforms: The transforms; the first one sees what the env gave.
        spaces: Space of the observations that each transform receives, and last the space of the module's observations.
        state: Statistics by transform, for those that have any: `{"NormalizeObservations": {...}}`.
    """

    transforms: tuple[Transform, ...]
    spaces: tuple[Space[Any], ...]
    state: Mapping[str, State]

    @classmethod
    def build(
        cls, transforms: Sequence[Transform], space: Space[Any], action_space: Space[Any], *, gamma: float = 1.0
    ) -> Self | None:
        """Return the pipeline of transforms for observations of a space, or `None` if there are no transforms.

        Args:
            transforms: The transforms in order.
            space: Space of one observation of the env, see `module_observation_space`.
            action_space: Space of one action of the env.
            gamma: Discount for `NormalizeRewards`.

        Raises:
            ConfigError: A transform does not fit the space, or returns something else than it should.
        """
        if not transforms:
            return None
        bound, found, state = list[Transform](), [space], dict[str, State]()
        for name, given in zip(_names(transforms), transforms, strict=True):
            transform = given.with_gamma(gamma) if isinstance(given, NormalizeRewards) else given
            transform = transform.with_spaces(found[-1], action_space)
            if initial := transform.initial_state(found[-1]):
                state[name] = initial
                transform = transform.with_state(initial)
            _check_rewards(transform)
            found.append(_space_after(transform, found[-1], action_space))
            bound.append(transform)
        pipeline = cls(tuple(bound), tuple(found), state)
        pipeline._refuse_statistics_between()
        return pipeline

    def _refuse_statistics_between(self) -> None:
        """Refuse statistics of observations between two temporal transforms, because rollouts do not hold these."""
        is_after = False
        for name, transform in list(zip(self.names, self.transforms, strict=True))[: self.num_stored]:
            if is_after and transform.discount is None and name in self.state:
                raise ConfigError(
                    f"transforms: {name} stands between two transforms that look at earlier steps: put it before or "
                    "after both of them."
                )
            is_after = is_after or isinstance(transform, TemporalTransform)

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
    def discounts(self) -> dict[str, float]:
        """Discount of the returns that the statistics of a transform need, by transform, for those that need any."""
        pairs = zip(self.names, self.transforms, strict=True)
        return {name: each.discount for name, each in pairs if each.discount is not None}

    def only_changes_rewards(self, index: int) -> bool:
        """Return whether a transform leaves observations as they are, so that a policy does not need it."""
        cls = type(self.transforms[index])
        return cls.transform_obs is Transform.transform_obs and not issubclass(cls, TemporalTransform)

    # Statistics.

    @functools.cached_property
    def names(self) -> list[str]:
        """Name of each transform in `state`."""
        return _names(self.transforms)

    def with_state(self, state: Mapping[str, State]) -> Self:
        """Return the same pipeline with other statistics."""
        transforms = tuple(
            each.with_state(state[name]) if name in state else each
            for name, each in zip(self.names, self.transforms, strict=True)
        )
        return dataclasses.replace(self, transforms=transforms, state=dict(state))

    def with_gamma(self, gamma: float) -> Self:
        """Return the same pipeline with the algorithm's discount for transforms that have none of their own."""
        if all(each.discount in (None, gamma) for each in self.transforms):
            return self
        transforms = [
            each.with_gamma(gamma) if isinstance(each, NormalizeRewards) else each for each in self.transforms
        ]
        return dataclasses.replace(self, transforms=tuple(transforms))

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
                        f"transforms: the statistics of {name} do not fit: {key} is {forms[1]} "
                        f"there and {forms[0]} here. Give the transforms and the spaces with which they were measured."
                    )

    def merged(self, parts: Sequence[Mapping[str, State]]) -> Self:
        """Return the same pipeline with the statistics of fragments in addition to its own."""
        if not self.state or not parts:
            return self
        return self.with_state(
            {name: merge_moments([own, *(part[name] for part in parts)]) for name, own in self.state.items()}
        )

    @property
    def measures_env_obs(self) -> bool:
        """Whether a transform before a temporal one has statistics of observations."""
        before = list(zip(self.names, self.transforms, strict=True))[: self.num_stored]
        return any(name in self.state and each.discount is None for name, each in before)

    def measure(self, obs: Tree, stored: Tree, returns: Mapping[str, NDArray[np.float64]]) -> dict[str, State]:
        """Return the statistics of a fragment alone, by transform.

        Args:
            obs: Observations of the env in which actions were taken, a tree of `[B, ...]`; not needed unless
                `measures_env_obs`.
            stored: These observations as `to_store` returns them, a tree of `[B, ...]`, arrays or tensors.
            returns: Discounted sums of the rewards so far that each transform in `discounts` receives, float64 `[B]`.
        """
        found, before = dict[str, State](), obs
        for index, (name, transform) in enumerate(zip(self.names, self.transforms, strict=True)):
            before = stored if index == self.num_stored else before
            if name in self.state:
                found[name] = transform.measure(before, returns.get(name, np.zeros(0)))
            if found.keys() == self.state.keys():
                break
            if not isinstance(transform, TemporalTransform) and (index >= self.num_stored or self.measures_env_obs):
                is_tensor = isinstance(leaves(before)[0], Tensor)
                before = transform.transform_tensors(before) if is_tensor else self._pointwise(before, index, index + 1)
        return found

    # Rewards and observations.

    def rewards(self, rewards: NDArray[Any], *, until: str | None = None) -> NDArray[Any]:
        """Return rewards of any shape as learning sees them, or as the transform named `until` receives them."""
        for name, transform in zip(self.names, self.transforms, strict=True):
            if name == until:
                break
            rewards = transform.transform_rewards(rewards)
        return rewards

    @functools.cached_property
    def num_stored(self) -> int:
        """Number of transforms that are applied before observations are stored: up to the last temporal one."""
        return max((i + 1 for i, each in enumerate(self.transforms) if isinstance(each, TemporalTransform)), default=0)

    def initial_memories(self, num_envs: int) -> tuple[Tree, ...]:
        """Return the memory of each temporal transform, for N sub-envs in which no episode has begun."""
        return tuple(
            each.initial_memory(space, num_envs)
            for each, space in zip(self.transforms, self.spaces, strict=False)
            if isinstance(each, TemporalTransform)
        )

    def initial_states(self, num_rows: int, action: NDArray[Any]) -> dict[str, Any]:
        """Return what `to_store` needs where episodes begin, by argument, a tree of `[num_rows, ...]`.

        Args:
            num_rows: Number of rows.
            action: A module action of zeros.
        """
        return {
            "memories": self.initial_memories(num_rows),
            "begins": np.ones(num_rows, np.bool_),
            "actions": np.zeros((num_rows, *action.shape), action.dtype),
            "rewards": np.zeros(num_rows),
        }

    def example_rows(self, num_envs: int) -> Tree:
        """Return blank observations of the env, a tree of `[N, ...]`."""
        return map_tree(lambda leaf: blank_array(leaf, num_envs), space_tree(self.spaces[0]))

    def to_store(
        self,
        obs: Tree,
        memories: Sequence[Tree],
        begins: NDArray[np.bool_],
        actions: NDArray[Any] | None,
        rewards: NDArray[Any] | None,
    ) -> tuple[Tree, tuple[Tree, ...]]:
        """Return the observations of one row after the last temporal transform, and the memories for the next row.

        See `TemporalTransform.step` for the arguments.
        """
        found, rest = list[Tree](), iter(memories)
        for index, transform in enumerate(self.transforms[: self.num_stored]):
            if isinstance(transform, TemporalTransform):
                obs, memory = transform.step(obs, next(rest), begins, actions, rewards)
                obs = _as_space(transform, obs, self.spaces[index + 1])
                found.append(memory)
            else:
                obs = self._pointwise(obs, index, index + 1)
        return obs, tuple(found)

    def from_stored(self, obs: Tree) -> Tree:
        """Return observations as the module sees them, a tree of `[B, ...]`, for observations after `to_store`.

        Without temporal transforms, these are the observations of the env.
        """
        for transform, space in self._after_storing:
            obs = transform.transform_obs(obs)
            if space is not None:
                obs = _as_space(transform, obs, space)
        return obs

    @functools.cached_property
    def _after_storing(self) -> list[tuple[Transform, Space[Any] | None]]:
        """Transforms of observations after the last temporal one; with a space for what must be checked."""
        return [
            (transform, None if _is_built_in(transform) else self.spaces[index + 1])
            for index, transform in enumerate(self.transforms)
            if index >= self.num_stored and not self.only_changes_rewards(index)
        ]

    @property
    def has_tensor_form(self) -> bool:
        """Whether tensors can take the place of all arrays: the transforms are built in, and look at one step only."""
        return not self.num_stored and all(map(_is_built_in, self.transforms))

    def tensor_form(self, device: torch.device) -> Callable[[Tree], Tree]:
        """Return `from_stored` as a function of tensors on a device, to which statistics are copied here.

        Only for pipelines with `has_tensor_form`: of other transforms a class may change `transform_tensors` alone.
        """
        forms = [transform.tensor_form(device) for transform, _ in self._after_storing]
        return lambda obs: functools.reduce(lambda found, form: form(found), forms, obs)

    def tensors_from_stored(self, obs: Tree) -> Tree:
        """Return what `from_stored` returns, for tensors."""
        for transform in self.transforms[self.num_stored :]:
            obs = transform.transform_tensors(obs)
        return obs

    def columns_from_stored(self, obs: Tree) -> Tree:
        """Return what `from_stored` returns, for columns `[T, N, ...]`."""
        shape = next(leaf for _, leaf in named_leaves(obs)).shape[:2]
        rows = self.from_stored(map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), obs))
        return map_tree(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), rows)

    def _pointwise(self, obs: Tree, start: int, stop: int) -> Tree:
        for transform, space in zip(self.transforms[start:stop], self.spaces[start + 1 :], strict=False):
            obs = _as_space(transform, transform.transform_obs(obs), space)
        return obs


def _names(transforms: Sequence[Transform]) -> list[str]:
    """Return a name for each transform: its type, with a number from the second one of a type on."""
    found = list[str]()
    for transform in transforms:
        name = type(transform).__name__
        number = 1 + sum(type(other) is type(transform) for other in transforms[: len(found)])
        found.append(name if number == 1 else f"{name}_{number}")
    return found


def _is_built_in(transform: Transform) -> bool:
    return type(transform).__module__.startswith("corral.modules.transforms.")


def _as_space(transform: Transform, obs: Tree, space: Space[Any]) -> Tree:
    """Return observations `[B, ...]` with the dtypes of a space, after checking their shapes.

    Raises:
        ConfigError: The nesting or a shape differs.
    """
    if _is_built_in(transform):
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


def _space_after(transform: Transform, space: Space[Any], action_space: Space[Any]) -> Space[Any]:
    """Return the space of the observations that a transform returns.

    Raises:
        ConfigError: The transform raised, or what it returned does not fit its space.
    """
    is_temporal, given = isinstance(transform, TemporalTransform), transform.observation_space(space)
    if given is None and not is_temporal and type(transform).transform_obs is Transform.transform_obs:
        if type(transform).transform_rewards is Transform.transform_rewards:
            raise ConfigError(
                f"transforms: {type(transform).__name__} defines neither transform_obs(obs) nor "
                "transform_rewards(rewards), and has no effect: define one of them."
            )
        return space
    if given is not None:
        given = module_observation_space(given)
        if _is_built_in(transform):
            return given
    example, call = _example(space), f"{type(transform).__name__}.{'step' if is_temporal else 'transform_obs'}"
    try:
        found = _called_twice(
            lambda obs: _try(transform, obs, space, action_space), example, call, "observations", "new arrays"
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transforms: {call} raised {type(error).__name__} for two observations of {space}: {error}"
        ) from error
    for path, leaf in named_leaves(found, "its result"):
        if np.ndim(leaf) < 1 or len(leaf) != 2 or np.asarray(leaf).dtype.kind not in "biuf":
            raise ConfigError(
                f"transforms: {call} must return arrays of numbers [B, ...] for B observations, and for B = 2 {path} "
                f"is {describe(np.asarray(leaf))}."
            )
    if given is not None:
        _as_space(transform, found, given)
        return given
    known = {path: (leaf, seen) for (path, leaf), (_, seen) in zip(
        named_leaves(space_tree(space)), named_leaves(example), strict=True
    )}  # fmt: skip
    return _space_of(found, "", known)


def _check_rewards(transform: Transform) -> None:
    """Check the method for rewards on some of them.

    Raises:
        ConfigError: The method raised, or it is no function of each reward alone.
    """
    if _is_built_in(transform) or type(transform).transform_rewards is Transform.transform_rewards:
        return
    call = f"{type(transform).__name__}.transform_rewards"
    rewards = np.array([[-1.0, 0.5, 2.0], [0.0, 3.0, -0.25]], np.float32)
    try:
        found = np.asarray(_called_twice(transform.transform_rewards, rewards, call, "rewards", "a new array"))
        first = np.asarray(transform.transform_rewards(rewards[:1].copy()))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transforms: {call} raised {type(error).__name__} for rewards {describe(rewards)}: {error}"
        ) from error
    if found.shape != rewards.shape or found.dtype.kind not in "biuf":
        raise ConfigError(
            f"transforms: {call} was given rewards {describe(rewards)} and returned {describe(found)}: return an array "
            "of numbers of the same shape."
        )
    if first.shape != (1, 3) or not np.allclose(first, found[:1], equal_nan=True):
        raise ConfigError(
            f"transforms: {call} must transform each reward alone, because each batch holds other rewards. It returned "
            "other values for the same rewards among others."
        )


def _called_twice(function: Callable[[Tree], Tree], given: Tree, call: str, what: str, remedy: str) -> Tree:
    """Return what a function returns for arrays, after checking that it leaves them as they are and keeps nothing.

    Raises:
        ConfigError: It changed the arrays, or returned something else when it was called again.
    """
    copied = map_tree(np.copy, given)
    found = map_tree(np.copy, function(copied))
    if not _are_equal(copied, given):
        raise ConfigError(
            f"transforms: {call} changed its argument, the {what}, which other code reads: return {remedy}."
        )
    if not _are_equal(function(map_tree(np.copy, given)), found):
        raise ConfigError(
            f"transforms: {call} returned other values for the same {what} when it was called again. While learning it "
            "is applied again to the samples: it must keep nothing between two calls, and draw no random numbers."
        )
    return found


def _are_equal(one: Tree, other: Tree) -> bool:
    pairs = dict(named_leaves(one)), dict(named_leaves(other))
    return pairs[0].keys() == pairs[1].keys() and all(
        np.array_equal(leaf, pairs[1][name], equal_nan=np.asarray(leaf).dtype.kind == "f")
        for name, leaf in pairs[0].items()
    )


def _try(transform: Transform, obs: Tree, space: Space[Any], action_space: Space[Any]) -> Tree:
    """Return what a transform makes of two observations, which begin episodes."""
    if not isinstance(transform, TemporalTransform):
        return transform.transform_obs(obs)
    actions = module_actions(action_space)
    zeros = np.zeros((2, *(actions.shape or ())), actions.dtype)
    return transform.step(obs, transform.initial_memory(space, 2), np.ones(2, np.bool_), zeros, np.zeros(2))[0]


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
