"""Whether an exported file acts as its policy does, on observations that the policy has met."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from corral.core.tree import Tree, leaves, map_tree, named_leaves, num_rows
from corral.errors import ExportError, MissingPackageError
from corral.runs.policies.export import INPUT, STATE, check_suffix
from corral.runs.policies.policy import Policy

MAX_ROWS = 4096
TOLERANCE = 1e-5
"""Largest difference of floats, as a part of the largest number of an output, and of 1 at least."""
MAX_DIFFERENT_SHARE = 1e-3
"""Largest share of other Discrete actions: where two are as good as each other, rounding decides."""

Arrays = list[NDArray[Any]]


class WatchedPolicy(Policy):
    """A policy that keeps the first `MAX_ROWS` rows that it answers.

    Attributes:
        rows: For each call, the inputs of an exported file, and its expected outputs: env actions and, with memory,
            the next states, arrays `[B, ...]`.
        num_rows: Number of these rows.
    """

    def __init__(self, policy: Policy) -> None:
        """Take the module and the transforms of a policy."""
        super().__init__(policy.module, pipeline=policy.pipeline)
        self.rows: list[tuple[tuple[Tree, ...], Arrays]] = []
        self.num_rows = 0

    def act(self, obs: Tree, states: Tree = None, *, explore: bool = False) -> tuple[Any, Tree]:
        actions, after = super().act(obs, states, explore=explore)
        if self.num_rows < MAX_ROWS:
            self.num_rows += num_rows(obs)
            self.rows.append((self._inputs(obs, states), self._outputs_of(actions, after)))
        return actions, after

    def _inputs(self, obs: Tree, states: Tree) -> tuple[Tree, ...]:
        obs = map_tree(lambda space, leaf: np.array(leaf, space.dtype), self._spaces, obs)
        of_module, of_transforms = self._split(states) if self.has_memory else (None, None)
        if of_transforms is not None:
            assert self.pipeline is not None
            obs, _ = self.pipeline.to_store(
                obs, *(of_transforms[name] for name in ("memories", "begins", "actions", "rewards"))
            )
        return (obs,) if of_module is None else (obs, map_tree(np.array, of_module))

    def _outputs_of(self, actions: Tree, after: Tree) -> Arrays:
        of_module = self._split(after)[0] if self.has_memory else None
        return [np.array(leaf) for leaf in leaves(actions if of_module is None else (actions, of_module))]


class ExportCheck(NamedTuple):
    """How far an exported file is from its policy.

    Attributes:
        num_rows: Number of observations.
        num_different: Number of observations with another Discrete action.
        max_difference: Largest difference of floats, as a part of the largest number of an output, and of 1 at least;
            `None` if no output is a float.
    """

    num_rows: int
    num_different: int
    max_difference: float | None

    @property
    def is_close(self) -> bool:
        """Whether the differences are no more than rounding."""
        floats_are = self.max_difference is None or self.max_difference <= TOLERANCE
        return floats_are and self.num_different <= MAX_DIFFERENT_SHARE * self.num_rows

    def __str__(self) -> str:
        """Return what was compared, on one line."""
        if self.max_difference is None:
            return f"{self.num_rows:,} observations, {self.num_different} other actions"
        others = f", {self.num_different} other actions" if self.num_different else ""
        return f"{self.num_rows:,} observations, largest difference {self.max_difference:.1e}{others}"


def check_export(file: Path, policy: WatchedPolicy) -> ExportCheck:
    """Compare an exported file with its policy on all past observations, and return the differences.

    The file is run on one row, and on all others at once, since its batch size is free.

    Args:
        file: The `.onnx` or `.pt2` file.
        policy: The policy, after it has answered some observations.

    Raises:
        MissingPackageError: onnxruntime is missing.
        ExportError: The file gives other actions, shapes or dtypes, or nothing was answered.
    """
    if not policy.rows:
        raise ExportError("there is no observation to check the exported file with: play or record an episode.")
    run = _onnx_runner(file) if check_suffix(file) == ".onnx" else _pt2_runner(file)
    inputs = map_tree(lambda *parts: np.concatenate(parts), *(inputs for inputs, _ in policy.rows))
    expected = [np.concatenate(parts) for parts in zip(*(outputs for _, outputs in policy.rows), strict=True)]
    size, differences, different = len(expected[0]), list[float](), np.zeros(len(expected[0]), np.bool_)
    for rows in (slice(0, 1), slice(1, size)):
        found = run(map_tree(lambda leaf, rows=rows: leaf[rows], inputs)) if rows.start < size else []
        for there, whole in zip(found, expected, strict=bool(found)):
            here = whole[rows]
            if (there.shape, there.dtype) != (here.shape, here.dtype):
                raise ExportError(
                    f"the exported file gives {there.dtype}{list(there.shape)}, and its policy "
                    f"{here.dtype}{list(here.shape)}."
                )
            if np.issubdtype(here.dtype, np.floating):
                scale = max(1.0, float(np.abs(whole).max(initial=0.0)))
                differences.append(float(np.abs(there - here).max(initial=0.0)) / scale)
            else:
                different[rows] |= (there != here).reshape(len(here), -1).any(1)
    check = ExportCheck(size, int(different.sum()), float(np.max(differences)) if differences else None)
    if not check.is_close:
        raise ExportError(
            f"the exported file does not act as its policy: {check}. The policy(obs) of "
            f"{type(policy.module).__name__}, or a transform of yours, computes something else when torch traces it."
        )
    return check


def _onnx_runner(file: Path) -> Callable[[Sequence[Tree]], Arrays]:
    """Return what runs an ONNX file on its inputs, as trees of arrays."""
    if find_spec("onnxruntime") is None:
        raise MissingPackageError("a check of .onnx needs onnxruntime: run `pip install 'corral[onnx]'`.")
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    names = json.loads(session.get_modelmeta().custom_metadata_map["outputs"])

    def run(inputs: Sequence[Tree]) -> Arrays:
        named = [pair for name, tree in zip((INPUT, STATE), inputs, strict=False) for pair in named_leaves(tree, name)]
        found: Arrays = session.run(names, dict(named))
        return found

    return run


def _pt2_runner(file: Path) -> Callable[[Sequence[Tree]], Arrays]:
    """Return what runs a program of torch on its inputs, as trees of arrays."""
    program = torch.export.load(str(file)).module()
    return lambda inputs: [leaf.numpy() for leaf in leaves(program(*map_tree(torch.from_numpy, tuple(inputs))))]
