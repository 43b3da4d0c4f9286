"""The layout of the transitions of a replay buffer: the nesting, shapes and dtypes of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from corral.core.columns import describe
from corral.core.tree import Tree, map_tree, named_leaves
from corral.errors import ColumnError

if TYPE_CHECKING:
    from corral.data.episodes.rollout import Rollout

Spec = tuple[str, tuple[int, ...]]
"""Dtype and shape of one entry."""


def spec_of(column: NDArray[Any]) -> Spec:
    """Return dtype and shape of one entry of a column `[T, N, ...]`, an array or a tensor."""
    return str(column.dtype).removeprefix("torch."), tuple(column.shape[2:])


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
        named = {"obs": obs} if hasattr(obs, "shape") else dict(named_leaves(obs, "obs"))
        if named.keys() != set(self.paths):
            raise ColumnError(
                f"the replay buffer holds observations with the leaves {list(self.paths)}, and cannot store "
                f"{list(named)}: add rollouts of one observation space."
            )
        return [named[path] for path in self.paths]

    def unflatten(self, leaves: list[Any]) -> Tree:
        """Return the tree of leaves that are in the order of `paths`."""
        return map_tree(lambda index: leaves[index], self.tree)

    def checked(
        self, obs: Tree, columns: Mapping[str, NDArray[Any]], num_rows: int, num_envs: int
    ) -> list[NDArray[Any]]:
        """Return the leaves of observations `[num_rows + 1, num_envs, ...]`, after checking them and columns.

        Raises:
            ColumnError: The observation is nested differently, or the shape or dtype of a column differs.
        """
        leaves = [obs] if self.tree == 0 and hasattr(obs, "shape") else self.leaves(obs)
        given = [(path, leaf, 1, spec) for path, leaf, spec in zip(self.paths, leaves, self.obs, strict=True)]
        for name, column, more, (dtype, entry) in (*given, ("actions", columns["actions"], 0, self.actions)):
            shape = (num_rows + more, num_envs, *entry)
            if column.shape != shape or column.dtype != dtype:
                raise _misfit(name, column, dtype, shape)
        for name in ("rewards", "terminated", "truncated", "valid"):
            if columns[name].shape != (num_rows, num_envs):
                raise _misfit(name, columns[name], str(columns[name].dtype), (num_rows, num_envs))
        return leaves

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


def _misfit(name: str, column: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> ColumnError:
    return ColumnError(
        f"column {name!r} is {describe(column)}, but the replay buffer needs {dtype}{list(shape)}: all rollouts must "
        "come from envs with the same spaces, and all runners must have the same number of envs."
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
