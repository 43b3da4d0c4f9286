"""The layout of the transitions of a replay buffer: the nesting, shapes and dtypes of its columns."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Return dtype and shape of one entry of a column `[T, N, ...]`."""
    return str(column.dtype), column.shape[2:]


@dataclass(frozen=True)
class Layout:
    """Layout that all rollouts of a buffer must have.

    Attributes:
        num_envs: Number of sub-envs N of a rollout.
        tree: Nesting of an observation, with the indices of leaves as its leaves.
        paths: Paths of the leaves.
        obs: Specs of the leaves.
        actions: Spec of an action.
    """

    num_envs: int
    tree: Tree
    paths: tuple[str, ...]
    obs: tuple[Spec, ...]
    actions: Spec

    @classmethod
    def of(cls, rollout: Rollout) -> Layout:
        """Return the layout of a rollout."""
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
            ColumnError: The observation is nested differently.
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
            raise ColumnError(
                f"the replay buffer holds observations with the leaves {list(self.paths)}, and cannot store {names}: "
                "add rollouts of one observation space."
            )
        return found

    def unflatten(self, leaves: list[Any]) -> Tree:
        """Return the tree of leaves that are in the order of `paths`."""
        if type(self.tree) is int:
            return leaves[0]
        return map_tree(lambda index: leaves[index], self.tree)

    def check(self, columns: Iterable[tuple[str, NDArray[Any], Spec]], num_rows: int) -> None:
        """Check columns.

        Args:
            columns: Name, array, and spec of the entries of each column.
            num_rows: Number of rows that they must have.

        Raises:
            ColumnError: The shape or dtype of a column differs; both are named.
        """
        for name, column, (dtype, entry) in columns:
            shape = (num_rows, self.num_envs, *entry)
            if column.shape != shape or column.dtype != dtype:
                raise ColumnError(
                    f"column {name!r} is {describe(column)}, but the replay buffer needs {dtype}{list(shape)}: all "
                    "rollouts must come from envs with the same spaces, and all runners must have the same number of "
                    "envs."
                )

    def to_state(self) -> dict[str, Any]:
        """Return the layout as plain data. Keys of observations are in lists, as they need not be strings."""
        return {
            "num_envs": self.num_envs,
            "tree": _plain_tree(self.tree),
            "paths": list(self.paths),
            "obs": [[dtype, list(shape)] for dtype, shape in self.obs],
            "actions": [self.actions[0], list(self.actions[1])],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Layout:
        """Return a layout from a state that `to_state` returned."""
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
