"""What a module with memory and temporal transforms remember of N rows, and the columns that record it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree, map_tree
from corral.errors import CheckpointError
from corral.modules.inference import RowStates
from corral.modules.transforms.rows import RowTransforms


class RowHistory:
    """The states of a module with memory, and what its transforms keep of earlier rows: for sub-envs, or for lanes.

    Learning needs both again, so rollouts have a column for each: `states` `[T + 1, N, ...]`, in which the observations
    were seen, and `stored` `[T + 1, N, ...]`, the observations after the last temporal transform.

    Args:
        memory: States of the module; `None` for a module without memory.
        transforms: Transforms of the module in use, or `None`.

    Attributes:
        has_columns: Whether rollouts have one of the two columns.
    """

    def __init__(self, memory: RowStates | None, transforms: RowTransforms | None) -> None:
        """Keep both parts, which the actor steps."""
        self._memory, self._transforms = memory, transforms
        self._temporal = transforms if transforms is not None and transforms.is_temporal else None
        self.has_columns = memory is not None or self._temporal is not None

    # Columns.

    def allocate(self, num_rows: int) -> dict[str, Tree]:
        """Return the columns, trees of zeros `[num_rows, N, ...]`."""
        columns = {}
        if self._memory is not None:
            columns["states"] = self._memory.allocate(num_rows)
        if self._temporal is not None:
            columns["stored"] = self._temporal.allocate(num_rows)
        return columns

    def get_chosen(self) -> dict[str, Tree]:
        """Return the rows of the columns, trees of `[N, ...]`, in which the latest actions were chosen."""
        rows = {}
        if self._memory is not None:
            rows["states"] = self._memory.before
        if self._temporal is not None:
            rows["stored"] = self._temporal.stored
        return rows

    def get_next(self, obs: Tree, begins: NDArray[np.bool_]) -> dict[str, Tree]:
        """Return the rows of the columns for the next observations, a tree of `[N, ...]`; nothing is remembered.

        Args:
            obs: The observations.
            begins: Where episodes begin, bool `[N]`. There the states are still the last ones of the episode before.
        """
        rows = {}
        if self._memory is not None:
            rows["states"] = self._memory.states
        if self._temporal is not None:
            rows["stored"] = self._temporal.peek(obs, begins)
        return rows

    # Steps.

    def note_actions(self, actions: NDArray[Any], lanes: Any = slice(None)) -> None:
        """Remember the module actions of some lanes, which the next observations follow."""
        if self._memory is not None and self._memory.action_state is not None:
            self._memory.note_actions(actions, lanes)
        if self._temporal is not None:
            self._temporal.note_step(actions, None, lanes)

    def note_rewards(self, rewards: NDArray[Any], lanes: Any = slice(None)) -> None:
        """Remember the rewards of some lanes, which came with the next observations."""
        if self._temporal is not None:
            self._temporal.note_step(None, rewards, lanes)

    def keep(self, acted: NDArray[np.bool_]) -> None:
        """Undo the last step of the memory in the lanes that did not act; bool `[N]` says which did."""
        if self._memory is not None:
            self._memory.keep(acted)

    def resize(self, size: int) -> None:
        """Add lanes at the end, up to `size`, in which no episode has begun."""
        if self._memory is not None:
            self._memory.resize(size)
        if self._transforms is not None:
            self._transforms.resize(size)

    # State, between two rollouts.

    def get_state(self) -> dict[str, Any]:
        """Return a copy of what the next rollout continues from: `states` and `transforms`, or `None` for each."""
        return {
            "states": None if self._memory is None else map_tree(np.copy, self._memory.states),
            "transforms": None if self._transforms is None else self._transforms.get_state(),
        }

    def check_state(self, state: Mapping[str, Any], num_rows: int) -> None:
        """Check a state of `num_rows` rows, without changing anything.

        Raises:
            CheckpointError: It is of another module, or of other transforms.
        """
        states = state.get("states")
        if (self._memory is None) != (states is None):
            kinds = ("with", "without") if states is None else ("without", "with")
            raise CheckpointError(
                f"the module is {kinds[0]} memory, and the state of a runner is of a module {kinds[1]}."
            )
        if self._memory is not None:
            try:
                self._memory.check(states, num_rows)
            except ValueError as error:
                raise CheckpointError(f"the states of the module in a runner: {error}.") from error
        RowTransforms.check(self._transforms, state.get("transforms"))

    def set_state(self, state: Mapping[str, Any], lanes: Any = slice(None)) -> None:
        """Continue from a state, in these lanes."""
        if self._memory is not None:
            self._memory.states = map_tree(np.copy, self._memory.states)
            map_tree(lambda here, saved: here.__setitem__(lanes, saved), self._memory.states, state["states"])
        if self._transforms is not None:
            self._transforms.continue_from(state["transforms"], lanes)
