"""The distribution of nested actions: one part for each leaf of a Dict or Tuple space."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.modules.distributions import ActionDistribution, Categorical, Data, FloatArray, action_distribution


class Joint(ActionDistribution):
    """Distribution of nested actions. A module action is one row with the actions of all parts, one after another.

    Independent parts have the sum of their entropies and log-probabilities. With autoregressive parts, the inputs of a
    part depend on the value of the nearest Discrete part before it, its parent: `dist_inputs` hold inputs of the part
    for each value of the parent. So `p(a, b, ...) = p(a) p(b | a) ...`, and entropy and KL divergence are exact,
    without another pass through the network. The most likely action is the one whose parts are most likely one after
    another.

    Attributes:
        parts: Distribution of each leaf of the space, in the order of the leaves.
        parents: Index of the parent of each part, or `None`.
    """

    def __init__(self, space: spaces.Space[Any], action_bounds: str = "clip", *, autoregressive: bool = False) -> None:
        """Make the parts.

        Args:
            space: A Dict or Tuple, nested in any way.
            action_bounds: `"clip"` or `"squash"`, for Box parts.
            autoregressive: Whether parts depend on the parts before them.

        Raises:
            ConfigError: No distribution fits a leaf.
        """
        self._tree = space_tree(space)
        self.parts = [action_distribution(leaf, action_bounds) for leaf in leaves(self._tree)]
        self.parents: list[int | None] = []
        latest: int | None = None
        for index, part in enumerate(self.parts):
            self.parents.append(latest if autoregressive else None)
            latest = index if isinstance(part, Categorical) else latest
        self._rows = [1 if parent is None else self.parts[parent].num_inputs for parent in self.parents]
        self._inputs = _slices([rows * part.num_inputs for rows, part in zip(self._rows, self.parts, strict=True)])
        self._noise = _slices([part.num_noise for part in self.parts])
        self._actions = _slices([math.prod(part.action_shape) for part in self.parts])
        self.num_inputs, self.num_noise = self._inputs[-1].stop, self._noise[-1].stop
        self.num_uniform = sum(part.num_uniform for part in self.parts)
        self.action_shape = (self._actions[-1].stop,)
        self.action_dtype = np.result_type(np.int64, *(part.action_dtype for part in self.parts))
        if self.action_dtype.kind == "f":
            self.action_dtype = np.dtype(np.float32)  # it holds the numbers of discrete values exactly
        tables = zip(self.parts, self._rows, self._inputs, strict=True)
        self.log_std_columns = np.concatenate(
            [
                part.log_std_columns + inputs.start + row * part.num_inputs
                for part, rows, inputs in tables
                for row in range(rows)
            ]
        )

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return np.concatenate([part.noise(rng, shape) for part in self.parts], -1)

    def sample(self, dist_inputs: Any, noise: Any) -> Any:
        return self._choose(
            dist_inputs, lambda index, inputs: self.parts[index].sample(inputs, noise[:, self._noise[index]])
        )

    def mode(self, dist_inputs: Any) -> Any:
        return self._choose(dist_inputs, lambda index, inputs: self.parts[index].mode(inputs))

    def _choose(self, dist_inputs: Any, choose: Callable[[int, Any], Any]) -> Any:
        """Return module actions whose parts a function of index and inputs chooses, one after another."""
        chosen: list[Any] = []
        for index in range(len(self.parts)):
            chosen.append(choose(index, self._inputs_of(dist_inputs, index, chosen)))
        return self._join(chosen)

    def _inputs_of(self, dist_inputs: Any, index: int, chosen: list[Any]) -> Any:
        """Return the inputs `[B, n]` of a part, for the values of the parts before it."""
        inputs, parent = dist_inputs[:, self._inputs[index]], self.parents[index]
        if parent is None:
            return inputs
        table = inputs.reshape(inputs.shape[0], self._rows[index], -1)
        if not isinstance(table, Tensor):
            return table[np.arange(len(table)), chosen[parent]]
        rows = chosen[parent].reshape(-1, 1, 1).expand(-1, 1, table.shape[2])
        return table.gather(1, rows).squeeze(1)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return self._join([part.random(rng, batch_size) for part in self.parts])

    def _join(self, chosen: list[Data]) -> Data:
        flat: Any = [actions.reshape(actions.shape[0], -1) for actions in chosen]
        joined: Any = torch.cat(flat, -1) if isinstance(flat[0], Tensor) else np.concatenate(flat, -1)
        # Tensors are only for exports, which do not store the actions.
        found: Data = joined if isinstance(flat[0], Tensor) else joined.astype(self.action_dtype, copy=False)
        return found

    def _split(self, actions: Any) -> list[Any]:
        """Return the module actions of the parts, numbers of discrete values as integers."""
        found = []
        for part, columns in zip(self.parts, self._actions, strict=True):
            own = actions[:, columns].reshape(actions.shape[0], *part.action_shape)
            if part.action_dtype.kind != "f":
                own = own.long() if isinstance(own, Tensor) else own.astype(part.action_dtype)
            found.append(own)
        return found

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        pairs = zip(self.parts, self._split(actions), strict=True)
        logp: FloatArray = np.sum([part.random_logp(own) for part, own in pairs], axis=0, dtype=np.float32)
        return logp

    def to_env(self, actions: Any) -> Tree:
        """Convert module actions `[B, D]` to env actions, a tree of `[B, ...]` nested like the space."""
        parts = (part.to_env(own) for part, own in zip(self.parts, self._split(actions), strict=True))
        return map_tree(lambda _: next(parts), self._tree)

    def from_env(self, actions: Tree) -> NDArray[Any]:
        """Convert env actions, a tree of `[B, ...]`, to module actions `[B, D]`."""
        return self._join([part.from_env(own) for part, own in zip(self.parts, leaves(actions), strict=True)])

    def from_rllib(self, actions: Tree) -> NDArray[Any]:
        """Convert recorded actions of RLlib, a tree of `[B, ...]`, to module actions `[B, D]`."""
        return self._join([part.from_rllib(own) for part, own in zip(self.parts, leaves(actions), strict=True)])

    def drawn_inputs(self, dist_inputs: Tensor, uniform: Tensor, spread: Tensor) -> Tensor:
        """Return inputs whose mode is a sample; of a part, all rows get the same noise, because one of them counts."""
        return self._change(dist_inputs, uniform, lambda part, inputs, own: part.drawn_inputs(inputs, own, spread))

    def random_inputs(self, dist_inputs: Tensor, uniform: Tensor) -> Tensor:
        """Return inputs whose mode is drawn uniformly."""
        return self._change(dist_inputs, uniform, lambda part, inputs, own: part.random_inputs(inputs, own))

    def _change(self, dist_inputs: Tensor, uniform: Tensor, change: Callable[..., Tensor]) -> Tensor:
        """Return the inputs after a function of a part, its inputs and its uniform numbers changed each row."""
        numbers = torch.split(uniform, [part.num_uniform for part in self.parts], dim=-1)
        found = []
        for part, columns, own in zip(self.parts, self._inputs, numbers, strict=True):
            found += [change(part, row, own) for row in torch.split(dist_inputs[:, columns], part.num_inputs, dim=-1)]
        return torch.cat(found, -1)

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        total, chosen = torch.zeros_like(dist_inputs[:, 0]), self._split(actions)
        for index, part in enumerate(self.parts):
            total = total + part.logp(self._inputs_of(dist_inputs, index, chosen), chosen[index])
        return total

    def inside_bounds(self, actions: Tensor) -> Tensor:
        parts = [
            part.inside_bounds(actions[:, columns]) for part, columns in zip(self.parts, self._actions, strict=True)
        ]
        return torch.cat(parts, -1)

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return self._expected(dist_inputs, lambda part, tables: part.entropy(tables[0]), dist_inputs)

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        return self._expected(dist_inputs, lambda part, tables: part.kl(*tables), dist_inputs, other_inputs)

    def _expected(
        self, dist_inputs: Tensor, function: Callable[[ActionDistribution, list[Tensor]], Tensor], *others: Tensor
    ) -> Tensor:
        """Return the sum over the parts of the expectation of a function over the values of the parent.

        Args:
            dist_inputs: Parameters of the distribution of the values, `[B, D]`.
            function: Function of a part and its inputs, `[K, n]` for each of `others`, that returns `[K]`.
            others: Parameters `[B, D]` whose parts the function gets.
        """
        batch_size = dist_inputs.shape[0]
        marginals: dict[int, Tensor] = {}  # probabilities `[B, n]` of the values of Discrete parts
        total = torch.zeros_like(dist_inputs[:, 0])
        for index, (part, parent, rows) in enumerate(zip(self.parts, self.parents, self._rows, strict=True)):
            columns = self._inputs[index]
            tables = [other[:, columns].reshape(batch_size * rows, part.num_inputs) for other in others]
            values = function(part, tables).reshape(batch_size, rows)
            weights = torch.ones_like(values) if parent is None else marginals[parent]
            total = total + (weights * values).sum(-1)
            if isinstance(part, Categorical):
                table = dist_inputs[:, columns].reshape(batch_size, rows, part.num_inputs).softmax(-1)
                marginals[index] = (weights.unsqueeze(-1) * table).sum(1)
        return total


def _slices(widths: list[int]) -> list[slice]:
    ends = np.cumsum(widths).tolist()
    return [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]
