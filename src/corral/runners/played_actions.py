"""The actions of unfinished episodes since their resets, over the rollouts that hold them.

A restored runner plays them again, see `envs/replay.py`. What is kept of a rollout is copied once, when the rollout is
complete; which actions belong to unfinished episodes is found out when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree, leaves, map_tree
from corral.envs.replay import MAX_STEPS

TOO_LONG = f"its episode has more than the {MAX_STEPS} steps that are played again"
NOT_SAVED = "the actions of its episode were not saved"


class PlayedActions:
    """The latest rows of actions of a runner, as many as `MAX_STEPS` or as its last rollout has.

    Attributes:
        parts: For each rollout its actions, of a kind that `get` can convert, the column `valid`, bool `[T, N]`, and
            where episodes ended, bool `[T, N]`; a `Stepping` appends them, and drops the first ones.
        num_rows: Rows of all parts.
        is_whole: Whether `parts` begin where all envs were reset.
    """

    def __init__(self) -> None:
        """Begin without actions."""
        self.forget()

    def forget(self) -> None:
        """Begin again, where all envs are reset."""
        self.parts: deque[tuple[Any, NDArray[np.bool_], NDArray[np.bool_]]] = deque()
        self.num_rows, self.is_whole = 0, True
        self._none_known: list[None] = []  # for each sub-env, if nothing is known of what `parts` follow

    def get(self, *, same_step: bool, convert: Callable[[Any, int], Tree]) -> list[Tree | None]:
        """Return the actions of each sub-env since its reset, a tree of `[K, ...]`; `None` if they are too many.

        Args:
            same_step: Whether sub-envs are reset in the step that ends an episode.
            convert: Function that returns the actions of a part as a tree of `[T, N, ...]`, given their number of rows.
        """
        if not self.parts:
            return [*self._none_known]
        actions = [convert(part, len(valid)) for part, valid, _ in self.parts]
        valid, done = (np.concatenate([part[i] for part in self.parts]) for i in (1, 2))
        joined = map_tree(lambda *leaf: np.concatenate(leaf), *actions)
        # A row that does not count has reset the sub-env, or its sub-env has failed and is a new one.
        begins = ~valid | done if same_step else ~valid
        found: list[Tree | None] = []
        for env_index in range(valid.shape[1]):
            (rows,) = begins[:, env_index].nonzero()
            start = int(rows[-1]) + 1 if len(rows) else 0
            is_known = (len(rows) or self.is_whole) and len(valid) - start <= MAX_STEPS
            found.append(
                map_tree(lambda leaf, i=env_index, start=start: leaf[start:, i].copy(), joined) if is_known else None
            )
        return found

    def set(self, actions: Sequence[Tree | None]) -> None:
        """Continue from what `get` returned for episodes that continue; an env may do so without its actions."""
        self.forget()
        known = [tree for tree in actions if tree is not None]
        self.is_whole = 0 < len(known) == len(actions)
        if not known:
            self._none_known = [None] * len(actions)
            return
        # Where some are not known, one row more, so that in all others a row comes before the actions.
        self.num_rows = num_rows = max(len(leaves(tree)[0]) for tree in known) + (not self.is_whole)
        lengths = np.array([num_rows if tree is None else len(leaves(tree)[0]) for tree in actions])
        nothing = map_tree(lambda leaf: leaf[:0], known[0])

        def pad(*leaf: NDArray[Any]) -> NDArray[Any]:
            return np.stack(
                [
                    np.concatenate([np.zeros_like(one, shape=(num_rows - len(one), *one.shape[1:])), one])
                    for one in leaf
                ],
                1,
            )

        valid = np.arange(num_rows)[:, None] >= num_rows - lengths
        trees = [nothing if tree is None else tree for tree in actions]
        self.parts.append((map_tree(pad, *trees), valid, np.zeros_like(valid)))
