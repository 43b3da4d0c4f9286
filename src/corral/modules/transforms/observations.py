"""Transforms of single observations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import Field

from corral.core.action_masks import MASK_KEY, OBS_KEY, has_mask_key, without_mask
from corral.core.settings import PositiveFloat
from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree, named_leaves
from corral.errors import ConfigError
from corral.modules.transforms.moments import mean_and_variance, moments_of, no_moments
from corral.modules.transforms.transform import State, Transform, set_checked

# Numbers in a row of observations up to which broadcasting costs more than the arithmetic.
SMALL_ROW = 4096

Number = Annotated[float, Field(allow_inf_nan=True)]  # an infinite bound clips on one side only


@dataclass(frozen=True)
class NormalizeObservations(Transform):
    """Subtracts the running mean of the observations, divides by their deviation, and clips the result.

    Floating-point Boxes are normalised, each number with statistics of its own; with `integers`, so are Boxes of
    integers with at most one axis. Images of integers, action masks and other leaves stay as they are. The statistics
    count each observation in which an action was taken once, over all runners and sub-envs. They are fixed while a
    fragment is sampled, and before the first fragment mean 0 and deviation 1. Evaluation uses them and does not change
    them.

    Attributes:
        clip: Largest absolute value of the result; `None` does not clip.
        epsilon: Number that is added to the variance.
        center: Whether the mean is subtracted.
        scale: Whether the result is divided by the deviation.
        integers: Whether Boxes of integers with at most one axis, such as counts, are normalised too.
    """

    clip: PositiveFloat | None = 10.0
    epsilon: PositiveFloat = 1e-8
    center: bool = True
    scale: bool = True
    integers: bool = False
    _state: State = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute what `transform_obs` needs from the statistics.

        Raises:
            ConfigError: A setting is out of bounds.
        """
        set_checked(self)
        scales = {}
        for key in self._state:
            if key.startswith("mean/"):
                name = key.removeprefix("mean/")
                mean, variance = mean_and_variance(self._state, name)
                scale = 1 / np.sqrt(variance + self.epsilon) if self.scale else np.ones_like(variance)
                mean = mean if self.center else np.zeros_like(mean)
                scales[name] = mean.astype(np.float32), scale.astype(np.float32)
        object.__setattr__(self, "_scales", scales)
        object.__setattr__(self, "_tiles", {})
        if self.clip is not None:  # arrays, because numbers take longer
            object.__setattr__(self, "_limits", (np.array(-self.clip, np.float32), np.array(self.clip, np.float32)))

    def __reduce__(self) -> Any:
        """Travel without what is computed from the statistics: each rollout carries its transforms."""
        return type(self), (self.clip, self.epsilon, self.center, self.scale, self.integers, self._state)

    def initial_state(self, space: spaces.Space[Any]) -> State:
        """Return the statistics of no observations.

        Raises:
            ConfigError: The space has nothing that is normalised.
        """
        shapes = {name: leaf.shape for name, leaf in named_leaves(space_tree(space)) if self._normalizes(leaf, name)}
        if not shapes:
            remedy = "leave the transform out" if self.integers else "set integers=True for Boxes of integers"
            raise ConfigError(
                f"NormalizeObservations: {space} has no floating-point Box, and nothing else is normalised: {remedy}."
            )
        return no_moments(shapes)

    def _normalizes(self, leaf: Any, name: str) -> bool:
        """Return whether a leaf is normalised, given its path."""
        is_integer = isinstance(leaf, spaces.Box) and leaf.dtype.kind in "iu" and len(leaf.shape) <= 1
        return name != MASK_KEY and (_is_float(leaf) or (self.integers and is_integer))

    def with_state(self, state: State) -> Self:
        return dataclasses.replace(self, _state=state)

    def measure(self, obs: Tree, returns: NDArray[np.float64]) -> State:
        """Return the statistics of observations, a tree of `[B, ...]`."""
        return moments_of({name: leaf for name, leaf in named_leaves(obs) if name in self._scales})  # type: ignore[attr-defined]

    def observation_space(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        """Return the space, with other bounds where observations are normalised."""
        bound = math.inf if self.clip is None else self.clip

        def changed(name: str, leaf: Any) -> Any:
            return spaces.Box(-bound, bound, leaf.shape, np.float32) if self._normalizes(leaf, name) else leaf

        return _map_boxes(space, changed)

    def transform_obs(self, obs: Tree) -> Tree:
        """Return normalised observations, float32, a tree of `[B, ...]`."""
        scales: dict[str, Any] = self._scales  # type: ignore[attr-defined]
        if isinstance(obs, np.ndarray):
            return self._normalized(obs, "")
        return _map_named(lambda name, leaf: self._normalized(leaf, name) if name in scales else leaf, obs)

    def transform_tensors(self, obs: Tree) -> Tree:
        return self.tensor_form(leaves(obs)[0].device)(obs)

    def tensor_form(self, device: torch.device) -> Callable[[Tree], Tree]:
        """Return `transform_tensors` for tensors on a device, to which mean and scale are copied here."""
        scales = {
            name: [torch.as_tensor(part, device=device) for part in pair]
            for name, pair in self._scales.items()  # type: ignore[attr-defined]
        }

        def normalize(name: str, leaf: torch.Tensor) -> torch.Tensor:
            return self._normalized_tensor(leaf, *scales[name]) if name in scales else leaf

        return lambda obs: _map_named(normalize, obs)

    def _normalized(self, leaf: NDArray[Any], name: str) -> NDArray[Any]:
        mean, scale = self._rows(name, len(leaf)) if leaf.size <= SMALL_ROW else self._scales[name]  # type: ignore[attr-defined]
        found: NDArray[Any] = leaf - mean if leaf.dtype.kind == "f" else np.subtract(leaf, mean, dtype=np.float32)
        found *= scale
        if self.clip is not None:
            found.clip(*self._limits, out=found)  # type: ignore[attr-defined]
        return found

    def _rows(self, name: str, size: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return mean and scale, repeated for a row of sub-envs: NumPy broadcasts short vectors slowly."""
        tiles: dict[tuple[str, int], Any] = self._tiles  # type: ignore[attr-defined]
        if (pair := tiles.get((name, size))) is None:
            pair = tiles[name, size] = tuple(np.stack([part] * size) for part in self._scales[name])  # type: ignore[attr-defined]
        return pair

    def _normalized_tensor(self, leaf: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        found = (leaf - mean) * scale
        return found if self.clip is None else found.clamp(-self.clip, self.clip)


@dataclass(frozen=True)
class ClipObservations(Transform):
    """Clips floating-point Boxes to an interval.

    Attributes:
        low: Smallest value.
        high: Largest value.
    """

    low: Number = -10.0
    high: Number = 10.0

    def __post_init__(self) -> None:
        """Refuse an empty interval.

        Raises:
            ConfigError: `low` is not below `high`, or one of them is no number.
        """
        set_checked(self)
        if not self.low < self.high:
            raise ConfigError(f"transforms: ClipObservations: low={self.low} must be below high={self.high}.")

    def observation_space(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        """Return the space with narrower bounds."""

        def clipped(name: str, leaf: Any) -> Any:
            if not _is_float(leaf):
                return leaf
            low, high = (np.clip(bound, self.low, self.high).astype(leaf.dtype) for bound in (leaf.low, leaf.high))
            return spaces.Box(low, high, leaf.shape, leaf.dtype.type)

        return _map_boxes(space, clipped)

    def transform_obs(self, obs: Tree) -> Tree:
        return map_tree(lambda leaf: leaf.clip(self.low, self.high) if leaf.dtype.kind == "f" else leaf, obs)

    def transform_tensors(self, obs: Tree) -> Tree:
        return map_tree(lambda leaf: leaf.clip(self.low, self.high) if leaf.is_floating_point() else leaf, obs)


@dataclass(frozen=True)
class FlattenObservations(Transform):
    """Joins all parts of an observation into one float32 vector.

    Dict and Tuple observations come in the order of their space; Discrete and MultiDiscrete parts become one-hot
    vectors. An action mask, under the key `action_mask`, stays, and the vector is under `observations`.

    Attributes:
        left_out: Keys of a Dict observation that the vector does not hold. They may have spaces that no network reads,
            such as `gymnasium.spaces.Text`: episodes then hold 0 in their place.
    """

    left_out: tuple[str, ...] = ()
    _space: spaces.Space[Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse keys that are no strings.

        Raises:
            ConfigError: `left_out` is no list of strings.
        """
        set_checked(self)

    def with_spaces(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Self:
        """Return the transform for observations of a space.

        Raises:
            ConfigError: A key to leave out is not in the space, or no other key is.
        """
        keys = set(observation_space.spaces) - {MASK_KEY} if isinstance(observation_space, spaces.Dict) else set()
        if self.left_out and not set(self.left_out) < keys:
            raise ConfigError(f"FlattenObservations: left_out={self.left_out} must be some of the keys {sorted(keys)}.")
        return dataclasses.replace(self, _space=self._kept(without_mask(observation_space)))

    def _kept(self, parts: Any) -> Any:
        """Return a space, or observations, without the keys that are left out."""
        if not self.left_out:
            return parts
        kept = {key: part for key, part in parts.items() if key not in self.left_out}
        return spaces.Dict(kept) if isinstance(parts, spaces.Dict) else kept

    def observation_space(self, space: spaces.Space[Any]) -> spaces.Space[Any]:
        """Return a float32 Box with one axis, next to an action mask if there is one."""
        if has_mask_key(space):
            flat = self.observation_space(without_mask(space))
            return spaces.Dict({MASK_KEY: space[MASK_KEY], OBS_KEY: flat})  # type: ignore[index]
        parts = [_flat_bounds(leaf) for leaf in leaves(space_tree(self._kept(space)))]
        low, high = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return spaces.Box(low, high, low.shape, np.float32)

    def transform_obs(self, obs: Tree) -> Tree:
        """Return vectors, float32 `[B, D]`."""
        if has_mask_key(obs):
            return {MASK_KEY: obs[MASK_KEY], OBS_KEY: self.transform_obs(_without_mask(obs))}
        return np.concatenate([np.asarray(part, np.float32) for part in self._parts(obs, np.eye)], -1)

    def transform_tensors(self, obs: Tree) -> Tree:
        if has_mask_key(obs):
            return {MASK_KEY: obs[MASK_KEY], OBS_KEY: self.transform_tensors(_without_mask(obs))}
        eye = functools.partial(torch.eye, device=leaves(obs)[0].device)
        return torch.cat([part.float() for part in self._parts(obs, eye)], -1)

    def _parts(self, obs: Tree, eye: Callable[[int], Any]) -> list[Any]:
        """Return the parts `[B, d]` of observations, arrays or tensors."""
        found: list[Any] = []
        wanted = space_tree(self._space)  # type: ignore[arg-type]
        map_tree(lambda space, leaf: found.extend(_flat_parts(space, leaf, eye)), wanted, self._kept(obs))
        return found


def _without_mask(obs: Any) -> dict[str, Any]:
    return {key: part for key, part in obs.items() if key != MASK_KEY}


def _flat_parts(space: spaces.Space[Any], leaf: Any, eye: Callable[[int], Any]) -> list[Any]:
    flat = leaf.reshape(leaf.shape[0], -1)
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return [flat]
    # Torch takes uint8 as a mask, and other small dtypes not at all.
    places = flat.long() if isinstance(flat, torch.Tensor) else flat.astype(np.int64)
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).tolist()
    starts = np.ravel(space.start).tolist()
    return [eye(size)[places[:, i] - start] for i, (size, start) in enumerate(zip(sizes, starts, strict=True))]


def _flat_bounds(space: spaces.Space[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(space, spaces.Box):
        with np.errstate(over="ignore"):
            return space.low.reshape(-1).astype(np.float32), space.high.reshape(-1).astype(np.float32)
    size = int(space.nvec.sum()) if isinstance(space, spaces.MultiDiscrete) else math.prod(space.shape or ())
    size = int(space.n) if isinstance(space, spaces.Discrete) else size
    return np.zeros(size, np.float32), np.ones(size, np.float32)


def _is_float(space: Any) -> bool:
    return isinstance(space, spaces.Box) and space.dtype.kind == "f"


def _map_boxes(space: spaces.Space[Any], fn: Callable[[str, Any], Any], path: str = "") -> spaces.Space[Any]:
    """Return a space of the results of `fn(path, leaf)`, with the paths of `named_leaves`."""
    inside = f"{path}/" if path else ""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _map_boxes(part, fn, f"{inside}{key}") for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_map_boxes(part, fn, f"{inside}{index}") for index, part in enumerate(space.spaces)])
    found: spaces.Space[Any] = fn(path, space)
    return found


def _map_named(fn: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Return a tree of the results of `fn(path, leaf)`, with the paths of `named_leaves`."""
    names = iter([name for name, _ in named_leaves(tree)])
    return map_tree(lambda leaf: fn(next(names), leaf), tree)
