"""What the transitions of a replay buffer look like: the nesting, shapes and dtypes of its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree, map_tree, named_leaves
from corral.errors import ColumnError

if TYPE_CHECKING:
    from corral.episodes.rollout import Rollout

Spec = tuple[str, tuple[int, ...]]
"""Dtype and shape of one entry."""


def spec_of(column: NDArray[Any]) -> Spec:
    """Return what an entry of a column `[T, N, ...]` looks like."""
    return str(column.dtype), column.shape[2:]


@dataclass(frozen=True)
class Layout:
    """What every rollout of a buffer must look like.

    Attributes:
        num_envs: N.
        tree: The nesting of an observation, with the indices of leaves as its leaves.
        paths: Of the leaves.
        obs: Of the leaves.
        actions: Of an action.
    """

    num_envs: int
    tree: Tree
    paths: tuple[str, ...]
    obs: tuple[Spec, ...]
    actions: Spec

    @classmethod
    def of(cls, rollout: Rollout) -> Layout:
        """Take it from a rollout."""
        named = list(named_leaves(rollout.obs, "obs"))
        counter = iter(range(len(named)))
        return cls(
            num_envs=rollout.num_envs,
            tree=map_tree(lambda _: next(counter), rollout.obs),
            paths=tuple(path for path, _ in named),
            obs=tuple(spec_of(leaf) for _, leaf in named),
            actions=spec_of(rollout.actions),
        )

    def leaves(self, obs: Tree) -> list[NDArray[Any]]:
        """Return the leaves of an observation in the order of `paths`.

        Raises:
            ColumnError: It is nested otherwise.
        """
        if type(self.tree) is int and isinstance(obs, np.ndarray):
            return [obs]
        found: list[NDArray[Any]] = []
        try:
            map_tree(lambda _, leaf: found.append(leaf), self.tree, obs)
        except (KeyError, IndexError, TypeError, ValueError):
            found.clear()
        if not all(isinstance(leaf, np.ndarray) for leaf in found) or len(found) != len(list(named_leaves(obs))):
            names = [path for path, _ in named_leaves(obs, "obs")]
            raise ColumnError(f"the replay buffer holds observations of {list(self.paths)}, and cannot take {names}.")
        return found

    def unflatten(self, leaves: list[Any]) -> Tree:
        """Return the tree of such leaves."""
        if type(self.tree) is int:
            return leaves[0]
        return map_tree(lambda index: leaves[index], self.tree)

    def check(self, name: str, column: NDArray[Any], num_rows: int, spec: Spec) -> None:
        """Refuse a column that does not fit.

        Raises:
            ColumnError: Its shape or dtype differs; both are named.
        """
        shape = (num_rows, self.num_envs, *spec[1])
        if column.shape != shape or column.dtype != spec[0]:
            raise ColumnError(
                f"column {name!r} is {describe(column)}, but the replay buffer takes {spec[0]}{list(shape)}: all its "
                "rollouts must come from envs with the same spaces, and as many of them in each runner."
            )

    def to_state(self) -> dict[str, Any]:
        """Return it as plain data; keys of observations may be other than strings, so they are in lists."""
        return {
            "num_envs": self.num_envs,
            "tree": _plain_tree(self.tree),
            "paths": list(self.paths),
            "obs": [[dtype, list(shape)] for dtype, shape in self.obs],
            "actions": [self.actions[0], list(self.actions[1])],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Layout:
        """Take it from what `to_state` gave."""
        return cls(
            num_envs=int(state["num_envs"]),
            tree=_tree_of(state["tree"]),
            paths=tuple(state["paths"]),
            obs=tuple((dtype, tuple(shape)) for dtype, shape in state["obs"]),
            actions=(state["actions"][0], tuple(state["actions"][1])),
        )


def _plain_tree(tree: Tree) -> Any:
    if isinstance(tree, dict):
        return ["dict", list(tree), [_plain_tree(part) for part in tree.values()]]
    if isinstance(tree, tuple):
        return ["tuple", [_plain_tree(part) for part in tree]]
    return tree


def _tree_of(plain: Any) -> Tree:
    if isinstance(plain, int):
        return plain
    if plain[0] == "dict":
        return {key: _tree_of(part) for key, part in zip(plain[1], plain[2], strict=True)}
    return tuple(_tree_of(part) for part in plain[1])
