"""Observations that are stacks of the last k frames; a replay buffer stores only the newest frame of each stack."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corral.data.replay.layout import Layout
from corral.errors import ColumnError, ConfigError

MAX_FRAMES = 255  # ages are uint8


class FrameStacks:
    """Splits stacks into frames, and finds the number of older frames of each observation that are in the rows above.

    This number is called the age of the observation: 0 for the first observation of an episode, whose older frames are
    padding, and at most k - 1. Ages are found by comparing the stacks themselves. Stacks that could not be put together
    again exactly are refused.

    Attributes:
        num_frames: Number of frames k of a stack.
        axes: Axis of the frames in an observation, for each leaf.

    Args:
        num_frames: Number of frames k, from 2 to `MAX_FRAMES`.
        layout: Layout of the observations.

    Raises:
        ConfigError: Neither the first nor the last axis of a leaf has length k.
    """

    def __init__(self, num_frames: int, layout: Layout) -> None:
        """Find the axes."""
        self.num_frames, self._paths = num_frames, layout.paths
        self.axes: list[int] = []
        self.frame_shapes: list[tuple[int, ...]] = []
        for path, (_, shape) in zip(layout.paths, layout.obs, strict=True):
            candidates = [axis for axis in (0, len(shape) - 1) if shape and shape[axis] == num_frames]
            if not candidates:
                raise ConfigError(
                    f"replay buffer: frame_stack={num_frames}, but the first and the last axis of {path!r}, of shape "
                    f"{list(shape)}, are not of length {num_frames}: set frame_stack to the length of the stacks that "
                    "the env gives, or to 1 if it gives none."
                )
            self.axes.append(candidates[0])
            self.frame_shapes.append((*shape[: candidates[0]], *shape[candidates[0] + 1 :]))

    def front(self, leaves: list[NDArray[np.generic]], num_axes: int) -> list[NDArray[np.generic]]:
        """Return views of leaves with the frames on axis `num_axes`: `[T, N, k, ...]` for 2."""
        return [np.moveaxis(leaf, num_axes + axis, num_axes) for leaf, axis in zip(leaves, self.axes, strict=True)]

    def back(self, index: int, stacks: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return stacks `[B, k, ...]` of a leaf with the frames on the axis that the observations have them on."""
        if not self.axes[index]:
            return stacks
        last = np.empty((len(stacks), *stacks.shape[2:], self.num_frames), stacks.dtype)
        for frame in range(self.num_frames):  # several times faster than moving the axis in one operation
            last[..., frame] = stacks[:, frame]
        return last

    def ages(
        self,
        leaves: list[NDArray[np.generic]],
        first: NDArray[np.generic],
        padding: str | None,
        in_use: NDArray[np.bool_] | None = None,
    ) -> tuple[NDArray[np.uint8], str | None]:
        """Return the ages of observations.

        Args:
            leaves: Observations `[T + 1, N, ...]`.
            first: Ages of row 0, `[N]`.
            padding: Kind of padding so far; see `StackedObservations`.
            in_use: Which observations count, bool `[T + 1, N]`; `None` is all.

        Returns:
            Ages, uint8 `[T + 1, N]`, and the kind of padding.

        Raises:
            ColumnError: A stack neither continues the stack of the row before it nor begins an episode.
        """
        num_rows, num_envs = leaves[0].shape[:2]
        starts = np.zeros((num_rows, num_envs), np.bool_)
        for leaf, axis in zip(leaves, self.axes, strict=True):
            starts[1:] |= ~self._overlap(leaf, axis)
        if in_use is not None:
            starts &= in_use
        stacks = self.front(leaves, 2)
        if starts.any():
            padding = self._padding_of([stack[starts] for stack in stacks], starts, padding)
        rows = np.arange(num_rows)[:, None]
        # The row on which the episode began; negative if row 0 continues an episode.
        began = np.maximum.accumulate(np.where(starts, rows, -np.asarray(first, np.int64)), axis=0)
        return np.minimum(rows - began, self.num_frames - 1).astype(np.uint8), padding

    def _overlap(self, leaf: NDArray[np.generic], axis: int) -> NDArray[np.bool_]:
        """Return where the older frames of an observation are the newer frames of the row before, bool `[T, N]`."""
        k, shape = self.num_frames, leaf.shape[:2]
        if not axis:
            return _equal(leaf[1:, :, :-1], leaf[:-1, :, 1:], 2)
        # The frames of an element are adjacent, and are compared with the frames of the row before, shifted by one.
        # This also compares the newest frame of one element with the oldest frame of the next, which is ignored.
        flat = leaf.reshape(*shape, -1)
        equal = flat[1:, :, :-1] == flat[:-1, :, 1:]
        equal[..., k - 1 :: k] = True
        result: NDArray[np.bool_] = equal.all(axis=2)
        return result

    def _padding_of(
        self, firsts: list[NDArray[np.generic]], starts: NDArray[np.bool_], before: str | None
    ) -> str | None:
        """Return the kind of padding of first observations, leaves `[M, k, ...]`."""
        repeats, zeros = np.ones(len(firsts[0]), np.bool_), np.ones(len(firsts[0]), np.bool_)
        for stack in firsts:
            repeats &= _equal(stack[:, :-1], stack[:, -1:], 1)
            zeros &= _equal(stack[:, :-1], np.zeros((), stack.dtype), 1)
        kinds = [("reset", repeats), ("zero", zeros)]
        fitting = [name for name, fits in kinds if fits.all() and before in (None, name)]
        if not fitting:
            odd = np.flatnonzero(~(repeats if before == "reset" else zeros if before else repeats | zeros))
            where = np.argwhere(starts)[odd[0] if len(odd) else 0].tolist()
            raise ColumnError(
                f"replay buffer: frame_stack={self.num_frames}, but the observations {list(self._paths)} are not "
                f"stacks of the last {self.num_frames} frames: the observation of row {where[0]} and sub-env "
                f"{where[1]} neither continues the row before it nor begins an episode as FrameStackObservation does, "
                "which always pads with the first frame or always with zeros. Stack frames with that wrapper, or set "
                "frame_stack=1."
            )
        return fitting[0] if len(fitting) == 1 else before

    def check_final(self, final: list[NDArray[np.generic]], before: list[NDArray[np.generic]]) -> None:
        """Refuse final observations `[M, k, ...]` that do not continue the observations of their steps."""
        for stack, seen in zip(final, before, strict=True):
            if not _equal(stack[:, :-1], seen[:, 1:], 0):
                raise ColumnError(
                    f"replay buffer: frame_stack={self.num_frames}, but a final observation of {list(self._paths)} "
                    "does not continue the observation before it. Stack frames with FrameStackObservation, or set "
                    "frame_stack=1."
                )


def _equal(left: NDArray[np.generic], right: NDArray[np.generic], num_axes: int) -> NDArray[np.bool_]:
    """Return where two arrays are equal, by index of their first `num_axes` axes."""
    equal = left == right
    result: NDArray[np.bool_] = equal.all(axis=tuple(range(num_axes, equal.ndim)))
    return result
